"""The memory budget of intermediate results: one for everything that is computed in chunks.

Public methods set the budget with :func:`memory_budget`. Code that computes gradients, patches or cotangents reads it
with :func:`budget` and cuts its work accordingly. What a method returns or keeps (factors, outputs), the network and
its data come on top.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import psutil
import torch

from laplace_plus.errors import ConfigurationError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SHARE = 4
"""Intermediate results may take one part in four of the free memory: factors, outputs and the data need room, too."""
CHUNK_BYTES = 256 * 2**20
"""Bytes of written-out gradients that are alive at a time. On a GPU larger products are not faster."""

CACHE_BYTES = 2**20
"""The same on a CPU: the size of one core's own cache (EPYC, Zen 4)."""

_ARRAYS = 4
"""Arrays of one size that a computation holds at a time; each may take this fraction of the memory budget."""

_looked_up = [0.0, 0.0]  # when a CPU's free memory was, and the share of it; for so small a time it may be out of date

_ceiling: ContextVar[int | None] = ContextVar("memory_budget", default=None)
_given: ContextVar[bool] = ContextVar("memory_budget_given", default=False)  # rather than a part of what is free


def parse_bytes(value: int | str) -> int:
    """A number of bytes from one, or from a text in units of 1024; ConfigurationError for anything else.

    Example:
        >>> parse_bytes("1.5 GiB") == 3 * 2**29
        True
    """
    text = str(value).upper() if isinstance(value, (int, str)) else ""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?)I?B?\s*", text)
    number = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        expected = 'a positive number of bytes, or a text such as "500 MiB" or "2 GiB"'
        raise ConfigurationError("The memory budget is no positive number.", expected=expected, got=repr(value))
    return number


def in_words(n_bytes: int) -> str:
    """A number of bytes as text, in a suitable unit.

    Example:
        >>> in_words(3 * 2**29)
        '1.5 GiB'
    """
    size = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"


@contextmanager
def memory_budget(n_bytes: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Set the budget for what runs inside; None keeps the one in force."""
    token = _ceiling.set(budget(device) if n_bytes is None else n_bytes)
    given = _given.set(n_bytes is not None or _given.get())
    try:
        yield
    finally:
        _given.reset(given)
        _ceiling.reset(token)


def budget(device: torch.device | None = None) -> int:
    """The budget in bytes: the one in force, or a quarter of the memory that is free on the device (default: CPU).

    Processes of one launch share a CPU's memory.
    """
    in_force = _ceiling.get()
    if in_force is not None:
        return in_force
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // _SHARE
    if time.monotonic() > _looked_up[0] + 0.05:
        parts = _SHARE * max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        _looked_up[:] = time.monotonic(), psutil.virtual_memory().available // parts
    return int(_looked_up[1])


def is_given() -> bool:
    """Whether the budget in force was given, rather than being a part of what is free."""
    return _given.get()


def chunk_bytes(device: torch.device, *, of_caches: int = 1) -> int:
    """Bytes that one array may take within the memory budget; on a CPU at most ``of_caches`` :data:`CACHE_BYTES`."""
    quick = min(CHUNK_BYTES, of_caches * CACHE_BYTES) if device.type == "cpu" else CHUNK_BYTES
    return max(1, min(quick, budget(device) // _ARRAYS))


def slices(length: int, bytes_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes, and of at least one element."""
    step = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def require_free(n_bytes: int, what: str, device: torch.device, fix: str) -> None:
    """Raise :class:`ConfigurationError` unless a result, which no memory budget counts, fits into free memory."""
    if n_bytes < CHUNK_BYTES:
        return
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = int(psutil.virtual_memory().available)
    if n_bytes > free:
        expected, got = f"at most {in_words(free)}, which are free", in_words(n_bytes)
        raise ConfigurationError(f"{what} would not fit into memory.", expected=expected, got=got, fix=fix)


def require_room(n_bytes: int, what: str, device: torch.device, *, if_given: bool = False) -> None:
    """Raise :class:`ConfigurationError` unless the budget (``if_given``: only a given one) holds what cannot be cut."""
    available = budget(device)
    if n_bytes > available and (_given.get() or not if_given):
        expected, got = f"memory_budget of at least {in_words(n_bytes + n_bytes // 1000)}", in_words(available)
        fix = "Raise memory_budget, or select fewer outputs or parameters."  # what is expected is rounded up
        raise ConfigurationError(f"The memory budget does not hold {what}.", expected=expected, got=got, fix=fix)
