"""The data that a posterior was fitted to, for methods that pass over them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from laplace_plus.errors import DataError
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.network.batches import DataSums, same_sum
from laplace_plus.posteriors.public import zero_curvature


@dataclass(frozen=True)
class TrainingData:
    """The loader of the ``first`` fit, None where it is not known, and whether it is ``all``: no update came after."""

    first: Iterable[Any] | None = None
    all: bool = True

    def again(self, data: Iterable[Any] | None, why: str, *, part: bool = False) -> Iterable[Any]:
        """What to pass over: ``data`` where they are given, else what was fitted to; ``why`` is a sentence for errors.

        With ``part``, some of the data will do. Raises DataError for data that can be run over only once, or where the
        posterior does not know its own: it was loaded, unpickled or updated, or fitted to an iterator.
        """
        if data is not None:
            require_restartable(data, why)
            return data
        if self.first is None or not (self.all or part):
            got = "a posterior that was loaded, copied or updated, or that saw data which can be used once"
            raise DataError(why, expected="the training data again", got=got, fix="Pass data=train_loader.")
        return self.first


def require_restartable(data: Iterable[Any], why: str) -> None:
    """Raise :class:`DataError` for an iterator, which can be passed over only once."""
    if isinstance(data, Iterator):
        expected, fix = "an iterable that can be started again, such as a DataLoader", "Pass a DataLoader or a list."
        raise DataError(why, expected=expected, got=f"a {type(data).__name__} that can only be used once", fix=fix)


def require_same_data(of: str, before: tuple[int, float | None], now: tuple[int, float]) -> None:
    """Raise :class:`DataError` if data have another size, or another sum as far as it is known, than before."""
    others = before[1] is not None and not same_sum(before[1], now[1])
    if now[0] != before[0] or others:
        what, expected = f"These are not the data of {of}.", f"its {before[0]} examples, in any order"
        raise DataError(what, expected=expected, got=f"{now[0]} others" if others else f"{now[0]} examples")


def survey(posterior: Any, data: Iterable[Any]) -> tuple[int, int, float]:
    """Number of examples, of outputs, and a sum by which the data are known again; SelectionError without a target."""
    sums, n_outputs, doubt, counts = DataSums(posterior.network.device), 0, 0.0, False
    for batch in posterior.batches(data):
        outputs = posterior.network.forward(batch.inputs)
        posterior.likelihood.validate(outputs, batch.target)
        doubt += posterior.likelihood.evidence_for_probabilities(outputs, batch.target)
        sums.add(batch, len(outputs))
        counts = counts or bool(posterior.likelihood.rows(outputs, batch.target)[2].any())
        n_outputs = outputs.shape[-1]
    if not counts:
        raise zero_curvature(posterior)
    if doubt > 0:
        doubt_logits(posterior.likelihood, doubt)
    return sums.count, n_outputs, sums.values()[0]
