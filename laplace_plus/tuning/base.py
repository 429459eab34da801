"""Tuners: values that choose a posterior's prior precision and, where there is one, its noise level.

A tuner is a frozen dataclass with one method, ``tune(posterior, *, progress, generator) -> TuningResult``. It asks and
changes nothing; ``posterior.fit_prior_precision(tuner)`` applies the result. Each class of posteriors lists the tuners
that it supports in ``tuners``, by shorthand; the first of them is the default where none is called ``"auto"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, NoGainWarning, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.priors import Groups


@dataclass(frozen=True)
class TuningResult:
    """What a tuning found, and how it ended.

    Attributes:
        method: Name of the method.
        prior_precision: 0-d, ``[G]`` or ``[P]``.
        noise_std: 0-d or ``[C]``; None if there is none or it was not tuned.
        value: The log evidence in nats, or minus the mean held-out loss.
        converged: Whether the tolerance was met; for a grid, whether the best point lies within it.
        gradient_norm: Largest derivative of the evidence by a logarithm of a hyperparameter (away from bounds); NaN for
            methods without one.
        n_evaluations: How often the objective was evaluated.
        groups: Which entries share a precision ``[G]``; None for the groups that the posterior had before.
        vector: θ*, the tangent model's optimum ``[P]``, for tuners by its evidence; else None.
        predictive_mean: ``"tangent"`` if linearised predictions are to be around θ*, else ``"network"``.
        link: What ``predictive`` is to take by default; None for the likelihood's first.
        covariance_scale, output_temperature: Those of the posterior.
        sem: Standard error of the value, where random vectors estimate it.
        precision_sem: That of the log precision which is known worst; above 0.01 nothing has converged.
        settings: Attributes of the posterior that stand in for a prior precision, and their chosen values.
    """

    method: str
    prior_precision: Tensor
    noise_std: Tensor | None
    value: float
    converged: bool
    gradient_norm: float = math.nan
    n_evaluations: int = 1
    groups: Groups | None = field(default=None, kw_only=True)
    vector: Tensor | None = field(default=None, kw_only=True)
    predictive_mean: str = field(default="network", kw_only=True)
    link: str | None = field(default=None, kw_only=True)
    covariance_scale: float = field(default=1.0, kw_only=True)
    output_temperature: float = field(default=1.0, kw_only=True)
    sem: float = field(default=0.0, kw_only=True)
    precision_sem: float = field(default=0.0, kw_only=True)
    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


class Tuner(Protocol):
    """Chooses hyperparameters of a posterior; implementations are frozen dataclasses, whose fields are its options."""

    def tune(self, posterior: Any, *, progress: bool = False, generator: torch.Generator | None = None) -> TuningResult:
        """Choose hyperparameters; the posterior stays as it is.

        Args:
            posterior: A fitted posterior.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for tuners that draw samples.
        """


Tunable = Any
"""A fitted Gaussian posterior: tuners read its network, n_data, prior_groups, training_data, prior_precision,
temperature, predictive_mean, tuning and laplace_model()."""


@dataclass(frozen=True)
class VariationalBound:
    """Maximises the evidence lower bound of a variational posterior over its hyperparameters, from where they are.

    Of :class:`~laplace_plus.VIKING` these are α and σ_im, as its ``fit`` ends with; its mean stays. Of
    :class:`~laplace_plus.VariationalLastLayer` they are α, noise and the Gaussians.

    Args:
        data: The training data; by default the loaders of the fit.
        tune_noise: Whether to tune Gaussian noise, which only the last layer does; None for whenever it can.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    tune_noise: bool | None = None

    def tune(self, posterior: Any, *, progress: bool = False, generator: torch.Generator | None = None) -> TuningResult:
        """Maximise the bound; arguments as for :class:`~laplace_plus.Tuner`.

        Raises DataError for other data than those of the fit, or none; warns (ConvergenceWarning) as the fit does.
        """
        return posterior.run_tuner(self, progress=progress, generator=generator)


def resolve_tuner(owner: str, tuners: Mapping[str, type[Any]], tuner: Any, options: Mapping[str, Any]) -> Any:
    """The tuner that a value, or a shorthand with options, stands for; ``tuners`` are those of the class ``owner``.

    ``"auto"`` is the tuner of that name, or the first; an option that only the first has asks for the first. A class
    with ``"auto"`` but no ``"marginal_likelihood"`` takes the former for it, with a warning. An option None means
    its default. ``method`` is another name for the shorthand, and ``evidence="tangent"`` for the tuner ``"tangent"``.
    UnsupportedError for a tuner that the class does not support, or if it supports none;
    ConfigurationError for an unknown shorthand or option, or options beside a tuner.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(tuner, str) or not tuners:
        if type(tuner) not in tuners.values():
            types = ", ".join(dict.fromkeys(f"lp.{cls.__name__}" for cls in tuners.values()))
            what = f"{owner} cannot be tuned by {tuner!r}." if tuners else f"{owner} has no prior to tune."
            raise UnsupportedError(what, expected=f"{types}, or a shorthand" if tuners else "a class with tuners")
        if given:
            what = f"Options belong to the tuner itself, lp.{type(tuner).__name__}(...)."
            raise ConfigurationError(what, expected="no options besides a tuner", got=", ".join(given))
        return tuner
    tuner = given.pop("method", "auto") if tuner == "auto" else tuner
    name, auto = tuner, tuners.get("auto")
    if tuner == "auto":
        known = auto is not None and given.keys() <= {item.name for item in fields(auto)}
        name = "auto" if known else next(iter(tuners))  # what only the first tuner knows asks for that
    if "tangent" in tuners and tuner in ("auto", "marginal_likelihood", "tangent") and "evidence" in given:
        kinds = ("laplace", "tangent") if "marginal_likelihood" in tuners else ("tangent",)
        evidence = given.pop("evidence")
        checks.choice("evidence", evidence, kinds)
        name = {"tangent": "tangent", "laplace": "marginal_likelihood"}[evidence]
    if name == "marginal_likelihood" and name not in tuners and auto is not None:
        warn(f"{owner} has no marginal likelihood that tunes it, and is tuned as by default.", NoGainWarning)
        name = "auto"
    checks.options(owner, [name], ("auto", *tuners), "tuner (unknown method)")
    cls = tuners[name]
    own = [item.name for item in fields(cls)]
    checks.options(f"{cls.__name__}, the tuner {name!r} of {owner},", given, own)
    return cls(**given)


def require_only(owner: str, tuner: Any, *names: str) -> None:
    """Raise :class:`ConfigurationError` if a tuner has other options than these set, which a class does without."""
    given = [item.name for item in fields(tuner) if getattr(tuner, item.name) is not item.default]
    others = [name for name in given if name not in names]
    if others:
        what = f"{owner} does not take these options of {type(tuner).__name__}."
        raise ConfigurationError(what, expected=", ".join(names) or "none", got=", ".join(others))


def tunes_noise(likelihood: Likelihood, tune_noise: bool | None) -> bool:
    """Whether to tune the noise, by default wherever there is any; ``ConfigurationError`` if there is none to tune."""
    if tune_noise and likelihood.noise_std is None:
        raise ConfigurationError("There is no noise to tune.", expected="Gaussian", got=type(likelihood).__name__)
    return likelihood.noise_std is not None if tune_noise is None else tune_noise
