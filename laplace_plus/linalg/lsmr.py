"""Least squares by LSMR, with exact implicit gradients for every shape and rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, OperatorError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.arguments import without_autocast
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, require_callable
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.results import Solution, Status
from laplace_plus.linalg.solving import (
    Progress,
    RightHandSides,
    Rows,
    Scalars,
    add_scaled,
    as_tensor,
    chosen,
    constant,
    converted,
    hypot,
    inner,
    is_single,
    iteration_cap,
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
    tolerance,
    warn_unless_converged,
    where_used,
)


@dataclass(frozen=True)
class LeastSquaresSolution(Solution):
    """The solution of least-squares problems; its ``residual`` is ``‖Aᵀ(b - Ax) - λ²(x - x0)‖``.

    Attributes:
        misfit: ``[...]``, ``(‖b - Ax‖² + λ²‖x - x0‖²)^½``.
        operator_norm: ``[...]``, an estimate of the Frobenius norm of A (with λ below it) from below.
        condition_number: ``[...]``, an estimate of its condition number.
    """

    misfit: Tensor
    operator_norm: Tensor
    condition_number: Tensor


@dataclass
class LeastSquaresOptions:
    """Tolerances and caps of one solve, in LSMR's terms."""

    atol: float
    btol: float
    conlim: float
    cap: int
    progress: bool


@without_autocast
def lsmr(
    matvec: Matvec,
    rmatvec: Matvec | None,
    b: Tensor,
    *,
    damp: float | Tensor = 0.0,
    x0: Tensor | None = None,
    atol: float | None = None,
    btol: float | None = None,
    conlim: float = 1e8,
    max_iterations: int | None = None,
    n: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> LeastSquaresSolution:
    """Minimise ``‖A x - b‖² + λ² ‖x - x0‖²`` by LSMR, for A of any shape and rank.

    The iterates are those of MINRES on the normal equations, without ever squaring the condition number. Of several
    solutions (λ = 0, dependent columns) it finds the one nearest to ``x0``, which is 0 by default. With λ > 0 the
    damping pulls towards ``x0``, as in SciPy.

    Costs one product with A and one with Aᵀ per iteration, about eight passes over vectors, and five vectors of memory
    of length n and three of length m per right-hand side. The gradient with respect to b, the tensors that A depends
    on, λ and x0 is exact, also at λ = 0 wherever the rank does not change (elsewhere there is none). With the cotangent
    x̄, ``r = b - Ax``, ``p = argmin ‖Aᵀp - x̄‖² + λ²‖p‖²`` and ``q = x̄ - Aᵀp``:
    ``b̄ = p``, ``x̄0 = q``, ``λ̄ = -2λ wᵀ(x - x0)`` and

    * ``Ā = r wᵀ - p xᵀ`` with ``w = q/λ²`` for ``λ² ≥ √ε ‖A‖²``: one solve;
    * ``Ā = r wᵀ + y qᵀ - p xᵀ`` with ``w = A⁺p``, ``y = A⁺ᵀ(x - x0)`` for ``λ = 0``: three solves, or two where
      q is zero; and for ``λ`` in between a combination, in which ``(I - AA⁺) r`` and ``(I - A⁺A) q`` are divided by λ²
      unless they are within the tolerance of zero.

    No iterate is stored. For a rank-deficient A and a λ below about 1e-5 ‖A‖ (float64) the gradient itself is of the
    order 1/λ², and the tolerances of the solves are multiplied by that: lower them, or use λ = 0.

    Args:
        matvec: The operator A on row-stacked vectors, ``[..., n] -> [..., m]``.
        rmatvec: Its transpose; without it torch differentiates through ``matvec``, at twice the cost.
        b: Right-hand sides, ``[..., m]``.
        damp: λ; a 0-d tensor may require gradients.
        x0: First guess, ``[..., n]``.
        atol: Relative error to be expected of A; 1e-10 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        btol: The same of b.
        conlim: The iteration ends when the condition number seems to exceed this.
        max_iterations: Cap; ``max(1000, 10 min(m, n))`` by default.
        n: Number of columns; otherwise it is taken from x0, an operator's shape, or the shape of ``rmatvec(b)``.
        parameters: The tensors ``matvec`` depends on, where they are not its leaves.
        dtype: Type to work in, to which b and x0 are converted; that of b by default. Recurrences of half-precision
            vectors run in float32.
        progress: Whether to show a progress bar.

    Returns:
        The solutions. Statuses: CONVERGED (``‖r‖ ≤ btol ‖b‖ + atol ‖A‖‖x‖`` or ``‖Aᵀr - λ²(x - x0)‖ ≤ atol ‖A‖‖r‖``,
        where ‖r‖ includes the damping; also where the first guess is a solution), MAX_ITERATIONS, STAGNATED (the same
        tests hold to the precision of the type only), ILL_CONDITIONED, and NOT_FINITE (the value is NaN).

    Raises:
        ConfigurationError: A bad right-hand side, first guess, tolerance or cap, or an unknown number of columns.
        OperatorError: An operator of the wrong shape or type, or ``rmatvec`` that is not its transpose.

    Source: Fong and Saunders (2011), LSMR: an iterative algorithm for sparse least-squares problems, SIAM J. Sci.
    Comput. 33; the derivative of the pseudo-inverse is that of Golub and Pereyra (1973), SIAM J. Numer. Anal. 10.

    Example:
        >>> A = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> lsmr(lambda v: v @ A.T, lambda u: u @ A, torch.tensor([1.0, 0.0, -1.0])).value.round(decimals=4)
        tensor([ 1., -1.])
    """
    b, x0 = converted(dtype, b), converted(dtype, x0)
    sides = RightHandSides("b", b)
    n, spent = _columns(matvec, rmatvec, sides, b, x0) if n is None else (n, 0)
    A = LinearMap(matvec, n, m=sides.length, rmatvec=rmatvec, parameters=parameters)
    A.matvecs += spent
    options = least_squares_options(atol, btol, conlim, max_iterations, min(sides.length, n), b.dtype, progress)
    damping = _damping(damp, sides)
    with torch.no_grad():
        start = sides.start("x0", x0, n)
        forward, adjoint = sides.on_rows(A), sides.on_rows(A.transposed)
        x, outcome = solve_least_squares(forward, adjoint, sides, n, damping, start, options)

    inputs = [b, *A.tensors, *([damp] if isinstance(damp, Tensor) else []), *([] if x0 is None else [x0])]

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return (None,) * len(inputs)
        gradients = _Backward(A, sides, b, x0, damping, options, outcome.operator_norm)(outputs[0], cotangent)
        p, parameter_part, damp_part, start_part = gradients
        return (
            p,
            *parameter_part,
            *([damp_part.to(damp)] if isinstance(damp, Tensor) else []),
            *([] if x0 is None else [start_part]),
        )

    (value,) = attach([sides.restore(x)], inputs, pullback)
    return LeastSquaresSolution(
        value,
        sides.restore_norms(outcome.residual),
        outcome.state.iterations.reshape(sides.shape),
        outcome.state.statuses.reshape(sides.shape),
        A.matvecs,
        sides.restore_norms(outcome.misfit),
        outcome.operator_norm.reshape(sides.shape),
        outcome.condition_number.reshape(sides.shape),
    )


def least_squares_options(
    atol: float | None,
    btol: float | None,
    conlim: float,
    max_iterations: int | None,
    size: int,
    dtype: torch.dtype,
    progress: bool,
) -> LeastSquaresOptions:
    """Checked options with their defaults filled in."""
    if not conlim >= 0:
        raise ConfigurationError("conlim is no condition number.", expected="a number ≥ 0", got=str(conlim))
    return LeastSquaresOptions(
        tolerance("atol", atol, dtype),
        tolerance("btol", btol, dtype),
        conlim,
        iteration_cap(max_iterations, size),
        progress,
    )


@dataclass
class Outcome:
    """How the rows of a least-squares solve ended; every tensor is ``[R]``."""

    residual: Any
    misfit: Any
    operator_norm: Any
    condition_number: Any
    state: Progress


def solve_least_squares(
    forward: Rows,
    adjoint: Rows,
    sides: RightHandSides,
    n: int,
    damp: Tensor,
    x: Tensor | None,
    options: LeastSquaresOptions,
) -> tuple[Tensor, Outcome]:
    """LSMR on rows.

    Args:
        forward: A, ``[R, n] -> [R, m]``.
        adjoint: Its transpose.
        sides: Right-hand sides of length m.
        n: Number of columns.
        damp: λ, 0-d.
        x: First guess ``[R, n]``, which becomes the solution.
        options: Tolerances and caps.

    Returns:
        ``[R, n]`` and how the rows ended.
    """
    b, eps = sides.rows, torch.finfo(sides.working).eps
    size = norm(b)
    if x is None:
        x, u = b.new_zeros(b.shape[0], n), b.clone()
    else:
        u = b - forward(x)
    beta = norm(u)
    one, zero = constant(1.0, beta), constant(0.0, beta)
    scaled(u, ratio(one, beta))
    v = adjoint(u).clone()
    alpha = norm(v)
    nonzero = (v != 0).any(-1)
    vanished = (alpha == 0) & (bool(nonzero) if is_single(b) else nonzero)  # a square that underflowed
    alpha = chosen(vanished, math.nan, alpha)
    scaled(v, ratio(one, alpha))
    strength: Scalars = damp.item() if is_single(b) else damp
    zetabar, alphabar, rho, rhobar, cbar, sbar, zeta = alpha * beta, alpha, one, one, one, zero, zero
    h, hbar = v.clone(), torch.zeros_like(v)
    betadd, betad, rhodold, tautildeold, thetatilde, damped = beta, zero, one, zero, zero, zero
    frobenius, largest, smallest = alpha * alpha, zero, constant(math.inf, beta)
    outcome = Outcome(alpha * beta, beta, alpha, one, Progress(b.shape[:1], b.device, single=is_single(b)))
    state = outcome.state
    state.finish(not_finite(outcome.residual + strength), Status.NOT_FINITE)
    state.finish(outcome.residual == 0, Status.CONVERGED)
    limit = 1 / options.conlim if options.conlim > 0 else 0.0
    mismatched: Scalars = False
    u, v = masked(u, state.active), masked(v, state.active)

    for k in iterations(options.cap, "lsmr", progress=options.progress):
        image = forward(v)
        if k == 1:
            # α₁ = ‖Aᵀu₁‖ must be ⟨u₁, A v₁⟩, or else the two are not each other's transposes.
            allowed = math.sqrt(torch.finfo(sides.dtype).eps) * (alpha + norm(image))
            mismatched = state.active & (abs(inner(u, image) - alpha) > allowed)
            state.stop(mismatched)
        scaled(u, -alpha).add_(image)
        beta = norm(u)
        scaled(u, ratio(one, beta))
        scaled(v, -beta).add_(adjoint(u))
        length = norm(v)
        scaled(v, ratio(one, length))
        alpha = chosen(beta > 0, length, alpha)

        chat, shat, alphahat = _rotation(alphabar, strength)
        rho_before, rhobar_before, zeta_before = rho, rhobar, zeta
        c, s, rho = _rotation(alphahat, beta)
        theta, alphabar = s * alpha, c * alpha
        thetabar, rhotemp = sbar * rho, cbar * rho
        cbar, sbar, rhobar = _rotation(rhotemp, theta)
        zeta, zetabar = cbar * zetabar, -sbar * zetabar

        state.count()
        scaled(hbar, -ratio(thetabar * rho, rho_before * rhobar_before)).add_(h)
        add_scaled(x, chosen(state.active, ratio(zeta, rho * rhobar), zero), hbar)
        scaled(h, -ratio(theta, rho)).add_(v)

        # ‖r‖ through one more rotation, of the bidiagonal matrix from the other side.
        betaacute, betacheck = chat * betadd, -shat * betadd
        betahat, betadd = c * betaacute, -s * betaacute
        thetatilde_before = thetatilde
        ctilde, stilde, rhotilde = _rotation(rhodold, thetabar)
        thetatilde, rhodold = stilde * rhobar, ctilde * rhobar
        betad = ctilde * betahat - stilde * betad
        tautildeold = ratio(zeta_before - thetatilde_before * tautildeold, rhotilde)
        taud = ratio(zeta - thetatilde * tautildeold, rhodold)
        damped = damped + betacheck * betacheck
        misfit = root(damped + (betad - taud) * (betad - taud) + betadd * betadd)

        operator_norm = root(frobenius + beta * beta)
        frobenius = frobenius + beta * beta + alpha * alpha
        if k > 1:  # ρ̄₀ = 1 is no singular value
            largest, smallest = larger(largest, rhobar_before), smaller(smallest, rhobar_before)
        tiniest = smaller(smallest, rhotemp)
        condition_number = chosen(tiniest > 0, ratio(larger(largest, rhotemp), tiniest), constant(math.inf, beta))
        residual, length = abs(zetabar), norm(x)

        for name, new in (
            ("residual", residual),
            ("misfit", misfit),
            ("operator_norm", operator_norm),
            ("condition_number", condition_number),
        ):
            setattr(outcome, name, chosen(state.active, new, getattr(outcome, name)))
        state.finish(not_finite(residual + misfit + operator_norm + length), Status.NOT_FINITE)
        state.finish(misfit <= options.btol * size + options.atol * operator_norm * length, Status.CONVERGED)
        state.finish(residual <= options.atol * operator_norm * misfit, Status.CONVERGED)
        state.finish(condition_number * limit >= 1, Status.ILL_CONDITIONED)
        state.finish(misfit <= eps / 2 * (size + operator_norm * length), Status.STAGNATED)
        state.finish(residual <= eps / 2 * operator_norm * misfit, Status.STAGNATED)
        state.finish(condition_number * (eps / 2) >= 1, Status.ILL_CONDITIONED)
        if state.over(k):
            break
        masked(u, state.active)
        masked(v, state.active)
    if bool(mismatched.any() if isinstance(mismatched, Tensor) else mismatched):
        raise OperatorError(
            "lsmr needs an operator and its transpose.",
            expected="⟨u, A v⟩ = ⟨rmatvec(u), v⟩",
            got="different values for the first pair of vectors",
            fix="Check rmatvec, or leave it out (None) to let torch differentiate through matvec.",
        )
    broken = state.statuses == int(Status.NOT_FINITE)
    for name in ("residual", "misfit", "operator_norm", "condition_number"):
        setattr(outcome, name, as_tensor(getattr(outcome, name), b))
    return torch.where(broken[:, None], torch.nan, x), outcome


def _rotation(a: Scalars, b: Scalars) -> tuple[Scalars, Scalars, Scalars]:
    """Cosine, sine and radius of the Givens rotation of (a, b), without overflow."""
    radius = hypot(a, b)
    return ratio(a, radius), ratio(b, radius), radius


def _damping(damp: float | Tensor, sides: RightHandSides) -> Tensor:
    if isinstance(damp, Tensor):
        if damp.ndim or not damp.is_floating_point():
            raise ConfigurationError(
                "damp is no number.", expected="a floating-point tensor without dimensions", got=str(tuple(damp.shape))
            )
        return damp.detach().to(sides.rows)
    return torch.as_tensor(damp, dtype=sides.working, device=sides.rows.device)


def _columns(
    matvec: Matvec, rmatvec: Matvec | None, sides: RightHandSides, b: Tensor, x0: Tensor | None
) -> tuple[int, int]:
    """The number of columns of an operator, and the number of products that it took to find it."""
    require_callable(matvec, rmatvec)
    if x0 is not None:
        return x0.shape[-1], 0
    for operator, side in ((matvec, 1), (rmatvec, 0)):
        if isinstance(operator, Operator):
            return operator.shape[side], 0
    if rmatvec is None:
        raise ConfigurationError(
            "The number of columns is not known.",
            expected="n=, x0=, rmatvec or an operator with a shape",
            got="a callable alone",
            fix="Pass n=, the length of the vectors that matvec takes.",
        )
    with torch.no_grad():
        product = rmatvec(b.detach())
    if not isinstance(product, Tensor) or product.shape[:-1] != sides.shape:
        raise OperatorError(
            "rmatvec gave something of another shape.",
            expected=f"{(*sides.shape, 'n')} for vectors {tuple(b.shape)}",
            got=str(tuple(product.shape)) if isinstance(product, Tensor) else type(product).__name__,
        )
    return product.shape[-1], sides.shape.numel()


class _Backward:
    """The gradients of a least-squares solution."""

    def __init__(
        self,
        A: LinearMap,
        sides: RightHandSides,
        b: Tensor,
        x0: Tensor | None,
        damp: Tensor,
        options: LeastSquaresOptions,
        operator_norm: Tensor,
    ):
        self._A, self._sides, self._damp, self._options = A, sides, damp, options
        self._b, self._x0 = b.detach(), None if x0 is None else x0.detach()
        self._operator_norm = operator_norm

    def __call__(self, x: Tensor, cotangent: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor]:
        """b̄, the operator's tensors' gradients, λ̄ and x̄0."""
        A, damp = self._A, self._damp
        cotangent = cotangent.contiguous()
        x, b, scale = where_used(cotangent, x.detach(), self._b, self._operator_norm.reshape(*x.shape[:-1], 1))
        d = x if self._x0 is None else where_used(cotangent, x - self._x0)[0]
        p = self._solve(cotangent, transposed=True, damp=damp)
        q = cotangent - A.transposed(p)
        r = b - A(x)
        squared = float(damp) ** 2
        largest = float(scale.max()) if scale.numel() else 0.0
        if squared > 0 and squared >= math.sqrt(torch.finfo(self._sides.working).eps) * largest**2:
            w = q / squared
            pairs = [(w, r), (x, -p)]
        else:
            undamped = torch.zeros_like(damp)
            pairs = [(x, -p)]
            noise = 100 * max(self._options.atol, self._options.btol)
            w = self._solve(p, transposed=False, damp=undamped)
            pairs.append((w, r))
            # w and y have no part outside the ranges of Aᵀ and A: what is there of q and r is kept apart, unless it is
            # nothing but the error of the solves, which must not be divided by λ².
            outside = _unless_noise(q - squared * w, noise * (_length(cotangent) + scale * _length(p)))
            if bool((outside != 0).any()):
                y = self._solve(d, transposed=True, damp=undamped)
                pairs.append((outside, y))
                if squared > 0:
                    left = _unless_noise(r - squared * y, noise * (_length(b) + scale * _length(x)))
                    pairs.append((outside / squared, left))
        return p, parameter_gradients(A, pairs), -2 * damp * (w * d).sum(), q

    def _solve(self, vectors: Tensor, *, transposed: bool, damp: Tensor) -> Tensor:
        """``argmin ‖A z - v‖² + λ²‖z‖²``, or the same with Aᵀ."""
        A, sides = self._A, RightHandSides("x̄", vectors)
        maps = (A.transposed, A) if transposed else (A, A.transposed)
        forward, adjoint = (sides.on_rows(f) for f in maps)
        z, outcome = solve_least_squares(forward, adjoint, sides, A.m if transposed else A.n, damp, None, self._options)
        warn_unless_converged("lsmr", outcome.state.statuses, sides.restore_norms(outcome.residual))
        return sides.restore(z)


def _length(vectors: Tensor) -> Tensor:
    return vector_norm(vectors)[..., None]


def _unless_noise(vectors: Tensor, noise: Tensor) -> Tensor:
    return torch.where(_length(vectors) <= noise, 0.0, vectors)
