"""Constraints ``c(model, points)``: on the functions that networks are, and on their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.linalg import Estimate, Status, draw_probes
from laplace_plus.network.network import Network


class FunctionalModel(NamedTuple):
    """The network in evaluation mode, as a function of inputs and of ``parameters``: the trained ones, by name."""

    network: Network
    parameters: Mapping[str, Tensor]

    def __call__(self, inputs: Any) -> Tensor:
        """The network's output tensor; ``inputs`` are a tensor, or a tuple or mapping as ``forward`` takes them."""
        aliases = {name: own.view_as(own) for name, own in self.parameters.items()}  # which stand for the model's own
        return self.network(self.network.receive(inputs), aliases)


Constraint = Callable[[FunctionalModel, Any], Tensor]
"""``c(model, points)``: a tensor of any shape that shall be zero, differentiable in the weights."""


class Correction(NamedTuple):
    """The root mean square of c before a step; ``‖J u' − γ c‖``, which LSMR left; its iterations, and how it ended."""

    violation: float
    residual: float
    iterations: int
    status: Status


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


class Sparse:
    """The constraint ``θ[m] = 0``, where m are given entries, or the smallest weights on a schedule.

    The corrected gradient is γ θ on m and u off it. After t of T steps, the share ``s (1 − (1 − t/T)³)`` of weights is
    held, chosen anew every so many steps. With SGD they fall as ``(1 − lr γ)^t``; with Adam, γ of about 10 is needed.
    :func:`~laplace_plus.applications.constraints.project` makes them zero. An object belongs to one network.

    Args:
        sparsity: s, in (0, 1], of the parameters with two and more axes; or bool tensors by parameter name, True where
            weights shall be zero.
        steps: T, counted from the end of the warm-up; 0 holds all at once.
        every: Steps between choices; the last is at T.

    Attributes:
        masks: Bool tensors by parameter name, True where weights are held; ``held`` is the share they were chosen for.

    Sources: Roy, Hauberg and Krämer (2025), arXiv 2510.19634; Zhu and Gupta (2017), "To prune, or not to prune".
    """

    def __init__(self, sparsity: float | Mapping[str, Tensor], *, steps: int = 0, every: int = 100):
        checks.count("steps", steps, 0)
        checks.count("every", every, 1)
        self.masks = dict(sparsity) if isinstance(sparsity, Mapping) else {}
        sizes = [(int(mask.sum()), mask.numel()) for mask in self.masks.values()] or [(0, 1)]
        share = sum(a for a, _ in sizes) / sum(b for _, b in sizes) if isinstance(sparsity, Mapping) else sparsity
        checks.number("sparsity", share, above=0.0, most=1.0)
        self.sparsity, self.steps, self.every = share, steps, every
        self.held = share if self.masks else 0.0

    def share(self, number: int) -> float:
        """The share of weights that is held in a step."""
        left = 1 - number / self.steps if number < self.steps else 0.0
        return self.sparsity * (1 - left**3)

    def __call__(self, model: FunctionalModel, points: Any = None) -> Tensor:
        """The held weights, ``[m]``; ``points`` are not used."""
        return torch.cat([values[mask] for values, mask in self._pairs(model.parameters).values()])

    def correct(self, parameters: Mapping[str, Tensor], number: int, rate: float) -> Correction:
        """The gradients that LSMR would give, in place; chooses first, where the schedule says so."""
        if self.held < self.share(number) and (number % self.every == 0 or number >= self.steps):
            self.choose(parameters, self.share(number))
        lengths: list[Tensor] = []
        with torch.no_grad():
            for parameter, mask in self._pairs(parameters).values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                on = mask.to(parameter.dtype)
                held = on * parameter
                parameter.grad.addcmul_(on, parameter.grad, value=-1).add_(held, alpha=rate)
                lengths.append(torch.linalg.vector_norm(held, dtype=torch.promote_types(held.dtype, torch.float32)))
        size = self.held * sum(mask.numel() for mask in self.masks.values())
        violation = float(torch.stack(lengths).norm()) / size**0.5 if lengths else 0.0
        return Correction(violation, 0.0, 0, Status.CONVERGED)

    def choose(self, parameters: Mapping[str, Tensor], share: float) -> None:
        """Hold a share of the entries of parameters with two and more axes, the smallest; of equal ones the first."""
        values = {name: p.detach() for name, p in parameters.items() if p.ndim > 1}
        scores = torch.cat([own.abs().flatten().float() for own in values.values()])
        if count := round(share * len(scores)):
            limit = torch.kthvalue(scores, count).values
            held = scores < limit
            held[(scores == limit).nonzero()[: count - int(held.sum()), 0]] = True
            parts = held.split([p.numel() for p in values.values()])
            self.masks = {name: part.view_as(p) for (name, p), part in zip(values.items(), parts, strict=True)}
            self.held = share

    def _pairs(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        for name, mask in self.masks.items():
            own = checks.shape(f"The trained parameter {name!r}", parameters.get(name), mask.shape)
            self.masks[name] = mask.to(own.device)
        return {name: (parameters[name], mask) for name, mask in self.masks.items()}
