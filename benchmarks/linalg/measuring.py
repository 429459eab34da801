"""How the benchmarks of this folder measure: interleaved CPU times, and memory in fresh processes."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

Row = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Times of one call in the rounds of :func:`timings`, in seconds.

    Attributes:
        cpu: CPU time of the process.
        wall: Time that passed.
    """

    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    def row(self) -> Row:
        """The medians."""
        return {"cpu_seconds": median(self.cpu), "wall_seconds": median(self.wall)}

    def ratio(self, other: Timing) -> float:
        """How often the CPU time of this goes into the other's: the median of the rounds' ratios."""
        return median(theirs / ours for theirs, ours in zip(other.cpu, self.cpu, strict=True))


def timings(calls: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Times of calls that take turns, after one call each that does not count."""
    measured: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number:
                measured[name][0].append(cpu)
                measured[name][1].append(wall)
    return {name: Timing(tuple(cpu), tuple(wall)) for name, (cpu, wall) in measured.items()}


def timed(call: Call, enough: float = 10.0) -> tuple[Timing, Any]:
    """Times of a long call: three, or fewer if that takes more CPU seconds than ``enough``; and what it returned."""
    cpu: list[float] = []
    wall: list[float] = []
    result = None
    while not cpu or (len(cpu) < 3 and sum(cpu) < enough):
        before, before_cpu = time.perf_counter(), time.process_time()
        result = call()
        cpu.append(time.process_time() - before_cpu)
        wall.append(time.perf_counter() - before)
    return Timing(tuple(cpu), tuple(wall)), result


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes read and written per CPU second by copying a large tensor, in GB/s; the best of ten."""
    source = torch.ones(megabytes * 250_000)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(11):
        start = time.process_time()
        target.copy_(source)
        best = min(best, time.process_time() - start)
    return 2e-9 * source.numel() * source.element_size() / best


def extra_memory(call: Call) -> float:
    """Megabytes that the process's high-water mark rises by in a call."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unnoticed
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return max(0, peak - before) / 1e6


def memory_in_new_process(script: Path, **what: Any) -> Row:
    """Run ``script --memory what`` in a fresh process, and give the JSON that it prints last.

    The C library's allocator is told to give all memory back at once, so that the high-water mark is that of what is
    in use at the same time.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), "--memory", json.dumps(what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(row: Row) -> Row:
    """Print a row as it comes, with four digits."""
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps(rounded), flush=True)  # noqa: T201
    return rounded
