"""Several posteriors of one trained network, each fitted, tuned and evaluated beside the network itself."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from laplace_plus.applications.evaluation import Columns, Report, evaluate
from laplace_plus.errors import NoGainWarning
from laplace_plus.experiments.settings import PosteriorSettings
from laplace_plus.likelihoods import Likelihood
from laplace_plus.tuning import Auto

POINT = "MAP"
"""The label of the trained network itself."""


@dataclass(frozen=True)
class Outcome:
    """The results of one method: rows of test data and scores as of a report, and seconds to fit, tune and evaluate.

    ``facts`` are prior precision, log marginal likelihood and noise level after tuning. The network itself has no
    posterior and no report.
    """

    rows: Columns
    scores: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    posterior: Any = None
    report: Report | None = None


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
    """Fit, tune and evaluate each posterior, and the network itself, `MAP`, which comes first.

    Of the batches in ``data``, ``train`` serve for fits and tuning, ``test`` for the scores alone, ``validation`` for
    tuning by validation and for the default where nothing else is asked for; predictions of those
    ``ood`` should be uncertain. The last two may be missing.

    If the likelihood has a noise level (`Gaussian`), the network itself is scored with the level that tuning of the
    first posterior found. The two then differ only in what the weights' uncertainty adds. The seed is that of all
    sampling. Raises ConfigurationError for an option that a posterior, its tuning or its prediction does not have.
    """

    def generator() -> torch.Generator:
        return torch.Generator(device=device).manual_seed(seed)

    def outcome(settings: PosteriorSettings) -> Outcome:
        posterior = settings.posterior_class(model, likelihood, **settings.options)
        times = [time.perf_counter()]
        posterior.fit(data["train"], progress=progress, generator=generator())
        times.append(time.perf_counter())
        if settings.tune is not None:
            by_default = not settings.tune and "validation" in data and posterior.tuners.get("auto") is Auto
            held_out = by_default or "validation" in (settings.tune.get("method"), settings.tune.get("tuner"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoGainWarning)  # the report shows whether there was a gain
                keywords = {**settings.tune, **({"data": data.get("validation")} if held_out else {})}
                posterior.fit_prior_precision(**keywords)
        times.append(time.perf_counter())
        options = {"generator": generator(), "progress": progress, **settings.predict}
        report = evaluate(posterior, data["test"], other=data.get("ood"), **options)
        times.append(time.perf_counter())
        seconds = {name: times[k + 1] - times[k] for k, name in enumerate(("fit", "tune", "evaluate"))}
        facts: dict[str, Any] = {"prior_precision": posterior.prior_precision.detach().cpu().tolist()}
        if hasattr(posterior, "log_marginal_likelihood"):
            facts["log_marginal_likelihood"] = float(posterior.log_marginal_likelihood())
        if (noise := posterior.likelihood.noise_std) is not None:
            facts["noise_std"] = noise.detach().cpu().tolist()
        scores = {name: score.value for name, score in report.items()}
        *_, rows = report.rows.values()
        return Outcome(rows, scores, seconds, facts, posterior, report)

    outcomes = {settings.label: outcome(settings) for settings in posteriors}
    first: Any = next(iter(outcomes.values())).report
    return {POINT: Outcome(first.rows["network"], {name: own.network for name, own in first.items()}), **outcomes}
