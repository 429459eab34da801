"""How much of an intermediate result is computed at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from laplace_plus import _memory
from laplace_plus.errors import ConfigurationError

CHUNK_BYTES = 256 * 2**20
"""Bytes of written-out gradients that are alive at a time. On a GPU larger products are not faster."""

CACHE_BYTES = 2**20
"""The same on a CPU: the size of one core's own cache (EPYC, Zen 4)."""

_ARRAYS = 4
"""Arrays of one size that a computation holds at a time; each may take this fraction of the memory budget."""


def chunk_bytes(device: torch.device, *, of_caches: int = 1) -> int:
    """Bytes that one array of an intermediate result may take, within the memory budget.

    Args:
        device: Where the array lives.
        of_caches: On a CPU, the limit in units of :data:`CACHE_BYTES`.
    """
    quick = min(CHUNK_BYTES, of_caches * CACHE_BYTES) if device.type == "cpu" else CHUNK_BYTES
    return max(1, min(quick, _memory.budget(device) // _ARRAYS))


def slices(length: int, bytes_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes, and of at least one element."""
    step = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def require_room(n_bytes: int, what: str, device: torch.device) -> None:
    """Check that the memory budget holds an array that cannot be cut any further.

    Raises:
        ConfigurationError: It does not.
    """
    available = _memory.budget(device)
    if n_bytes > available:
        raise ConfigurationError(
            f"The memory budget does not hold {what}.",
            expected=f"memory_budget of at least {_memory.in_words(n_bytes)}",
            got=_memory.in_words(available),
            fix="Raise memory_budget, or ask for fewer outputs.",
        )
