"""Several posteriors of one trained network, each scored beside the network itself."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from laplace_plus import metrics
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments.evaluation import Classified, Predict, Regressed, doubts, gather, point_prediction
from laplace_plus.experiments.objects import PosteriorSettings, call, require_keywords
from laplace_plus.likelihoods import Likelihood
from laplace_plus.posteriors.base import Posterior

POINT = "MAP"
"""The label of the trained network itself."""


@dataclass(frozen=True)
class Data:
    """The batches of one comparison.

    Attributes:
        train: Training data, for fits and for tuning without validation.
        test: Test data, which only the scores use.
        validation: Held-out data for tuning by validation, if any.
        out_of_distribution: Inputs on which predictions should be uncertain, if any.
    """

    train: Iterable[Any]
    test: Iterable[Any]
    validation: Iterable[Any] | None = None
    out_of_distribution: Iterable[Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """The results of one method.

    Attributes:
        predictions: On the test data.
        scores: By metric.
        seconds: By step: fit, tune, predict.
        facts: Prior precision, log marginal likelihood and noise level after tuning.
        posterior: None for the network itself.
    """

    predictions: Classified | Regressed
    scores: dict[str, float]
    seconds: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    posterior: Posterior | None = None


def compare(
    model: nn.Module,
    likelihood: Likelihood,
    data: Data,
    posteriors: list[PosteriorSettings],
    *,
    seed: int,
    device: str = "cpu",
    progress: bool = False,
) -> dict[str, Outcome]:
    """Fits, tunes and scores each posterior, and scores the network itself.

    If the likelihood has a noise level (`Gaussian`), the network itself is scored with the level that tuning of the
    first posterior found. The two then differ only in what the weights' uncertainty adds.

    Args:
        model: The trained network.
        likelihood: What its outputs mean.
        data: The batches.
        posteriors: What to fit.
        seed: Of all sampling.
        device: Where to compute; the network must be there already.
        progress: Whether to show progress bars.

    Returns:
        The outcomes by label, `MAP` for the network itself first.

    Raises:
        ConfigurationError: An option of `tune` or `predict` that a posterior does not have.
    """
    outcomes: dict[str, Outcome] = {}
    for settings in posteriors:
        outcomes[settings.label] = _posterior_outcome(model, likelihood, data, settings, seed, device, progress)
    first = next(iter(outcomes.values())).posterior if outcomes else None
    tuned = likelihood if first is None else first.likelihood
    predictions, scores, seconds = _score(point_prediction(model, tuned), tuned, data, POINT, device, progress)
    return {POINT: Outcome(predictions, scores, {"predict": seconds}), **outcomes}


def _posterior_outcome(
    model: nn.Module,
    likelihood: Likelihood,
    data: Data,
    settings: PosteriorSettings,
    seed: int,
    device: str,
    progress: bool,
) -> Outcome:
    posterior = settings.posterior_class(model, likelihood, **settings.options)
    started = time.perf_counter()
    posterior.fit(data.train, progress=progress, generator=_generator(device, seed))
    seconds = {"fit": time.perf_counter() - started}
    if settings.tune is not None:
        started = time.perf_counter()
        _tune(posterior, settings, data)
        seconds["tune"] = time.perf_counter() - started
    keywords = dict(settings.predict)
    require_keywords(posterior.predictive, keywords, what=f"predict of {settings.label}")
    keywords.setdefault("generator", _generator(device, seed))

    def predict(inputs: Any) -> Any:
        return posterior.predictive(inputs, **keywords)

    predictions, scores, seconds["predict"] = _score(
        predict, posterior.likelihood, data, settings.label, device, progress
    )
    return Outcome(predictions, scores, seconds, _facts(posterior), posterior)


def _tune(posterior: Posterior, settings: PosteriorSettings, data: Data) -> None:
    if not posterior.tuners:
        raise ConfigurationError(f"{settings.label} has no prior to tune.", fix="Give it `tune: false`.")
    keywords = dict(settings.tune or {})
    if "validation" in (keywords.get("method"), keywords.get("tuner")):
        if data.validation is None:
            raise ConfigurationError(
                f"{settings.label} is to be tuned by validation without validation data.",
                fix="Name `validation_data`, or tune by marginal_likelihood, which needs none.",
            )
        keywords["data"] = data.validation
    call(posterior.fit_prior_precision, keywords, what=f"tune of {settings.label}")


def _score(
    predict: Predict, likelihood: Likelihood, data: Data, label: str, device: str, progress: bool
) -> tuple[Classified | Regressed, dict[str, float], float]:
    started = time.perf_counter()
    predictions = gather(
        predict, likelihood, data.test, device=device, progress=progress, description=f"predict ({label})"
    )
    seconds = time.perf_counter() - started
    scores = predictions.scores()
    if data.out_of_distribution is not None:
        unknown = doubts(
            predict,
            likelihood,
            data.out_of_distribution,
            device=device,
            progress=progress,
            description=f"predict out of distribution ({label})",
        )
        scores["ood_auroc"] = float(metrics.ood_auroc(predictions.doubt(), unknown))
    return predictions, scores, seconds


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _facts(posterior: Posterior) -> dict[str, Any]:
    facts: dict[str, Any] = {"prior_precision": posterior.prior_precision.detach().cpu().tolist()}
    if hasattr(posterior, "log_marginal_likelihood"):
        facts["log_marginal_likelihood"] = float(posterior.log_marginal_likelihood())
    noise = posterior.likelihood.noise_std
    if noise is not None:
        facts["noise_std"] = noise.detach().cpu().tolist()
    return facts
