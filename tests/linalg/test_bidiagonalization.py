"""Golub and Kahan's bidiagonalisation of rectangular operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal

from laplace_plus.linalg import bidiagonalize

float64 = torch.float64


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    depth=st.integers(1, 45),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, float64]),
    transpose=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_equations_hold(m, n, depth, batch, dtype, transpose, seed):
    a, v = normal(m, n, seed=seed).to(dtype), normal(*batch, n, seed=seed + 1).to(dtype)
    found = bidiagonalize(lambda x: x @ a.T, v, depth, m=m, rmatvec=(lambda x: x @ a) if transpose else None)
    depth, limit, norm = min(depth, m, n), 1e-12 if dtype == float64 else 2e-6, float(torch.linalg.matrix_norm(a, 2))
    assert found.left.shape == (*batch, depth, m) and found.right.shape == (*batch, depth, n)
    assert found.matvecs == 2 * depth * v.shape[:-1].numel()
    for vectors in (found.left, found.right):
        assert float((vectors @ vectors.mT - torch.eye(depth, dtype=dtype)).abs().max()) <= limit
    small = found.bidiagonal()
    assert float((found.right @ a.T - small.mT @ found.left).abs().max()) <= limit * norm
    rest = found.left @ a - small @ found.right
    rest[..., -1, :] -= found.residual
    assert float(rest.abs().max()) <= limit * norm
    torch.testing.assert_close(found.right[..., 0, :], v * found.scale[..., None])


@pytest.mark.parametrize(("m", "n"), [(30, 20), (20, 20)])
def test_singular_values_at_full_depth(m, n):
    a = normal(m, n)
    found = bidiagonalize(lambda x: x @ a.T, normal(n, seed=1), 50, m=m)
    assert found.converged
    torch.testing.assert_close(torch.linalg.svdvals(found.bidiagonal()), torch.linalg.svdvals(a), rtol=0, atol=1e-10)


def test_small_singular_values_are_not_squared():
    u, v = torch.linalg.qr(normal(20, 10))[0], torch.linalg.qr(normal(10, 10, seed=1))[0]
    spectrum = torch.logspace(0, -12, 10, dtype=float64)
    a = (u * spectrum) @ v.T
    found = bidiagonalize(lambda x: x @ a.T, normal(10, seed=2), 10, m=20)
    torch.testing.assert_close(torch.linalg.svdvals(found.bidiagonal()), spectrum, rtol=0, atol=1e-15)


def test_rank_deficient_operators_end_early():
    a = normal(12, 3) @ normal(3, 9, seed=1)
    null = torch.linalg.svd(a)[2][-1]
    v = torch.stack([normal(9, seed=2), torch.linalg.svd(a)[2][0]])
    found = bidiagonalize(lambda x: x @ a.T, v, 8, m=12)
    assert found.rank.tolist() == [3, 1] and found.left.shape == (2, 3, 12)
    # A v_4 would lie in the span of U: v_4 stays as the residual
    values = torch.linalg.svdvals(torch.cat([found.bidiagonal()[0], found.left[0] @ a @ found.residual[0, :, None]], 1))
    assert float(values[0]) <= float(torch.linalg.svdvals(a)[0]) * (1 + float(found.residual[0].norm()))
    rest = found.left[0] @ a - found.bidiagonal()[0] @ found.right[0]
    rest[-1] -= found.residual[0]
    assert float(rest.abs().max()) <= 1e-12
    assert not found.left[1, 1:].any() and not found.right[1, 1:].any()
    nothing = bidiagonalize(lambda x: x @ (a - (a @ null)[:, None] * null).T, null.clone(), 4, m=12)
    assert nothing.rank == 0 or float(nothing.diagonal[0]) <= 1e-13
    zero = bidiagonalize(lambda x: 0 * x, normal(5).requires_grad_(), 3)
    assert zero.rank == 0 and zero.converged and not zero.left.any() and not zero.bidiagonal().any()


def test_scale_is_differentiable_even_where_nothing_else_is():
    v = normal(5).requires_grad_()
    gradient = torch.autograd.grad(bidiagonalize(lambda x: 0 * x, v, 3).scale, v)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(1 / v.norm(), v)[0])
