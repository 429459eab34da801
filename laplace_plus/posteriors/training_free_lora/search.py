"""Searches for a scale: the largest that a bound accepts, and the one with the least score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.persistence import stored

_START, _MOST = 0.015, 40
"""The first scale that is tried (the authors' largest one), and how often it is doubled or halved before giving up."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@stored
@dataclass(frozen=True)
class ScaleSearch:
    """How the scale was found.

    Attributes:
        network: The network's score on the anchors: the mean NLL in nats, or the share of errors.
        steps: What was tried, in order: scale, score, and whether it was accepted (of a least score: the least so far).
    """

    network: float
    steps: tuple[tuple[float, float, bool], ...]


def largest(
    score: Callable[[float], float], bound: float, halvings: int
) -> tuple[float, list[tuple[float, float, bool]]]:
    """The largest scale found whose score is within the bound, by bisection; 0 where there is none. And the steps."""
    steps: list[tuple[float, float, bool]] = []

    def accepted(scale: float) -> bool:
        found = score(scale)
        steps.append((scale, found, found <= bound))
        return found <= bound

    low = high = _START
    first = accepted(_START)
    for _ in range(_MOST):
        low, high = (high, 2 * high) if first else (low / 2, low)
        if accepted(high if first else low) != first:
            break
    else:
        _warn(f"{'Every' if first else 'No'} scale was accepted", steps)
        return high if first else 0.0, steps
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low, steps


def least(
    score: Callable[[float], float], halvings: int, without: float
) -> tuple[float, list[tuple[float, float, bool]]]:
    """The scale with the least score, by golden sections of its logarithm until a factor of 2 is halved so often.

    It is 0 where smaller scales are better, and none of them than the score without noise.
    """
    steps: list[tuple[float, float, bool]] = []

    def at(place: float) -> float:
        found = score(math.exp(place))
        steps.append((math.exp(place), found, all(found < before for _, before, _ in steps)))
        return found

    step, middle = math.log(2.0), math.log(_START)
    below, here, above = at(middle - step), at(middle), at(middle + step)
    for _ in range(_MOST):
        if here <= min(below, above):
            break
        if below < above:
            if below >= without:
                _warn("No scale was better than none", steps)
                return 0.0, steps
            middle, here, above = middle - step, below, here
            below = at(middle - step)
        else:
            middle, below, here = middle + step, here, above
            above = at(middle + step)
    else:
        _warn("The bound has no maximum among the scales", steps)
        return math.exp(middle), steps
    low, high = middle - step, middle + step
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    found = [at(place) for place in inner]
    while high - low > step * 2.0**-halvings:
        if found[0] <= found[1]:
            high, inner, found = inner[1], [0.0, inner[0]], [0.0, found[0]]
            inner[0] = high - _GOLDEN * (high - low)
            found[0] = at(inner[0])
        else:
            low, inner, found = inner[0], [inner[1], 0.0], [found[1], 0.0]
            inner[1] = low + _GOLDEN * (high - low)
            found[1] = at(inner[1])
    scale, score_of_it, _ = min(steps, key=lambda one: one[1])
    if score_of_it >= without:
        _warn("No scale was better than none", steps)
    return scale if score_of_it < without else 0.0, steps


def _warn(what: str, steps: list[tuple[float, float, bool]]) -> None:
    warn(f"{what}; the last was {steps[-1][0]:.3g}.", ConvergenceWarning)
