"""What a graphics card shows, in one command that ends in time and goes on where it ended.

    python benchmarks/gpu/run.py --minutes 8 --output FOLDER --data cifar

In the order of worth: whether the numbers are right (``right``, in processes of their own while ``quality`` trains),
whether posteriors help at full size (``quality``), what they take (``speed``), which kernels gain (``kernels``). Each
row is a line of ``FOLDER/rows.jsonl`` as soon as it is known; called again with the same folder, rows that are there
are not measured again, those that failed are. ``FOLDER/gpu.md`` is the page of all rows; it belongs to
``benchmarks/results/gpu.md``.

``--data`` is a folder with CIFAR-10 (see ``images.py``; 23 MB with the letters). Nothing is installed: what is not
there (curvlinops, laplace-torch, peft, triton) is said in its row. For a machine that gets a copy of the checkout
alone, put data and results into folders that git ignores, such as ``runs/``, and let these travel along:

    mkdir -p runs/cifar && cp PLACE/cifar10/*_jpegq75.npz PLACE/notmnist/t10k-images-idx3-ubyte.gz runs/cifar
    python benchmarks/gpu/run.py --minutes 8 --output runs/gpu --data runs/cifar

``--tiny`` runs every branch on the CPU in a minute, with random images unless there are ``--data``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import kernels, quality, report, right, speed  # noqa: E402
from benchmarks.gpu.measuring import Row, Settings, Step  # noqa: E402

PARTS: dict[str, Callable[[Settings], Iterator[Step]]] = {
    "quality": quality.steps,
    "speed": speed.steps,
    "kernels": kernels.steps,
}
RESERVE = 10.0
"""Seconds that are kept for writing the page and ending processes."""


class Rows:
    """The file of rows; the last one of a name counts."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.held: dict[tuple[str, str], Row] = {}
        for line in lines:
            row = json.loads(line)
            self.held[row["part"], row["name"]] = row

    def done(self, part: str) -> set[str]:
        """Names of the rows that need not be measured again."""
        return {name for (own, name), row in self.held.items() if own == part and "error" not in row}

    def write(self, part: str, name: str, **row: Any) -> None:
        """Add a row, on disk at once."""
        named = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        row = {"part": part, "name": name, "device": named, "torch": torch.__version__} | row
        self.held[part, name] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)  # noqa: T201


@contextmanager
def stopped_after(limit: float) -> Iterator[None]:
    """TimeoutError within the block when it takes longer than ``limit`` seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(limit, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured(step: Step, limit: float) -> Row:
    """A step's row; of one that fails the error, and where it was raised."""
    begun = time.monotonic()
    try:
        with stopped_after(limit):
            row = dict(step.measure())
    except Exception as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:300]
        row = {"error": text, "place": f"{Path(place.filename).name}:{place.lineno}"}
        torch.cuda.empty_cache()
    return row | {"seconds": time.monotonic() - begun}


def main() -> None:
    """Measure what fits into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", nargs="*", default=["right", *PARTS], choices=["right", *PARTS])
    parser.add_argument("--tiny", action="store_true", help="every branch at small sizes, on the CPU")
    chosen = parser.parse_args()
    length = 3600.0 if chosen.tiny else 60 * chosen.minutes - RESERVE
    end = time.monotonic() + length
    rows = Rows(chosen.output)
    settings = Settings("cpu" if chosen.tiny else "cuda", chosen.tiny, chosen.data, chosen.output.resolve())
    if settings.on_card and not torch.cuda.is_available():
        print("There is no CUDA device; --tiny runs on the CPU.")  # noqa: T201
        return
    if settings.data is None and not chosen.tiny and "quality" in chosen.parts:
        parser.error("quality needs --data, a folder with CIFAR-10")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    running = right.start(settings, rows.done("right")) if "right" in chosen.parts else []

    def collect(until: float) -> None:
        for name, row in right.collect(running, until):
            rows.write("right", name, **row)

    for part in (part for part in PARTS if part in chosen.parts):
        for step in PARTS[part](settings):
            collect(end)
            left = end - time.monotonic()
            if step.name in rows.done(part) or left < min(step.seconds, length / 2):
                continue
            rows.write(part, step.name, **measured(step, left), beside=len(running))
            if step.name == "training":  # what follows is timed, and shares the card with nothing
                while running and time.monotonic() < end - length / 2:
                    collect(end)
                    time.sleep(0.2)
                collect(0.0)
    while running and time.monotonic() < end:
        collect(end)
        time.sleep(0.2)
    collect(0.0)
    (chosen.output / "gpu.md").write_text(report.page(list(rows.held.values())))


if __name__ == "__main__":
    main()
