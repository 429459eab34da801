"""Ordinary differential equations for many samples together, each with a step size and an end of its own.

Dormand and Prince's pair of orders 5 and 4 (1980), with the step size control of Hairer, Nørsett and Wanner, "Solving
ordinary differential equations I", 1993. The right-hand sides of all samples under way are evaluated together, since
they take most of the time.

No maintained library offers that: torchdiffeq has one step size, and one failure, for the whole batch; torchode has
them for each sample, but depends on torchtyping, which is retired, and pins an old typeguard; SciPy's steppers evaluate
one sample at a time. SciPy's serve as the tests' reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Rates(NamedTuple):
    """The right-hand side at samples' states.

    Attributes:
        slope: Derivatives of the states, ``[m, n]``.
        invariant: What the exact path keeps, ``[m]``.
        quantity: A function of the state, ``[m, q]``, and
        change: its derivative along the path, ``[m, q]``, as long as it does not jump.
    """

    slope: Tensor
    invariant: Tensor
    quantity: Tensor
    change: Tensor

    def at(self, which: Tensor) -> Rates:
        """Copies for some samples."""
        return Rates(*(values[which] for values in self))

    def set(self, which: Tensor, others: Rates) -> None:
        """Overwrite some samples' rates."""
        for values, new in zip(self, others, strict=True):
            values[which] = new

    def finite(self) -> Tensor:
        """Which samples have finite rates, ``[m]``."""
        return torch.isfinite(self.slope).all(1) & torch.isfinite(self.invariant)


RightHandSide = Callable[[Tensor, Tensor], Rates]
"""From the samples' numbers ``[m]`` and states ``[m, n]``."""

Correction = Callable[[Tensor, Rates, Tensor], tuple[Tensor, Rates]]
"""From states ``[m, n]``, their rates and the invariant's ratio ``[m]`` to those with the right invariant."""

Bend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From states ``[m, n]``, the quantity ``[m, q]`` and its jump ``[m, q]`` at a kink to the states behind the kink, and
their relative change ``[m]``, which :func:`integrate` compares with ``max_change``."""

_A: tuple[tuple[float, ...], ...] = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_WEIGHTS = _A[-1]
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Difference of the solutions of order 5 and 4; the last stage of a step is the first one of the next."""

_SAFETY, _LEAST, _MOST = 0.9, 0.2, 10.0
"""Safety factor, and least and largest factor between steps, as is usual for this pair (SciPy's, too)."""
_TOWARDS_KINKS = 0.25
"""Factor of a step's length where a kink rejects it; the size of a jump does not tell where in the step it is."""
_TINY = 1e-6
"""Fraction of the path below which a step that still sees a jump is taken to be at a kink; also 100 roundings."""


class PathStatus(IntEnum):
    """How a sample's path ended."""

    ARRIVED = 0
    """It reached its end."""
    TOO_MANY_EVALUATIONS = 1
    """The cap on evaluations of the right-hand side came first."""
    STEP_TOO_SMALL = 2
    """The tolerances ask for steps below rounding: the path diverges, or they are too tight for the type."""
    NOT_FINITE = 3
    """A gradient or a Hessian-vector product along it was NaN or infinite."""


_FAILURES = {
    PathStatus.TOO_MANY_EVALUATIONS: "reached the cap on evaluations",
    PathStatus.STEP_TOO_SMALL: "needed steps below rounding",
    PathStatus.NOT_FINITE: "met derivatives that are not finite",
}


def failures(statuses: Tensor) -> str:
    """In words how paths failed, most frequent first; empty if none did.

    Example:
        >>> failures(torch.tensor([0, 3, 1, 3]))
        '2 met derivatives that are not finite, 1 reached the cap on evaluations'
    """
    counts = [(int((statuses == status).sum()), words) for status, words in _FAILURES.items()]
    return ", ".join(f"{count} {words}" for count, words in sorted(counts, reverse=True) if count)


@dataclass(frozen=True)
class Paths:
    """Solutions of an initial value problem.

    Attributes:
        states: At each of the times asked for, ``[k, T, n]``; NaN from where a sample failed.
        reached: Time that each sample reached, ``[k]`` float64.
        statuses: :class:`PathStatus` of each sample, ``[k]`` integers.
        n_evaluations: Evaluations of the right-hand side for each sample, ``[k]``.
        initial: The invariant at the start, ``[k]``.
        drift: Sum over the steps of the invariant's relative changes, which were corrected for, ``[k]``.
        n_kinks: Kinks that were crossed, ``[k]``.
    """

    states: Tensor
    reached: Tensor
    statuses: Tensor
    n_evaluations: Tensor
    initial: Tensor
    drift: Tensor
    n_kinks: Tensor


def integrate(
    function: RightHandSide,
    start: Tensor,
    times: Tensor,
    *,
    rtol: float,
    atol: float,
    max_evaluations: int,
    max_change: float,
    correct: Correction,
    bend: Bend,
) -> Paths:
    """Follow ``y' = f(y)`` from ``start [k, n]`` at time 0 to increasing, positive ``times [T]``.

    The error of a step, in root mean square over the entries of a sample's state in units of
    ``atol + rtol max(|y|, |y_next|)``, is at most one, and the invariant's relative change at most ``max_change``.
    After each step the state is put back to where the invariant is what it was at the start.

    A kink shows in the quantity, whose change then differs from the integral of its rate. Steps in which this jump, or
    the invariant, would bend the path by more than ``max_change`` are repeated with smaller ones. A jump that is left
    in a tiny step is a kink, and ``bend`` gives the state behind it.
    """
    k, device = len(start), start.device
    goals = times.to(device=device, dtype=torch.float64)
    samples = torch.arange(k, device=device)
    y = start.clone()
    found = function(samples, y)
    now = found.at(samples)  # a copy: it is overwritten as samples move on
    initial, drift = found.invariant.clone(), torch.zeros_like(found.invariant)
    states = start.new_full((k, len(goals), start.shape[1]), float("nan"))
    t, h = torch.zeros(2, k, dtype=torch.float64, device=device)
    goal, n_kinks, statuses = torch.zeros(3, k, dtype=torch.long, device=device)
    count = torch.ones(k, dtype=torch.long, device=device)
    active = samples[now.finite()]
    statuses[~now.finite()] = PathStatus.NOT_FINITE
    h[active] = _first_step(function, active, y[active], now.slope[active], rtol, atol).to(h)
    count[active] += 1
    smallest = 10 * torch.finfo(start.dtype).eps
    tiny = max(_TINY, 10 * smallest) * goals[-1]
    most = torch.full_like(h, _MOST)
    while len(active):
        left = goals[goal[active]] - t[active]
        landing = h[active] >= left * (1 - 1e-9)
        step = torch.where(landing, left, h[active])
        short = step.to(start.dtype)[:, None]
        stages, integral, end = [now.slope[active]], _WEIGHTS[0] * now.change[active], now
        for stage, weights in enumerate(_A, 1):
            state = y[active] + short * sum(w * slope for w, slope in zip(weights, stages, strict=True) if w)
            end = function(active, state)
            stages.append(end.slope)
            if stage < len(_WEIGHTS):
                integral += _WEIGHTS[stage] * end.change
        count[active] += len(_A)
        error = short * sum(w * slope for w, slope in zip(_ERROR, stages, strict=True) if w)
        scale = atol + rtol * torch.maximum(y[active].abs(), state.abs())
        norm = (error / scale).square().mean(1).sqrt().to(h)
        finite = torch.isfinite(norm) & end.finite()
        base = initial[active]
        change = (end.invariant / base.clamp(min=torch.finfo(y.dtype).tiny) - 1).abs().to(h)
        change = torch.where(base > 0, change, 0.0)
        behind, bent = bend(state, end.quantity, end.quantity - now.quantity[active] - short * integral)
        straight = torch.maximum(change, bent.to(h)) <= max_change
        at_kink = finite & (norm <= 1) & ~straight & (step < tiny)
        if at_kink.any():
            which, state = active[at_kink], torch.where(at_kink[:, None], behind, state)
            end.set(at_kink, function(which, state[at_kink]))
            finite &= end.finite()
            change = torch.where(at_kink, 0.0, change)
            count[which] += 1
            n_kinks[active[at_kink & finite]] += 1
        accepted = finite & (norm <= 1) & (straight | at_kink)
        largest = torch.where(at_kink, _MOST, most[active])
        factor = torch.minimum(_SAFETY * norm.clamp(min=1e-10) ** -0.2, largest).clamp(min=_LEAST)
        factor = torch.where(straight | at_kink, factor, factor.clamp(max=_TOWARDS_KINKS))
        factor = torch.where(accepted, factor, torch.where(finite, factor.clamp(max=1.0), _LEAST))
        most[active] = torch.where(accepted, _MOST, 1.0).to(most)  # after a rejection no larger step

        moved, ratio = active[accepted], (base / end.invariant)[accepted]
        ratio = torch.where(initial[moved] > 0, ratio, 1.0)
        y[moved], kept = correct(state[accepted], end.at(accepted), ratio)
        now.set(moved, kept)
        t[moved] = torch.where(landing, goals[goal[active]], t[active] + step)[accepted]
        drift[moved] += change[accepted].to(drift)
        # A step cut short to land on a time does not rule out the longer one that was planned.
        h[active] = torch.where(accepted & landing, torch.maximum(h[active], step * factor), step * factor)
        landed = active[accepted & landing]
        states[landed, goal[landed]] = y[landed]
        goal[landed] += 1

        ended = goal[active] == len(goals)
        statuses[active[~ended & (h[active] < smallest * left)]] = PathStatus.STEP_TOO_SMALL
        over = count[active] + len(_A) >= max_evaluations  # a step may take one more, behind a kink
        statuses[active[~ended & over]] = PathStatus.TOO_MANY_EVALUATIONS
        failed = ~ended & (statuses[active] != PathStatus.ARRIVED)
        statuses[active[failed & ~finite]] = PathStatus.NOT_FINITE
        active = active[~ended & ~failed]
    return Paths(states, t, statuses, count, initial, drift, n_kinks)


def _first_step(function: RightHandSide, which: Tensor, y: Tensor, slope: Tensor, rtol: float, atol: float) -> Tensor:
    """Hairer, Nørsett and Wanner's first step, ``[m]``: a change by 1 %, corrected by the second derivative."""
    if not len(which):
        return y.new_zeros(0)
    scale = atol + rtol * y.abs()

    def size(vectors: Tensor) -> Tensor:
        return (vectors / scale).square().mean(1).sqrt()

    d0, d1 = size(y), size(slope)
    guess = torch.where((d0 < 1e-5) | (d1 < 1e-5), torch.full_like(d0, 1e-6), 0.01 * d0 / d1.clamp(min=1e-30))
    ahead = function(which, y + guess[:, None] * slope).slope
    d2 = size(ahead - slope) / guess
    largest = torch.maximum(d1, torch.where(torch.isfinite(d2), d2, d1))
    other = torch.where(largest <= 1e-15, (guess * 1e-3).clamp(min=1e-6), (0.01 / largest.clamp(min=1e-30)) ** 0.2)
    return torch.minimum(100 * guess, other)
