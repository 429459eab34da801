"""What every posterior has: a network, a likelihood and a prior; fitting, tuning and saving.

A method derives from :class:`Posterior` and gives ``fit_batches``, which returns a state, and ``sample``::

    @stored
    @dataclass(frozen=True)
    class RidgeState(State):  # mean [P], n_data, n_outputs
        variances: Tensor

    class Ridge(Posterior):
        def __init__(self, model, likelihood, *, damping: float = 1.0, **common):
            super().__init__(model, likelihood, **common)
            self.damping = damping

        def fit_batches(self, data, *, progress=False) -> RidgeState:
            for batch in self.batches(data, progress=progress): ...
            return RidgeState(self.network.vector(), n_data, n_outputs, variances)

        def sample(self, n, *, generator=None) -> Tensor: ...  # from self.state.variances

It runs on a copy of the posterior whose attributes are adopted when it has returned, so that a failure changes nothing.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from laplace_plus.curvature import Backend, resolve_backend
from laplace_plus.errors import (
    ConfigurationError,
    UnsupportedError,
    warn,
)
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network.batches import Batch, iterate, signature_of
from laplace_plus.network.network import Network, full_precision
from laplace_plus.network.selection import Selection
from laplace_plus.persistence import decode, encode
from laplace_plus.posteriors.predicting import Predicting, changed
from laplace_plus.posteriors.public import Summary, describe_groups, positive, recording
from laplace_plus.posteriors.state import TrainingData
from laplace_plus.posteriors.storing import save
from laplace_plus.priors import LAYERWISE, GaussianPrior, Groups, as_hyperparameter
from laplace_plus.tuning.base import Tuner, TuningResult, resolve_tuner


class Posterior(Predicting):
    """A posterior over (some of) the parameters of a trained network, which itself is never changed.

    A subclass gives :meth:`fit_batches` and :meth:`sample`; see ``docs/extending.md``.

    Args:
        model: The trained ``nn.Module``.
        likelihood: ``"classification"``, ``"regression"``, ``"binary"``, a :class:`~laplace_plus.Likelihood`, or a
            callable ``(outputs, targets) -> log densities``.
        parameters: ``"all"`` (that require gradients), ``"last_layer"`` (on the path to the outputs; of a tied weight
            its use there), names or globs of parameters or modules, a predicate ``(name, parameter) -> bool``, a mask.
        prior_precision: Inverse prior variance: a scalar, one for each layer, or one for each entry. By default 1, a
            guess: ``predictive`` warns of it, unless it has been tuned or set.
        prior_mean: A scalar or one for each entry.
        temperature: Divides the log-likelihood, and with it the curvature.
        backend: ``"native"``, ``"backpack"``, ``"curvlinops"``, or an instance with options.
        memory_budget: Without effect, and gone in the next version: batches say how many examples pass together.

    Attributes:
        network: The model as a function of the selected parameters.
        options: The arguments of the class's own.
        training_data: The loaders of the fit, for methods that pass over the data again.
        tuning: The result of the last tuning, which also chose the next four.
        link: What ``predictive`` takes by default; None for the likelihood's first.
        covariance_scale: Factor on a Gaussian's covariance: a cold posterior for less than 1. A new prior precision or
            fit sets it to 1. The evidence is without it.
        output_temperature: Divides the outputs, the logits of a classifier, in :meth:`predictive`, not in
            :meth:`functional_posterior`; it changes no posterior. Reset as ``covariance_scale`` is.
        tangent_mean: The tangent model's optimum, where linearised predictions have it as their mean.
        noise_per_output: Whether the fit gives each of several outputs a noise level of its own: so for
            ``"regression"``, by its name, until a noise is set.

    Raises:
        ConfigurationError: An argument that is not of these kinds.
        SelectionError: No such parameters.
        UnsupportedError: A network that cannot be treated as a function of single examples.
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {}
    """Classes of the tuners that this class supports, by shorthand; the first of them is ``"auto"``."""

    _one_precision: ClassVar[bool] = False
    """Whether a single prior precision scales all entries, so that several are refused."""

    options: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = recording(cls.__init__, Posterior.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        parameters: Selection = "all",
        prior_precision: float | Tensor | None = None,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        if memory_budget is not None:
            warn("memory_budget= has no effect any more: smaller batches take less memory.", DeprecationWarning)
        self.likelihood: Likelihood = resolve_likelihood(likelihood)
        self.noise_per_output = isinstance(likelihood, str) and likelihood == "regression"
        self.network = Network(model, parameters, self.likelihood.arrange)
        self.model = self.network.model  # what weights are compared with
        self.backend = resolve_backend(backend)
        self._found: Any = None  # the state, and a mark of the network then
        self._mark: Any = None
        self.earlier: Any = None  # the state of earlier tasks' data, to which fit() adds; see lp.continue_on
        self.training_data = TrainingData()
        self.tuning: TuningResult | None = None
        self.link: str | None = None
        self.covariance_scale, self.output_temperature, self.tangent_mean = 1.0, 1.0, None
        self._prior_groups: Groups | None = None  # other than the layers
        self.is_guess = prior_precision is None  # the prior precision, until it is tuned or set
        self._prior_precision = self._checked_precision(1.0 if prior_precision is None else prior_precision)
        self._prior_mean = as_hyperparameter(prior_mean, copy=True)
        self.temperature = temperature
        if self._prior_precision.numel() == self._prior_mean.numel() == 1 or self._is_last_layer:
            # The size of a last layer is only certain once a batch has gone through the network.
            first = self._prior_precision.flatten()[:1], self._prior_mean.flatten()[:1]
            GaussianPrior.create(*first, torch.zeros(1, dtype=torch.long))
        else:
            self.prior()

    # -- what a method gives -------------------------------------------------------------------------------------------

    @abstractmethod
    def fit_batches(self, data: Iterable[Any]) -> Any:
        """One method's own work, from streamed batches; :meth:`batches` iterates over the data.

        Of these keywords a method takes those that it needs:

        * ``progress``: whether to show a bar; ``generator``: the source of randomness;
        * ``before``: the state of data to which these are added, None for a fit anew;
        * ``reduce(own, add)``: in several processes, the sum over all ranks of a value that :func:`encode` takes, by
          a function that adds two of them; a rank that has none passes None.

        Returns a :class:`State`.
        """

    # -- fitting -------------------------------------------------------------------------------------------------------

    @full_precision
    def fit(self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None) -> Self:
        """Fit to data in one pass (or what the method needs), forgetting any earlier fit.

        Args:
            data: An iterable of batches: ``(x, y)`` tuples, nested tuples, or mappings with labels.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for methods that use any.

        Raises:
            EmptyDataError: No data came.
            DataError: A batch of a form that cannot be used.
            LabelError: Targets that do not fit the likelihood, or that repeat ``"input_ids"`` unshifted.
            OutputError: Network outputs that do not fit it, such as probabilities in place of logits.
            NonFiniteError: NaN or Inf in parameters or outputs.
            SelectionError: The selected parameters have no influence on the likelihood of the data.
        """
        self.network.check_finite()
        return self._fitted(data, None, progress=progress, generator=generator)

    @full_precision
    def update(self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None) -> Self:
        """Add data without forgetting; arguments and errors as for :meth:`fit`, but the loader is not kept alive.

        A method that passes over the training data again needs all of them: pass ``data=`` there.
        """
        if not self.is_fitted:
            return self.fit(data, progress=progress, generator=generator)
        self.require_fit()
        return self._fitted(data, self._found, progress=progress, generator=generator)

    def _fitted(self, data: Iterable[Any], before: Any, *, reduce: Any = None, **options: Any) -> Self:
        """What :meth:`fit` and :meth:`update` do: work on a copy, and adopt its attributes when it has succeeded."""
        taken = signature_of(type(self).fit_batches).parameters
        if before is not None and "before" not in taken:
            what = f"{type(self).__name__} cannot be updated."
            raise UnsupportedError(what, expected="fit() on all the data", got="update()")
        if reduce is not None and "reduce" not in taken:
            what = f"{type(self).__name__} cannot be fitted over several ranks."
            raise UnsupportedError(what, expected="fit() in one process, on all the data")
        made = copy.copy(self)
        made._found, made.network = before, copy.copy(self.network)
        if before is None:
            made.network.forget()
        mark = made.network.mark()
        options |= {"before": before, "reduce": reduce}
        for name in options.keys() - taken.keys():
            del options[name]
        found = made.fit_batches(data, **options)
        if (now := self.network.mark()) != mark:
            raise changed(mark, now, "The network's forward pass writes to its own weights.")
        made.set_state(found)
        if before is not None:
            made.training_data = TrainingData(self.training_data.first, all=False)
        else:
            gone = isinstance(data, Iterator) or self.earlier is not None
            made.training_data = TrainingData(None if gone else data)
        self.__dict__ = vars(made)
        return self

    def set_state(self, state: Any) -> None:
        """Make a state that of this posterior, at the network's present weights."""
        self._found, self._mark = state, self.network.mark()

    def batches(self, data: Iterable[Any], *, progress: bool = False, description: str = "") -> Iterator[Batch]:
        """A loader's batches on the network's device."""
        return iterate(data, device=self.network.device, progress=progress, description=description)

    # -- tuning --------------------------------------------------------------------------------------------------------

    @full_precision
    def fit_prior_precision(
        self,
        tuner: Tuner | str = "auto",
        structure: str | Groups | None = None,
        *,
        data: Iterable[Any] | None = None,
        tune_noise: bool | None = None,
        progress: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Self:
        """Tune the prior precision and, where the likelihood has one, the noise level with it.

        Args:
            tuner: A tuner, such as ``lp.MarginalLikelihood(structure="layerwise")``, or a shorthand among
                :attr:`tuners`: for Gaussian posteriors ``"marginal_likelihood"``, ``"mackay"``, ``"em"``,
                ``"tangent"``, ``"validation"``, ``"leave_one_out"``, ``"unseen"`` or ``"auto"``. Of
                other classes ``"auto"`` is the first. An option that only the marginal likelihood has asks for it.
            structure: With a shorthand, the tuner's ``structure``: ``"scalar"``, ``"layerwise"``,
                ``"normalized_groups"``, ``"diagonal"`` or :class:`~laplace_plus.Groups`.
            data: With a shorthand, the tuner's ``data``: held-out batches for ``"auto"`` and ``"validation"``. Others
                take the training data, by default the loaders that :meth:`fit` saw.
            tune_noise: With a shorthand, whether to tune Gaussian noise; by default whenever there is any.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for tuners that draw samples.
            **options: Further arguments of the tuner that a shorthand stands for. ``evidence="tangent"`` stands for
                ``lp.Tangent``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: A tuner that this class does not support, or a prior that its structure does not take.
            ConfigurationError: An unknown shorthand or option.
            DataError: The training data are needed, and not at hand; or all held-out targets are ignored.

        Warns:
            ConvergenceWarning: The tuning ended before it met its tolerance, or at the end of its grid.
        """
        self.require_fit()
        options = {"structure": structure, "data": data, "tune_noise": tune_noise, **options}
        chosen = resolve_tuner(type(self).__name__, self.tuners, tuner, options)
        found, made = self.run_tuner(chosen, progress=progress, generator=generator), copy.copy(self)
        made.apply_tuning(found)
        self.__dict__ = vars(made)
        return self

    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What a tuner finds; a class with its own way to go about a tuner replaces this."""
        return tuner.tune(self, progress=progress, generator=generator)

    def apply_tuning(self, result: TuningResult) -> None:
        """Set the hyperparameters that a tuner found; a class that has more of them adds to this."""
        if result.groups is not None:
            index = result.groups.index
            layers = result.groups.name == LAYERWISE and torch.equal(index, self.network.layer_index())
            self._prior_groups = None if layers else result.groups
        self._prior_precision, self.is_guess = result.prior_precision, False
        if result.noise_std is not None:
            self.noise_std = result.noise_std
        self.tuning, self.link = result, result.link
        self.covariance_scale, self.output_temperature = result.covariance_scale, result.output_temperature
        self.tangent_mean = result.vector if result.predictive_mean == "tangent" else None
        for name, value in result.settings.items():
            setattr(self, name, value)

    # -- the prior and the noise ---------------------------------------------------------------------------------------

    def prior(self) -> GaussianPrior:
        """The prior at the current precision."""
        return GaussianPrior.create(self._prior_precision, self._prior_mean, self._group_index())

    def _group_index(self) -> Tensor:
        """The prior group of each entry, ``[P]``; the same tensor until the groups change."""
        return self.network.layer_index() if self._prior_groups is None else self._prior_groups.index

    @property
    def prior_groups(self) -> Groups:
        """Which entries share one of the precisions of a prior precision ``[G]``; the layers, unless others are set."""
        own = self._prior_groups
        return Groups(LAYERWISE, self.layer_names, self.network.layer_index()) if own is None else own

    @prior_groups.setter
    def prior_groups(self, groups: Groups) -> None:
        groups.check_size(self.n_parameters)
        GaussianPrior.create(self._prior_precision, self._prior_mean, groups.index)
        self._prior_groups = groups

    @property
    def prior_precision(self) -> Tensor:
        """Inverse prior variance: 0-d, ``[G]`` (one for each of ``prior_groups``, the layers by default) or ``[P]``."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        precision = self._checked_precision(value)
        GaussianPrior.create(precision, self._prior_mean, self._group_index())
        self._prior_precision, self.link, self.is_guess = precision, None, False
        self.covariance_scale = self.output_temperature = 1.0

    def _checked_precision(self, value: float | Tensor) -> Tensor:
        precision = as_hyperparameter(value, copy=True)  # the caller may go on writing to theirs
        if self._one_precision and precision.numel() > 1:
            what = f"One precision scales all entries of a {type(self).__name__}."
            raise ConfigurationError(what, expected="a single prior precision", got=f"{precision.numel()} of them")
        return precision

    @property
    def prior_mean(self) -> Tensor:
        """Mean of the prior: 0-d or ``[P]``."""
        return self._prior_mean

    @property
    def temperature(self) -> Tensor:
        """Divides the log-likelihood and the curvature, and no logits: see :attr:`output_temperature`."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._temperature = positive(value, "temperature")

    @property
    def noise_std(self) -> Tensor | None:
        """The Gaussian likelihood's noise level: 0-d or ``[C]``; None for other likelihoods.

        A number that is set after a fit with several levels becomes each of them.
        """
        return self.likelihood.noise_std

    @noise_std.setter
    def noise_std(self, value: float | Tensor) -> None:
        changed, several = self.likelihood.with_noise(value), self.likelihood.n_noise
        if self.is_fitted and changed.noise_std is not None and changed.noise_std.ndim == 0 and several > 1:
            changed = changed.with_noise(changed.noise_std.expand(several))
        if self.is_fitted and changed.n_noise != several:
            what = "The curvature was fitted with another number of noise levels."
            fix = "Fit a posterior with lp.Gaussian(noise_std=...) of that shape."
            raise ConfigurationError(what, expected=f"{several}", got=f"{changed.n_noise}", fix=fix)
        self.likelihood, self.noise_per_output = changed, False

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """What the last fit found, a :class:`State`; None before it."""
        return self._found

    @property
    def is_fitted(self) -> bool:
        """Whether there has been a successful :meth:`fit`."""
        return self._found is not None

    @property
    def mean(self) -> Tensor:
        """The posterior mean ``[P]``; NotFittedError before a fit."""
        if self._found is None:
            self.require_fit()
        return self._found.mean

    @property
    def n_data(self) -> int:
        """The number of examples seen; 0 before a fit."""
        return 0 if self._found is None else self._found.n_data

    @property
    def n_outputs(self) -> int:
        """C, or 0 where the method does not say, and before a fit."""
        return 0 if self._found is None else self._found.n_outputs

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
    def _is_last_layer(self) -> bool:
        """Whether the selection is ``"last_layer"``."""
        return isinstance(self.network.selection, str) and self.network.selection == "last_layer"

    def summary(self) -> Summary:
        """Which parameter is treated how; NotFittedError: before :meth:`fit`."""
        self.require_fit()
        rows = tuple((item.name, item.size, item.layer, type(self).__name__) for item in self.network.selected)
        return Summary(repr(self), rows, describe_groups(self))

    def __repr__(self) -> str:
        state = f"fitted to {self.n_data} examples" if self.is_fitted else "not fitted"
        return f"{type(self).__name__}({self.likelihood!r}, P={self.n_parameters:,}, {state})"

    # -- saving, moving, copying ---------------------------------------------------------------------------------------

    @full_precision
    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior to a file: safetensors, with JSON in its metadata; nothing is pickled.

        CheckpointError where something else is at ``path``, ConfigurationError for an option that cannot be stored.
        """
        save(self, path)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Follow the model to a device: after ``model.to(device)``, which the posterior does not do itself.

        ConfigurationError where the model is on another device, or of another type: that is another posterior.
        """
        device, dtype = (None, device) if isinstance(device, torch.dtype) else (device, dtype)
        own = self.network.device
        there = own if device is None else torch.empty(0, device=device).device
        if dtype not in (None, self.network.dtype):
            fix, expected = f"Call model.to({dtype}), and fit again.", str(self.network.dtype)
            raise ConfigurationError("A posterior is of its model's type.", expected=expected, got=str(dtype), fix=fix)
        if there != own:
            fix = f'Call model.to("{there}") first.'
            raise ConfigurationError("A posterior is where its model is.", expected=str(own), got=str(there), fix=fix)
        if self.is_fitted and self.mean.device != own:
            tensors: dict[str, Tensor] = {}
            tree = encode(self._found, tensors, "state")
            self._found, self._mark = decode(tree, tensors, own), self.network.mark()
            self.tangent_mean = None if self.tangent_mean is None else self.tangent_mean.to(own)
        return self

    def __copy__(self) -> Self:
        result = object.__new__(type(self))
        for name, own in vars(self).items():
            vars(result)[name] = copy.copy(own) if isinstance(own, Posterior) else own
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are without training data and caches, and know whether the fit still holds."""
        kept = vars(self) | {"training_data": TrainingData()}
        for name, own in kept.items():
            if name.endswith("_cache"):
                kept[name] = None
            elif isinstance(own, Tensor) and own.grad_fn is not None:  # torch copies leaves only
                kept[name] = own.detach()
        holds = self._mark is not None and self.network.mark() == self._mark
        return kept | {"_mark": "holds" if holds else None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        if self._mark is not None:
            self._mark = self.network.mark()


Posterior.__init__ = recording(Posterior.__init__, Posterior.__init__)  # type: ignore[method-assign]
