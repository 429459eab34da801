"""What all solvers must do; what is particular to one of them is tested in its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import normal, with_singular_values, with_spectrum
from torch import Tensor

from laplace_plus.errors import ConvergenceWarning, OperatorError
from laplace_plus.linalg import Solution, Status, cg, lsmr, project_null_space

N = 21
SPECTRUM = torch.linspace(1, 20, N, dtype=torch.float64)
DEFINITE = with_spectrum(SPECTRUM)
TALL = with_singular_values(N, 12, torch.linspace(1, 20, 12, dtype=torch.float64))
WIDE = with_singular_values(12, N, torch.linspace(1, 20, 12, dtype=torch.float64))
IDENTITY = torch.eye(N, dtype=torch.float64)

Solve = Callable[..., Solution]


def by_lsmr(A: Tensor, b: Tensor, **options: Any) -> Solution:
    return lsmr(lambda v: v @ A.mT, lambda u: u @ A, b, **options)


def by_projection(A: Tensor, b: Tensor, **options: Any) -> Solution:
    return project_null_space(lambda v: v @ A.mT, lambda u: u @ A, b, **options)


# Each solves for one matrix, with the map from right-hand sides to solutions as a dense matrix.
SOLVERS: dict[str, tuple[Solve, Tensor, Tensor]] = {
    "cg": (lambda A, b, **o: cg(lambda v: v @ A.mT, b, **o), DEFINITE, torch.linalg.inv(DEFINITE)),
    "preconditioned cg": (
        lambda A, b, **o: cg(lambda v: v @ A.mT, b, preconditioner=lambda r: r / SPECTRUM.to(b.dtype).sqrt(), **o),
        DEFINITE,
        torch.linalg.inv(DEFINITE),
    ),
    "lsmr": (by_lsmr, TALL, torch.linalg.pinv(TALL)),
    "damped lsmr": (
        lambda A, b, **o: by_lsmr(A, b, damp=0.3, **o),
        TALL,
        torch.linalg.inv(TALL.mT @ TALL + 0.09 * torch.eye(12, dtype=torch.float64)) @ TALL.mT,
    ),
    "project_null_space": (by_projection, WIDE, IDENTITY - torch.linalg.pinv(WIDE) @ WIDE),
}
each = pytest.mark.parametrize(("solve", "A", "exact"), SOLVERS.values(), ids=SOLVERS)


@pytest.mark.diagonal
@each
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0,)])
def test_right_hand_sides_are_independent(solve: Solve, A: Tensor, exact: Tensor, shape: tuple[int, ...]) -> None:
    b = normal(*shape, N, seed=1)
    together = solve(A, b)
    assert together.converged and together.statuses.shape == together.residual.shape == shape
    torch.testing.assert_close(together.value, b @ exact.mT, rtol=1e-7, atol=1e-8)
    for index in torch.zeros(shape).nonzero().tolist() or [[0] * len(shape)] * (b.numel() > 0):
        alone = solve(A, b[tuple(index)])
        torch.testing.assert_close(together.value[tuple(index)], alone.value, rtol=1e-8, atol=1e-9)
        assert abs(int(together.iterations[tuple(index)]) - int(alone.iterations)) <= 1


@each
def test_zero_and_nan_right_hand_sides_leave_the_others_alone(solve: Solve, A: Tensor, exact: Tensor) -> None:
    b = normal(2, 2, N, seed=1)
    b[0, 1], b[1, 0, 3] = 0, torch.nan
    solution = solve(A, b)
    assert solution.statuses.tolist() == [[Status.CONVERGED] * 2, [Status.NOT_FINITE, Status.CONVERGED]]
    assert (solution.value[0, 1] == 0).all() and solution.value[1, 0].isnan().all() and not solution.converged
    for i in (0, 1):
        torch.testing.assert_close(solution.value[i, i], exact @ b[i, i], rtol=1e-7, atol=1e-8)


@each
def test_an_operator_that_gives_nan(solve: Solve, A: Tensor, exact: Tensor) -> None:
    for b in (normal(N, seed=1), normal(2, N, seed=1)):
        solution = solve(A * torch.nan, b)
        assert solution.status is Status.NOT_FINITE and solution.value.isnan().all()


@pytest.mark.diagonal
@each
@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_no_square_under_or_overflows(solve: Solve, A: Tensor, exact: Tensor, shape: tuple[int, ...]) -> None:
    b = normal(*shape, seed=1).float()
    usual = solve(A.float(), b)
    for size in (2.0**-90, 2.0**-70, 2.0**70, 2.0**118):
        scaled = solve(A.float(), size * b)
        assert scaled.status is usual.status and torch.equal(scaled.iterations, usual.iterations)
        assert torch.equal(scaled.value / size, usual.value) and torch.equal(scaled.residual / size, usual.residual)


@each
def test_gradients_of_a_zero_right_hand_side(solve: Solve, A: Tensor, exact: Tensor) -> None:
    A, b = A.clone().requires_grad_(), torch.zeros(N, dtype=torch.float64, requires_grad=True)
    value = solve(A, b).value
    value.sum().backward()
    assert (value == 0).all() and (A.grad == 0).all()
    torch.testing.assert_close(b.grad, exact.sum(0), rtol=1e-7, atol=1e-8)


@each
def test_a_solution_that_is_not_used_does_not_spoil_the_gradient(solve: Solve, A: Tensor, exact: Tensor) -> None:
    one, other, b = A.clone().requires_grad_(), A.clone().requires_grad_(), normal(2, N, seed=1)
    b[1] = torch.nan
    solve(one, b).value[0].sum().backward()
    solve(other, b[0]).value.sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-8)


@each
def test_a_backward_solve_that_fails_warns(solve: Solve, A: Tensor, exact: Tensor) -> None:
    # a right-hand side whose solution takes one or two iterations, unlike that of the backward solve
    b = torch.linalg.svd(A)[0][:, 0] if A.shape[0] == N else torch.linalg.svd(A)[2][-1]
    value = solve(A, b.requires_grad_(), max_iterations=3).value
    with pytest.warns(ConvergenceWarning, match="MAX_ITERATIONS"):
        (value * normal(*value.shape, seed=4)).sum().backward()


@each
def test_nothing_is_attached_without_gradients(solve: Solve, A: Tensor, exact: Tensor) -> None:
    b, leaf = normal(N), A.clone().requires_grad_()
    with torch.no_grad():
        assert not solve(leaf, b).value.requires_grad
    assert not solve(A, b).value.requires_grad and solve(leaf, b).value.requires_grad


@pytest.mark.diagonal
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(solve: Solve, A: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    b = normal(3, N, seed=1)
    solution = solve(A.to(dtype), b.to(dtype))
    assert solution.value.dtype == dtype
    assert (solution.value.double() - b @ exact.mT).norm() / b.norm() < 50 * torch.finfo(dtype).eps


def test_an_operator_that_is_not_symmetric() -> None:
    A = DEFINITE + torch.triu(torch.ones(N, N, dtype=torch.float64))
    for b in (normal(N, seed=1), normal(2, N, seed=1)):
        with pytest.raises(OperatorError, match="symmetric"):
            cg(lambda v: v @ A.mT, b)


@pytest.mark.parametrize("solve", [by_lsmr, by_projection])
def test_a_wrong_transpose(solve: Solve) -> None:
    A, b = normal(N, N), normal(N, seed=1)
    solver = lsmr if solve is by_lsmr else project_null_space
    with pytest.raises(OperatorError, match="transpose"):
        solver(lambda v: v @ A.mT, lambda u: 2 * u @ A, b)
    with pytest.raises(OperatorError, match="shape"):
        solver(lambda v: (v @ A.mT)[None], lambda u: (u @ A)[None], b)


@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_an_operator_may_return_its_input(shape: tuple[int, ...]) -> None:
    b = normal(*shape, seed=1)
    damped = lsmr(lambda v: v, lambda u: u, b, damp=0.3)
    for value in (cg(lambda v: v, b).value, lsmr(lambda v: v, lambda u: u, b).value, damped.value * 1.09):
        torch.testing.assert_close(value, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_absolute_tolerances(shape: tuple[int, ...]) -> None:
    b = 100 * normal(*shape, seed=1)
    loose, tight = (cg(lambda v: v @ DEFINITE, b, rtol=0.0, atol=atol) for atol in (1.0, 1e-6))
    assert loose.converged and tight.converged and (loose.iterations < tight.iterations).all()
    assert 1e-3 < loose.residual.max() <= 1 and tight.residual.max() <= 1e-6
