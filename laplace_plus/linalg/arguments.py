"""What the public functions do with their arguments: types of numbers and start vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from laplace_plus.checks import count, number
from laplace_plus.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with autocast disabled, which would round its recurrences to half precision.

    Operators run with autocast disabled as well; one that should multiply in half precision enables it itself.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return wrapped


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which recurrences run: that of the vectors, but at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def start_vectors(v: Tensor, depth: int, dtype: torch.dtype | None, tolerance: float | None) -> Tensor:
    """Start vectors of a Krylov space in ``dtype``, if given; ConfigurationError for others, or other bad arguments."""
    if not isinstance(v, Tensor) or v.ndim == 0 or not v.is_floating_point() or v.numel() == 0:
        what = "The start vectors have the wrong type or shape."
        got = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        raise ConfigurationError(what, expected="a floating-point tensor [n], or a stack [..., n]", got=got)
    count("depth", depth)
    if tolerance is not None:
        number("tolerance", tolerance, least=0.0)
    return v if dtype is None else v.to(dtype)
