"""The default tuning, cell by cell: what the two lines gain or lose against the network itself.

    python benchmarks/defaults/run.py --data DATA --output FOLDER [--workers 2] [--quick] [--peer] [--cells "wine" …]

Trained networks and rows are kept in the folder, and a run goes on where it ended. It passes over all cells with one
seed, the slow ones at the end, before it begins the next; ``--quick`` leaves the slow ones out. ``defaults.jsonl``
holds a row for each cell, seed and class, or the error that it ended with. ``defaults.md`` is the page that
``report.py`` makes of it; ``--page`` writes it elsewhere. ``--peer`` runs laplace-torch besides.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.defaults import report
from benchmarks.defaults.cells import CELLS, Cell, train
from benchmarks.defaults.peers import STRUCTURES, peer_row
from benchmarks.defaults.scores import CLASSES, FEW, Row, network_row, posterior_row, shortened
from benchmarks.study.sets import DataSet

NETWORK, PEER = "network", "laplace-torch "
"""The label of the network's own row, and what the labels of laplace-torch begin with."""

SLOW = (
    "100 classes",
    "mnist 5000",
    "fashion_mnist 5000",
    "language model, certain",
    "language model, noisy",
    "mnist 20000",
    "fashion_mnist 20000",
)
"""Cells that take minutes, the longest at the end."""


@dataclass(frozen=True)
class Task:
    """The rows of a cell and seed that are missing."""

    cell: str
    seed: int
    labels: tuple[str, ...]
    data: Path
    output: Path


def trained(cell: Cell, data: DataSet, folder: Path) -> nn.Module:
    """The network of a cell and split, from the folder if it is there."""
    path = folder / f"{cell.name}-{data.number}.pt"
    if not path.exists():
        torch.save(train(cell, data).state_dict(), path)
    torch.manual_seed(data.number)
    network = cell.network(data)
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def work(task: Task) -> list[Row]:
    """Run a task in this process; a row that fails says why."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cell = CELLS[task.cell]
    whole = cell.data(task.seed, task.data)
    network, data = trained(cell, whole, task.output), shortened(whole)
    size = sum(parameter.numel() for parameter in network.parameters())
    rows = []
    for label in task.labels:
        row: Row = {"cell": cell.name, "seed": task.seed, "class": label, "classification": data.classification}
        try:
            if label.endswith("Full") and size > FEW:
                row["left_out"] = f"{size} weights"
            elif label == NETWORK:
                row |= network_row(network, data)
            elif label.startswith(PEER):
                row |= peer_row(network, data, label.removeprefix(PEER))
            else:
                row |= posterior_row(network, data, label)
        except Exception as error:  # whatever is raised belongs into the table
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def run(tasks: list[Task], workers: int) -> Iterator[list[Row]]:
    """Rows as tasks end, of processes with one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, task) for task in tasks]):
            yield future.result()


def described(row: Row) -> str:
    """A line of progress."""
    head = f"{row['cell']:38} {row['seed']} {row['class']:20}"
    if "default" not in row:
        return f"{head} {row.get('error', row.get('left_out', ''))}"
    nll = row["default"]["nll"]
    return (
        f"{head} NLL {nll:.3f}  {row['chosen']}  fit {row['fit_seconds']:.1f} s, tuning {row['tuning_seconds']:.1f} s"
    )


def main() -> None:
    """Run what is missing, print each row, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="by default defaults.md in the output folder")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--classes", nargs="*", default=list(CLASSES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without the slow cells")
    parser.add_argument("--peer", action="store_true", help="laplace-torch too")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = arguments.output / "defaults.jsonl"
    known = report.read(results)
    results.write_text("".join(json.dumps(row) + "\n" for row in known))  # without a line that was cut off
    done = {(row["cell"], row["seed"], row["class"]) for row in known}
    order = [name for name in arguments.cells if name not in SLOW]
    order += [name for name in SLOW if name in arguments.cells and not arguments.quick]
    tasks = []
    for labels, seeds in (
        ([NETWORK, *arguments.classes], arguments.seeds),
        ([PEER + name for name in STRUCTURES if name in arguments.classes], arguments.seeds if arguments.peer else 0),
    ):
        for cell, seed in ((cell, seed) for seed in range(seeds) for cell in order):
            missing = tuple(label for label in labels if (cell, seed, label) not in done)
            if missing:
                tasks.append(Task(cell, seed, missing, arguments.data, arguments.output))
    for rows in run(tasks, arguments.workers):
        with results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        sys.stdout.write("".join(described(row) + "\n" for row in rows))
        sys.stdout.flush()
    (arguments.page or arguments.output / "defaults.md").write_text(report.page(report.read(results)))


if __name__ == "__main__":
    main()
