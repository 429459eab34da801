"""A field whose inputs are displaced, and the derivatives of what is rendered from it by the displacement."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_plus.applications.fields.grid import Grid
from laplace_plus.errors import DataError, OutputError
from laplace_plus.network.batches import describe
from laplace_plus.network.network import Network

Render = Callable[[Any, Callable[[Tensor], Tensor]], Any]
"""``render(rays, displace) -> [R, C]``, which calls ``displace`` on its sample points ``[R, ..., d]``."""


_HOOK: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("hook", default=None)
"""What displaces the points in place of θ, for derivatives by each of them."""


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

    Raises:
        OutputError: Outputs that are no row for each ray.
        DataError: Sample points without a row for each ray, or none at all.
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
        if outputs.ndim != 2:  # noqa: PLR2004
            raise OutputError("Each ray has one row of outputs.", expected="[R, C]", got=str(list(outputs.shape)))
        n_rays, n_outputs = outputs.shape
        if not points or any(x.ndim < 2 or len(x) != n_rays for x, _ in points):  # noqa: PLR2004
            what, got = "The renderer displaces no points of these rays.", ", ".join(describe(x) for x, _ in points)
            fix = "Call displace(x) on the sample points, and the model on what it returns."
            raise DataError(what, expected=f"points [{n_rays}, ..., {field.grid.d}]", got=got or "none", fix=fix)
        identity = torch.eye(n_outputs, dtype=outputs.dtype, device=outputs.device).expand(n_rays, -1, -1)
        cotangents = identity if combine is None else combine(outputs.detach()).to(outputs.dtype)
        offsets, slopes = [offset for _, offset in points], []
        for column in cotangents.unbind(-1) if outputs.requires_grad else ():
            found = torch.autograd.grad(
                outputs, offsets, column, retain_graph=True, create_graph=differentiable, allow_unused=True
            )
            slopes.append([torch.zeros_like(o) if g is None else g for g, o in zip(found, offsets, strict=True)])
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
