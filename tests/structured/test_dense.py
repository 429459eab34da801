"""Large dense blocks: determinants and inverses without eigenvectors, and of few rows."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.structured import DenseBlock, DenseGradients, GramSum

N = 1040
SHAPE = (1, 1, N)
ONE = torch.ones(1, dtype=torch.float64)


def rows_of(count, *, seed=0):
    return torch.randn(1, count, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["scalar", "entry by entry"])
@pytest.mark.parametrize("kind", ["few rows", "matrix", "two components"])
def test_equal_to_the_dense_inverse(kind, name):
    shape = (1, 1, 200)
    rows, diagonal = rows_of(30)[..., : shape[-1]], torch.tensor(0.8, dtype=torch.float64)
    if name == "entry by entry":
        diagonal = torch.linspace(0.1, 2, shape[-1], dtype=torch.float64).view(shape)
    matrix = (rows.mT @ rows)[None]
    if kind == "few rows":
        total = GramSum(1, shape[-1], dtype=torch.float64, device=rows.device)
        total.add_rows(rows)
        block, weights = DenseBlock([total], shape), 1.7 * ONE
    elif kind == "matrix":
        block, weights = DenseBlock(matrix.clone(), shape), 1.7 * ONE
    else:
        block, weights = DenseBlock(torch.cat([matrix, matrix.flip(-1, -2)]), shape), torch.tensor([1.7, 0.3]).double()
    whole = torch.einsum("k,knm->nm", weights, block.clone().matrix[:, 0])
    dense = whole + torch.diag(diagonal.expand(shape).flatten())
    inverse = torch.linalg.inv(dense)
    factor = block.factor(weights, diagonal)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(factor.covariance()[0], inverse, **close)
    torch.testing.assert_close(factor.variances().flatten(), inverse.diagonal(), **close)
    torch.testing.assert_close(factor.log_determinant(), dense.logdet(), **close)
    values = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flat = values.flatten(2)
    expected = torch.einsum("vbi,ij,wbj->bvw", flat, inverse, flat)
    coordinates = factor.basis.coordinates(DenseGradients(values))
    torch.testing.assert_close(factor.quadratic_form(coordinates, "full"), expected, **close)
    noise = torch.randn(5, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert factor.sample(noise).shape == noise.shape
    point = diagonal.clone().requires_grad_()
    value = block.log_determinant(weights, point)
    torch.testing.assert_close(value.detach(), dense.logdet(), **close)
    (gradient,) = torch.autograd.grad(value, point)
    own = inverse.diagonal().view(shape)
    torch.testing.assert_close(gradient, own if diagonal.ndim else own.sum(), **close)


def test_large_blocks_without_eigenvectors_follow_further_data():
    rows, shift = rows_of(N), torch.tensor(0.3, dtype=torch.float64)
    block = DenseBlock((rows.mT @ rows)[None].clone(), SHAPE)
    dense, eye = rows[0].mT @ rows[0], torch.eye(N, dtype=torch.float64)
    for count in (1, 2):
        total = count * dense + shift * eye
        torch.testing.assert_close(block.log_determinant(ONE, shift), total.logdet(), rtol=1e-10, atol=1e-10)
        factor = block.factor(ONE, shift)
        torch.testing.assert_close(factor.covariance()[0] @ total, eye, rtol=0, atol=1e-8)
        torch.testing.assert_close(factor.log_determinant(), total.logdet(), rtol=1e-10, atol=1e-10)
        block.add_(DenseBlock((rows.mT @ rows)[None], SHAPE))


def test_negative_eigenvalues_are_clamped_or_named():
    """Negative eigenvalues that are rounding errors count as zero; others are named."""
    n = 200
    shape, vectors = (1, 1, n), torch.linalg.qr(rows_of(n, seed=1)[0, :, :n]).Q
    values = torch.linspace(1, 2, n, dtype=torch.float64)
    values[0] = -1e-14
    rounded = (vectors * values) @ vectors.T
    block = DenseBlock(((rounded + rounded.T) / 2)[None, None], shape)
    tiny = torch.tensor(1e-15, dtype=torch.float64)
    assert block.factor(ONE, tiny).values.amin() == pytest.approx(1e-15)
    values[0] = -0.5
    indefinite = ((vectors * values) @ vectors.T)[None, None]
    with pytest.raises(NotPositiveDefiniteError, match=r"-0\.4"):
        DenseBlock(indefinite, shape).factor(ONE, torch.tensor(0.1, dtype=torch.float64))
    shift = torch.tensor(0.6, dtype=torch.float64)  # outweighs it
    dense = indefinite[0, 0] + shift * torch.eye(n, dtype=torch.float64)
    covariance = DenseBlock(indefinite, shape).factor(ONE, shift).covariance()[0]
    torch.testing.assert_close(covariance, torch.linalg.inv(dense), rtol=1e-8, atol=1e-11)
