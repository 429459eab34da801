"""Predictions gathered over a test set, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import batches, metrics
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import evaluation_mode
from laplace_plus.predictive import Prediction, from_samples

Predict = Callable[[Any], Prediction]
"""From the inputs of a batch to the predictive distribution of its targets."""


@dataclass(frozen=True)
class Classified:
    """Predicted classes of N targets (examples, or tokens or pixels of them).

    Attributes:
        probabilities: ``[N, C]``, rows sum to one; a yes-or-no target has the two columns no and yes.
        targets: ``[N]`` class indices.
    """

    probabilities: Tensor
    targets: Tensor

    def scores(self) -> dict[str, float]:
        """Accuracy, mean negative log-likelihood, Brier score and expected calibration error."""
        return {
            "accuracy": float(metrics.accuracy(self.probabilities, self.targets)),
            "negative_log_likelihood": float(metrics.negative_log_likelihood(self.probabilities, self.targets)),
            "brier_score": float(metrics.brier_score(self.probabilities, self.targets)),
            "expected_calibration_error": float(metrics.expected_calibration_error(self.probabilities, self.targets)),
        }

    def doubt(self) -> Tensor:
        """Uncertainty of each prediction, ``[N]``: the entropy of its probabilities, in nats."""
        return _entropy(self.probabilities)


@dataclass(frozen=True)
class Regressed:
    """Predicted numbers of N examples.

    Attributes:
        mean: ``[N, D]``.
        variance: ``[N, D]``, observation noise included.
        log_density: ``[N]``, of the targets under the predictive distribution.
        targets: ``[N, D]``.
    """

    mean: Tensor
    variance: Tensor
    log_density: Tensor
    targets: Tensor

    def scores(self) -> dict[str, float]:
        """Root mean squared error, mean negative log-likelihood, and CRPS of the Gaussian with these moments."""
        return {
            "root_mean_squared_error": float(metrics.root_mean_squared_error(self.mean, self.targets)),
            "negative_log_likelihood": float(-self.log_density.mean()),
            "crps": float(metrics.crps_gaussian(self.mean, self.variance, self.targets)),
        }

    def doubt(self) -> Tensor:
        """Uncertainty of each prediction, ``[N]``: its variance, summed over the outputs."""
        return self.variance.sum(-1)


def point_prediction(model: nn.Module, likelihood: Likelihood) -> Predict:
    """The trained network's own prediction ``p(y | f(x))``, with which posteriors are compared."""

    def predict(inputs: Any) -> Prediction:
        with evaluation_mode(model), torch.no_grad():
            outputs = likelihood.arrange(batches.output_tensor(batches.call(model, inputs)))
        return from_samples(likelihood, outputs[None])

    return predict


def gather(
    predict: Predict, likelihood: Likelihood, data: Iterable[Any], *, device: str, progress: bool, description: str
) -> Classified | Regressed:
    """Predicts all of a data set.

    Args:
        predict: From inputs to predictions.
        likelihood: What the targets are; targets of a classifier are classified, all others regressed.
        data: Batches of inputs and targets.
        device: Where to compute.
        progress: Whether to show a progress bar.
        description: What the bar is called.

    Returns:
        Predictions and targets in float64 on the processor. Targets that the likelihood ignores are left out.
    """
    parts: list[tuple[Tensor, ...]] = []
    for batch in batches.iterate(data, device=device, progress=progress, description=description):
        prediction = predict(batch.inputs)
        _, targets, weight = likelihood.rows(prediction.functional_mean, batch.target)
        kept = (weight > 0).cpu()
        if likelihood.is_classifier:
            probabilities, labels = _plain(likelihood.class_probabilities(prediction.mean)), targets.cpu().reshape(-1)
            kept = kept.repeat_interleave(len(labels) // len(kept))
            parts.append((probabilities[kept], labels[kept].long()))
        else:
            mean, variance = _rows(prediction.mean)[kept], _rows(prediction.variance)[kept]
            log_density = _plain(prediction.log_prob(batch.target)).reshape(-1)[kept]
            parts.append((mean, variance, log_density, _plain(targets)[kept].reshape(mean.shape)))
    kind = Classified if likelihood.is_classifier else Regressed
    return kind(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def doubts(
    predict: Predict, likelihood: Likelihood, data: Iterable[Any], *, device: str, progress: bool, description: str
) -> Tensor:
    """Uncertainty of each prediction, ``[N]``, for data whose targets have no meaning.

    Arguments as for :func:`gather`; the same as ``gather(…).doubt()`` for data with targets.
    """
    parts = []
    for batch in batches.iterate(data, device=device, progress=progress, description=description):
        prediction = predict(batch.inputs)
        if likelihood.is_classifier:
            parts.append(_entropy(_plain(likelihood.class_probabilities(prediction.mean))))
        else:
            parts.append(_rows(prediction.variance).sum(-1))
    return torch.cat(parts)


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def _rows(values: Tensor) -> Tensor:
    """From ``[B, *, C]`` to ``[N, C]``."""
    return _plain(values).reshape(-1, values.shape[-1])


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
