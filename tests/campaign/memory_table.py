"""Measures the table of memory budgets, class by class, into a file of JSON lines; a second run goes on from there.

    python tests/campaign/memory_table.py build/memory.jsonl [--seconds 600] [--only ABNN] [--print]

Each pair of a network and a class is tried at 64 MiB, and what is refused there at the budget that the refusals name,
and so on up to 2 GiB; some classes at larger budgets, too. Each case is a process of its own, forked from one that has
imported everything; see :mod:`memory_case`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

MIB = 2**20
FIRST, LAST = 64, 2048
LIMIT = 150
"""CPU seconds for each call."""

NETWORKS = ("transformer", "ResNet-18", "U-Net")
METHODS = (
    *("Full", "Diagonal", "KFAC", "EKFAC", "limited rank", "last layer", "last-layer KFAC", "last-layer Diagonal"),
    *("VariationalLastLayer", "ABNN", "TrainingFreeLoRA", "LowRank", "Subnetwork", "SampledLaplace", "NullSpace"),
    *("VIKING", "Riemannian", "MetricBNN", "SWAG", "Mixture"),
)
SAMPLED = ("Diagonal", "KFAC", "EKFAC", "limited rank", "Riemannian")
PAIRS = [(network, method) for method in METHODS for network in NETWORKS]
PAIRS += [("U-Net", f"{method} of sampled labels") for method in SAMPLED] + [("field", "SpatialField")]
CALLS = (*("fit", "tuning", "evidence", "first prediction", "prediction", "joint", "information", "sample", "sampled"),)
MORE = dict.fromkeys(("Diagonal", "KFAC", "last layer", "SampledLaplace"), (256, 1024))
"""Further budgets."""

Found = dict[str, dict[str, Any]]


def measured(network: str, method: str, budget: int, calls: str, seconds: float = 900) -> Found:
    """What each of the calls took within a budget in MiB; the network is among them."""
    root = Path(__file__).parents[2]
    program = str(Path(__file__).with_name("memory_case.py"))
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, network, method, str(budget * MIB), calls, str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, timeout=3600)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one.pop("call"): one for one in found}


def forked(network: str, method: str, budget: int, calls: str, seconds: float) -> Found:
    """As :func:`measured`, in a copy of this process."""
    import memory_case  # noqa: PLC0415  -- beside this script; the tests go without

    context, found = multiprocessing.get_context("fork"), {}
    reading, writing = context.Pipe(duplex=False)

    def tell(call: str, **one: Any) -> None:
        writing.send((call, one))

    child = context.Process(target=memory_case.main, args=(network, method, budget * MIB, calls, seconds, tell))
    child.start()
    writing.close()
    with suppress(EOFError):
        while True:
            call, one = reading.recv()
            found[call] = one
    child.join()
    return found


def ratio(found: Found, call: str, budget: int) -> float:
    """The peak over the budget, the network and what the call left; at most 1.1."""
    return found[call]["peak"] / (budget * MIB + found["network"]["left"] + found[call]["left"])


def least(failed: str) -> int:
    """The budget in MiB that a refusal names, rounded up; 0 for one of another kind."""
    match = re.search(r"memory_budget of at least ([\d.,]+) (KiB|MiB|GiB)", failed)
    unit = {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}
    return 1 + int(float(match[1].replace(",", "")) * unit[match[2]]) if match else 0


def run(file: Path, seconds: float, only: list[str]) -> bool:
    """Measure what the file lacks, for so long; whether nothing is left."""
    end, known = time.monotonic() + seconds, load(file)
    for network, method in PAIRS:
        if only and not {method, network}.intersection(only):
            continue
        budget, calls, more = FIRST, list(CALLS), list(MORE.get(method, ()))
        while (calls and budget <= LAST) or more:
            if not calls or budget > LAST:
                budget, calls = more.pop(0), list(CALLS)
            key = (network, method, budget)
            if key not in known:
                if time.monotonic() > end:
                    return False
                found = forked(network, method, budget, ",".join(dict.fromkeys(["fit", *calls])), LIMIT)
                with file.open("a") as out:
                    out.write(
                        json.dumps({"network": network, "method": method, "budget": budget, "found": found}) + "\n"
                    )
                known[key] = found
            found = known[key]
            named = {call: least(one["failed"]) for call, one in found.items() if "failed" in one}
            larger = [size for size in named.values() if size > budget]
            calls = list(CALLS) if "fit" in named and named["fit"] else [c for c in calls if named.get(c, 0) > budget]
            budget = min(larger, default=LAST + 1)
    return True


def load(file: Path) -> dict[tuple[str, str, int], Found]:
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {(one["network"], one["method"], one["budget"]): one["found"] for one in found}


def rows(known: dict[tuple[str, str, int], Found]) -> list[str]:
    """The table in Markdown: a row for each class and network."""
    pairs: dict[tuple[str, str], dict[int, Found]] = defaultdict(dict)
    for (network, method, budget), found in known.items():
        pairs[method, network][budget] = found
    table = ["| posterior | network | holds at, MiB | worst | refused at | stopped |", "|---|---|---|---|---|---|"]
    for (method, network), by_budget in pairs.items():
        held, refused, stopped, worst = [], [], [], (0.0, "")
        for budget, found in sorted(by_budget.items()):
            good = [call for call in found if call != "network" and "left" in found[call]]
            worst = max([worst, *((ratio(found, call, budget), f"{call} {budget}") for call in good)])
            held += [f"{budget}: {', '.join(good)}"] if good else []
            refused += [
                f"{c} {budget}: {least(o['failed']) or o['failed'][:60]}" for c, o in found.items() if "failed" in o
            ]
            stopped += [f"{call} {budget}: {o['peak'] / 1e6:.0f} MB" for call, o in found.items() if "stopped" in o]
        cells = "; ".join(held), f"{worst[0]:.2f} {worst[1]}", "; ".join(refused), "; ".join(stopped)
        table.append(f"| {method} | {network} | {' | '.join(cells)} |")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so long")
    parser.add_argument("--only", nargs="*", default=[], help="classes or networks")
    parser.add_argument("--print", action="store_true", help="the table, of what there is")
    given = parser.parse_args()
    if given.print:
        sys.stdout.write("\n".join(rows(load(given.file))) + "\n")
    else:
        given.file.parent.mkdir(parents=True, exist_ok=True)
        sys.exit(0 if run(given.file, given.seconds, given.only) else 75)
