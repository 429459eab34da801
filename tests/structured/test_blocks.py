"""Structured matrices against their dense forms: inverse, determinant, samples, derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_plus.errors import (
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured import DenseBlock, DenseGradients, DiagonalBlock, KroneckerBlock, register_block
from laplace_plus.structured.blocks import block_from_tensors

GROUPS, ROWS, COLUMNS = SHAPE = 2, 3, 4
N = ROWS * COLUMNS


def semi_definite(generator, *shape):
    root = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return root @ root.mT


def build(name, components, seed=0):
    """A block and its dense matrices ``[K, G, n, n]``."""
    generator = torch.Generator().manual_seed(seed)
    if name == "diagonal":
        values = torch.rand(components, *SHAPE, generator=generator, dtype=torch.float64)
        return DiagonalBlock(values), torch.diag_embed(values.flatten(2))
    if name == "dense":
        matrix = semi_definite(generator, components, GROUPS, N)
        return DenseBlock(matrix.clone(), SHAPE), matrix
    left = semi_definite(generator, components, GROUPS, ROWS)
    if name == "embedding":
        right = torch.rand(GROUPS, COLUMNS, generator=generator, dtype=torch.float64)
        full_right = torch.diag_embed(right)
    else:
        right = full_right = semi_definite(generator, GROUPS, COLUMNS)
    dense = torch.einsum("kgop,gij->kgoipj", left, full_right).reshape(components, GROUPS, N, N) / 5
    return KroneckerBlock(left.clone(), right.clone(), torch.tensor(5.0, dtype=torch.float64)), dense


@pytest.fixture(params=["diagonal", "dense", "Kronecker", "embedding"])
def name(request):
    return request.param


@pytest.fixture(params=[1, 3])
def components(request):
    return request.param


def weights_for(components):
    return torch.linspace(0.5, 2.0, components, dtype=torch.float64)


@pytest.mark.parametrize("anisotropic", [False, True])
def test_factor_inverts(name, components, anisotropic):
    block, dense = build(name, components)
    weights = weights_for(components)
    diagonal = torch.tensor(0.7, dtype=torch.float64)
    if anisotropic:
        diagonal = torch.linspace(0.1, 3.0, GROUPS * N, dtype=torch.float64).view(SHAPE)
        if name in ("Kronecker", "embedding"):
            with pytest.raises(UnsupportedError, match="layerwise"):
                block.factor(weights, diagonal)
            return
    matrix = torch.einsum("k,kgnm->gnm", weights, dense)
    matrix = matrix + torch.diag_embed(diagonal.expand(SHAPE).flatten(1))
    torch.testing.assert_close(block.dense(weights), torch.einsum("k,kgnm->gnm", weights, dense))
    factor = block.factor(weights, diagonal)
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(factor.covariance(), inverse)
    torch.testing.assert_close(factor.variances().flatten(1), inverse.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(factor.log_determinant(), matrix.logdet().sum())
    torch.testing.assert_close(block.log_determinant(weights, diagonal), matrix.logdet().sum())
    gradients = torch.randn(2, 3, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat = gradients.flatten(3)
    expected = torch.einsum("vbgn,gnm,wbgm->bvw", flat, inverse, flat)
    coordinates = factor.basis.coordinates(DenseGradients(gradients))
    torch.testing.assert_close(factor.quadratic_form(coordinates, "full"), expected)
    noise = torch.eye(GROUPS * N, dtype=torch.float64).view(GROUPS * N, *SHAPE)
    roots = factor.sample(noise).flatten(1)  # the images of unit vectors are the columns of a root of the inverse
    torch.testing.assert_close(roots.T @ roots, torch.block_diag(*inverse))


def test_log_determinant_is_differentiable(name, components):
    block, _ = build(name, components)
    weights = weights_for(components).requires_grad_()
    diagonal = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block.log_determinant, (weights, diagonal))
    if name in ("diagonal", "dense"):
        entries = torch.linspace(0.1, 3.0, GROUPS * N, dtype=torch.float64).view(SHAPE).requires_grad_()
        assert torch.autograd.gradcheck(block.log_determinant, (weights, entries))


def test_blocks_add_up(name, components):
    (block, dense), (other, other_dense) = build(name, components), build(name, components, seed=1)
    weights = weights_for(components)
    block.factor(weights, torch.tensor(1.0, dtype=torch.float64))  # a decomposition that must be forgotten
    block.add_(other)
    total = torch.einsum("k,kgnm->gnm", weights, dense + other_dense)
    if name in ("Kronecker", "embedding"):  # factors add up, not products
        left, right = block.left, block.right
        right = torch.diag_embed(right) if right.ndim == 2 else right
        total = torch.einsum("k,kgop,gij->goipj", weights, left, right).reshape(GROUPS, N, N) / 10
    torch.testing.assert_close(block.dense(weights), total)


def test_decomposed_once(components, monkeypatch):
    block, _ = build("Kronecker", components)
    weights = weights_for(components)
    block.eigen(weights)
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("decomposed again"))
    precision = torch.tensor(2.0, dtype=torch.float64)
    assert block.factor(weights, precision) is not None
    if components == 1:
        assert block.factor(3 * weights, precision) is not None


def test_corrected_eigenvalues_live_in_the_kronecker_basis():
    block, _ = build("Kronecker", 1)
    one = torch.ones(1, dtype=torch.float64)
    corrected = block.with_correction(one)
    squares = torch.rand(1, *SHAPE, dtype=torch.float64)
    corrected.corrected += squares
    basis, values = corrected.eigen(one)
    torch.testing.assert_close(values, squares[0])
    torch.testing.assert_close(corrected.dense(one).diagonal(dim1=1, dim2=2).sum(), squares.sum())
    unit = torch.eye(N, dtype=torch.float64).view(N, 1, ROWS, COLUMNS).expand(N, *SHAPE)
    columns = basis.expand(unit)[:, 0].flatten(1)
    torch.testing.assert_close(columns @ columns.T, torch.eye(N, dtype=torch.float64))


def test_bad_matrices_are_named():
    with pytest.raises(NonFiniteError, match="not finite"):
        symmetric_eigen(torch.tensor([[math.nan, 0.0], [0.0, 1.0]]))
    indefinite = DenseBlock(-torch.eye(2, dtype=torch.float64)[None, None], (1, 1, 2))
    one, half = torch.ones(1, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    for ask in (indefinite.factor, indefinite.log_determinant):
        with pytest.raises(NotPositiveDefiniteError, match="eigenvalue of -0.5"):
            ask(one, half)
    with pytest.raises(NotPositiveDefiniteError, match="eigenvalue of -0.5"):
        indefinite.log_determinant(one, half.expand(1, 1, 2))


def test_rounding_does_not_stop_tiny_diagonals():
    """In float32 a rank-deficient matrix has eigenvalues of −1e-6; a layer-wise prior may be smaller than that."""
    root = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    matrix = root @ root.T
    assert torch.linalg.eigvalsh(matrix).min() < -1e-7
    block = DenseBlock(matrix[None, None], (1, 1, 40))
    one = torch.ones(1, dtype=torch.float64)
    pattern = torch.linspace(1, 2, 40, dtype=torch.float64).view(1, 1, 40)
    assert block.log_determinant(one, 1e-10 * pattern) < block.log_determinant(one, 1e-8 * pattern)
    diagonal = 1e-2 * pattern  # well above the rounding, the determinant lemma gives the value
    wide = root.double()
    inner = torch.eye(5, dtype=torch.float64) + wide.T @ (wide / diagonal.view(-1, 1))
    expected = inner.logdet() + diagonal.log().sum()
    torch.testing.assert_close(block.log_determinant(one, diagonal), expected, rtol=0, atol=40 * 1e-6 / 1e-2)


class ScaledIdentity(DiagonalBlock):
    """A kind of block of another package."""

    storage = "scaled identity"

    @classmethod
    def from_tensors(cls, tensors, shape):
        return cls(tensors["values"].expand(1, *shape).clone())

    def tensors(self):
        return {"values": self.values.mean()}


def test_registered_kinds_of_blocks_are_rebuilt():
    block = ScaledIdentity(torch.full((1, *SHAPE), 3.0))
    with pytest.raises(CheckpointError, match="unknown kind 'scaled identity'"):
        block_from_tensors(block.storage, block.shape, block.tensors())
    assert register_block(ScaledIdentity) is ScaledIdentity
    again = block_from_tensors(block.storage, block.shape, block.tensors())
    assert isinstance(again, ScaledIdentity)
    torch.testing.assert_close(again.dense(torch.ones(1)), block.dense(torch.ones(1)))

    class Other(ScaledIdentity):
        storage = "dense"

    with pytest.raises(ConfigurationError, match="Cannot register the block Other"):
        register_block(Other)
