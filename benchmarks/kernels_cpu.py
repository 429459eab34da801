"""The kernels' references on a CPU: symmetric updates, convolution factors and Gram–Schmidt, with their memory.

    OMP_NUM_THREADS=1 python benchmarks/kernels_cpu.py --output benchmarks/results/kernels-cpu.json

One thread, float32; CPU seconds, the least of several runs. Peak memory is what the process's high-water mark rises by.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus import kernels

# 3 × 3 layers of ResNet-18 and ResNet-50 at 224 × 224 pixels: channels, side of the input, stride
RESNET = [(64, 56, 1), (128, 56, 2), (128, 28, 1), (256, 28, 2), (256, 14, 1), (512, 14, 2), (512, 7, 1)]
Row = dict[str, Any]


def least_seconds(call: Callable[[], object], budget: float = 1.0) -> float:
    """Least CPU seconds of a call."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < budget and len(times) < 50):
        before = time.process_time()
        call()
        times.append(time.process_time() - before)
    return min(times)


def extra_memory(call: Callable[[], object]) -> float:
    """Megabytes that the process's high-water mark rises by during a call."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unnoticed
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return max(0, peak - before) / 1e6


def symmetric_updates() -> list[Row]:
    """C += XᵀX against torch's product."""
    rows = []
    for dtype in (torch.float32, torch.float64):
        for size in (64, 128, 256, 512, 768, 1152, 2304):
            for count in (512, 2048):
                x, total = torch.randn(count, size, dtype=dtype), torch.zeros(size, size, dtype=dtype)
                product = least_seconds(lambda x=x, total=total: total.addmm_(x.T, x))
                ours = least_seconds(lambda x=x, total=total: kernels.symmetric_update(total, x))
                name = str(dtype).removeprefix("torch.")
                row: Row = {"kernel": "symmetric update", "type": name, "d": size, "rows": count}
                rows.append(report(row | {"torch_seconds": product, "ours_seconds": ours, "speedup": product / ours}))
    return rows


def convolution_factors() -> list[Row]:
    """Factors of 3 × 3 layers against unfolding all patches and one product."""
    rows = []
    for channels, side, stride in RESNET:
        x = torch.randn(8, channels, side, side)
        total = torch.zeros(1, 9 * channels, 9 * channels)

        def unfolded(x: Tensor = x, total: Tensor = total, stride: int = stride) -> None:
            columns = F.unfold(x, 3, padding=1, stride=stride).transpose(1, 2).flatten(0, 1)
            total[0].addmm_(columns.T, columns)

        row: Row = {"kernel": "convolution factor", "channels": channels, "side": side, "stride": stride}
        row["examples"] = len(x)
        calls: dict[str, Callable[[], object]] = {"torch": unfolded}
        for method in ("lags", "patches", None):
            calls[method or "ours"] = lambda x=x, total=total, stride=stride, method=method: kernels.convolution_factor(
                x, 3, padding=1, stride=stride, total=total, method=method
            )
        for name, call in calls.items():
            row[f"{name}_seconds"], row[f"{name}_megabytes"] = least_seconds(call), extra_memory(call)
        row["speedup"] = row["torch_seconds"] / row["ours_seconds"]
        rows.append(report(row))
    return rows


def gram_schmidt() -> list[Row]:
    """Gram–Schmidt twice against broadcast products that are summed."""
    rows = []
    for n, k in ((10_000, 40), (1_000_000, 10), (1_000_000, 40)):
        basis = torch.randn(k, n) * n**-0.5
        vector = torch.randn(n)

        def broadcast(basis: Tensor = basis, vector: Tensor = vector) -> Tensor:
            for _ in range(2):
                vector = vector - ((basis * vector).sum(1, keepdim=True) * basis).sum(0)
            return vector

        theirs = least_seconds(broadcast)
        ours = least_seconds(lambda basis=basis, vector=vector: kernels.orthogonalize(basis, vector))
        row: Row = {"kernel": "Gram-Schmidt twice", "n": n, "k": k, "broadcast_seconds": theirs, "ours_seconds": ours}
        row["gigabytes_per_second"] = 16e-9 * basis.numel() / ours
        rows.append(report(row | {"speedup": theirs / ours}))
    return rows


def report(row: Row) -> Row:
    """Print a row as it comes."""
    print(json.dumps(row), flush=True)  # noqa: T201
    return row


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("OMP_NUM_THREADS is not 1: BLAS may use more threads than torch, and is not used")  # noqa: T201
    rows = [row for part in (symmetric_updates, convolution_factors, gram_schmidt) for row in part()]
    if arguments.output:
        machine = platform.processor() or platform.machine()
        document = {"machine": machine, "threads": 1, "torch": torch.__version__, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
