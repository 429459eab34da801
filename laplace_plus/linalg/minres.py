"""MINRES for symmetric systems, definite or not, and for many shifts at once, with exact implicit gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import vector_norm
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
    hypot,
    inner,
    is_single,
    iterations,
    larger,
    masked,
    norm,
    not_finite,
    parameter_gradients,
    ratio,
    root,
    scaled,
    smaller,
    warn_unless_converged,
    where_used,
)


@without_autocast
def minres(
    matvec: Matvec,
    b: Tensor,
    *,
    shifts: Tensor | None = None,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
    x0: Tensor | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    max_iterations: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    check_symmetry: bool = True,
    progress: bool = False,
) -> Solution:
    """Solve ``A x = b``, or ``(A + σ_t) x_t = b`` for all shifts in one Krylov space, for a symmetric A.

    A need not be positive definite. Each iteration costs one product per right-hand side, whatever the number of shifts
    S, and ``5 + 4 S`` passes over vectors; memory is ``9 + 4 S`` vectors per right-hand side. The iteration ends when
    ``‖r‖ ≤ max(rtol ‖b‖, atol)``, with a preconditioner in the norm ``(rᵀP⁻¹r)^½``. One product more, with all
    solutions, checks the true residuals, which are those reported.

    The gradient is that of ``(A + σ_t)⁻¹ b``: with the cotangents x̄_t it solves ``(A + σ_t) w_t = x̄_t``, which are S
    right-hand sides of their own, and gives ``b̄ = Σ w_t``, ``Ā = -Σ w_t x_tᵀ`` and ``σ̄_t = -w_tᵀ x_t``.

    Args:
        matvec: The operator A on row-stacked vectors.
        b: Right-hand sides, ``[..., n]``.
        shifts: σ, ``[S]``; may require gradients. Without a preconditioner and a first guess, for which the Krylov
            spaces of different shifts would not be the same.
        preconditioner: ``P⁻¹`` on row-stacked vectors, symmetric positive definite.
        x0: First guess, shaped like b.
        rtol: Tolerance relative to ‖b‖; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        atol: Absolute tolerance.
        max_iterations: Cap; ``max(1000, 10 n)`` by default.
        parameters: The tensors A depends on, where they are not its leaves.
        dtype: Type to work in, to which b and x0 are converted; that of b by default. Recurrences of half-precision
            vectors run in float32.
        check_symmetry: Whether to compare ``⟨v₁, A v₂⟩`` and ``⟨A v₁, v₂⟩`` for the first two Lanczos vectors, which
            costs no product.
        progress: Whether to show a progress bar.

    Returns:
        The solutions ``[..., n]``, with shifts ``[S, ..., n]``. Statuses: CONVERGED (also for a zero right-hand side),
        MAX_ITERATIONS, STAGNATED (the true residual exceeds twice its bound, or cannot be reduced because the system is
        inconsistent: the value is then a least-squares solution), ILL_CONDITIONED (the condition number reaches the
        inverse of the machine precision), BREAKDOWN (the preconditioner is not positive definite), and NOT_FINITE (the
        value is NaN).

    Raises:
        ConfigurationError: A bad right-hand side, shift, tolerance or cap, or shifts with a preconditioner or x0.
        OperatorError: An operator of the wrong shape or type, or one that is not symmetric.

    Source: Paige and Saunders (1975), Solution of sparse indefinite systems of linear equations, SIAM J. Numer.
    Anal. 12.

    Example:
        >>> A = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> minres(lambda v: v @ A.T, torch.tensor([2.0, 3.0])).value.round(decimals=4)
        tensor([3., 2.])
    """
    b, x0 = converted(dtype, b), converted(dtype, x0)
    sides = RightHandSides("b", b)
    A = LinearMap(matvec, sides.length, symmetric=True, parameters=parameters)
    options = Options.of(sides, rtol, atol, max_iterations, check_symmetry, progress)
    if shifts is not None:
        _check_shifts(shifts, sides, preconditioner is not None or x0 is not None)
    with torch.no_grad():
        start = sides.start("x0", x0, sides.length)
        moved = sides.rows.new_zeros(1) if shifts is None else shifts.detach().to(sides.rows)
        x, residual, state = _iterate(A, preconditioner, sides, moved[:, None], start, options)

    inputs = [b, *A.tensors, *([] if shifts is None else [shifts])]

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return (None,) * len(inputs)
        cotangent = cotangent.contiguous()
        backward = RightHandSides("x̄", cotangent)
        each = moved[:, None].expand(len(moved), sides.rows.shape[0]).reshape(1, -1)
        w, residual, state = _iterate(A, preconditioner, backward, each, None, options)
        warn_unless_converged("minres", state.statuses, backward.restore_norms(residual))
        w = backward.restore(w[0])
        (solution,) = where_used(cotangent, outputs[0])
        parts: list[Tensor | None] = [w if shifts is None else w.sum(0)]
        parts += [-g for g in parameter_gradients(A, [(solution, w)])]
        if shifts is not None:
            parts.append(-(w * solution).flatten(1).sum(1).to(shifts))
        return tuple(parts)

    shape = sides.shape if shifts is None else (len(moved), *sides.shape)
    (value,) = attach([sides.restore(x).reshape(*shape, sides.length)], inputs, pullback)
    return Solution(
        value,
        sides.restore_norms(residual).reshape(shape),
        state.iterations.reshape(shape),
        state.statuses.reshape(shape),
        A.matvecs,
    )


def _check_shifts(shifts: Tensor, sides: RightHandSides, restricted: bool) -> None:
    if not isinstance(shifts, Tensor) or shifts.ndim != 1 or not len(shifts) or not shifts.is_floating_point():
        raise ConfigurationError(
            "shifts are no list of numbers.",
            expected="a floating-point tensor [S]",
            got=str(tuple(shifts.shape)) if isinstance(shifts, Tensor) else repr(shifts),
        )
    if restricted:
        raise ConfigurationError(
            "Shifts share no Krylov space here.",
            expected="neither preconditioner nor x0 along with shifts",
            got="one of them",
            fix="Call minres once for each shift, with the shift in the operator.",
        )


def _iterate(
    A: LinearMap,
    preconditioner: Callable[[Tensor], Tensor] | None,
    sides: RightHandSides,
    shifts: Tensor,
    guess: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Progress]:
    """Solutions ``[S, R, n]``, true residuals ``[S, R]`` and how each ended, for shifts ``[S, 1]`` or ``[S, R]``."""
    product = sides.on_rows(A)
    precondition: Rows | None = None
    if preconditioner is not None:
        precondition = sides.on_rows(preconditioner, "preconditioner")
    b, eps = sides.rows, torch.finfo(sides.working).eps
    S, R = len(shifts), b.shape[0]
    single = S == 1 and is_single(b)
    sigma: Scalars = shifts.item() if single else shifts

    def product_of(a: Tensor, c: Tensor) -> Scalars:
        return inner(a, c) if single else as_tensor(inner(a, c), b)

    if guess is not None:
        guess = torch.where((as_tensor(norm(b), b) == 0)[:, None], 0.0, guess)
    r = b.clone() if guess is None else b - product(guess)
    before = torch.zeros_like(r)
    z = r if precondition is None else precondition(r)
    energy = product_of(r, z)
    beta = root(energy)
    # With a preconditioner both sides of the stopping rule are measured in its norm.
    reference = beta
    if guess is not None:
        reference = root(product_of(b, b if precondition is None else precondition(b)))
    absolute = sides.absolute(options.atol)
    absolute = absolute if single or isinstance(absolute, Tensor) else as_tensor(absolute, b)
    target = larger(options.rtol * reference, absolute)

    state = Progress((S, R), b.device, single=single)
    state.finish(not_finite(energy + sigma), Status.NOT_FINITE)
    state.finish((energy <= 0) & (product_of(r, r) > 0), Status.BREAKDOWN)
    state.finish(beta <= target, Status.CONVERGED)

    x, w, w_before = (b.new_zeros(S, R, sides.length) for _ in range(3))
    one, zero = constant(1.0, beta + sigma), constant(0.0, beta + sigma)
    phibar, cosine, sine, dbar, epsilon, largest, smallest = beta + zero, -one, zero, zero, zero, zero, one * math.inf
    scale, beta_before = zero, constant(0.0, beta)
    first: tuple[Tensor, Tensor] | None = None
    asymmetric: Scalars = False
    for k in iterations(options.cap, "minres", progress=options.progress):
        working = state.active.any(0) if isinstance(state.active, Tensor) else state.active
        v = masked(scaled(z.clone(), ratio(constant(1.0, beta), beta)), working)
        image = product(v)
        if options.check_symmetry and k <= 2:
            if first is None:
                first = (v, image)
            else:
                asymmetric = working & asymmetry(first, (v, image), sides.dtype)
                state.stop(asymmetric)
                first = None
        scaled(before, -ratio(beta, beta_before)).add_(image)
        alpha = product_of(v, before)
        before, r = r, add_scaled(before, -ratio(alpha, beta), r)
        z = r if precondition is None else precondition(r)
        energy = product_of(r, z)
        state.finish(not_finite(alpha + energy) | (zero > 0), Status.NOT_FINITE)
        state.finish((energy < 0) | (zero > 0), Status.BREAKDOWN)

        # One more column of T + σ, rotated by the last two rotations and the new one.
        beta_before, beta = beta, root(energy)
        shifted = alpha + sigma
        scale = larger(scale, abs(shifted) + beta + (beta_before if k > 1 else 0.0))
        epsilon_before = epsilon
        delta, gbar = cosine * dbar + sine * shifted, sine * dbar - cosine * shifted
        epsilon, dbar = sine * beta, -cosine * beta
        # ‖(A + σ) r‖/‖r‖ of the last iterate: where it vanishes the residual is the least possible one, and the next
        # iterates of a singular system would only grow. Rounding keeps it at a few hundredths of √ε.
        state.finish(hypot(gbar, dbar) <= 0.1 * math.sqrt(eps) * scale, Status.STAGNATED)
        gamma = hypot(gbar, beta)
        cosine, sine = ratio(gbar, gamma), ratio(beta, gamma)
        phi, phibar = cosine * phibar, sine * phibar

        largest, smallest = larger(largest, gamma), smaller(smallest, gamma)
        state.finish(smallest <= eps * largest, Status.ILL_CONDITIONED)
        direction = add_scaled(scaled(w_before, -epsilon_before).add_(v), -delta, w)
        w_before, w = w, scaled(direction, ratio(one, gamma))
        add_scaled(x, chosen(state.active, phi, zero), w)
        state.count()
        state.finish(phibar <= target, Status.CONVERGED)
        if state.over(k):
            break
    if bool(asymmetric.any() if isinstance(asymmetric, Tensor) else asymmetric):
        raise asymmetric_operator("minres", "lsmr")
    return _checked(product, b, x, guess, shifts, target, precondition, state, alone=not sides.shape)


def _checked(
    product: Rows,
    b: Tensor,
    x: Tensor,
    guess: Tensor | None,
    shifts: Tensor,
    target: Scalars,
    precondition: Rows | None,
    state: Progress,
    *,
    alone: bool,
) -> tuple[Tensor, Tensor, Progress]:
    """Replaces the recurrence's residuals by the true ones."""
    broken = state.statuses == int(Status.NOT_FINITE)
    x = torch.where(broken[..., None], 0.0, x)
    if guess is not None:
        x = x + torch.where(broken[..., None], 0.0, guess)
    images = torch.stack([product(solution) for solution in x]) if alone else product(x.flatten(0, 1)).view_as(x)
    r = b - images - shifts[..., None] * x
    measured = vector_norm(r)
    if precondition is not None:  # which never comes along with more than one shift
        measured = as_tensor(inner(r[0], precondition(r[0])), b).abs().sqrt()[None]
    wrong = measured > 2 * target
    state.revise(wrong if isinstance(state.active, Tensor) else bool(wrong), Status.STAGNATED)
    return torch.where(broken[..., None], torch.nan, x), torch.where(broken, torch.nan, measured), state
