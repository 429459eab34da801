"""Selectors of a subnetwork: which entries of a network's parameters get a posterior.

Compare a diagonal Gaussian posterior over all weights with one that keeps some of them and fixes the rest at their
means. Their squared 2-Wasserstein distance is the sum of the marginal variances that are left out. It is least for the
entries of largest variance (Daxberger et al., 2021, *Bayesian deep learning via subnetwork inference*).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.selection import Selection, refine, select
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.registry import get_posterior
from laplace_plus.posteriors.swag import DiagonalSWAG


@dataclass(frozen=True)
class Task:
    """What a selector may look at.

    Attributes:
        candidates: A posterior over all candidate entries, not fitted: network, likelihood and hyperparameters.
        data: The loader, which can be started again.
        progress: Whether to show progress bars.
        generator: Source of randomness.
        reduce: The sum over ranks, if several share the data.
    """

    candidates: Posterior
    data: Iterable[Any]
    progress: bool = False
    generator: torch.Generator | None = None
    reduce: Any = None


@dataclass(frozen=True)
class Choice:
    """What a selector chose.

    Attributes:
        mask: ``[P]`` bool over the candidates' parameter vector.
        variances: The marginal variances ``[P]`` that it looked at, if any.
    """

    mask: Tensor
    variances: Tensor | None = None


class Selector(ABC):
    """Chooses a subnetwork; a subclass gives :meth:`choose`."""

    needs_data: ClassVar[bool] = False
    """Whether it passes over the data."""

    @abstractmethod
    def choose(self, task: Task) -> Choice:
        """The mask of the chosen entries; ConfigurationError where there are not so many, SelectionError for none."""


@dataclass(frozen=True)
class _Sized(Selector):
    """One that chooses so many entries (int), or this fraction of them (float)."""

    size: int | float

    def __post_init__(self) -> None:
        if isinstance(self.size, float):
            checks.number("size", self.size, above=0.0, most=1.0)
        else:
            checks.count("size", self.size)

    def count(self, total: int) -> int:
        """The number of entries to choose from ``total``."""
        checks.number("The size of the subnetwork, among its candidates,", self.size, most=total)
        return max(1, round(self.size * total)) if isinstance(self.size, float) else self.size

    def largest(self, scores: Tensor) -> Tensor:
        """The mask of the entries with the largest scores; the first ones where scores are equal."""
        count = self.count(len(scores))
        checks.finite("What entries are ordered by", scores)
        least = scores.topk(count).values[-1]
        mask = scores > least
        return mask.index_fill_(0, (scores == least).nonzero()[: count - int(mask.sum()), 0], True)


@stored
@dataclass(frozen=True)
class LargestVariance(_Sized):
    """The entries of largest marginal variance.

    Of all choices of that size these leave the smallest Wasserstein distance to the posterior over all candidates, both
    taken as diagonal. An entry that no prediction depends on has, in a Laplace approximation, the prior's variance, the
    largest there is, and is chosen first; with many of these, predictions from the subnetwork are overconfident. SGD
    does not move such entries, and its variances leave them out.

    Args:
        size: Number of entries (int), or the fraction of all candidates (float, at most 1).
        variances: ``"laplace"``: of a diagonal Laplace approximation at the posterior's own prior precision, which
            takes one more pass over the data; or a :class:`DiagonalSWAG`, which trains a copy of the network a little
            further and takes the variances of its weights on the way.
    """

    variances: str | DiagonalSWAG = "laplace"
    needs_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.variances, Mapping):  # as a configuration has it
            object.__setattr__(self, "variances", DiagonalSWAG(**self.variances))
        elif not isinstance(self.variances, DiagonalSWAG):
            checks.choice("source of variances", self.variances, ("laplace",))

    @override
    def choose(self, task: Task) -> Choice:
        candidates = task.candidates
        self.count(candidates.n_parameters)  # before the work
        if isinstance(self.variances, DiagonalSWAG):
            path = self.variances.follow(
                candidates.network, candidates.likelihood, task.data, progress=task.progress, generator=task.generator
            )
            variances = path.variance.to(candidates.network.dtype)
        else:
            diagonal = get_posterior("Diagonal")(
                candidates.network.model,
                candidates.likelihood,
                parameters=refine(candidates.network.selected),
                prior_precision=candidates.prior_precision,
                temperature=candidates.temperature,
                backend=candidates.backend,
            )
            options = {"reduce": task.reduce, "progress": task.progress, "generator": task.generator}
            diagonal.set_state(diagonal.fit_batches(task.data, **options))
            variances = diagonal.variance()
        return Choice(self.largest(variances), variances)


@stored
@dataclass(frozen=True)
class LargestMagnitude(_Sized):
    """The entries of largest absolute value; ``size`` as for :class:`LargestVariance`."""

    @override
    def choose(self, task: Task) -> Choice:
        return Choice(self.largest(task.candidates.network.vector().abs()))


@stored
@dataclass(frozen=True)
class Random(_Sized):
    """Entries at random, without replacement; ``size`` as for :class:`LargestVariance`.

    Args:
        size: Number or fraction of entries.
        seed: Where the draw starts; by default the ``generator`` of ``fit``, or torch's own.
    """

    seed: int | None = None

    @override
    def choose(self, task: Task) -> Choice:
        total = task.candidates.n_parameters
        seed = draw_seed(task.generator) if self.seed is None else self.seed
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        chosen = order[: self.count(total)]
        return Choice(torch.zeros(total, dtype=torch.bool).index_fill_(0, chosen, True))


@stored
@dataclass(frozen=True)
class Chosen(Selector):
    """Entries that the caller names, as for ``parameters=``; those that are not among the candidates are left out."""

    selection: Selection = "all"

    @override
    def choose(self, task: Task) -> Choice:
        network = task.candidates.network
        chosen, parts = refine(select(network.model, self.selection)), []
        for item in network.selected:
            own = chosen.get(item.name, torch.zeros(item.shape, dtype=torch.bool)).flatten()
            parts.append(own if item.mask is None else own[item.mask.cpu()])
        return Choice(torch.cat(parts))


SELECTORS: Mapping[str, type[Selector]] = {
    cls.__name__: cls for cls in (LargestVariance, LargestMagnitude, Random, Chosen)
}
