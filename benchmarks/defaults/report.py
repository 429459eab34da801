"""The page of the battery: whether bars are met, and a row for each cell.

python benchmarks/defaults/report.py FOLDER/defaults.jsonl [--page benchmarks/results/defaults.md]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.defaults.cells import CELLS
from benchmarks.study.report import markdown_line, markdown_rule, shown, spread

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ("KFAC", "Diagonal", "last layer", "Full")
NETWORK, VALIDATED, DEFAULT, EVIDENCE = "network", "validated", "default", "marginal_likelihood"
PEER = "laplace-torch "

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """The rows of a file, the last one of each cell, seed and class; a line that was cut off is none."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["cell"], row["seed"], row["class"]] = row
    return list(found.values())


@dataclass(frozen=True)
class Pair:
    """A cell and a class of posteriors: its rows of all seeds, each beside the network's own row."""

    cell: str
    name: str
    rows: Rows
    networks: Rows
    peers: list[float | None]
    usual: list[float | None]  # of laplace-torch with all options left out: its last layer

    def values(self, score: str, of: str) -> list[float]:
        """A score of the network (itself or validated), or of a posterior, over seeds; empty where it has none."""
        rows = self.networks if of in (NETWORK, VALIDATED) else self.rows
        return [row[of][score] for row in rows if score in row.get(of, {})]

    def less(self, score: str, of: str, other: str = NETWORK) -> list[float]:
        """Paired differences of two scores over seeds."""
        return [a - b for a, b in zip(self.values(score, of), self.values(score, other), strict=False)]

    def mean(self, score: str, of: str, other: str = NETWORK) -> float:
        """Of the paired differences; NaN where there are none."""
        found = self.less(score, of, other)
        return spread(found)[0] if found else math.nan

    def holds(self, score: str, margin: float) -> bool:
        """Whether the default is worse than the network by at most a margin, or by a standard error."""
        mean, error = spread(self.less(score, DEFAULT))
        return mean <= margin or mean <= error

    def against(self, peers: list[float | None]) -> list[float]:
        """Paired differences of the default's NLL to others, without those that failed or were not run."""
        return [own - peer for own, peer in zip(self.values("nll", DEFAULT), peers, strict=True) if peer is not None]


def pairs_of(rows: Rows) -> list[Pair]:
    """All pairs of a cell and a class that have a result, in the order of the cells."""
    by_key = {(row["cell"], row["class"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    pairs = []
    for cell in CELLS:
        for name in CLASSES:
            kept = [s for s in seeds if DEFAULT in by_key.get((cell, name, s), {})]
            kept = [s for s in kept if NETWORK in by_key.get((cell, NETWORK, s), {})]
            if kept:
                own, networks = ([by_key[cell, label, s] for s in kept] for label in (name, NETWORK))
                peers, usual = (
                    [by_key.get((cell, PEER + label, s), {}).get("nll") for s in kept] for label in (name, "last layer")
                )
                pairs.append(Pair(cell, name, own, networks, peers, usual))
    return pairs


def _share(found: Iterable[bool]) -> str:
    values = list(found)
    return f"{sum(values) / len(values):.0%} of {len(values)}" if values else "–"


def _worst(pairs: list[Pair], score: str) -> str:
    found = [(pair.mean(score, DEFAULT), pair) for pair in pairs]
    if not found:
        return "–"
    worst, pair = max(found, key=lambda one: one[0])
    return f"{worst:+.3f} ({pair.cell}, {pair.name})"


def _gain(pairs: list[Pair], of: str, most: float = math.inf) -> str:
    """Mean over pairs whose validated network gains more than so much (or of all)."""
    found = [-pair.mean("nll", of) for pair in pairs if most == math.inf or -pair.mean("nll", VALIDATED) > most]
    return f"{sum(found) / len(found):.3f} of {len(found)}" if found else "–"


def _kept(pairs: list[Pair], score: str, of: str, sign: float) -> str:
    """The default's gain over the network as a share of another's, where that gains: of sums over pairs."""
    found = [(sign * pair.mean(score, DEFAULT), sign * pair.mean(score, of)) for pair in pairs]
    found = [(own, other) for own, other in found if other > 0]
    total = sum(other for _, other in found)
    return f"{sum(own for own, _ in found) / total:.0%} of {len(found)}" if found else "–"


def _bars() -> list[tuple[str, str, Callable[[list[Pair]], str]]]:
    """What is asked, how much, and how it is computed from pairs."""
    classes: Callable[[list[Pair]], list[Pair]] = lambda pairs: [pair for pair in pairs if pair.values("ece", NETWORK)]  # noqa: E731
    strange: Callable[[list[Pair]], list[Pair]] = lambda pairs: [p for p in pairs if p.values("ood_auroc", NETWORK)]  # noqa: E731
    gaps: Callable[[list[Pair]], list[Pair]] = lambda pairs: [pair for pair in pairs if pair.cell.endswith("_gap")]  # noqa: E731
    usual: Callable[[list[Pair]], list[list[float]]] = lambda pairs: [  # noqa: E731
        found for pair in pairs if pair.name == "KFAC" and (found := pair.against(pair.usual))
    ]
    return [
        (
            "NLL at most .005 above the network's, or one standard error",
            "95 %",
            lambda p: _share(q.holds("nll", 0.005) for q in p),
        ),
        ("largest mean NLL difference to the network", "+0.020", lambda p: _worst(p, "nll")),
        (
            "ECE at most .01 above the network's, or one standard error",
            "95 %",
            lambda p: _share(q.holds("ece", 0.01) for q in classes(p)),
        ),
        ("largest mean ECE difference to the network", "", lambda p: _worst(classes(p), "ece")),
        ("mean NLL gain of the default", "that of validation − .01", lambda p: _gain(p, DEFAULT)),
        ("mean NLL gain of validation", "", lambda p: _gain(p, VALIDATED)),
        (
            "the default's, where validation gains over .01",
            "that of validation − .01",
            lambda p: _gain(p, DEFAULT, 0.01),
        ),
        ("validation's, where it gains over .01", "", lambda p: _gain(p, VALIDATED, 0.01)),
        ("the same for classes alone: the default's", "", lambda p: _gain(classes(p), DEFAULT, 0.01)),
        ("validation's", "", lambda p: _gain(classes(p), VALIDATED, 0.01)),
        (
            "kept of the marginal likelihood's OOD AUROC gain",
            "80 %",
            lambda p: _kept(strange(p), "ood_auroc", EVIDENCE, 1),
        ),
        ("kept of its NLL gain on gap splits", "90 %", lambda p: _kept(gaps(p), "nll", EVIDENCE, -1)),
        ("kept of validation's NLL gain on gap splits", "", lambda p: _kept(gaps(p), "nll", VALIDATED, -1)),
        (
            "NLL less than laplace-torch's with the same weights and structure",
            "",
            lambda p: _share(sum(d) < 0 for q in p if (d := q.against(q.peers))),
        ),
        (
            "cells where KFAC's NLL is less than that of laplace-torch's default",
            "80 %",
            lambda p: _share(sum(d) < 0 for d in usual(p)),
        ),
        (
            "cells where it is, or is more by at most a standard error",
            "",
            lambda p: _share(mean <= max(0.0, error) for mean, error in map(spread, usual(p))),
        ),
    ]


INTRODUCTION = """
`python benchmarks/defaults/run.py --data DATA --output FOLDER --workers 2 --peer` measured the rows of this page.
`python benchmarks/defaults/report.py FOLDER/defaults.jsonl` wrote it.

Each cell is a problem, a network and a way of training, with splits and networks by seed. Posteriors are fitted with
all options left out, and tuned by `fit_prior_precision()`. They are compared with the network's own predictions.
In regression its noise is the root mean square of training residuals. "Validated" is the network with the temperature,
or the noise, that is best on held-out data. "Marginal likelihood" is `fit_prior_precision("marginal_likelihood")`.
laplace-torch is run with its own defaults: last layer, link, marginal likelihood, in regression for prior and noise.

NLL, Brier score and CRPS are means over at most 1000 test targets. CRPS is in standard deviations of the targets. OOD
AUROC is by the mutual information, in regression by the epistemic standard deviation, and by the entropy for networks.
The defaults were chosen on the development cells, midpoints and votes of neighbours among them. The others were looked
at eight times, each time when a rule was settled; [this page](defaults-without-midpoints.md) has the fifth. Four times
they gave a reason for the next rule: the first ranked unfamiliar inputs badly. The fourth, with exact steps for all
networks of up to 5000 weights, had a higher ECE than the network in 16 % of pairs. The sixth, with midpoints, gained
more where networks interpolate, and had a higher ECE in 18 % of pairs; the seventh, which bounded what midpoints may
widen by a factor, in 16 %. The eighth, on this page, bounds it by votes of neighbours. That came from a look at mean
confidences in two of the held-out tables (breast cancer without decay, wine); its details came from development cells
and about 50 other problems. It is for classes with one tensor as input: rows of regression and of language models, and
those of the networks and of laplace-torch, are from the seventh look. ECE is higher in three pairs, all of wine, which
has 26 test rows.
"""

TABLES = """
Differences of NLL to the network's, ± the standard error of paired differences over seeds; negative is better. A star
marks development cells.
"""

SCORES = """
Of KFAC with the default, less the network: ECE, and Brier score or CRPS. OOD AUROC of the network, of KFAC with the
marginal likelihood, and with the default. Then NLL less the network's of laplace-torch's KFAC over all weights, where
that was run. Seconds of processor time are those of KFAC's fit and default tuning.
"""


def page(rows: Rows) -> str:
    """The page of all rows."""
    pairs = pairs_of(rows)
    parts = {}
    for kind, development in (("development", True), ("held-out", False)):
        part = [pair for pair in pairs if CELLS[pair.cell].development is development]
        if part:
            parts[f"{len({pair.cell for pair in part})} {kind} cells"] = part
    n_seeds = len({row["seed"] for row in rows if DEFAULT in row})
    lines = ["# The default tuning, cell by cell", "", INTRODUCTION.strip(), "", "## Bars", ""]
    lines += [f"Means over {n_seeds} seeds. Shares are of pairs of a cell and a class of posteriors.", ""]
    lines += markdown_rule(["", "asked", *parts])
    lines += [markdown_line([title, asked, *map(figure, parts.values())]) for title, asked, figure in _bars()]
    chosen = Counter(row["chosen"] for pair in pairs for row in pair.rows)
    lines += ["", "The default chose " + ", ".join(f"{key} {n} times" for key, n in chosen.most_common()) + ".", ""]
    lines += ["## NLL", "", TABLES.strip(), "", *_nll(pairs), "", "## Other scores", "", SCORES.strip(), ""]
    lines += [*_others(pairs), "", *_failures(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _by_cell(pairs: list[Pair]) -> dict[str, dict[str, Pair]]:
    found: dict[str, dict[str, Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.cell, {})[pair.name] = pair
    return found


def _title(cell: str) -> str:
    return cell + (" *" if CELLS[cell].development else "")


def _nll(pairs: list[Pair]) -> list[str]:
    lines = markdown_rule(["", "network", *CLASSES, "validated", "KFAC, marginal likelihood"])
    for cell, own in _by_cell(pairs).items():
        one = own.get("KFAC", next(iter(own.values())))
        cells = [shown(own[name].less("nll", DEFAULT), "+") if name in own else "" for name in CLASSES]
        others = [shown(one.less("nll", VALIDATED), "+"), shown(one.less("nll", EVIDENCE), "+")]
        lines.append(markdown_line([_title(cell), shown(one.values("nll", NETWORK)), *cells, *others]))
    return lines


def _others(pairs: list[Pair]) -> list[str]:
    head = ["", "ECE", "Brier or CRPS", "OOD network", "OOD marginal likelihood", "OOD default", "laplace-torch", "s"]
    lines = markdown_rule(head)
    for pair in (own["KFAC"] for own in _by_cell(pairs).values() if "KFAC" in own):
        proper = "brier" if pair.values("brier", NETWORK) else "crps"
        cells = [shown(pair.less(score, DEFAULT), "+") for score in ("ece", proper)]
        cells += [shown(pair.values("ood_auroc", of)) for of in (NETWORK, EVIDENCE, DEFAULT)]
        both = zip(pair.peers, pair.values("nll", NETWORK), strict=True)
        cells.append(shown([peer - own for peer, own in both if peer is not None], "+"))
        costs = [sum(row[key] for row in pair.rows) / len(pair.rows) for key in ("fit_seconds", "tuning_seconds")]
        lines.append(markdown_line([_title(pair.cell), *cells, " + ".join(f"{cost:.1f}" for cost in costs)]))
    return lines


def _failures(rows: Rows) -> list[str]:
    """Errors, each once, with the number of seeds."""
    found = Counter((row["cell"], row["class"], row["error"]) for row in rows if "error" in row)
    if not found:
        return []
    lines = ["## Failures", ""]
    for (cell, name, error), n in sorted(found.items()):
        lines.append(f"- {cell}, {name}, {n} seeds: `{error.splitlines()[0][:120]}`")
    return lines


def main() -> None:
    """Write the page of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "results" / "defaults.md")
    arguments = parser.parse_args()
    arguments.page.write_text(page(read(arguments.results)))


if __name__ == "__main__":
    main()
