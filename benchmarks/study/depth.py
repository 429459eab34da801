"""Test NLL against depth: one to five hidden layers of 15 tanh units on Snelson's curve.

    python benchmarks/study/depth.py --data DATA --output FOLDER --pages PAGES

Rows are those of configs/study-rows.yaml. Writes study-depth.md and study-depth.png; goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study import yardsticks as yardsticks  # for its entries in the registry
from benchmarks.study.evaluation import scores
from benchmarks.study.last_layers import mean_of
from benchmarks.study.methods import Task, run
from benchmarks.study.rows import Row, Rows, said, script, section_of, table, task_of
from laplace_plus.errors import LaplacePlusError

DEPTHS = (1, 2, 3, 4, 5)
UNITS = 15
BASE = "network"
GEODESICS = "exponential map, prior by validation"

INTRODUCTION = """
# Depth

Snelson's curve, 127 training points, 23 to validate, 50 to test, networks of one to five hidden layers of {units} tanh
units, {seeds} splits: mean ± standard error. `Full` and `KFAC` are tuned by the marginal likelihood. The exponential
map has {n} samples, along the loss of training.

![Test NLL and CPU seconds against depth, a line for each method](study-depth.png)

"""


def measured(task: Task, options: dict[str, Any]) -> Row:
    """Scores of a method, or the error that it failed with."""
    try:
        fitted = run(task, options)
        return {"scores": scores(fitted.predict, task.data), "tuning": fitted.tuning}
    except (LaplacePlusError, ArithmeticError) as error:
        return {"scores": {}, "tuning": {}, "error": f"{type(error).__name__}: {error}"}


def measure(rows: Rows, arguments: Namespace) -> None:
    """All that is missing."""
    section = section_of("snelson")
    for seed in range(arguments.seeds):
        for depth in DEPTHS:
            deep = replace(section, network={"hidden": [UNITS] * depth, "activation": "tanh"})
            task = task_of(deep, seed, arguments)
            for label, options in section.methods.items():
                if options.get("only") != "classification":
                    part = partial(measured, task, options)
                    rows.of(part, method=label, depth=depth, seed=seed)


def page(rows: Rows) -> str:
    """Tables of NLL, of its difference from the network's, and of time."""
    labels = list(dict.fromkeys(row["method"] for row in rows.all))
    seeds = len({row["seed"] for row in rows.all})
    lines = [
        INTRODUCTION.strip().format(units=UNITS, seeds=seeds, n=section_of("snelson").methods[GEODESICS]["n_samples"]),
        "",
    ]
    head = ["", *(f"depth {depth}" for depth in DEPTHS)]

    def of(label: str, depth: int, base: str | None = None) -> list[float]:
        own, other = ({row["seed"]: row["scores"] for row in rows.where(method=m, depth=depth)} for m in (label, base))
        known = (seed for seed in own if own[seed] and (base is None or other.get(seed)))
        return [own[seed]["nll"] - (other[seed]["nll"] if base else 0.0) for seed in known]

    lines += ["Test NLL:", "", *table(head, ([k, *(said(of(k, d)) for d in DEPTHS)] for k in labels))]
    others = [label for label in labels if label != BASE]
    lines += [
        "NLL less the network's:",
        "",
        *table(head, ([k, *(said(of(k, d, BASE)) for d in DEPTHS)] for k in others)),
    ]
    lines += ["CPU seconds to fit, tune and predict, the least of all splits:", ""]
    lines += table(head, ([k, *(_least(rows, k, d) for d in DEPTHS)] for k in others))
    failed = [row for row in rows.all if "error" in row]
    lines += [f"- {row['method']}, depth {row['depth']}, split {row['seed']}: {row['error']}" for row in failed]
    return "\n".join(lines).rstrip() + "\n"


def _least(rows: Rows, label: str, depth: int) -> str:
    return f"{min((row['seconds'] for row in rows.where(method=label, depth=depth)), default=float('nan')):.2g}"


def picture(rows: Rows) -> Figure:
    """NLL and time against depth."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label in dict.fromkeys(row["method"] for row in rows.all):
        every = [[row for row in rows.where(method=label, depth=depth) if row["scores"]] for depth in DEPTHS]
        found = [mean_of([row["scores"]["nll"] for row in some]) if some else (float("nan"),) * 2 for some in every]
        left.errorbar(DEPTHS, [m for m, _ in found], [e for _, e in found], marker="o", ms=3, capsize=2, label=label)
        right.plot(DEPTHS, [min((row["seconds"] for row in some), default=float("nan")) for some in every], "o-", ms=3)
    for panel, title in ((left, "test NLL"), (right, "CPU seconds")):
        panel.set_xlabel("hidden layers")
        panel.set_title(title, fontsize=10)
        panel.set_xticks(DEPTHS)
    right.set_yscale("log")
    left.legend(fontsize=7)
    return figure


def main() -> None:
    """Measure what is missing, and write the page."""
    rows, arguments = script(__doc__ or "", "depth", measure, page)
    picture(rows).savefig(arguments.pages / "study-depth.png", dpi=65)


if __name__ == "__main__":
    main()
