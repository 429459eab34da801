"""Block Lanczos' decomposition, and blocks that shrink."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NonFiniteError, OperatorError
from laplace_plus.linalg import BlockLanczosDecomposition, block_lanczos, lanczos

float64 = torch.float64


def symmetric(n: int, seed: int = 0) -> Tensor:
    a = normal(n, n, seed=seed)
    return (a + a.T) / 2


def check(a: Tensor, x: Tensor, found: BlockLanczosDecomposition, orthogonality: float, equation: float) -> None:
    q, size = found.vectors, found.block_sizes[-1]
    assert q.shape[0] == sum(found.block_sizes)
    assert float((q @ q.T - torch.eye(q.shape[0], dtype=q.dtype)).abs().max()) <= orthogonality
    norm = float(torch.linalg.matrix_norm(a, 2))
    assert float((q @ a @ q.T - found.matrix).abs().max()) <= equation * norm
    rest = q @ a - found.matrix @ q
    rest[-size:] -= found.residual
    assert float(rest.abs().max()) <= equation * norm
    assert float((found.start.T @ q[: found.block_sizes[0]] - x).abs().max()) <= equation * float(x.norm())


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    p=st.integers(1, 6),
    depth=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, float64]),
    seed=st.integers(0, 1000),
)
def test_the_equations_hold(n, p, depth, dtype, seed):
    a, x = symmetric(n, seed).to(dtype), normal(p, n, seed=seed + 1).to(dtype)
    found = block_lanczos(lambda v: v @ a, x, depth)
    check(a, x, found, *((2e-14, 1e-13) if dtype == float64 else (5e-6, 5e-6)))
    assert found.matvecs == sum(found.block_sizes) == min(n, p * depth)
    assert found.converged == (sum(found.block_sizes) == n)


def test_one_vector_is_lanczos():
    a, v = symmetric(20), normal(1, 20, seed=1)
    block, plain = block_lanczos(lambda x: x @ a, v, 8), lanczos(lambda x: x @ a, v[0], 8)
    torch.testing.assert_close(block.matrix, plain.tridiagonal(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(block.vectors, plain.vectors, rtol=1e-11, atol=1e-11)


def test_multiple_eigenvalues_show_up_to_the_size_of_the_block():
    q = torch.linalg.qr(normal(40, 40))[0]
    spectrum = torch.cat([torch.full((3,), 5.0, dtype=float64), torch.linspace(0, 1, 37, dtype=float64)])
    a = (q * spectrum) @ q.T
    for p in (1, 2, 3, 4):
        found = block_lanczos(lambda x: x @ a, normal(p, 40, seed=1), 5)
        assert int((torch.linalg.eigvalsh(found.matrix) > 4.9).sum()) == min(p, 3)


def test_dependent_vectors_shrink_the_block():
    a, x = symmetric(24), normal(3, 24, seed=1)
    x = torch.cat([x, x[:1] - x[1:2], 0 * x[:1]])
    found = block_lanczos(lambda v: v @ a, x, 20)
    assert found.block_sizes == (3,) * 8 and found.converged
    check(a, x, found, 2e-14, 1e-13)
    torch.testing.assert_close(torch.linalg.eigvalsh(found.matrix), torch.linalg.eigvalsh(a), rtol=0, atol=1e-12)
    low_rank = normal(24, 5)
    b = low_rank @ low_rank.T + torch.eye(24, dtype=float64)
    found = block_lanczos(lambda v: v @ b, x[:3], 20)
    assert found.block_sizes == (3, 3, 2) and found.converged
    check(b, x[:3], found, 2e-14, 1e-13)
    # one vector within an eigenspace, the others not
    d = torch.arange(1, 10, dtype=float64)
    y = torch.stack([torch.eye(9, dtype=float64)[0], torch.ones(9, dtype=float64)])
    found = block_lanczos(lambda v: v * d, y, 20)
    assert found.block_sizes == (2, *(1,) * 7)
    check(torch.diag(d), y, found, 2e-14, 1e-13)


def test_nearly_dependent_vectors_stay_orthogonal():
    a, x = symmetric(50), normal(3, 50, seed=1)
    x = torch.cat([x, x[:1] + 1e-11 * normal(1, 50, seed=2)])
    found = block_lanczos(lambda v: v @ a, x, 6)
    assert found.block_sizes[0] == 4
    check(a, x, found, 2e-14, 1e-13)


def test_bad_input():
    a, x = symmetric(8), normal(2, 8)
    with pytest.raises(ConfigurationError):
        block_lanczos(lambda v: v @ a, x[0], 3)
    with pytest.raises(ConfigurationError):
        block_lanczos(lambda v: v @ a, x, 0)
    with pytest.raises(OperatorError, match="zero"):
        block_lanczos(lambda v: v @ a, 0 * x, 3)
    with pytest.raises(NonFiniteError):
        block_lanczos(lambda v: v @ a * float("nan"), x, 3)
    with pytest.raises(NonFiniteError):
        block_lanczos(lambda v: v @ a, x * float("nan"), 3)
    skew = torch.zeros(8, 8, dtype=float64)
    skew[1, 4] = 1e-3
    with pytest.raises(OperatorError, match="not symmetric"):
        block_lanczos(lambda v: v @ (a + skew), x, 3)
    assert block_lanczos(lambda v: v @ (a + skew), x, 3, check_symmetry=False).matrix.shape == (6, 6)
