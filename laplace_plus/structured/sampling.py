"""Draws from factorised Gaussians, written straight to their places.

White noise is drawn in *tiles* of a fixed size and in a fixed order, so that seeded draws do not depend on how many of
them are worked on at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace_plus import _memory
from laplace_plus.structured.factor import Factor
from laplace_plus.structured.parameter_slices import ParameterSlices

TILE = 2**20
"""Numbers that are drawn at a time, or one draw's where it has more."""

_AT_ONCE = 256
"""Draws after which reading a matrix that is larger than a draw costs nothing beside the arithmetic."""


def add_draws_(
    result: Tensor, factor: Factor, placement: ParameterSlices, generator: torch.Generator | None = None
) -> None:
    """Add draws from N(0, M⁻¹) to vectors.

    Args:
        result: ``[n, P]``, to which n draws are added.
        factor: M.
        placement: Where the entries of M lie among the P.
        generator: Source of randomness; may live on another device.
    """
    factor.add_draws_(_noise(result, factor, torch.Size(placement.shape), generator), placement)


def _noise(
    result: Tensor, factor: Factor, shape: torch.Size, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Standard normal ``[m, G, o, i]``, in memory that is used again, beside the rows ``[m, P]`` that it is for."""
    n, size = len(result), shape.numel()
    tile = min(n, max(1, TILE // max(1, size)))
    at_once = tile
    if factor.reads_matrices:
        # The noise, the draws and what comes between them, in float64 perhaps.
        affordable = _memory.budget(result.device) // max(1, 4 * 8 * size)
        at_once = min(n, max(1, min(_AT_ONCE, affordable) // tile) * tile)
    noise = torch.empty(at_once, *shape, dtype=result.dtype, device=result.device)
    elsewhere = generator is not None and generator.device != result.device
    for start in range(0, n, at_once):
        part = noise[: min(at_once, n - start)]
        for piece in part.split(tile):
            if elsewhere and generator is not None:
                piece.copy_(torch.randn(piece.shape, dtype=piece.dtype, device=generator.device, generator=generator))
            else:
                piece.normal_(generator=generator)
        yield part, result[start : start + len(part)]
