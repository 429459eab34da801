"""How the benchmarks of this folder measure: CPU times of calls that take turns, and memory in fresh processes."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Call = Callable[[], Any]


def least_seconds(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """The least CPU seconds of calls that take turns, after one call each that does not count."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - start)
    return least


def keep_freed_memory(keep: bool) -> None:
    """Whether the C library keeps freed memory for the next call, or returns large blocks to the system at once.

    By itself it does either, depending on what a process did before; memory that was returned has to be mapped again,
    page by page, which can cost more than computing with it.
    """
    library = ctypes.CDLL(None)
    settings = {-1: 2**31 - 1, -4: 0} if keep else {-1: 2**17, -3: 2**17, -4: 2**16}  # trim, map above, number of maps
    for parameter, value in settings.items():
        library.mallopt(parameter, value)


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes read and written per CPU second by copying a large tensor, in GB/s; the best of twenty."""
    source = torch.ones(megabytes * 250_000)
    target = torch.empty_like(source)
    seconds = least_seconds({"copy": lambda: target.copy_(source)}, 20)["copy"]
    return 2e-9 * source.numel() * source.element_size() / seconds


def extra_memory(call: Call) -> float:
    """Megabytes that the process's high-water mark rises by in a call."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unnoticed
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return max(0, peak - before) / 1e6


def memory_in_new_process(case: str, **what: Any) -> float:
    """Megabytes that ``extra_memory`` finds for ``case.call(**what)`` in a fresh process, after a call with ``small``.

    The C library's allocator is told to give all memory back at once, so that the high-water mark is that of what is
    in use at the same time.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    script = Path(__file__).with_name("run.py")
    command = [sys.executable, "-W", "ignore", str(script), "--memory", case, json.dumps(what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
