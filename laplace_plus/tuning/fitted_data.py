"""Whether data are those that a posterior was fitted to, and the training prior that a weight decay stands for.

A fit keeps the likelihood's additive statistics at the network's outputs, such as ``Σ log p(yₙ|f(xₙ))``. Any later pass
over the data has outputs and targets at hand, and adds up the same statistics. The comparison detects other inputs, and
targets that belong to other inputs, also where the number of examples agrees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import Network, ambient_autocast
from laplace_plus.tuning.laplace import LaplaceModel

ACCURACY = 1e-9
"""Relative accuracy of outputs to which statistics are compared: 5e6 float64 roundings; coarser in float32."""


class FittedData:
    """Adds up the likelihood's statistics of a pass over data, and compares them with those of the fit.

    Attributes:
        n_examples: Number of examples so far.
        n_rows: Number of flattened observations (examples, or positions) that are not ignored.
        n_entries: Number of terms in the mean that torch's losses for classes take.
    """

    def __init__(self, model: LaplaceModel, network: Network, n_data: int):
        self._model, self._network, self._n_data = model, network, n_data
        self._statistics = torch.zeros_like(model.statistics)
        self._epsilon = self._slope = self._square = 0.0
        self.n_examples, self.n_rows, self.n_entries = 0, 0.0, 0.0

    def add(self, outputs: Tensor, target: Any) -> None:
        """Add a batch's outputs ``[B, *, C]`` and its target, which must be valid for the likelihood."""
        likelihood = self._model.likelihood
        self._statistics += likelihood.statistics(outputs, target).to(self._statistics)
        flat, targets, weight = likelihood.rows(outputs.double(), target)
        gradient = likelihood.gradient(flat, targets) * weight[:, None]
        self._slope += float((gradient * flat).abs().sum())
        self._square += float(flat.square().sum())
        enabled, dtype = ambient_autocast() or (False, outputs.dtype)
        dtypes = (outputs.dtype, self._network.dtype, *([dtype] if enabled else []))
        self._epsilon = max(self._epsilon, *(torch.finfo(one).eps for one in dtypes))
        counted = float(weight.sum())
        self.n_examples += len(outputs)
        self.n_rows += counted
        self.n_entries += likelihood.n_terms(targets, weight, outputs.shape[-1])

    def check(self) -> None:
        """Raise :class:`DataError` for other data than were fitted to, once all batches were added.

        With outputs ``f`` of relative accuracy r and gradients g, ``−Σ log p`` has the accuracy ``r Σ |g f|`` in first
        order. A sum of squared errors has ``2 r Σ |g f| + r² Σ f²``.
        """
        likelihood, fitted = self._model.likelihood, self._model.statistics
        accuracy = max(ACCURACY, 100 * self._epsilon)
        # Log-densities are rounded on the scale of one. Squared errors have no such scale.
        rounding = 0.0 if likelihood.is_gaussian else accuracy * self.n_rows
        allowed = accuracy * (fitted.abs() + 2 * self._slope) + accuracy**2 * self._square + rounding
        if self.n_examples != self._n_data or not bool(((self._statistics - fitted).abs() <= allowed).all()):
            raise DataError(
                "These are not the data that the posterior was fitted to.",
                expected=f"{self._n_data} examples of log-likelihood {float(self._model.log_likelihood()):.6g}",
                got=f"{self.n_examples} of {float(likelihood.log_likelihood(self._statistics)):.6g}",
                fix="Pass the training data, each once and without random augmentation, with the autocast of the fit.",
            )


def survey(
    model: LaplaceModel,
    network: Network,
    data: Iterable[Any],
    n_data: int,
    *,
    progress: bool = False,
    description: str = "training data",
) -> FittedData:
    """Run the network once over data and check that they are those of the fit; arguments as :class:`FittedData`."""
    found = FittedData(model, network, n_data)
    loader = iterate(data, device=network.device, progress=progress, description=description)
    for batch in loader:
        outputs = network.forward(batch.inputs)
        model.likelihood.validate(outputs, batch.target)
        found.add(outputs, batch.target)
    found.check()
    return found


def check_training_prior(precision: Any, weight_decay: Any) -> bool:
    """Whether the prior of training is given; :class:`ConfigurationError` if twice, or by a bad weight decay."""
    if precision is not None and weight_decay is not None:
        raise ConfigurationError("Training has one of training_prior_precision and weight_decay.", got="both")
    if weight_decay is not None:
        checks.number("weight_decay", weight_decay, least=0.0)
    return precision is not None or bool(weight_decay)


def unknown_training_prior(fix: str | None = None) -> ConfigurationError:
    """The error where neither a precision nor a weight decay of training is given."""
    fix = fix or "Pass the weight decay of training; without one, tune by marginal likelihood or on held-out data."
    expected = "training_prior_precision=, or weight_decay= above 0"
    return ConfigurationError("Leave-one-out needs the prior precision of training.", expected=expected, fix=fix)


def precision_of_weight_decay(
    weight_decay: float, data: FittedData, model: LaplaceModel, temperature: float | Tensor
) -> float:
    """``α₀ = N · weight_decay / T`` for N terms in the mean loss of training; only for classifiers."""
    if not model.likelihood.is_classifier:
        raise UnsupportedError(
            "weight_decay= needs a classifier trained on a mean of −log p(y|f).",
            got=repr(model.likelihood),
            fix="Pass training_prior_precision=; with nn.MSELoss over N examples of C outputs and a noise of σ it is "
            "N · C · weight_decay / (2 σ²).",
        )
    return data.n_entries * weight_decay / float(temperature)
