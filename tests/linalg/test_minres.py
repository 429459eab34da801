"""MINRES: indefinite systems, shifts, statuses, gradients."""

from __future__ import annotations

import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal, with_spectrum
from torch import Tensor
from torch.autograd import gradcheck

from laplace_plus.errors import ConfigurationError, OperatorError
from laplace_plus.linalg.minres import minres
from laplace_plus.linalg.results import Status


def indefinite(n: int = 30, condition: float = 1e2, seed: int = 0) -> Tensor:
    sizes = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    return with_spectrum(sizes * (1 - 2 * (torch.arange(n) % 2)), seed)


def vectors(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed)


def dense(A: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(A, b[..., None])[..., 0]


@given(n=st.integers(1, 25), rows=st.integers(0, 3), condition=st.floats(1, 300), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_agrees_with_a_dense_solve(n: int, rows: int, condition: float, seed: int) -> None:
    A, b = indefinite(n, condition, seed), vectors(*[rows] * (rows > 0), n, seed=seed)
    solution = minres(lambda v: v @ A.T, b)
    assert solution.status <= Status.STAGNATED
    torch.testing.assert_close(solution.value, dense(A, b), rtol=1e-6, atol=1e-8 * float(b.norm()))
    torch.testing.assert_close(solution.residual, (b - solution.value @ A.T).norm(dim=-1), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("iterations", [1, 2, 5, 15])
def test_iterates_are_scipys(iterations: int) -> None:
    A, b = indefinite(), vectors(30)
    theirs = scipy.sparse.linalg.minres(A.numpy(), b.numpy(), rtol=0, maxiter=iterations)[0]
    ours = minres(lambda v: v @ A.T, b, max_iterations=iterations)
    assert ours.status is Status.MAX_ITERATIONS and int(ours.iterations) == iterations
    torch.testing.assert_close(ours.value, torch.from_numpy(theirs), rtol=1e-9, atol=1e-11)


def test_the_residual_is_the_least_in_the_krylov_space() -> None:
    A, b, depth = indefinite(), vectors(30), 6
    powers = torch.stack([torch.linalg.matrix_power(A / 100, k) @ b for k in range(depth)], 1)
    basis = torch.linalg.qr(powers)[0]
    best = basis @ torch.linalg.lstsq(A @ basis, b[:, None]).solution
    solution = minres(lambda v: v @ A.T, b, max_iterations=depth)
    torch.testing.assert_close(solution.value, best[:, 0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(30,), (3, 30), (1, 2, 30)])
def test_shifts_share_the_products(shape: tuple[int, ...]) -> None:
    A, b = indefinite(), vectors(*shape)
    shifts = torch.tensor([0.0, 0.3, -2.4, 250.0], dtype=torch.float64)
    solution = minres(lambda v: v @ A.T, b, shifts=shifts)
    assert solution.value.shape == (4, *shape) and solution.statuses.shape == (4, *shape[:-1]) and solution.converged
    for t, shift in enumerate(shifts):
        expected = dense(A + shift * torch.eye(30, dtype=torch.float64), b)
        torch.testing.assert_close(solution.value[t], expected, rtol=1e-6, atol=1e-8)
    rows = b.shape[:-1].numel()
    assert solution.matvecs == rows * (int(solution.iterations.max()) + len(shifts))
    assert solution.iterations[3].max() < solution.iterations[0].min()


def test_zero_and_nan_right_hand_sides_leave_the_others_alone() -> None:
    A, b = indefinite(), vectors(4, 30)
    b[1], b[2, 5] = 0, torch.nan
    for shifts in (None, torch.tensor([1.5], dtype=torch.float64)):
        solution = minres(lambda v: v @ A.T, b, shifts=shifts)
        value, statuses = solution.value.view(4, 30), solution.statuses.view(4)
        assert statuses.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.NOT_FINITE, Status.CONVERGED]
        assert (value[1] == 0).all() and value[2].isnan().all()
        shifted = A if shifts is None else A + 1.5 * torch.eye(30, dtype=torch.float64)
        torch.testing.assert_close(value[[0, 3]], dense(shifted, b[[0, 3]]), rtol=1e-7, atol=1e-9)


def test_an_inconsistent_system_gets_a_least_squares_solution() -> None:
    A = with_spectrum(torch.cat([torch.zeros(3, dtype=torch.float64), torch.linspace(-5, 6, 20, dtype=torch.float64)]))
    b = vectors(23)
    solution = minres(lambda v: v @ A.T, b)
    assert solution.status is Status.STAGNATED
    best = (b - A @ torch.linalg.pinv(A, rtol=1e-12) @ b).norm()
    torch.testing.assert_close(solution.residual, best, rtol=1e-6, atol=0)
    assert minres(lambda v: v @ A.T, A @ b).converged


def test_the_other_statuses() -> None:
    A, b = indefinite(), vectors(30)
    assert minres(lambda v: v @ A.T, b, rtol=1e-16).status is Status.STAGNATED
    assert minres(lambda v: v @ A.T, b, preconditioner=lambda r: -r).status is Status.BREAKDOWN
    tiny = torch.tensor([1.0, 1e-17], dtype=torch.float64)
    solution = minres(lambda v: v * tiny, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert solution.status in (Status.ILL_CONDITIONED, Status.STAGNATED) and solution.value.abs().max() < 1e3
    assert minres(lambda v: 0 * v, b).status is Status.STAGNATED


def test_a_preconditioner_and_a_first_guess_save_iterations() -> None:
    A, b = indefinite(40, 1e3), vectors(2, 40)
    exact = dense(A, b)
    values, basis = torch.linalg.eigh(A)
    inverse = (basis / values.abs()) @ basis.T
    plain = minres(lambda v: v @ A.T, b)
    preconditioned = minres(lambda v: v @ A.T, b, preconditioner=lambda r: r @ inverse)
    warm = minres(lambda v: v @ A.T, b, x0=exact + 1e-7)
    assert preconditioned.iterations.max() <= 3 and (warm.iterations < plain.iterations).all()
    for solution in (preconditioned, warm):
        assert solution.converged
        torch.testing.assert_close(solution.value, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(6,), (2, 6)])
@pytest.mark.parametrize("shifted", [False, True])
def test_gradients(shape: tuple[int, ...], shifted: bool) -> None:
    A, b = indefinite(6, 10.0).requires_grad_(), vectors(*shape).requires_grad_()
    shifts = torch.tensor([0.1, -0.3, 20.0], dtype=torch.float64, requires_grad=True)

    def solve(A: Tensor, b: Tensor, shifts: Tensor) -> Tensor:
        return minres(lambda v: v @ ((A + A.T) / 2), b, shifts=shifts if shifted else None, rtol=1e-13).value

    inputs = (A, b, shifts if shifted else shifts.detach())
    assert gradcheck(solve, inputs, eps=1e-6, atol=1e-7, rtol=0, fast_mode=len(shape) > 1)


def test_bad_arguments() -> None:
    A, b = indefinite(5), vectors(5)
    with pytest.raises(OperatorError, match="symmetric"):
        minres(lambda v: v @ (A + torch.triu(torch.ones_like(A))).T, b)
    shifts = torch.zeros(2, dtype=torch.float64)
    for bad in (
        {"shifts": shifts, "x0": b},
        {"shifts": shifts, "preconditioner": lambda r: r},
        {"shifts": shifts[:0]},
        {"shifts": shifts[None]},
        {"shifts": 1.0},
        {"rtol": -1.0},
        {"max_iterations": 0},
    ):
        with pytest.raises(ConfigurationError):
            minres(lambda v: v @ A, b, **bad)
    assert minres(lambda v: v @ A, vectors(0, 5)).value.shape == (0, 5)
