"""The results of both commands: a table, metrics.json, reliability.png and the posteriors themselves."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from laplace_plus import plotting
from laplace_plus._version import __version__
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments.comparison import Classified, Outcome
from laplace_plus.experiments.objects import PosteriorSettings
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


def save_posteriors(
    output: Path, outcomes: Mapping[str, Outcome], posteriors: list[PosteriorSettings], *, say: Say
) -> None:
    """Save each posterior to its own folder, over those of earlier runs; name those that cannot be saved."""
    for settings in posteriors:
        posterior = outcomes[settings.label].posterior
        if posterior is not None:
            try:
                posterior.save(output / settings.folder)
            except ConfigurationError as error:
                say(f"{settings.label} is not saved: {error}")


def write(
    experiment: str,
    repeats: Repeats,
    seeds: Sequence[int],
    settings: RunSettings | WrapSettings,
    *,
    started: float,
    say: Say,
    facts: Mapping[str, Any],
) -> None:
    """Write metrics.json, with the ``facts``, and reliability.png; print the table.

    ``started`` is `time.perf_counter()` at the start.
    """
    output = Path(settings.output)
    if isinstance(next(iter(repeats[0].values())).predictions, Classified):
        pooled = {}  # the test predictions of all repeats
        for label in repeats[0]:
            found: list[Any] = [outcomes[label].predictions for outcomes in repeats]
            pooled[label] = torch.cat([one.probabilities for one in found]), torch.cat([one.targets for one in found])
        plotting.reliability_diagram(pooled, n_bins=_BINS).savefig(output / "reliability.png", dpi=150)
    content = {
        "experiment": experiment,
        **summary(repeats, seeds),
        **facts,
        "total_seconds": time.perf_counter() - started,
        "configuration": asdict(settings),
        "versions": versions(),
    }
    write_json(output / "metrics.json", content)
    repeated = f"mean ± standard error over {len(seeds)} seeds; " if len(seeds) > 1 else ""
    say(f"{table(repeats)}\n\n{repeated}{time.perf_counter() - started:.0f} s in all; written to {output}/")


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard error of the mean (sample standard deviation over √n); None for a single value.

    Example:
        >>> mean_and_standard_error([1.0, 3.0])
        (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def table(repeats: Repeats) -> str:
    """A text table, one row for each method: mean ± standard error over the repeats."""
    metrics = [name for name in TITLES if name in next(iter(repeats[0].values())).scores]
    rows = [["", *(TITLES[name] for name in metrics)]]
    for label in repeats[0]:
        cells = [label]
        for name in metrics:
            mean, error = mean_and_standard_error([outcomes[label].scores[name] for outcomes in repeats])
            cells.append(f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded]))
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(lines)


def summary(repeats: Repeats, seeds: Sequence[int]) -> dict[str, Any]:
    """All numbers by method: each metric's mean, standard error and values by repeat; times; what was tuned."""
    methods: dict[str, Any] = {}
    for label, first in repeats[0].items():
        scores = {}
        for name in first.scores:
            values = [outcomes[label].scores[name] for outcomes in repeats]
            mean, error = mean_and_standard_error(values)
            scores[name] = {"mean": mean, "standard_error": error, "values": values}
        methods[label] = {
            "metrics": scores,
            "seconds": [outcomes[label].seconds for outcomes in repeats],
            "tuned": [outcomes[label].facts for outcomes in repeats],
        }
    return {"seeds": list(seeds), "methods": methods}


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    found = {"python": platform.python_version(), "laplace_plus": __version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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
