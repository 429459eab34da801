"""What the iterative solvers share: scaled right-hand sides, limits, statuses, checks and implicit gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, OperatorError, warn
from laplace_plus.kernels import inner, vector_norm
from laplace_plus.linalg.arguments import require_count, require_tolerance, working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach
from laplace_plus.linalg.results import Solution, Status, agreement

_LOOK_EVERY = 8
"""Iterations between looks at an accelerator, each of which waits for its queue; on the CPU a look is free."""


class RightHandSides:
    """Right-hand sides ``[..., n]`` as ``rows [R, n]`` in the type of the recurrences, at least float32.

    Each row is divided by a power of two, ``scale [R]``, which is exact, so that no square under- or overflows.
    ``ConfigurationError`` for anything but a stack of real vectors.
    """

    def __init__(self, name: str, vectors: Tensor):
        stacked = isinstance(vectors, Tensor) and vectors.ndim > 0 and vectors.shape[-1] > 0
        if not stacked or not vectors.is_floating_point():
            what = f"{name} must be a stack of vectors."
            got = f"{tuple(vectors.shape)} of {vectors.dtype}" if isinstance(vectors, Tensor) else repr(vectors)
            raise ConfigurationError(what, expected="a floating-point tensor [..., n]", got=got)
        self.shape, self.dtype = vectors.shape[:-1], vectors.dtype
        self.length = vectors.shape[-1]
        rows = self._as_rows(vectors)
        # A power of two near the largest entry, within the normal numbers of the type: its inverse is exact as well.
        limits = torch.finfo(rows.dtype)
        largest = rows.abs().amax(-1).nan_to_num(1.0).clamp(limits.tiny * 4, limits.max / 4)
        power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        self.scale = torch.where((rows == 0).all(-1), 1.0, power)
        self.rows = rows / self.scale[:, None]

    def _as_rows(self, vectors: Tensor) -> Tensor:
        return vectors.detach().reshape(self.shape.numel(), vectors.shape[-1]).to(working_type(self.dtype))

    def restore(self, rows: Tensor) -> Tensor:
        """Solutions ``[R, k]`` as ``[..., k]`` in the caller's type and scale, or ``[S, R, k]`` as ``[S, ..., k]``."""
        return (rows * self.scale[:, None]).reshape(*rows.shape[:-2], *self.shape, rows.shape[-1]).to(self.dtype)

    def restore_norms(self, norms: Tensor) -> Tensor:
        """Norms ``[R]`` as ``[...]`` in the caller's scale, or ``[S, R]`` as ``[S, ...]``."""
        return (norms * self.scale).reshape((*norms.shape[:-1], *self.shape))

    def map(self, matvec: Matvec, n: int, **options: Any) -> LinearMap:
        """An operator on rows; for one right-hand side ``[n]`` the operator gets single vectors."""
        return LinearMap(matvec, n, dtype=self.dtype, single=not self.shape, **options)

    def start(self, x0: Tensor | None, length: int) -> Tensor | None:
        """A copy of the first guess as rows; ``ConfigurationError`` if it has another shape or type."""
        if x0 is None:
            return None
        if x0.shape != (*self.shape, length) or x0.dtype != self.dtype:
            what, expected = "x0 does not fit the right-hand sides.", f"{(*self.shape, length)} of {self.dtype}"
            raise ConfigurationError(what, expected=expected, got=f"{tuple(x0.shape)} of {x0.dtype}")
        return self._as_rows(x0) / self.scale[:, None]


class Progress:
    """Which systems are still ``active``, and the statuses, iterations and kept coefficients of all.

    All decisions are masks on the device; the host looks at them only every few iterations on an accelerator.
    """

    def __init__(self, shape: Sequence[int], device: torch.device):
        self.active = torch.ones(tuple(shape), dtype=torch.bool, device=device)
        self.statuses = torch.full(tuple(shape), int(Status.MAX_ITERATIONS), device=device)
        self.iterations = torch.zeros_like(self.statuses)
        self.coefficients: list[tuple[Tensor, Tensor]] = []
        self._interval = 1 if device.type == "cpu" else _LOOK_EVERY

    def finish(self, condition: Tensor, status: Status) -> None:
        """End the active systems that meet a condition."""
        self.statuses = torch.where(self.active & condition, int(status), self.statuses)
        self.active = self.active & ~condition

    @property
    def broken(self) -> Tensor:
        """The systems that met NaN or infinity."""
        return self.statuses == int(Status.NOT_FINITE)

    def loop(self, cap: int, name: str, *, progress: bool) -> Iterator[int]:
        """``1 … cap``, with a progress bar, until no system is active as far as the host looks."""
        for k in progress_bar(range(1, cap + 1), enabled=progress, description=name):
            yield k
            if k % self._interval == 0 and not bool(self.active.any()):
                return


def iteration_cap(max_iterations: int | None, size: int) -> int:
    """``max(1000, 10 size)`` by default: rounding delays convergence beyond the dimension."""
    if max_iterations is None:
        return max(1000, 10 * size)
    require_count("max_iterations", max_iterations, 1)
    return max_iterations


def tolerance(name: str, value: float | None, dtype: torch.dtype) -> float:
    """By default 1e-10 in float64, 1e-6 in float32 and 1e-2 in half precision; ``ConfigurationError`` below zero."""
    require_tolerance(**{name: value})
    return {torch.float64: 1e-10, torch.float32: 1e-6}.get(dtype, 1e-2) if value is None else value


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise inner products, ``[R, n]`` and ``[R, n]`` give ``[R]``."""
    if a.device.type == "cpu" and len(a) and (len(a) == 1 or a.shape[-1] >= 1 << 16):
        # From 65536 entries on a loop is faster than the temporary of a product; for one row it always is.
        return torch.stack([inner(x, y) for x, y in zip(a, b, strict=True)])
    return (a * b).sum(-1)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and 0 where b is 0."""
    return (a / b).masked_fill(b == 0, 0.0)


def root(a: Tensor) -> Tensor:
    """The square root, and 0 of negative numbers."""
    return a.clamp_min(0).sqrt()


def where_active(rows: Tensor, active: Tensor) -> Tensor:
    """Zero the rows of ended systems in place, so that their values no longer reach the operator."""
    return rows.masked_fill_(~active[..., None], 0.0)


class SymmetricSystem:
    """Systems ``A x = b`` with a symmetric A, as recurrences get them; see :func:`cg` for the arguments."""

    def __init__(
        self,
        method: str,
        matvec: Matvec,
        b: Tensor,
        preconditioner: Matvec | None,
        x0: Tensor | None,
        rtol: float | None,
        atol: float,
        max_iterations: int | None,
        parameters: Iterable[Tensor] | None,
        dtype: torch.dtype | None,
        check_symmetry: bool,
        progress: bool,
    ):
        self._method, self._check, self._progress = method, check_symmetry, progress
        self._b = converted(dtype, b)
        self._sides = sides = RightHandSides("b", self._b)
        self.A = sides.map(matvec, sides.length, symmetric=True, parameters=parameters)
        self.preconditioner: LinearMap | None = None
        if preconditioner is not None:
            self.preconditioner = sides.map(preconditioner, sides.length, parameters=(), name="preconditioner")
        self._rtol, self._atol = tolerance("rtol", rtol, sides.dtype), tolerance("atol", atol, sides.dtype)
        self._cap = iteration_cap(max_iterations, sides.length)
        self._start = sides.start(converted(dtype, x0), sides.length)

    def solve(self, recurrence: Recurrence, shifts: Tensor | None = None) -> tuple[Solution, Progress]:
        """The solutions of ``A + σ_t`` with the implicit gradient, and how the recurrence ended.

        A recurrence takes this system, right-hand sides, shifts ``[S, 1]`` or ``[1, R]`` and a first guess. It returns
        solutions ``[S, R, n]``, true residuals, bounds on these, and the progress, ``[S, R]``; all without S where it
        takes no shifts.
        """
        A, sides, b = self.A, self._sides, self._b
        sigma = None if shifts is None else shifts.detach().to(sides.rows)

        def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
            assert cotangents[0] is not None
            cotangent = cotangents[0].contiguous()
            backward = RightHandSides("x̄", cotangent)
            each = None if sigma is None else sigma.repeat_interleave(len(sides.rows))[None]
            rows, residual, state = self._run(recurrence, backward, each, None)
            warn_unless_converged(self._method, state.statuses, backward.restore_norms(residual))
            w = backward.restore(rows).reshape(cotangent.shape)
            (solution,) = where_used(cotangent, outputs[0])
            gradients = [-g for g in parameter_gradients(A, (solution, w))]
            if shifts is None:
                return [w, *gradients]
            return [w.sum(0), *gradients, -(w * solution).flatten(1).sum(1).to(shifts)]

        each = None if sigma is None else sigma[:, None]
        x, residual, state = self._run(recurrence, sides, each, self._start)
        shape = sides.shape if sigma is None else (len(sigma), *sides.shape)
        matvecs, inputs = A.matvecs, [b, *A.tensors, *([] if shifts is None else [shifts])]
        (value,) = attach([sides.restore(x).reshape(*shape, sides.length)], inputs, pullback)
        residual, iterations, statuses = (
            figures.reshape(shape) for figures in (sides.restore_norms(residual), state.iterations, state.statuses)
        )
        return Solution(value, residual, iterations, statuses, matvecs), state

    def _run(
        self, recurrence: Recurrence, sides: RightHandSides, sigma: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor, Progress]:
        with torch.no_grad():
            x, residual, bound, state = recurrence(self, sides, sigma, start)
        wrong = (residual > 2 * bound) & (state.statuses == int(Status.CONVERGED))
        state.statuses = torch.where(wrong, int(Status.STAGNATED), state.statuses)
        return torch.where(state.broken[..., None], torch.nan, x), residual.masked_fill(state.broken, torch.nan), state

    def precondition(self, rows: Tensor) -> Tensor:
        """``P⁻¹ r``; r itself if there is no preconditioner."""
        return rows if self.preconditioner is None else self.preconditioner(rows)

    def bound(self, size: Tensor, sides: RightHandSides) -> Tensor:
        """``max(rtol ‖b‖, atol)`` in the scale of the rows, ``[R]``."""
        return torch.maximum(self._rtol * size, self._atol / sides.scale)

    def loop(self, state: Progress) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """The iterations, each with a function for its product ``A p``; the first two check that A is symmetric."""
        first: list[Tensor] = []

        def compared(q: Tensor) -> Tensor:
            image = self.A(q)
            if first:
                p, p_image = first
                scale = vector_norm(p) * vector_norm(image) + vector_norm(p_image) * vector_norm(q)
                require_adjoint(self._method, dot(p, image), dot(p_image, q), scale, self._sides.dtype)
                first.clear()
            else:
                first.extend((q.clone(), image.clone()))  # the vector changes, and an operator may return its input
            return image

        for k in state.loop(self._cap, self._method, progress=self._progress):
            yield k, compared if self._check and k <= 2 else self.A


Recurrence = Callable[
    [SymmetricSystem, RightHandSides, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor, Progress]
]


def require_adjoint(
    method: str, left: Tensor, right: Tensor, scale: Tensor | float, dtype: torch.dtype, *, symmetric: bool = True
) -> None:
    """Check ``⟨p, A q⟩``, left, against ``⟨Aᵀ p, q⟩``, right, for a map and its transpose, or for a symmetric map.

    Rounding errors in the type that A multiplies in are relative to ``scale``; where it underflowed, nothing is
    checked. ``OperatorError`` if the numbers differ by more.
    """
    different = (left - right).abs() > agreement(dtype) * scale
    if not bool((different & (scale > 0)).any()):
        return
    if symmetric:
        what, expected = f"The operator is not symmetric, as {method} needs it to be.", "⟨p, A q⟩ = ⟨A p, q⟩"
        fix = "Use lsmr or svds for any other operator; pass check_symmetry=False if a solver's products are noisy."
        raise OperatorError(what, expected=expected, got="different values for vectors of its Krylov space", fix=fix)
    what, expected = f"{method} needs an operator and its transpose.", "⟨u, A v⟩ = ⟨rmatvec(u), v⟩"
    fix = "Check rmatvec, or leave it out (None) to let torch differentiate through matvec."
    raise OperatorError(what, expected=expected, got="different values for the first pair of vectors", fix=fix)


def parameter_gradients(A: LinearMap, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The derivative of ``Σ ⟨u, A v⟩`` over pairs (v, u) in the operator's tensors.

    Stacks go through the operator together, single vectors one by one, since a callable may accept nothing else.
    """
    if not A.tensors:
        return ()
    if pairs[0][0].ndim > 1:
        vectors, cotangents = (torch.cat([x.flatten(0, -2) for x in side]) for side in zip(*pairs, strict=True))
        return A.parameter_pullback(vectors, cotangents)
    gradients = [A.parameter_pullback(v, u) for v, u in pairs]
    return tuple(torch.stack(terms).sum(0) for terms in zip(*gradients, strict=True))


def where_used(cotangents: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Zero for the systems with a cotangent of zero, so that a NaN in them does not spread."""
    used = (cotangents != 0).any(-1, keepdim=True)
    return tuple(torch.where(used, x, 0.0) for x in vectors)


def warn_unless_converged(method: str, statuses: Tensor, residual: Tensor) -> None:
    """Warn that a gradient is less accurate than the tolerance and the type of numbers allow.

    A solve that stagnated is as accurate as rounding allows.
    """
    endings = {Status(s) for s in statuses.flatten().tolist()} - {Status.CONVERGED, Status.STAGNATED}
    if not endings:
        return
    worst = max(endings)
    warn(
        f"The backward solve of {method} ended with {worst.name} and a residual of {float(residual.max()):.2e}; the "
        "gradient is only as accurate as that.",
        ConvergenceWarning,
    )


def converted(dtype: torch.dtype | None, vectors: Any) -> Any:
    """Vectors in the requested type, if a type and vectors are given."""
    return vectors.to(dtype) if dtype is not None and isinstance(vectors, Tensor) else vectors
