"""LSMR: SciPy's iterates, statuses, and exact gradients for every shape and rank."""

from __future__ import annotations

import math

import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal
from torch import Tensor
from torch.autograd import gradcheck

from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg.lsmr import LeastSquaresSolution, lsmr
from laplace_plus.linalg.operators import Dense
from laplace_plus.linalg.solving import Status

EXACT = {"atol": 1e-14, "btol": 1e-14, "conlim": 1e12}
SHAPES = {"tall": (8, 5), "wide": (5, 8), "square": (6, 6), "row": (1, 4), "column": (4, 1)}


def matrix(m: int, n: int, condition: float = 5.0, seed: int = 0) -> Tensor:
    """Of full rank, with singular values from ``condition`` down to 1."""
    U, _, Vh = torch.linalg.svd(normal(m, n, seed=seed), full_matrices=False)
    return (U * torch.logspace(math.log10(condition), 0, min(m, n), dtype=torch.float64)) @ Vh


def solve(A: Tensor, b: Tensor, **options: object) -> LeastSquaresSolution:
    return lsmr(lambda v: v @ A.mT, lambda u: u @ A, b, **options)  # type: ignore[arg-type]


def dense(A: Tensor, b: Tensor, damp: float = 0.0) -> Tensor:
    """``argmin ‖A x - b‖² + λ²‖x‖²``, of least norm."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    gains = torch.where(1e-10 * S.max() >= S, 0.0, S / (S.square() + damp**2))
    return (b @ U * gains) @ Vh


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_iterates_are_scipys(shape: tuple[int, int], damp: float) -> None:
    A, b = matrix(5 * shape[0], 5 * shape[1], 10.0), normal(5 * shape[0], seed=1)
    none = {"atol": 0.0, "btol": 0.0, "conlim": 0.0}
    # Later the vectors are no longer orthogonal, and rounding decides where the iteration goes next, also in SciPy's.
    for k in range(1, min(11, min(A.shape) + 1)):
        theirs = scipy.sparse.linalg.lsmr(A.numpy(), b.numpy(), damp=damp, maxiter=k, **none)
        ours = solve(A, b, damp=damp, max_iterations=k, **none)
        torch.testing.assert_close(ours.value, torch.from_numpy(theirs[0]), rtol=1e-8, atol=1e-8)
        for mine, other in ((ours.misfit, theirs[3]), (ours.residual, theirs[4]), (ours.operator_norm, theirs[5])):
            assert float(mine) == pytest.approx(other, rel=1e-6, abs=1e-8)
        assert float(ours.condition_number) == pytest.approx(theirs[6], rel=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_stops_where_scipy_does(shape: tuple[int, int], tolerance: float) -> None:
    A, b = matrix(5 * shape[0], 5 * shape[1]), normal(5 * shape[0], seed=1)
    theirs = scipy.sparse.linalg.lsmr(A.numpy(), b.numpy(), atol=tolerance, btol=tolerance, maxiter=1000)
    ours = solve(A, b, atol=tolerance, btol=tolerance)
    assert theirs[1] in (1, 2) and ours.converged and int(ours.iterations) == theirs[2]


@given(
    m=st.integers(1, 20),
    n=st.integers(1, 20),
    rank=st.integers(1, 20),
    damp=st.sampled_from([0.0, 1e-2, 1.0]),
    rows=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_agrees_with_a_dense_solve(m: int, n: int, rank: int, damp: float, rows: int, seed: int) -> None:
    rank = min(m, n, rank)
    A = matrix(m, rank, seed=seed) @ matrix(rank, n, seed=seed + 1)
    b = normal(*[rows] * (rows > 0), m, seed=seed)
    solution = solve(A, b, damp=damp, atol=1e-13, btol=1e-13)
    assert solution.status <= Status.STAGNATED
    torch.testing.assert_close(solution.value, dense(A, b, damp), rtol=1e-7, atol=1e-7)
    misfit = ((b - solution.value @ A.mT).square().sum(-1) + damp**2 * solution.value.square().sum(-1)).sqrt()
    torch.testing.assert_close(solution.misfit, misfit, rtol=1e-6, atol=1e-8 * float(1 + b.norm()))


def test_nan_in_the_operator_and_in_the_damping() -> None:
    for solution in (
        lsmr(lambda v: v * torch.nan, lambda u: u, normal(5)),
        lsmr(lambda v: v, lambda u: u * torch.nan, normal(5)),
        lsmr(lambda v: v, lambda u: u, normal(5), damp=math.nan),
    ):
        assert solution.status is Status.NOT_FINITE and solution.value.isnan().all()


def test_the_other_statuses() -> None:
    A, b = matrix(20, 12, 1e3), normal(20, seed=1)
    capped = solve(A, b, max_iterations=3)
    assert capped.status is Status.MAX_ITERATIONS and int(capped.iterations) == 3 and capped.matvecs == 8
    assert solve(A, b, atol=0.0, btol=0.0).status is Status.STAGNATED
    limited = solve(A, b, conlim=10.0)
    assert limited.status is Status.ILL_CONDITIONED and 10 <= float(limited.condition_number) < 1e3


def test_zero_operator_and_zero_rows_and_columns() -> None:
    b = normal(4, seed=1).requires_grad_()
    A = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    solution = solve(A, b)
    assert solution.converged and (solution.value == 0).all()
    solution.value.sum().backward()
    assert (b.grad == 0).all()
    A = matrix(6, 5)
    A[2], A[:, 1] = 0, 0
    damped = solve(A, normal(6, seed=1), damp=0.1)
    assert damped.converged and damped.value[1] == 0
    torch.testing.assert_close(damped.value, dense(A, normal(6, seed=1), 0.1), rtol=1e-8, atol=1e-9)


@pytest.mark.quick("0.0-wide", "1.0-square", "1e-05-wide", "0.0-tall", "0.0-row", "1.0-column")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("damp", [0.0, 1.0, pytest.param(0.05, marks=pytest.mark.slow), 1e-5])
def test_gradients(shape: tuple[int, int], damp: float) -> None:
    A, b = matrix(*shape, condition=3.0).requires_grad_(), normal(shape[0], seed=1).requires_grad_()
    strength = torch.tensor(damp, dtype=torch.float64, requires_grad=damp > 0)

    def value(A: Tensor, b: Tensor, strength: Tensor) -> Tensor:
        return solve(A, b, damp=strength, **EXACT).value

    every_entry = damp == 1.0 and shape == SHAPES["tall"]  # otherwise in one random direction
    assert gradcheck(value, (A, b, strength), eps=1e-6, atol=1e-8, rtol=0, fast_mode=not every_entry)


@pytest.mark.parametrize("damp", [0.0, 1.0, 1e-4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.slow
def test_gradients_at_constant_rank(damp: float, transposed: bool) -> None:
    left, right = matrix(6, 2, 2.0).requires_grad_(), matrix(2, 5, 2.0, seed=1).requires_grad_()
    b = normal(2, 6, seed=1).requires_grad_()

    def value(left: Tensor, right: Tensor, b: Tensor) -> Tensor:
        rmatvec = (lambda u: u @ left @ right) if transposed else None
        return lsmr(lambda v: v @ right.mT @ left.mT, rmatvec, b, damp=damp, n=5, **EXACT).value

    assert gradcheck(value, (left, right, b), eps=1e-6, atol=1e-7, rtol=0)


def test_gradients_of_a_rank_deficient_damped_problem() -> None:
    A, b = (matrix(6, 2) @ matrix(2, 5, seed=1)).requires_grad_(), normal(6, seed=1).requires_grad_()
    damp = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda A, b, d: solve(A, b, damp=d, **EXACT).value, (A, b, damp), eps=1e-6, atol=1e-8, rtol=0)


def test_gradients_of_a_zero_right_hand_side() -> None:
    for damp in (0.0, 0.5):
        A, b = matrix(6, 4).requires_grad_(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
        strength = torch.tensor(damp, dtype=torch.float64, requires_grad=True)
        value = solve(A, b, damp=strength).value
        value.sum().backward()
        assert (value == 0).all() and (A.grad == 0).all() and strength.grad == 0
        expected = dense(A.detach().mT, torch.ones(4, dtype=torch.float64), damp)
        torch.testing.assert_close(b.grad, expected, rtol=1e-8, atol=1e-9)


def test_the_number_of_columns_is_found() -> None:
    A, b = matrix(7, 4), normal(3, 7, seed=1)
    expected = dense(A, b)
    for value in (
        lsmr(lambda v: v @ A.mT, lambda u: u @ A, b).value,
        lsmr(lambda v: v @ A.mT, None, b, n=4).value,
        lsmr(Dense(A), None, b).value,
    ):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-9)
    with pytest.raises(ConfigurationError, match="columns"):
        lsmr(lambda v: v @ A.mT, None, b)


def test_callables_that_take_one_vector_only() -> None:
    A, b = matrix(7, 4).requires_grad_(), normal(7, seed=1)
    value = lsmr(lambda v: A @ v, lambda u: A.mT @ u, b).value
    torch.testing.assert_close(value.detach(), dense(A.detach(), b), rtol=1e-8, atol=1e-9)
    value.sum().backward()
    B = A.detach().clone().requires_grad_()
    solve(B, b).value.sum().backward()
    torch.testing.assert_close(A.grad, B.grad, rtol=1e-7, atol=1e-9)
