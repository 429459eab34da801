"""Conjugate gradients: solutions, statuses, preconditioners, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal, with_spectrum
from torch import Tensor
from torch.autograd import gradcheck

from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.linalg.solving import Status


def definite(n: int = 30, condition: float = 1e2, seed: int = 0) -> Tensor:
    return with_spectrum(torch.logspace(0, torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64), seed)


def vectors(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed)


def dense(A: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(A, b[..., None])[..., 0]


@given(n=st.integers(1, 30), rows=st.integers(0, 4), condition=st.floats(1, 1e4), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_agrees_with_a_dense_solve(n: int, rows: int, condition: float, seed: int) -> None:
    A, b = definite(n, condition, seed), vectors(*[rows] * (rows > 0), n, seed=seed)
    solution = cg(lambda v: v @ A.T, b, rtol=1e-11)
    assert solution.status <= Status.STAGNATED
    torch.testing.assert_close(solution.value, dense(A, b), rtol=1e-7, atol=1e-9 * float(b.norm()))
    torch.testing.assert_close(solution.residual, (b - solution.value @ A.T).norm(dim=-1), rtol=1e-6, atol=1e-12)


def test_an_indefinite_operator_breaks_down() -> None:
    A = with_spectrum(torch.tensor([-3.0, -1, 1, 2, 4, 9], dtype=torch.float64))
    solution = cg(lambda v: v @ A.T, vectors(6))
    assert solution.status is Status.BREAKDOWN and solution.value.isfinite().all()


def test_a_preconditioner_that_is_not_definite_breaks_down() -> None:
    A = definite()
    assert cg(lambda v: v @ A.T, vectors(30), preconditioner=lambda r: -r).status is Status.BREAKDOWN


def test_a_singular_inconsistent_system_is_ill_conditioned() -> None:
    A = torch.diag(torch.tensor([1.0, 1e-17], dtype=torch.float64))
    solution = cg(lambda v: v @ A.T, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert solution.status is Status.ILL_CONDITIONED and solution.value.abs().max() < 1e3


def test_the_cap_and_the_limits_of_rounding() -> None:
    A, b = definite(condition=1e6), vectors(30)
    capped = cg(lambda v: v @ A.T, b, max_iterations=4)
    assert capped.status is Status.MAX_ITERATIONS and int(capped.iterations) == 4 and capped.matvecs == 5
    stuck = cg(lambda v: v @ A.T, b, rtol=1e-16)
    assert stuck.status is Status.STAGNATED and 0 < stuck.residual < 1e-8


def test_tolerances() -> None:
    A, b = definite(60, 1e4), vectors(60)
    loose, tight = cg(lambda v: v @ A.T, b, rtol=1e-2), cg(lambda v: v @ A.T, b, rtol=1e-8)
    absolute = cg(lambda v: v @ A.T, b, rtol=0.0, atol=0.5)
    assert 1e-8 * b.norm() < loose.residual <= 1e-2 * b.norm() and tight.residual <= 2e-8 * b.norm()
    assert loose.iterations < tight.iterations and absolute.residual <= 0.5 and absolute.iterations < tight.iterations


def test_a_good_first_guess_saves_iterations() -> None:
    A, b = definite(60, 1e3), vectors(60)
    exact = torch.linalg.solve(A, b)
    cold, warm = cg(lambda v: v @ A.T, b), cg(lambda v: v @ A.T, b, x0=exact + 1e-6)
    assert warm.iterations < cold.iterations and int(cg(lambda v: v @ A.T, b, x0=exact).iterations) == 0
    torch.testing.assert_close(warm.value, exact, rtol=1e-6, atol=1e-8)


def test_a_nystroem_preconditioner_needs_fewer_iterations_the_larger_its_rank() -> None:
    n, shift = 400, 0.01
    eigenvalues = 10.0 * torch.arange(1, n + 1, dtype=torch.float64).pow(-2)
    A = with_spectrum(eigenvalues)
    b = vectors(3, n)
    exact = dense(A + shift * torch.eye(n, dtype=torch.float64), b)
    counts = [_with_nystroem(A, shift, b, exact, rank) for rank in (0, 10, 20, 40)]
    assert counts == sorted(counts, reverse=True) and counts[-1] * 3 < counts[0]


def _with_nystroem(A: Tensor, shift: float, b: Tensor, exact: Tensor, rank: int) -> int:
    precondition = None
    if rank:
        generator = torch.Generator().manual_seed(7)
        approximation = nystrom(lambda v: v @ A.T, len(A), rank, dtype=A.dtype, generator=generator)
        precondition = approximation.preconditioner(shift)
    solution = cg(lambda v: v @ A.T + shift * v, b, preconditioner=precondition, rtol=1e-10)
    assert solution.converged
    torch.testing.assert_close(solution.value, exact, rtol=1e-6, atol=1e-7)
    return int(solution.iterations.max())


@pytest.mark.quick("False-shape1", "True-shape2")
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 1, 6)])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_gradients(shape: tuple[int, ...], preconditioned: bool) -> None:
    A, b = definite(6, 20.0).requires_grad_(), vectors(*shape).requires_grad_()

    def solve(A: Tensor, b: Tensor) -> Tensor:
        S = (A + A.T) / 2
        scale = 1 / S.diagonal().detach()
        preconditioner = (lambda r: r * scale) if preconditioned else None
        return cg(lambda v: v @ S, b, preconditioner=preconditioner, rtol=1e-13).value

    assert gradcheck(solve, (A, b), eps=1e-6, atol=1e-7, rtol=0, fast_mode=len(shape) > 1)


def test_nothing_flows_into_the_preconditioner_and_the_first_guess() -> None:
    A, b = definite(6), vectors(6)
    scale, x0 = torch.ones(6, dtype=torch.float64, requires_grad=True), vectors(6, seed=3).requires_grad_()
    value = cg(lambda v: v @ A, b.requires_grad_(), preconditioner=lambda r: r * scale, x0=x0).value
    value.sum().backward()
    assert scale.grad is None and x0.grad is None
    torch.testing.assert_close(b.grad, torch.linalg.solve(A, torch.ones(6, dtype=torch.float64)), rtol=1e-7, atol=1e-9)
