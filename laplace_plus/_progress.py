"""One progress bar for every loop of the package, so that all of them look and behave alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from torch.utils.data import IterableDataset
from tqdm import tqdm

Item = TypeVar("Item")


def progress_bar(
    iterable: Iterable[Item], *, enabled: bool, description: str, total: int | None = None
) -> Iterable[Item]:
    """Shows how far a loop has come, on standard error.

    Args:
        iterable: What the loop runs over.
        enabled: Without it ``iterable`` itself is returned, untouched.
        description: The words before the bar.
        total: The number of items; found by ``len`` where that is known for certain.

    Returns:
        An iterable over the same items.

    Example:
        >>> list(progress_bar([1, 2, 3], enabled=False, description="fit"))
        [1, 2, 3]
    """
    if not enabled:
        return iterable
    return tqdm(iterable, desc=description, total=_length(iterable) if total is None else total)


def _length(iterable: object) -> float:
    # Infinity is tqdm's word for an unknown length; given None, it would ask for the length itself.
    # The length of an iterable dataset is only advice, and a DataLoader that was asked for it warns when it was wrong.
    if isinstance(iterable, IterableDataset) or isinstance(getattr(iterable, "dataset", None), IterableDataset):
        return math.inf
    try:
        return len(iterable)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf
