"""Predictions of a whole set, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.special import entr

from laplace_plus import metrics
from laplace_plus.predictive import Prediction

Predict = Callable[[Any], Prediction]
"""From the inputs of a batch to the predictive distribution of its targets."""


@dataclass(frozen=True)
class Classified:
    """Predicted classes of N targets, ``probabilities [N, C]`` and ``targets [N]``."""

    probabilities: Tensor
    targets: Tensor

    def scores(self) -> dict[str, float]:
        """Accuracy, mean negative log-likelihood, Brier score and expected calibration error."""
        names = ("accuracy", "negative_log_likelihood", "brier_score", "expected_calibration_error")
        return {name: float(getattr(metrics, name)(self.probabilities, self.targets)) for name in names}

    def uncertainty(self) -> Tensor:
        """Entropy of each prediction in nats, ``[N]``."""
        return entr(self.probabilities).sum(-1)


@dataclass(frozen=True)
class Regressed:
    """Predicted numbers of N examples and their ``targets``, all ``[N, D]``; the variance includes observation noise.

    ``log_density [N]`` is that of the targets under the predictive distribution.
    """

    mean: Tensor
    variance: Tensor
    log_density: Tensor
    targets: Tensor

    def scores(self) -> dict[str, float]:
        """Root mean squared error, mean negative log-likelihood, and CRPS of the Gaussian with these moments."""
        return {
            "root_mean_squared_error": float(metrics.root_mean_squared_error(self.mean, self.targets)),
            "negative_log_likelihood": -float(self.log_density.mean()),
            "crps": float(metrics.crps_gaussian(self.mean, self.variance, self.targets)),
        }

    def uncertainty(self) -> Tensor:
        """Variance of each prediction, summed over the outputs, ``[N]``."""
        return self.variance.sum(-1)
