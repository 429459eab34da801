"""What the iterative solvers share: rows of right-hand sides, guarded arithmetic, statuses and their book-keeping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, OperatorError
from laplace_plus.kernels import inner as vector_inner
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.arguments import require_count, require_tolerance, working_type
from laplace_plus.linalg.linear_maps import LinearMap
from laplace_plus.linalg.results import Status

Rows = Callable[[Tensor], Tensor]
"""A linear map of rows ``[R, n] -> [R, m]`` in the working type."""

Scalars = Any
"""One number or truth value for each row: a tensor ``[R]``, or a plain one; see :func:`is_single`."""


class RightHandSides:
    """Right-hand sides ``[..., n]`` as rows ``[R, n]`` in the type that the recurrences work in.

    Each row is divided by a power of two, which is exact, so that no square under- or overflows.

    Args:
        name: What the argument is called.
        vectors: The right-hand sides.

    Attributes:
        rows: ``[R, n]``, in float32 where the vectors have half precision.
        scale: ``[R]``, what they are divided by.

    Raises:
        ConfigurationError: Something that is no stack of real vectors.
    """

    def __init__(self, name: str, vectors: Tensor):
        stacked = isinstance(vectors, Tensor) and vectors.ndim > 0 and vectors.shape[-1] > 0
        if not stacked or not vectors.is_floating_point():
            raise ConfigurationError(
                f"{name} is no stack of vectors.",
                expected="a floating-point tensor [..., n]",
                got=f"{tuple(vectors.shape)} of {vectors.dtype}" if isinstance(vectors, Tensor) else repr(vectors),
            )
        self.shape, self.dtype = vectors.shape[:-1], vectors.dtype
        self.length = vectors.shape[-1]
        self.working = working_type(vectors.dtype)
        rows = self._as_rows(vectors)
        # Of the largest entry, but within the normal numbers of the type, so that the inverse is exact, too.
        limits = torch.finfo(self.working)
        largest = rows.abs().amax(-1).nan_to_num(1.0).clamp(limits.tiny * 4, limits.max / 4)
        power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        self.scale = torch.where((rows == 0).all(-1), 1.0, power)
        self.rows = rows / self.scale[:, None]

    def _as_rows(self, vectors: Tensor) -> Tensor:
        return vectors.detach().reshape(self.shape.numel(), vectors.shape[-1]).to(self.working)

    def restore(self, rows: Tensor) -> Tensor:
        """Solutions ``[R, k]`` as ``[..., k]`` in the caller's type and scale, or ``[S, R, k]`` as ``[S, ..., k]``."""
        return (rows * self.scale[:, None]).reshape(*rows.shape[:-2], *self.shape, rows.shape[-1]).to(self.dtype)

    def restore_norms(self, norms: Tensor) -> Tensor:
        """Norms ``[R]`` as ``[...]`` in the caller's scale, or ``[S, R]`` as ``[S, ...]``."""
        return (norms * self.scale).reshape((*norms.shape[:-1], *self.shape))

    def absolute(self, atol: float) -> Scalars:
        """An absolute tolerance in the scale of the rows."""
        return atol / (self.scale.item() if is_single(self.rows) else self.scale)

    def on_rows(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> Rows:
        """A callable on ``[..., n]`` as one on rows; what the caller gave as one vector it gets as one vector.

        Args:
            function: The callable.
            name: Its name, if it must give vectors of the shape and type that it takes.
        """

        def product(rows: Tensor) -> Tensor:
            vectors = rows.to(self.dtype)
            vectors = vectors[0] if not self.shape else vectors
            result = function(vectors)
            if name is not None and (not isinstance(result, Tensor) or result.shape != vectors.shape):
                raise OperatorError(
                    f"The {name} gave something of another shape.",
                    expected=str(tuple(vectors.shape)),
                    got=str(tuple(result.shape)) if isinstance(result, Tensor) else type(result).__name__,
                )
            return result.reshape(rows.shape[0], -1 if rows.shape[0] else result.shape[-1]).to(self.working)

        return product

    def start(self, name: str, x0: Tensor | None, length: int) -> Tensor | None:
        """A first guess as rows of its own.

        Raises:
            ConfigurationError: A guess of another shape or type.
        """
        if x0 is None:
            return None
        if x0.shape != (*self.shape, length) or x0.dtype != self.dtype:
            raise ConfigurationError(
                f"{name} does not fit the right-hand sides.",
                expected=f"{(*self.shape, length)} of {self.dtype}",
                got=f"{tuple(x0.shape)} of {x0.dtype}",
            )
        return self._as_rows(x0) / self.scale[:, None]


def converted(dtype: torch.dtype | None, vectors: Any) -> Any:
    """Vectors in the type that was asked for, if any, and if there are any."""
    return vectors.to(dtype) if dtype is not None and isinstance(vectors, Tensor) else vectors


class Progress:
    """Which right-hand sides are still worked on, and how the others ended.

    All decisions are masks on the device; the host looks only every few iterations.

    Args:
        shape: Of the masks.
        device: Where they live.
        single: Whether masks are plain booleans, for one right-hand side on the CPU; see :func:`is_single`.

    Attributes:
        active: Which right-hand sides have not ended.
    """

    def __init__(self, shape: Sequence[int], device: torch.device, *, single: bool = False):
        self._shape, self._device, self._single = tuple(shape), device, single
        self._statuses: Any = int(Status.MAX_ITERATIONS)
        self._iterations: Any = 0
        self.active: Any = True
        if not single:
            self.active = torch.ones(self._shape, dtype=torch.bool, device=device)
            self._statuses = torch.full(self._shape, self._statuses, device=device)
            self._iterations = torch.zeros_like(self._statuses)
        # A look costs nothing on the CPU, and stalls the queue of an accelerator.
        self._interval = 1 if device.type == "cpu" else 8

    @property
    def statuses(self) -> Tensor:
        """Integers, :class:`~laplace_plus.linalg.results.Status`."""
        return torch.full(self._shape, self._statuses) if self._single else self._statuses

    @property
    def iterations(self) -> Tensor:
        """Iterations so far."""
        return torch.full(self._shape, self._iterations) if self._single else self._iterations

    def finish(self, condition: Scalars, status: Status) -> None:
        """End what is active and meets a condition."""
        if not self._single:
            self._statuses = self._statuses.masked_fill(self.active & condition, int(status))
            self.active = self.active & ~condition
        elif self.active and condition:
            self._statuses, self.active = int(status), False

    def revise(self, condition: Scalars, status: Status) -> None:
        """Correct the status of what has converged but meets a condition."""
        wrong = condition & (self._statuses == int(Status.CONVERGED))
        if not self._single:
            self._statuses = self._statuses.masked_fill(wrong, int(status))
        elif wrong:
            self._statuses = int(status)

    def stop(self, condition: Scalars) -> None:
        """End everything if a condition holds for any, whatever the status: an error is to be raised."""
        self.active = self.active & ~condition.any() if isinstance(condition, Tensor) else self.active and not condition

    def count(self) -> None:
        """One iteration more for all that is active."""
        self._iterations = self._iterations + self.active

    def over(self, iteration: int) -> bool:
        """Whether nothing is left to do, as far as the host looks after this iteration."""
        if self._single:
            return not self.active
        return iteration % self._interval == 0 and not bool(self.active.any())


def iterations(cap: int, name: str, *, progress: bool) -> Iterable[int]:
    """``1 … cap``, with a progress bar."""
    return progress_bar(range(1, cap + 1), enabled=progress, description=name)


@dataclass(frozen=True)
class Options:
    """Tolerances and caps of a solver of symmetric systems, see :func:`~laplace_plus.linalg.cg.cg`."""

    rtol: float
    atol: float
    cap: int
    check_symmetry: bool
    progress: bool

    @classmethod
    def of(
        cls,
        sides: RightHandSides,
        rtol: float | None,
        atol: float,
        max_iterations: int | None,
        check_symmetry: bool,
        progress: bool,
    ) -> Options:
        """Checked options for given right-hand sides, with the defaults filled in."""
        relative, absolute = tolerance("rtol", rtol, sides.dtype), tolerance("atol", atol, sides.dtype)
        return cls(relative, absolute, iteration_cap(max_iterations, sides.length), check_symmetry, progress)


def iteration_cap(max_iterations: int | None, size: int) -> int:
    """``max(1000, 10 size)`` by default: rounding delays convergence beyond the dimension.

    Raises:
        ConfigurationError: A cap below one.
    """
    if max_iterations is None:
        return max(1000, 10 * size)
    require_count("max_iterations", max_iterations, 1)
    return max_iterations


def tolerance(name: str, value: float | None, dtype: torch.dtype) -> float:
    """By default 1e-10 in float64, 1e-6 in float32 and 1e-2 in half precision.

    Raises:
        ConfigurationError: A negative tolerance.
    """
    require_tolerance(**{name: value})
    return {torch.float64: 1e-10, torch.float32: 1e-6}.get(dtype, 1e-2) if value is None else value


def is_single(rows: Tensor) -> bool:
    """Whether the recurrences of these rows run in plain numbers.

    A tensor of one element costs fifty times as much as a plain number, but on an accelerator it saves a look.
    """
    return rows.shape[0] == 1 and rows.device.type == "cpu"


def inner(a: Tensor, b: Tensor) -> Scalars:
    """Row-wise inner products."""
    if is_single(a):
        return vector_inner(a[0], b[0]).item()
    if a.device.type == "cpu" and a.shape[-1] >= 65536 and a.shape[0]:  # a product of that size costs more than a loop
        return torch.stack([vector_inner(x, y) for x, y in zip(a, b, strict=True)])
    return (a * b).sum(-1)


def norm(a: Tensor) -> Scalars:
    """Row-wise Euclidean norms."""
    if is_single(a):
        return vector_norm(a[0]).item()
    return vector_norm(a)


def constant(value: float, like: Scalars) -> Scalars:
    """A number for each row."""
    return torch.full_like(like, value) if isinstance(like, Tensor) else value


def ratio(a: Scalars, b: Scalars) -> Scalars:
    """``a / b``, and 0 where b is 0."""
    if isinstance(b, Tensor):
        return (a / b).masked_fill(b == 0, 0.0)
    return a / b if b else 0.0


def root(a: Scalars) -> Scalars:
    """The square root, and 0 of negative numbers."""
    return a.clamp_min(0).sqrt() if isinstance(a, Tensor) else math.sqrt(max(0.0, a)) if a == a else a


def hypot(a: Scalars, b: Scalars) -> Scalars:
    """``(a² + b²)^½`` without overflow."""
    return torch.hypot(a, b) if isinstance(a, Tensor) else math.hypot(a, b)


def larger(a: Scalars, b: Scalars) -> Scalars:
    """The larger one."""
    return torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


def smaller(a: Scalars, b: Scalars) -> Scalars:
    """The smaller one."""
    return torch.minimum(a, b) if isinstance(a, Tensor) else min(a, b)


def chosen(condition: Scalars, a: Scalars, b: Scalars) -> Scalars:
    """``a`` where a condition holds, and ``b`` elsewhere."""
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def not_finite(a: Scalars) -> Scalars:
    """Where a number is NaN or infinite."""
    return ~torch.isfinite(a) if isinstance(a, Tensor) else not math.isfinite(a)


def as_tensor(a: Scalars, rows: Tensor) -> Tensor:
    """Numbers of the rows as a tensor ``[R]``."""
    return a if isinstance(a, Tensor) else rows.new_tensor([a])


def masked(rows: Tensor, active: Scalars) -> Tensor:
    """Zero, in place, instead of the rows that are done, so that nothing of them reaches the operator again.

    A single row is done when the loop is.
    """
    if not isinstance(active, Tensor):
        return rows if active else rows.zero_()
    if rows.shape[0] == 1 or (rows.device.type == "cpu" and bool(active.all())):
        return rows
    return rows.masked_fill_(~active[..., None], 0.0)


def scaled(rows: Tensor, scale: Scalars) -> Tensor:
    """``rows *= scale`` in place, row by row; ``rows`` may be a stack of rows."""
    return rows.mul_(scale[..., None] if isinstance(scale, Tensor) else scale)


def add_scaled(target: Tensor, scale: Scalars, rows: Tensor) -> Tensor:
    """``target += scale · rows`` in place, row by row, or stacks of rows."""
    if isinstance(scale, Tensor):
        return target.addcmul_(scale[..., None], rows)
    return target.add_(rows, alpha=scale)


def asymmetry(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], dtype: torch.dtype) -> Scalars:
    """Where ``⟨p, A q⟩`` and ``⟨A p, q⟩`` differ by more than rounding, from (p, A p) and (q, A q)."""
    (p, p_image), (q, q_image) = first, second
    scale = norm(p) * norm(q_image) + norm(p_image) * norm(q)
    different = abs(inner(p, q_image) - inner(p_image, q)) > math.sqrt(torch.finfo(dtype).eps) * scale
    return different & (scale > 0)  # a scale that underflowed says nothing


def asymmetric_operator(method: str, alternative: str) -> OperatorError:
    """The error for an operator that is not its own transpose."""
    return OperatorError(
        f"{method} needs a symmetric operator.",
        expected="⟨p, A q⟩ = ⟨A p, q⟩",
        got="different values for the first two search directions",
        fix=f"Use {alternative} for any other operator; pass check_symmetry=False if the products are only noisy.",
    )


def parameter_gradients(A: LinearMap, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """The derivative of ``Σ ⟨u, A v⟩`` over pairs (v, u) in the operator's tensors.

    Stacks go through the operator together; single vectors one by one, since a callable may take nothing else.
    """
    if not A.tensors:
        return ()
    if pairs[0][0].ndim > 1:
        vectors, cotangents = (torch.cat([x.flatten(0, -2) for x in side]) for side in zip(*pairs, strict=True))
        return A.parameter_pullback(vectors, cotangents)
    gradients = [A.parameter_pullback(v, u) for v, u in pairs]
    return tuple(torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True))


def where_used(cotangents: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Zero for the systems whose solutions nothing depends on, so that a NaN there stays there."""
    used = (cotangents != 0).any(-1, keepdim=True)
    return tuple(torch.where(used, x, 0.0) for x in vectors)


def warn_unless_converged(method: str, statuses: Tensor, residual: Tensor) -> None:
    """Warn that a gradient is less accurate than the tolerance and the type of numbers allow.

    A solve that only rounding stopped is as accurate as it can be.
    """
    endings = {Status(s) for s in statuses.flatten().tolist()} - {Status.CONVERGED, Status.STAGNATED}
    if not endings:
        return
    worst = max(endings)
    warnings.warn(
        f"The backward solve of {method} ended with {worst.name} and a residual of {float(residual.max()):.2e}; the "
        "gradient is only as accurate as that.",
        ConvergenceWarning,
        stacklevel=2,
    )
