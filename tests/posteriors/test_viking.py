"""VIKING: its bound and its projections against dense closed forms."""

import copy
import math

import pytest
import torch
from posteriors.dense_rows import classifier_and_batches, dense_rows
from problems import FittedOnce, generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    NonFiniteError,
    SmoothnessWarning,
)
from laplace_plus.linalg.null_space import LSMRProjection
from laplace_plus.posteriors.viking import elbo
from laplace_plus.posteriors.viking.elbo import ELBO, epoch_noise, prior_divergence, take_gradients
from laplace_plus.testing import assert_untouched, snapshot

D = torch.float64


@pytest.fixture
def problem():
    return classifier_and_batches()


@pytest.fixture
def linear():
    """A linear model whose rows are orthogonal and of one length, so that the exact posterior is in the family."""
    X = 3 * torch.linalg.qr(torch.randn(9, 9, generator=generator(), dtype=D))[0][:4]
    y = 3 * torch.randn(4, 1, generator=generator(1), dtype=D)
    alpha, noise = 2.0, 0.7
    mean = torch.linalg.solve(alpha * torch.eye(9, dtype=D) + X.T @ X / noise**2, X.T @ y / noise**2)
    net = nn.Linear(9, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(mean.T)
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(4, dtype=D), X @ X.T / alpha + noise**2 * torch.eye(4, dtype=D)
    ).log_prob(y[:, 0])
    return net, X, y, alpha, noise, float(evidence)


class TestVIKING(FittedOnce):
    one_pass = False
    rows = 12

    def network(self, outputs):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, outputs)]
        return nn.Sequential(*layers).double().train()

    def make(self, model, likelihood, **options):
        return lp.VIKING(model, likelihood, n_samples=3, projector="svd", **options)


# -- noise -------------------------------------------------------------------------------------------------------------


def components(posterior):
    """The noise in the null space and in the range: samples without one of the scales are known up to the other."""
    alpha, image_std = posterior.prior_precision, posterior.image_std
    posterior.prior_precision, posterior.image_std = 1.0, 1e-12
    kernel = posterior.samples - posterior.mean
    posterior.image_std = 1.0
    image = posterior.samples - posterior.mean - kernel
    posterior.prior_precision, posterior.image_std = alpha, image_std
    return kernel, image


@pytest.mark.quick("ggn", "loss")
@pytest.mark.parametrize("kind", ["logit", "ggn", "loss"])
def test_noise_is_split_into_orthogonal_components(problem, kind):
    net, data = problem
    posterior = lp.VIKING(net, "classification", rows=kind, n_samples=4).fit(data, generator=generator())
    kernel, image = components(posterior)
    sizes = kernel.norm(dim=-1) * image.norm(dim=-1)
    assert ((kernel * image).sum(-1).abs() < 1e-5 * sizes).all()
    torch.testing.assert_close(((kernel + image) * kernel).sum(-1), kernel.square().sum(-1), rtol=1e-5, atol=0)
    rows = dense_rows(posterior.network, data, kind, posterior.mean)
    assert (kernel @ rows.T).abs().max() < 1e-6 * rows.norm()


@pytest.mark.slow
def test_lengths_of_the_noise_count_dimensions(problem):
    """``E‖P ε‖² = R``, and a sample's variance is ``σ_ker² R + σ_im² (P − R)``."""
    net, data = problem
    posterior = lp.VIKING(net, "classification", rows="logit", projector="svd", n_samples=400)
    posterior.fit(data, generator=generator())
    rank, R = 18, posterior.n_parameters - 18
    assert float(posterior.report.rank.value) == rank
    for component, dimension in zip(components(posterior), (R, rank), strict=True):
        squares = component.square().sum(-1)
        assert abs(squares.mean() - dimension) < 4 * (2 * dimension / 400) ** 0.5
    posterior.image_std = 0.4
    squares = (posterior.samples - posterior.mean).square().sum(-1)
    expected = float(posterior.kernel_std) ** 2 * R + 0.16 * rank
    assert abs(squares.mean() - expected) < 4 * squares.std() / 400**0.5
    drawn = (posterior.sample(500, generator=generator()) - posterior.mean).square().sum(-1)
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / 500**0.5 + 4 * squares.std() / 400**0.5


# -- the divergence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "image_std"), [(2.0, 0.3), (0.5, 1.7)])
def test_divergence_is_that_of_dense_gaussians(alpha, image_std):
    source = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 3, generator=source, dtype=D))[0]
    P = torch.eye(8, dtype=D) - basis @ basis.T
    mean = torch.randn(8, generator=source, dtype=D)
    covariance = P / alpha + image_std**2 * (torch.eye(8, dtype=D) - P)
    q = torch.distributions.MultivariateNormal(mean, covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=D), torch.eye(8, dtype=D) / alpha)
    found = prior_divergence(mean.square().sum(), 3, alpha, image_std)
    assert abs(found - torch.distributions.kl_divergence(q, prior)) < 1e-8
    assert found >= 0


@pytest.mark.parametrize("rank", [0, 1, 40, 10**9])
def test_divergence_of_an_isotropic_posterior_knows_no_rank(rank):
    assert float(prior_divergence(torch.tensor(3.0), rank, 4.0, 0.5)) == 6.0


def test_divergence_is_stationary_where_it_should_be():
    distance, rank = torch.tensor(3.0, dtype=D), 5
    alpha = (rank / (distance + rank * 0.4**2)).requires_grad_()
    (slope,) = torch.autograd.grad(prior_divergence(distance, rank, alpha, 0.4), alpha)
    assert abs(slope) < 1e-12
    image = torch.tensor(4.0, dtype=D).rsqrt().requires_grad_()
    (slope,) = torch.autograd.grad(prior_divergence(distance, rank, 4.0, image), image)
    assert abs(slope) < 1e-12


# -- the bound ---------------------------------------------------------------------------------------------------------


def test_bound_of_a_linear_model_is_its_evidence_at_the_exact_posterior(linear):
    net, X, y, alpha, noise, evidence = linear
    posterior = lp.VIKING(net, lp.Gaussian(noise_std=noise), projector="svd", n_samples=40, prior_precision=alpha).fit(
        [(X, y)], generator=generator()
    )
    posterior.prior_precision = alpha

    def exact(image_std):
        """In closed form: of ``E ‖y − X θ‖²`` only the trace of the covariance is random."""
        error = (y - net(X).detach()).square().sum() + image_std**2 * X.square().sum()
        nll = error / (2 * noise**2) + 2 * math.log(2 * math.pi * noise**2)
        return -float(nll + prior_divergence(net.weight.detach().square().sum(), 4, alpha, image_std))

    best = (alpha + 9 / noise**2) ** -0.5
    assert exact(best) == pytest.approx(evidence, abs=1e-9)
    for image_std in (best, 2 * best, alpha**-0.5):
        posterior.image_std = image_std
        assert exact(image_std) <= evidence + 1e-9
        # ‖X (I − P) ε‖² / 9 has a χ² distribution with 4 degrees of freedom
        error = image_std**2 * 9 / (2 * noise**2) * (2 * 4 / 40) ** 0.5
        assert abs(posterior.elbo().elbo - exact(image_std)) < 4 * error + 1e-9


def test_bound_of_other_linear_models_is_below_the_evidence():
    X = torch.randn(5, 9, generator=generator(), dtype=D)
    y = torch.randn(5, 1, generator=generator(1), dtype=D)
    net = nn.Linear(9, 1, bias=False).double()
    posterior = lp.VIKING(net, "regression", projector="svd", n_samples=20).fit([(X, y)], generator=generator())
    for alpha, image_std in ((0.3, 0.1), (1.0, 0.4), (float(posterior.prior_precision), float(posterior.image_std))):
        posterior.prior_precision, posterior.image_std = alpha, image_std
        evidence = torch.distributions.MultivariateNormal(
            torch.zeros(5, dtype=D), X @ X.T / alpha + torch.eye(5, dtype=D)
        ).log_prob(y[:, 0])
        assert posterior.elbo().elbo < evidence


@pytest.mark.slow
def test_fit_ends_at_the_optimum_of_the_bound(problem, linear):
    net, data = problem
    for options in ({}, {"expectation": "sampled"}, {"rows": "logit", "projector": "svd"}):
        posterior = lp.VIKING(net, "classification", n_samples=4, **options).fit(data, generator=generator())
        best = posterior.elbo().elbo
        assert best == pytest.approx(posterior.history[-1].elbo)
        assert best > posterior.history[0].elbo
        alpha, image_std = posterior.prior_precision, posterior.image_std
        for factor in (0.9, 1.1):
            posterior.prior_precision = alpha * factor
            assert posterior.elbo().elbo < best
            posterior.prior_precision, posterior.image_std = alpha, image_std * factor
            assert posterior.elbo().elbo < best
            posterior.image_std = image_std
    net, X, y, _, noise, _ = linear
    posterior = lp.VIKING(net, lp.Gaussian(noise_std=noise), projector="svd", n_samples=400)
    posterior.fit([(X, y)], generator=generator())
    alpha = posterior.prior_precision
    assert posterior.image_std == pytest.approx(float((alpha + 9 / noise**2).rsqrt()), rel=0.07)
    optimum = 4 / (posterior.mean.square().sum() + 4 * posterior.image_std**2)  # of the divergence alone
    torch.testing.assert_close(alpha, optimum, rtol=1e-3, atol=0)


def test_terms_are_logged(problem):
    net, data = problem
    one = lp.VIKING(net, "classification", n_samples=6).fit(data, generator=generator())
    last = one.history[-1]
    assert last.rank == float(one.report.rank.value)
    assert last.prior_precision == pytest.approx(float(one.prior_precision))
    colder = lp.VIKING(net, "classification", n_samples=6, temperature=0.1).fit(data, generator=generator())
    assert colder.image_std < one.image_std


def test_without_image_noise_it_is_the_null_space_posterior(problem):
    net, data = problem
    x = torch.cat([x for x, _ in data])
    posterior = lp.VIKING(net, "classification", rows="logit", projector="svd", n_samples=5)
    posterior.fit(data, generator=generator())
    posterior.prior_precision, posterior.image_std = 3.0, math.exp(-16)
    other = lp.NullSpace(net, "classification", projector="svd", n_samples=5, prior_precision=3.0)
    other.fit(data, generator=generator())
    torch.testing.assert_close(posterior.samples, other.samples, rtol=0, atol=1e-5)
    for inputs in (x, x + 2):
        one, two = posterior.functional_posterior(inputs), other.functional_posterior(inputs)
        torch.testing.assert_close(one.covariance, two.covariance, rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.predictive(x).mean, net(x).softmax(-1), rtol=0, atol=1e-8)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", [pytest.param("lsmr", marks=pytest.mark.slow), "svd"])
def test_training_learns_a_mean_and_leaves_the_network_alone(problem, projector):
    net, data = problem
    x = torch.cat([x for x, _ in data])
    before = snapshot(net)
    training = lp.ELBOTraining(epochs=5, scale_epochs=1, learning_rate=3e-2)
    posterior = lp.VIKING(net, "classification", mode=training, projector=projector, n_samples=4)
    posterior.fit(data, generator=generator())
    assert_untouched(net, before)
    fixed = lp.VIKING(net, "classification", projector=projector, n_samples=4, expectation="sampled")
    fixed.fit(data, generator=generator())
    assert posterior.elbo().elbo > fixed.elbo().elbo
    assert (posterior.mean - posterior.network.vector()).norm() > 0.1
    own = posterior.network(x, posterior.network.substitute(posterior.mean))
    torch.testing.assert_close(posterior.functional_posterior(x).mean, own)
    if projector == "svd":
        assert {step.rank for step in posterior.history[: 3 * 6]} == {6.0}


def trainer(net, data, **options):
    mode = lp.ELBOTraining(**options)
    posterior = lp.VIKING(net, "classification", mode=mode, rows="logit", projector=LSMRProjection())
    network = posterior.network
    return ELBO(posterior, data, 6), network, network.vector(), torch.tensor([0.3, -1.0], dtype=D, requires_grad=True)


@pytest.mark.quick("0.36787944117144233")
@pytest.mark.parametrize("image_std", [math.exp(-1.0), math.exp(-0.15)])
def test_steps_have_the_gradient_of_the_bound(problem, image_std):
    """With all data in one batch: that through the dense projector, for the same noise.

    At the second σ_im, which equals σ_ker, deviations are isotropic: no gradient comes through the projection.
    """
    net, data = problem
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    bound_of, network, theta, logs = trainer(net, [(x, y)])
    theta = theta.requires_grad_()
    with torch.no_grad():
        logs[1] = math.log(image_std)
    source = generator()
    noise = epoch_noise(bound_of, theta.detach(), source)
    weights = torch.randn(1, 8, generator=source.clone_state(), dtype=D)
    (batch,) = bound_of.posterior.batches(bound_of.data)
    terms = take_gradients(bound_of, batch, theta, logs, noise, source)
    xi = weights / weights.norm(dim=-1, keepdim=True) @ noise[1]

    def bound(theta, logs):
        rows = dense_rows(network, [(x, y)], "logit", theta)
        kernel = xi - xi @ rows.T @ torch.linalg.solve(rows @ rows.T, rows)
        if image_std == math.exp(-0.15):
            kernel = kernel.detach()
        deviations = (-logs[0] / 2).exp() * kernel + logs[1].exp() * (xi - kernel)
        outputs = network(x, network.substitute(theta + deviations[0]))
        nll = nn.functional.cross_entropy(outputs, y, reduction="sum")
        return nll + prior_divergence(theta.square().sum(), terms.rank, logs[0].exp(), logs[1].exp())

    value = bound(theta, logs)
    assert float(value.detach()) == pytest.approx(-terms.elbo, rel=1e-7)
    for found, expected in zip((theta.grad, logs.grad), torch.autograd.grad(value, (theta, logs)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))


def test_equal_scales_forget_the_rows(problem):
    """With ``σ_ker = σ_im`` deviations are those of an isotropic Gaussian, whatever the network."""
    net, data = problem
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight.mul_(3.0)
    deviations = []
    for model in (net, other):
        posterior = lp.VIKING(model, "classification", rows="logit", projector="svd", n_samples=3)
        posterior.fit(data, generator=generator())
        posterior.prior_precision, posterior.image_std = 4.0, 0.5
        deviations.append(posterior.samples - posterior.mean)
    torch.testing.assert_close(*deviations, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_steps_estimate_the_bound(problem, monkeypatch):
    """Without bias: their mean over noise and batches is the bound of the linearised network."""
    net, data = problem
    monkeypatch.setattr(elbo, "SCALE_LEARNING_RATE", 1e-12)
    training = lp.ELBOTraining(epochs=1, scale_epochs=30, learning_rate=1e-12)
    posterior = lp.VIKING(
        net,
        "classification",
        mode=training,
        expectation="linearized",
        projector="svd",
        n_samples=200,
        prior_precision=2.0,
        image_std=0.3,
    ).fit(data, generator=generator())
    posterior.prior_precision, posterior.image_std = 2.0, 0.3
    sizes = torch.tensor([3.0, 2.0, 1.0], dtype=D) / 6  # a step of a batch of B stands for N/B of them
    steps = torch.tensor([terms.elbo for terms in posterior.history[: 3 * 31]], dtype=D).reshape(31, 3) @ sizes
    error = steps.std() * (1 / 31 + 2 / 200) ** 0.5
    assert abs(steps.mean() - posterior.elbo().elbo) < 4 * error
    assert error < 0.05 * abs(posterior.elbo().elbo)


@pytest.mark.slow
def test_a_trained_linear_model_has_the_exact_mean(linear, monkeypatch):
    net, X, y, _, noise, _ = linear
    with torch.no_grad():
        net.weight.add_(torch.randn(1, 9, generator=generator(2), dtype=D))
    monkeypatch.setattr(elbo, "SCALE_LEARNING_RATE", 5e-2)
    training = lp.ELBOTraining(epochs=100, scale_epochs=0, learning_rate=3e-2)
    posterior = lp.VIKING(
        net,
        lp.Gaussian(noise_std=noise),
        mode=training,
        expectation="linearized",
        prior_precision=2.0,
        n_samples=100,
    ).fit([(X, y)], generator=generator())
    alpha = posterior.prior_precision
    precision = alpha * torch.eye(9, dtype=D) + X.T @ X / noise**2
    exact = torch.linalg.solve(precision, X.T @ y / noise**2)[:, 0]
    assert (posterior.mean - exact).norm() < 0.05 * exact.norm()
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(4, dtype=D), X @ X.T / alpha + noise**2 * torch.eye(4, dtype=D)
    ).log_prob(y[:, 0])
    assert evidence - 1.0 < posterior.elbo().elbo < evidence + 1.0


@pytest.mark.slow
def test_everything_is_loaded(problem, tmp_path):
    net, data = problem
    posterior = lp.VIKING(net, "classification", mode=lp.ELBOTraining(epochs=1), n_samples=3)
    posterior.fit(data, generator=generator()).save(tmp_path / "p")
    loaded = lp.load(tmp_path / "p", net)
    assert loaded.options == posterior.options
    assert loaded.history == posterior.history
    assert loaded.report.rank == posterior.report.rank
    assert torch.equal(loaded.samples, posterior.samples)
    x = data[0][0]
    assert torch.equal(loaded.functional_posterior(x).covariance, posterior.functional_posterior(x).covariance)
    with pytest.raises(DataError, match="data=train_loader"):
        loaded.elbo()
    assert loaded.elbo(data) == posterior.elbo()


@pytest.mark.slow
def test_a_second_fit_starts_where_the_precision_is(problem):
    net, data = problem
    posterior = lp.VIKING(net, "classification", n_samples=3, prior_precision=5.0).fit(data, generator=generator())
    assert posterior.history[0].prior_precision == pytest.approx(5.0)
    best = posterior.elbo().elbo
    posterior.prior_precision = 2.0
    assert posterior.fit(data, generator=generator()).history[0].prior_precision == pytest.approx(2.0)
    assert posterior.elbo().elbo == pytest.approx(best, rel=1e-4)
    posterior.temperature = 4.0
    before = posterior.elbo().elbo
    assert posterior.fit_prior_precision().elbo().elbo > before


BAD = (
    {"rows": "all"},
    {"projector": "qr"},
    {"mode": "both"},
    {"mode": {"epochs": 0}},
    {"mode": {"gamma": 0.5}},
    {"expectation": "exact"},
    {"image_std": -1.0},
    {"prior_precision": torch.ones(2)},
)


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_arguments_are_refused(problem, options):
    with pytest.raises(ConfigurationError):
        lp.VIKING(problem[0], "classification", **options)


def test_bad_requests_are_named(problem, monkeypatch):
    net, data = problem
    make = lambda **options: lp.VIKING(net, "classification", n_samples=2, **options)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(elbo, "ITERATIONS", 1)
        with pytest.raises(ConvergenceWarning, match="ended before"):
            make().fit(data)
    with pytest.raises(ConfigurationError, match="prior mean"):
        make(prior_mean=torch.nn.utils.parameters_to_vector(net.parameters()).detach()).fit(data)
    fitted = make().fit(data)
    (x, y), *rest = data
    for others in (data[:2], [(x, (y + 1) % 3), *rest], [(x + 1, y), *rest]):
        with pytest.raises(DataError, match="not the data of the fit"):
            fitted.elbo(others)
    torch.testing.assert_close(fitted.elbo(data[::-1]).elbo, fitted.elbo().elbo)


@pytest.mark.parametrize("mode", ["post_hoc", "train"])
def test_bounds_that_are_not_finite_are_named(problem, mode):
    net, data = problem
    counts = [(x, torch.ones(len(x), 3, dtype=D)) for x, _ in data]
    posterior = lp.VIKING(net, lp.Poisson(), mode=mode, image_std=1e4, n_samples=2)
    with pytest.raises(NonFiniteError, match="evidence lower bound"):
        posterior.fit(counts, generator=generator())


def test_kinks_are_warned_of_where_projections_are_differentiated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    data = [(torch.randn(4, 2, dtype=D), torch.arange(4) % 2)]
    training = lp.ELBOTraining(epochs=1, scale_epochs=0)
    with pytest.warns(SmoothnessWarning, match="relu"):
        lp.VIKING(net, "classification", mode=training, n_samples=2).fit(data, generator=generator())
    lp.VIKING(net, "classification", n_samples=2).fit(data, generator=generator())
