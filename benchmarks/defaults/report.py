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

    def regret(self) -> float:
        """Mean NLL of the default less that of the best scale on test data, the network among them."""
        best = [min(*row["by_scale"], own) for row, own in zip(self.rows, self.values("nll", NETWORK), strict=True)]
        return spread([own - least for own, least in zip(self.values("nll", DEFAULT), best, strict=True)])[0]

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


def _worst(pairs: list[Pair], figure: Callable[[Pair], float]) -> str:
    found = [(figure(pair), pair) for pair in pairs]
    if not found:
        return "–"
    worst, pair = max(found, key=lambda one: one[0])
    return f"{worst:+.3f} ({pair.cell}, {pair.name})"


def _gain(pairs: list[Pair], of: str) -> str:
    """Mean over pairs whose validated network gains more than .01 nats."""
    found = [-pair.mean("nll", of) for pair in pairs if -pair.mean("nll", VALIDATED) > 0.01]  # noqa: PLR2004
    return f"{sum(found) / len(found):.3f} of {len(found)}" if found else "–"


def _kept(pairs: list[Pair], score: str, sign: float) -> str:
    """The default's gain over the network as a share of the marginal likelihood's, where that gains, of sums."""
    found = [(sign * pair.mean(score, DEFAULT), sign * pair.mean(score, EVIDENCE)) for pair in pairs]
    found = [(own, other) for own, other in found if other > 0]
    total = sum(other for _, other in found)
    return f"{sum(own for own, _ in found) / total:.0%} of {len(found)}" if found else "–"


def _bars() -> list[tuple[str, str, Callable[[list[Pair]], str]]]:
    """What is asked, how much, and how it is computed from pairs."""

    def classes(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.values("ece", NETWORK)]

    def numbers(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.values("crps", NETWORK)]

    def strange(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.values("ood_auroc", NETWORK)]

    def gaps(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair.cell.endswith("_gap")]

    def above(score: str, of: str = NETWORK) -> Callable[[Pair], float]:
        return lambda pair: pair.mean(score, DEFAULT, of)

    def share(figure: Callable[[Pair], float], most: float) -> Callable[[list[Pair]], str]:
        return lambda pairs: _share(figure(pair) <= most for pair in pairs)

    nll, ece, validated = above("nll"), above("ece"), above("nll", VALIDATED)
    evidence = above("nll", EVIDENCE)
    return [
        (
            "classes: NLL within .05 of the best scale's on test data",
            "92 %",
            lambda p: share(Pair.regret, 0.05)(classes(p)),
        ),
        ("the same, within .02", "", lambda p: share(Pair.regret, 0.02)(classes(p))),
        ("furthest behind the best scale", "", lambda p: _worst(classes(p), Pair.regret)),
        (
            "classes: NLL more than .05 above the marginal likelihood's",
            "at most 1 %",
            lambda p: _share(evidence(pair) > 0.05 for pair in classes(p)),  # noqa: PLR2004
        ),
        ("NLL at most .005 above the network's", "98 %", share(nll, 0.005)),
        ("furthest above the network's", "+0.020", lambda p: _worst(p, nll)),
        ("ECE at most .01 above the network's", "96 %", lambda p: share(ece, 0.01)(classes(p))),
        ("furthest above the network's", "", lambda p: _worst(classes(p), ece)),
        (
            "regression: NLL at most .02 above that of a validated noise",
            "100 %",
            lambda p: share(validated, 0.02)(numbers(p)),
        ),
        ("furthest above it", "", lambda p: _worst(numbers(p), validated)),
        ("kept of the marginal likelihood's NLL gain on gap splits", "90 %", lambda p: _kept(gaps(p), "nll", -1)),
        ("kept of its OOD AUROC gain", "80 %", lambda p: _kept(strange(p), "ood_auroc", 1)),
        (
            "mean NLL gain where validation gains over .01: the default's",
            "",
            lambda p: _gain(classes(p), DEFAULT),
        ),
        ("the same: validation's", "", lambda p: _gain(classes(p), VALIDATED)),
        (
            "NLL less than laplace-torch's with the same weights and structure",
            "",
            lambda p: _share(sum(d) < 0 for q in p if (d := q.against(q.peers))),
        ),
        (
            "cells where KFAC's NLL is less than that of laplace-torch's default",
            "80 %",
            lambda p: _share(sum(d) < 0 for q in p if q.name == "KFAC" and (d := q.against(q.usual))),
        ),
    ]


INTRODUCTION = """
`python benchmarks/defaults/run.py --data DATA --output FOLDER` measured the rows of this page.
`python benchmarks/defaults/report.py FOLDER/defaults.jsonl` wrote it.

Each cell is a problem, a network and a way of training, with splits and networks by seed. Posteriors are fitted with
all options left out, and tuned by `fit_prior_precision()`. They are compared with the network's own predictions, and
for classes with the marginal likelihood's posterior at eleven scales of its covariance, from 10 to .0001. The best of
these, or of the network, is chosen on test data, so that it is a bound. In regression the network's noise is the root
mean square of training residuals. "Validated" is the network with the temperature, or the noise, that is best on
held-out data. "Marginal likelihood" is `fit_prior_precision("marginal_likelihood")`. laplace-torch, with `--peer`, has
its own defaults: last layer, link, marginal likelihood, in regression for prior and noise.

NLL, Brier score and CRPS are means over at most 1000 test targets. CRPS is in standard deviations of the targets. OOD
AUROC is by the mutual information, in regression by the epistemic standard deviation, and by the entropy for networks.
The rule was found on other problems. Development cells are there to choose the next one, the others to judge it.
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
    n_cells = len({pair.cell for pair in pairs})
    lines += [f"{n_cells} of {len(CELLS)} cells have been run, with at most {n_seeds} seeds, of which means are taken."]
    lines += ["Shares are of pairs of a cell and a class of posteriors.", ""]
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
    names = [name for name in CLASSES if any(pair.name == name for pair in pairs)]
    lines = markdown_rule(["", "network", *names, "validated", "KFAC, marginal likelihood", "KFAC, best scale"])
    for cell, own in _by_cell(pairs).items():
        one = own.get("KFAC", next(iter(own.values())))
        cells = [shown(own[name].less("nll", DEFAULT), "+") if name in own else "" for name in names]
        others = [shown(one.less("nll", VALIDATED), "+"), shown(one.less("nll", EVIDENCE), "+")]
        best = f"{one.mean('nll', DEFAULT) - one.regret():+.3f}" if one.values("ece", NETWORK) else ""
        lines.append(markdown_line([_title(cell), shown(one.values("nll", NETWORK)), *cells, *others, best]))
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
