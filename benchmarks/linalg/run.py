"""The matrix-free layer beside other packages: one entry for all of its benchmarks.

    pip install -e '.[peers,vision]'
    OMP_NUM_THREADS=1 python benchmarks/linalg/run.py --output benchmarks/results/linalg-cpu.json

Writes the rows as JSON, and as tables in Markdown beside it. Packages that are not installed are left out, or a row
says why. Cases that are not run again keep their rows in an output that exists. matfree needs JAX, and an interpreter
of its own: ``python -m venv jax && jax/bin/pip install jax matfree``, and ``--matfree-python jax/bin/python``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from measuring import Row, extra_memory, keep_freed_memory

# modules, imported only when needed: the fresh processes that measure memory start sooner
CASES = ("decompositions", "traces", "gradients", "solvers", "eigenpairs", "networks", "beside_matfree")
PACKAGES = ("torch", "torchvision", "numpy", "scipy", "linear_operator", "curvlinops-for-pytorch")
METHOD = """\
All on the CPU, on one thread, in one process. Times are CPU times, the least of several rounds in which the calls take
turns, so that other work on the machine disturbs them little; "×" columns are ratios of such times. Memory is what the
high-water mark of a fresh process rises by in one call."""


def versions() -> dict[str, str]:
    """Of what takes part and is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    """Name of the CPU, and its number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, of which one is used"


def rounded(row: Row) -> Row:
    """With four digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of rows that may have different columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in ("case", "table")))

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else f"{value}"

    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """The rows as tables, each with the words of its module."""
    named = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = ["# The matrix-free layer beside other packages", f"{document['device']}; {named}.", METHOD]
    for name in CASES:
        rows = [row for row in document["rows"] if row["case"] == name]
        if rows:
            title, words = (import_module(name).__doc__ or "").strip().split("\n\n", 1)
            parts += [f"## {title.rstrip('.')}", words]
            for group in dict.fromkeys(row.get("table") for row in rows):
                parts.append(table([row for row in rows if row.get("table") == group]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the cases and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; tables go beside it")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round: to see that all runs")
    parser.add_argument("--matfree-python", type=Path, help="interpreter that has matfree and JAX on the CPU")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)  # how fresh processes are called
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that are started
    if arguments.memory:
        module, what = import_module(arguments.memory[0]), json.loads(arguments.memory[1])
        module.call(**what, small=True)()  # what is set up once does not count
        print(extra_memory(module.call(**what)))  # noqa: T201
        return
    keep_freed_memory(True)
    output: Path | None = arguments.output
    rows: list[Row] = []
    if output and output.exists():
        rows = [row for row in json.loads(output.read_text())["rows"] if row["case"] not in arguments.cases]
    for name in arguments.cases:
        start = time.perf_counter()
        options = {"matfree_python": arguments.matfree_python} if name == "beside_matfree" else {}
        for row in import_module(name).run(quick=arguments.quick, **options):
            rows.append({"case": name} | rounded(row))
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)  # noqa: T201
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)  # noqa: T201
        if output:
            document = {"device": device(), "method": METHOD.replace("\n", " "), "versions": versions()}
            document["rows"] = sorted(rows, key=lambda row: CASES.index(row["case"]))
            output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            output.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
