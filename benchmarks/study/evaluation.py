"""What predictions are worth: scores of one method on one split, and what they cost.

Scores are those of :mod:`laplace_plus.metrics`. Beside them stand, for comparison with published tables only, the
definitions of the authors' programs, which differ; their names begin with ``legacy_``:

* ``legacy_nll_mean_logits``: of the softmax of the mean outputs (Roy et al., 2024);
* ``legacy_nll_samples``: the mean over samples of their own negative log-likelihoods, an upper bound on the NLL of the
  prediction (Miani et al., 2025; Roy et al., 2025);
* ``legacy_brier_mean``: the Brier score divided by the number of classes (Bergamin et al., 2023);
* ``legacy_ece_drop99``: 100 bins of which the last is left out, so that predictions of a confidence of 0.99 and more
  do not count (Miani et al., 2025; Roy et al., 2024 and 2025);
* ``legacy_ood_auroc_max_probability`` and ``legacy_ood_auroc_max_variance``: by one minus the largest probability, and
  by the largest variance of a class's probability over the samples, where others are by the entropy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.scored import Classified, Predict, Regressed
from benchmarks.study.sets import Batches, DataSet
from laplace_plus import metrics
from laplace_plus.predictive import Prediction


@dataclass(frozen=True)
class Gathered:
    """Predictions of a whole part of a set.

    Attributes:
        scored: Means, variances or probabilities, with the targets.
        log_density: Of the targets, ``[N]``.
        mean_logits: Mean outputs of a classifier, ``[N, C]``.
        sampled_nll: Mean over samples of the NLL of each, a number.
        spread: Largest variance of a class's probability, ``[N]``.
        seconds: Of processor time.
    """

    scored: Classified | Regressed
    log_density: Tensor
    mean_logits: Tensor
    sampled_nll: float
    spread: Tensor
    seconds: float


def nll(predict: Predict, data: Batches) -> float:
    """Mean negative log-likelihood, in nats."""
    with torch.no_grad():
        total = sum(float(predict(x).log_prob(y).double().sum()) for x, y in data)
    return -total / sum(len(y) for _, y in data)


def n_correct(predict: Predict, data: Batches) -> int:
    """Number of inputs whose most probable class is theirs."""
    with torch.no_grad():
        return sum(int((predict(x).mean.argmax(-1) == y).sum()) for x, y in data)


def gather(predict: Predict, data: Batches, *, classification: bool) -> Gathered:
    """Predict all of a part."""
    parts: list[list[Tensor]] = []
    seconds, sampled = 0.0, 0.0
    with torch.no_grad():
        for x, y in data:
            started = time.process_time()
            prediction = predict(x)
            moments = [prediction.mean, prediction.variance]
            seconds += time.process_time() - started
            parts.append([*moments, prediction.log_prob(y), prediction.functional_mean, y, _spread(prediction)])
            sampled += _sampled(prediction, y)
    mean, variance, log_density, outputs, y, spread = (torch.cat(column) for column in zip(*parts, strict=True))
    log_density = log_density.double()
    scored: Classified | Regressed
    if classification:
        probabilities = mean.double()
        scored = Classified(probabilities / probabilities.sum(-1, keepdim=True), y)
    else:
        scored = Regressed(mean.double(), variance.double(), log_density, y.double())
    return Gathered(scored, log_density, outputs.double(), sampled / len(y), spread, seconds)


def _spread(prediction: Prediction) -> Tensor:
    return prediction.epistemic.reshape(len(prediction.mean), -1).amax(-1)


def _sampled(prediction: Prediction, y: Tensor) -> float:
    """The sum over rows of the samples' mean negative log-likelihood."""
    samples = prediction.functional_samples
    rows = [prediction.likelihood.log_density(f, y.reshape(len(f), *y.shape[1:])) for f in samples]
    return -float(torch.stack([row.double().sum() for row in rows]).mean())


def scores(predict: Predict, data: DataSet) -> dict[str, float]:
    """All scores on the test part, and the time for 1000 predictions.

    In regression, RMSE and CRPS are in the targets' own unit, and so are densities.
    """
    found = gather(predict, data.loader("test"), classification=data.classification)
    result = {"seconds_per_1000": 1000 * found.seconds / len(found.log_density)}
    if isinstance(found.scored, Regressed):
        result |= _regression(found.scored, data.unit)
    else:
        result |= _classification(found)
        for name, inputs in data.ood.items():
            result |= _ood(predict, found, name, inputs)
    return {name: float(value) for name, value in result.items()}


def _regression(found: Regressed, unit: float) -> dict[str, float]:
    own = found.scores()
    shift = float(torch.tensor(unit, dtype=torch.float64).log())
    errors = (found.mean - found.targets).square().sum(-1)
    return {
        "rmse": own["root_mean_squared_error"] * unit,
        "nll": own["negative_log_likelihood"] + shift,
        "crps": own["crps"] * unit,
        "aurc": area_under_risk_coverage(found.uncertainty(), errors) * unit**2,
    }


def _classification(found: Gathered) -> dict[str, float]:
    scored = found.scored
    assert isinstance(scored, Classified)
    own, y = scored.scores(), scored.targets
    wrong = (scored.probabilities.argmax(-1) != y).double()
    plain = torch.softmax(found.mean_logits, -1)
    return {
        "accuracy": own["accuracy"],
        "nll": -float(found.log_density.mean()),
        "brier": own["brier_score"],
        "ece": own["expected_calibration_error"],
        "aurc": area_under_risk_coverage(scored.uncertainty(), wrong),
        "legacy_nll_mean_logits": float(metrics.negative_log_likelihood(plain, y)),
        "legacy_nll_samples": found.sampled_nll,
        "legacy_brier_mean": own["brier_score"] / scored.probabilities.shape[1],
        "legacy_ece_drop99": legacy_ece(scored.probabilities, y),
    }


def _ood(predict: Predict, found: Gathered, name: str, inputs: Tensor) -> dict[str, float]:
    nothing = torch.zeros(len(inputs), dtype=torch.long)  # targets that mean nothing
    other = gather(predict, list(zip(inputs.split(500), nothing.split(500), strict=True)), classification=True)
    own, strange = found.scored, other.scored
    assert isinstance(own, Classified) and isinstance(strange, Classified)
    most = [1 - part.probabilities.amax(-1) for part in (own, strange)]
    return {
        f"ood_auroc_{name}": float(metrics.ood_auroc(own.uncertainty(), strange.uncertainty())),
        f"legacy_ood_auroc_max_probability_{name}": float(metrics.ood_auroc(*most)),
        f"legacy_ood_auroc_max_variance_{name}": float(metrics.ood_auroc(found.spread, other.spread)),
    }


def area_under_risk_coverage(doubt: Tensor, errors: Tensor) -> float:
    """Mean over coverages of the mean error of the least doubtful predictions (Geifman and El-Yaniv, 2017); 0 is best.

    Equal doubts share the mean of their errors, so that their order does not matter.

    Args:
        doubt: ``[N]``.
        errors: ``[N]``, 0 or 1 for classes, squared in regression.
    """
    _, group = doubt.unique(return_inverse=True)  # in ascending order
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, errors.double())
    shared = (sums / torch.bincount(group))[group.sort().values]
    return float((shared.cumsum(0) / torch.arange(1, len(doubt) + 1)).mean())


def legacy_ece(probabilities: Tensor, targets: Tensor) -> float:
    """The calibration error over 100 bins without the last one: full confidence does not count."""
    curve = metrics.reliability_curve(probabilities, targets, 100)
    gaps = torch.where(curve.counts > 0, (curve.accuracy - curve.confidence).abs(), 0.0) * curve.counts
    return float(gaps[:-1].sum() / curve.counts.sum())


def described(value: Any) -> Any:
    """A number as JSON has it: NaN and infinities as text."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
