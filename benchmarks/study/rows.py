"""Measurements beside the study's tables: kept by their settings as they are made, and written as tables.

A script measures with :meth:`Rows.of`, which measures nothing twice, and writes its page from all rows that there are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.last_layers import mean_of
from benchmarks.study.methods import Task
from benchmarks.study.sets import load
from benchmarks.study.settings import Section, Settings
from benchmarks.study.training import trained

CONFIGURATION = Path(__file__).parents[2] / "configs" / "study-rows.yaml"
Row = dict[str, Any]


class Rows:
    """JSON lines in a file, one for each measurement.

    Args:
        path: Of the file, made if need be.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.all: list[Row] = [json.loads(line) for line in lines if line.endswith("}")]  # without a torn one

    def of(self, measure: Callable[[], Row], **settings: Any) -> Row:
        """What ``measure`` gives, with its CPU seconds and warnings; from the file if these settings are there."""
        for row in self.all:
            if settings.items() <= row.items():
                return row
        started = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = measure()
        said = sorted({f"{one.category.__name__}: {one.message}" for one in caught})
        row = {**settings, **found, "seconds": time.process_time() - started, "warnings": said[:3]}
        self.all.append(row)
        with self.path.open("a") as file:
            file.write("\n" * (file.tell() > 0) + json.dumps(row))
        sys.stderr.write(f"{settings}: {row['seconds']:.1f} s {said}\n")
        return row

    def where(self, **settings: Any) -> list[Row]:
        """Rows of these settings."""
        return [row for row in self.all if settings.items() <= row.items()]


def arguments_of(description: str) -> argparse.Namespace:
    """Folders of data, of rows and of pages; ``--seeds`` and ``--page``, which measures nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of rows and networks")
    parser.add_argument("--pages", type=Path, required=True, help="folder of the page")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="only write the page of what is there")
    torch.set_num_threads(1)
    return parser.parse_args()


def script(
    description: str, name: str, measure: Callable[[Rows, argparse.Namespace], None], page: Callable[[Rows], str]
) -> tuple[Rows, argparse.Namespace]:
    """What each script does: measure what is missing in ``NAME.jsonl``, and write ``study-NAME.md``."""
    arguments = arguments_of(description)
    rows = Rows(arguments.output / f"{name}.jsonl")
    if not arguments.page:
        measure(rows, arguments)
    (arguments.pages / f"study-{name}.md").write_text(page(rows))
    return rows, arguments


def task_of(section: Section, seed: int, arguments: argparse.Namespace) -> Task:
    """A split of a set with its networks."""
    data = load(section.name, seed, arguments.data, section.source)
    schedule = {"weight_decay": 0.0, **section.training}
    folder = arguments.output / "networks"
    networks = trained(folder, section.network, schedule, data, section.members, section.stamp)
    return Task(data, networks, section.network, float(schedule["weight_decay"]))


def section_of(name: str) -> Section:
    """A set of ``configs/study-rows.yaml``."""
    return Settings.read(CONFIGURATION).section(name)


def said(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard error; a mean alone of one value."""
    if not values:
        return ""
    mean, error = mean_of(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table and an empty one."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
