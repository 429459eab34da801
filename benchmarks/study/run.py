"""All posteriors of the package, and what they are to be compared with, on real data.

    python benchmarks/study/run.py --data DATA --sets banana snelson --splits 3 --output runs/study

See README.md beside this file for data of your own.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # cells run in parallel instead; read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study import report, sets
from benchmarks.study.cells import Cell, Results, run_all
from benchmarks.study.settings import Settings, plain
from laplace_plus.errors import ConfigurationError, LaplacePlusError

CONFIGURATION = Path(__file__).resolve().parents[2] / "configs" / "study.yaml"
QUICK_SETS = ["banana", "snelson"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--data", type=Path, required=True, help="folder of data sets")
    result.add_argument("--sets", nargs="+", help="names of sets, or files of your own (.npz, .csv)")
    result.add_argument("--splits", type=_positive, default=1, help="the first so many splits of each set")
    result.add_argument("--methods", nargs="+", help="rows of the tables; by default all")
    result.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    result.add_argument("--output", type=Path, required=True, help="folder of results")
    result.add_argument("--networks", type=Path, help="folder of trained networks; by default OUTPUT/networks")
    result.add_argument("--config", type=Path, default=CONFIGURATION)
    result.add_argument("--quick", action="store_true", help="less training: all methods in some minutes")
    result.add_argument("--retry", action="store_true", help="run cells again that failed")
    result.add_argument("--report", action="store_true", help="only write the tables from results that are there")
    result.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    return result


def cells_of(arguments: argparse.Namespace, settings: Settings) -> list[Cell]:
    """All cells that are asked for; sets are looked at first, so that what is wrong with them is said at once.

    Raises:
        ConfigurationError: Two sets of one name, or no row for any of them.
        DataError: Data that cannot be used.
    """
    networks = arguments.networks or arguments.output / "networks"
    cells: list[Cell] = []
    names = [plain(name) for name in arguments.sets or QUICK_SETS]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            "Two sets have the same name.", expected="one of each", got=", ".join(twice), fix="Rename a file."
        )
    for name in arguments.sets or QUICK_SETS:
        section = settings.section(name, arguments.methods)
        for split in range(arguments.splits):
            data = sets.load(section.name, split, arguments.data, section.source)
            kind = "classification" if data.classification else "regression"
            if not split:
                sys.stderr.write(
                    f"{section.name}: {kind}, {len(data.train[0])} training rows; {'; '.join(data.notes)}\n"
                )
            for label, options in section.methods.items():
                if options.get("only", kind) == kind:
                    cells.append(Cell(section, split, label, arguments.data, networks, data.checksum))
    if not cells:
        raise ConfigurationError(
            "No row that was asked for is for these sets.",
            expected="rows for classes or for numbers, as the sets are",
            got="; ".join(arguments.methods or ()) or "none",
        )
    return cells


def tables_of(results: Results, cells: list[Cell], settings: Settings) -> dict[str, report.Table]:
    """Of all rows that are there under the present settings and data, also such as were not asked for now."""
    found = {}
    for name in dict.fromkeys(cell.section.name for cell in cells):
        own = [cell for cell in cells if cell.section.name == name]
        section = replace(own[0].section, methods=settings.section(name).methods)
        rows, others = results.current(section, {cell.split: cell.checksum for cell in own})
        if others:
            sys.stderr.write(f"{name}: {others} results of other settings or data are left out\n")
        if rows:
            found[name] = report.Table(rows, settings.content["methods"])
    return found


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the tables; 1 if an argument or a data set cannot be used."""
    arguments = parser().parse_args(argv)
    try:
        settings = Settings.read(arguments.config, quick=arguments.quick)
        cells = cells_of(arguments, settings)
    except LaplacePlusError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    results = Results(arguments.output)

    def done(cell: Cell, row: dict[str, Any]) -> None:
        results.add(cell, row)
        name, split, label = cell.key
        said = f"NLL {row['scores']['nll']:.4f}" if row["status"] == "done" else f"FAILED: {row['error']}"
        if not arguments.progress:
            sys.stderr.write(f"{name} {split} {label}: {said}\n")

    if not arguments.report:
        missing = [cell for cell in cells if not results.known(cell, retry=arguments.retry)]
        run_all(
            missing, workers=max(1, arguments.workers), seconds=settings.seconds, done=done, progress=arguments.progress
        )
    tables = tables_of(results, cells, settings)
    if not tables:
        sys.stderr.write("There are no results yet: run without --report.\n")
        return 1
    report.write(arguments.output, tables)
    sys.stderr.write(f"tables: {arguments.output / 'study.md'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
