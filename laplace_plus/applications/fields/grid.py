"""A regular grid over a box, and the weights by which its vertices enter at a point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.network.batches import describe


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
        try:
            corners = torch.as_tensor(box, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            corners = torch.empty(0)
        fits = corners.ndim == 2 and len(corners) == 2 and 1 <= corners.shape[1] <= 3  # noqa: PLR2004
        if not fits or not math.isfinite(corners.sum()) or not bool((corners[0] < corners[1]).all()):
            expected = "its lower and upper corner, [2, d], d = 1, 2 or 3, lower < upper"
            raise ConfigurationError("This is no box.", expected=expected, got=repr(box))
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
