"""Checks of the arguments that many functions share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from laplace_plus._memory import require_free
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


def require_choice(name: str, value: str, options: object) -> None:
    """Raise :class:`ConfigurationError` unless ``value`` is one of the strings of the literal type ``options``."""
    names = get_args(options)
    if value not in names:
        raise ConfigurationError(f"Unknown {name}.", expected=", ".join(repr(x) for x in names), got=repr(value))


def require_generator(value: object) -> None:
    """Raise :class:`ConfigurationError` unless it is a generator of torch, or None."""
    if not isinstance(value, torch.Generator | None):
        expected = "torch.Generator().manual_seed(0), say, or None"
        raise ConfigurationError("The generator is no torch.Generator.", expected=expected, got=repr(value))


def require_count(name: str, value: int, least: int, fix: str | None = None, *, most: int = 2**63 - 1) -> None:
    """Raise :class:`ConfigurationError` unless a value is an integer of at least ``least``, and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        over = isinstance(value, int) and value > most
        expected = f"an integer of at most {most:,}" if over else f"an integer of at least {least}"
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value), fix=fix)


def require_tolerance(**tolerances: float | None) -> None:
    """Raise :class:`ConfigurationError` if a tolerance, given by name, is negative, infinite or NaN."""
    for name, value in tolerances.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise ConfigurationError(f"{name} is out of range.", expected="a finite number ≥ 0", got=repr(value))


def empty(like: Tensor, *shape: int) -> Tensor:
    """An array with any content, or :class:`ConfigurationError` where it would not fit into free memory."""
    size, what = math.prod(shape) * like.element_size(), f"An array of shape {list(shape)}"
    require_free(size, what, like.device, "Lower the depth, the rank or the number of products.")
    return like.new_empty(shape)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which recurrences run: that of the vectors, but at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def start_vectors(v: Tensor, depth: int, dtype: torch.dtype | None) -> Tensor:
    """Start vectors of a Krylov space in ``dtype``, if given; ConfigurationError for others, or a depth below one."""
    if not isinstance(v, Tensor) or v.ndim == 0 or not v.is_floating_point() or v.numel() == 0:
        what = "The start vectors have the wrong type or shape."
        got = f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        raise ConfigurationError(what, expected="a floating-point tensor [n], or a stack [..., n]", got=got)
    require_count("depth", depth, 1)
    return v if dtype is None else v.to(dtype)
