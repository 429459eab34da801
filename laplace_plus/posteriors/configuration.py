"""What a posterior is before it sees data: a network, a likelihood, a selection, a prior and a temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from inspect import Parameter, signature
from threading import get_ident
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from laplace_plus import checks, io
from laplace_plus._memory import parse_bytes, require_free, require_room
from laplace_plus.curvature import Backend, resolve_backend
from laplace_plus.distributed import Group
from laplace_plus.errors import (
    CheckpointError,
    ConfigurationError,
    ModelChangedError,
    NotFittedError,
    SelectionError,
    unknown_option,
)
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network.network import Network, exact_arithmetic, turn
from laplace_plus.network.selection import Selection
from laplace_plus.priors import LAYERWISE, GaussianPrior, Groups, as_hyperparameter

Method = TypeVar("Method", bound=Callable[..., Any])
Option = TypeVar("Option")


def full_precision(method: Method) -> Method:
    """Run a posterior's method outside of autocast and inference mode, within its memory budget, one at a time.

    See :func:`laplace_plus.network.network.exact_arithmetic`.
    """

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.network.kept.get("inside") == get_ident():  # another public method of this thread
            return method(self, *args, **kwargs)
        if kwargs.get("generator") is not None:
            checks.generator(kwargs["generator"])
        context = exact_arithmetic(self.network, self._memory_budget)
        try:
            with context:
                return method(self, *args, **kwargs)
        except BaseException:
            context.gen.close()  # where an interrupt came before contextlib could leave it
            raise

    return cast(Method, wrapped)


def checked_options(constructor: Method) -> Method:
    """A constructor that names what a keyword that it does not take may stand for."""
    taken = signature(constructor).parameters

    @wraps(constructor)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> None:
        for name in keywords.keys() - taken.keys():
            raise unknown_option(type(self).__name__, name, [*taken][1:])
        constructor(self, *args, **keywords)

    return constructor if any(one.kind is Parameter.VAR_KEYWORD for one in taken.values()) else cast(Method, wrapped)


def common_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the ``locals()`` of a posterior's constructor, the keyword arguments that every posterior takes."""
    names = [name for name, own in signature(Configured).parameters.items() if own.kind is Parameter.KEYWORD_ONLY]
    return {name: arguments[name] for name in names}


def resolve_option(what: str, value: Any, known: Mapping[str, type[Option]]) -> Option:
    """One of the known classes: from its name, from a mapping with ``"name"`` and its options, or as it is.

    ConfigurationError for another name, or options that the class does not have.
    """
    for cls in known.values():
        if isinstance(value, cls):
            return value
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        classes = ", ".join(cls.__name__ for cls in known.values() if cls is not type(None))
        raise ConfigurationError(f"Unknown {what}.", expected=f"{', '.join(known)}, or {classes}", got=repr(value))
    own = {} if known[name] is type(None) else signature(known[name]).parameters
    for option in options.keys() - own.keys():
        raise unknown_option(f"The {what} {name!r}", str(option), own)
    return known[name](**options)


def option_config(value: Any, known: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The mapping from which :func:`resolve_option` restores a dataclass, in JSON's terms."""
    name = next(name for name, cls in known.items() if isinstance(value, cls))
    return {"name": name, **asdict(value)}


def check_positive(value: float | Tensor, name: str) -> Tensor:
    """A positive number as a tensor; :class:`ConfigurationError` for anything else."""
    tensor = as_hyperparameter(value, copy=True)
    if tensor.ndim or not 0 < float(tensor.detach()) < torch.inf:
        raise ConfigurationError(f"{name} must be a positive number.", expected=f"{name} > 0", got=str(value))
    return tensor


@dataclass(frozen=True)
class Summary:
    """Which parameter is treated how; prints as a table.

    Attributes:
        title: One line about the posterior.
        rows: For each parameter its name, number of selected entries, layer and treatment.
        prior: A line about the prior's groups; empty where they are the layers.
    """

    title: str
    rows: tuple[tuple[str, int, str, str], ...]
    prior: str = ""

    def __str__(self) -> str:
        table = [("parameter", "entries", "layer", "treatment")]
        table += [(name, f"{size:,}", layer or "(root)", treatment) for name, size, layer, treatment in self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in table]
        return "\n".join([self.title, *([self.prior] if self.prior else []), *lines])


class Configured:
    """A network with a likelihood, a selection and hyperparameters, which are checked when they are set.

    Arguments as for :class:`~laplace_plus.Posterior`.
    """

    noise_per_output: bool = False
    """Whether the fit gives each of several outputs a noise level of its own: so for ``"regression"``, by its name,
    until a noise is set. Gaussian posteriors whose curvature stays affordable do so."""

    link: str | None = None
    """What ``predictive`` takes by default, as the last tuning chose it; None for the likelihood's first."""

    covariance_scale: float = 1.0
    """Factor on the covariance of a Gaussian posterior, as the last tuning chose it: a cold posterior for less than 1.
    A new prior precision or fit sets it to 1. The evidence is without it."""

    one_precision: ClassVar[bool] = False
    """Whether a single prior precision scales all entries, so that several are refused."""

    _vector: Tensor | None = None
    """The posterior mean; None before the fit."""

    _prior_groups: Groups | None = None
    """Groups of the prior other than the layers."""

    _fingerprint: dict[str, Any]
    _mark: list[Any]
    """Fingerprint and mark of the network at the fit."""

    _example: Any = None
    _function: dict[str, Any] | None = None
    """Two examples' inputs of the fit, and the network's function as a probe knows it (None while nobody asked)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = checked_options(cls.__init__)  # type: ignore[method-assign]

    @checked_options
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
        self.noise_per_output = isinstance(likelihood, str) and likelihood == "regression"
        self.network = Network(model, parameters, self.likelihood.arrange)
        self.model = self.network.model  # what fingerprints and loading are about
        self.backend = resolve_backend(backend)
        self.memory_budget = memory_budget
        self._prior_precision = self._checked_precision(prior_precision)
        self._prior_mean = as_hyperparameter(prior_mean, copy=True)
        self._temperature = check_positive(temperature, "temperature")
        single = self._prior_precision.numel() == self._prior_mean.numel() == 1
        if single or self.is_last_layer:  # whose size is only certain once a batch has gone through the network
            first = self._prior_precision.flatten()[:1], self._prior_mean.flatten()[:1]
            GaussianPrior.create(*first, torch.zeros(1, dtype=torch.long))
        else:
            self.prior()
        self.n_data = 0
        self.n_outputs = 0
        self.group: Group | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether there has been a successful :meth:`fit`."""
        return self._vector is not None

    def check_draws(self, **numbers: int) -> None:
        """Raise :class:`ConfigurationError` for no positive number, or too many parameter vectors for the memory."""
        for name, value in numbers.items():
            checks.count(name, value)
        size = self.n_parameters * self.network.dtype.itemsize
        for name, n in numbers.items():
            what, fix = f"{n} vectors of {self.n_parameters:,} parameters", f"Lower {name}, or select fewer parameters."
            require_free(n * size, what, self.network.device, fix)

    def require_vectors(self, n: int, what: str) -> None:
        """Raise :class:`ConfigurationError` unless a given memory budget holds n parameter vectors for something."""
        size, what = n * self.n_parameters * self.network.dtype.itemsize, f"{what} ({n} parameter vectors)"
        require_room(size, what, self.network.device, if_given=True)

    def prior(self) -> GaussianPrior:
        """The prior at the current precision."""
        return GaussianPrior.create(self._prior_precision, self._prior_mean, self._group_index())

    def _group_index(self) -> Tensor:
        """The prior group of each entry, ``[P]``; the same tensor until the groups change."""
        return self.network.layer_index() if self._prior_groups is None else self._prior_groups.index

    @property
    def prior_groups(self) -> Groups:
        """Which entries share one of the precisions of a prior precision ``[G]``: the layers, unless others were set.

        Raises:
            ConfigurationError: Setting groups of other parameters, or of a number that does not fit the precision.
        """
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
        GaussianPrior.create(value, self._prior_mean, self._group_index())
        self._prior_precision, self.link, self.covariance_scale = precision, None, 1.0

    def _checked_precision(self, value: float | Tensor) -> Tensor:
        precision = as_hyperparameter(value, copy=True)  # the caller may go on writing to theirs
        if self.one_precision and precision.numel() > 1:
            what = f"One precision scales all entries of a {type(self).__name__}."
            raise ConfigurationError(what, expected="a single prior precision", got=f"{precision.numel()} of them")
        return precision

    @property
    def prior_mean(self) -> Tensor:
        """Mean of the prior: 0-d or ``[P]``."""
        return self._prior_mean

    @property
    def temperature(self) -> Tensor:
        """Divides the log-likelihood and the curvature."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._temperature = check_positive(value, "temperature")

    @property
    def noise_std(self) -> Tensor | None:
        """The Gaussian likelihood's noise level: 0-d or ``[C]``; None for other likelihoods.

        A number that is set after a fit with several levels becomes each of them.
        """
        return self.likelihood.noise_std

    @noise_std.setter
    def noise_std(self, value: float | Tensor) -> None:
        changed, several = self.likelihood.with_noise(value), self.likelihood.n_noise
        if self._vector is not None and changed.noise_std is not None and changed.noise_std.ndim == 0 and several > 1:
            changed = changed.with_noise(changed.noise_std.expand(several))
        if self._vector is not None and changed.n_noise != self.likelihood.n_noise:
            what = "The curvature was fitted with another number of noise levels."
            fix = "Fit a posterior with lp.Gaussian(noise_std=...) of that shape."
            raise ConfigurationError(what, expected=f"{self.likelihood.n_noise}", got=f"{changed.n_noise}", fix=fix)
        self.likelihood, self.noise_per_output = changed, False

    def share_hyperparameters(self, other: Configured) -> None:
        """Take over another posterior's prior, temperature and likelihood, and its network."""
        self.network, self.model, self.likelihood = other.network, other.model, other.likelihood
        self._prior_precision, self._prior_mean = other._prior_precision, other._prior_mean
        self._temperature, self._prior_groups = other._temperature, other._prior_groups

    def hyperparameter_digests(self) -> dict[str, str]:
        """Each hyperparameter as a short text: its value, or shape and hash."""
        noise = self.noise_std
        return {
            "prior_precision": io.digest(self.prior_precision),
            "prior_mean": io.digest(self._prior_mean),
            "temperature": io.digest(self.temperature),
            "noise_std": "none" if noise is None else io.digest(noise),
        }

    def describe_groups(self) -> str:
        """A line on the prior's groups for a summary; empty where they are the layers."""
        groups, precision = self._prior_groups, self._prior_precision
        if groups is None:
            return ""
        names = [name or "(root)" for name in groups.names]
        if precision.ndim == 0 or len(precision) != len(names):
            return f"prior groups {groups.name}: {', '.join(names)}"
        each = [f"{name} {value:.3g}" for name, value in zip(names, precision.tolist(), strict=True)]
        return f"prior precisions of {groups.name}: {', '.join(each)}"

    @property
    def memory_budget(self) -> int | None:
        """Bytes that intermediate results may take; None for a quarter of what is free. Accepts ``"2 GiB"``, too."""
        return self._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | str | None) -> None:
        self._memory_budget = None if value is None else parse_bytes(value)

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
    def is_last_layer(self) -> bool:
        """Whether the selection is ``"last_layer"``."""
        return isinstance(self.network.selection, str) and self.network.selection == "last_layer"

    def options(self) -> dict[str, Any]:
        """The method's own constructor arguments, in JSON's terms."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What identifies this posterior besides the network's weights and the data, in JSON's terms."""
        masks = {s.name: io.digest(s.mask) for s in self.network.selected if s.mask is not None}
        return {
            "class": type(self).__name__,
            "options": self.options(),
            "likelihood": {name: value for name, value in self.likelihood.config().items() if name != "noise_std"},
            "backend": self.backend.config(),
            "selected parameters": list(self.parameter_names),
            "masks": masks,
            **self.hyperparameter_digests(),
        }

    @property
    def mean(self) -> Tensor:
        """The posterior mean ``[P]``, which a method whose mean is another sets; NotFittedError before a fit."""
        self.require_fit()
        assert self._vector is not None
        return self._vector

    @mean.setter
    def mean(self, vector: Tensor) -> None:
        self._vector = vector

    def require_fit(self, *, thorough: bool = False) -> None:
        """Look, once in each public method, whether there is a fit that still holds.

        Found are optimizer steps, ``load_state_dict``, assignment of a tensor or its ``.data``, and what else torch
        counts as a change. It does not count writes *into* ``.data``, by NumPy or a custom kernel: those are found in
        tensors of up to 4096 entries, in larger ones if one of about 512 evenly spaced entries changes, and all with
        ``thorough``, which reads every entry (of a base beneath adapters some), as :meth:`save` does.

        Raises:
            NotFittedError: There is none.
            ModelChangedError: The network's weights, modules or their options are no longer those of the fit.
        """
        if self._vector is None:
            what = f"This {type(self).__name__} has not been fitted."
            raise NotFittedError(what, expected="fit(loader) first", got="no data so far")
        if self.network.kept.get("mark") is self._mark and not thorough:  # looked at by the method that runs
            return
        with turn(self.network.model):
            mark = self.network.mark()
            if mark == self._mark and not thorough:
                self._mark = mark
                return
            try:
                io.compare_fingerprint(self._fingerprint, self.model, modules=True)
            except CheckpointError as error:
                what = "The network is no longer the one that the posterior was fitted on."
                expected = "the weights and buffers at the time of fit()"
                fix = "Call fit() again after training, or give the posterior a copy of the model."
                raise ModelChangedError(what, expected=expected, got=str(error), fix=fix) from error
            self._mark = mark

    def zero_curvature(self) -> SelectionError:
        """The error where the data say nothing at all about the selected parameters."""
        names = self.parameter_names
        what = f"The curvature of all selected parameters is zero: {', '.join(names[:4])}{' …' * (len(names) > 4)}."
        expected = "parameters that the outputs depend on, and some target that is not ignored"
        got = f"{len(names)} parameters without influence on the likelihood of the data"
        fix = "Select parameters on the path to the outputs. If these are, look for ignored targets, units that are "
        fix += "never active, detached or rounded outputs, and logits so large that each probability is exactly 0 or 1."
        return SelectionError(what, expected=expected, got=got, fix=fix)

    def remember_weights(self) -> None:
        """Note the network's present weights as those of the fit."""
        self._mark, self._fingerprint = self.network.mark(), io.fingerprint(self.model)
