"""The results of both commands: a table, metrics.json, reliability.png and the posteriors themselves."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from laplace_plus import plotting
from laplace_plus._version import __version__
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments.comparison import Classified, Outcome
from laplace_plus.experiments.objects import folder_of
from laplace_plus.experiments.settings import RunSettings, WrapSettings

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

_DISTRIBUTIONS = ("torch", "numpy", "scipy", "curvlinops-for-pytorch", "backpack-for-pytorch", "scikit-learn")

_BINS = 15
"""Bins of the reliability diagram: as many as the expected calibration error of the table has."""

Repeats = Sequence[Mapping[str, Outcome]]
"""The outcomes by label, once for each seed."""

Say = Callable[[str], None]
"""Prints a line for the user."""


def write(settings: RunSettings | WrapSettings, repeats: Repeats, facts: Mapping[str, Any], *, say: Say) -> None:
    """Write metrics.json, reliability.png and the first repeat's posteriors, over those of earlier runs; print a table.

    Args:
        settings: The configuration.
        repeats: What was found.
        facts: What metrics.json also holds, such as ``total_seconds``.
        say: Takes each line for the user, such as the reason why a posterior cannot be saved.
    """
    output = Path(settings.output)
    for label, outcome in repeats[0].items():
        if outcome.posterior is not None:
            try:
                outcome.posterior.save(output / folder_of(label))
            except ConfigurationError as error:
                say(f"{label} is not saved: {error}")
    by_label = {label: [outcomes[label] for outcomes in repeats] for label in repeats[0]}
    pooled = {}  # the test predictions of all repeats
    for label, outcomes in by_label.items():
        found = [one.predictions for one in outcomes if isinstance(one.predictions, Classified)]
        if found:
            pooled[label] = torch.cat([one.probabilities for one in found]), torch.cat([one.targets for one in found])
    if pooled:
        plotting.reliability_diagram(pooled, n_bins=_BINS).savefig(output / "reliability.png", dpi=150)
    methods = {label: summary(outcomes) for label, outcomes in by_label.items()}
    content = {**facts, "methods": methods, "configuration": asdict(settings), "versions": versions()}
    write_json(output / "metrics.json", content)
    repeated = f"mean ± standard error over {len(repeats)} seeds; " if len(repeats) > 1 else ""
    say(f"{table(methods)}\n\n{repeated}{facts['total_seconds']:.0f} s in all; written to {output}/")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One method's numbers: each metric's mean, standard error and values by repeat; times; what was tuned."""
    metrics = {}
    for name in outcomes[0].scores:
        values = [one.scores[name] for one in outcomes]
        mean, error = mean_and_standard_error(values)
        metrics[name] = {"mean": mean, "standard_error": error, "values": values}
    return {
        "metrics": metrics,
        "seconds": [one.seconds for one in outcomes],
        "tuned": [one.facts for one in outcomes],
    }


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard error of the mean (sample standard deviation over √n); None for a single value.

    Example:
        >>> mean_and_standard_error([1.0, 3.0])
        (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


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


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    found = {"python": platform.python_version(), "laplace_plus": __version__}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write valid JSON: a number that is not finite is written as null."""
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
