"""The two commands: the digits demonstration, and the same steps for a network and data of one's own.

`laplace-plus run` trains a small network, wraps it, tunes the prior by marginal likelihood on the training data alone,
and scores everything on images that no step before has seen. These are test images of the classes that were learned,
and all images of those held out. It repeats this over seeds. `laplace-plus wrap` starts from a trained network.
"""

from __future__ import annotations

import json
import pickle
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from laplace_plus._version import __version__
from laplace_plus.applications import plotting
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments.comparison import POINT, Classified, Outcome, compare
from laplace_plus.experiments.digits import load_digits, train_network
from laplace_plus.experiments.settings import (
    ModelSettings,
    RunSettings,
    WrapSettings,
    folder_of,
    make,
    read_posteriors,
)
from laplace_plus.likelihoods import Categorical, resolve_likelihood

TITLES = {
    "accuracy": "accuracy ↑",
    "root_mean_squared_error": "RMSE ↓",
    "negative_log_likelihood": "NLL ↓",
    "brier_score": "Brier ↓",
    "expected_calibration_error": "ECE ↓",
    "crps": "CRPS ↓",
    "ood_auroc": "OOD AUROC ↑",
}
"""Column titles by metric, in the order of the columns; the arrow points to where better is."""

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
    posteriors = read_posteriors(settings.posteriors)
    started = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        name = settings.likelihood
        likelihood = resolve_likelihood(make(name, {}) if ":" in name else name)
        model = trained_model(settings)
        data = {}
        for key in ("train", "test", "validation", "ood"):
            if (source := getattr(settings, f"{key}_data")) is not None:
                part = "out_of_distribution" if key == "ood" else key
                data[part] = make(source, getattr(settings, f"{key}_data_kwargs"))
        options: dict[str, Any] = {"seed": settings.seed, "device": settings.device, "progress": progress}
        outcomes = compare(model, likelihood, data, posteriors, **options)
    save_posteriors(Path(settings.output), outcomes, say=say)
    facts = {"experiment": "wrap", "seeds": [settings.seed]}
    write_report(settings, model, [outcomes], facts, started, say=say)


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
    """Write metrics.json and pictures, over those of earlier runs; print a table.

    For classes, reliability.png. For numbers, coverage.png, and prediction.png where one number is predicted from one.
    ``repeats`` are outcomes by label, ``facts`` is what metrics.json also holds, ``started`` a `time.perf_counter()`.
    """
    output = Path(settings.output)
    by_label = {label: [outcomes[label] for outcomes in repeats] for label in repeats[0]}
    predictions: dict[str, Any] = {label: outcomes[0].predictions for label, outcomes in by_label.items()}
    if isinstance(predictions[POINT], Classified):
        pooled: dict[str, Any] = {}
        for label, outcomes in by_label.items():
            each: Any = [one.predictions for one in outcomes]
            pooled[label] = torch.cat([one.probabilities for one in each]), torch.cat([one.targets for one in each])
        diagram = plotting.reliability_diagram(pooled, n_bins=15)  # as the expected calibration error of the table
        diagram.savefig(output / "reliability.png", dpi=150)
    else:
        moments = {label: (one.mean, one.variance, one.targets) for label, one in predictions.items()}
        plotting.coverage_diagram(moments).savefig(output / "coverage.png", dpi=150)
        if predictions[POINT].inputs is not None:
            curves = {label: (predictions[label].inputs, *own) for label, own in moments.items()}
            plotting.curves(curves).savefig(output / "prediction.png", dpi=150)
    methods = {label: summary(outcomes) for label, outcomes in by_label.items()}
    n_parameters, seconds = sum(p.numel() for p in model.parameters()), time.perf_counter() - started
    content = {**facts, "methods": methods, "parameters": n_parameters, "total_seconds": seconds}
    versions = {"python": platform.python_version(), "laplace_plus": __version__, "torch": torch.__version__}
    write_json(output / "metrics.json", {**content, "configuration": asdict(settings), "versions": versions})
    repeated = f"mean ± standard error over {len(repeats)} seeds; " if len(repeats) > 1 else ""
    say(f"{table(methods)}\n\n{repeated}{seconds:.0f} s in all; written to {output}/")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One method's numbers: each metric's mean, standard error and values by repeat; times; what was tuned.

    The standard error is that of the mean (sample standard deviation over √n); None for a single value.
    """
    metrics = {}
    for name in outcomes[0].scores:
        values = [one.scores[name] for one in outcomes]
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        metrics[name] = {"mean": statistics.fmean(values), "standard_error": error, "values": values}
    seconds, tuned = [one.seconds for one in outcomes], [one.facts for one in outcomes]
    return {"metrics": metrics, "seconds": seconds, "tuned": tuned}


def table(methods: Mapping[str, Any]) -> str:
    """A text table of summaries, one row for each method: mean ± standard error over the repeats."""
    columns = [name for name in TITLES if name in next(iter(methods.values()))["metrics"]]
    rows = [["", *(TITLES[name] for name in columns)]]
    for label, method in methods.items():
        found = [method["metrics"][name] for name in columns]
        errors = ["" if one["standard_error"] is None else f" ± {one['standard_error']:.4f}" for one in found]
        rows.append([label, *(f"{one['mean']:.4f}{error}" for one, error in zip(found, errors, strict=True))])
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write valid JSON: a number that is not finite is written as null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    path.write_text(json.dumps(finite, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
