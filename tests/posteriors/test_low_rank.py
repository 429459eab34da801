"""LowRank against the dense curvature's own eigenvectors."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.structured import low_rank as module
from laplace_plus.testing import assert_untouched, snapshot

RANK = 6


def problem(n=40, classes=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = (x[:, :classes] + 0.5 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).argmax(1)
    return model, list(zip(x.split(25), y.split(25), strict=True))


def trained(kind):
    """A small network at the optimum of its loss, its data and likelihood."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    f = x.sin() + 0.3 * torch.randn(80, 2, generator=generator, dtype=torch.float64)
    y, n, likelihood, loss = {
        "regression": (f[:, :1], 1, "regression", nn.functional.mse_loss),
        "binary": ((f[:, :1] > 0).double(), 1, "binary", nn.functional.binary_cross_entropy_with_logits),
        "classes": (torch.cat([f, 0 * f[:, :1]], 1).argmax(1), 3, "classification", nn.functional.cross_entropy),
    }[kind]
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, n)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05, weight_decay=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model, [(x, y[:, 0].long() if kind == "binary" else y)], likelihood


def leading(matrix, rank):
    values, vectors = torch.linalg.eigh(matrix)
    top, columns = values[-rank:], vectors[:, -rank:]
    return (columns * top.clamp(min=0)) @ columns.T


def low_rank(model, likelihood="classification", **options):
    return lp.LowRank(model, likelihood, **({"rank": RANK, "tolerance": 1e-12} | options))


@pytest.fixture(scope="module")
def fits():
    """The problem, and its posterior with a good estimate of the remainder, and with none."""
    model, data = problem()
    with_rest = low_rank(model, remainder_probes=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WHOLE", 0)  # as networks of more weights are treated
        with_rest.fit(data, generator=torch.Generator().manual_seed(0))
    return model, data, with_rest, low_rank(model, remainder_probes=0).fit(data)


@pytest.mark.parametrize("kind", ["ggn", "hessian", "empirical_fisher"])
def test_precision_is_the_truncated_curvature(kind):
    model, data = problem()
    backend = lp.Native(kind)
    full = lp.Full(model, "classification", backend=backend, prior_precision=100.0).fit(data).precision_matrix()
    curvature = full - 100 * torch.eye(len(full), dtype=full.dtype)
    posterior = low_rank(model, backend=backend, prior_precision=0.7, remainder_probes=0).fit(data)
    expected = leading(curvature, RANK) + 0.7 * torch.eye(len(full), dtype=full.dtype)
    torch.testing.assert_close(posterior.precision_matrix(), expected, rtol=1e-8, atol=1e-8)


def test_noise_and_temperature_weigh_the_eigenvalues():
    model, data = problem()
    data = [(x, x[:, :3].sin()) for x, _ in data]
    likelihood = lp.Gaussian(noise_std=0.3)
    posterior = low_rank(model, likelihood, temperature=2.0, remainder_probes=0).fit(data)
    full = lp.Full(model, likelihood, temperature=2.0).fit(data)
    identity = torch.eye(full.n_parameters, dtype=torch.float64)
    expected = leading(full.precision_matrix() - identity, RANK) + identity
    torch.testing.assert_close(posterior.precision_matrix(), expected, rtol=1e-8, atol=1e-8)
    posterior.noise_std, full.noise_std = 0.1, 0.1
    expected = leading(full.precision_matrix() - identity, RANK) + identity
    torch.testing.assert_close(posterior.precision_matrix(), expected, rtol=1e-8, atol=1e-7)


def test_remainder_estimates_what_the_pairs_leave_out(fits, monkeypatch):
    model, data, posterior = *fits[:2], copy.deepcopy(fits[2])
    full = lp.Full(model, "classification", prior_precision=0.05).fit(data)
    curvature = full.precision_matrix() - 0.05 * torch.eye(full.n_parameters, dtype=torch.float64)
    rest = torch.linalg.eigvalsh(curvature)[:-RANK].clamp(min=0)
    expected = torch.log1p(rest / 0.05).sum()
    posterior.prior_precision = 0.05
    estimate = posterior.remainder()
    assert 0 < estimate.sem < 0.1 * expected
    assert (estimate.value - expected).abs() < 4 * estimate.sem
    assert estimate.converged
    monkeypatch.setattr(module, "REMAINDER_DEPTH", 2)
    monkeypatch.setattr(module, "WHOLE", 0)
    assert not low_rank(model, prior_precision=1e-6).fit(data).remainder().converged
    # Nothing else separates the two evidences.
    gap = posterior.log_marginal_likelihood() - full.log_marginal_likelihood()
    torch.testing.assert_close(gap, (expected - estimate.value) / 2, rtol=1e-6, atol=1e-6)


def test_tuning_agrees_with_the_full_evidence(fits):
    model, data, posterior, bare = *fits[:2], *copy.deepcopy(fits[2:])
    full = lp.Full(model, "classification").fit(data).fit_prior_precision("marginal_likelihood")
    with pytest.warns(lp.errors.ConvergenceWarning, match="random vectors"):
        posterior.fit_prior_precision("marginal_likelihood")
    best, found = full.log_marginal_likelihood(), full.log_marginal_likelihood(posterior.prior_precision)
    assert best - found < 0.05
    bare.fit_prior_precision("marginal_likelihood")
    assert full.log_marginal_likelihood(bare.prior_precision) < found, "the remainder must matter here"


@pytest.mark.parametrize("structure", ["layerwise", "diagonal"])
def test_other_priors_without_the_remainder(fits, structure):
    with_rest, posterior = copy.deepcopy(fits[2:])
    size = {"layerwise": 2, "diagonal": posterior.n_parameters}[structure]
    posterior.prior_precision = torch.linspace(0.5, 3.0, size, dtype=torch.float64)
    precision = posterior.precision_matrix()
    torch.testing.assert_close(posterior.covariance_matrix(), precision.inverse())
    torch.testing.assert_close(posterior.variance(), precision.inverse().diagonal())
    before = posterior.log_marginal_likelihood()
    posterior.fit_prior_precision(structure=structure)
    assert posterior.log_marginal_likelihood() > before
    if structure == "diagonal":
        with pytest.raises(lp.errors.UnsupportedError, match="remainder_probes=0"):
            with_rest.fit_prior_precision(structure=structure)
    with pytest.raises(lp.errors.DataError, match="remainder_probes=0"):  # a copy does not know the training data
        with_rest.fit_prior_precision("marginal_likelihood", structure="layerwise")


@pytest.mark.quick("scalar-LowRank-regression", "layerwise-LowRank-classes", "scalar-SampledLaplace-classes")
@pytest.mark.parametrize(
    ("structure", "cls", "kind"),
    [
        ("scalar", lp.LowRank, "regression"),
        ("scalar", lp.SampledLaplace, "classes"),
        ("layerwise", lp.LowRank, "binary"),
        ("layerwise", lp.LowRank, "classes"),
        ("layerwise", lp.SampledLaplace, "regression"),
    ],
)
def test_the_evidence_is_that_of_the_dense_matrix(kind, cls, structure):
    model, data, likelihood = trained(kind)
    full = lp.Full(model, likelihood).fit(data).fit_prior_precision("marginal_likelihood", structure)
    options = {"rank": 5} if cls is lp.LowRank else {"n_samples": 2}
    posterior = cls(model, likelihood, **options).fit(data).fit_prior_precision("marginal_likelihood", structure)
    found, exact = posterior.tuning, full.tuning
    assert found.converged and found.sem == 0 and found.precision_sem < 1e-9
    assert found.value == pytest.approx(exact.value, abs=1e-6)
    torch.testing.assert_close(posterior.prior_precision, full.prior_precision, rtol=2e-3, atol=0)
    if kind == "regression":
        torch.testing.assert_close(posterior.noise_std, full.noise_std, rtol=1e-4, atol=0)
    assert torch.isfinite(posterior.predictive(data[0][0]).mean).all()


@pytest.mark.quick("scalar-LowRank-regression")
@pytest.mark.parametrize("kind", ["regression", pytest.param("classes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [lp.LowRank, lp.SampledLaplace])
@pytest.mark.parametrize("structure", ["scalar", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_random_vectors_tell_the_evidence_within_their_errors(kind, cls, structure, monkeypatch):
    """As of networks with more weights: what the pairs leave out is estimated, and the errors are stated."""
    monkeypatch.setattr(module, "WHOLE", 0)
    model, data, likelihood = trained(kind)
    full = lp.Full(model, likelihood).fit(data).fit_prior_precision("marginal_likelihood", structure)
    options = {"rank": 20} if cls is lp.LowRank else {"n_samples": 2}
    if cls is lp.SampledLaplace:
        monkeypatch.setattr(module, "PAIRS", 20)
    posterior = cls(model, likelihood, **options).fit(data, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior.fit_prior_precision("marginal_likelihood", structure)
    found = posterior.tuning
    wrong = (posterior.prior_precision / full.prior_precision).log().abs().max()
    assert found.sem > 0 and wrong < 4 * found.precision_sem < 0.2
    value = full.log_marginal_likelihood(posterior.prior_precision, posterior.noise_std)
    assert abs(found.value - float(value)) < 4 * found.sem
    assert found.converged == (found.precision_sem <= 0.01)
    assert found.converged or any(f"{found.precision_sem:.1%}" in str(one.message) for one in caught)


def test_update_forgets_nothing():
    model, data = problem()
    posterior = low_rank(model, rank=100).fit(data[:1]).update(data[1:])
    torch.testing.assert_close(posterior.precision_matrix(), low_rank(model, rank=100).fit(data).precision_matrix())
    assert posterior.n_data == 40


def test_pairs_that_do_not_converge_are_left_out(monkeypatch):
    model = nn.Linear(50, 3).double()  # with a flat spectrum
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [(x, x[:, :3].argmax(1))]
    posterior = lp.LowRank(model, "classification", rank=5, tolerance=1e-12, prior_precision=4.0)
    monkeypatch.setattr(module, "MOST_RESTARTS", 1)
    monkeypatch.setattr(module, "WHOLE", 0)
    with pytest.warns(lp.errors.ConvergenceWarning, match="lower rank"):
        posterior.fit(data, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.variance(), torch.full((posterior.n_parameters,), 0.25, dtype=torch.float64))
    full = lp.Full(model, "classification", prior_precision=4.0).fit(data)
    expected = full.precision_matrix().logdet() - posterior.n_parameters * torch.tensor(4.0).log()
    remainder = posterior.remainder()  # what is not in the pairs counts as the rest
    assert (remainder.value - expected).abs() < 4 * remainder.sem


def test_single_precision_agrees_with_double(fits):
    expected = fits[-1].functional_posterior(fits[1][0][0])
    model, data = problem()
    single = [(x.float(), y) for x, y in data]
    posterior = lp.LowRank(model.float(), "classification", rank=RANK, remainder_probes=0).fit(single)
    got = posterior.functional_posterior(single[0][0])
    assert got.covariance.dtype is torch.float32
    torch.testing.assert_close(got.covariance.double(), expected.covariance, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rounding_does_not_grow_with_the_number_of_weights():
    # a wide input and a few outputs: the curvature is φφᵀ ⊗ I, whose eigenvalues are those of a small Gram matrix
    generator = torch.Generator().manual_seed(0)
    scales = 0.7 ** torch.arange(8.0)
    x = scales[:, None] * torch.randn(8, 400_000, generator=generator)
    model = nn.Linear(400_000, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    data = [(x[:5], x[:5, :1]), (x[5:], x[5:, :1])]
    posterior = lp.LowRank(model, "regression", rank=6, remainder_probes=0, prior_precision=1.0).fit(data)
    top = torch.linalg.eigvalsh(x.double() @ x.double().T)[-6:]
    expected = top.log1p().sum()
    log_likelihood = torch.distributions.Normal(0.0, 1.0).log_prob(x[:, 0]).sum()  # of a network that is zero
    determinant = 2 * (log_likelihood - posterior.log_marginal_likelihood())
    torch.testing.assert_close(determinant.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [3, 4, 5, 50])
def test_a_rank_that_is_all_there_is(rank, dtype):
    torch.manual_seed(0)
    model = nn.Linear(20, 1, bias=False).to(dtype)
    x = torch.randn(4, 20).to(dtype)
    posterior = lp.LowRank(model, "regression", rank=rank).fit([(x, x[:, :1])])
    remainder = posterior.remainder()
    if rank < 4:
        assert remainder.value > 0
        return
    assert remainder.value == 0 and remainder.converged
    full = lp.Full(model, "regression").fit([(x, x[:, :1])])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    evidence = posterior.log_marginal_likelihood()
    torch.testing.assert_close(evidence, full.log_marginal_likelihood(), rtol=tolerance, atol=tolerance)


def test_what_it_cannot_do_is_named():
    model, data = problem()
    regression = [(x, x[:, :3]) for x, _ in data]
    with pytest.raises(lp.errors.UnsupportedError, match="noise levels"):
        low_rank(model, lp.Gaussian(noise_std=torch.ones(3))).fit(regression)
    with pytest.raises(lp.errors.UnsupportedError, match="low-rank"):
        low_rank(model, backend="backpack").fit(data)
    for options in ({"rank": 0}, {"tolerance": 0.0}, {"remainder_probes": -1}):
        with pytest.raises(lp.errors.ConfigurationError):
            lp.LowRank(model, "classification", **options)


def test_a_failing_fit_leaves_everything_as_it_was(fits):
    model, data, posterior = copy.deepcopy(fits[:3])
    before, precision = snapshot(model), posterior.precision_matrix()

    class Breaks:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield data[0]
            if self.passes > 3:
                raise OSError("the disk is gone")
            yield data[1]

    with pytest.raises(OSError, match="disk"):
        posterior.fit(Breaks())
    assert_untouched(model, before)
    assert torch.equal(posterior.precision_matrix(), precision)


def test_a_network_without_curvature_is_refused():
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.zero_()
    x = torch.zeros(5, 2, dtype=torch.float64)
    with pytest.raises(lp.errors.SelectionError, match="is zero: weight"):
        lp.LowRank(model, "regression", parameters="weight").fit([(x, x[:, :1])])
