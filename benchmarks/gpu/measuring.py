"""Seconds, memory and synchronisations, on a card or on the CPU; what a row is."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Row = dict[str, Any]


@dataclass
class Step:
    """A row to be measured.

    Attributes:
        name: Its key among the rows of its part.
        seconds: What it is thought to take on a card; it is not begun when less time is left.
        measure: Gives its columns.
    """

    name: str
    seconds: float
    measure: Callable[[], Row]


@dataclass
class Settings:
    """Where and at which size: what all parts are given."""

    device: str
    tiny: bool
    data: Path | None
    output: Path

    @property
    def on_card(self) -> bool:
        """Whether clocks must wait for a card."""
        return self.device == "cuda"

    def sized(self, tiny: Any, full: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else full


def clock(device: str) -> float:
    """Seconds, after all that was launched has ended."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], object], device: str, repetitions: int = 3, warm_up: int = 1) -> float:
    """Median seconds of a call."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repetitions):
        start = clock(device)
        call()
        times.append(clock(device) - start)
    return median(times)


class Memory:
    """Peak GiB on the card within a ``with`` block, in ``gib``; nothing is known on the CPU."""

    def __init__(self, device: str):
        self.device, self.gib = device, float("nan")

    def __enter__(self) -> Memory:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            self.gib = torch.cuda.max_memory_allocated() / 2**30

    @property
    def row(self) -> Row:
        """Its column, where there is one."""
        return {"gib": round(self.gib, 2)} if self.device == "cuda" else {}


READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")


class _Reads(TorchDispatchMode):
    """Counts the operations that would wait for a card: those that give numbers, or sizes that depend on numbers."""

    def __init__(self, places: Counter[str]):
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            isinstance(own, Tensor) and own.dtype == torch.bool for own in args[1] if own is not None
        )
        if name in READS or masks:
            frame: Any = sys._getframe()
            while frame.f_back and "laplace_plus" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.places[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(device: str, places: Counter[str]) -> Any:
    """Count synchronisations: on a card those of which torch warns, by line; on the CPU operations that would."""
    if device != "cuda":
        with _Reads(places):
            yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "synchronizing" in str(one.message):
            places[f"{Path(one.filename).name}:{one.lineno}"] += 1


def per_batch(run: Callable[[int], object], device: str, few: int = 2, many: int = 4) -> tuple[float, list[str]]:
    """Synchronisations in each further batch of ``run(batches)``, and their most frequent places."""
    counts = []
    for number in (few, many):
        places: Counter[str] = Counter()
        with counted(device, places):
            run(number)
        counts.append(places)
    more = Counter({place: n - counts[0][place] for place, n in counts[1].items() if n > counts[0][place]})
    return more.total() / (many - few), [f"{place} × {n / (many - few):g}" for place, n in more.most_common(4)]
