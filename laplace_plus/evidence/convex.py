"""Minimising a smooth convex function whose evaluations are dear and carry rounding: preconditioned L-BFGS.

Each step takes one evaluation of value and gradient as a rule. Directions come from the two-loop recursion (Nocedal,
1980) around an inverse Hessian of the caller's; steps are accepted by the derivative along the direction, which tells
the minimum of a convex function to many more digits than its values do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from laplace_plus.errors import NonFiniteError

Extra = TypeVar("Extra")

_MEMORY = 20
"""Number of pairs of steps and gradients that are kept, unless they would take too much memory."""

_MEMORY_ENTRIES = 2**27
"""So many numbers at most are kept in them."""

_FLATTER = 0.5
"""A step is accepted where the derivative along it has fallen to this part of what it was."""

_MOST_TRIALS = 20
_FEW_TRIALS = 4
"""Of the lengths of a step; few where all that there is to gain is hardly more than rounding."""


@dataclass(frozen=True)
class Evaluation(Generic[Extra]):
    """The function at one point.

    Attributes:
        value: A number.
        gradient: ``[P]`` float64.
        extra: Whatever else is known there.
    """

    value: float
    gradient: Tensor
    extra: Extra


@dataclass(frozen=True)
class Minimum(Generic[Extra]):
    """Where a minimisation ended.

    Attributes:
        point: ``[P]`` float64.
        at: The function there.
        decrement: ``½ gᵀ P⁻¹ g`` with the preconditioner: about how much the value lies above the least one.
        n_iterations: Number of steps taken.
        converged: Whether the decrement met its tolerance, or rounding allows no further step.
    """

    point: Tensor
    at: Evaluation[Extra]
    decrement: float
    n_iterations: int
    converged: bool


def minimise(
    function: Callable[[Tensor], Evaluation[Extra]],
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    max_iterations: int,
    rounding: float,
) -> Minimum[Extra]:
    """Minimise a convex function.

    Args:
        function: Gives value and gradient.
        start: ``[P]`` float64.
        precondition: Multiplies a vector by a symmetric positive definite matrix, about the inverse of the Hessian.
        tolerance: The decrement at which to stop.
        max_iterations: The number of steps after which to stop.
        rounding: Relative error of a value.

    Raises:
        NonFiniteError: The function is not finite at the start, or nowhere along a direction.
    """
    point, at = start, function(start)
    if not _is_finite(at):
        raise _diverged(0, at.value)
    memory = max(2, min(_MEMORY, _MEMORY_ENTRIES // (2 * len(start))))
    pairs: list[tuple[Tensor, Tensor]] = []
    for iteration in range(max_iterations + 1):
        conditioned = precondition(at.gradient)
        decrement = float(at.gradient @ conditioned) / 2
        if decrement <= tolerance or iteration == max_iterations:
            return Minimum(point, at, decrement, iteration, decrement <= tolerance)
        direction = -_two_loops(pairs, at.gradient, conditioned, precondition)
        slope = float(direction @ at.gradient)
        if not slope < 0:  # rounding has spoilt the memory
            pairs, direction, slope = [], -conditioned, -2 * decrement
        found = _along(function, point, at, direction, slope, rounding, iteration)
        if found is None:
            if pairs:
                pairs = []
                continue
            # What a step would gain is less than values and gradients can tell.
            return Minimum(point, at, decrement, iteration, decrement <= max(tolerance, 10 * rounding * abs(at.value)))
        step, new = found
        change = new.gradient - at.gradient
        if float(change @ step) > 0:
            pairs = [*pairs, (step, change)][-memory:]
        point, at = point + step, new
    raise AssertionError


def _along(
    function: Callable[[Tensor], Evaluation[Extra]],
    point: Tensor,
    at: Evaluation[Extra],
    direction: Tensor,
    slope: float,
    rounding: float,
    iteration: int,
) -> tuple[Tensor, Evaluation[Extra]] | None:
    """A step to where the derivative along the direction is much smaller, and the function there; None for no such."""
    low, low_slope, high, high_slope = 0.0, slope, math.inf, math.inf
    length, any_finite, new = 1.0, False, at
    hopeful = -slope > 10 * rounding * abs(at.value)
    for _ in range(_MOST_TRIALS if hopeful else _FEW_TRIALS):
        new = function(point + length * direction)
        along = float(new.gradient @ direction) if _is_finite(new) else math.inf
        any_finite |= math.isfinite(along)
        lower = new.value <= at.value + 1e-4 * length * slope + rounding * abs(at.value)
        if lower and abs(along) <= _FLATTER * abs(slope):
            return length * direction, new
        if along > 0 or not lower:
            high, high_slope = length, along
        else:
            low, low_slope = length, along
        if math.isinf(high):
            # Past the point where the straight line through the two slopes reaches zero, but not too far at a time.
            ahead = length * slope / (slope - along) if along > slope else math.inf
            length = min(max(ahead, 2 * length), 10 * length)
        elif math.isinf(high_slope) or high_slope <= 0:
            length = low + (high - low) / 4
        else:
            part = low_slope / (low_slope - high_slope)
            length = low + (high - low) * min(max(part, 0.05), 0.95)
    if not any_finite:
        raise _diverged(iteration, new.value)
    return None


def _two_loops(
    pairs: list[tuple[Tensor, Tensor]],
    gradient: Tensor,
    conditioned: Tensor,
    precondition: Callable[[Tensor], Tensor],
) -> Tensor:
    """The inverse Hessian that the pairs and the preconditioner make, times the gradient.

    The preconditioner is scaled to fit the latest step (Nocedal and Wright, 2006, section 7.2): one of the right form
    and the wrong size, as a Kronecker-factored one of a network with shared weights, would cost many steps.
    """
    if not pairs:
        return conditioned
    result, weights = gradient.clone(), []
    for step, change in reversed(pairs):
        weights.append(float(step @ result) / float(step @ change))
        result -= weights[-1] * change
    step, change = pairs[-1]
    result = precondition(result) * (float(step @ change) / float(change @ precondition(change)))
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        result += (weight - float(change @ result) / float(step @ change)) * step
    return result


def _is_finite(at: Evaluation[Extra]) -> bool:
    return math.isfinite(at.value) and bool(torch.isfinite(at.gradient).all())


def _diverged(iteration: int, value: float) -> NonFiniteError:
    return NonFiniteError(
        f"The optimisation of the tangent model diverged after {iteration} steps.",
        expected="a finite loss and gradient",
        got=f"a loss of {value:.3g}",
        fix="Start from a larger prior precision, or look for outliers among the data.",
    )
