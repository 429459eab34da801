"""Time and memory of the process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def peak_gigabytes() -> float:
    """The largest memory that this process has had so far, without that of the process which started it."""
    status = Path("/proc/self/status")
    if status.exists():
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(peaks[0]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
