"""A field whose inputs are displaced by a grid, and the derivatives of what is rendered from it by the displacement."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.checks import describe
from laplace_plus.errors import DataError
from laplace_plus.network.network import Network

Render = Callable[[Any, Callable[[Tensor], Tensor]], Any]
"""``render(rays, displace) -> [R, C]``, which calls ``displace`` on its sample points ``[R, ..., d]``."""


_HOOK: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("hook", default=None)
"""What displaces the points in place of θ, for derivatives by each of them."""


@dataclass(frozen=True)
class Grid:
    """G = ``resolution`` cells along each axis, hence ``V = (G + 1)^d`` vertices; number V stands for the outside."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    resolution: int

    @classmethod
    def of(cls, box: Any, resolution: int) -> Grid:
        """The grid of a box ``[2, d]``, d = 1, 2 or 3: its lower and upper corner; ConfigurationError for others."""
        checks.count("resolution", resolution)
        corners = torch.as_tensor(box, dtype=torch.float64, device="cpu")
        checks.shape("The box", corners, [2, None], "Give its lower and its upper corner.")
        checks.number("The number of axes of the box", corners.shape[1], least=1, most=3)
        for edge in corners.diff(dim=0)[0].tolist():
            checks.positive("An edge of the box", edge)
        lower, upper = corners.tolist()
        return cls(tuple(lower), tuple(upper), resolution)

    @property
    def d(self) -> int:
        """The number of axes."""
        return len(self.lower)

    @property
    def n_vertices(self) -> int:
        """V."""
        return (self.resolution + 1) ** self.d

    def check(self, x: Any) -> Tensor:
        """Points ``[..., d]``; DataError for others."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1:] != (self.d,):
            expected = f"floating-point coordinates [..., {self.d}], as the box has"
            raise DataError("These are no points.", expected=expected, got=describe(x))
        return x

    def corners(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and multilinear weights, ``[..., 2^d]``, of the vertices around points ``[..., d]``.

        Outside of the box (and for NaN) all numbers are V, and one weight is 1. Differentiable in x.
        """
        lower, upper = (torch.tensor(end, dtype=x.dtype, device=x.device) for end in (self.lower, self.upper))
        scaled = (x - lower) / (upper - lower) * self.resolution
        inside = ((scaled >= 0) & (scaled <= self.resolution)).all(-1, keepdim=True)
        cell = torch.where(inside, scaled, 0.0).detach().floor().clamp(max=self.resolution - 1)
        part = torch.where(inside, scaled - cell, 0.0)  # outside the first corner's weight is then 1
        ends = torch.tensor(list(product((0, 1), repeat=self.d)), device=x.device)  # [2^d, d]
        weights = torch.where(ends.bool(), part[..., None, :], 1 - part[..., None, :]).prod(-1)
        strides = torch.tensor([(self.resolution + 1) ** n for n in reversed(range(self.d))], device=x.device)
        index = ((cell.long()[..., None, :] + ends) * strides).sum(-1)
        return torch.where(inside, index, self.n_vertices), weights

    def spread(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`corners`, with weights whose squares sum to one: independent vertices keep their variance."""
        index, weights = self.corners(x)
        return index, weights / weights.norm(dim=-1, keepdim=True)


class Displaced(nn.Module):
    """A model as a function of a displacement of its inputs, ``[V + 1, d]``: of vertices, and of all outside; zero."""

    def __init__(self, model: nn.Module, grid: Grid, render: Render | None):
        super().__init__()
        own = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
        self.model, self.grid, self.render = model, grid, render
        self.displacement = nn.Parameter(next(own, torch.zeros(())).new_zeros(grid.n_vertices + 1, grid.d))

    def forward(self, inputs_or_rays: Any, /) -> Any:
        """What is rendered; without a renderer, the model at the displaced inputs."""
        if self.render is None:
            return self.model(self.displace(inputs_or_rays))
        return self.render(inputs_or_rays, self.displace)

    def displace(self, x: Tensor) -> Tensor:
        """Points ``[..., d]``, each moved by the vectors of the vertices around it."""
        x, hook = self.grid.check(x), _HOOK.get()
        if hook is not None:
            return hook(x)
        index, weights = self.grid.spread(x)
        return x + (weights[..., None] * self.displacement[index].to(x.dtype)).sum(-2)


class Rows(NamedTuple):
    """Derivatives of outputs ``[R, C]`` by the displacement: of K combinations, at each vertex that a ray touches."""

    outputs: Tensor
    values: Tensor  # [n, K, d]
    ray: Tensor  # [n]
    vertex: Tensor  # [n]; V stands for the outside


def rows(
    network: Network,
    inputs: Any,
    combine: Callable[[Tensor], Tensor] | None = None,
    *,
    spread: bool = False,
    differentiable: bool = False,
) -> Rows:
    """The derivatives for a batch of rays, each summed over its samples, with one backward pass for each combination.

    ``combine`` maps outputs to cotangents ``[R, C, K]``; None is for the outputs themselves. Vertices' weights are
    multilinear, or those of :meth:`Grid.spread`. Unless the result is to be ``differentiable`` in the inputs, sample
    points are detached: where a renderer samples must not depend on the displacement.
    """
    points: list[tuple[Tensor, Tensor]] = []
    field: Any = network.model

    def hook(x: Tensor) -> Tensor:
        x = x if differentiable else x.detach()
        points.append((x, torch.zeros_like(x).requires_grad_()))
        return x + points[-1][1]

    with torch.enable_grad():
        token = _HOOK.set(hook)
        try:
            outputs = network(inputs)
        finally:
            _HOOK.reset(token)
        checks.shape("The rendered output", outputs, [None, None], "Return one row of outputs for each ray.")
        n_rays, n_outputs = outputs.shape
        if not points or any(x.ndim < 2 or len(x) != n_rays for x, _ in points):  # noqa: PLR2004
            what, got = "The renderer displaces no points of these rays.", ", ".join(describe(x) for x, _ in points)
            fix = "Call displace(x) on the sample points, and the model on what it returns."
            raise DataError(what, expected=f"points [{n_rays}, ..., {field.grid.d}]", got=got or "none", fix=fix)
        identity = torch.eye(n_outputs, dtype=outputs.dtype, device=outputs.device).expand(n_rays, -1, -1)
        cotangents = identity if combine is None else combine(outputs.detach()).to(outputs.dtype)
        offsets, slopes = [offset for _, offset in points], []
        for column in cotangents.unbind(-1) if outputs.requires_grad else ():
            options = {"retain_graph": True, "create_graph": differentiable, "materialize_grads": True}
            slopes.append(torch.autograd.grad(outputs, offsets, column, **options))
        weigh = field.grid.spread if spread else field.grid.corners
        each = [weigh(x.reshape(n_rays, -1, field.grid.d)) for x, _ in points]
        index, weights = (torch.cat(parts, 1) for parts in zip(*each, strict=True))  # [R, S, 2^d]
        stride = field.grid.n_vertices + 1
        number = torch.arange(n_rays, device=index.device)[:, None, None] * stride + index
        touched, place = number.unique(return_inverse=True)
        values = weights.new_zeros(len(touched), cotangents.shape[-1], field.grid.d)
        if slopes:
            columns = [torch.cat([g.reshape(n_rays, -1, field.grid.d) for g in one], 1) for one in slopes]
            gradients = torch.stack(columns, 2).flatten(0, 1).to(weights.dtype)  # [R·S, K, d]
            for corner in range(index.shape[-1]):
                part = weights[..., corner].reshape(-1, 1, 1) * gradients
                values = values.index_add(0, place[..., corner].flatten(), part)
    result = Rows(outputs, values, touched // stride, touched % stride)
    return result if differentiable else Rows(*(tensor.detach() for tensor in result))
