"""Large dense blocks: determinants and inverses without eigenvectors, and of few rows."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.kernels import eigen
from laplace_plus.structured import DenseBlock, DenseGradients, GramSum, dense

N = 240
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


def test_large_blocks_without_eigenvectors_follow_further_data(monkeypatch):
    monkeypatch.setattr(dense, "LARGE", N)
    rows, shift = rows_of(N), torch.tensor(0.3, dtype=torch.float64)
    block = DenseBlock((rows.mT @ rows)[None].clone(), SHAPE)
    matrix, eye = rows[0].mT @ rows[0], torch.eye(N, dtype=torch.float64)
    for count in (1, 2):
        total = count * matrix + shift * eye
        torch.testing.assert_close(block.log_determinant(ONE, shift), total.logdet(), rtol=1e-10, atol=1e-10)
        factor = block.factor(ONE, shift)
        torch.testing.assert_close(factor.covariance()[0] @ total, eye, rtol=0, atol=1e-8)
        variances = torch.cholesky_inverse(torch.linalg.cholesky(total)).diagonal().view(SHAPE)
        torch.testing.assert_close(factor.variances(), variances, rtol=1e-8, atol=0)
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


M = 120
"""Size of a matrix that counts as large in these tests."""


@pytest.fixture
def decompositions(monkeypatch):
    """The decompositions of matrices of at least M/2 columns that were computed, with M as the size of large ones."""
    found = []

    def count(place, name):
        function = getattr(place, name)

        def counted(matrix, *args):
            found.extend([name] * (2 * matrix.shape[-1] >= M))
            return function(matrix, *args)

        monkeypatch.setattr(place, name, counted)

    count(torch.linalg, "cholesky")
    count(torch.linalg, "eigvalsh")
    count(eigen, "_decompose")
    monkeypatch.setattr(dense, "LARGE", M)
    return found


@pytest.mark.parametrize("kind", ["matrix", "few rows"])
def test_what_does_not_depend_on_precision_or_scale_is_computed_once(kind, decompositions):
    rows = rows_of(70 if kind == "few rows" else 2 * M)[..., :M]
    total = GramSum(1, M, dtype=torch.float64, device=rows.device)
    total.add_rows(rows)
    block, matrix = DenseBlock([total], (1, 1, M)), rows[0].T @ rows[0]
    shift = torch.tensor(0.7, dtype=torch.float64)
    for factor_of_prior in (1.0, 1e-2, 30.0):
        own = shift * factor_of_prior
        value = block.log_determinant(2 * ONE, own)
        torch.testing.assert_close(
            value, (2 * matrix + own * torch.eye(M, dtype=torch.float64)).logdet(), rtol=1e-10, atol=1e-10
        )
    factor = block.factor(2 * ONE, shift)
    wider = block.factor(2 * ONE / 3, shift / 3)  # a covariance of three times the scale
    assert wider.basis is factor.basis
    assert decompositions == (["_decompose"] if kind == "few rows" else ["eigvalsh", "cholesky"])
    gradients = DenseGradients(rows_of(6, seed=3)[..., :M].reshape(2, 3, 1, 1, M))
    flat = gradients.values.flatten(2)
    inverse = torch.linalg.inv(2 * matrix + shift * torch.eye(M, dtype=torch.float64))
    expected = torch.einsum("vbi,ij,wbj->bvw", flat, inverse, flat)
    for scale, own in ((1, factor), (3, wider)):
        found = own.quadratic_form(own.basis.coordinates(gradients), "full")
        torch.testing.assert_close(found, scale * expected, rtol=1e-8, atol=1e-10)
        determinant = -inverse.logdet() - M * math.log(scale)
        torch.testing.assert_close(own.log_determinant(), determinant, rtol=1e-9, atol=1e-8)
    others = [block.factor(2 * ONE, 1.001 * shift), block.factor(2.002 * ONE, shift)]
    assert kind == "few rows" or all(other.basis is not factor.basis for other in others)
    torch.testing.assert_close(others[0].log_determinant(), block.log_determinant(2 * ONE, 1.001 * shift))


def test_a_diagonal_of_levels_takes_no_eigenvectors(decompositions):
    rows, ends = rows_of(M)[..., :M], torch.tensor([0.5, 3.0], dtype=torch.float64)
    block, matrix = DenseBlock((rows.mT @ rows)[None].clone(), (1, 1, M)), rows[0].T @ rows[0]
    for scale in (1.0, 2.0):
        levels = (scale * ends).repeat_interleave(M // 2).view(1, 1, M)
        total = 1.3 * matrix + torch.diag(levels.flatten())
        torch.testing.assert_close(block.log_determinant(1.3 * ONE, levels), total.logdet(), rtol=1e-10, atol=1e-10)
        factor = block.factor(1.3 * ONE, levels)
        torch.testing.assert_close(factor.log_determinant(), total.logdet(), rtol=1e-10, atol=1e-10)
    assert decompositions == ["eigvalsh"] + ["cholesky"] * 4


@pytest.mark.parametrize("kind", ["few rows", "matrix", "two components"])
def test_determinants_are_twice_differentiable(kind):
    size = 6
    shape, parts = (1, 1, size), [rows_of(2 + k, seed=k)[..., :size] for k in range(2)]
    sums = []
    for part in parts[: 1 + (kind == "two components")]:
        total = GramSum(1, size, dtype=torch.float64, device=part.device)
        total.add_rows(part)
        sums.append(total)
    if kind == "matrix":
        sums[0].matrix()
    block = DenseBlock(sums, shape)
    weights = torch.linspace(0.5, 1.0, len(sums), dtype=torch.float64).requires_grad_()
    diagonal = torch.linspace(0.2, 1, size, dtype=torch.float64).view(shape).requires_grad_()
    assert torch.autograd.gradcheck(block.log_determinant, (weights, diagonal))
    assert torch.autograd.gradgradcheck(block.log_determinant, (weights, diagonal))


@pytest.mark.usefixtures("decompositions")
def test_float32_variances_of_an_ill_conditioned_precision():
    """Eigenvalues over six decades; products are triangular solves in float32."""
    rows = rows_of(2 * M)[..., :M] * torch.logspace(0, -3, M, dtype=torch.float64)
    block = DenseBlock((rows.mT @ rows)[None].float(), (1, 1, M))
    shift = 1e-3 * torch.ones((), dtype=torch.float64)
    inverse = torch.linalg.inv(block.matrix[0, 0].double() + shift * torch.eye(M, dtype=torch.float64))
    gradients = torch.cat([rows[:, :50], rows_of(50, seed=5)[..., :M]], 1).float().view(1, 100, 1, 1, M)
    factor = block.factor(ONE.float(), shift.float())
    found = factor.quadratic_form(factor.basis.coordinates(DenseGradients(gradients)), "diagonal")[:, 0]
    flat = gradients.double().view(100, M)
    torch.testing.assert_close(found.double(), ((flat @ inverse) * flat).sum(1), rtol=1e-4, atol=0)
