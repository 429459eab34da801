"""The progress bar of all loops of the package."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from torch.utils.data import IterableDataset
from tqdm import tqdm

Item = TypeVar("Item")


def progress_bar(
    iterable: Iterable[Item], *, enabled: bool, description: str, total: int | None = None
) -> Iterable[Item]:
    """Show the progress of a loop on standard error; if not ``enabled``, this is the iterable itself.

    ``total`` is the number of items, by default from ``len``, where that is reliable.

    Example:
        >>> list(progress_bar([1, 2, 3], enabled=False, description="fit"))
        [1, 2, 3]
    """
    if not enabled:
        return iterable
    return tqdm(iterable, desc=description, total=length(iterable) if total is None else total)


def length(iterable: object) -> float:
    """The length, or infinity where it is unknown."""
    # With None, tqdm would call len() itself. The length of an iterable dataset is not reliable, and its DataLoader
    # warns if len() was called and wrong.
    if isinstance(iterable, IterableDataset) or isinstance(getattr(iterable, "dataset", None), IterableDataset):
        return math.inf
    with suppress(TypeError, NotImplementedError):
        return len(iterable)  # type: ignore[arg-type]
    return math.inf
