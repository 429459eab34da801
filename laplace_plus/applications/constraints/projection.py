"""A trained network moved onto a constraint."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.constraints.correcting import Constraint, rms
from laplace_plus.applications.constraints.optimizer import NullSpaceOptimizer
from laplace_plus.applications.constraints.sparsity import Sparse
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.network.selection import Selection, select


class Projection(NamedTuple):
    """A state on a constraint, for ``load_state_dict``; the root mean squares of c there and before; steps taken."""

    state: dict[str, Any]
    violation: float
    before: float
    steps: int
    converged: bool


def project(
    model: nn.Module,
    constraint: Constraint,
    points: Any = None,
    *,
    steps: int = 20,
    parameters: Selection = "all",
    tolerance: float | None = None,
    progress: bool = False,
) -> Projection:
    """Weights near a trained network's that meet a constraint; the network itself stays as it is.

    The steps of Gauss and Newton, ``θ ← θ − J⁺ c``, are halved until c falls. Where c is affine, one step gives the
    nearest weights of all. For :class:`Sparse` the held weights become zero.

    Args:
        model: The trained network; a copy of it is moved.
        constraint: ``c(model, points)``; what it draws at random is drawn once.
        points: A batch, or a function that returns one, called once.
        steps: At most so many.
        parameters: Which may move, as whole tensors; see :mod:`laplace_plus.network.selection`.
        tolerance: For the root mean square of c; by default 2e-5 in float32 and 4e-11 in float64, ``ε^⅔``.
        progress: Whether to show a progress bar.

    Warns:
        ConvergenceWarning: The tolerance is not met: no step makes c smaller, or the steps are used up.

    Raises:
        LaplacePlusError: As :class:`NullSpaceOptimizer` and its steps.
    """
    checks.count("steps", steps, 1)
    twin = copy.deepcopy(model)
    named, selected = dict(twin.named_parameters()), select(twin, parameters)
    if any(item.mask is not None or item.name not in named for item in selected):
        what, expected = "Parts of parameters, or single uses of tied ones, cannot move alone.", "whole tensors"
        raise UnsupportedError(what, expected=expected, fix="Freeze entries by a constraint on them.")
    moving = [named[item.name] for item in selected]
    for parameter in named.values():
        parameter.grad = None
        parameter.requires_grad_(any(parameter is one for one in moving))
    points = points() if callable(points) else points
    points = constraint.draw(points) if hasattr(constraint, "draw") else points
    inside = torch.optim.SGD(moving, lr=1.0)
    optimizer = NullSpaceOptimizer(inside, constraint, twin, points, rate=1.0, max_iterations=10_000)
    if isinstance(constraint, Sparse) and constraint.held < constraint.sparsity:
        constraint.choose(optimizer.trained(), constraint.sparsity)
    if tolerance is None:
        tolerance = 0.0 if isinstance(constraint, Sparse) else max(torch.finfo(p.dtype).eps for p in moving) ** (2 / 3)
    before = violation = rms(optimizer.values())
    taken = 0
    for _ in progress_bar(range(steps), enabled=progress, description="project"):
        if violation <= tolerance:
            break
        old = [p.detach().clone() for p in moving]
        optimizer.zero_grad()
        optimizer.step()
        with torch.no_grad():
            for left in reversed(range(10)):
                if (now := rms(optimizer.values())) < violation:
                    break
                for parameter, origin in zip(moving, old, strict=True):
                    parameter.lerp_(origin, 0.5 if left else 1.0)
        if not now < violation:
            break
        violation, taken = now, taken + 1
    if violation > tolerance:
        what = f"The constraint is {violation:.2g} after {taken} steps, not within {tolerance:.2g}."
        warn(f"{what} It may not be possible to meet it.", ConvergenceWarning)
    return Projection(twin.state_dict(), violation, before, taken, converged=violation <= tolerance)
