"""Numbers that change with the entries of many tensors, from one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_ROWS = 251
"""Entries that share one weighted sum; a prime, so that it fits no layer's shape."""

_SMALL = 2**16
"""Tensors with no more entries than this are looked at together."""


def checksums(tensors: Sequence[Tensor]) -> list[float]:
    """Weighted sums of all entries, which tell permutations apart; for each large tensor its own.

    Of sparse tensors these are the stored entries and their places. They depend on the number of threads and on the
    device, by rounding.
    """
    sums: list[float] = []
    small: dict[torch.device, list[Tensor]] = {}
    for values in (part for tensor in tensors for part in _parts(tensor.detach())):
        if values.numel() > _SMALL:
            sums.append(_checksum(values.flatten()))
        else:
            small.setdefault(values.device, []).append(values.flatten().double())
    return sums + [_checksum(torch.cat(several)) for several in small.values()]


def _parts(tensor: Tensor) -> list[Tensor]:
    """A dense tensor itself; of a sparse one, which made dense might not fit, what is stored."""
    if tensor.layout == torch.strided:
        return [tensor]
    stored = tensor.to_sparse_coo().coalesce()
    return [stored.indices().double(), stored.values()]  # of integers, only the plain sum is taken


def _checksum(flat: Tensor) -> float:
    if not flat.is_floating_point():
        return float(flat.double().sum())
    ramp, columns = _ramp(0.5, _ROWS, flat.dtype, flat.device), len(flat) // _ROWS
    whole = columns * _ROWS
    sums = ramp @ flat[:whole].view(_ROWS, columns)
    total = sums.double() @ _ramp(1.0, columns, torch.float64, flat.device)
    return float(total + (flat[whole:] * ramp[: len(flat) - whole]).double().sum())


@lru_cache(maxsize=64)
def _ramp(start: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights from ``start`` to one more than that."""
    with torch.inference_mode(False):
        return torch.linspace(start, start + 1, length, dtype=dtype, device=device)
