"""Choice among implementations of one operation: measured on a GPU, by a fixed rule elsewhere.

Every operation of :mod:`laplace_plus.kernels` has a reference in plain torch; symmetric updates and
Gram–Schmidt have Triton kernels beside it.

* On a CUDA device the candidates are timed on the first call for each (operation, device, type, size class), and the
  fastest is used for the rest of the process. torch's own stays unless another is faster by more than the noise of the
  measurement, so no slower kernel is ever chosen. Work too small to be worth measuring, and work first met while a CUDA
  graph is captured, goes to torch.
* On the CPU the rules are static, hence the same in every run; each states the measurement behind it.

:func:`use` and the environment variable ``LAPLACE_PLUS_KERNELS`` override this with ``"reference"`` (plain torch
everywhere: the same rounding in every process) or ``"triton"`` (our kernels wherever they can run, unmeasured).

Triton is optional and is imported when the first of its kernels runs, never with the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import warn

Mode = Literal["auto", "reference", "triton"]

REFERENCE = "torch"
"""Name under which every operation offers its plain-torch reference."""

_MARGIN = 0.97
"""A kernel must take less than this share of torch's time to be chosen: repeated timings differ by 3 %."""

_SMALLEST_WORK = 1e8
"""Operations below which nothing is measured: such work takes about 50 µs, and launches dominate."""

_mode: ContextVar[str | None] = ContextVar("laplace_plus_kernels", default=None)

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
"""Whether Triton interprets its kernels, on any device; Triton reads the variable when it is imported."""


def mode() -> Mode:
    """The choice in force: the innermost :func:`use`, else ``LAPLACE_PLUS_KERNELS``, else ``"auto"``."""
    value = _mode.get() or os.environ.get("LAPLACE_PLUS_KERNELS", "auto")
    return cast(Mode, checks.choice("choice of kernels (use() or LAPLACE_PLUS_KERNELS)", value, get_args(Mode)))


@contextmanager
def use(choice: Mode) -> Iterator[None]:
    """Choose the kernels within a ``with`` block.

    Args:
        choice: ``"auto"`` (measured on a GPU, static on the CPU), ``"reference"`` (plain torch) or ``"triton"`` (Triton
            wherever it supports the device, the types and the sizes; the reference elsewhere).

    Raises:
        ConfigurationError: Another choice.

    Example:
        >>> with use("reference"):
        ...     mode()
        'reference'
    """
    token = _mode.set(choice)
    try:
        mode()
        yield
    finally:
        _mode.reset(token)


@dataclass(frozen=True)
class Choice:
    """A measured choice: the name of the implementation, and the time of each candidate; infinite where it failed."""

    chosen: str
    seconds: Mapping[str, float]


Key = tuple[object, ...]
_choices: dict[Key, Choice] = {}


def choices() -> dict[Key, Choice]:
    """What has been measured in this process: (operation, device, type, size class, …) -> :class:`Choice`."""
    return dict(_choices)


def forget() -> None:
    """Measure anew from now on."""
    _choices.clear()


def size_class(*sizes: int) -> tuple[int, ...]:
    """Sizes up to the next power of two: what is measured for one size holds for all of its class."""
    return tuple(max(size - 1, 0).bit_length() for size in sizes)


def triton_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module ``laplace_plus.kernels._triton.<name>``, or None where its kernels cannot run."""
    if device.type == "cuda":  # without asynchronous copies and TF32 there is nothing to win
        usable = mode() != "reference" and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        usable = INTERPRETED and mode() == "triton"
    if not usable or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"laplace_plus.kernels._triton.{name}")


def choose(
    key: Key, device: torch.device, work: float, candidates: Mapping[str, Callable[..., object]], *totals: Tensor
) -> str:
    """The name of the fastest candidate, measured once for each key.

    Anything but CUDA keeps the reference. ``work`` is the number of operations, or of bytes moved times ten: whether it
    is worth measuring. Candidates write to the ``totals``, and are timed on scratch memory. Names of Triton kernels
    begin with ``"triton"``.
    """
    if mode() == "triton":
        return next((name for name in candidates if name.startswith("triton")), REFERENCE)
    if mode() == "reference" or len(candidates) == 1 or device.type != "cuda" or work < _SMALLEST_WORK:
        return REFERENCE
    if key not in _choices:
        if torch.cuda.is_current_stream_capturing():
            return REFERENCE
        with torch.cuda.device(device), torch.no_grad():
            scratch = [torch.zeros_like(total) for total in totals]
            seconds = {name: time_candidate(name, partial(call, *scratch)) for name, call in candidates.items()}
        fastest = min(seconds, key=lambda name: seconds[name])
        _choices[key] = Choice(fastest if seconds[fastest] < _MARGIN * seconds[REFERENCE] else REFERENCE, seconds)
    return _choices[key].chosen


def device_seconds(call: Callable[[], Any], *, warm_up: int, repetitions: int) -> float:
    """Median seconds of a call on the current CUDA device, after ``warm_up`` calls, the first of which compiles."""
    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def time_candidate(name: str, call: Callable[[], Any]) -> float:
    """Median seconds of a candidate on the current CUDA device; infinite where it fails."""
    try:
        return device_seconds(call, warm_up=2, repetitions=5)
    except torch.OutOfMemoryError:
        return float("inf")
    except Exception as error:  # a kernel that does not compile on some device must not end a fit that torch can do
        source = type(error).__module__.split(".")[0]
        if name == REFERENCE or isinstance(error, TimeoutError) or source not in ("builtins", "torch", "triton"):
            raise  # what a signal handler raised, say
        warn(f"A kernel is left out, because it failed here: {name}: {error}", RuntimeWarning)
        return float("inf")
