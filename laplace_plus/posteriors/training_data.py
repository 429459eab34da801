"""The data that a posterior was fitted to, for what has to pass over them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from laplace_plus.errors import DataError


class TrainingData:
    """The loaders of a fit and of the updates after it, one after the other; only references are kept.

    Attributes:
        loaders: Those that can be started again.
        complete: Whether all of them can be.
    """

    def __init__(self, loaders: tuple[Iterable[Any], ...] = (), *, complete: bool = True):
        self.loaders, self.complete = loaders, complete

    def plus(self, data: Iterable[Any]) -> TrainingData:
        """These and more."""
        if isinstance(data, Iterator):
            return TrainingData(self.loaders, complete=False)
        return TrainingData((*self.loaders, data), complete=self.complete)

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader

    def again(self, data: Iterable[Any] | None, why: str) -> Iterable[Any]:
        """What to pass over: ``data`` where they are given, else what was fitted to.

        Args:
            data: The caller's.
            why: A sentence that says what needs them.

        Raises:
            DataError: Data that can be run over only once, or none where the posterior does not know its own any more:
                it was loaded from a file, or fitted to an iterator.
        """
        if data is not None:
            require_restartable(data, why)
            return data
        if not self.complete or not self.loaders:
            raise DataError(
                why,
                expected="the training data again",
                got="a posterior that was loaded, or fitted to something that can be used only once",
                fix="Pass data=train_loader.",
            )
        return self.loaders[0] if len(self.loaders) == 1 else self


def require_restartable(data: Iterable[Any], why: str) -> None:
    """Raise :class:`DataError` for an iterator, which can be passed over only once."""
    if iter(data) is data:
        raise DataError(
            why,
            expected="an iterable that can be started again, such as a DataLoader",
            got=f"a {type(data).__name__} that can only be used once",
            fix="Pass a DataLoader or a list.",
        )
