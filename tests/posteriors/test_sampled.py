"""The sampled posterior beside dense linear algebra: its law, its tuning, and what it notices by itself."""

from __future__ import annotations

import pytest
import torch
from problems import FittedOnce, generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.posteriors.sampled.tuning import with_floor
from laplace_plus.priors import Groups

TIGHT = lp.CGSolver(tolerance=1e-9)

pytestmark = pytest.mark.filterwarnings("ignore:Tuning by samples has not converged. random vectors")


class TestSampledLaplace(FittedOnce):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.SampledLaplace(model, likelihood, **options)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def linear():
    """A linear model, of which the tangent model is the model itself."""
    torch.manual_seed(0)
    x = randn(40, 3)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.3 * randn(40, 1, seed=1)
    return nn.Linear(3, 1).double(), [(a, b) for a, b in zip(x.split(11), y.split(11), strict=True)]


def deep(classes=3):
    torch.manual_seed(0)
    x = randn(30, 2)
    y = torch.randint(classes, (30,), generator=generator(1))
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, classes)).double()
    return model, [(a, b) for a, b in zip(x.split(8), y.split(8), strict=True)]


@pytest.fixture(scope="module")
def fitted():
    """A posterior that no test changes."""
    model, data = deep()
    return lp.SampledLaplace(model, "classification", n_samples=2).fit(data), data


def dense(model, likelihood, data, **options):
    return lp.Full(model, likelihood, **options).fit(data)


# -- the law of the samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["linear", "deep"])
def test_the_samples_covariance_is_the_inverse_precision(problem):
    model, data = linear() if problem == "linear" else deep()
    likelihood = lp.Gaussian(0.5) if problem == "linear" else "classification"
    options = {"prior_precision": torch.tensor([2.0] if problem == "linear" else [0.5, 3.0]), "temperature": 0.7}
    k = 300
    posterior = lp.SampledLaplace(
        model, likelihood, n_samples=k, solver=lp.CGSolver(tolerance=1e-8), chunk_size=k, **options
    ).fit(data, generator=generator())
    exact = dense(model, likelihood, data, **options).covariance_matrix()
    z = posterior.samples - posterior.mean
    error = (exact.square() + torch.outer(exact.diagonal(), exact.diagonal())).div(k).sqrt()
    assert ((z.T @ z / k - exact).abs() <= 4 * error).all()
    assert (z.mean(0).abs() <= 4 * (exact.diagonal() / k).sqrt()).all()
    report = posterior.report
    assert report.converged and float(report.residual.max()) < 2e-8
    assert abs(report.energy[0] - 1) < 4 * report.energy[1]


def test_the_effective_dimension_is_that_of_the_dense_matrices():
    model, data = deep()
    posterior = lp.SampledLaplace(model, "classification", n_samples=100, chunk_size=100).fit(
        data, generator=generator()
    )
    full = dense(model, "classification", data)
    exact = posterior.n_parameters - full.covariance_matrix().diagonal().sum()  # the prior precision is 1
    found = posterior.effective_dimension()
    assert abs(float(found.value - exact)) < 4 * float(found.sem)
    posterior.fit_prior_precision(structure="layerwise", max_steps=1, tolerance=10)  # at the precision of the fit
    (by_layer,) = posterior.tuning.steps
    variances = torch.stack([full.variance()[:12].sum(), full.variance()[12:].sum()])
    expected = torch.tensor([12.0, 15.0], dtype=torch.float64) - variances
    assert ((by_layer.effective_dimension - expected).abs() < 4 * by_layer.sem).all()


def test_predictions_are_those_of_the_samples():
    model, data = deep()
    posterior = lp.SampledLaplace(model, "classification", n_samples=5).fit(data, generator=generator())
    x = data[0][0][:4]
    vector = posterior.network.vector()
    J = torch.func.jacrev(lambda v: posterior.network(x, posterior.network.substitute(v)))(vector)
    pushed = torch.einsum("bcp,kp->kbc", J, posterior.samples - posterior.mean)
    covariance = torch.einsum("kbc,kde->bcde", pushed, pushed) / 5
    mean, joint = posterior.functional_posterior(x, joint=True)
    torch.testing.assert_close(mean, posterior.network.forward(x))
    torch.testing.assert_close(joint, covariance)
    own = torch.einsum("bcbe->bce", covariance)
    torch.testing.assert_close(posterior.functional_posterior(x).covariance, own)
    diagonal = own.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(posterior.functional_posterior(x, outputs="diagonal").covariance, diagonal)
    some = posterior.functional_posterior(x, outputs=[2, 0])
    torch.testing.assert_close(some.covariance, own[:, [2, 0]][..., [2, 0]])
    torch.testing.assert_close(some.mean, mean[:, [2, 0]])
    probit = (mean / (1 + torch.pi / 8 * diagonal).sqrt()).softmax(-1)
    torch.testing.assert_close(posterior.predictive(x, link="probit").mean, probit)
    sampled = posterior.predictive(x, link="mc", n_samples=4000, generator=generator()).mean
    draws = torch.einsum("sk,kbc->sbc", randn(4000, 5, seed=9), pushed) / 5**0.5
    torch.testing.assert_close(sampled, (mean + draws).softmax(-1).mean(0), rtol=0, atol=0.02)


@pytest.mark.filterwarnings("ignore:The samples' residuals")  # which says so of descent
@pytest.mark.parametrize(
    ("solver", "size"),
    [("cg", 60), *[pytest.param(*case, marks=pytest.mark.slow) for case in (("cg", 16), ("sgd", 60), ("sgd", 16))]],
)
def test_sixty_points_are_enough_for_every_solver(solver, size):
    """``E[zᵀ H z] = P`` for the exact H. Descent had given .002 P, as it began at zero and took ten steps.

    Conjugate gradients show what descent adds, since their samples are of the same draws: at most a hundredth.
    """
    torch.manual_seed(0)
    x = randn(60, 1)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    data = list(zip(x.split(size), x.sin().split(size), strict=True))
    posterior, tight = (
        lp.SampledLaplace(model, "regression", n_samples=16, solver=one).fit(data, generator=generator())
        for one in (solver, TIGHT)
    )
    assert posterior.report.converged or solver == "sgd"
    for precision in (1.0, 10.0):  # the second from samples of the first
        posterior.prior_precision = tight.prior_precision = precision
        H = dense(model, "regression", data, prior_precision=precision).precision_matrix()
        z, exact = posterior.samples - posterior.mean, tight.samples - tight.mean
        energy, expected = ((one @ H * one).sum(1).mean() / posterior.n_parameters for one in (z, exact))
        assert abs(float(expected) - 1) < 4 * (2 / z.numel()) ** 0.5
        assert abs(float(energy - expected)) < 0.01
        wrong = (((z - exact) @ H * (z - exact)).sum(1) / (z @ H * z).sum(1)).sqrt()
        assert (wrong <= 1.001 * posterior.report.residual + 1e-9).all(), (
            "a bound of the error in the posterior's units"
        )


@pytest.mark.parametrize("precision", [1000.0, 20000.0])
def test_few_data_are_felt_among_many_parameters(precision):
    """The prior's draw, of P entries, hid errors of .3 and .5 of the outputs: of what 4 or 1 parameters are worth."""
    x = randn(6, 8000, seed=3).float()
    model = nn.Linear(8000, 1, bias=False)
    posterior = lp.SampledLaplace(model, lp.Gaussian(1.0), n_samples=8, prior_precision=precision)
    posterior.fit([(x, x[:, :1])], generator=generator())
    draws, features = posterior.state.draws, x.double() / precision**0.5
    b = draws.prior.double() + draws.data.double() / precision**0.5
    wanted = torch.linalg.solve(torch.eye(6).double() + features @ features.T, features @ b.T)
    found = x.double() @ (posterior.samples - posterior.mean).double().T
    assert posterior.report.converged and (found - wanted).norm() < 0.01 * wanted.norm()


def test_more_samples_than_were_solved_for_have_their_covariance():
    model, data = linear()
    posterior = lp.SampledLaplace(model, "regression", n_samples=3).fit(data, generator=generator())
    own = posterior.samples - posterior.mean
    exact = own.T @ own / 3
    n = 20_000
    drawn = posterior.sample(n, generator=generator(1)) - posterior.mean
    error = (exact.square() + torch.outer(exact.diagonal(), exact.diagonal())).div(n).sqrt()
    assert ((drawn.T @ drawn / n - exact).abs() <= 4 * error).all()


# -- solvers --------------------------------------------------------------------------------------------------------


@pytest.mark.quick("batches")
@pytest.mark.parametrize("cut", ["whole", "batches"])
def test_descent_and_conjugate_gradients_find_the_same_samples(cut):
    model, data = linear()
    solver, error = lp.SGDSolver(epochs=40, tolerance=0.05), 0.02  # the last of the four batches is smaller
    if cut == "whole":
        data = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
        solver, error = lp.SGDSolver(epochs=90, tolerance=1e-4), 1e-4
    exact = lp.SampledLaplace(model, "regression", solver=TIGHT).fit(data, generator=generator()).samples
    descended = lp.SampledLaplace(model, "regression", solver=solver).fit(data, generator=generator()).samples
    assert (descended - exact).norm() < error * (exact - exact.mean(0)).norm()


@pytest.mark.slow
def test_preconditioners_change_the_iterations_and_not_the_samples():
    iterations = {}
    for problem, likelihood in ((linear(), "regression"), (deep(), "classification")):
        model, data = problem
        samples = []
        for name in ("none", "nystrom"):
            solver = lp.CGSolver(tolerance=1e-9, preconditioner=name, rank=15)
            posterior = lp.SampledLaplace(model, likelihood, prior_precision=0.1, n_samples=3, solver=solver)
            posterior.fit(data, generator=generator())
            iterations[likelihood, name] = posterior.report.iterations
            samples.append(posterior.samples)
            torch.testing.assert_close(samples[-1], samples[0], rtol=1e-6, atol=1e-7)
    assert iterations["classification", "nystrom"] < iterations["classification", "none"] / 2


@pytest.mark.quick("sgd")
@pytest.mark.parametrize("solver", [lp.CGSolver(max_iterations=1), lp.SGDSolver(epochs=1)], ids=["cg", "sgd"])
def test_a_missed_tolerance_is_told(solver):
    model, data = deep()
    with pytest.warns(ConvergenceWarning, match="residuals"):
        posterior = lp.SampledLaplace(model, "classification", solver=solver).fit(data, generator=generator())
    tight = lp.SampledLaplace(model, "classification", solver=TIGHT).fit(data, generator=generator())
    H = dense(model, "classification", data).precision_matrix()
    z, away = posterior.samples - posterior.mean, posterior.samples - tight.samples
    wrong = ((away @ H * away).sum(1) / (z @ H * z).sum(1)).sqrt()
    report = posterior.report
    assert not report.converged and report.iterations == 1
    assert wrong.max() > 0.01 and (wrong <= report.residual).all()


# -- tuning ---------------------------------------------------------------------------------------------------------


def mackay(full, structure):
    """The fixed point by the dense posterior's tangent evidence."""
    full.fit_prior_precision("tangent", structure, tolerance=1e-9)
    return full.prior_precision, full.noise_std


def grouped():
    """Three groups in a linear regression."""
    torch.manual_seed(0)
    x = randn(120, 30)
    weights = randn(30, seed=4) * torch.tensor([3.0, 1.0, 0.3], dtype=torch.float64).repeat_interleave(10)
    y = (x @ weights + 0.5 * randn(120, seed=2))[:, None]
    groups = Groups("thirds", ("a", "b", "c"), torch.arange(30) // 10)
    return nn.Linear(30, 1, bias=False).double(), [(x[:70], y[:70]), (x[70:], y[70:])], groups


@pytest.mark.slow
def test_the_fixed_point_is_that_of_the_dense_evidence():
    model, data, groups = grouped()
    exact, noise = mackay(dense(model, "regression", data), groups)
    options = {"n_samples": 200, "chunk_size": 200, "solver": lp.CGSolver(tolerance=1e-5)}
    posterior = lp.SampledLaplace(model, "regression", **options).fit(data, generator=generator())
    posterior.fit_prior_precision("mackay", groups, tolerance=1e-4, max_steps=100, optimum_tolerance=1e-8)
    tuning = posterior.tuning
    assert tuning.residual < 1e-4 and tuning.converged == (tuning.precision_sem <= 0.01)
    assert posterior.prior_groups is groups
    assert ((posterior.prior_precision / exact).log().abs() < 4 * tuning.precision_sem + 0.001).all()
    assert tuning.sem == 0  # as the whole matrix is small
    full = dense(model, lp.Gaussian(float(posterior.noise_std)), data)
    full.fit_prior_precision("tangent", groups, tune_noise=False)
    assert full.tuning.value == pytest.approx(tuning.value, abs=1e-4)
    assert float(posterior.noise_std) == pytest.approx(float(noise), rel=0.02)
    # At the end, samples are those of the tuned prior.
    own = {"prior_precision": posterior.prior().vector(), **options}
    fresh = lp.SampledLaplace(model, lp.Gaussian(posterior.noise_std), **own).fit(data, generator=generator())
    torch.testing.assert_close(posterior.samples, fresh.samples, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_tuning_of_classification_and_its_options():
    model, data = deep()
    posterior = lp.SampledLaplace(model, "classification", n_samples=20, chunk_size=20).fit(data, generator=generator())
    with pytest.warns(ConvergenceWarning, match="residual"):  # labels are random: the first layer's has no optimum
        posterior.fit_prior_precision(structure="layerwise", max_steps=5)
    assert posterior.prior_precision.shape == (2,) and posterior.noise_std is None
    assert not posterior.tuning.converged and posterior.tuning.residual > 0.01
    network = posterior.predictive(data[0][0]).functional_mean
    with pytest.warns(ConvergenceWarning, match="residual"):
        posterior.fit_prior_precision(structure="normalized_groups", max_steps=5)
    assert posterior.prior_groups.name == "normalized_groups"
    posterior.fit_prior_precision(scaling="g_prior", max_steps=30)
    assert posterior.tuning.residual < 0.01
    assert posterior.prior_precision.shape == (posterior.n_parameters,)
    torch.testing.assert_close(posterior.predictive(data[0][0]).functional_mean, network)


def test_a_warm_start_takes_fewer_passes_to_the_same_samples():
    model, data = deep()
    options = {"n_samples": 2, "solver": lp.CGSolver(tolerance=1e-8)}
    warm = lp.SampledLaplace(model, "classification", **options).fit(data, generator=generator())
    cold = lp.SampledLaplace(model, "classification", prior_precision=1.01, **options).fit(data, generator=generator())
    warm.prior_precision = 1.01
    torch.testing.assert_close(warm.samples, cold.samples, rtol=1e-5, atol=1e-6)  # solved for when they are asked for
    assert 0 < warm.report.iterations < cold.report.iterations


def test_changed_noise_and_temperature_reach_the_samples():
    model, data = linear()
    posterior = lp.SampledLaplace(model, lp.Gaussian(1.0), solver=TIGHT).fit(data, generator=generator())
    before = posterior.samples
    posterior.noise_std, posterior.temperature = 0.5, 4.0  # which cancel
    torch.testing.assert_close(posterior.samples, before)
    posterior.temperature = 1.0
    assert not torch.allclose(posterior.samples, before, atol=1e-2)


# -- what the samples hold for --------------------------------------------------------------------------------------


def sampled(**options):
    model, data = deep()
    return lp.SampledLaplace(model, "classification", n_samples=4, solver=TIGHT, **options).fit(
        data, generator=generator()
    )


def test_steps_that_end_far_from_the_fixed_point_are_no_convergence():
    """A linear regression of which the data determine few of the parameters."""
    scales = torch.arange(1, 31, dtype=torch.float64) ** -2.0
    x = randn(60, 30) * scales
    y = x @ randn(30, 1, seed=2) + 0.3 * randn(60, 1, seed=3)
    posterior = lp.SampledLaplace(
        nn.Linear(30, 1, bias=False).double(), lp.Gaussian(0.3), n_samples=8, prior_precision=0.05, solver=TIGHT
    ).fit([(x, y)], generator=generator())
    options = {"tune_noise": False, "optimum_tolerance": 1e-6, "tolerance": 1e-2}
    with pytest.warns(ConvergenceWarning, match="residual"):
        posterior.fit_prior_precision(max_steps=1, **options)
    assert not posterior.tuning.converged and posterior.tuning.residual > 1e-2
    posterior.fit_prior_precision(max_steps=15, **options)
    last, before = posterior.tuning.steps[-1], posterior.tuning.steps[-2].prior_precision
    dense_model = dense(posterior.network.model, lp.Gaussian(0.3), [(x, y)], prior_precision=float(before))
    squares = torch.linalg.solve(dense_model.precision_matrix(), (x.T @ y)[:, 0] / 0.09).square().sum()
    residual = (last.effective_dimension / (before * squares)).log().abs().max()
    assert posterior.tuning.residual == pytest.approx(float(residual), abs=1e-3)


@pytest.mark.slow
def test_other_groups_have_other_samples_unless_their_precisions_are_one(monkeypatch):
    precision = torch.tensor([0.1, 10.0], dtype=torch.float64)
    posterior, alike = sampled(prior_precision=precision), sampled(prior_precision=2.0)
    before, own, wanted = posterior.samples, posterior.prior_groups, alike.samples
    posterior.prior_groups = alike.prior_groups = Groups("swapped", ("a", "b"), 1 - own.index)
    swapped = sampled(prior_precision=precision.flip(0)).samples
    assert not torch.allclose(before, swapped, atol=1e-2)
    torch.testing.assert_close(posterior.samples, swapped, rtol=1e-6, atol=1e-7)
    posterior.prior_groups = own
    torch.testing.assert_close(posterior.samples, before, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(alike, "solve", None)
    assert torch.equal(alike.samples, wanted)


def test_the_same_data_are_known_in_any_order_and_others_are_refused(tmp_path):
    model, data = deep()
    posterior = sampled()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    before = posterior.samples
    posterior.save(tmp_path / "saved")
    for each in (posterior, lp.load(tmp_path / "saved", model)):
        for other in ((10 * x, y), (x, y.roll(1)), (x.roll(1), y)):
            for call in (each.solve, lambda data: each.fit_prior_precision(data=data)):  # noqa: B023
                with pytest.raises(DataError, match="not the data of the fit"):
                    call([other])
        assert torch.equal(each.samples, before)
        torch.testing.assert_close(each.solve([(x.flip(0), y.flip(0))]).samples, before, rtol=1e-6, atol=1e-7)


def test_a_g_priors_floor_is_a_millionth_of_its_groups_mean():
    diagonal = torch.tensor([0.0, 4.0, 0.0, 0.0, 8.0, 1.0], dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    expected = torch.tensor([2e-6, 4.0, 1e-6, 1e-6, 8.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(with_floor(diagonal, index), expected)


# -- parameters, storage, bad input ---------------------------------------------------------------------------------


@pytest.mark.quick("last_layer", "mask")
@pytest.mark.parametrize("parameters", ["last_layer", ["0.weight"], "mask", "frozen"])
def test_parts_of_the_parameters(parameters):
    model, data = deep()
    if parameters == "frozen":
        model[0].requires_grad_(False)
        parameters = "all"
    if parameters == "mask":
        weight = torch.zeros(4, 2, dtype=torch.bool)
        weight[1:3] = True
        parameters = {"0.weight": weight, "2.bias": torch.ones(3, dtype=torch.bool)}
    posterior = lp.SampledLaplace(model, "classification", parameters=parameters, n_samples=300, chunk_size=300)
    posterior.fit(data, generator=generator())
    exact = dense(model, "classification", data, parameters=parameters).covariance_matrix()
    z = posterior.samples - posterior.mean
    error = (exact.square() + torch.outer(exact.diagonal(), exact.diagonal())).div(300).sqrt()
    assert z.shape == (300, len(exact))
    assert ((z.T @ z / 300 - exact).abs() <= 4 * error).all()


def test_a_saved_posterior_knows_its_tuning_and_solves_on(tmp_path):
    model, data = linear()
    posterior = lp.SampledLaplace(model, "regression", n_samples=3, solver=TIGHT).fit(data, generator=generator())
    posterior.fit_prior_precision(max_steps=2, tolerance=10)
    posterior.temperature = 1.1
    posterior.save(tmp_path / "saved")
    loaded = lp.load(tmp_path / "saved", model)
    x = data[0][0]
    torch.testing.assert_close(loaded.predictive(x).mean, posterior.predictive(x).mean, rtol=0, atol=0)
    assert loaded.solver == TIGHT
    assert loaded.report.energy == posterior.report.energy
    loaded.prior_precision = posterior.prior_precision = 3.0
    with pytest.raises(DataError, match="data=train_loader"):
        loaded.sample(1)
    torch.testing.assert_close(loaded.solve(data).samples, posterior.samples)
    with pytest.raises(DataError, match="not the data of the fit"):
        lp.load(tmp_path / "saved", model).solve(data[:1])


@pytest.mark.parametrize(
    "options", [{"n_samples": 0}, {"chunk_size": 0}, {"solver": "adam"}, {"prior_precision": -1.0}]
)
def test_bad_arguments_are_refused(options):
    with pytest.raises(ConfigurationError):
        lp.SampledLaplace(deep()[0], "classification", **options)


def test_other_curvatures_are_refused():
    for backend in (lp.Native("empirical_fisher"), "curvlinops"):
        with pytest.raises(UnsupportedError, match="backend"):
            lp.SampledLaplace(deep()[0], "classification", backend=backend)
    model, data = linear()
    two = nn.Linear(3, 2).double()
    targets = [(x, x[:, :2]) for x, _ in data]
    with pytest.raises(UnsupportedError, match="noise level"):
        lp.SampledLaplace(two, lp.Gaussian(torch.tensor([1.0, 2.0]))).fit(targets)


@pytest.mark.parametrize(
    "options",
    [
        {"structure": "blockwise"},
        {"scaling": "unit"},
        {"predictive_mean": "tangent"},
        {"max_steps": 0},
        {"tune_noise": True},
    ],
)
def test_bad_tuning_is_refused(fitted, options):
    with pytest.raises(ConfigurationError):
        fitted[0].fit_prior_precision(**options)


def test_what_cannot_be_is_refused(fitted):
    posterior, data = fitted
    bad = [(torch.full_like(x, torch.nan), y) for x, y in data]
    with pytest.raises(NonFiniteError):
        lp.SampledLaplace(deep()[0], "classification").fit(bad)
    with pytest.raises(UnsupportedError, match="SampledLaplace cannot be updated"):
        posterior.update(data)
