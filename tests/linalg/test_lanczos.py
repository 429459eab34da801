"""Lanczos' decomposition: its equations, and what is not a symmetric operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal, with_spectrum
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import LanczosDecomposition, lanczos

float64 = torch.float64


def loss_of_orthogonality(found: LanczosDecomposition) -> float:
    gram = found.vectors @ found.vectors.mT
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max())


def equation_error(a: Tensor, found: LanczosDecomposition) -> float:
    """Largest entry of A Q − Q T − r e_Kᵀ, relative to the norm of A."""
    rest = found.vectors @ a.T - found.tridiagonal() @ found.vectors
    rest[..., -1, :] -= found.residual
    return float(rest.abs().max() / torch.linalg.matrix_norm(a, 2))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 40),
    depth=st.integers(1, 45),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, float64]),
    logarithm=st.floats(0, 6),
    seed=st.integers(0, 1000),
)
def test_the_equations_hold(n, depth, batch, dtype, logarithm, seed):
    a = with_spectrum(torch.logspace(0, -logarithm, n, dtype=float64), seed).to(dtype)
    v = normal(*batch, n, seed=seed + 1).to(dtype)
    found = lanczos(lambda x: x @ a, v, min(depth, n))
    depth = found.vectors.shape[-2]
    assert depth <= n and found.vectors.shape == (*batch, depth, n) and found.residual.shape == v.shape
    limit = 1e-12 if dtype == float64 else 2e-6
    if bool((found.rank == depth).all()):
        assert loss_of_orthogonality(found) <= limit
        assert equation_error(a, found) <= limit
        assert float((found.vectors @ found.residual[..., None]).abs().max()) <= limit
    torch.testing.assert_close(found.vectors[..., 0, :], v * found.scale[..., None])
    assert bool((found.off_diagonal >= 0).all())


def test_spectrum_at_full_depth():
    spectrum = torch.linspace(-3, 5, 60, dtype=float64)
    a = with_spectrum(spectrum)
    found = lanczos(lambda x: x @ a, normal(60, seed=1), 60)
    assert found.converged and found.matvecs == 60
    torch.testing.assert_close(torch.linalg.eigvalsh(found.tridiagonal()), spectrum, rtol=0, atol=1e-10)


def test_one_stacked_product_a_step():
    a, shapes = with_spectrum(torch.linspace(1, 2, 20, dtype=float64)), []

    def operator(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x @ a

    for batch in ((), (3,), (2, 2)):
        shapes.clear()
        found = lanczos(operator, normal(*batch, 20), 7)
        flat = (normal(*batch, 1).numel(), 20) if batch else (20,)
        assert shapes == [flat] * 7
        assert found.matvecs == 7 * normal(*batch, 1).numel()


def test_a_stack_is_its_vectors():
    a, v = with_spectrum(torch.linspace(1, 2, 20, dtype=float64)), normal(2, 3, 20)
    together = lanczos(lambda x: x @ a, v, 8)
    for i in range(2):
        for j in range(3):
            alone = lanczos(lambda x: x @ a, v[i, j], 8)
            torch.testing.assert_close(together.vectors[i, j], alone.vectors, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(together.tridiagonal()[i, j], alone.tridiagonal(), rtol=1e-11, atol=1e-11)


def test_invariant_subspaces():
    """A vector within k eigenspaces ends after k steps; the others of its stack go on."""
    d = torch.tensor([1.0, 2.0, 4.0, 7.0, 11.0, 11.0], dtype=float64)
    v = torch.tensor([[1.0, 0, 0, 0, 0, 0], [1.0, 1, 1, 0, 0, 0], [1.0, 1, 1, 1, 1, 1]], dtype=float64)
    found = lanczos(lambda x: x * d, v, 6)
    assert found.rank.tolist() == [1, 3, 5] and found.vectors.shape == (3, 5, 6) and found.converged
    for i, rank in enumerate([1, 3, 5]):
        assert not found.vectors[i, rank:].any() and not found.diagonal[i, rank:].any()
        assert not found.off_diagonal[i, rank - 1 :].any()
        expected = d[: rank if rank < 5 else 5]
        values = torch.linalg.eigvalsh(found.tridiagonal()[i, :rank, :rank])
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    alone = lanczos(lambda x: x, normal(9), 5)
    assert alone.rank == 1 and alone.diagonal.shape == (1,) and alone.off_diagonal.shape == (0,)
    zero = lanczos(lambda x: 0 * x, normal(9), 5)
    assert zero.rank == 1 and zero.diagonal.tolist() == [0.0]


def test_an_operator_that_is_not_symmetric():
    a = with_spectrum(torch.linspace(1, 2, 10, dtype=float64))
    skew = torch.zeros(10, 10, dtype=float64)
    skew[3, 7] = 1e-4
    with pytest.raises(OperatorError, match="not symmetric"):
        lanczos(lambda x: x @ (a + skew).T, normal(10), 6)
    lanczos(lambda x: x @ (a + skew).T, normal(10), 6, check_symmetry=False)
    single = with_spectrum(torch.logspace(-3, 3, 300, dtype=float64)).float()
    lanczos(lambda x: (x.double() @ single.double() * (1 + 1e-7 * x.double().sin())).float(), normal(300).float(), 40)


def test_types():
    a = with_spectrum(torch.linspace(1, 2, 12, dtype=float64))
    found = lanczos(lambda x: x @ a.float(), normal(12).float(), 4)
    assert found.vectors.dtype == torch.float32
    half = lanczos(lambda x: x @ a.to(torch.bfloat16), normal(12).to(torch.bfloat16), 4)
    assert half.vectors.dtype == torch.float32 and loss_of_orthogonality(half) <= 1e-6
    torch.testing.assert_close(half.diagonal, found.diagonal, rtol=0.05, atol=0.05)


SPECTRA = {
    "low rank + I": torch.cat([torch.logspace(0, 4, 20), torch.ones(180)]),
    "algebraic": torch.arange(1.0, 201) ** -2,
    "exponential": 0.7 ** torch.arange(200.0),
    "two clusters": torch.cat([torch.ones(100), torch.full((100,), 1.001)]) + torch.linspace(0, 1e-6, 200),
    "condition 1e12": torch.logspace(-12, 0, 200, dtype=float64),
    "indefinite": torch.linspace(-1, 1, 200) ** 3,
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, float64], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_vectors_stay_orthogonal(spectrum, dtype):
    """To rounding, whatever converges on the way."""
    a = with_spectrum(spectrum.double()).to(dtype)
    found = lanczos(lambda x: x @ a, normal(200, seed=1).to(dtype), 80)
    loss = (found.vectors @ found.vectors.T - torch.eye(len(found.vectors), dtype=dtype)).abs().max()
    assert loss <= 20 * torch.finfo(dtype).eps


def test_vectors_of_a_noisy_operator_are_orthogonal():
    a = with_spectrum(torch.logspace(-6, 0, 200, dtype=float64))
    noise = 1e-3 * normal(200, 200, seed=2) / 200**0.5
    found = lanczos(lambda x: x @ (a + noise), normal(200, seed=1), 80, check_symmetry=False)
    assert len(found.vectors) == 80
    assert (found.vectors @ found.vectors.T - torch.eye(80, dtype=float64)).abs().max() <= 1e-14


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, float64], ids=str)
@pytest.mark.parametrize("width", [12, 50, 2000])
def test_orthogonal_among_roundings(width, dtype):
    """All eigenvalues but one are some roundings of it: one pass would leave as much as the new vector."""
    n, eps = 2000, torch.finfo(dtype).eps
    spectrum = torch.linspace(-2 * width * eps, 2 * width * eps, n, dtype=dtype)
    spectrum[0] = 1
    found = lanczos(lambda x: x * spectrum, normal(n, seed=1).to(dtype), 100)
    loss = (found.vectors @ found.vectors.T - torch.eye(len(found.vectors), dtype=dtype)).abs().max()
    assert loss <= 40 * eps


@pytest.mark.slow  # its like: tests/kernels/test_reductions.py
def test_a_long_single_precision_basis_with_an_outlier():
    n = 300_000
    spectrum = torch.linspace(-5e-4, 5e-4, n)
    spectrum[0] = 1
    vectors = lanczos(lambda x: x * spectrum, torch.randn(n, generator=torch.Generator().manual_seed(1)), 30).vectors
    assert (vectors.double() @ vectors.double().T - torch.eye(30, dtype=float64)).abs().max() <= 1e-5
