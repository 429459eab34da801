"""All methods where uncertainty is the point: gaps in the data, inputs from elsewhere, predictions that may be withheld.

    python benchmarks/study/uncertainty.py --results benchmarks/results --output benchmarks/results

Reads the JSON lines of the study, and writes study-uncertainty.md and .png; sets that were not run are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study.report import MAP, Table, markdown_line, markdown_rule, ranking
from benchmarks.study.settings import Settings

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "study.yaml"
GAPS = ("boston_gap", "energy_gap", "concrete_gap")
IMAGES = ("mnist", "fashion_mnist")
TABLES = ("glass", "ionosphere", "australian", "breast_wisconsin_original")

INTRODUCTION = """
# Where uncertainty is the point

Columns, each over all splits that were run:

- **gaps:** mean rank by test NLL on regression tables whose test rows are the middle third along a feature ({gaps}), 1
  being best, and the median over splits of NLL and of CRPS less the network's own, in units of the target's noise-free
  scale as the sets' pages have them. Means would be those of single splits: where the network extrapolates with little
  noise, its NLL goes into the thousands.
- **elsewhere:** AUROC by which the entropy of predictions tells images of three other sets from the network's own.
- **withheld:** area under the risk–coverage curve, times 1000: the share of errors, averaged over how many inputs are
  predicted at all, the least doubtful first. For tables the mean over {tables}.

A row in parentheses was run on some of the splits only and is no comparison by the last digit.
"""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: Its name.
        value: Of a method, None where there is none.
        higher: Whether more is better.
        digits: After the point.
        partial: Whether a method has it on some of the splits only.
    """

    title: str
    value: Callable[[str], float | None]
    partial: Callable[[str], bool]
    higher: bool = False
    digits: int = 3


def read(folder: Path, names: tuple[str, ...], labels: list[str]) -> dict[str, Table]:
    """Tables of the sets that were run."""
    found = {}
    for name in names:
        path = folder / f"study-{name}.jsonl"
        if path.exists():
            found[name] = Table([json.loads(line) for line in path.read_text().splitlines()], labels)
    return found


def _over(tables: dict[str, Table], label: str, name: str, less: str | None = None) -> list[list[float]]:
    return [values for table in tables.values() if (values := table.scores(label, name, less))]


def _partial(tables: dict[str, Table], label: str) -> bool:
    return any(len(table.scores(label, "nll")) < len(table.splits) for table in tables.values())


def columns(folder: Path, labels: list[str]) -> list[Column]:
    """Columns of what was run, in their order."""
    found = []
    gaps, tables = read(folder, GAPS, labels), read(folder, TABLES, labels)
    if gaps:
        ranks = {entry["method"]: entry["rank"] for entry in ranking(gaps)}

        def rank(label: str) -> float | None:
            value = ranks.get(label, math.nan)
            return None if math.isnan(value) else value

        found.append(Column("gaps: rank", rank, lambda label: False, digits=1))
        for name, title in (("nll", "NLL"), ("crps", "CRPS")):
            found.append(
                Column(
                    f"gaps: {title} less MAP",
                    lambda label, name=name: _median(_over(gaps, label, name, MAP)),  # type: ignore[misc]
                    lambda label: _partial(gaps, label),
                )
            )
    for image in IMAGES:
        if one := read(folder, (image,), labels):
            found.append(
                Column(
                    f"elsewhere: AUROC, {image.replace('_', ' ')}",
                    lambda label, table=one[image]: _auroc(table, label),  # type: ignore[misc]
                    lambda label, one=one: _partial(one, label),  # type: ignore[misc]
                    higher=True,
                )
            )
    for title, several in (
        ("tables", tables),
        *((name.replace("_", " "), read(folder, (name,), labels)) for name in IMAGES),
    ):
        if several:
            found.append(
                Column(
                    f"withheld: {title}",
                    lambda label, several=several: _mean(_over(several, label, "aurc"), len(several), 1000),  # type: ignore[misc]
                    lambda label, several=several: _partial(several, label),  # type: ignore[misc]
                    digits=1,
                )
            )
    return found


def _median(values: list[list[float]]) -> float | None:
    return float(np.median(np.concatenate([np.array(own) for own in values]))) if values else None


def _mean(values: list[list[float]], n_sets: int, times: float = 1.0) -> float | None:
    """Over splits, then over sets; None unless there is something on each of them."""
    return times * float(np.mean([np.mean(own) for own in values])) if len(values) == n_sets else None


def _auroc(table: Table, label: str) -> float | None:
    names = [name for name in table.names() if name.startswith("ood_auroc")]
    return _mean([values for name in names if (values := table.scores(label, name))], len(names)) if names else None


def page(found: list[Column], labels: list[str]) -> str:
    """The Markdown page."""
    lines = [INTRODUCTION.strip().format(gaps=", ".join(GAPS), tables=", ".join(TABLES)), ""]
    lines += markdown_rule(["", *(f"{column.title} {'↑' if column.higher else '↓'}" for column in found)])
    for label in labels:
        cells = [_cell(column, label) for column in found]
        if any(cells):
            lines.append(markdown_line([label, *cells]))
    return "\n".join(lines) + "\n"


def _cell(column: Column, label: str) -> str:
    value = column.value(label)
    if value is None:
        return ""
    text = f"{value:.{column.digits}f}"
    return f"({text})" if column.partial(label) else text


def picture(found: list[Column], labels: list[str]) -> Figure:
    """All columns, a panel each; the network's own value is the line."""
    labels = [label for label in labels if any(column.value(label) is not None for column in found)]
    figure = Figure(figsize=(3.1 + 2.3 * len(found), 1.2 + 0.24 * len(labels)), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    heights = np.arange(len(labels))[::-1]
    for panel, column in zip(panels, found, strict=True):
        for height, label in zip(heights, labels, strict=True):
            value = column.value(label)
            if value is not None:
                filled = "#3b6ea8" if not column.partial(label) else "none"
                panel.plot(value, height, "o", ms=4, mfc=filled, mec="#3b6ea8")
        own = column.value(MAP)
        if own is not None:
            panel.axvline(own, color="#8a8a8a", lw=0.8, zorder=0)
        panel.set_title(f"{column.title} {'↑' if column.higher else '↓'}", fontsize=8)
        panel.set_yticks(heights, labels, fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="y", lw=0.3)
    return figure


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of study-SET.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    labels = list(Settings.read(CONFIG).content["methods"])
    found = columns(arguments.results, labels)
    (arguments.output / "study-uncertainty.md").write_text(page(found, labels))
    picture(found, labels).savefig(arguments.output / "study-uncertainty.png", dpi=110)


if __name__ == "__main__":
    main()
