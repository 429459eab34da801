"""The optional import of triton, in one place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from laplace_plus.kernels.selection import interpreting

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


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once on a device; 4 in the interpreter, where it only decides how work is split."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether to multiply in float32 instead: Triton's interpreter multiplies bfloat16's bit patterns."""
    return dtype == torch.bfloat16 and interpreting()


def power_of_two(size: int, least: int = 1, most: int = 1 << 30) -> int:
    """The next power of two, within bounds."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most)
