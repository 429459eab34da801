"""Conjugate gradients for symmetric positive-definite systems, with exact implicit gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import inner, vector_norm
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, require_adjoint, vectors_of, without_autocast
from laplace_plus.linalg.solving import Problem, Solution, Status, attach_solution, ratio, where_used


@without_autocast
def cg(
    matvec: Matvec,
    b: Tensor,
    *,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
    x0: Tensor | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    max_iterations: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    progress: bool = False,
) -> Solution:
    """Solve ``A x = b`` for a symmetric positive-definite A by preconditioned conjugate gradients.

    Several right-hand sides are iterated together, each with its own coefficients; those that converged are left
    unchanged. The iteration ends when the residual of the recurrence meets ``‖r‖ ≤ max(rtol ‖b‖, atol)``. One more
    product computes the true residual, which is returned. Where it exceeds twice the bound, the status is STAGNATED;
    this is usual where ``rtol`` is below the condition number times machine epsilon.

    Costs one product, one preconditioner and about six passes over vectors per iteration, and eight vectors of memory
    per right-hand side. The gradient is that of ``A⁻¹ b``: with the cotangent x̄ it solves ``A w = x̄`` with the same
    preconditioner and tolerances, and returns ``b̄ = w`` and ``Ā = -w xᵀ`` in the operator's tensors. Its error is the
    sum of the errors of both solves. The preconditioner and ``x0`` get no gradient: the solution does not depend on
    them.

    Args:
        matvec: The operator A on row-stacked vectors.
        b: Right-hand sides, ``[..., n]``.
        preconditioner: ``P⁻¹`` on row-stacked vectors, symmetric positive definite.
        x0: First guess, shaped like b.
        rtol: Tolerance relative to ‖b‖; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        atol: Absolute tolerance.
        max_iterations: Cap; ``max(1000, 10 n)`` by default.
        parameters: The tensors to differentiate in.
        progress: Whether to show a progress bar.

    Returns:
        The solutions. Statuses: CONVERGED (also for a zero right-hand side, whose solution is zero), MAX_ITERATIONS,
        STAGNATED, ILL_CONDITIONED (``pᵀAp`` is positive only by rounding), BREAKDOWN (``pᵀAp ≤ 0`` or ``rᵀP⁻¹r ≤ 0``:
        the operator or the preconditioner is not positive definite; the value is the last iterate), and NOT_FINITE (the
        value is NaN).

    Raises:
        ConfigurationError: A bad right-hand side, first guess, tolerance or cap.
        OperatorError: An operator of the wrong shape or type, or one that is not symmetric on the first two search
            directions.

    Source: Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.

    Example:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> cg(lambda v: v @ A.T, torch.tensor([3.0, 4.0])).value.round(decimals=4)
        tensor([1., 1.])
    """
    b = vectors_of("b", b)
    n = b.shape[-1]
    problem = Problem("cg", b, n, atol=atol, rtol=rtol, max_iterations=max_iterations, progress=progress)
    A = problem.map(matvec, n, symmetric=True, parameters=parameters)
    P = None if preconditioner is None else problem.map(preconditioner, n, parameters=(), name="preconditioner")
    if x0 is not None:
        x0 = vectors_of("x0", x0)
        if x0.shape != b.shape or x0.dtype != b.dtype:
            what, got = "x0 does not fit the right-hand sides.", f"{tuple(x0.shape)} of {x0.dtype}"
            raise ConfigurationError(what, expected=f"{tuple(b.shape)} of {b.dtype}", got=got)
        x0 = problem.as_rows(x0) / problem.scale[:, None]
    x, residual = _iterate(A, P, problem, x0)
    matvecs = A.matvecs

    def gradient(x: Tensor, cotangent: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        backward = problem.again(cotangent)
        rows, residual = _iterate(A, P, backward, None)
        backward.warn_unless_converged(*backward.figures(residual, scaled=True))
        w, (used,) = backward.restore(rows), where_used(cotangent, x)
        return [w], [(used, -w)]

    value = attach_solution(problem.restore(x), A, [b], gradient)
    (residual,) = problem.figures(residual, scaled=True)
    iterations, statuses = problem.figures(problem.iterations, problem.statuses)
    return Solution(value, residual, iterations, statuses, matvecs)


@torch.no_grad()
def _iterate(A: LinearMap, P: LinearMap | None, problem: Problem, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Solutions ``[R, n]`` and their true residuals ``[R]``; x is overwritten."""
    b, eps = problem.rows, torch.finfo(problem.rows.dtype).eps
    size = vector_norm(b)
    bound = torch.maximum(problem.rtol * size, problem.atol / problem.scale)
    if x is None:
        x, r = torch.zeros_like(b), b.clone()
    else:
        x = torch.where((size == 0)[:, None], 0.0, x)
        r = b - A(x)
    residual = vector_norm(r)
    problem.finish(~residual.isfinite(), Status.NOT_FINITE)
    problem.finish(residual <= bound, Status.CONVERGED)
    z = r if P is None else P(r)
    energy = inner(r, z)
    problem.finish(~energy.isfinite(), Status.NOT_FINITE)
    problem.finish(energy <= 0, Status.BREAKDOWN)
    p, beta = torch.zeros_like(b), torch.zeros_like(energy)
    # pᵀ P p has its own recurrence, which gives the Rayleigh quotients of P⁻¹A without another product.
    length, largest = energy, torch.zeros_like(energy)
    p0, image0 = p, p
    for k in problem.loop():
        p = problem.only_active(p.mul_(beta[:, None]).add_(z))
        image = A(p)
        if k == 1:
            p0, image0 = p.clone(), image.clone()  # the vector changes, and an operator may return its input
        elif k == 2:
            scale = vector_norm(p0) * vector_norm(image) + vector_norm(image0) * vector_norm(p)
            require_adjoint(inner(p0, image), inner(image0, p), scale, problem.dtype)
        curvature = inner(p, image)
        problem.finish(~curvature.isfinite(), Status.NOT_FINITE)
        problem.finish(curvature <= 0, Status.BREAKDOWN)
        problem.finish(curvature <= eps * largest * length, Status.ILL_CONDITIONED)
        largest = torch.maximum(largest, ratio(curvature, length))
        alpha = torch.where(problem.active, ratio(energy, curvature), 0.0)
        x.addcmul_(alpha[:, None], p)
        r.addcmul_(-alpha[:, None], image)
        problem.iterations += problem.active
        residual = vector_norm(r)
        problem.finish(~residual.isfinite(), Status.NOT_FINITE)
        problem.finish(residual <= bound, Status.CONVERGED)
        z = r if P is None else P(r)
        following = inner(r, z)
        problem.finish(~following.isfinite(), Status.NOT_FINITE)
        problem.finish(following <= 0, Status.BREAKDOWN)
        beta = torch.where(problem.active, ratio(following, energy), 0.0)
        energy, length = following, following + beta * beta * length
    residual = vector_norm(b - A(torch.where(problem.broken[:, None], 0.0, x)))
    wrong = (residual > 2 * bound) & (problem.statuses == int(Status.CONVERGED))
    problem.statuses = torch.where(wrong, int(Status.STAGNATED), problem.statuses)
    x = torch.where(problem.broken[:, None], torch.nan, x)
    return x, residual.masked_fill(problem.broken, torch.nan)
