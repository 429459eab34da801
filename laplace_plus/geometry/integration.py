"""Ordinary differential equations for many samples together, each with a step size and an end of its own.

Dormand and Prince's pair of orders 5 and 4 (1980), with the step size control of Hairer, Nørsett and Wanner, "Solving
ordinary differential equations I", 1993. The right-hand sides of all samples that are still under way are evaluated as
one stack, which is what the time goes into.

It is written out here because no maintained library offers that: torchdiffeq has one step size, and one failure, for
the whole stack; torchode has them for each sample, but stands on torchtyping, which is retired, and pins an old
typeguard; SciPy's steppers call the right-hand side of one sample at a time. SciPy's serves as the tests' reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """What a right-hand side says about samples at their states.

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


RightHandSide = Callable[[Tensor, Tensor], Rates]
"""From the samples' numbers ``[m]`` and states ``[m, n]``."""

_A: tuple[tuple[float, ...], ...] = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Difference of the solutions of order 5 and 4; the last stage of a step is the first one of the next."""

_WEIGHTS = _A[-1]
"""Of the stages in a step, the last one left out."""

_SAFETY, _LEAST, _MOST = 0.9, 0.2, 10.0
_TOWARDS_KINKS = 0.25
"""Steps that kinks do not allow for become so much smaller; the size of a jump does not tell where it is."""
_TINY = 1e-6
"""In a step that is so short a part of the way, or of a hundred roundings, what jumps does so at a kink."""
_EVALUATIONS = len(_A)

Correction = Callable[[Tensor, Rates, Tensor], tuple[Tensor, Rates]]
"""From states ``[m, n]``, their rates and the invariant's ratio ``[m]`` to those with the right invariant."""

Bend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From states ``[m, n]``, the quantity ``[m, q]`` and its jump ``[m, q]`` to the states behind the kink that this is,
and by how much those are other ones, ``[m]``, relative to what :func:`integrate`'s ``max_change`` is of."""


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


WORDS = {
    PathStatus.ARRIVED: "arrived",
    PathStatus.TOO_MANY_EVALUATIONS: "reached the cap on evaluations",
    PathStatus.STEP_TOO_SMALL: "needed steps below rounding",
    PathStatus.NOT_FINITE: "met derivatives that are not finite",
}


@dataclass(frozen=True)
class Paths:
    """Solutions of an initial value problem.

    Attributes:
        states: At each of the times asked for, ``[k, T, n]``; NaN where a sample did not get.
        reached: Time to which each sample got, ``[k]`` float64.
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

    The right-hand side does not see kinks, only that the quantity's change is another than the integral of its rate.
    Steps in which that, or the invariant, would bend the path by more than ``max_change`` are repeated with smaller
    ones; what is left of it in a tiny step is a kink, and ``bend`` says how the path goes on behind it.
    """
    k, device = len(start), start.device
    goals = times.to(device=device, dtype=torch.float64)
    samples = torch.arange(k, device=device)
    y = start.clone()
    found = function(samples, y)
    # Written to as samples move on: neither the initial values nor what a landscape returned may share the memory.
    now = _chosen(found, samples)
    initial, drift = found.invariant.clone(), torch.zeros_like(found.invariant)
    states = start.new_full((k, len(goals), start.shape[1]), float("nan"))
    t = torch.zeros(k, dtype=torch.float64, device=device)
    goal = torch.zeros(k, dtype=torch.long, device=device)
    count = torch.ones(k, dtype=torch.long, device=device)
    n_kinks = torch.zeros(k, dtype=torch.long, device=device)
    statuses = torch.zeros(k, dtype=torch.long, device=device)
    fits = torch.isfinite(now.slope).all(1) & torch.isfinite(initial)
    statuses[~fits] = PathStatus.NOT_FINITE
    active = samples[fits]
    h = torch.zeros_like(t)
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
        stages, integral, end = [now.slope[active]], _WEIGHTS[0] * now.change[active], None
        for stage, weights in enumerate(_A, 1):
            state = y[active] + short * sum(w * slope for w, slope in zip(weights, stages, strict=True) if w)
            end = function(active, state)
            stages.append(end.slope)
            if stage < len(_WEIGHTS) and _WEIGHTS[stage]:
                integral += _WEIGHTS[stage] * end.change
        assert end is not None
        count[active] += _EVALUATIONS
        error = short * sum(w * slope for w, slope in zip(_ERROR, stages, strict=True) if w)
        scale = atol + rtol * torch.maximum(y[active].abs(), state.abs())
        norm = (error / scale).square().mean(1).sqrt().to(h)
        finite = torch.isfinite(norm) & torch.isfinite(end.slope).all(1) & torch.isfinite(end.invariant)
        base = initial[active]
        change = (end.invariant / base.clamp(min=torch.finfo(y.dtype).tiny) - 1).abs().to(h)
        change = torch.where(base > 0, change, 0.0)
        behind, bent = bend(state, end.quantity, end.quantity - now.quantity[active] - short * integral)
        straight = torch.maximum(change, bent.to(h)) <= max_change
        at_kink = finite & (norm <= 1) & ~straight & (step < tiny)
        if at_kink.any():
            which, state = active[at_kink], torch.where(at_kink[:, None], behind, state)
            end = _replaced(end, at_kink, function(which, state[at_kink]))
            finite &= torch.isfinite(end.slope).all(1) & torch.isfinite(end.invariant)
            change = torch.where(at_kink, 0.0, change)
            count[which] += 1
            n_kinks[active[at_kink & finite]] += 1
        accepted = finite & (norm <= 1) & (straight | at_kink)
        largest = torch.where(at_kink, _MOST, most[active])
        factor = torch.minimum(_SAFETY * norm.clamp(min=1e-10) ** -0.2, largest).clamp(min=_LEAST)
        factor = torch.where(straight | at_kink, factor, factor.clamp(max=_TOWARDS_KINKS))
        factor = torch.where(accepted, factor, torch.where(finite, factor.clamp(max=1.0), _LEAST))
        most[active] = torch.where(accepted, _MOST, 1.0).to(most)  # what did not allow for a larger step is still ahead

        moved, ratio = active[accepted], (base / end.invariant)[accepted]
        ratio = torch.where(initial[moved] > 0, ratio, 1.0)
        y[moved], kept = correct(state[accepted], _chosen(end, accepted), ratio)
        now = _replaced(now, moved, kept)
        t[moved] = torch.where(landing, goals[goal[active]], t[active] + step)[accepted]
        drift[moved] += change[accepted].to(drift)
        # A step that was cut short to land on a time says nothing against the longer one that was planned.
        h[active] = torch.where(accepted & landing, torch.maximum(h[active], step * factor), step * factor)
        landed = active[accepted & landing]
        states[landed, goal[landed]] = y[landed]
        goal[landed] += 1

        ended = goal[active] == len(goals)
        statuses[active[~ended & (h[active] < smallest * left)]] = PathStatus.STEP_TOO_SMALL
        over = count[active] + _EVALUATIONS >= max_evaluations  # a step may take one more, behind a kink
        statuses[active[~ended & over]] = PathStatus.TOO_MANY_EVALUATIONS
        failed = ~ended & (statuses[active] != PathStatus.ARRIVED)
        statuses[active[failed & ~finite]] = PathStatus.NOT_FINITE
        active = active[~ended & ~failed]
    return Paths(states, t, statuses, count, initial, drift, n_kinks)


def _chosen(rates: Rates, which: Tensor) -> Rates:
    return Rates(rates.slope[which], rates.invariant[which], rates.quantity[which], rates.change[which])


def _replaced(rates: Rates, which: Tensor, others: Rates) -> Rates:
    """The same object, where some samples have other rates now."""
    for mine, new in zip(vars(rates).values(), vars(others).values(), strict=True):
        mine[which] = new
    return rates


def _first_step(function: RightHandSide, which: Tensor, y: Tensor, slope: Tensor, rtol: float, atol: float) -> Tensor:
    """Hairer, Nørsett and Wanner's guess, ``[m]``: 1 % change at first, corrected by the second derivative."""
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
