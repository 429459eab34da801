"""Several posteriors of one trained network, each scored on a test set beside the network itself."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.special import entr

from laplace_plus import metrics
from laplace_plus.applications.mixtures import Ensemble
from laplace_plus.errors import NoGainWarning
from laplace_plus.experiments.settings import PosteriorSettings
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import batches
from laplace_plus.predictive import Prediction

POINT = "MAP"
"""The label of the trained network itself."""

Predict = Callable[[Any], Prediction]
"""From the inputs of a batch to the predictive distribution of its targets."""


@dataclass(frozen=True)
class Classified:
    """Predicted classes of N targets (examples, or tokens or pixels of them), those ``targets [N]`` and their weights.

    Each row of ``probabilities [N, C]`` sums to one; a binary target has the two columns no and yes.
    """

    probabilities: Tensor
    targets: Tensor
    weight: Tensor | None = None

    def scores(self) -> dict[str, float]:
        """Accuracy, mean negative log-likelihood, Brier score and expected calibration error."""
        names = ("accuracy", "negative_log_likelihood", "brier_score", "expected_calibration_error")
        scores: Any = [getattr(metrics, name) for name in names]
        found = [float(score(self.probabilities, self.targets, weight=self.weight)) for score in scores]
        return dict(zip(names, found, strict=True))

    def uncertainty(self) -> Tensor:
        """Entropy of each prediction in nats, ``[N]``."""
        return entr(self.probabilities).sum(-1)


@dataclass(frozen=True)
class Regressed:
    """Predicted numbers of N examples and their ``targets``, all ``[N, D]``; the variance includes observation noise.

    ``log_density [N]`` is that of the targets under the predictive distribution. ``inputs [N]`` are given where one
    number is predicted from one, ``weight [N]`` where targets have weights.
    """

    mean: Tensor
    variance: Tensor
    log_density: Tensor
    targets: Tensor
    inputs: Tensor | None = None
    weight: Tensor | None = None

    def scores(self) -> dict[str, float]:
        """Root mean squared error, mean negative log-likelihood, and CRPS of the Gaussian with these moments."""
        return {
            "root_mean_squared_error": float(metrics.root_mean_squared_error(self.mean, self.targets, self.weight)),
            "negative_log_likelihood": float(-metrics.weighted_mean(self.log_density, self.weight)),
            "crps": float(metrics.crps_gaussian(self.mean, self.variance, self.targets, self.weight)),
        }

    def uncertainty(self) -> Tensor:
        """Variance of each prediction, summed over the outputs, ``[N]``."""
        return self.variance.sum(-1)


@dataclass(frozen=True)
class Outcome:
    """The results of one method: predictions on the test data, scores by metric, and seconds to fit, tune and predict.

    ``facts`` are prior precision, log marginal likelihood and noise level after tuning. The network itself has no
    posterior.
    """

    predictions: Classified | Regressed
    scores: dict[str, float]
    seconds: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    posterior: Any = None


def compare(
    model: nn.Module,
    likelihood: Likelihood,
    data: Mapping[str, Iterable[Any]],
    posteriors: list[PosteriorSettings],
    *,
    seed: int,
    device: str = "cpu",
    progress: bool = False,
) -> dict[str, Outcome]:
    """Fit, tune and score each posterior, and score the network itself, `MAP`, which comes first.

    Of the batches in ``data``, ``train`` serve for fits and tuning, ``test`` for the scores alone, ``validation`` for
    tuning by validation; on those ``out_of_distribution`` predictions should be uncertain. The last two may be missing.

    If the likelihood has a noise level (`Gaussian`), the network itself is scored with the level that tuning of the
    first posterior found. The two then differ only in what the weights' uncertainty adds. The seed is that of all
    sampling. Raises ConfigurationError for an option that a posterior, its tuning or its prediction does not have.
    """
    iterate = partial(batches.iterate, device=device, progress=progress)

    def generator() -> torch.Generator:
        return torch.Generator(device=device).manual_seed(seed)

    def outcome(settings: PosteriorSettings) -> Outcome:
        posterior = settings.posterior_class(model, likelihood, **settings.options)
        times = [time.perf_counter()]
        posterior.fit(data["train"], progress=progress, generator=generator())
        times.append(time.perf_counter())
        if settings.tune is not None:
            uses_validation = "validation" in (settings.tune.get("method"), settings.tune.get("tuner"))
            keywords = {**settings.tune, **({"data": data.get("validation")} if uses_validation else {})}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoGainWarning)  # the report shows whether there was a gain
                posterior.fit_prior_precision(**keywords)
        times.append(time.perf_counter())
        predict = partial(posterior.predictive, **{"generator": generator(), **settings.predict})
        found = score(predict, settings.label, posterior.likelihood)
        seconds = {"fit": times[1] - times[0], "tune": times[2] - times[1], **found.seconds}
        facts: dict[str, Any] = {"prior_precision": posterior.prior_precision.detach().cpu().tolist()}
        if hasattr(posterior, "log_marginal_likelihood"):
            facts["log_marginal_likelihood"] = float(posterior.log_marginal_likelihood())
        if (noise := posterior.likelihood.noise_std) is not None:
            facts["noise_std"] = noise.detach().cpu().tolist()
        return replace(found, seconds=seconds, facts=facts, posterior=posterior)

    def score(predict: Predict, label: str, likelihood: Likelihood) -> Outcome:
        started = time.perf_counter()
        predictions = gather(predict, likelihood, iterate(data["test"], description=f"predict ({label})"))
        seconds, scores = {"predict": time.perf_counter() - started}, predictions.scores()
        if "out_of_distribution" in data:
            shifted = iterate(data["out_of_distribution"], description=f"predict out of distribution ({label})")
            uncertainties = gather_uncertainties(predict, likelihood, shifted)
            scores["ood_auroc"] = float(metrics.ood_auroc(predictions.uncertainty(), uncertainties))
        return Outcome(predictions, scores, seconds)

    outcomes = {settings.label: outcome(settings) for settings in posteriors}
    tuned = next(iter(outcomes.values())).posterior.likelihood
    return {POINT: score(Ensemble([model], tuned).predictive, POINT, tuned), **outcomes}


def gather(predict: Predict, likelihood: Likelihood, data: Iterable[batches.Batch]) -> Classified | Regressed:
    """Predict all of a data set, in float64 on the CPU; targets that the likelihood ignores are left out."""
    found, shares = list[tuple[Tensor, ...]](), list[Tensor]()
    for batch in data:
        prediction = predict(batch.inputs)
        _, targets, weight = likelihood.rows(prediction.functional_mean, batch.target)
        share = _plain(weight)
        kept = share > 0
        columns = _moments(prediction, likelihood)
        if likelihood.is_classifier:
            labels = targets.cpu().reshape(-1)
            share = share.repeat_interleave(len(labels) // len(share))
            kept = (share > 0) & ~labels.isnan()
            columns += (labels.nan_to_num(0).long(),)
        else:
            density = prediction.log_prob(likelihood.separate(batch.target)[0])
            columns += _plain(density).reshape(-1), _plain(targets).reshape(columns[0].shape)
            if isinstance(batch.inputs, Tensor) and batch.inputs.numel() == columns[0].numel() == len(kept):
                columns += (_plain(batch.inputs).flatten(),)
        found.append(tuple(column[kept] for column in columns))
        shares.append(share[kept])
    kind: Any = Classified if likelihood.is_classifier else Regressed
    scored = kind(*(torch.cat(columns) for columns in zip(*found, strict=True)))
    return replace(scored, weight=torch.cat(shares)) if likelihood.weighted else scored


def gather_uncertainties(predict: Predict, likelihood: Likelihood, data: Iterable[batches.Batch]) -> Tensor:
    """``gather(…).uncertainty()``, ``[N]``, for data whose targets have no meaning."""
    moments = [_moments(predict(batch.inputs), likelihood) for batch in data]
    return torch.cat([entr(*one).sum(-1) if likelihood.is_classifier else one[1].sum(-1) for one in moments])


def _moments(prediction: Prediction, likelihood: Likelihood) -> tuple[Tensor, ...]:
    """Probabilities ``[N, C]``, or means and variances ``[N, D]``."""
    if likelihood.is_classifier:
        return (_plain(likelihood.class_probabilities(prediction.mean)),)
    return _plain(prediction.mean).flatten(0, -2), _plain(prediction.variance).flatten(0, -2)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
