"""The abstract posterior: what every method gives and what it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from laplace_plus import io
from laplace_plus._memory import parse_bytes
from laplace_plus.batches import Batch, iterate
from laplace_plus.curvature import Backend, resolve_backend
from laplace_plus.distributed import Distributed, Group, OwnedSum, resolve_group
from laplace_plus.errors import (
    ConfigurationError,
    NotFittedError,
    UnsupportedError,
)
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network import Network
from laplace_plus.posteriors import draws, storing
from laplace_plus.posteriors.copies import Copied
from laplace_plus.posteriors.methods import check_count, exactly, positive, require_unchanged
from laplace_plus.posteriors.ranks import agree, save_once, session
from laplace_plus.posteriors.summary import Summary, prior_line
from laplace_plus.posteriors.training_data import TrainingData
from laplace_plus.predictive import Prediction, from_functional, from_samples
from laplace_plus.predictive.linearized import (
    MANY_OUTPUTS,
    FunctionalPosterior,
    Outputs,
)
from laplace_plus.priors import LAYERWISE, GaussianPrior, Groups, as_hyperparameter
from laplace_plus.selection import Selection

Method = Literal["linearized", "sampled"]


class Posterior(Copied, ABC):
    """A posterior over (some of) the parameters of a trained network.

    A subclass must give ``_fit`` and ``sample``; it may give ``functional_posterior`` where it knows better than Monte
    Carlo, and ``_state``/``_restore`` to be saved. The network itself is never changed.

    Calls from several threads, to this and other posteriors of the network, come one after the other. The network is
    not to be run or trained by the user's own threads meanwhile, as other weights take the place of its own.

    Args:
        model: The trained ``nn.Module``.
        likelihood: ``"classification"``, ``"regression"``, ``"binary"``, a :class:`~laplace_plus.Likelihood`, or a
            callable ``(outputs, targets) -> log densities``.
        parameters: ``"all"`` (everything that requires gradients), ``"last_layer"``, parameter or module names or
            globs, a predicate ``(name, parameter) -> bool``, or a mask.
        prior_precision: Inverse prior variance: a scalar, one for each layer, or one for each entry.
        prior_mean: A scalar or one for each entry.
        temperature: Divides the log-likelihood, and with it the curvature.
        backend: ``"native"``, ``"backpack"``, ``"curvlinops"``, or an instance with options.
        memory_budget: Bytes, or a text such as ``"2 GiB"``, that intermediate results may take, on top of the network,
            the data and what is returned; work is cut into chunks accordingly. By default a quarter of the memory that
            is free on the network's device.

    Raises:
        ConfigurationError: An argument that is not of these kinds.
        SelectionError: No such parameters.
        UnsupportedError: A network that cannot be treated as a function of single examples.
    """

    default_method: Method = "linearized"

    _prior_groups: Groups | None = None
    """Groups of the prior other than the layers."""

    _tangent_mean: Tensor | None = None
    """The tangent model's optimum, where linearised predictions have it as their mean."""

    over_ranks: bool = False
    """Whether ``_fit`` sums over the ranks in ``_group``; a class that does not is refused several."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        self.likelihood: Likelihood = resolve_likelihood(likelihood)
        self.network = Network(model, parameters, self.likelihood.arrange)
        self.backend = resolve_backend(backend)
        self.memory_budget = memory_budget
        self._prior_precision = as_hyperparameter(prior_precision)
        self._prior_mean = as_hyperparameter(prior_mean)
        self._temperature = positive(temperature, "temperature")
        if self._is_last_layer():  # its size is only certain once a batch has gone through the network
            GaussianPrior.create(self._prior_precision.flatten()[:1], 0.0, torch.zeros(1, dtype=torch.long))
        else:
            self._check_prior()
        self.n_data = 0
        self.n_outputs = 0
        self._vector: Tensor | None = None
        self._group: Group | None = None
        self._data = TrainingData()

    # -- what a method gives -------------------------------------------------------------------------------------------

    @abstractmethod
    def _fit(self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None) -> None:
        """One method's own work, from streamed batches; leaves everything as it was if it fails.

        Of the keywords a method may take those that it needs; without ``update`` it can only be fitted anew.
        """

    @abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw parameter vectors, ``[n, P]`` in ``parameter_names`` order."""

    @exactly
    def functional_posterior(
        self,
        x: Any,
        *,
        joint: bool = False,
        outputs: Outputs = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> FunctionalPosterior:
        """Mean and covariance of the linearised network's outputs.

        By default from 100 samples of the posterior, pushed through the network's tangent.

        Args:
            x: A batch's inputs, as the network takes them: a tensor, a tuple or a mapping.
            joint: Whether to give the covariance across inputs, ``[B, C, B, C]``.
            outputs: None for all outputs, ``"diagonal"`` for variances only, or indices of some outputs.
            differentiable: Whether gradients flow to ``x``.
            generator: Source of randomness, for methods that use any.

        Returns:
            Mean ``[B, *, C]`` and covariance ``[B, *, C, C]``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: ``differentiable`` or part of the outputs, where this method only knows samples.
        """
        self._require_fit()
        if differentiable or outputs is not None:
            raise UnsupportedError(
                f"{type(self).__name__} only knows its linearised posterior by Monte Carlo.",
                expected="differentiable=False and outputs=None",
                got=f"differentiable={differentiable}, outputs={outputs!r}",
            )
        return draws.functional_posterior(self, x, joint=joint, generator=generator)

    def options(self) -> dict[str, Any]:
        """The method's own constructor arguments, in JSON's terms."""
        return {}

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What :meth:`save` stores besides the constructor's arguments."""
        raise ConfigurationError(f"{type(self).__name__} cannot be saved.")

    def owned_sums(self) -> list[OwnedSum]:
        """What lies on one rank each, in an order that all ranks share."""
        return []

    def _restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take up what :meth:`_state` returned."""
        raise ConfigurationError(f"{type(self).__name__} cannot be loaded.")

    # -- what it gets --------------------------------------------------------------------------------------------------

    @exactly
    def fit(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
    ) -> Self:
        """Fit to data in one pass (or what the method needs), forgetting any earlier fit.

        Args:
            data: An iterable of batches: ``(x, y)`` tuples, nested tuples, or mappings with labels.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for methods that use any; of several ranks, that of rank 0 counts.
            distributed: Which ranks of ``torch.distributed`` share the data, each with a loader of its own: None for
                all there are, False for this process alone, or a process group. Every one of them makes the same call.

        Raises:
            DistributedError: Another rank failed, or disagrees on the network or on settings.
            EmptyDataError: No data came.
            DataError: A batch of a form that cannot be used.
            LabelError: Targets that do not fit the likelihood.
            OutputError: Network outputs that do not fit it.
            NonFiniteError: NaN or Inf in parameters or outputs.
            UnsupportedError: A curvature that the backend cannot compute.
        """
        group = resolve_group(distributed)
        with session(group):
            self.network.refresh()
            self.network.check_finite()
            self._run_fit(data, group, update=False, progress=progress, generator=generator)
        return self

    @exactly
    def update(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
    ) -> Self:
        """Add data without forgetting; arguments and errors as for :meth:`fit`.

        Unlike that of :meth:`fit`, the loader is not kept alive. What passes over the training data again needs all of
        them: hold the loaders (lists are not kept at all), or pass ``data=`` there.
        """
        if self._vector is None:
            return self.fit(data, progress=progress, generator=generator, distributed=distributed)
        group = resolve_group(distributed)
        with session(group):
            self._require_fit()
            self._run_fit(data, group, update=True, progress=progress, generator=generator)
        return self

    def _run_fit(self, data: Iterable[Any], group: Group | None, **options: Any) -> None:
        """Call the method's own fit with those of the options that it takes."""
        before, self._group = self._group, group
        try:
            if group is not None:
                options["generator"] = agree(self, group, options["generator"], update=options["update"])
                options["progress"] = options["progress"] and group.rank == 0
            self._call_fit(data, **options)
        except BaseException:
            self._group = before
            raise
        self._data = self._data.plus(data) if options["update"] else TrainingData(data)

    def _call_fit(self, data: Iterable[Any], **options: Any) -> None:
        taken = signature(self._fit).parameters
        if options["update"] and "update" not in taken:
            raise UnsupportedError(
                f"{type(self).__name__} cannot be updated.", expected="fit() on all the data", got="update()"
            )
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        self.network.has_changed()  # weights whose state cannot be noted fail here, while the old fit still holds
        vector = self._vector
        with self.network.learning(afresh=not options["update"]):
            self._fit(data, **{name: value for name, value in options.items() if every or name in taken})
        if self._vector is None or (self._vector is vector and not options["update"]):
            self._vector = self.network.vector()
        self._remember()

    def _remember(self) -> None:
        self.network.remember()
        self._fingerprint = io.fingerprint(self.network.model)

    @exactly
    def predictive(
        self,
        x: Any,
        *,
        method: Method | None = None,
        link: str | None = None,
        n_samples: int = 100,
        joint: bool = False,
        generator: torch.Generator | None = None,
        differentiable: bool = False,
    ) -> Prediction:
        """The posterior predictive distribution ``p(y | x, D)``.

        With more than 64 outputs and the probit link, only variances of the outputs are computed: mean, variance and
        log-probability are the same, but what the prediction estimates by Monte Carlo (the split of the variance, the
        mutual information) then treats outputs as uncorrelated.

        Args:
            x: A batch's inputs.
            method: ``"linearized"`` (a Gaussian over outputs) or ``"sampled"`` (sampled networks); by default what
                suits the class.
            link: How a Gaussian over outputs becomes a distribution of y: ``"probit"``, ``"mc"``, ``"bridge"`` for
                classification; by default the likelihood's first.
            n_samples: Number of samples where any are drawn.
            joint: Whether inputs are treated jointly, with their cross-covariances.
            generator: Source of randomness.
            differentiable: Whether gradients flow to ``x`` (linearised only).

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An unknown method or link.
            DataError: Inputs that are no batch of what was fitted to.
            ModelChangedError: The network's weights have changed since the fit.
        """
        self._require_fit()
        check_count(n_samples, "n_samples")
        chosen = self.default_method if method is None else method
        if chosen == "linearized":
            if (link or self.likelihood.links[0]) == "mc" and self.n_outputs > MANY_OUTPUTS and not differentiable:
                samples = self._functional_samples(x, n_samples, joint, generator)
                if samples is not None:
                    return from_samples(self.likelihood, samples, generator=generator, joint=joint)
            # The probit link only looks at variances, and with many outputs covariances cost many times as much.
            many = self.n_outputs > MANY_OUTPUTS and not joint and (link or self.likelihood.links[0]) == "probit"
            options: dict[str, Any] = {"outputs": "diagonal" if many else None, "differentiable": differentiable}
            if "generator" in signature(self.functional_posterior).parameters:  # a class may do without
                options["generator"] = generator
            with torch.set_grad_enabled(differentiable):
                mean, covariance = self.functional_posterior(x, joint=joint, **options)
                prediction = from_functional(
                    self.likelihood, mean, covariance, link=link, n_samples=n_samples, generator=generator, joint=joint
                )
                if prediction.marginal is None:
                    _ = prediction.samples  # drawn here and now rather than under the caller's autocast
                return prediction
        if chosen != "sampled":
            raise ConfigurationError("Unknown method.", expected='"linearized" or "sampled"', got=repr(method))
        draws.check_sampled(self, link, differentiable=differentiable)
        with torch.no_grad():
            outputs = torch.stack(list(self._sampled_outputs(x, n_samples, generator)))
            draws.check_outputs(self, outputs, x)
            return from_samples(self.likelihood, outputs, generator=generator, joint=joint)

    def _sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        """Outputs ``[B, *, C]`` of n sampled networks, or of fewer where a method has no more."""
        return draws.network_outputs(self, x, n, generator=generator)

    def _functional_samples(self, x: Any, n: int, joint: bool, generator: torch.Generator | None) -> Tensor | None:
        """Samples ``[S, B, *, C]`` of the linearised outputs, where their covariance would be too large; else None."""
        return draws.linearised_outputs(self, x, n, joint=joint, generator=generator)

    def summary(self) -> Summary:
        """Which parameter is treated how.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self._require_fit()
        rows = tuple((item.name, item.size, item.layer, type(self).__name__) for item in self.network.selected)
        return Summary(repr(self), rows, prior_line(self._prior_groups, self._prior_precision))

    def prior(self) -> GaussianPrior:
        """The prior at the current precision."""
        return GaussianPrior.create(self._prior_precision, self._prior_mean, self._group_index())

    def _group_index(self) -> Tensor:
        """Which group's prior precision each entry has, ``[P]``; the same tensor until the groups change."""
        return self.network.layer_index() if self._prior_groups is None else self._prior_groups.index

    @property
    def prior_groups(self) -> Groups:
        """Which entries share one of the precisions of a prior precision ``[G]``: the layers, unless others were set.

        Raises:
            ConfigurationError: Setting groups of other parameters, or while the precision is one for each of another
                number of groups.
        """
        own = self._prior_groups
        return Groups(LAYERWISE, self.layer_names, self.network.layer_index()) if own is None else own

    @prior_groups.setter
    def prior_groups(self, groups: Groups) -> None:
        groups.check_size(self.n_parameters)
        GaussianPrior.create(self._prior_precision, self._prior_mean, groups.index)
        self._prior_groups = groups

    def _check_prior(self) -> None:
        """Refuse a prior whose shape does not fit; a single number fits any, without looking at every entry."""
        if self._prior_precision.numel() == self._prior_mean.numel() == 1:
            GaussianPrior.create(self._prior_precision, self._prior_mean, torch.zeros(1, dtype=torch.long))
        else:
            self.prior()

    @property
    def memory_budget(self) -> int | None:
        """Bytes that intermediate results may take; None for a quarter of what is free. Texts are understood, too."""
        return self._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | str | None) -> None:
        self._memory_budget = None if value is None else parse_bytes(value)

    @property
    def prior_precision(self) -> Tensor:
        """Inverse prior variance: 0-d, ``[G]`` (one for each of ``prior_groups``, the layers by default) or ``[P]``."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        GaussianPrior.create(value, self._prior_mean, self._group_index())
        self._prior_precision = as_hyperparameter(value)

    @property
    def temperature(self) -> Tensor:
        """Divides the log-likelihood and the curvature."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._temperature = positive(value, "temperature")

    @property
    def noise_std(self) -> Tensor | None:
        """The Gaussian likelihood's noise level: 0-d or ``[C]``; None for other likelihoods."""
        return self.likelihood.noise_std

    @noise_std.setter
    def noise_std(self, value: float | Tensor) -> None:
        changed = self.likelihood.with_noise(value)
        if self._vector is not None and changed.n_noise != self.likelihood.n_noise:
            raise ConfigurationError(
                "The curvature was fitted with another number of noise levels.",
                expected=f"{self.likelihood.n_noise}",
                got=f"{changed.n_noise}",
                fix="Fit a posterior with lp.Gaussian(noise_std=...) of that shape.",
            )
        self.likelihood = changed

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the selected parameters, in the order of the parameter vector."""
        return self.network.parameter_names

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the modules that own them, in the order of a layer-wise prior precision."""
        return self.network.layers

    @property
    def n_parameters(self) -> int:
        """P, the number of selected entries."""
        return self.network.n_parameters

    @property
    def mean(self) -> Tensor:
        """The posterior mean, ``[P]``.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self._require_fit()
        assert self._vector is not None
        return self._vector

    def save(self, path: str | Path, *, distributed: Distributed = None) -> None:
        """Write the posterior to a folder: tensors as safetensors, the rest as JSON, nothing pickled.

        A posterior that was fitted over several ranks is written by the first of them; the others wait until it is
        there. Rank 0 waits for nobody, and may also be the only one that ever saves to a path.

        Args:
            path: The folder.
            distributed: Which ranks save together: None for those of the fit, otherwise as for :meth:`fit`.

        Raises:
            NotFittedError: Before :meth:`fit`.
            CheckpointError: The folder holds something else.
            DistributedError: Rank 0 failed to write it, or has other hyperparameters than this rank.
        """
        group = self._group if distributed is None else resolve_group(distributed)
        if group is None or not group.is_alive():
            self.write(path)
        else:
            save_once(self, group, path)

    @exactly
    def write(self, path: str | Path) -> None:
        """What :meth:`save` does on the one process that writes."""
        self._require_fit()
        storing.write(self, path)

    def _require_fit(self) -> None:
        if self._vector is None:
            raise NotFittedError(
                f"This {type(self).__name__} has not been fitted.", expected="fit(loader) first", got="no data so far"
            )
        require_unchanged(self)

    def _is_last_layer(self) -> bool:
        return isinstance(self.network.selection, str) and self.network.selection == "last_layer"

    def _batches(self, data: Iterable[Any], *, progress: bool, description: str) -> Iterator[Batch]:
        return iterate(data, device=self.network.device, progress=progress, description=description)

    def __repr__(self) -> str:
        state = f"fitted to {self.n_data} examples" if self._vector is not None else "not fitted"
        return f"{type(self).__name__}({self.likelihood!r}, P={self.n_parameters:,}, {state})"
