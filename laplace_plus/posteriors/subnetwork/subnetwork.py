"""Subnetwork inference (Daxberger et al., 2021): a posterior over selected weights, all others fixed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.network.capture import capture_batch
from laplace_plus.network.selection import Selection, refine
from laplace_plus.posteriors.gaussian import GaussianPosterior, Reduce
from laplace_plus.posteriors.registry import get_posterior, name_of, resolve_option
from laplace_plus.posteriors.state import GaussianState
from laplace_plus.posteriors.subnetwork.selectors import (
    SELECTORS,
    Choice,
    Chosen,
    LargestMagnitude,
    LargestVariance,
    Random,
    Selector,
    Task,
)
from laplace_plus.posteriors.training_data import require_restartable


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
        choice = self._choice
        if choice is None or (variances is None and choice.variances is None):
            what = "The marginal variances of the entries are not known."
            expected = "variances=lp.Diagonal(model, likelihood).fit(data).variance(), after fit()"
            raise UnsupportedError(what, expected=expected, got=f"none, from {self.selector!r}")
        known = choice.variances if variances is None else variances
        assert known is not None
        return known[~choice.mask.to(known.device)].sum()

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
            self._choice = self._choose(data, **options)
            self.options = {**self.options, "selector": self._storable()}
            self.network = self._candidates.selecting(refine(self._candidates.selected, self._choice.mask))
        return super().fit_batches(data, before=before, **options)

    def _choose(
        self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None, reduce: Reduce | None
    ) -> Choice:
        candidates = copy.copy(self)
        candidates.network = network = self._candidates.selecting(self._candidates.selection)
        if self.selector.needs_data or candidates.is_last_layer:
            require_restartable(data, f"{self.selector!r} looks at the data before the fit.")
        if candidates.is_last_layer:
            capture_batch(network, next(self.batches(data)))  # execution order tells the last layer
        choice = self.selector.choose(Task(candidates, data, progress, generator, reduce))
        if reduce is not None:  # some selectors draw
            choice = Choice(reduce(choice.mask, lambda mine, theirs: mine), choice.variances)
        self._candidates = network
        return choice
