"""Posteriors around a tangent Gaussian, which share its network and its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.evidence import Tuner, TuningResult
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.network import unwrap
from laplace_plus.posteriors.base import Posterior
from laplace_plus.priors import GaussianPrior


def _of_both(name: str) -> property:
    """A hyperparameter that is read from the tangent, and set there."""

    def get(posterior: AroundTangent) -> Any:
        return getattr(posterior.tangent, name)

    def set_(posterior: AroundTangent, value: Any) -> None:
        setattr(posterior.tangent, name, value)
        posterior._share()

    return property(get, set_, doc=getattr(Posterior, name).__doc__)


class AroundTangent(Posterior):
    """A posterior with the hyperparameters of another one, its tangent, wherever they are set or tuned.

    Attributes:
        tangent: The other posterior.
    """

    tangent: Posterior

    def _share(self) -> None:
        """Take over the tangent's network and hyperparameters, which may have been set or tuned there."""
        self.backend = self.tangent.backend
        self.share_hyperparameters(self.tangent)

    @override
    def require_fit(self) -> None:
        self._share()
        super().require_fit()

    @override
    def prior(self) -> GaussianPrior:
        self._share()
        return super().prior()

    prior_groups = _of_both("prior_groups")
    prior_precision = _of_both("prior_precision")
    temperature = _of_both("temperature")
    noise_std = _of_both("noise_std")

    def log_marginal_likelihood(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tangent's evidence, in nats; see its own method."""
        self.require_fit()
        return self._of_tangent("log_marginal_likelihood")(*args, **kwargs)

    @property
    def tuners(self) -> Mapping[str, type[Tuner]]:  # type: ignore[override]
        """Those of the tangent."""
        return self.tangent.tuners

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What the tuner finds for the tangent."""
        return self.tangent.run_tuner(tuner, progress=progress, generator=generator)

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        """Set the tangent's hyperparameters; samples are drawn anew when next needed."""
        self.tangent.apply_tuning(result)
        self.tuning = result
        self._share()

    def _of_tangent(self, name: str) -> Any:
        method = getattr(self.tangent, name, None)
        if method is None:
            raise UnsupportedError(
                f"{type(self.tangent).__name__}, the tangent, has no {name}.",
                expected="a Gaussian posterior such as lp.Full or lp.KFAC",
                got=type(self.tangent).__name__,
            )
        return method


def no_tangent(got: Any) -> ConfigurationError:
    """The error for a tangent of another kind."""
    return ConfigurationError(
        "The tangent is a Gaussian posterior.",
        expected="a class such as lp.Full, its name, or a fitted posterior of this network",
        got=repr(got),
    )


def check_given(tangent: Posterior, model: nn.Module, likelihood: Any, options: dict[str, Any]) -> None:
    """Raise :class:`ConfigurationError` unless a fitted posterior can serve as the tangent, without ``options``."""
    if isinstance(tangent, AroundTangent):
        raise no_tangent(tangent)
    if not tangent.is_fitted or tangent.network.model is not unwrap(model):
        raise ConfigurationError(
            "The tangent has not been fitted to this network.",
            expected="a posterior of the same model, after fit(), or a class",
            got=repr(tangent),
        )
    if type(resolve_likelihood(likelihood)) is not type(tangent.likelihood):
        raise ConfigurationError(
            "The tangent is of another likelihood.",
            expected=repr(tangent.likelihood),
            got=repr(resolve_likelihood(likelihood)),
        )
    if set(options) - {"memory_budget"}:
        raise ConfigurationError(
            "A fitted tangent has its own settings.",
            expected="no options besides it",
            got=", ".join(sorted(options)),
            fix="Set them on the tangent, or pass its class.",
        )
