"""How this folder measures: calls that take turns within one process, their CPU and wall time and their peak memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

Call = Callable[[], Any]


@dataclass
class Timing:
    """What several calls of one function took.

    Attributes:
        cpu: CPU seconds of each call.
        wall: Wall seconds of each call.
        peak_mb: What the high-water mark of the process rose by in one call, in MB.
        failed: Why there is nothing else.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    failed: str | None = None

    def row(self) -> dict[str, Any]:
        """For JSON."""
        if self.failed:
            return {"failed": self.failed}
        return {
            "seconds": min(self.cpu),
            "median_seconds": median(self.cpu),
            "wall_seconds": min(self.wall),
            "peak_mb": self.peak_mb,
            "calls": len(self.cpu),
        }


def keep_freed_memory(keep: bool) -> None:
    """Whether the C library keeps freed memory for the next call, or returns large blocks to the system at once.

    By itself it does either, depending on what a process did before. Time is measured with the first, where it does not
    matter who was called before, and memory with the second, where nothing that was freed is used again unnoticed.
    """
    library = ctypes.CDLL(None)
    settings = {-1: 2**31 - 1, -4: 0} if keep else {-1: 2**18, -3: 2**18, -4: 2**20}  # trim, map above, number of maps
    for parameter, value in settings.items():
        library.mallopt(parameter, value)
    library.malloc_trim(0)


def peak_memory(call: Call) -> float:
    """Megabytes that the high-water mark of the process rises by in a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return max(0, peak - before) / 1e6


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeoutError` once that much wall time has passed; a running kernel is waited for."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"> {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    """One line about a failure; memory that was not to be had is named as such."""
    lines = str(error).strip().splitlines() or [""]
    text = " ".join(lines)
    if isinstance(error, MemoryError) or "allocate memory" in text or "bad_alloc" in text:
        asked = text.split("allocate ")[-1].split(" bytes")[0] if "you tried to allocate" in text else ""
        return f"out of memory (one tensor of {int(asked) / 2**30:.1f} GiB)" if asked.isdigit() else "out of memory"
    return f"{type(error).__name__}: {lines[0][:140]}"


ROUNDS = 5
"""At least so many, unless they take longer than so many CPU seconds."""
PATIENCE = 150.0


def measure(
    calls: Mapping[str, Call], seconds: float, *, limits: Mapping[str, float] | None = None
) -> dict[str, Timing]:
    """Peak memory of each call, then CPU and wall times in rounds in which all of them take turns.

    Args:
        calls: Name → what to call. What they return is dropped.
        seconds: CPU seconds to spend on the rounds; there are at least :data:`ROUNDS`, fewer where these take more than
            :data:`PATIENCE`.
        limits: Wall seconds after which a first call has failed, 600 by default.
    """
    timings = {name: Timing() for name in calls}
    keep_freed_memory(False)
    first: dict[str, float] = {}
    for name, call in calls.items():
        start = time.process_time()
        try:
            with time_limit((limits or {}).get(name, 600.0)):
                timings[name].peak_mb = peak_memory(call)
                first[name] = time.process_time() - start
                if first[name] < 0.7:  # without what is set up only once
                    timings[name].peak_mb = peak_memory(call)
        except Exception as error:  # whatever a library fails with is a result
            timings[name].failed = reason(error)
        gc.collect()
    keep_freed_memory(True)
    alive = [name for name in calls if not timings[name].failed]
    spent, rounds = 0.0, 0
    while alive and (spent < seconds or (rounds < ROUNDS and spent < PATIENCE)):
        for name in alive:
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            timings[name].cpu.append(time.process_time() - cpu)
            timings[name].wall.append(time.perf_counter() - wall)
            spent += timings[name].cpu[-1]
        rounds += 1
    return timings


def ratio(ours: Timing, other: Timing) -> dict[str, float]:
    """Least by least time, and the median of the rounds' ratios."""
    if ours.failed or other.failed:
        return {}
    return {
        "ratio": min(ours.cpu) / min(other.cpu),
        "median_ratio": median(a / b for a, b in zip(ours.cpu, other.cpu, strict=False)),
    }
