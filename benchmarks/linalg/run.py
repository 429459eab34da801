"""The matrix-free layer beside other packages: one entry for all of its benchmarks.

    pip install -e '.[peers,vision]'
    OMP_NUM_THREADS=1 python benchmarks/linalg/run.py --output benchmarks/results/linalg-cpu.json

Writes the rows as JSON, and as tables in Markdown beside it. One thread. Ratios are of CPU times of calls that take
turns in one process (medians of the rounds' ratios), so that other work on the machine disturbs them little; memory is
what the high-water mark of a fresh process rises by. Packages that are not installed are left out, or their rows say
why. Cases that are not run again keep their rows in an output that exists.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from measuring import Row

# imported only when needed: the fresh processes that measure memory start sooner
CASES = {
    "lanczos": "decompositions",
    "trace": "stochastic",
    "gradient": "gradients",
    "solvers": "solvers",
    "matfree": "matfree_beside",
    "networks": "networks",
}
PACKAGES = ("torch", "numpy", "scipy", "linear_operator", "laplace-torch", "curvlinops-for-pytorch", "asdfghjkl")


def versions() -> dict[str, str | None]:
    """Of what takes part."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> str:
    """Name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of rows that may have different columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "case"))

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else f"{value}"

    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """The rows as tables, each with the words of its module."""
    named = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    parts = ["# The matrix-free layer beside other packages", f"{document['machine']}, {document['remarks']} {named}."]
    for name, module_name in CASES.items():
        module = import_module(module_name)
        rows = [row for row in document["rows"] if row["case"] == name]
        if rows:
            words = (module.__doc__ or "").strip().split("\n\n", 1)
            text = "\n\n".join(part for part in words[1].split("\n\n") if not part.startswith("    "))
            target = getattr(module, "TARGET", None)
            parts += [f"## {words[0].rstrip('.')}", text, *([f"Wanted: {target}."] if target else [])]
            columns = getattr(module, "TABLES", "case")
            groups = dict.fromkeys(row.get(columns) for row in rows)
            parts += [table([row for row in rows if row.get(columns) == group]) for group in groups]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the cases and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON; tables go beside it")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="small sizes and one round: to see that all runs")
    parser.add_argument("--matfree-python", type=Path, help="interpreter that has matfree and JAX on the CPU")
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)  # how fresh processes are called
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory is not None:
        what = dict(arguments.memory)
        print(json.dumps(import_module(CASES[what.pop("case")]).memory(**what)))  # noqa: T201
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    if arguments.output and arguments.output.exists():
        rows = [row for row in json.loads(arguments.output.read_text())["rows"] if row["case"] not in arguments.cases]
    for name in arguments.cases:
        module = import_module(CASES[name])
        if name == "solvers":  # has an entry of its own, too
            sizes, iterations = ((10_000,), 10) if arguments.quick else ((10_000, 100_000, 1_000_000), 30)
            found = [row for n in sizes for count in (1, 8) for row in module.run(n, count, iterations)]
            rows += [{"case": name, **row} for row in found]
        else:
            script, python = Path(__file__).resolve(), arguments.matfree_python
            rows += module.run(quick=arguments.quick, script=script, matfree_python=python)
        if arguments.output:
            order = list(CASES)
            remarks = "one thread; the machine had other work to do, so compare CPU times and ratios."
            document = {"machine": machine(), "remarks": remarks, "versions": versions()}
            document["rows"] = sorted(rows, key=lambda row: order.index(row["case"]))
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            arguments.output.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
