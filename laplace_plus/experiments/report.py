"""From outcomes to what a person reads (a table) and what a program reads (metrics.json)."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from laplace_plus._version import __version__
from laplace_plus.experiments.comparison import Outcome

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

Repeats = Sequence[Mapping[str, Outcome]]
"""The outcomes by label, once for each seed."""


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard error of the mean (sample standard deviation over √n); None for a single value.

    Example:
        >>> mean_and_standard_error([1.0, 3.0])
        (2.0, 1.0)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


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
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
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
    """Writes valid JSON: a number that is not finite is written as null."""
    path.write_text(
        json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
