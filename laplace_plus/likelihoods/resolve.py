"""Likelihoods from names, configurations and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods.base import LAST_AXIS, Likelihood
from laplace_plus.likelihoods.categorical import Categorical
from laplace_plus.likelihoods.elementwise import Bernoulli, Poisson
from laplace_plus.likelihoods.gaussian import Gaussian, GivenNoise, HeteroscedasticGaussian

_BY_NAME: dict[str, Callable[..., Likelihood]] = {
    "classification": Categorical,
    "regression": Gaussian,
    "binary": Bernoulli,
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic_gaussian": HeteroscedasticGaussian,
    "given_noise": GivenNoise,
    "poisson": Poisson,
}

Density = Callable[[Tensor, Any], Tensor]


@final
class LogDensity(Likelihood):
    """A likelihood with a user-defined log-density.

    Args:
        function: ``(outputs [N, C], targets [N, ...]) -> [N]``, the log-density of every row, all constants included,
            twice differentiable in the outputs. Of several targets, it gets all of them as the loader has them.
        distribution: ``outputs [..., C] -> torch.distributions.Distribution``; without it predictions have a mean (the
            network's outputs) and a log-density, but no variance and no entropy.
        output_axis: The axis of the outputs in the network's output.
        couples_rows: Whether rows depend on each other, as in rankings and Cox's partial likelihood: the function's
            value ``[N]``, or 0-d, is summed to the log-density of the batch, which is one observation.
        positive_part: Whether the curvature is the positive part of a Hessian that need not be positive semi-definite.
        weighted: Whether targets come with weights; see :class:`~laplace_plus.Likelihood`.

    Raises:
        ConfigurationError: A distribution of single rows that depend on each other.

    Example:
        >>> cauchy = LogDensity(lambda f, y: torch.distributions.Cauchy(f, 1.0).log_prob(y).sum(-1))
        >>> cauchy.log_density(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([-1.1447])
    """

    def __init__(
        self,
        function: Density,
        distribution: Callable[[Tensor], Distribution] | None = None,
        *,
        output_axis: int = LAST_AXIS,
        couples_rows: bool = False,
        positive_part: bool = False,
        weighted: bool = False,
    ):
        self._function, self._distribution, self.output_axis = function, distribution, output_axis
        self.couples_rows, self.positive_part, self.weighted = couples_rows, positive_part, weighted
        if couples_rows and distribution is not None:
            what, got = "Rows that depend on each other have no distribution each.", "couples_rows=True"
            raise ConfigurationError(what, expected="one of distribution= and couples_rows=True", got=got)

    def __repr__(self) -> str:
        return f"LogDensity({getattr(self._function, '__qualname__', self._function)})"

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The function's value, ``[N]``; one number for a batch is shared by its rows."""
        value = self._function(outputs, targets)
        return value.expand(len(outputs)) / len(outputs) if self.couples_rows and value.dim() == 0 else value

    def distribution(self, outputs: Tensor) -> Distribution:
        """``p(y|f)``; :class:`UnsupportedError` if it was not given."""
        if self._distribution is None:
            return super().distribution(outputs)
        return self._distribution(outputs)


def register_likelihood(name: str, make: Callable[..., Likelihood]) -> None:
    """Make a likelihood known by name, so that saved posteriors with it load without passing it.

    Args:
        name: The ``config_name`` of the class.
        make: The class; it is called with the other entries of :meth:`Likelihood.config`.
    """
    _BY_NAME[name] = make


def resolve_likelihood(likelihood: str | Likelihood | Density) -> Likelihood:
    """The likelihood for a ``likelihood`` argument.

    Args:
        likelihood: ``"classification"``, ``"regression"`` or ``"binary"``; a :class:`Likelihood`; or a log-density
            ``(outputs [N, C], targets) -> [N]``.

    Raises:
        ConfigurationError: If it is none of these.

    Example:
        >>> resolve_likelihood("regression")
        Gaussian(noise_std=1.0)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in _BY_NAME:
        return _BY_NAME[likelihood]()
    if callable(likelihood) and not isinstance(likelihood, (type, torch.nn.Module)):
        return LogDensity(likelihood)
    fix = "Choose one of these."
    if isinstance(likelihood, type):
        fix = f"Pass {likelihood.__name__}()."
    if isinstance(likelihood, torch.nn.Module):
        fix = 'Name the likelihood of the loss module: "classification" for CrossEntropyLoss, "regression" for MSELoss.'
    known = ", ".join(map(repr, _BY_NAME)) + ", a Likelihood or a log-density"
    raise ConfigurationError("Unknown likelihood.", expected=known, got=repr(likelihood), fix=fix)


def likelihood_from_config(config: Mapping[str, Any]) -> Likelihood:
    """Rebuild a likelihood from its :meth:`Likelihood.config`.

    Args:
        config: What ``config()`` returned, also after a round trip through JSON.

    Raises:
        ConfigurationError: If it describes a custom likelihood, which only code can rebuild, or no likelihood.

    Example:
        >>> likelihood_from_config(Categorical(ignore_index=255).config())
        Categorical(ignore_index=255, output_axis=-1, weight=None, label_smoothing=0.0, weighted=False)
    """
    options = dict(config)
    name = options.pop("name", None)
    if name not in _BY_NAME:
        what, known = "A custom likelihood must be passed itself.", ", ".join(map(repr, _BY_NAME))
        raise ConfigurationError(what, expected=known, got=options.get("class", repr(name)))
    return _BY_NAME[name](**options)
