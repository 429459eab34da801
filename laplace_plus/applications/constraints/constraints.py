"""Constraints on the functions that networks are; each is a function ``c(model, points)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.constraints.correcting import Constraint, FunctionalModel
from laplace_plus.linalg import Estimate, draw_probes

Function = Callable[[Tensor], Tensor]


def periodic(shift: float | Tensor) -> Constraint:
    """``f(x + T) − f(x)`` at points ``[B, ...]``, for a period T: a number, or a tensor that can be added to points."""
    return equivariant(lambda points: points + (shift.to(points) if isinstance(shift, Tensor) else shift))


def equivariant(g_in: Function, g_out: Function | None = None) -> Constraint:
    """``f(g x) − g f(x)`` at points x ``[B, ...]``; of a group, its generators are enough.

    ``g_in`` maps points, ``g_out`` outputs; without it f is to be invariant. If g acts by orthogonal matrices, a linear
    f is projected to its mean over the group.
    """

    def constraint(model: FunctionalModel, points: Tensor) -> Tensor:
        moved, here = model(torch.cat([g_in(points), points])).chunk(2)
        return moved - checks.shape("The turned output", here if g_out is None else g_out(here), moved.shape)

    return constraint


def value(x: Any, y: Tensor) -> Constraint:
    """``f(x) − y``: boundary conditions, or data that shall be met exactly.

    ``x`` are inputs as the network takes them, ``y`` has the shape of its outputs; ConfigurationError for another.
    """

    def constraint(model: FunctionalModel, points: Any) -> Tensor:
        found = model(x)
        return found - checks.shape("y", y, found.shape).to(found)

    return constraint


class conservative:
    """``J v − Jᵀ v`` ``[n, B, d]`` at points x ``[B, d]``, with ``J = ∂s/∂x`` of a vector field s and random signs v.

    Where J is symmetric, s is the gradient of a function: its integrals along paths depend on the ends alone. Each step
    has new directions, ``n_probes`` for each point. ConfigurationError for points and fields of other shapes.
    """

    def __init__(self, n_probes: int = 1, generator: torch.Generator | None = None):
        checks.count("n_probes", n_probes, 1)
        self._n, self._generator = n_probes, generator

    def draw(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Points, and new directions ``[n, B, d]``."""
        checks.shape("points", points, [None, None])
        signs = draw_probes("signs", self._n * len(points), points.shape[1], generator=self._generator)
        return points, signs.view(self._n, *points.shape).to(points)

    def __call__(self, model: Function, points: Any) -> Tensor:
        """``J v − Jᵀ v``."""
        forward, backward = self.products(model, points)
        return forward - backward

    def products(self, model: Function, points: Any) -> tuple[Tensor, Tensor]:
        """``J v`` and ``Jᵀ v``."""
        x, probes = points if isinstance(points, tuple) else self.draw(points)
        with torch.enable_grad():
            x = x.detach().repeat(len(probes), 1).requires_grad_()
            outputs, v = model(x), probes.flatten(0, 1)
            checks.shape("The vector field", outputs, x.shape)
            w = v.to(outputs, copy=True).requires_grad_()
            (backward,) = torch.autograd.grad(outputs, x, w, create_graph=True)
            (forward,) = torch.autograd.grad(backward, w, v, create_graph=True)
        return forward.view_as(probes), backward.to(forward).view_as(probes)


def asymmetry(
    model: Function, points: Tensor, *, n_probes: int = 10, generator: torch.Generator | None = None
) -> Estimate:
    """``‖J − Jᵀ‖ / ‖J‖`` in the Frobenius norm, over points ``[B, d]``: 0 for gradients of functions, 2 at most.

    The root of a ratio of two of Hutchinson's estimates, with its standard error at these points, to first order; with
    one probe for each it has the points' differences in it, and is too large. Arguments and errors are those of
    :class:`conservative`; the points should not have served in training.
    """
    forward, backward = (one.detach() for one in conservative(n_probes, generator).products(model, points))
    above, below = (one.square().sum(-1) for one in (forward - backward, forward))  # [n, B]
    ratio = (above.mean() / below.mean()).sqrt()
    rest = above - ratio.square() * below
    variance = rest.var(0).mean() if n_probes > 1 else rest.square().mean()
    spread = (variance / above.numel()).sqrt() / below.mean()
    sem = torch.where(ratio > 0, spread / (2 * ratio), 0.0)
    return Estimate(ratio, sem, matvecs=2 * above.numel(), converged=True, probes=above.numel())
