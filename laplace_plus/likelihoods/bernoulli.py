"""Binary targets with the log-odds as output; several outputs are independent binary targets.

The closed-form link ``"probit"`` is MacKay's (1992, "The evidence framework applied to classification networks")
``sigmoid(m / √(1 + π/8 v))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.nn.functional import logsigmoid

from laplace_plus.likelihoods.base import Marginal, OutputCurvature, unknown_link, variance_of, widen
from laplace_plus.likelihoods.elementwise import Elementwise
from laplace_plus.likelihoods.sampling import draw_by


@final
@dataclass(frozen=True)
class Bernoulli(Elementwise):
    """``p(y_c = 1 | f) = sigmoid(f_c)``, independent over the ``C`` outputs of a row.

    Targets are zeros and ones (integer, boolean or floating) of the outputs' shape; ``[B, *]`` also if ``C`` is 1.

    Args:
        output_axis: The axis of the logits in the network's output, and of their targets.

    Example:
        >>> Bernoulli().log_density(torch.zeros(1, 1), torch.tensor([[1.0]])).exp()
        tensor([0.5000])
    """

    output_axis: int = -1
    config_name = "bernoulli"
    links = ("probit", "mc")
    is_classifier = True
    wrong_targets = "There are binary targets other than 0 and 1."
    valid_targets = "exactly 0 or 1"
    hint = 'Use likelihood="classification" for one class out of several.'

    def is_valid(self, targets: Tensor) -> Tensor:
        """Zeros and ones."""
        return (targets == 0) | (targets == 1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``sigmoid(f) - y``, ``[N, C]``."""
        sign = 2 * targets - 1
        return -sign * (-sign * widen(outputs)).sigmoid()  # no cancellation where p is close to y

    def root_diagonal(self, outputs: Tensor) -> Tensor:
        """``√(p (1 - p))``."""
        outputs = widen(outputs)
        return (0.5 * (logsigmoid(outputs) + logsigmoid(-outputs))).exp()

    def output_curvature(self, outputs: Tensor, weight: Tensor) -> OutputCurvature:
        """``diag p (1 - p)``; zero for ignored rows."""
        scales = weight.unsqueeze(-1) * self.root_diagonal(outputs).square()
        return OutputCurvature(scales, scales, coupled=False)

    def torch_loss(self) -> tuple[torch.nn.Module, float]:
        """Binary cross-entropy."""
        return torch.nn.BCEWithLogitsLoss(reduction="sum"), 1.0

    def distribution(self, outputs: Tensor) -> BernoulliDistribution:
        """Bernoulli distributions with batch shape ``[..., C]``."""
        return BernoulliDistribution(logits=widen(outputs), validate_args=False)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Zeros and ones ``[..., C]``, floating."""
        return draw_by(torch.bernoulli, widen(outputs).sigmoid(), generator)

    def class_probabilities(self, mean: Tensor) -> Tensor:
        """``[1 - p, p]`` of every output by itself, ``[N C, 2]``."""
        p = mean.reshape(-1)
        return torch.stack([1 - p, p], -1)

    def mixture(self, outputs: Tensor) -> BernoulliDistribution:
        """The Bernoulli distributions of the average probabilities, every output by itself."""
        outputs = widen(outputs)
        logits = logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)
        return BernoulliDistribution(logits=logits, validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"probit"``; needs variances only."""
        if link != "probit":
            raise unknown_link(self, link)
        logits = mean / (1 + math.pi / 8 * variance_of(mean, covariance)).sqrt()
        distribution = BernoulliDistribution(logits=logits, validate_args=False)
        return Marginal(logits.sigmoid(), logits.sigmoid() * (-logits).sigmoid(), distribution)
