"""Last layers beside each other: the Laplace approximation's and the variational one, on the study's networks.

python benchmarks/study/last_layers.py --data DATA --output FOLDER --page PAGE

Rows and sets are those of configs/study-last-layers.yaml. Everything runs in this one process, and goes on where it was
interrupted; networks are trained where FOLDER/networks has none.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.study.cells import Cell, Results, run
from benchmarks.study.sets import load
from benchmarks.study.settings import Settings

CONFIGURATION = Path(__file__).parents[2] / "configs" / "study-last-layers.yaml"
BASE = "last layer"
SETS = {
    **dict.fromkeys(("boston", "boston_gap", "snelson", "concrete", "concrete_gap", "energy", "energy_gap"), 5),
    **dict.fromkeys(("glass", "ionosphere", "australian"), 5),
    **dict.fromkeys(("glass_no_decay", "ionosphere_no_decay", "australian_no_decay"), 5),
    "fashion_mnist": 3,
}
"""Each set's number of splits."""

Scores = dict[str, dict[int, dict[str, float]]]


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.mean()), float(tensor.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def text(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard error."""
    mean, error = mean_of(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def table(name: str, size: int, rows: Scores) -> list[str]:
    """One set: NLL, its difference from the Laplace last layer, calibration error, AUROC of other inputs, seconds."""
    lines = [f"## {name} ({size} training rows, {len(rows[BASE])} splits)", ""]
    lines += [
        "| | NLL | less the Laplace last layer | RMSE or ECE | OOD AUROC | fit, CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for label, by_split in rows.items():
        own, base = [by_split[key] for key in sorted(by_split)], [rows[BASE][key] for key in sorted(by_split)]
        differences = [one["nll"] - other["nll"] for one, other in zip(own, base, strict=True)]
        second = text([one.get("ece", one.get("rmse", math.nan)) for one in own])
        names = [key for key in own[0] if key.startswith("ood_auroc_")]
        ood = text([sum(one[key] for key in names) / len(names) for one in own]) if names else ""
        cells = [label, text([one["nll"] for one in own]), text(differences) if label != BASE else "", second, ood]
        lines.append(f"| {' | '.join(cells)} | {mean_of([one['fit_seconds'] for one in own])[0]:.2f} |")
    return [*lines, ""]


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    arguments = parser.parse_args()
    settings, results = Settings.read(CONFIGURATION), Results(arguments.output)
    page: list[str] = []
    for name in arguments.sets:
        section = settings.section(name)
        scores: Scores = defaultdict(dict)
        for split in range(SETS.get(name, 5)):
            data = load(section.name, split, arguments.data, section.source)
            kind = "classification" if data.classification else "regression"
            for label, options in section.methods.items():
                if options.get("only", kind) != kind:
                    continue
                cell = Cell(section, split, label, arguments.data, arguments.output / "networks", data.checksum)
                if not results.known(cell, retry=True):
                    results.add(cell, {"status": "done", **run(cell)})
                found = (row for row in results.rows(name) if (row["split"], row["method"]) == (split, label))
                scores[label][split] = next(found)["scores"]
        page += table(name, len(data.train[0]), scores)
        arguments.page.write_text("\n".join(page))


if __name__ == "__main__":
    main()
