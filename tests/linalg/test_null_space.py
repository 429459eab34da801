"""The projector onto a null space: invariants, statuses, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal
from torch import Tensor
from torch.autograd import gradcheck

from laplace_plus.linalg.null_space import project_null_space

EXACT = {"atol": 1e-14, "btol": 1e-14}


def conditioned(m: int, n: int, seed: int = 0) -> Tensor:
    U, _, Vh = torch.linalg.svd(normal(m, n, seed=seed), full_matrices=False)
    return (U * torch.linspace(1, 5, min(m, n), dtype=torch.float64)) @ Vh


def project(A: Tensor, v: Tensor, **options: float) -> Tensor:
    return project_null_space(lambda x: x @ A.mT, lambda u: u @ A, v, **options).value  # type: ignore[arg-type]


@given(m=st.integers(1, 12), n=st.integers(1, 20), rank=st.integers(0, 12), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_is_the_orthogonal_projector(m: int, n: int, rank: int, seed: int) -> None:
    rank = min(m, n, rank)
    A = conditioned(m, rank, seed) @ conditioned(rank, n, seed + 1) if rank else torch.zeros(m, n, dtype=torch.float64)
    v, u = normal(3, n, seed=seed), normal(3, n, seed=seed + 5)
    Pv, Pu = project(A, v), project(A, u)
    scale = float(v.norm(dim=-1).max())
    assert (Pv @ A.mT).norm(dim=-1).max() <= 1e-10 * A.norm() * scale
    torch.testing.assert_close(project(A, Pv), Pv, rtol=0, atol=1e-10 * scale)
    torch.testing.assert_close(Pv @ u.mT, v @ Pu.mT, rtol=0, atol=1e-9 * scale)
    exact = torch.linalg.svd(A)[2][rank:]
    torch.testing.assert_close(Pv, v @ exact.mT @ exact, rtol=0, atol=1e-10 * scale)


def test_an_ill_conditioned_operator() -> None:
    U, _, Vh = torch.linalg.svd(normal(20, 50), full_matrices=False)
    A = (U * torch.logspace(0, -4, 20, dtype=torch.float64)) @ Vh
    v = normal(50, seed=1)
    solution = project_null_space(lambda x: x @ A.mT, lambda u: u @ A, v)
    assert solution.converged and (A @ solution.value).norm() <= 1e-10 * v.norm()


@pytest.mark.quick("2-1-4", "0-6-3", "0-4-4")
@pytest.mark.parametrize(("m", "n"), [(3, 6), (1, 4), (6, 3), (4, 4)])
@pytest.mark.parametrize("rows", [0, 2])
def test_gradients(m: int, n: int, rows: int) -> None:
    A, v = conditioned(m, n).requires_grad_(), normal(*[rows] * (rows > 0), n, seed=1).requires_grad_()
    every_entry = (m, n) == (3, 6)
    inputs, limits = (A, v), {"eps": 1e-6, "atol": 1e-8, "rtol": 0}
    assert gradcheck(lambda A, v: project(A, v, **EXACT), inputs, **limits, fast_mode=not every_entry)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_at_constant_rank(transposed: bool) -> None:
    left, right = conditioned(5, 2).requires_grad_(), conditioned(2, 6, seed=1).requires_grad_()
    v = normal(6, seed=1).requires_grad_()

    def value(left: Tensor, right: Tensor, v: Tensor) -> Tensor:
        rmatvec = (lambda u: u @ left @ right) if transposed else None
        return project_null_space(lambda x: x @ right.mT @ left.mT, rmatvec, v, **EXACT).value

    assert gradcheck(value, (left, right, v), eps=1e-6, atol=1e-8, rtol=0, fast_mode=True)


def test_a_zero_operator_is_the_identity_and_has_a_gradient() -> None:
    A, v = torch.zeros(3, 5, dtype=torch.float64), normal(5).requires_grad_()
    value = project(A, v)
    value.sum().backward()
    assert torch.equal(value, v) and (v.grad == 1).all()
