"""The optional import of triton, in one place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

triton: Any = None
tl: Any = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:  # kernels are then never launched; see selection.triton_kernels
    pass


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """``triton.jit``, or the function itself where there is no triton."""
    return function if triton is None else triton.jit(function, **options)


def on_its_device(launcher: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Launch on the device of the first tensor: Triton launches on the current one, whatever the tensors are on."""

    @wraps(launcher)
    def call(tensor: Tensor, *args: P.args, **options: P.kwargs) -> R:
        with torch.cuda.device_of(tensor):
            return launcher(tensor, *args, **options)

    return call


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once on a device; 4 in the interpreter, where it only decides how work is split."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int, least: int = 1, most: int = 1 << 30) -> int:
    """The next power of two, within bounds."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most)
