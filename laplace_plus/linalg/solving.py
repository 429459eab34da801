"""What the iterative solvers share: the problem that they solve and how it ended, and the derivative of a solution."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self, cast

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.checks import count, number
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.linalg.estimates import working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, add_gradients, attach

_LOOK_EVERY = 8
"""Iterations between looks at an accelerator, each of which waits for its queue; on the CPU a look is free."""


class Status(IntEnum):
    """How an iteration ended; larger is worse."""

    CONVERGED = 0
    """The tolerance is met (a right-hand side of zero has the solution zero)."""
    MAX_ITERATIONS = 1
    """The cap on iterations came first."""
    STAGNATED = 2
    """Rounding prevents further progress."""
    ILL_CONDITIONED = 3
    """The condition number exceeds its limit."""
    BREAKDOWN = 4
    """The operator violates a condition of the method, e.g. it is not positive definite."""
    NOT_FINITE = 5
    """NaN or infinity appeared; the solution of that right-hand side is NaN."""


@dataclass(frozen=True)
class Solution:
    """The solution of one or several linear systems.

    Attributes:
        value: ``[..., n]``, one solution for each right-hand side; differentiable.
        residual: ``[...]`` norm of the residual that the method controls.
        iterations: ``[...]`` iterations that each right-hand side took.
        statuses: ``[...]`` integers, the :class:`Status` of each right-hand side.
        matvecs: Number of operator–vector products, transposed ones included.
    """

    value: Tensor
    residual: Tensor
    iterations: Tensor
    statuses: Tensor
    matvecs: int

    @property
    def status(self) -> Status:
        """The worst status of any right-hand side."""
        return Status(int(self.statuses.max())) if self.statuses.numel() else Status.CONVERGED

    @property
    def converged(self) -> bool:
        """Whether every right-hand side met its tolerance."""
        return self.status is Status.CONVERGED


class Problem:
    """Right-hand sides ``[..., n]``, when their iteration ends, and how it ended.

    Right-hand sides are ``rows [R, n]`` in the type of the recurrences, at least float32. Each row is divided by a
    power of two, ``scale [R]``, which is exact, so that no square under- or overflows. All decisions are masks on the
    device, ``active [R]``; the host looks at them only every few iterations on an accelerator. ``statuses [R]`` and
    ``iterations [R]`` are what each row came to.

    ``size`` is the dimension of the space that is searched: the cap is ``max(1000, 10 size)``, since rounding delays
    convergence beyond it. ``default`` is the tolerance that None stands for: 1e-10 in float64, 1e-6 in float32 and 1e-2
    in half precision if it is None itself.
    """

    rows: Tensor
    scale: Tensor

    def __init__(
        self,
        method: str,
        sides: Tensor,
        size: int,
        *,
        atol: float | None,
        rtol: float | None,
        default: float | None = None,
        conlim: float = 0.0,
        max_iterations: int | None = None,
        progress: bool = False,
    ):
        default = {torch.float64: 1e-10, torch.float32: 1e-6}.get(sides.dtype, 1e-2) if default is None else default
        self.atol = default if atol is None else number("atol", atol, least=0.0)
        self.rtol = default if rtol is None else number("rtol", rtol, least=0.0)
        self.conlim = number("conlim", conlim, least=0.0)
        self.cap = max(1000, 10 * size) if max_iterations is None else count("max_iterations", max_iterations)
        self.method, self._progress = method, progress
        self._take(sides)

    def again(self, sides: Tensor) -> Self:
        """The same for other right-hand sides, such as the cotangents of the solutions."""
        other = copy.copy(self)
        other._take(sides)
        return other

    def _take(self, sides: Tensor) -> None:
        self.shape, self.dtype = sides.shape[:-1], sides.dtype
        rows = self.as_rows(sides)
        # A power of two near the largest entry, within the normal numbers of the type: its inverse is exact as well.
        limits = torch.finfo(rows.dtype)
        largest = rows.abs().amax(-1).nan_to_num(1.0).clamp(limits.tiny * 4, limits.max / 4)
        power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        self.scale = torch.where((rows == 0).all(-1), 1.0, power)
        self.rows = rows / self.scale[:, None]
        self.active = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        self.statuses = torch.full_like(self.active, int(Status.MAX_ITERATIONS), dtype=torch.int64)
        self.iterations = torch.zeros_like(self.statuses)

    def as_rows(self, vectors: Tensor) -> Tensor:
        """Vectors ``[..., n]`` as rows ``[R, n]`` in the type of the recurrences."""
        return vectors.detach().reshape(self.shape.numel(), vectors.shape[-1]).to(working_type(self.dtype))

    def map(self, matvec: Matvec, n: int, **options: Any) -> LinearMap:
        """An operator on rows; for one right-hand side ``[n]`` the operator gets single vectors."""
        return LinearMap(matvec, n, dtype=self.dtype, single=not self.shape, **options)

    # -- the iteration -------------------------------------------------------------------------------------------------

    def loop(self) -> Iterator[int]:
        """``1 … cap``, with a progress bar, until no row is active as far as the host looks."""
        interval = 1 if self.active.device.type == "cpu" else _LOOK_EVERY
        for k in progress_bar(range(1, self.cap + 1), enabled=self._progress, description=self.method):
            yield k
            if k % interval == 0 and not bool(self.active.any()):
                return

    def finish(self, condition: Tensor, status: Status) -> None:
        """End the active rows that meet a condition."""
        self.statuses = torch.where(self.active & condition, int(status), self.statuses)
        self.active = self.active & ~condition

    def only_active(self, rows: Tensor) -> Tensor:
        """Zero the rows that ended, in place, so that their values no longer reach the operator."""
        return rows.masked_fill_(~self.active[:, None], 0.0)

    @property
    def broken(self) -> Tensor:
        """The rows that met NaN or infinity."""
        return self.statuses == int(Status.NOT_FINITE)

    # -- results -------------------------------------------------------------------------------------------------------

    def restore(self, rows: Tensor) -> Tensor:
        """Rows ``[R, k]`` as ``[..., k]`` in the caller's type and scale."""
        return (rows * self.scale[:, None]).reshape(*self.shape, rows.shape[-1]).to(self.dtype)

    def figures(self, *figures: Tensor, scaled: bool = False) -> list[Tensor]:
        """Numbers for each row, ``[R]``, as ``[...]``; those that are ``scaled`` in the caller's scale."""
        return [(x * self.scale if scaled else x).reshape(self.shape) for x in figures]

    def warn_unless_converged(self, residual: Tensor) -> None:
        """Warn that a gradient is less accurate than the tolerance and the type of numbers allow.

        A solve that stagnated is as accurate as rounding allows.
        """
        endings = {Status(s) for s in self.statuses.tolist()} - {Status.CONVERGED, Status.STAGNATED}
        if endings:
            problem = f"The backward solve of {self.method} ended with {max(endings).name}"
            accuracy = f"a residual of {float(residual.max()):.2e}; the gradient is only as accurate as that"
            warn(f"{problem} and {accuracy}.", ConvergenceWarning)


def attach_solution(
    value: Tensor,
    A: LinearMap,
    inputs: Sequence[Tensor],
    gradient: Callable[[Tensor, Tensor], tuple[Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]]],
) -> Tensor:
    """Attach its implicit derivative to the solution of a system.

    ``gradient`` takes the solution and its cotangent. It returns the gradients in ``inputs``, and pairs (v, u) of
    vectors ``[..., n]`` and ``[..., m]``: the gradient in A's tensors is that of ``Σ ⟨u, A v⟩``.
    """

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> list[Tensor]:
        to_inputs, pairs = gradient(outputs[0], cast(Tensor, cotangents[0]).contiguous())
        to_tensors: tuple[Tensor, ...] = ()
        for vectors, others in pairs:
            to_tensors = add_gradients(to_tensors, A.parameter_pullback(vectors, others))
        return [*to_inputs, *to_tensors]

    return attach([value], [*inputs, *A.tensors], pullback)[0]


def where_used(cotangents: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Zero for the systems with a cotangent of zero, so that a NaN in them does not spread."""
    used = (cotangents != 0).any(-1, keepdim=True)
    return tuple(torch.where(used, x, 0.0) for x in vectors)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and 0 where b is 0."""
    return (a / b).masked_fill(b == 0, 0.0)
