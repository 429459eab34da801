"""Tables, pictures and a ranking from the JSON lines of a study."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAP, TEMPERATURE = "MAP", "MAP + temperature"
"""The rows that all others are compared with."""
OTHERS = (MAP, TEMPERATURE, "early stopping", "ensemble", "ensemble, early stopping", "SWAG")
"""Rows that are no posterior of one trained network."""
BLUE, RED, GREY = "#0072b2", "#d55e00", "#707070"

HIGHER_IS_BETTER = ("accuracy", "ood_auroc")
TITLES = {
    "accuracy": "accuracy ↑",
    "rmse": "RMSE ↓",
    "nll": "NLL ↓",
    "brier": "Brier ↓",
    "ece": "ECE ↓",
    "crps": "CRPS ↓",
    "aurc": "risk–coverage ↓",
}
PANELS = ("nll", "accuracy", "rmse", "ece", "crps", "aurc")
"""Scores in pictures, and their order there."""
COSTS = {"fit_seconds": "fit, s", "seconds_per_1000": "1000 predictions, s", "peak_memory_mib": "peak memory, MiB"}

Rows = list[dict[str, Any]]


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard error; NaN for the error of a single value or of infinite ones."""
    numbers = np.array(values, dtype=np.float64)
    known = len(numbers) > 1 and bool(np.isfinite(numbers).all())
    error = numbers.std(ddof=1) / math.sqrt(len(numbers)) if known else math.nan
    return float(numbers.mean()), float(error)


def shown(values: list[float], sign: str = "") -> str:
    """Mean ± standard error in text; infinities stay visible."""
    if not values:
        return ""
    mean, error = spread(values)
    digits = 3 if abs(mean) < 100 else 1  # noqa: PLR2004
    text = f"{mean:{sign}.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


class Table:
    """The results of one set.

    Args:
        rows: Of its JSON lines.
        labels: Of methods, in the order of the configuration.
    """

    def __init__(self, rows: Rows, labels: Iterable[str]):
        self.rows = rows
        present = {row["method"] for row in rows}
        known = [label for label in labels if label in present]
        self.labels = known + sorted(present - set(known))
        self.splits = sorted({row["split"] for row in rows})
        self._cells = {(row["method"], row["split"]): row for row in rows}

    def score(self, label: str, split: int, name: str) -> float | None:
        """One number, or None where the cell failed or is missing."""
        cell = self._cells.get((label, split))
        if cell is None or cell["status"] != "done" or name not in cell["scores"]:
            return None
        return float(cell["scores"][name])

    def was_run(self, label: str) -> bool:
        """Whether there is a cell for each split, failed or not."""
        return all((label, split) in self._cells for split in self.splits)

    def scores(self, label: str, name: str, less: str | None = None) -> list[float]:
        """Over splits; with ``less``, differences to that row on the same splits."""
        found = []
        for split in self.splits:
            value = self.score(label, split, name)
            other = 0.0 if less is None else self.score(less, split, name)
            if value is not None and other is not None:
                found.append(value - other)
        return found

    def names(self) -> list[str]:
        """All scores, in the order in which they were computed."""
        return list(dict.fromkeys(name for row in self.rows if row["status"] == "done" for name in row["scores"]))

    def markdown(self, title: str) -> str:
        """The set's page."""
        names = self.names()
        standard = [name for name in names if name in TITLES or name.startswith("ood_auroc")]
        legacy = [name for name in names if name.startswith("legacy_")]
        lines = [f"# {title}", "", INTRODUCTION.strip(), ""]
        notes = list(dict.fromkeys(note for row in self.rows for note in row.get("notes", ())))
        lines += [
            f"Splits: {', '.join(map(str, self.splits))}. " + " ".join(f"{_sentence(note)}" for note in notes),
            "",
        ]
        head = [_title(name) for name in standard]
        position = standard.index("nll") + 1 if "nll" in standard else len(standard)
        head[position:position] = ["NLL less MAP", "NLL less MAP + T"]
        lines += markdown_rule(["", *head])
        for label in self.labels:
            cells = [shown(self.scores(label, name)) for name in standard]
            cells[position:position] = [
                "" if label == other else shown(self.scores(label, "nll", other), "+") for other in (MAP, TEMPERATURE)
            ]
            lines.append(markdown_line([label + self._missing(label), *cells]))
        lines += ["", "## Costs", "", *markdown_rule(["", *COSTS.values()])]
        for label in self.labels:
            lines.append(markdown_line([label, *(shown(self.scores(label, name)) for name in COSTS)]))
        if legacy:
            lines += ["", "## Legacy definitions", "", LEGACY.strip(), ""]
            lines += markdown_rule(["", *(name.removeprefix("legacy_").replace("_", " ") for name in legacy)])
            for label in self.labels:
                lines.append(markdown_line([label, *(shown(self.scores(label, name)) for name in legacy)]))
        lines += ["", *self._tunings(), *self._failures()]
        return "\n".join(lines).rstrip() + "\n"

    def _missing(self, label: str) -> str:
        own = [row for row in self.rows if row["method"] == label]
        done = sum(self.score(label, split, "nll") is not None for split in self.splits)
        failed = sum(row["status"] == "failed" for row in own)
        lost = sum(row.get("tuning", {}).get("failed_samples", 0) for row in own)
        remarks = [f"{done} of {len(self.splits)} splits"] if done < len(self.splits) else []
        remarks += [f"{failed} failed"] if failed else []
        remarks += [f"without {lost} samples that failed"] if lost else []
        return f" ({', '.join(remarks)})" if remarks else ""

    def _tunings(self) -> list[str]:
        lines = ["## How each was tuned", "", "Of the first split that is there.", ""]
        for label in self.labels:
            row = next((r for r in self.rows if r["method"] == label and r["status"] == "done"), None)
            if row is None:
                continue
            said = "; ".join(f"{key} {_text(value)}" for key, value in row["tuning"].items())
            lines.append(f"- {label}: {said or 'not at all'}." + "".join(f" *{w[:300]}*" for w in row["warnings"][:1]))
        return [*lines, ""]

    def _failures(self) -> list[str]:
        failed = [row for row in self.rows if row["status"] == "failed"]
        if not failed:
            return []
        lines = ["## Failed cells", ""]
        for row in failed:
            place = f" ({row['place']})" if "place" in row else ""
            lines.append(f"- {row['method']}, split {row['split']}: {row['error'][:600]}{place}")
        return [*lines, ""]

    def picture(self, title: str) -> Figure:
        """The main scores of all rows less MAP's, split by split, with MAP + temperature's as a dotted line."""
        there = self.names()
        names = [name for name in PANELS if name in there]
        names += [name for name in there if name.startswith("ood_auroc")]
        less = MAP if MAP in self.labels else None
        figure = Figure(figsize=(3.1 + 3.1 * len(names), 1.2 + 0.24 * len(self.labels)), layout="constrained")
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        heights = np.arange(len(self.labels))[::-1]
        for panel, name in zip(panels, names, strict=True):
            found = [spread(values) if (values := self.scores(label, name, less)) else None for label in self.labels]
            draw(panel, heights, found)
            if less is not None:
                panel.axvline(0.0, color=GREY, lw=0.8, zorder=0)
            if values := self.scores(TEMPERATURE, name, less):
                panel.axvline(spread(values)[0], color=GREY, lw=0.8, ls=":", zorder=0)
            panel.set_title(_title(name) if less is None else f"{_title(name)} less MAP", fontsize=9)
            panel.set_yticks(heights, self.labels, fontsize=8)
            panel.tick_params(axis="x", labelsize=7)
            panel.grid(axis="y", lw=0.3)
        figure.suptitle(f"{title}: mean ± standard error over {len(self.splits)} splits", fontsize=10)
        return figure


def draw(panel: Axes, heights: np.ndarray, found: list[tuple[float, float] | None]) -> None:
    """Points with their errors; what is far out is written at the margin, and what is not there is said."""
    low, high = _range([pair[0] for pair in found if pair is not None and math.isfinite(pair[0])])
    for height, pair in zip(heights, found, strict=True):
        if pair is None:
            panel.text(low, height, " none", va="center", fontsize=7, color=GREY)
        elif low <= pair[0] <= high:
            error = None if math.isnan(pair[1]) else pair[1]
            panel.errorbar(pair[0], height, xerr=error, fmt="o", ms=4, lw=1.2, color=BLUE)
        else:
            far_right = not pair[0] < low
            text = f"{pair[0]:.3g} → " if far_right else f" ← {pair[0]:.3g}"
            where, side = (high, "right") if far_right else (low, "left")
            panel.text(where, height, text, va="center", ha=side, fontsize=7)
    panel.set_xlim(low, high)


def _range(values: list[float]) -> tuple[float, float]:
    """Limits that show most of the values: outliers are written at the margin."""
    if not values:
        return 0.0, 1.0
    lowest, middle, highest = min(values), float(np.median(values)), max(values)
    width = max(3 * float(np.quantile(values, 0.75) - np.quantile(values, 0.25)), 1e-3 * max(abs(middle), 1.0))
    low, high = max(lowest, middle - width), min(highest, middle + width)
    pad = 0.06 * max(high - low, 1e-6)
    return low - pad, high + pad


def ranking(tables: dict[str, Table], name: str = "nll", n_bootstrap: int = 2000) -> list[dict[str, Any]]:
    """Mean ranks over sets and splits, with an interval, and mean differences to MAP and MAP + temperature.

    Methods that were run on all splits of all sets are ranked within each split, 1 being best; a cell that failed
    shares the last places. Others have no rank, since ranks among fewer methods are no comparison; their differences
    are given. Ranks are averaged over a set's splits, then over sets. The interval of 95 % is of the bootstrap: sets
    are drawn with replacement, and splits of each; with a single set, its splits.

    Returns:
        One entry for each method, best first.
    """
    every = list(dict.fromkeys(label for table in tables.values() for label in table.labels))
    labels = [label for label in every if all(table.was_run(label) for table in tables.values())]
    sign = -1.0 if name.startswith(HIGHER_IS_BETTER) else 1.0
    ranks = {
        key: np.stack([_ranks(table, split, labels, name, sign) for split in table.splits])
        for key, table in tables.items()
    }
    generator, keys = np.random.default_rng(0), list(tables)
    draws = []
    for _ in range(n_bootstrap):
        chosen = generator.integers(len(keys), size=len(keys))
        drawn = []
        for k in chosen:
            own = ranks[keys[k]]
            drawn.append(own[generator.integers(len(own), size=len(own))].mean(0))
        draws.append(np.stack(drawn).mean(0))
    low, high = np.quantile(np.stack(draws), (0.025, 0.975), axis=0)
    mean = np.stack([own.mean(0) for own in ranks.values()]).mean(0)
    result = []
    for label in every:
        found = [values[labels.index(label)] if label in labels else math.nan for values in (mean, low, high)]
        entry: dict[str, Any] = {"method": label, **dict(zip(("rank", "low", "high"), map(float, found), strict=True))}
        entry["sets"] = sum(bool(table.scores(label, name)) for table in tables.values())
        for other in (MAP, TEMPERATURE):
            entry[other] = [
                v for table in tables.values() if (v := _mean_of(table.scores(label, name, other))) is not None
            ]
        result.append(entry)
    return sorted(result, key=lambda entry: (math.isnan(entry["rank"]), entry["rank"]))


def _ranks(table: Table, split: int, labels: list[str], name: str, sign: float) -> np.ndarray:
    """Ranks of all labels on a split; cells that failed share the last ones."""
    found = [table.score(label, split, name) for label in labels]
    values = np.array([np.inf if value is None or math.isnan(value) else sign * value for value in found])
    below = (values[None] < values[:, None]).sum(1)
    same = (values[None] == values[:, None]).sum(1)
    return below + (same + 1) / 2


def _mean_of(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def overview(tables: dict[str, Table], entries: list[dict[str, Any]]) -> str:
    """The page on all sets together: the ranking."""
    lines = ["# The study: ranking", "", RANKING.strip().format(sets=", ".join(tables)), ""]
    lines += markdown_rule(["", "mean rank", "95 % interval", "NLL less MAP", "NLL less MAP + T", "sets"])
    for entry in entries:
        ranked = math.isfinite(entry["rank"])
        rank = [f"{entry['rank']:.1f}", f"{entry['low']:.1f} – {entry['high']:.1f}"] if ranked else ["", ""]
        apart = ["" if entry["method"] == other else shown(entry[other], "+") for other in (MAP, TEMPERATURE)]
        lines.append(markdown_line([entry["method"], *rank, *apart, str(entry["sets"])]))
    return "\n".join(lines) + "\n"


def ranking_picture(entries: list[dict[str, Any]]) -> Figure:
    """Mean ranks with their intervals, best on top."""
    entries = [entry for entry in entries if math.isfinite(entry["rank"])]
    figure = Figure(figsize=(6.4, 1.2 + 0.21 * len(entries)), layout="constrained")
    panel = figure.subplots()
    heights = np.arange(len(entries))[::-1]
    for height, entry in zip(heights, entries, strict=True):
        color, mark = (RED, "s") if entry["method"] in OTHERS else (BLUE, "o")
        panel.plot([entry["low"], entry["high"]], [height, height], lw=1.4, color=color)
        panel.plot(entry["rank"], height, mark, ms=5, color=color)
    for label, color, mark in (("a posterior", BLUE, "o"), ("no posterior", RED, "s")):
        panel.plot([], [], mark, ms=5, color=color, label=label)
    panel.set_yticks(heights, [entry["method"] for entry in entries], fontsize=9)
    panel.set(xlabel="mean rank by test NLL (1 is best), with 95 % interval", xlim=(0, None))
    panel.set_ylim(-0.8, len(entries) - 0.2)
    panel.grid(axis="y", lw=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower left", frameon=False)
    return figure


def write(folder: Path, tables: dict[str, Table]) -> None:
    """Pages and pictures of all sets, and the ranking."""
    for name, table in tables.items():
        (folder / f"study-{name}.md").write_text(table.markdown(name))
        if table.names():
            table.picture(name).savefig(folder / f"study-{name}.png", dpi=110)
    entries = ranking(tables)
    (folder / "study.md").write_text(overview(tables, entries))
    ranking_picture(entries).savefig(folder / "study.png", dpi=110)


def markdown_rule(head: list[str]) -> list[str]:
    """A table's first two lines."""
    return [markdown_line(head), "|" + "---|" * len(head)]


def markdown_line(cells: list[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def _title(name: str) -> str:
    return TITLES.get(name, f"AUROC, {name.removeprefix('ood_auroc_').replace('_', ' ')} ↑")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(one)}" for key, one in value.items())
    return str(value)


INTRODUCTION = """
Test scores, mean ± standard error over splits; differences are paired by split, negative where the row is better. Every
method is tuned on training data or on the validation part, never on the test part; what was decided after looking at
test scores is listed in the study's README. NLL is in nats, of the predictive mixture; CRPS is that of a normal
distribution with the prediction's mean and variance; Brier sums over classes; ECE has 15 bins; risk–coverage is the
area under the curve of the error (squared, in regression) over the share of inputs that are predicted at all, the least
doubtful first; doubt is the entropy of the prediction, for numbers its variance.
"""

LEGACY = """
As the authors' programs define them, for comparison with published tables only: NLL of the softmax of the mean outputs;
the samples' mean NLL; Brier divided by the number of classes; the ECE over 100 bins that leaves out confidences of 0.99
and more; AUROC by one minus the largest probability, or by the largest variance of a class's probability.
"""

RANKING = """
By test NLL, over {sets}.

Ranks within each split, averaged over splits and then over sets; 1 is best. A method that failed on a split shares the
last places there; one that was not run on all splits of all sets has no rank, only differences where it was. Intervals
are of the bootstrap over sets and splits. Differences are means over sets ± standard error, negative where the row is
better; infinite losses are left out of them, not out of the ranks.
"""
