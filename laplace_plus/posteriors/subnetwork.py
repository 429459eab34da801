"""Subnetwork inference (Daxberger et al., 2021): a posterior over selected weights, all others fixed.

Compare a diagonal Gaussian posterior over all weights with one that keeps some of them and fixes the rest at their
means. Their squared 2-Wasserstein distance is the sum of the marginal variances that are left out. It is least for the
entries of largest variance (*Bayesian deep learning via subnetwork inference*).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.capture import capture_batch
from laplace_plus.network.selection import Selection, refine, select
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.gaussian import GaussianPosterior, Reduce
from laplace_plus.posteriors.state import GaussianState, require_restartable
from laplace_plus.posteriors.storing import get_posterior, name_of, resolve_option
from laplace_plus.posteriors.swag import DiagonalSWAG

# -- selectors ---------------------------------------------------------------------------------------------------------


Choice = tuple[Tensor, Tensor | None]


class Selector(ABC):
    """Chooses a subnetwork; a subclass gives :meth:`choose`."""

    needs_data: ClassVar[bool] = False
    """Whether it passes over the data."""

    @abstractmethod
    def choose(self, candidates: Posterior, data: Iterable[Any], **options: Any) -> Choice:
        """Which entries are chosen, ``[P]`` bool, and the marginal variances ``[P]`` that were looked at, or None.

        Args:
            candidates: A posterior over all candidate entries, not fitted: network, likelihood and hyperparameters.
            data: The loader, which can be started again if ``needs_data``.
            **options: ``progress``, ``generator`` and ``reduce``, as ``fit_batches`` has them.

        Raises:
            ConfigurationError: There are not so many entries.
        """


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
    def choose(self, candidates: Posterior, data: Iterable[Any], **options: Any) -> Choice:
        self.count(candidates.n_parameters)  # before the work
        if isinstance(self.variances, DiagonalSWAG):
            options.pop("reduce")
            path = self.variances.follow(candidates.network, candidates.likelihood, data, **options)
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
            diagonal.set_state(diagonal.fit_batches(data, **options))
            variances = diagonal.variance()
        return self.largest(variances), variances


@stored
@dataclass(frozen=True)
class LargestMagnitude(_Sized):
    """The entries of largest absolute value; ``size`` as for :class:`LargestVariance`."""

    @override
    def choose(self, candidates: Posterior, data: Iterable[Any], **options: Any) -> Choice:
        return self.largest(candidates.network.vector().abs()), None


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
    def choose(self, candidates: Posterior, data: Iterable[Any], **options: Any) -> Choice:
        total = candidates.n_parameters
        seed = draw_seed(options["generator"]) if self.seed is None else self.seed
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        return torch.zeros(total, dtype=torch.bool).index_fill_(0, order[: self.count(total)], True), None


@stored
@dataclass(frozen=True)
class Chosen(Selector):
    """Entries that the caller names, as for ``parameters=``; those that are not among the candidates are left out."""

    selection: Selection = "all"

    @override
    def choose(self, candidates: Posterior, data: Iterable[Any], **options: Any) -> Choice:
        network = candidates.network
        chosen, parts = refine(select(network.model, self.selection)), []
        for item in network.selected:
            own = chosen.get(item.name, torch.zeros(item.shape, dtype=torch.bool)).flatten()
            parts.append(own if item.mask is None else own[item.mask.cpu()])
        return torch.cat(parts), None


SELECTORS: Mapping[str, type[Selector]] = {
    cls.__name__: cls for cls in (LargestVariance, LargestMagnitude, Random, Chosen)
}


# -- the posterior -----------------------------------------------------------------------------------------------------


class Subnetwork(GaussianPosterior):
    """A Gaussian posterior over a chosen subset of the weights; the others stay at their trained values.

    Choose it where a last layer alone says too little and all weights are too many for a full covariance: a few
    thousand well-chosen weights anywhere in the network keep their correlations. Which ones matters more than how many:
    what is fixed adds no uncertainty, so that a poor choice is overconfident, which its evidence does not show. Begin
    with ``lp.LargestVariance(size, variances=lp.DiagonalSWAG())``, or :class:`LargestMagnitude`, which takes no data.

    After ``fit`` everything (``n_parameters``, ``parameter_names``, samples, layer-wise priors) is about the chosen
    entries alone; their number S decides the cost: with ``lp.Full``, S² numbers, or S times the rows of data where
    those are fewer, and for predictions the gradients of each input's outputs in the layers that hold chosen entries.

    A posterior that is fitted again chooses anew, under a prior precision of one number; a loaded one among the entries
    that it has.

    Args:
        model, likelihood: As for :class:`Posterior`.
        selector: :class:`LargestVariance`, :class:`LargestMagnitude`, :class:`Random` or another
            ``Selector``; or names, globs, a predicate or a mask of entries; or a selector as configurations have it,
            ``{"name": "Random", "size": 100}``.
        posterior: Class of the posterior over the chosen entries: ``lp.Full``, ``lp.KFAC`` or ``lp.Diagonal``, or the
            name of one. ``lp.KFAC`` keeps Kronecker products for layers that were chosen whole, and an exact dense or
            diagonal block for the chosen entries of the others.
        posterior_options: That class's own keyword arguments.
        **common: As for :class:`Posterior`: ``parameters`` are the candidates, ``prior_mean`` is one number, and so is
            ``prior_precision`` whenever entries are chosen.

    Raises:
        ConfigurationError: A class that is no Gaussian posterior, or a prior with many entries, by :meth:`fit`, too,
            and there for a subnetwork larger than the candidates.
        SelectionError: By :meth:`fit`, an empty subnetwork.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.Subnetwork(net, "regression", lp.LargestVariance(10)).fit([(x, 2 * x)])
        >>> posterior.n_parameters
        10
    """

    _choice: Choice | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        selector: Selector | Selection,
        posterior: type[GaussianPosterior] | str = "Full",
        *,
        posterior_options: dict[str, Any] | None = None,
        **common: Any,
    ):
        if isinstance(selector, dict) and isinstance(selector.get("name"), str):  # of a configuration, not a mask
            selector = resolve_option("selector", selector, SELECTORS)
        self.selector = selector if isinstance(selector, Selector) else Chosen(selector)
        cls = get_posterior(posterior) if isinstance(posterior, str) else posterior
        is_gaussian = isinstance(cls, type) and issubclass(cls, GaussianPosterior) and not issubclass(cls, Subnetwork)
        inner = cls(model, likelihood, **(posterior_options or {}), **common) if is_gaussian else None
        if inner is None or not inner.structure.adds_up:
            what, expected = "A subnetwork has a Gaussian posterior.", "lp.Full, lp.KFAC or lp.Diagonal"
            raise ConfigurationError(what, expected=expected, got=repr(cls))
        super().__init__(model, likelihood, **common)
        self._require_one_number()
        self.structure = inner.structure
        self._candidates, self._choice = self.network, None
        self.options = {"posterior": name_of(cls), "posterior_options": inner.options, "selector": self._storable()}

    def _require_one_number(self) -> None:
        """Raise :class:`ConfigurationError` for a prior of several, which may be of other entries than are chosen."""
        if self._prior_precision.numel() > 1 or self._prior_mean.numel() > 1:
            what, expected = "A subnetwork is chosen under a prior of one number.", "one prior_precision and prior_mean"
            got = f"{self._prior_precision.numel()} and {self._prior_mean.numel()} numbers"
            fix = "Set posterior.prior_precision after fit(), or tune it with structure='layerwise'."
            raise ConfigurationError(what, expected=expected, got=got, fix=fix)

    def _storable(self) -> Selector:
        """The selector where it can be stored, or else the entries that it chose, which a loaded posterior knows."""
        known = isinstance(self.selector, LargestVariance | LargestMagnitude | Random)
        return self.selector if known else Chosen()

    def squared_wasserstein(self, variances: Tensor | None = None) -> Tensor:
        """The squared 2-Wasserstein distance to the posterior over all candidates, lost by fixing the other entries.

        With both taken as diagonal, the sum of the marginal variances of the candidates that were not chosen (Daxberger
        et al., 2021), in squared units of the parameters.

        Args:
            variances: Marginal variances of all candidates, ``[P]``, such as ``lp.Diagonal(...).fit(data).variance()``
                of them gives; by default those that the selector looked at.

        Returns:
            0-d.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: The selector looked at no variances, or the choice was made before saving.
        """
        self.require_fit()
        mask, known = self._choice or (None, None)
        known = known if variances is None else variances
        if mask is None or known is None:
            what = "The marginal variances of the entries are not known."
            expected = "variances=lp.Diagonal(model, likelihood).fit(data).variance(), after fit()"
            raise UnsupportedError(what, expected=expected, got=f"none, from {self.selector!r}")
        return known[~mask.to(known.device)].sum()

    @override
    def fit_batches(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        before: GaussianState | None = None,
        reduce: Reduce | None = None,
    ) -> GaussianState:
        options: Any = {"progress": progress, "generator": generator, "reduce": reduce}
        if before is None:
            self._require_one_number()
            self._choose(data, **options)
            self.options = {**self.options, "selector": self._storable()}
        return super().fit_batches(data, before=before, **options)

    def _choose(self, data: Iterable[Any], *, reduce: Reduce | None, **options: Any) -> None:
        candidates = copy.copy(self)
        candidates.network = network = self._candidates.selecting(self._candidates.selection)
        if self.selector.needs_data or candidates._is_last_layer:
            require_restartable(data, f"{self.selector!r} looks at the data before the fit.")
        if candidates._is_last_layer:
            capture_batch(network, next(self.batches(data)))  # execution order tells the last layer
        mask, variances = self.selector.choose(candidates, data, reduce=reduce, **options)
        if reduce is not None:  # some selectors draw
            mask = reduce(mask, lambda mine, theirs: mine)
        self._candidates, self._choice = network, (mask, variances)
        self.network = network.selecting(refine(network.selected, mask))
