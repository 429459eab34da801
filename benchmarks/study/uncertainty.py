"""All methods where uncertainty is the point: gaps in the data, inputs from elsewhere, answers that may be withheld.

    python benchmarks/study/uncertainty.py --results benchmarks/results --output benchmarks/results

Reads the cells of the study, and writes study-uncertainty.md and .png; sets that were not run are left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study.cells import Results
from benchmarks.study.report import GREY, MAP, Table, draw, markdown_line, markdown_rule, ranking
from benchmarks.study.settings import Settings

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "study.yaml"
GAPS = ("boston_gap", "energy_gap", "concrete_gap")
IMAGES = ("mnist", "fashion_mnist")
TABLES = ("glass", "ionosphere", "australian", "breast_wisconsin_original")

INTRODUCTION = """
# Where uncertainty is the point

Columns, each over all splits that were run:

- **gaps:** regression tables whose test rows are the middle third along a feature ({gaps}).
  Mean rank by test NLL, 1 being best, and medians over splits: of NLL less the network's own, and of CRPS divided by
  the network's own. Means would be those of single splits: where the network extrapolates with little noise, its NLL
  goes into the thousands.
- **elsewhere:** AUROC by which the entropy of predictions tells images of three other sets from the network's own.
- **withheld:** area under the risk–coverage curve, times 1000: the share of errors, averaged over how many inputs are
  predicted at all, the least doubtful first. For tables the mean over
  {tables}.

A row in parentheses was run on some of the splits only and is no comparison by the last digit.

![Points: rank in gaps, AUROC of one set of images, withheld predictions on tables](study-uncertainty.png)

*Three of the columns; the line is the network's own value. What is far out is written at the margin.*
"""
PICTURED = ("gaps: rank", f"elsewhere: AUROC, {IMAGES[-1].replace('_', ' ')}", "withheld: tables")


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: Its name.
        values: By method; those without one are not there.
        partial: Methods that were run on some of the splits only.
        digits: After the point.
    """

    title: str
    values: dict[str, float]
    partial: set[str]
    digits: int = 3


def read(folder: Path, names: tuple[str, ...], labels: list[str]) -> dict[str, Table]:
    """Tables of the sets that were run."""
    found = {}
    for name in names:
        if rows := Results(folder).rows(name):
            found[name] = Table(rows, labels)
    return found


def columns(folder: Path, labels: list[str]) -> list[Column]:
    """Columns of what was run, in their order."""
    found = []
    if gaps := read(folder, GAPS, labels):
        ranks = {entry["method"]: entry["rank"] for entry in ranking(gaps) if not math.isnan(entry["rank"])}
        found.append(Column("gaps: rank ↓", ranks, set(), digits=1))
        less = {label: _scores(gaps, label, ["nll"], less=MAP) for label in labels}
        found.append(Column("gaps: NLL less MAP ↓", _medians(less), _partial(gaps, labels)))
        ratios = {label: [_ratios(table, label, "crps") for table in gaps.values()] for label in labels}
        found.append(Column("gaps: CRPS by MAP's ↓", _medians(ratios), _partial(gaps, labels)))
    for image in IMAGES:
        if one := read(folder, (image,), labels):
            names = [name for name in one[image].names() if name.startswith("ood_auroc")]
            title = f"elsewhere: AUROC, {image.replace('_', ' ')} ↑"
            found.append(Column(title, _means(one, labels, names), _partial(one, labels)))
    for names in (TABLES, *((image,) for image in IMAGES)):
        if some := read(folder, names, labels):
            risks = {label: 1000 * value for label, value in _means(some, labels, ["aurc"]).items()}
            title = f"withheld: {'tables' if names is TABLES else names[0].replace('_', ' ')} ↓"
            found.append(Column(title, risks, _partial(some, labels), digits=1))
    return found


def _scores(tables: dict[str, Table], label: str, names: list[str], less: str | None = None) -> list[list[float]]:
    """Over splits, for each set and name that has any."""
    every = [table.scores(label, name, less) for table in tables.values() for name in names]
    return [values for values in every if values]


def _ratios(table: Table, label: str, name: str) -> list[float]:
    pairs = ((table.score(label, split, name), table.score(MAP, split, name)) for split in table.splits)
    return [value / own for value, own in pairs if value is not None and own is not None]


def _medians(values: dict[str, list[list[float]]]) -> dict[str, float]:
    return {label: float(np.median(sum(parts, []))) for label, parts in values.items() if any(parts)}


def _means(tables: dict[str, Table], labels: list[str], names: list[str]) -> dict[str, float]:
    """Over splits, then over sets and names, of methods that have something on each of them."""
    found = {label: _scores(tables, label, names) for label in labels}
    size = len(tables) * len(names)
    return {
        label: float(np.mean([np.mean(own) for own in all_])) for label, all_ in found.items() if len(all_) == size > 0
    }


def _partial(tables: dict[str, Table], labels: list[str]) -> set[str]:
    return {label for label in labels if any(len(t.scores(label, "nll")) < len(t.splits) for t in tables.values())}


def page(found: list[Column], labels: list[str]) -> str:
    """The Markdown page."""
    lines = [INTRODUCTION.strip().format(gaps=", ".join(GAPS), tables=", ".join(TABLES)), ""]
    lines += markdown_rule(["", *(column.title for column in found)])
    for label in labels:
        cells = [_cell(column, label) for column in found]
        if any(cells):
            lines.append(markdown_line([label, *cells]))
    return "\n".join(lines) + "\n"


def _cell(column: Column, label: str) -> str:
    if label not in column.values:
        return ""
    text = f"{column.values[label]:.{column.digits}f}"
    return f"({text})" if label in column.partial else text


def picture(found: list[Column], labels: list[str]) -> Figure:
    """A panel for each of three columns; the line is the network's own value."""
    found = [column for column in found if column.title.startswith(PICTURED)]
    labels = [label for label in labels if any(label in column.values for column in found)]
    figure = Figure(figsize=(2.6 + 1.7 * len(found), 0.9 + 0.21 * len(labels)), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    heights = np.arange(len(labels))[::-1]
    for panel, column in zip(panels, found, strict=True):
        draw(panel, heights, [(column.values[k], math.nan) if k in column.values else None for k in labels])
        if MAP in column.values:
            panel.axvline(column.values[MAP], color=GREY, lw=0.8, zorder=0)
        panel.set_title(column.title.replace(": ", ":\n").replace(", ", ",\n"), fontsize=9)
        panel.set_ylim(-0.8, len(labels) - 0.2)
        panel.set_yticks(heights, labels, fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="y", lw=0.3)
    return figure


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of study-SET.jsonl or .jsonl.xz")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    labels = list(Settings.read(CONFIG).content["methods"])
    found = columns(arguments.results, labels)
    (arguments.output / "study-uncertainty.md").write_text(page(found, labels))
    picture(found, labels).savefig(arguments.output / "study-uncertainty.png", dpi=110)


if __name__ == "__main__":
    main()
