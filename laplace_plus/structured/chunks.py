"""The one loop that bounds memory: examples are written out a constant number of bytes at a time.

A convolution's patches, and gradients in place of their two sides, take many times the memory of what they are made of.
Chunks on a CPU are as large as a few of one core's own caches (EPYC, Zen 4); on a GPU larger products are not faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

MIB = 2**20
ON_A_GPU = 256 * MIB


def limit(device: torch.device, mebibytes: int) -> int:
    """Bytes of a chunk: so many MiB on a CPU, :data:`ON_A_GPU` elsewhere."""
    return mebibytes * MIB if device.type == "cpu" else ON_A_GPU


def slices(length: int, bytes_each: int, limit: int) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes, and of at least one element."""
    step = max(1, limit // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
