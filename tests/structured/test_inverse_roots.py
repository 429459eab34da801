"""Large dense blocks give eigenvalues and inverses without eigenvectors, and they are the same."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.structured import DenseBlock, inverse_roots
from laplace_plus.structured.inverse_roots import eigenvalues, inverse_root

N = 12
SHAPE = (1, 3, 4)


def semi_definite(*, rank=N, components=1, dtype=torch.float64):
    rows = torch.randn(components, 1, rank, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows.mT @ rows).to(dtype)


def diagonals():
    return [torch.tensor(0.3, dtype=torch.float64), torch.linspace(0.1, 2, N, dtype=torch.float64).view(SHAPE)]


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(inverse_roots, "LARGE", 1)


@pytest.mark.parametrize("diagonal", diagonals(), ids=["one number", "each entry its own"])
@pytest.mark.parametrize("components", [1, 3])
def test_factors_of_large_blocks(components, diagonal, everything_is_large):
    matrix = semi_definite(rank=7, components=components)
    weights = torch.arange(1.0, components + 1, dtype=torch.float64)
    block = DenseBlock(matrix, SHAPE)
    factor = block.factor(weights, diagonal)
    assert block._cache is None  # no eigenvectors so far
    dense = torch.einsum("k,kgnm->nm", weights, matrix) + torch.diag(diagonal.expand(SHAPE).flatten())
    inverse = torch.linalg.inv(dense)
    torch.testing.assert_close(factor.covariance()[0], inverse, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factor.variances().flatten(), inverse.diagonal(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factor.log_determinant(), torch.logdet(dense), rtol=1e-12, atol=1e-12)
    drawn = factor.sample(torch.eye(N, dtype=torch.float64).view(N, *SHAPE)).flatten(1)
    torch.testing.assert_close(drawn.T @ drawn, inverse, rtol=1e-10, atol=1e-12)


def test_eigenvalues_alone_give_the_same_determinant(everything_is_large):
    matrix = semi_definite(rank=7)
    weights, shift = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([2.0], 0.3))
    block = DenseBlock(matrix.clone(), SHAPE)
    found = block.log_determinant(weights, shift)
    assert block._cache is None
    want = torch.logdet(weights * matrix[0, 0] + shift * torch.eye(N, dtype=torch.float64))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    for mine, exact in zip(
        torch.autograd.grad(found, (weights, shift)), torch.autograd.grad(want, (weights, shift)), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12)
    block.add_(DenseBlock(matrix, SHAPE))
    doubled = torch.logdet(2 * weights * matrix[0, 0] + shift * torch.eye(N, dtype=torch.float64))
    torch.testing.assert_close(block.log_determinant(weights, shift), doubled, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("failure", ["error", "nan"])
def test_float64_takes_over_where_float32_fails(failure, monkeypatch):
    matrix, solver = semi_definite(dtype=torch.float32)[0], torch.linalg.eigvalsh

    def failing(given):
        if given.dtype == torch.float64:
            return solver(given)
        if failure == "error":
            raise torch.linalg.LinAlgError("no convergence")
        return torch.full(given.shape[:-1], torch.nan)

    want = eigenvalues(matrix)
    monkeypatch.setattr(torch.linalg, "eigvalsh", failing)
    torch.testing.assert_close(eigenvalues(matrix), want, rtol=1e-5, atol=1e-5)


def test_after_a_few_inverses_eigenvectors_are_cheaper(everything_is_large):
    block, weights = DenseBlock(semi_definite(), SHAPE), torch.ones(1, dtype=torch.float64)
    factors = [block.factor(weights, torch.tensor(shift, dtype=torch.float64)) for shift in (0.1, 0.2, 0.3, 0.4)]
    assert factors[0].basis is not factors[1].basis
    assert factors[2].basis is factors[3].basis
    assert block._cache is not None


def test_negative_eigenvalues_are_left_to_the_eigendecomposition(everything_is_large):
    """Those that rounding made count as zero, as without this path; real ones are named."""
    vectors = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(1))).Q.double()
    vectors = torch.linalg.qr(vectors).Q
    values = torch.linspace(1, 2, N, dtype=torch.float64)
    weights, tiny = torch.ones(1, dtype=torch.float64), torch.tensor(1e-15, dtype=torch.float64)
    values[0] = -1e-14
    rounded = ((vectors * values) @ vectors.T)[None, None]
    rounded = (rounded + rounded.mT) / 2
    assert inverse_root(rounded[0], tiny, SHAPE) is None
    factor = DenseBlock(rounded, SHAPE).factor(weights, tiny)
    assert factor.values.amin() == pytest.approx(1e-15)
    values[0] = -0.5
    indefinite = ((vectors * values) @ vectors.T)[None, None]
    with pytest.raises(NotPositiveDefiniteError, match=r"-0\.4"):
        DenseBlock(indefinite, SHAPE).factor(weights, torch.tensor(0.1, dtype=torch.float64))
    # a real one that the diagonal outweighs
    shift = torch.tensor(0.6, dtype=torch.float64)
    dense = indefinite[0, 0] + shift * torch.eye(N, dtype=torch.float64)
    covariance = DenseBlock(indefinite, SHAPE).factor(weights, shift).covariance()[0]
    torch.testing.assert_close(covariance, torch.linalg.inv(dense), rtol=1e-9, atol=1e-12)
