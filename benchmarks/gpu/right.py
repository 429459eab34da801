"""Are the numbers right? The numerical tests with networks and data on the card, side by side in processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.measuring import Row, Settings

ROOT = Path(__file__).resolve().parents[2]
SUITE, VALUES = "tests/posteriors/test_conformance.py", "tests/right_values"
OUTCOME = re.compile(r"(?:(\S+::.*?) )?\b(PASSED|FAILED|ERROR|SKIPPED)\b(?: (\S+::.*))?")

PLACES = {"card": ("DEVICE", "DEVICE"), "data on the CPU": ("DEVICE", "cpu"), "network on the CPU": ("cpu", "DEVICE")}
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "devices and doors": ("data on the CPU", ("tests/test_devices.py", "tests/training/test_devices.py")),
    "conformance: all on the card": ("card", (SUITE,)),
    "conformance: data on the CPU": ("data on the CPU", (SUITE,)),
    "right values: all on the card": ("card", (VALUES,)),
    "right values: data on the CPU": ("data on the CPU", (VALUES,)),
    "conformance: network on the CPU": ("network on the CPU", (SUITE,)),
    "Triton kernels": ("card", ("tests/kernels/test_triton.py", "-m", "gpu")),
}
TINY = {"conformance: all on the card": ("card", (SUITE, "-k", "TestKFAC and fit_counts"))}


@dataclass
class Running:
    """A pytest process whose outcomes are in a file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    begun: float

    def row(self, ended: bool) -> Row:
        """Counts of outcomes so far, and the names of what failed."""
        counts, failed = Counter(), []
        text = self.log.read_text(errors="replace")
        for line in text.split("short test summary")[0].splitlines():
            if found := OUTCOME.search(line):
                counts[found[2].lower()] += 1
                if found[2] in ("FAILED", "ERROR"):
                    failed.append((found[1] or found[3] or "").strip().split("::", 1)[-1])
        row: Row = {name: counts[name] for name in ("passed", "failed", "error", "skipped") if counts[name]}
        row |= {"test_s": time.monotonic() - self.begun, "failing": failed[:40]}
        if ended:
            return row | {"error": "out of time"}
        if self.process.returncode not in (0, 1):
            return row | {"error": (text.strip().splitlines() or ["nothing was printed"])[-1][:300]}
        return row


def start(settings: Settings, done: set[str]) -> list[Running]:
    """Start a process for each run that has no row yet."""
    workers = ["-n", "3"] if settings.on_card and find_spec("xdist") else []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = []
    for name, (places, tests) in (TINY if settings.tiny else RUNS).items():
        if name in done:
            continue
        device, data = (settings.device if place == "DEVICE" else place for place in PLACES[places])
        # Warnings of a card are no errors here.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-o",
            "filterwarnings=",
        ]
        command += ["--device", device, "--data-device", data, *workers, *tests]
        log = settings.output / f"right-{re.sub(r'[^a-z]+', '-', name.lower())}.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=inherited, stdout=file, stderr=subprocess.STDOUT)
        found.append(Running(name, process, log, time.monotonic()))
    return found


def collect(running: list[Running], until: float) -> list[tuple[str, Row]]:
    """Rows of the processes that have ended, which leave the list; past ``until`` (monotonic) the others are ended."""
    rows = []
    for one in list(running):
        late = time.monotonic() >= until
        if one.process.poll() is None and not late:
            continue
        ended = one.process.poll() is None
        if ended:
            one.process.terminate()
            try:
                one.process.wait(10)
            except subprocess.TimeoutExpired:
                one.process.kill()
        rows.append((one.name, one.row(ended)))
        with one.log.with_name("right.txt").open("a") as file:  # one file of all, with the ends of what was printed
            file.write(f"== {one.name}\n{one.log.read_text(errors='replace')[-100_000:]}\n")
        one.log.unlink()
        running.remove(one)
    return rows
