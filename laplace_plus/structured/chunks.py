"""How many matrices are written out at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from laplace_plus import _memory
from laplace_plus.errors import ConfigurationError

CHUNK_BYTES = 256 * 2**20
"""How many bytes of written-out matrices are alive at a time, at the most."""

CACHE_BYTES = 2**20
"""The same on a CPU: what a core's own cache holds, and the allocator hands out again without new pages."""

_PARTS = 4
"""One part in so many of the memory budget goes to one array of a computation, which needs a few of them."""


def chunk_bytes(device: torch.device, *, of_caches: int = 1) -> int:
    """How many bytes one array of an intermediate result may take: what is quick, and never more than the budget.

    Args:
        device: Where the array lives.
        of_caches: On a CPU, how many times :data:`CACHE_BYTES` are quick.
    """
    quick = min(CHUNK_BYTES, of_caches * CACHE_BYTES) if device.type == "cpu" else CHUNK_BYTES
    return max(1, min(quick, _memory.budget(device) // _PARTS))


def slices(length: int, bytes_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes (one element at the least)."""
    step = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def require_room(n_bytes: int, what: str, device: torch.device) -> None:
    """Raise unless the budget holds what cannot be cut any further.

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
