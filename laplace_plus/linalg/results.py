"""What estimators and solvers return."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import torch
from torch import Tensor

PRODUCTS: ContextVar[float] = ContextVar("products", default=0.0)
"""Machine epsilon of the type in which a network computes products, where that is shorter than the vectors' type."""


def agreement(dtype: torch.dtype) -> float:
    """The relative difference that rounding explains between two ways to one number: the square root of epsilon."""
    return max(torch.finfo(dtype).eps, PRODUCTS.get()) ** 0.5


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error.

    Attributes:
        value: The estimate; differentiable where the function says so.
        sem: Standard error of ``value`` over the random probes, of the same shape; zero where the result is exact. It
            does not include the bias of a small Krylov depth, which ``converged`` tests.
        matvecs: Number of operator–vector products.
        converged: Whether the requested tolerances are met, or the result is exact.
        probes: Number of independent probes behind ``sem``.
        depth: Largest Krylov depth; 0 for methods without one.
    """

    value: Tensor
    sem: Tensor
    matvecs: int
    converged: bool
    probes: int = 0
    depth: int = 0


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


def standard_error(samples: Tensor) -> Tensor:
    """The standard error of the mean of ``samples [k, ...]`` over the first dimension; infinite for one sample."""
    if len(samples) == 1:
        return torch.full_like(samples[0], torch.inf)
    return cast(Tensor, samples.std(0) / samples.shape[0] ** 0.5)


def jackknife(estimates: Tensor) -> Tensor:
    """The jackknife standard error, from the estimates ``[m, ...]`` without each of the m probes.

    In expectation it is at least the error of an estimate with one probe less (B. Efron and C. Stein, "The Jackknife
    Estimate of Variance", 1981).
    """
    m = len(estimates)
    return ((m - 1) / m * (estimates - estimates.mean(0)).square().sum(0)).sqrt()
