"""Choice among implementations of one operation, by a stated rule: nothing is timed while a user waits.

Every operation of :mod:`laplace_plus.kernels` has a reference in plain torch; symmetric updates and
Gram–Schmidt have Triton kernels beside it.

* On a CUDA device a kernel is chosen for the types and sizes at which ``benchmarks/gpu`` has shown it to take at most
  two thirds of torch's time. None has been timed on a card yet: torch's own runs everywhere.
* On the CPU, too, the rules are static; each states the measurement behind it.

So the same call does the same in every process. :func:`use` and the environment variable ``LAPLACE_PLUS_KERNELS``
override this with ``"reference"`` (plain torch everywhere) or ``"triton"`` (our kernels wherever they can run).

Triton is optional and is imported when the first of its kernels runs, never with the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, cast, get_args

import torch

from laplace_plus import checks

Mode = Literal["auto", "reference", "triton"]

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
        choice: ``"auto"`` (by the rules of this module), ``"reference"`` (plain torch) or ``"triton"`` (Triton wherever
            it supports the device, the types and the sizes; the reference elsewhere).

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


def triton_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module ``laplace_plus.kernels._triton.<name>`` where its kernels are chosen and can run, else None."""
    if mode() != "triton" or importlib.util.find_spec("triton") is None:
        return None
    # Without asynchronous copies and TF32 there is nothing to win.
    if not (torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else INTERPRETED):
        return None
    return importlib.import_module(f"laplace_plus.kernels._triton.{name}")
