"""Conjugate gradients for symmetric positive-definite systems, with exact implicit gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.linalg.arguments import without_autocast
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach
from laplace_plus.linalg.results import Solution, Status
from laplace_plus.linalg.solving import (
    Options,
    Progress,
    RightHandSides,
    Rows,
    Scalars,
    add_scaled,
    as_tensor,
    asymmetric_operator,
    asymmetry,
    chosen,
    constant,
    converted,
    inner,
    is_single,
    iterations,
    larger,
    masked,
    norm,
    not_finite,
    parameter_gradients,
    ratio,
    scaled,
    warn_unless_converged,
    where_used,
)


@dataclass(frozen=True)
class CGSolution(Solution):
    """The solution of symmetric positive-definite systems, and the Lanczos coefficients that come with it.

    Attributes:
        tridiagonal: Diagonal ``[..., K]`` and off-diagonal ``[..., K-1]`` of Lanczos' T for the start vector
            ``b - A x0`` (with a preconditioner: T of ``P^(-1/2) A P^(-1/2)``), if asked for. K is the largest number of
            iterations; beyond its own iterations a right-hand side has ones, which are decoupled from the rest.
    """

    tridiagonal: tuple[Tensor, Tensor] | None = None


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
    dtype: torch.dtype | None = None,
    check_symmetry: bool = True,
    return_tridiagonal: bool = False,
    progress: bool = False,
) -> CGSolution:
    """Solve ``A x = b`` for a symmetric positive-definite A by preconditioned conjugate gradients.

    Several right-hand sides are iterated together, each with coefficients of its own, and rest once they converged.
    The iteration ends when the recurrence's residual meets ``‖r‖ ≤ max(rtol ‖b‖, atol)``. One product more checks the
    true residual, which is the one reported: where it exceeds twice that bound, the status is STAGNATED. That is the
    rule rather than the exception where ``rtol`` is below the condition number times the precision of the type.

    Costs one product, one preconditioner and about six passes over vectors per iteration, and eight vectors of memory
    per right-hand side. The gradient is that of ``A⁻¹ b``: with the cotangent x̄ it solves ``A w = x̄`` with the same
    preconditioner and tolerances, and gives ``b̄ = w`` and ``Ā = -w xᵀ`` in the operator's tensors. Its error is the sum
    of the two solves' errors. The preconditioner and ``x0`` get no gradient: the solution does not depend on them.

    Args:
        matvec: The operator A on row-stacked vectors.
        b: Right-hand sides, ``[..., n]``.
        preconditioner: ``P⁻¹`` on row-stacked vectors, symmetric positive definite.
        x0: First guess, shaped like b.
        rtol: Tolerance relative to ‖b‖; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        atol: Absolute tolerance.
        max_iterations: Cap; ``max(1000, 10 n)`` by default.
        parameters: The tensors A depends on, where they are not its leaves.
        dtype: Type to work in, to which b and x0 are converted; that of b by default. Recurrences of half-precision
            vectors run in float32.
        check_symmetry: Whether to compare ``⟨p₀, A p₁⟩`` and ``⟨A p₀, p₁⟩`` for the first two directions, which costs
            no product.
        return_tridiagonal: Whether to return Lanczos' tridiagonal matrix.
        progress: Whether to show a progress bar.

    Returns:
        The solutions. Statuses: CONVERGED (also for a zero right-hand side, whose solution is zero), MAX_ITERATIONS,
        STAGNATED, ILL_CONDITIONED (``pᵀAp`` is positive only by rounding), BREAKDOWN (``pᵀAp ≤ 0`` or ``rᵀP⁻¹r ≤ 0``:
        the operator or the preconditioner is not positive definite; the value is the last iterate), and NOT_FINITE (the
        value is NaN).

    Raises:
        ConfigurationError: A bad right-hand side, first guess, tolerance or cap.
        OperatorError: An operator of the wrong shape or type, or one that is not symmetric.

    Source: Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems; the coefficients of
    T are those of Golub and Meurant (2010), Matrices, Moments and Quadrature with Applications.

    Example:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> cg(lambda v: v @ A.T, torch.tensor([3.0, 4.0])).value.round(decimals=4)
        tensor([1., 1.])
    """
    b, x0 = converted(dtype, b), converted(dtype, x0)
    sides = RightHandSides("b", b)
    A = LinearMap(matvec, sides.length, symmetric=True, parameters=parameters)
    options = Options.of(sides, rtol, atol, max_iterations, check_symmetry, progress)
    coefficients: list[tuple[Tensor, Tensor]] | None = [] if return_tridiagonal else None
    with torch.no_grad():
        start = sides.start("x0", x0, sides.length)
        x, residual, state = _iterate(A, preconditioner, sides, start, options, coefficients)

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return (None,) * (1 + len(A.tensors))
        cotangent = cotangent.contiguous()
        backward = RightHandSides("x̄", cotangent)
        rows, residual, state = _iterate(A, preconditioner, backward, None, options, None)
        warn_unless_converged("cg", state.statuses, backward.restore_norms(residual))
        (solution,), w = where_used(cotangent, outputs[0]), backward.restore(rows)
        return w, *(-g for g in parameter_gradients(A, [(solution, w)]))

    (value,) = attach([sides.restore(x)], [b, *A.tensors], pullback)
    shape = sides.shape
    return CGSolution(
        value,
        sides.restore_norms(residual),
        state.iterations.reshape(shape),
        state.statuses.reshape(shape),
        A.matvecs,
        None if coefficients is None else _tridiagonal(coefficients, state.iterations, shape),
    )


def _iterate(
    A: LinearMap,
    preconditioner: Callable[[Tensor], Tensor] | None,
    sides: RightHandSides,
    x: Tensor | None,
    options: Options,
    coefficients: list[tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor, Progress]:
    """Solutions ``[R, n]``, true residuals ``[R]`` and how each row ended."""
    product = sides.on_rows(A)
    precondition: Rows | None = None
    if preconditioner is not None:
        precondition = sides.on_rows(preconditioner, "preconditioner")
    b = sides.rows
    size = norm(b)
    target = larger(options.rtol * size, sides.absolute(options.atol))
    if x is None:
        x, r = torch.zeros_like(b), b.clone()
    else:
        x = torch.where((as_tensor(size, b) == 0)[:, None], 0.0, x)
        r = b - product(x)
    state = Progress(b.shape[:1], b.device, single=is_single(b))
    residual = norm(r)
    state.finish(not_finite(residual), Status.NOT_FINITE)
    state.finish(residual <= target, Status.CONVERGED)

    z = r if precondition is None else precondition(r)
    energy = inner(r, z)
    state.finish(not_finite(energy), Status.NOT_FINITE)
    state.finish(energy <= 0, Status.BREAKDOWN)
    p = masked(z.clone(), state.active)
    # pᵀ P p follows its own recurrence, which makes the Rayleigh quotients of P⁻¹A free.
    zero = constant(0.0, energy)
    length, largest = energy, zero
    eps = torch.finfo(sides.working).eps
    first: tuple[Tensor, Tensor] | None = None
    asymmetric: Scalars = False
    for k in iterations(options.cap, "cg", progress=options.progress):
        image = product(p)
        if options.check_symmetry and k <= 2:
            if first is None:
                first = (p.clone(), image.clone())  # an operator may give back what it got
            else:
                asymmetric = state.active & asymmetry(first, (p, image), sides.dtype)
                state.stop(asymmetric)
                first = None
        curvature = inner(p, image)
        state.finish(not_finite(curvature), Status.NOT_FINITE)
        state.finish(curvature <= 0, Status.BREAKDOWN)
        state.finish(curvature <= eps * largest * length, Status.ILL_CONDITIONED)
        largest = larger(largest, ratio(curvature, length))
        alpha = chosen(state.active, ratio(energy, curvature), zero)
        add_scaled(x, alpha, p)
        add_scaled(r, -alpha, image)
        state.count()
        residual = norm(r)
        state.finish(not_finite(residual), Status.NOT_FINITE)
        state.finish(residual <= target, Status.CONVERGED)
        if precondition is None:
            z, following = r, residual * residual
        else:
            z = precondition(r)
            following = inner(r, z)
            state.finish(not_finite(following), Status.NOT_FINITE)
        state.finish(following <= 0, Status.BREAKDOWN)
        beta = chosen(state.active, ratio(following, energy), zero)
        energy, length = following, following + beta * beta * length
        if coefficients is not None:
            coefficients.append((as_tensor(alpha, b), as_tensor(beta, b)))
        if state.over(k):
            break
        p = masked(scaled(p, beta).add_(z), state.active)
    if bool(asymmetric.any() if isinstance(asymmetric, Tensor) else asymmetric):
        raise asymmetric_operator("cg", "lsmr")

    broken = state.statuses == int(Status.NOT_FINITE)
    x = torch.where(broken[:, None], 0.0, x)
    measured = norm(b - product(x))
    state.revise(measured > 2 * target, Status.STAGNATED)
    return torch.where(broken[:, None], torch.nan, x), torch.where(broken, torch.nan, as_tensor(measured, b)), state


def _tridiagonal(
    coefficients: list[tuple[Tensor, Tensor]], iterations: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """``T_kk = 1/α_k + β_(k-1)/α_(k-1)`` and ``T_(k,k+1) = √β_k/α_k``."""
    depth = int(iterations.max()) if iterations.numel() else 0
    alpha, beta = (torch.stack(parts[:depth], -1) if depth else None for parts in zip(*coefficients, strict=True))
    if alpha is None or beta is None:
        empty = iterations.new_zeros(*shape, 0, dtype=torch.get_default_dtype())
        return empty, empty
    inverse, carried = ratio(torch.ones_like(alpha), alpha), ratio(beta, alpha)
    diagonal = torch.where(alpha == 0, 1.0, inverse)
    diagonal[:, 1:] += carried[:, :-1]
    off_diagonal = ratio(beta.sqrt(), alpha)[:, :-1]
    return diagonal.reshape(*shape, depth), off_diagonal.reshape(*shape, depth - 1)
