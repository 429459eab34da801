"""Cells of the study, a method on a split of a set each: run in processes of their own, and written down as they end.

A cell that fails, dies or takes too long is written down as failed, with its error; the others go on. Results are JSON
lines, one for each cell; a study that is started again goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import multiprocessing
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.study import evaluation, methods, sets, training
from benchmarks.study import yardsticks as yardsticks  # for its entries in the registry
from benchmarks.study.settings import Section
from laplace_plus._progress import progress_bar
from laplace_plus._version import __version__
from laplace_plus.errors import DataError

TRAINING = "training"
"""The label of a split's networks, which are no row of the tables."""

_MOST_WARNINGS = 5


@dataclass(frozen=True)
class Cell:
    """A method, or the training of the networks, on a split of a set.

    Attributes:
        section: The set and its rows.
        split: The number of the split.
        label: Of the row, or :data:`TRAINING`.
        data: Where data lie.
        networks: Where trained networks are kept.
        checksum: Of the split's data.
    """

    section: Section
    split: int
    label: str
    data: Path
    networks: Path
    checksum: str

    @property
    def key(self) -> tuple[str, int, str]:
        """What the cell is of."""
        return self.section.name, self.split, self.label

    @property
    def stamp(self) -> str:
        """Of its settings."""
        return self.section.stamp if self.label == TRAINING else self.section.stamp_of(self.label)


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell in this process: its scores, its costs, how it was tuned."""
    torch.set_num_threads(1)
    section = cell.section
    data = sets.load(section.name, cell.split, cell.data, section.source)
    schedule = {"weight_decay": 0.0, **section.training}
    if data.checksum != cell.checksum:
        raise DataError(f"{section.name}: the data changed meanwhile.", fix="Start the study again.")
    networks = training.trained(cell.networks, section.network, schedule, data, section.members, section.stamp)
    if cell.label == TRAINING:
        return {"seconds": networks.seconds, "notes": list(data.notes)}
    task = methods.Task(data, networks, section.network, float(schedule["weight_decay"]))
    before = _resident_from_here()
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = methods.run(task, section.methods[cell.label])
        seconds = time.process_time() - started
        found = evaluation.scores(fitted.predict, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found |= {"fit_seconds": seconds, "peak_memory_mib": max(0, peak - before) / 2**20}
    said = list(dict.fromkeys(f"{one.category.__name__}: {one.message}" for one in caught))
    return {
        "scores": {name: evaluation.described(value) for name, value in found.items()},
        "tuning": fitted.tuning,
        "warnings": said[:_MOST_WARNINGS],
        "notes": list(data.notes),
    }


def _resident_from_here() -> int:
    """Bytes of memory now; where the system can, its peak is forgotten, so that loading data does not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _child(cell: Cell, connection: Connection) -> None:
    """Run a cell and send what came of it."""
    try:
        row = {"status": "done", **run(cell)}
    except Exception as error:  # whatever a method raises belongs into the table
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        row = {"status": "failed", "error": f"{type(error).__name__}: {error}", "place": place}
    connection.send(row)
    connection.close()


@dataclass
class _Running:
    cell: Cell
    process: Any
    connection: Connection
    started: float


def run_all(
    cells: list[Cell], *, workers: int, seconds: float, done: Callable[[Cell, dict[str, Any]], None], progress: bool
) -> None:
    """Run cells in parallel; a split's networks before its methods.

    Args:
        cells: The methods; networks are trained as they are needed.
        workers: Number of processes.
        seconds: After so long a cell is ended, and counts as failed; training may take ten times as long.
        done: Is told of each cell that ended, and how.
        progress: Whether to show a progress bar.
    """
    # Each cell starts from a process that has imported everything and computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.study.cells"])
    waiting: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        waiting.setdefault(cell.key[:2], []).append(cell)
    queue = [replace(group[0], label=TRAINING) for group in waiting.values()]
    running: list[_Running] = []

    def ended() -> Iterator[tuple[Cell, dict[str, Any]]]:
        while queue or running:
            while queue and len(running) < workers:
                running.append(_start(context, queue.pop(0)))
            for one, row in _finished(running, seconds):
                running.remove(one)
                if one.cell.label != TRAINING:
                    yield one.cell, row
                    continue
                group = waiting.pop(one.cell.key[:2])
                if row["status"] == "done":
                    queue[:0] = group
                    continue
                for cell in group:
                    yield cell, row | {"error": f"training: {row['error']}"}

    for cell, row in progress_bar(ended(), enabled=progress, description="cells", total=len(cells)):
        done(cell, row)


def _start(context: Any, cell: Cell) -> _Running:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(cell, sender), daemon=True)
    process.start()
    sender.close()
    return _Running(cell, process, receiver, time.monotonic())


def _finished(running: list[_Running], seconds: float) -> Iterator[tuple[_Running, dict[str, Any]]]:
    """Cells that have ended, died, or taken too long, and what came of them."""
    wait([one.connection for one in running], timeout=1.0)
    for one in list(running):
        limit = seconds * (10 if one.cell.label == TRAINING else 1)
        if one.connection.poll():
            try:
                row = one.connection.recv()
            except EOFError:  # the process died, as one does that runs out of memory
                one.process.join()
                row = {"status": "failed", "error": f"the process ended with code {one.process.exitcode}"}
            one.process.join()
            yield one, row
        elif time.monotonic() - one.started > limit:
            one.process.kill()
            one.process.join()
            yield one, {"status": "failed", "error": f"it took more than {limit:.0f} s"}


def _rounded(number: str) -> float:
    return float(f"{float(number):.11g}")


class Results:
    """The cells of a folder: JSON lines in ``study-SET.jsonl``, or in ``study-SET.jsonl.xz`` once they are packed.

    Args:
        folder: Made if need be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """The file of a set that new cells are written to."""
        return self.folder / f"study-{name}.jsonl"

    def packed(self, name: str) -> Path:
        """The compressed file of a set."""
        return self.folder / f"study-{name}.jsonl.xz"

    def names(self) -> list[str]:
        """The sets that have cells."""
        files = self.folder.glob("study-*.jsonl*")
        return sorted({file.name.removeprefix("study-").split(".jsonl")[0] for file in files})

    def text(self, name: str) -> str:
        """The JSON lines of a set; the uncompressed file wins."""
        if self.path(name).exists():
            return self.path(name).read_text()
        return lzma.decompress(self.packed(name).read_bytes()).decode() if self.packed(name).exists() else ""

    def pack(self, name: str) -> None:
        """Replace the JSON lines of a set by one compressed file, with eleven digits of each number."""
        if self.path(name).exists():
            rows = [json.loads(line, parse_float=_rounded) for line in self.text(name).splitlines()]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            self.packed(name).write_bytes(lzma.compress(text.encode(), preset=9))
            self.path(name).unlink()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The last row of each cell of a set; a line that an interruption cut off is none."""
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for line in self.text(name).splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[row["split"], row["method"]] = row
        return list(found.values())

    def known(self, cell: Cell, *, retry: bool) -> bool:
        """Whether a cell ended under the same settings, with the same data; with ``retry``, successfully."""
        for row in self.rows(cell.section.name):
            if (row["split"], row["method"]) == cell.key[1:]:
                same = row["stamp"] == cell.stamp and row["data"] == cell.checksum
                return same and not (retry and row["status"] == "failed")
        return False

    def current(self, section: Section, checksums: dict[int, str]) -> tuple[list[dict[str, Any]], int]:
        """The rows of a set that belong into its tables, and how many do not, of other settings or other data.

        Args:
            section: With all rows of the table.
            checksums: Of the data, of the splits that are at hand.
        """
        rows = self.rows(section.name)
        found = [
            row
            for row in rows
            if row["method"] in section.methods
            and row["stamp"] == section.stamp_of(row["method"])
            and row["data"] == checksums.get(row["split"], row["data"])
        ]
        return found, len(rows) - len(found)

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        """Write a cell down."""
        name, split, label = cell.key
        head = {"set": name, "split": split, "method": label, "stamp": cell.stamp, "data": cell.checksum}
        head["version"] = __version__
        path = self.path(name)
        # A line that was cut off would swallow the next one.
        before = self.text(name)
        if not path.exists():
            path.write_text(before)
        torn = bool(before) and not before.endswith("\n")
        with path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(head | row) + "\n")
