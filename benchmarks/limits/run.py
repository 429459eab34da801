"""Time and memory of laplace_plus beside plain torch for the same exact results, and beside laplace-torch.

    pip install -e '.[peers,test]'
    python benchmarks/limits/run.py --peer --output benchmarks/results/limits-cpu
    python benchmarks/limits/run.py --cases kfac_fit --models lenet          # one row, some seconds

Networks are trained first, once, which takes some minutes; their weights are kept in ``--networks``. Every case runs in
a process of its own, on one thread and with a cap on its memory. Rows are written as JSON, and as tables in Markdown
beside it; cases that are not run again keep their rows in an output that exists.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from cases import CASES, tasks
from measuring import reason
from models import train
from report import line, markdown
from tasks import Row, run

import laplace_plus as lp

PACKAGES = ("torch", "torchvision", "timm", "numpy", "laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch")
NAMES = (*CASES, "growth")


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
    """Name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, one thread"


def rounded(value: Any) -> Any:
    """With four digits, throughout."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def warm_up() -> None:
    """Load what torch, SciPy and the package only load once they are used; it is not what a call takes."""
    data = [(torch.randn(80, 70), torch.randint(3, (80,)))]
    model = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.ReLU(), torch.nn.Linear(70, 3))
    for kind in (lp.KFAC, lp.Diagonal):
        kind(model, "classification").fit(data).fit_prior_precision("marginal_likelihood").predictive(data[0][0])
        kind(model, "classification", backend=lp.Native("ggn_mc")).fit(data).sample(2)


def worker(case: str, model: str, arguments: argparse.Namespace) -> None:
    """Measure one case and print its rows as JSON."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments.memory * 1e9),) * 2)
    warm_up()
    try:
        for row in _measured(case, model, arguments):
            print(json.dumps(rounded(row), ensure_ascii=False), flush=True)  # noqa: T201
    except Exception as error:
        print(json.dumps({"case": case, "model": model, "quantity": "the rest", "failed": reason(error)}), flush=True)  # noqa: T201
        raise


def _measured(case: str, model: str, arguments: argparse.Namespace) -> Iterator[Row]:
    if case == "growth":
        from growth import rows  # noqa: PLC0415  -- only when asked for

        yield from rows(model, arguments.seconds)
        return
    for task in tasks(case, model, arguments.networks):
        if arguments.only is None or arguments.only in task.quantity:
            yield from run(
                task, seconds=arguments.seconds, with_peers=arguments.peer, peer_seconds=arguments.peer_seconds
            )


def in_new_process(case: str, model: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of one case, measured in a process of its own; what that process dies of is a row too."""
    command = [sys.executable, "-W", "ignore", __file__, "--worker", case, model]
    for name in ("seconds", "memory", "peer_seconds", "only", "networks"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    command += ["--peer"] if arguments.peer else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
    if process.returncode not in (0, 1):  # killed; what it says of itself is among its rows
        yield {"case": case, "model": model, "quantity": "the rest", "failed": f"exit status {process.returncode}"}


def pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Cases and models that were asked for."""
    for case in arguments.cases:
        if case == "growth":
            from growth import FAMILIES as models  # noqa: PLC0415
        else:
            models = CASES[case][1]
        for model in models:
            if case == "growth" or arguments.models is None or model in arguments.models:
                yield case, model


def main() -> None:
    """Run the cases and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=NAMES, default=list(NAMES), metavar="CASE", help=", ".join(NAMES))
    parser.add_argument("--models", nargs="*", help="of the cases' own; by default all of them")
    parser.add_argument("--only", help="quantities that contain this text")
    parser.add_argument("--peer", action="store_true", help="laplace-torch too, which takes much longer")
    parser.add_argument("--networks", type=Path, default=Path("runs/limits"), help="folder of trained networks")
    parser.add_argument("--output", type=Path, help="prefix of a .json and a .md")
    parser.add_argument("--seconds", type=float, default=8.0, help="CPU seconds for the rounds of one quantity")
    parser.add_argument("--peer-seconds", type=float, default=180.0, help="after which a peer's call is given up")
    parser.add_argument("--memory", type=float, default=15.0, help="address space of a process in GB")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # how new processes are called
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker, arguments)
        return
    target: Path | None = arguments.output and arguments.output.with_suffix(".json")
    asked = list(pairs(arguments))
    rows: list[Row] = []
    if target and target.exists():
        rows = json.loads(target.read_text())["rows"]
    for model in dict.fromkeys(model for case, model in asked if case != "growth"):
        train(model, arguments.networks)
    for case, model in asked:
        start = time.perf_counter()
        if arguments.only is None:
            rows = [row for row in rows if (row["case"], row["model"]) != (case, model)]
        for row in in_new_process(case, model, arguments):
            rows = [
                old
                for old in rows
                if any(old.get(key) != row.get(key) for key in ("case", "model", "quantity", "peer"))
            ]
            rows.append(row)
            print(line(row), flush=True)  # noqa: T201
        print(f"  {case} {model}: {time.perf_counter() - start:.0f} s", flush=True)  # noqa: T201
        if target:
            rows.sort(key=lambda row: NAMES.index(row["case"]))
            document = {"device": device(), "versions": versions(), "rows": rows}
            target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            target.with_suffix(".md").write_text(markdown(document))
            if any(row["case"] == "growth" for row in rows):
                from growth import plot  # noqa: PLC0415

                plot([row for row in rows if row["case"] == "growth"], target.with_name(f"{target.stem}-growth.png"))


if __name__ == "__main__":
    main()
