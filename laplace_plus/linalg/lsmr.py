"""Least squares by LSMR, with exact implicit gradients for every shape and rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import inner, vector_norm
from laplace_plus.linalg.linear_maps import (
    NOT_TRANSPOSED,
    LinearMap,
    Matvec,
    checked_product,
    require_adjoint,
    vectors_of,
    without_autocast,
)
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.solving import Problem, Solution, Status, attach_solution, ratio, where_used


@dataclass(frozen=True)
class LeastSquaresSolution(Solution):
    """The solution of least-squares problems; its ``residual`` is ``‖Aᵀ(b - Ax) - λ²x‖``.

    Attributes:
        misfit: ``[...]``, ``(‖b - Ax‖² + λ²‖x‖²)^½``.
        operator_norm: ``[...]``, a lower estimate of the Frobenius norm of A (with λ I below it).
        condition_number: ``[...]``, an estimate of its condition number.
    """

    misfit: Tensor
    operator_norm: Tensor
    condition_number: Tensor


@without_autocast
def lsmr(
    matvec: Matvec,
    rmatvec: Matvec | None,
    b: Tensor,
    *,
    damp: float | Tensor = 0.0,
    atol: float | None = None,
    btol: float | None = None,
    conlim: float = 1e8,
    max_iterations: int | None = None,
    n: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    progress: bool = False,
) -> LeastSquaresSolution:
    """Minimise ``‖A x - b‖² + λ² ‖x‖²`` by LSMR, for A of any shape and rank.

    The iterates are those of MINRES on the normal equations, but the condition number is not squared. Of several
    solutions (λ = 0, dependent columns) it finds the shortest. For that nearest to a point y, or a penalty on the
    distance from it, solve for ``x - y`` with the right-hand side ``b - A y``.

    An iteration costs one product with A, one with Aᵀ and about eight passes over vectors. Memory is five vectors of
    length n and three of length m per right-hand side. The gradient with respect to b, the tensors that A depends on
    and λ is exact, also at λ = 0 wherever the rank does not change (elsewhere there is none). With the cotangent x̄,
    ``r = b - Ax``, ``p = argmin ‖Aᵀp - x̄‖² + λ²‖p‖²`` and ``q = x̄ - Aᵀp``: ``b̄ = p``, ``λ̄ = -2λ wᵀx`` and

    * ``Ā = r wᵀ - p xᵀ`` with ``w = q/λ²`` for ``λ² ≥ √ε ‖A‖²``: one solve;
    * ``Ā = r wᵀ + y qᵀ - p xᵀ`` with ``w = A⁺p``, ``y = A⁺ᵀx`` for ``λ = 0``: three solves, or two where
      q is zero; and for ``λ`` in between a combination, in which ``(I - AA⁺) r`` and ``(I - A⁺A) q`` are divided by λ²
      unless they are within the tolerance of zero.

    No iterate is stored. For a rank-deficient A and a λ below about 1e-5 ‖A‖ (float64) the gradient itself is of the
    order 1/λ², and the tolerances of the solves are multiplied by that: lower them, or use λ = 0.

    Args:
        matvec: The operator A on row-stacked vectors, ``[..., n] -> [..., m]``.
        rmatvec: Its transpose; if None, torch differentiates through ``matvec``, at twice the cost.
        b: Right-hand sides, ``[..., m]``.
        damp: λ; a 0-d tensor may require gradients.
        atol: Relative accuracy of A; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        btol: Relative accuracy of b, with the same defaults.
        conlim: The iteration ends when the estimated condition number exceeds this; 0 for no limit.
        max_iterations: Cap; ``max(1000, 10 min(m, n))`` by default.
        n: Number of columns; otherwise it is taken from an operator's shape, or the shape of ``rmatvec(b)``.
        parameters: The tensors to differentiate in.
        progress: Whether to show a progress bar.

    Returns:
        The solutions. Statuses: CONVERGED (``‖r‖ ≤ btol ‖b‖ + atol ‖A‖‖x‖`` or ``‖Aᵀr - λ²x‖ ≤ atol ‖A‖‖r‖``, where ‖r‖
        includes the damping; also for a right-hand side of zero), MAX_ITERATIONS, STAGNATED (the same
        tests hold to the precision of the type only), ILL_CONDITIONED, and NOT_FINITE (the value is NaN).

    Raises:
        ConfigurationError: A bad right-hand side, tolerance or cap, or an unknown number of columns.
        OperatorError: An operator of the wrong shape or type, or ``rmatvec`` that is not its transpose.

    Source: Fong and Saunders (2011), LSMR: an iterative algorithm for sparse least-squares problems, SIAM J. Sci.
    Comput. 33; the derivative of the pseudo-inverse is that of Golub and Pereyra (1973), SIAM J. Numer. Anal. 10.

    Example:
        >>> A = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> lsmr(lambda v: v @ A.T, lambda u: u @ A, torch.tensor([1.0, 0.0, -1.0])).value.round(decimals=4)
        tensor([ 1., -1.])
    """
    b = vectors_of("b", b)
    m, (n, spent) = b.shape[-1], other_length(n, matvec, 1, rmatvec, b, "rmatvec")
    options: Any = {"conlim": conlim, "max_iterations": max_iterations, "progress": progress}
    problem = Problem("lsmr", b, min(m, n), atol=atol, rtol=btol, **options)
    A = problem.map(matvec, n, m=m, rmatvec=rmatvec, parameters=parameters)
    damping = torch.as_tensor(damp, dtype=problem.rows.dtype, device=b.device).detach()
    _, solution = solve_least_squares(A, problem, damping)
    damps, norm = [damp] if isinstance(damp, Tensor) else [], solution.operator_norm

    def gradient(x: Tensor, cotangent: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        p, damp_, pairs = _gradient(A, problem, x, b.detach(), damping, norm, cotangent)
        return [p, *(damp_.to(y) for y in damps)], pairs

    value = attach_solution(solution.value, A, [b, *damps], gradient)
    return replace(solution, value=value, matvecs=solution.matvecs + spent)


@torch.no_grad()
def solve_least_squares(
    A: LinearMap, problem: Problem, damp: Tensor, *, transposed: bool = False
) -> tuple[Tensor, LeastSquaresSolution]:
    """LSMR on rows, for A, or for Aᵀ if ``transposed``.

    Returns solutions as rows ``[R, n]``, and all results in the shape and scale of the right-hand sides.
    """
    forward, adjoint = (A.transposed, A) if transposed else (A, A.transposed)
    b, eps, atol, btol = problem.rows, torch.finfo(problem.rows.dtype).eps, problem.atol, problem.rtol
    size = beta = vector_norm(b)
    x, u = b.new_zeros(len(b), A.m if transposed else A.n), b.clone()
    one, zero = torch.ones_like(beta), torch.zeros_like(beta)
    u.mul_(ratio(one, beta)[:, None])
    v = adjoint(u).clone()
    alpha = vector_norm(v)
    alpha = alpha.masked_fill((alpha == 0) & (v != 0).any(-1), math.nan)  # squares that underflowed
    v.mul_(ratio(one, alpha)[:, None])
    zetabar, alphabar, rho, rhobar, cbar, sbar, zeta = alpha * beta, alpha, one, one, one, zero, zero
    h, hbar = v.clone(), torch.zeros_like(v)
    betadd, betad, rhodold, tautildeold, thetatilde, damped = beta, zero, one, zero, zero, zero
    frobenius, largest, smallest = alpha * alpha, zero, zero + math.inf
    figures = [alpha * beta, beta, alpha, one]  # residual, misfit, operator norm, condition number
    problem.finish(~(figures[0] + damp).isfinite(), Status.NOT_FINITE)
    problem.finish(figures[0] == 0, Status.CONVERGED)

    for k in problem.loop():
        u, v = problem.only_active(u), problem.only_active(v)
        image = forward(v)
        if k == 1:
            # α₁ = ‖Aᵀu₁‖ equals ⟨u₁, A v₁⟩ if the two maps are transposes of each other.
            own = torch.where(problem.active, alpha, 0.0)
            require_adjoint(inner(u, image), own, own + vector_norm(image), problem.dtype, NOT_TRANSPOSED)
        u.mul_(-alpha[:, None]).add_(image)
        beta = vector_norm(u)
        u.mul_(ratio(one, beta)[:, None])
        v.mul_(-beta[:, None]).add_(adjoint(u))
        length = vector_norm(v)
        v.mul_(ratio(one, length)[:, None])
        alpha = torch.where(beta > 0, length, alpha)

        chat, shat, alphahat = _rotation(alphabar, damp.expand_as(alphabar))
        rho_before, rhobar_before, zeta_before = rho, rhobar, zeta
        c, s, rho = _rotation(alphahat, beta)
        theta, alphabar = s * alpha, c * alpha
        thetabar, rhotemp = sbar * rho, cbar * rho
        cbar, sbar, rhobar = _rotation(rhotemp, theta)
        zeta, zetabar = cbar * zetabar, -sbar * zetabar

        problem.iterations += problem.active
        hbar.mul_(-ratio(thetabar * rho, rho_before * rhobar_before)[:, None]).add_(h)
        x.addcmul_(torch.where(problem.active, ratio(zeta, rho * rhobar), 0.0)[:, None], hbar)
        h.mul_(-ratio(theta, rho)[:, None]).add_(v)

        # ‖r‖ from one more rotation, of the bidiagonal matrix from the other side.
        betaacute, betacheck = chat * betadd, -shat * betadd
        betahat, betadd = c * betaacute, -s * betaacute
        thetatilde_before = thetatilde
        ctilde, stilde, rhotilde = _rotation(rhodold, thetabar)
        thetatilde, rhodold = stilde * rhobar, ctilde * rhobar
        betad = ctilde * betahat - stilde * betad
        tautildeold = ratio(zeta_before - thetatilde_before * tautildeold, rhotilde)
        taud = ratio(zeta - thetatilde * tautildeold, rhodold)
        damped = damped + betacheck * betacheck
        misfit = (damped + (betad - taud) * (betad - taud) + betadd * betadd).clamp_min(0).sqrt()

        operator_norm = (frobenius + beta * beta).sqrt()
        frobenius = frobenius + beta * beta + alpha * alpha
        if k > 1:  # ρ̄₀ = 1 is not a singular value
            largest, smallest = torch.maximum(largest, rhobar_before), torch.minimum(smallest, rhobar_before)
        tiniest = torch.minimum(smallest, rhotemp)
        condition_number = torch.where(tiniest > 0, torch.maximum(largest, rhotemp) / tiniest, math.inf)
        residual, length = zetabar.abs(), vector_norm(x)

        now = (residual, misfit, operator_norm, condition_number)
        figures = [torch.where(problem.active, new, old) for new, old in zip(now, figures, strict=True)]
        problem.finish(~(residual + misfit + operator_norm + length).isfinite(), Status.NOT_FINITE)
        problem.finish(misfit <= btol * size + atol * operator_norm * length, Status.CONVERGED)
        problem.finish(residual <= atol * operator_norm * misfit, Status.CONVERGED)
        problem.finish(condition_number >= (problem.conlim or math.inf), Status.ILL_CONDITIONED)
        problem.finish(misfit <= eps / 2 * (size + operator_norm * length), Status.STAGNATED)
        problem.finish(residual <= eps / 2 * operator_norm * misfit, Status.STAGNATED)
        problem.finish(condition_number * (eps / 2) >= 1, Status.ILL_CONDITIONED)
    x = torch.where(problem.broken[:, None], torch.nan, x)
    residual, misfit = problem.figures(*figures[:2], scaled=True)
    iterations, statuses, *estimates = problem.figures(problem.iterations, problem.statuses, *figures[2:])
    value, matvecs = problem.restore(x), A.matvecs
    return x, LeastSquaresSolution(value, residual, iterations, statuses, matvecs, misfit, *estimates)


def _rotation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine, sine and radius of the Givens rotation of (a, b), without overflow."""
    radius = torch.hypot(a, b)
    return ratio(a, radius), ratio(b, radius), radius


def other_length(
    given: int | None,
    matvec: Matvec,
    axis: int,
    function: Callable[[Tensor], Tensor] | None,
    vectors: Tensor,
    name: str = "operator",
) -> tuple[int, int]:
    """The length of A's other vectors: as given, an operator's, or from a product, and how many products that took."""
    if given is not None:
        return given, 0
    if isinstance(matvec, Operator):
        return matvec.shape[axis], 0
    if function is None:
        what, expected = "The number of columns is not known.", "n=, rmatvec or an operator with a shape"
        raise ConfigurationError(what, expected=expected, got="a callable alone", fix="Pass n=, the length of x.")
    with torch.no_grad():
        return checked_product(function, vectors.detach(), None, name).shape[-1], vectors.shape[:-1].numel()


def _gradient(
    A: LinearMap,
    problem: Problem,
    x: Tensor,
    b: Tensor,
    damp: Tensor,
    operator_norm: Tensor,
    cotangent: Tensor,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """p, λ̄ and the pairs of vectors of Ā; see :func:`lsmr`."""

    def solve(vectors: Tensor, damp: Tensor, *, transposed: bool) -> Tensor:
        backward = problem.again(vectors)
        _, found = solve_least_squares(A, backward, damp, transposed=transposed)
        backward.warn_unless_converged(found.residual)
        return found.value

    def length(vectors: Tensor) -> Tensor:
        return vector_norm(vectors)[..., None]

    def without_noise(vectors: Tensor, noise: Tensor) -> Tensor:
        return torch.where(length(vectors) <= noise, 0.0, vectors)

    x, b, scale = where_used(cotangent, x, b, operator_norm.reshape(*x.shape[:-1], 1))
    p = solve(cotangent, damp, transposed=True)
    # A multiplies rows [R, n]
    q = cotangent - A.transposed(p.reshape(-1, A.m)).reshape(cotangent.shape)
    r = b - A(x.reshape(-1, A.n)).reshape(b.shape)
    squared = float(damp) ** 2
    largest = float(scale.max()) if scale.numel() else 0.0
    if squared > 0 and squared >= math.sqrt(torch.finfo(damp.dtype).eps) * largest**2:
        w = q / squared
        pairs = [(w, r), (x, -p)]
    else:
        undamped = torch.zeros_like(damp)
        noise = 100 * max(problem.atol, problem.rtol)
        w = solve(p, undamped, transposed=False)
        pairs = [(w, r), (x, -p)]
        # w and y lie in the ranges of Aᵀ and A. The components of q and r outside of these are separated, unless they
        # are only errors of the solves, which must not be divided by λ².
        outside = without_noise(q - squared * w, noise * (length(cotangent) + scale * length(p)))
        if bool((outside != 0).any()):
            y = solve(x, undamped, transposed=True)
            pairs.append((outside, y))
            if squared > 0:
                left = without_noise(r - squared * y, noise * (length(b) + scale * length(x)))
                pairs.append((outside / squared, left))
    return p, -2 * damp * (w * x).sum(), pairs
