"""Time and memory of fitting and predicting, in units of plain passes through the network, beside laplace-torch.

    pip install -e '.[peers,vision]' && python benchmarks/fit_and_predict.py --output benchmarks/results/cpu.json

Everything runs in one process on one thread; times are CPU seconds (median of three where one takes less than five
seconds), "x epoch" is relative to one forward and backward pass over the same data, "x forward" to one forward pass
over the batch. Peak memory is what the high-water mark of the process rises by. The other package is left out where it
is not installed; what needs more memory than --limit is reported as failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp

try:
    import laplace
except ImportError:  # the comparison is optional
    laplace = None

Batches = list[tuple[Tensor, Tensor]]


def mlp() -> tuple[nn.Module, tuple[int, ...], int]:
    """784-1024-1024-10, 1.9 million weights."""
    sides = [784, 1024, 1024]
    hidden = [layer for a, b in zip(sides, sides[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 10)), (784,), 128


def lenet() -> tuple[nn.Module, tuple[int, ...], int]:
    """LeNet-5, 62 thousand weights."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *head), (1, 28, 28), 512


def resnet18() -> tuple[nn.Module, tuple[int, ...], int]:
    """Torchvision's ResNet-18 on 32 x 32 images, 11 million weights."""
    from torchvision.models import resnet18 as build  # noqa: PLC0415  -- an extra

    return build(num_classes=10), (3, 32, 32), 32


MODELS = {"mlp": mlp, "lenet": lenet, "resnet18": resnet18}


def high_water() -> int:
    """Peak resident memory since the last :func:`reset_high_water`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident() -> int:
    """Resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(call: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Median CPU seconds of a call and its peak extra memory in MB; and what the call returned."""
    times: list[float] = []
    result = None
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    try:
        while not times or (len(times) < 3 and times[0] < 5):
            start = time.process_time()
            result = call()
            times.append(time.process_time() - start)
    except (RuntimeError, MemoryError, NotImplementedError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}, None
    return {"seconds": median(times), "peak_mb": max(0, high_water() - before) / 1e6}, result


def run(name: str, batch_size: int, with_peer: bool) -> list[dict[str, Any]]:
    """All rows of one model."""
    torch.manual_seed(0)
    model, shape, n_data = MODELS[name]()
    model.eval()
    inputs, targets = torch.randn(n_data, *shape), torch.randint(10, (n_data,))
    data: Batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    x = data[0][0]

    def epoch() -> None:
        for inputs, labels in data:
            nn.functional.cross_entropy(model(inputs), labels).backward()

    def forward() -> None:
        with torch.no_grad():
            model(x)

    rows: list[dict[str, Any]] = []

    def add(task: str, library: str, call: Callable[[], Any], unit: str) -> Any:
        measured, result = measure(call)
        row = {"model": name, "task": task, "library": library, **measured}
        if "seconds" in row:
            row[f"x_{unit}"] = row["seconds"] / base[unit]
        rows.append(row)
        print(json.dumps(row), flush=True)  # noqa: T201
        return result

    base: dict[str, float] = {"epoch": 1.0, "forward": 1.0}
    for unit, call in (("epoch", epoch), ("forward", forward)):
        call()
        base[unit] = measure(call)[0]["seconds"]

    ours: dict[str, tuple[type[lp.GaussianPosterior], dict[str, Any]]] = {
        "KFAC": (lp.KFAC, {}),
        "KFAC, Monte Carlo": (lp.KFAC, {"backend": lp.Native("ggn_mc")}),
        "diagonal": (lp.Diagonal, {}),
        "last layer, KFAC": (lp.KFAC, {"parameters": "last_layer"}),
    }
    for task, (cls, options) in ours.items():
        posterior = add(
            f"fit {task}", "laplace_plus", lambda c=cls, o=options: c(model, "classification", **o).fit(data), "epoch"
        )
        add(f"tune {task}", "laplace_plus", posterior.fit_prior_precision, "epoch")
        add(f"predict {task}", "laplace_plus", lambda p=posterior: p.predictive(x), "forward")
        del posterior
    if with_peer and laplace is not None:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size)
        theirs = {
            "KFAC": ("all", "kron"),
            "diagonal": ("all", "diag"),
            "last layer, KFAC": ("last_layer", "kron"),
        }
        for task, (subset, structure) in theirs.items():

            def fit(subset: str = subset, structure: str = structure) -> Any:
                peer = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure)
                peer.fit(loader)
                return peer

            peer = add(f"fit {task}", "laplace-torch", fit, "epoch")
            if peer is None:
                continue
            add(f"tune {task}", "laplace-torch", lambda p=peer: p.optimize_prior_precision(), "epoch")
            add(f"predict {task}", "laplace-torch", lambda p=peer: p(x, link_approx="probit"), "forward")
            del peer
    return rows


def main() -> None:
    """Run the benchmark and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=8, help="of data and of predictions")
    parser.add_argument("--limit", type=float, default=30.0, help="address space in GB: the machine stays usable")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments.limit * 1e9),) * 2)
    rows = [row for name in arguments.models for row in run(name, arguments.batch_size, not arguments.no_peer)]
    if arguments.output:
        versions = {"torch": torch.__version__, "laplace_plus": lp.__version__, "python": platform.python_version()}
        versions["laplace-torch"] = metadata.version("laplace-torch") if laplace else None
        document = {"machine": platform.processor() or platform.machine(), "versions": versions, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
