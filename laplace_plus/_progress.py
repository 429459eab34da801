"""The progress bar of all loops of the package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress_bar(iterable: Iterable[Item], *, enabled: bool, description: str) -> Iterable[Item]:
    """Show the progress of a loop on standard error; if not ``enabled``, this is the iterable itself.

    Example:
        >>> list(progress_bar([1, 2, 3], enabled=False, description="fit"))
        [1, 2, 3]
    """
    return tqdm(iterable, desc=description) if enabled else iterable
