"""Checksums of many tensors from one pass over them, to notice changed weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_ROWS = 251
"""Entries that share one weighted sum; a prime, so that it divides no common layer size."""

_SMALL = 2**16
"""Tensors with at most this many entries are summed together: one call for all biases costs less than one for each."""


def checksums(tensors: Sequence[Tensor]) -> list[float]:
    """Weighted sums of all entries, which tell permutations apart: one for each large tensor, one for all small ones.

    A NaN or infinity makes its sum non-finite. Sparse tensors count with their stored entries and indices. The sums
    depend on the number of threads and on the device, by rounding.
    """
    large: list[Tensor] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        tensor = tensor.detach()
        for values in [tensor] if tensor.layout == torch.strided else _stored(tensor):
            if values.numel() > _SMALL:
                large.append(values.flatten())
            else:
                small.setdefault(values.device, []).append(values.flatten().double())
    for several in small.values():
        large.append(torch.cat(several))
    sums = []
    for flat in large:
        if not flat.is_floating_point():
            sums.append(float(flat.double().sum()))
            continue
        columns = len(flat) // _ROWS
        whole = columns * _ROWS
        ramp = _ramp(0.5, _ROWS, flat.dtype, flat.device)
        total = (ramp @ flat[:whole].view(_ROWS, columns)).double() @ _ramp(1.0, columns, torch.float64, flat.device)
        sums.append(float(total + (flat[whole:] * ramp[: len(flat) - whole]).double().sum()))
    return sums


def _stored(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor, which might not fit in memory as a dense one."""
    coalesced = tensor.to_sparse_coo().coalesce()
    return [coalesced.indices().double(), coalesced.values()]


@lru_cache(maxsize=64)
def _ramp(start: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights that rise linearly from ``start`` to ``start + 1``."""
    with torch.inference_mode(False):
        return torch.linspace(start, start + 1, length, dtype=dtype, device=device)
