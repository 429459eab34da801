"""What one cell, seed and class of posteriors scores: the network, the marginal likelihood, the default."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional

import laplace_plus as lp
from benchmarks.evidence.data import batches
from benchmarks.study.scored import Classified, Predict, Regressed
from benchmarks.study.sets import DataSet
from laplace_plus import metrics
from laplace_plus.likelihoods import Likelihood
from laplace_plus.predictive import Prediction, from_functional, from_samples

CLASSES: dict[str, Any] = {
    "KFAC": (lp.KFAC, {}),
    "Diagonal": (lp.Diagonal, {}),
    "last layer": (lp.KFAC, {"parameters": "last_layer"}),
    "Full": (lp.Full, {}),
}

FEW = 3500
"""Weights up to which the full matrix is run."""

TEST_TARGETS, OOD_ROWS, BATCH = 1000, 500, 200
"""At most so many targets are scored; each token of a sequence is one."""

SCALES = (10.0, 3.2, 1.0, 0.32, 0.1, 0.032, 0.01, 3.2e-3, 1e-3, 3.2e-4, 1e-4)
"""Factors on the marginal likelihood's covariance, at each of which classes are scored on test data."""

TEMPERATURES = (0.05, 1000.0)
"""Between them the validated one is searched; where all validation rows are right, it ends at the first."""

Scores = dict[str, float]
Row = dict[str, Any]


def shortened(data: DataSet) -> DataSet:
    """At most so many test targets and inputs from elsewhere, drawn at random: rows of a table may be sorted."""

    def drawn(part: Tensor, most: int) -> Tensor:
        return part[torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:most]]

    n_rows = TEST_TARGETS * len(data.test[1]) // data.test[1].numel()
    x, y = (drawn(part, n_rows) for part in data.test)
    return replace(data, test=(x, y), ood={name: drawn(inputs, OOD_ROWS) for name, inputs in data.ood.items()})


def scores_of(predict: Predict, data: DataSet, doubt: Callable[[Prediction], Tensor] | None) -> Scores:
    """Scores on the test rows: one prediction of each batch serves all of them.

    Returns:
        ``nll``; ``ece`` and ``brier``, or ``crps`` in standard deviations of the training targets; where there are
        inputs from elsewhere, ``ood_auroc`` by the doubt, the mean over their sets.
    """
    columns: list[list[Tensor]] = []
    familiar: list[Tensor] = []
    asked = doubt if data.ood else None
    with torch.no_grad():
        for x, y in batches(*data.test, BATCH):
            prediction = predict(x)
            moments = [prediction.mean] if data.classification else [prediction.mean, prediction.variance]
            density = prediction.log_prob(y).double().flatten()
            targets = y.flatten() if data.classification else y
            columns.append([density, *(part.double().flatten(0, -2) for part in moments), targets])
            if asked:
                familiar.append(asked(prediction))
        strange = [torch.cat([asked(predict(x)) for x in inputs.split(BATCH)]) for inputs in data.ood.values() if asked]
    density, mean, *variance, y = (torch.cat(column) for column in zip(*columns, strict=True))
    found = {"nll": -float(density.mean())}
    if data.classification:
        own = Classified(mean / mean.sum(-1, keepdim=True), y).scores()
        found |= {"ece": own["expected_calibration_error"], "brier": own["brier_score"]}
    else:
        own = Regressed(mean, variance[0], density, y.double()).scores()
        found["crps"] = own["crps"] / float(data.train[1].double().std())
    if strange:
        aurocs = [float(metrics.ood_auroc(torch.cat(familiar), other)) for other in strange]
        found["ood_auroc"] = sum(aurocs) / len(aurocs)
    return found


def _point(network: nn.Module, likelihood: Likelihood, temperature: float = 1.0) -> Predict:
    return lambda x: from_samples(likelihood, network(x)[None] / temperature)


def network_row(network: nn.Module, data: DataSet) -> Row:
    """The network itself, and with the temperature or noise that is best on validation data."""
    with torch.no_grad():
        outputs, targets = network(data.validation[0]), data.validation[1]
        if not data.classification:
            residuals = [(outputs - targets), network(data.train[0]) - data.train[1]]
            value, noise = (float(part.double().square().mean().sqrt()) for part in residuals)
            own, validated = _point(network, lp.Gaussian(noise)), _point(network, lp.Gaussian(value))
        else:
            logits, targets = outputs.double().flatten(0, -2), targets.flatten()
            bounds = (math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1]))
            loss = lambda t: float(functional.cross_entropy(logits / math.exp(t), targets))  # noqa: E731
            value = math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)
            own, validated = _point(network, lp.Categorical()), _point(network, lp.Categorical(), value)
    doubt = Prediction.entropy if data.classification else None
    return {
        "network": scores_of(own, data, doubt),
        "validated": scores_of(validated, data, doubt),
        "temperature" if data.classification else "noise": value,
    }


def posterior_row(network: nn.Module, data: DataSet, name: str) -> Row:
    """The default, then the marginal likelihood, each from where the fit ended."""
    kind, options = CLASSES[name]
    posterior = kind(network, "classification" if data.classification else "regression", **options)
    seconds = [time.process_time()]
    posterior.fit(data.loader("train"))
    seconds.append(time.process_time())
    start, noise = posterior.prior_precision, posterior.noise_std
    posterior.fit_prior_precision()
    seconds.append(time.process_time())
    found = posterior.tuning
    default = scores_of(_predictor(posterior), data, _epistemic(data))
    posterior.prior_precision = start
    if noise is not None:
        posterior.noise_std = noise
    posterior.fit_prior_precision("marginal_likelihood")
    evidence = scores_of(_predictor(posterior), data, _epistemic(data))
    return {
        "default": default,
        "marginal_likelihood": evidence,
        "by_scale": losses_by_scale(posterior, data) if data.classification else None,
        "chosen": found.chosen,
        "scale": found.covariance_scale,
        "wrong_labels": found.wrong_labels,
        "least_at_data": _least(found, found.losses),
        "least_between": _least(found, found.between_losses),
        "expected_gain": found.expected_gain,
        "precision_ratio": float(found.prior_precision.double().mean() / posterior.prior_precision.double().mean()),
        "fit_seconds": seconds[1] - seconds[0],
        "tuning_seconds": seconds[2] - seconds[1],
    }


def losses_by_scale(posterior: Any, data: DataSet) -> list[float]:
    """Test NLL at each of the scales, with the default link."""
    likelihood, size = posterior.likelihood, posterior.n_outputs
    totals = torch.zeros(len(SCALES), dtype=torch.float64)
    for x, y in batches(*data.test, BATCH):
        found = posterior.functional_posterior(x)
        mean, covariance = found.mean.reshape(-1, size), found.covariance.flatten(0, found.mean.ndim - 2)
        for place, scale in enumerate(SCALES):
            totals[place] -= from_functional(likelihood, mean, scale * covariance).log_prob(y.flatten()).double().sum()
    return (totals / data.test[1].numel()).tolist()


def _least(found: Any, losses: Tensor | None) -> float | None:
    """The scale of least loss in a view of the default tuning, 0 for the network itself; None without the view."""
    return None if losses is None or bool(losses.isnan().any()) else (*found.scales, 0.0)[int(losses.argmin())]


def _predictor(posterior: Any) -> Predict:
    """The same random numbers for each batch."""
    return lambda x: posterior.predictive(x, generator=torch.Generator().manual_seed(0))


def _epistemic(data: DataSet) -> Callable[[Prediction], Tensor]:
    if data.classification:
        return Prediction.mutual_information
    return lambda prediction: prediction.epistemic.sqrt().sum(-1)
