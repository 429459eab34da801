"""LowRank with a Nyström basis against the tangent kernel's Gaussian process and the dense curvature."""

from __future__ import annotations

import pytest
import torch
from problems import jacobian, noisy_hessian
from torch import nn

import laplace_plus as lp
from laplace_plus import linalg
from laplace_plus.curvature import GGNOperator, JacobianOperator
from laplace_plus.structured import low_rank as module

ALL, EXACT = 10**6, 1e-8


def problem(kind, n=8, width=20, size=5):
    """More weights than numbers in the outputs, so that the kernel is the smaller matrix."""
    torch.manual_seed(0)
    outputs = {"regression": 2, "binary": 1, "classification": 3}[kind]
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = {"regression": x.sin(), "binary": (x[:, 0] > 0).long(), "classification": torch.arange(n) % 3}[kind]
    return model, list(zip(x.split(size), y.split(size), strict=True)), x


def nystrom(model, likelihood, data, rank, seed=0, **options):
    posterior = lp.LowRank(model, likelihood, rank=rank, basis="nystrom", prior_precision=0.5, **options)
    return posterior.fit(data, generator=torch.Generator().manual_seed(seed))


@pytest.mark.quick("classification")
@pytest.mark.parametrize("kind", ["regression", "binary", "classification"])
def test_all_rows_are_the_dense_gaussian_process(kind):
    model, data, x = problem(kind)
    likelihood = lp.Gaussian(0.3) if kind == "regression" else kind
    posterior = nystrom(model, likelihood, data, ALL)
    new = torch.randn(4, 2, dtype=torch.float64)
    rows, own = jacobian(model, x).flatten(0, 1), jacobian(model, new).flatten(0, 1)
    y = torch.cat([part for _, part in data])
    # Singular for classes: (K + W⁻¹)⁻¹ = W (I + K W)⁻¹.
    weight = torch.block_diag(*noisy_hessian(posterior.likelihood, model(x).detach(), y))
    kernel, cross, prior = rows @ rows.T / 0.5, own @ rows.T / 0.5, own @ own.T / 0.5
    inner = torch.eye(len(rows), dtype=torch.float64) + kernel @ weight
    expected = prior - cross @ weight @ torch.linalg.solve(inner, cross.T)
    found = posterior.functional_posterior(new, joint=True).covariance.flatten(2).flatten(0, 1)
    torch.testing.assert_close(found, expected.view_as(found), rtol=EXACT, atol=EXACT)
    full = lp.Full(model, likelihood, prior_precision=0.5).fit(data)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), full.log_marginal_likelihood(), rtol=EXACT, atol=0)
    fit = posterior.laplace_model().log_likelihood() - 0.25 * posterior.mean.square().sum()
    torch.testing.assert_close(posterior.log_marginal_likelihood(), fit - inner.logdet() / 2, rtol=EXACT, atol=0)


@pytest.mark.parametrize("backend", [lp.Native(), lp.Native("empirical_fisher")], ids=["ggn", "empirical_fisher"])
def test_fewer_rows_are_the_nystrom_matrix_between_the_prior_and_the_curvature(backend):
    model, data, x = problem("classification", n=30, width=6)
    posterior = nystrom(model, "classification", data, 4, backend=backend)
    curvature = lp.Full(model, "classification", prior_precision=0.5, backend=backend).fit(data).precision_matrix()
    curvature.diagonal().sub_(0.5)
    matrix = posterior.precision_matrix() - 0.5 * torch.eye(len(curvature), dtype=torch.float64)
    assert torch.linalg.matrix_rank(matrix, hermitian=True) == 4
    assert torch.linalg.eigvalsh(curvature - matrix)[0] > -1e-10 * curvature.trace()
    off = jacobian(model, x).flatten(0, 1) @ (matrix - curvature)
    assert (off.norm(dim=1) < 1e-9 * curvature.trace()).sum() == 4, "H Vᵀ (V H Vᵀ)⁻¹ V H is H on the four gradients V"
    again = nystrom(model, "classification", data, 4, backend=backend, seed=1)
    assert not torch.allclose(again.precision_matrix(), posterior.precision_matrix())


def test_evidence_of_few_rows_is_that_of_the_whole_curvature(monkeypatch):
    model, data, _ = problem("classification", n=20, width=6, size=20)
    exact = nystrom(model, "classification", data, 6)
    full = lp.Full(model, "classification", prior_precision=0.5).fit(data)
    for precision in (torch.tensor(0.1), torch.tensor([0.1, 3.0])):  # from a spectrum, and from the matrix
        found, expected = (one.log_marginal_likelihood(precision.double()) for one in (exact, full))
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=0)
    monkeypatch.setattr(module, "WHOLE", 0)  # as networks of more weights are treated
    estimated = nystrom(model, "classification", data, 6, remainder_probes=20)
    pairs, rest = estimated.state.curvature.blocks[0][1], estimated.remainder()
    identity = torch.eye(full.n_parameters, dtype=torch.float64)
    beside = identity - pairs.vectors.T @ pairs.vectors
    matrix = beside @ (full.precision_matrix() - 0.5 * identity) @ beside
    expected = torch.log1p(torch.linalg.eigvalsh(matrix).clamp(min=0) / 0.5).sum()
    assert (rest.value - expected).abs() < 4 * rest.sem < expected


def test_rows_of_an_operator_are_those_of_its_matrix():
    model, data, _ = problem("classification")
    for operator in (JacobianOperator(model, data), GGNOperator(model, "classification", data).root()):
        chosen = torch.tensor([0, 5, 14, 15, 23])
        torch.testing.assert_close(operator.rows(chosen), operator.dense()[chosen])


def test_loaders_may_shuffle():
    model, data, x = problem("classification")
    parts = torch.utils.data.TensorDataset(x, torch.cat([y for _, y in data]))
    shuffled = nystrom(model, "classification", torch.utils.data.DataLoader(parts, 3, shuffle=True), ALL)
    expected = nystrom(model, "classification", data, ALL).precision_matrix()
    torch.testing.assert_close(shuffled.precision_matrix(), expected)


def test_nystrom_from_given_vectors():
    source = torch.Generator().manual_seed(0)
    root, start = (torch.randn(k, 9, generator=source, dtype=torch.float64) for k in (6, 4))
    matrix = root.T @ root
    found = linalg.nystrom(lambda v: v @ matrix, 9, 4, start=start)
    sketch = start @ matrix
    expected = sketch.T @ torch.linalg.solve(sketch @ start.T, sketch)
    torch.testing.assert_close((found.vectors.T * found.values) @ found.vectors, expected)
    with pytest.raises(lp.errors.ConfigurationError, match="start has another shape"):
        linalg.nystrom(lambda v: v @ matrix, 9, 3, start=start)


def test_networks_in_half_precision_have_no_spurious_directions():
    model, data, x = problem("classification", n=30, width=6)
    exact = lp.Full(model, "classification", prior_precision=0.5).fit(data).functional_posterior(x).covariance
    data = [(part.bfloat16(), y) for part, y in data]
    found = nystrom(model.bfloat16(), "classification", data, ALL).functional_posterior(x.bfloat16()).covariance
    torch.testing.assert_close(found.double(), exact, rtol=0.1, atol=0.02 * float(exact.abs().max()))


def test_what_it_is_not_for():
    model, data, _ = problem("classification")
    with pytest.raises(lp.errors.UnsupportedError, match="not negative"):
        lp.LowRank(model, "classification", basis="nystrom", backend=lp.Native("hessian"))
    with pytest.raises(lp.errors.ConfigurationError, match="'eigenvectors', 'nystrom'"):
        lp.LowRank(model, "classification", basis="ella")
