"""Counts with the logarithm of the rate as output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import NegativeBinomial
from torch.distributions import Poisson as PoissonDistribution

from laplace_plus.likelihoods.base import Marginal, unknown_link, variance_of, widen
from laplace_plus.likelihoods.elementwise import Elementwise
from laplace_plus.likelihoods.sampling import draw_by


@final
@dataclass(frozen=True)
class Poisson(Elementwise):
    """``p(y | f) = Poisson(exp f)``, independent over the ``C`` outputs of a row.

    Targets are counts (integer or whole floating numbers) of the outputs' shape; ``[B, *]`` also if ``C`` is 1.

    Args:
        output_axis: The axis of the log-rates in the network's output, and of their targets.

    Example:
        >>> Poisson().log_density(torch.zeros(1, 1), torch.tensor([[0.0]]))
        tensor([-1.])
    """

    output_axis: int = -1
    config_name = "poisson"
    links = ("exact", "mc")
    wrong_targets = "Some targets are not counts."
    valid_targets = "whole numbers, 0 or more"
    hint = 'Use likelihood="regression" for real numbers.'

    def is_valid(self, targets: Tensor) -> Tensor:
        """Whole numbers from 0."""
        counts = targets.double()
        return (counts >= 0) & (counts == counts.floor()) & torch.isfinite(counts)

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c y_c f_c - exp f_c - log y_c!``, ``[N]``."""
        outputs = widen(outputs)
        return (targets * outputs - outputs.exp() - torch.lgamma(targets + 1)).sum(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``exp f - y``, ``[N, C]``."""
        return widen(outputs).exp() - targets

    def root_diagonal(self, outputs: Tensor) -> Tensor:
        """``exp(f/2)``."""
        return (0.5 * widen(outputs)).exp()

    def distribution(self, outputs: Tensor) -> PoissonDistribution:
        """Poisson distributions with batch shape ``[..., C]``."""
        return PoissonDistribution(widen(outputs).exp(), validate_args=False)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Counts ``[..., C]``, floating."""
        return draw_by(torch.poisson, widen(outputs).exp(), generator)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: the exact moments of a log-normal rate, ``E[y] = exp(m + v/2)`` and so on.

        The log-normal mixture of Poisson distributions has no closed density; ``distribution`` is the negative binomial
        (a gamma mixture) of the same mean and variance. It is computed in ``float64``, because for small ``v`` its
        log-density is a difference of large numbers.
        """
        if link != "exact":
            raise unknown_link(self, link)
        variance = variance_of(mean, covariance)
        rate = (mean + 0.5 * variance).exp()
        spread = variance.expm1()  # relative variance of the rate
        # The dispersion's floor changes the distribution's variance by at most 1e-6 of the squared mean.
        dispersion = spread.double().clamp_min(1e-6)
        log_odds = mean.double() + 0.5 * variance.double() + dispersion.log()
        distribution = NegativeBinomial(1 / dispersion, logits=log_odds, validate_args=False)
        epistemic = spread * rate.square()
        return Marginal(rate, epistemic + rate, distribution, epistemic, rate)
