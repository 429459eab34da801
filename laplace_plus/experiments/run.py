"""The commands: the digits demonstration, and the same steps for a network and data of one's own.

`laplace-plus run` trains a small network, wraps it, tunes the prior by marginal likelihood on the training data alone,
and scores everything on images that no step before has seen. These are test images of the classes that were learned,
and all images of those held out. It repeats this over seeds. `laplace-plus evaluate` starts from a trained network.
"""

from __future__ import annotations

import json
import math
import pickle
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from laplace_plus import checks
from laplace_plus._version import __version__
from laplace_plus.applications import plotting
from laplace_plus.applications.evaluation import Columns, Report, aligned, evaluate, title_of, with_error
from laplace_plus.errors import ConfigurationError, NoGainWarning
from laplace_plus.experiments.digits import load_digits, train_network
from laplace_plus.experiments.settings import (
    ModelSettings,
    PosteriorSettings,
    RunSettings,
    WrapSettings,
    folder_of,
    make,
    read_posteriors,
)
from laplace_plus.likelihoods import Categorical, Likelihood, resolve_likelihood
from laplace_plus.tuning import Auto

COLUMNS = (
    "accuracy",
    "root_mean_squared_error",
    "negative_log_likelihood",
    "brier_score",
    "expected_calibration_error",
    "crps",
    "ood_auroc",
)
"""Scores of the table of several methods."""

POINT = "MAP"
"""The label of the trained network itself."""

Say = Callable[[str], None]
"""Prints a line for the user."""


def run(settings: RunSettings, *, progress: bool = False, say: Say) -> None:
    """Run the demonstration and write its folder.

    ConfigurationError for a posterior that cannot be made, UnsupportedError without scikit-learn or matplotlib.
    """
    posteriors = read_posteriors(settings.posteriors)
    options: dict[str, Any] = {"device": settings.device, "progress": progress}
    output, started, n_threads = Path(settings.output), time.perf_counter(), torch.get_num_threads()
    repeats, train_seconds = list[dict[str, Outcome]](), list[float]()
    torch.set_num_threads(1)  # for so small a network, more threads take longer
    try:
        for seed in range(settings.seeds):
            digits = load_digits(settings.data, seed=seed)
            before = time.perf_counter()
            model = train_network(digits, settings.training, seed=seed, **options)
            train_seconds.append(time.perf_counter() - before)
            data = {name: DataLoader(split, batch_size=256) for name, split in digits.items()}
            repeats.append(compare(model, Categorical(), data, posteriors, seed=seed, **options))
            if seed == 0:  # at once: further seeds may be interrupted
                save_file(model.state_dict(), output / "model.safetensors")
                save_posteriors(output, repeats[0], say=say)
            say(f"seed {seed}: trained in {train_seconds[-1]:.1f} s, {time.perf_counter() - before:.1f} s in all")
    finally:
        torch.set_num_threads(n_threads)
    sizes = {name: len(split) for name, split in digits.items()}
    facts = {
        "experiment": "digits",
        "seeds": list(range(settings.seeds)),
        "data": {"classes": 10 - len(settings.data.held_out_classes), **sizes},
        "train_seconds": train_seconds,
    }
    say(f"images: {sizes}\n")
    write_report(settings, model, repeats, facts, started, say=say)


def wrap(settings: WrapSettings, *, progress: bool = False, say: Say) -> None:
    """Wrap the configured network, evaluate it and write the output folder.

    ConfigurationError if something that the configuration names is missing or not what it should be; UnsupportedError
    without matplotlib.
    """
    posteriors, started, name = read_posteriors(settings.posteriors), time.perf_counter(), settings.likelihood
    names = ("model", "train", "test", "validation")
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        parts: Any = {}
        if settings.function:
            parts = make(settings.function, settings.function_kwargs)
            if not isinstance(parts, Mapping):
                several = parts if isinstance(parts, tuple | list) else (parts,)
                parts = {(*names, f"entry {k + 1}")[min(k, 4)]: part for k, part in enumerate(several)}
            checks.options(settings.function, parts, (*names, "ood", "likelihood"), "entry")
        parts = {**parts, **({"model": trained_model(settings)} if settings.model else {})}
        for key in ("train", "test", "validation", "ood"):
            if (source := getattr(settings, f"{key}_data")) is not None:
                parts[key] = make(source, getattr(settings, f"{key}_data_kwargs"))
        for key, kind in {"model": nn.Module, "train": Iterable, "test": Iterable}.items():
            if not isinstance(parts.get(key), kind):
                expected = "a function that returns (model, train, test) or (…, validation), or a mapping of these"
                raise ConfigurationError(f"There is no {key}.", expected=expected, got=type(parts.get(key)).__name__)
        likelihood = resolve_likelihood(parts.pop("likelihood", None) or (make(name, {}) if ":" in name else name))
        model = parts.pop("model").to(settings.device)
        data = {key: part for key, part in parts.items() if part is not None}
        options: dict[str, Any] = {"seed": settings.seed, "device": settings.device, "progress": progress}
        outcomes = compare(model, likelihood, data, posteriors, **options)
    save_posteriors(Path(settings.output), outcomes, say=say)
    write_report(settings, model, [outcomes], {"experiment": "wrap", "seeds": [settings.seed]}, started, say=say)


def trained_model(settings: ModelSettings) -> nn.Module:
    """The network of a configuration; ConfigurationError for what is none, or cannot be read."""
    model = make(settings.model, settings.model_kwargs)
    if not isinstance(model, nn.Module):
        what = f"{settings.model} returned no network."
        raise ConfigurationError(what, expected="a torch.nn.Module", got=type(model).__name__)
    if settings.checkpoint is not None:
        path = Path(settings.checkpoint)
        is_safe = path.suffix == ".safetensors"
        try:
            weights = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
            # torch's own message tells how to unpickle the file anyway, which must not be offered.
            what, expected = "The checkpoint cannot be read.", "a state dict, of safetensors or of torch.save"
            got = str(path) if path.is_file() else f"no file at {path}"
            raise ConfigurationError(what, expected=expected, got=got) from error
        model.load_state_dict(weights)
    return model.to(settings.device)


# -- the comparison --------------------------------------------------------------------------------------------------


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


# -- the report ------------------------------------------------------------------------------------------------------


def save_posteriors(output: Path, outcomes: Mapping[str, Outcome], *, say: Say) -> None:
    """Save each posterior to its own folder, over those of earlier runs; name those that cannot be saved."""
    for label, outcome in outcomes.items():
        if outcome.posterior is not None:
            try:
                outcome.posterior.save(output / folder_of(label))
            except ConfigurationError as error:
                say(f"{label} is not saved: {error}")


def write_report(
    settings: Any,
    model: nn.Module,
    repeats: Sequence[Mapping[str, Outcome]],
    facts: Mapping[str, Any],
    started: float,
    *,
    say: Say,
) -> None:
    """Write metrics.json, reports and pictures, over those of earlier runs; print tables and verdicts.

    The picture, report.png, is of all repeats, report-….html of one posterior in the first. ``repeats`` are outcomes
    by label, ``facts`` is what metrics.json also holds, ``started`` a `time.perf_counter()`.
    """
    output = Path(settings.output)
    by_label = {label: [outcomes[label] for outcomes in repeats] for label in repeats[0]}
    reports = {label: one.report for label, one in repeats[0].items() if one.report is not None}
    methods = {label: summary(outcomes) for label, outcomes in by_label.items()}
    n_parameters, seconds = sum(p.numel() for p in model.parameters()), time.perf_counter() - started
    content = {**facts, "methods": methods, "parameters": n_parameters, "total_seconds": seconds}
    versions = {"python": platform.python_version(), "laplace_plus": __version__, "torch": torch.__version__}
    write_json(output / "metrics.json", {**content, "configuration": asdict(settings), "versions": versions})
    repeated = f"mean ± standard error over {len(repeats)} seeds; " if len(repeats) > 1 else ""
    said = [f"{label}\n\n{report}" for label, report in reports.items()] if len(repeats) == 1 else []
    said += [table(methods)] if len(repeats) > 1 or len(reports) > 1 else []
    say("\n\n".join([*said, f"{repeated}{seconds:.0f} s in all; written to {output}/"]))
    pooled = {}
    for label, outcomes in by_label.items():
        pooled[label] = {name: torch.cat([one.rows[name] for one in outcomes]) for name in outcomes[0].rows}
    plotting.evaluation(pooled).savefig(output / "report.png", dpi=150)
    for label, report in reports.items():
        report.to_html(output / f"{folder_of(label).replace('posterior', 'report', 1)}.html")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One method's numbers: each score's mean, standard error and values by repeat; times; what was tuned.

    The standard error is that of the mean (sample standard deviation over √n); None for a single value.
    """
    scores = {}
    for name in outcomes[0].scores:
        values = [one.scores.get(name, math.nan) for one in outcomes]
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        scores[name] = {"mean": statistics.fmean(values), "standard_error": error, "values": values}
    seconds, tuned = [one.seconds for one in outcomes], [one.facts for one in outcomes]
    return {"metrics": scores, "seconds": seconds, "tuned": tuned}


def table(methods: Mapping[str, Any]) -> str:
    """A text table of summaries, one row for each method: mean ± standard error over the repeats."""
    columns = [name for name in COLUMNS if name in next(iter(methods.values()))["metrics"]]
    rows = [["", *map(title_of, columns)]]
    for label, method in methods.items():
        found = [method["metrics"][name] for name in columns]
        rows.append([label, *(with_error(one["mean"], one["standard_error"] or 0.0) for one in found)])
    return aligned(rows)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write valid JSON: a number that is not finite is written as null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    path.write_text(json.dumps(finite, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
