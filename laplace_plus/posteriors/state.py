"""What a fit finds, a frozen value that copies share and that is saved as it is; and the data that it was fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.errors import DataError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.doubts import Doubts
from laplace_plus.network.batches import iterate
from laplace_plus.network.data_sums import DataSums, same_sum
from laplace_plus.persistence import stored
from laplace_plus.posteriors.public import require_influence


@stored
@dataclass(frozen=True)
class State:
    """What every method's fit finds; a method with more derives a stored, frozen dataclass of its own.

    Attributes:
        mean: The posterior mean in ``parameter_names`` order, ``[P]``.
        n_data: The number of examples.
        n_outputs: C, or 0 where the method does not say.

    Example:
        >>> import torch
        >>> @stored
        ... @dataclass(frozen=True)
        ... class Members(State):
        ...     members: Tensor
        >>> Members(torch.zeros(2), 10, 1, torch.ones(3, 2)).n_data
        10
    """

    mean: Tensor
    n_data: int
    n_outputs: int


def of_state(name: str, doc: str, check: Callable[[Any], Any] | None = None) -> Any:
    """A property of a fitted posterior, a field of its state or of one of its fields, by a dotted name.

    A field of the state can be set to what ``check`` returns, if given.
    """

    def get(posterior: Any) -> Any:
        posterior.require_fit()
        return attrgetter(name)(posterior.state)

    def set_(posterior: Any, value: Any) -> None:
        assert check is not None
        posterior.require_fit()
        posterior.set_state(replace(posterior.state, **{name: check(value)}))

    return property(get, None if check is None else set_, doc=doc)


@stored
@dataclass(frozen=True)
class GaussianState(State):
    """Of a Gaussian posterior, the sums over the data, from which every number follows.

    Attributes:
        curvature: H at unit noise.
        statistics: The likelihood's additive statistics, on the CPU.
        travelled: Of a posterior that was continued: in place of ``|θ̂ − μ₀|``, the length of the way from task to
            task, ``[P]``.
    """

    curvature: Curvature
    statistics: Tensor
    travelled: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", self.statistics.cpu())

    def plus(self, other: GaussianState) -> Self:
        """The sums over both data sets; neither is changed."""
        return replace(
            self,
            curvature=self.curvature.clone().add_(other.curvature),
            statistics=self.statistics + other.statistics,
            n_data=self.n_data + other.n_data,
            n_outputs=other.n_outputs,
        )


# -- training data -----------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class StandIns:
    """Batches whose examples count ``factor`` times, for a likelihood of weighted targets."""

    data: Iterable[Any]
    likelihood: Likelihood
    factor: float
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in iterate(self.data, device=self.device):
            target, own = self.likelihood.separate(batch.target)
            weight = torch.ones(batch.size, dtype=torch.float64, device=self.device) if own is None else own.double()
            yield batch.inputs, (target, weight * self.factor)


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


def survey(posterior: Any, data: Iterable[Any], why: str | None) -> tuple[int, int, float]:
    """Number of examples, of outputs, and a sum by which the data are known again; SelectionError without a target.

    DataError, with the sentence ``why``, for an iterator, unless that is None: the data are not passed over again.
    """
    if why is not None:
        require_restartable(data, why)
    sums, n_outputs, counts = DataSums(posterior.network.device), 0, False
    doubts = Doubts(posterior.likelihood)
    for batch in posterior.batches(data):
        outputs = posterior.network.forward(batch.inputs)
        posterior.likelihood.validate(outputs, batch.target)
        doubts.add(outputs, batch.target)
        sums.add(batch, len(outputs))
        counts = counts or bool(posterior.likelihood.rows(outputs, batch.target)[2].any())
        n_outputs = outputs.shape[-1]
    require_influence(posterior, counts)
    doubts.settle()
    return sums.count, n_outputs, sums.values()[0]
