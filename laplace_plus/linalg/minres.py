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
    Limits,
    Progress,
    RightHandSides,
    asymmetry,
    converted,
    dot,
    parameter_gradients,
    ratio,
    require_symmetric,
    root,
    warn_unless_converged,
    where_active,
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

    A need not be positive definite. Each iteration costs one product per right-hand side for any number S of shifts,
    and ``5 + 4 S`` passes over vectors; memory is ``9 + 4 S`` vectors per right-hand side. The iteration ends when
    ``‖r‖ ≤ max(rtol ‖b‖, atol)``, with a preconditioner in the norm ``(rᵀP⁻¹r)^½``. One more product with all solutions
    computes the true residuals, which are returned.

    The gradient is that of ``(A + σ_t)⁻¹ b``: with the cotangents x̄_t it solves ``(A + σ_t) w_t = x̄_t``, which are S
    separate right-hand sides, and returns ``b̄ = Σ w_t``, ``Ā = -Σ w_t x_tᵀ`` and ``σ̄_t = -w_tᵀ x_t``.

    Args:
        matvec: The operator A on row-stacked vectors.
        b: Right-hand sides, ``[..., n]``.
        shifts: σ, ``[S]``; may require gradients. Not with a preconditioner or a first guess, with which different
            shifts do not share a Krylov space.
        preconditioner: ``P⁻¹`` on row-stacked vectors, symmetric positive definite.
        x0: First guess, shaped like b.
        rtol: Tolerance relative to ‖b‖; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        atol: Absolute tolerance.
        max_iterations: Cap; ``max(1000, 10 n)`` by default.
        parameters: The tensors A depends on, where they are not its leaves.
        dtype: Type to work in, to which b and x0 are converted; that of b by default. Recurrences of half-precision
            vectors run in float32.
        check_symmetry: Whether to compare ``⟨v₁, A v₂⟩`` and ``⟨A v₁, v₂⟩`` for the first two Lanczos vectors; this
            takes no product.
        progress: Whether to show a progress bar.

    Returns:
        The solutions ``[..., n]``, with shifts ``[S, ..., n]``. Statuses: CONVERGED (also for a zero right-hand side),
        MAX_ITERATIONS, STAGNATED (the true residual exceeds twice its bound, or cannot be reduced because the system is
        inconsistent; the value is then a least-squares solution), ILL_CONDITIONED (the condition number reaches the
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
    A = sides.map(matvec, sides.length, symmetric=True, parameters=parameters)
    precondition = sides.preconditioner(preconditioner)
    limits = Limits.of(sides, rtol, atol, max_iterations, check_symmetry, progress)
    if shifts is not None:
        _check_shifts(shifts, preconditioner is not None or x0 is not None)
    moved = sides.rows.new_zeros(1) if shifts is None else shifts.detach().to(sides.rows)

    with torch.no_grad():
        start = sides.start(x0, sides.length)
        x, residual, state = _iterate(A, precondition, sides, moved[:, None], start, limits)

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        assert cotangents[0] is not None
        cotangent = cotangents[0].contiguous()
        backward = RightHandSides("x̄", cotangent)
        each = moved[:, None].expand(len(moved), len(sides.rows)).reshape(1, -1)
        rows, residual, state = _iterate(A, precondition, backward, each, None, limits)
        warn_unless_converged("minres", state.statuses, backward.restore_norms(residual))
        w = backward.restore(rows[0])
        (solution,) = where_used(cotangent, outputs[0])
        gradients = [-g for g in parameter_gradients(A, (solution, w))]
        if shifts is None:
            return w, *gradients
        return w.sum(0), *gradients, -(w * solution).flatten(1).sum(1).to(shifts)

    matvecs, inputs = A.matvecs, [b, *A.tensors, *([] if shifts is None else [shifts])]
    shape = sides.shape if shifts is None else (len(moved), *sides.shape)
    (value,) = attach([sides.restore(x).reshape(*shape, sides.length)], inputs, pullback)
    return Solution(
        value,
        sides.restore_norms(residual).reshape(shape),
        state.iterations.reshape(shape),
        state.statuses.reshape(shape),
        matvecs,
    )


def _check_shifts(shifts: Tensor, restricted: bool) -> None:
    if not isinstance(shifts, Tensor) or shifts.ndim != 1 or not len(shifts) or not shifts.is_floating_point():
        raise ConfigurationError(
            "shifts must be a vector of numbers.",
            expected="a floating-point tensor [S]",
            got=str(tuple(shifts.shape)) if isinstance(shifts, Tensor) else repr(shifts),
        )
    if restricted:
        raise ConfigurationError(
            "Shifts cannot be combined with a preconditioner or x0: they would share no Krylov space.",
            expected="neither preconditioner nor x0 along with shifts",
            got="one of them",
            fix="Call minres once for each shift, with the shift in the operator.",
        )


def _iterate(
    A: LinearMap,
    precondition: Callable[[Tensor], Tensor],
    sides: RightHandSides,
    sigma: Tensor,
    guess: Tensor | None,
    limits: Limits,
) -> tuple[Tensor, Tensor, Progress]:
    """Solutions ``[S, R, n]``, true residuals ``[S, R]`` and how each ended, for shifts ``[S, 1]`` or ``[S, R]``."""
    b, eps = sides.rows, torch.finfo(sides.rows.dtype).eps
    if guess is not None:
        guess.masked_fill_((vector_norm(b) == 0)[:, None], 0.0)
    r = b.clone() if guess is None else b - A(guess)
    before = torch.zeros_like(r)
    z = precondition(r)
    energy = dot(r, z)
    beta = root(energy)
    # With a preconditioner both sides of the stopping rule are measured in its norm.
    reference = beta
    if guess is not None:
        reference = root(dot(b, precondition(b)))
    target = limits.target(reference, sides)

    zero = torch.zeros_like(beta + sigma)  # [S, R]
    state = Progress(zero.shape, b.device)
    state.finish(~(energy + sigma).isfinite(), Status.NOT_FINITE)
    state.finish((energy <= 0) & (dot(r, r) > 0), Status.BREAKDOWN)
    state.finish(beta <= target, Status.CONVERGED)

    x, w, w_before = (b.new_zeros(*zero.shape, sides.length) for _ in range(3))
    phibar, cosine, sine, dbar, epsilon = beta + zero, zero - 1, zero, zero, zero
    scale, largest, smallest = zero, zero, zero + math.inf
    beta_before = torch.zeros_like(beta)
    asymmetric = torch.zeros_like(state.active)
    first = None
    for k in state.loop(limits.cap, "minres", progress=limits.progress):
        working = state.active.any(0)
        v = where_active(z * ratio(torch.ones_like(beta), beta)[:, None], working)
        image = A(v)
        if limits.check_symmetry and k == 1:
            first = (v, image)
        elif first is not None:
            asymmetric, first = working & asymmetry(first, (v, image), sides.dtype), None
            state.stop(asymmetric)
        before.mul_(-ratio(beta, beta_before)[:, None]).add_(image)
        alpha = dot(v, before)
        before, r = r, before.addcmul_(-ratio(alpha, beta)[:, None], r)
        z = precondition(r)
        energy = dot(r, z)
        state.finish(~(alpha + energy).isfinite(), Status.NOT_FINITE)
        state.finish(energy < 0, Status.BREAKDOWN)

        # One more column of T + σ, rotated by the last two rotations and the new one.
        beta_before, beta = beta, root(energy)
        shifted = alpha + sigma
        scale = torch.maximum(scale, shifted.abs() + beta + (beta_before if k > 1 else 0.0))
        epsilon_before = epsilon
        delta, gbar = cosine * dbar + sine * shifted, sine * dbar - cosine * shifted
        epsilon, dbar = sine * beta, -cosine * beta
        # ‖(A + σ) r‖/‖r‖ of the last iterate. Where it vanishes, the residual is minimal, and further iterates of a
        # singular system would only grow. Rounding keeps it at a few hundredths of √ε.
        state.finish(torch.hypot(gbar, dbar) <= 0.1 * math.sqrt(eps) * scale, Status.STAGNATED)
        gamma = torch.hypot(gbar, beta + zero)
        cosine, sine = ratio(gbar, gamma), ratio(beta, gamma)
        phi, phibar = cosine * phibar, sine * phibar

        largest, smallest = torch.maximum(largest, gamma), torch.minimum(smallest, gamma)
        state.finish(smallest <= eps * largest, Status.ILL_CONDITIONED)
        direction = w_before.mul_(-epsilon_before[..., None]).add_(v).addcmul_(-delta[..., None], w)
        w_before, w = w, direction.mul_(ratio(zero + 1, gamma)[..., None])
        x.addcmul_(torch.where(state.active, phi, 0.0)[..., None], w)
        state.iterations += state.active
        state.finish(phibar <= target, Status.CONVERGED)
    require_symmetric("minres", asymmetric)

    broken = state.statuses == int(Status.NOT_FINITE)
    x = torch.where(broken[..., None], 0.0, x if guess is None else x + guess)
    r = b - A(x.flatten(0, 1)).view_as(x) - sigma[..., None] * x
    measured = vector_norm(r)
    if isinstance(precondition, LinearMap):  # which excludes shifts
        measured = dot(r[0], precondition(r[0])).abs().sqrt()[None]
    state.revise(measured > 2 * target, Status.STAGNATED)
    return torch.where(broken[..., None], torch.nan, x), torch.where(broken, torch.nan, measured), state
