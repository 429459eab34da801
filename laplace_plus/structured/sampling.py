"""Draws from factorised Gaussians, added to their slices of parameter vectors.

White noise is drawn in *tiles* of a fixed size and in a fixed order. Seeded draws then do not depend on how many of
them are computed at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.structured.blocks import Factor
from laplace_plus.structured.chunks import MIB
from laplace_plus.structured.parameter_slices import ParameterSlices

TILE = 2**20
"""Numbers that are drawn at a time, or one draw's where it has more. Seeded draws depend on this value."""

_AT_ONCE = 256
"""With so many draws at a time, reading a matrix larger than a draw takes little time beside the arithmetic."""


def add_draws_(
    result: Tensor, factor: Factor, parameter_slices: ParameterSlices, generator: torch.Generator | None = None
) -> None:
    """Add draws from N(0, M⁻¹) of a factor to the vectors ``[n, P]``, where the entries of M lie among the P.

    The source of randomness may live on another device.
    """
    n, shape = len(result), torch.Size(parameter_slices.shape)
    size = max(1, shape.numel())
    tile = min(n, max(1, TILE // size))
    at_once = tile
    if factor.reads_matrices:  # in a few float64 arrays, of 256 MiB each at most
        at_once = min(n, max(1, min(_AT_ONCE, 256 * MIB // (8 * size)) // tile) * tile)
    noise = torch.empty(at_once, *shape, dtype=result.dtype, device=result.device)
    for start in range(0, n, at_once):
        drawn = noise[: min(at_once, n - start)]
        for part in drawn.split(tile):
            if generator is not None and generator.device != result.device:
                part.copy_(torch.randn(part.shape, dtype=part.dtype, device=generator.device, generator=generator))
            else:
                part.normal_(generator=generator)
        parameter_slices.add_(result[start : start + len(drawn)], factor.sample(drawn))
