"""MINRES for symmetric systems, definite or not, and for many shifts at once, with exact implicit gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.arguments import without_autocast
from laplace_plus.linalg.linear_maps import Matvec
from laplace_plus.linalg.results import Solution, Status
from laplace_plus.linalg.solving import Progress, RightHandSides, SymmetricSystem, dot, ratio, root, where_active


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

    The arguments are those of :func:`~laplace_plus.linalg.cg.cg`, and ``shifts``: σ, ``[S]``, which may require
    gradients. They exclude a preconditioner and a first guess, with which different shifts share no Krylov space.
    ``check_symmetry`` compares ``⟨v₁, A v₂⟩`` and ``⟨A v₁, v₂⟩`` for the first two Lanczos vectors.

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
    if shifts is not None:
        stacked = isinstance(shifts, Tensor) and shifts.ndim == 1 and len(shifts) > 0 and shifts.is_floating_point()
        if not stacked or preconditioner is not None or x0 is not None:
            expected = "a floating-point tensor [S], and neither preconditioner nor x0: they share no Krylov space"
            got = f"{tuple(shifts.shape)}" if isinstance(shifts, Tensor) else repr(shifts)
            fix = "Call minres once for each shift, with the shift in the operator."
            raise ConfigurationError("The shifts do not fit the other arguments.", expected=expected, got=got, fix=fix)
    system = SymmetricSystem(
        "minres", matvec, b, preconditioner, x0, rtol, atol, max_iterations, parameters, dtype, check_symmetry, progress
    )
    return system.solve(_iterate, shifts)[0]


def _iterate(
    system: SymmetricSystem, sides: RightHandSides, shifts: Tensor | None, guess: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Progress]:
    """Solutions ``[S, R, n]``, true residuals, their bounds and how each ended, ``[S, R]``; S = 1 without shifts."""
    b, eps = sides.rows, torch.finfo(sides.rows.dtype).eps
    sigma = b.new_zeros(1, 1) if shifts is None else shifts
    if guess is not None:
        guess.masked_fill_((vector_norm(b) == 0)[:, None], 0.0)
    r = b.clone() if guess is None else b - system.A(guess)
    before = torch.zeros_like(r)
    z = system.precondition(r)
    energy = dot(r, z)
    beta = root(energy)
    # With a preconditioner both sides of the stopping rule are measured in its norm.
    reference = beta
    if guess is not None:
        reference = root(dot(b, system.precondition(b)))
    bound = system.bound(reference, sides)

    zero = torch.zeros_like(beta + sigma)  # [S, R]
    state = Progress(zero.shape, b.device)
    state.finish(~(energy + sigma).isfinite(), Status.NOT_FINITE)
    state.finish((energy <= 0) & (dot(r, r) > 0), Status.BREAKDOWN)
    state.finish(beta <= bound, Status.CONVERGED)

    x, w, w_before = (b.new_zeros(*zero.shape, sides.length) for _ in range(3))
    phibar, cosine, sine, dbar, epsilon = beta + zero, zero - 1, zero, zero, zero
    scale, largest, smallest = zero, zero, zero + math.inf
    beta_before = torch.zeros_like(beta)
    for k, product in system.loop(state):
        v = where_active(z * ratio(torch.ones_like(beta), beta)[:, None], state.active.any(0))
        image = product(v)
        before.mul_(-ratio(beta, beta_before)[:, None]).add_(image)
        alpha = dot(v, before)
        before, r = r, before.addcmul_(-ratio(alpha, beta)[:, None], r)
        z = system.precondition(r)
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
        state.finish(phibar <= bound, Status.CONVERGED)
    x = torch.where(state.broken[..., None], 0.0, x if guess is None else x + guess)
    r = b - system.A(x.flatten(0, 1)).view_as(x) - sigma[..., None] * x
    measured = vector_norm(r)
    if system.preconditioner is not None:  # which excludes shifts
        measured = dot(r[0], system.precondition(r[0])).abs().sqrt()[None]
    return x, measured, bound, state
