"""The arguments that many functions of the layer take: how they are checked."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError


def require_choice(name: str, value: str, options: object) -> None:
    """Check one of several names.

    Raises:
        ConfigurationError: Another name than those of the literal type ``options``.
    """
    names = get_args(options)
    if value not in names:
        expected = ", ".join(repr(x) for x in names)
        raise ConfigurationError(f"Unknown {name}.", expected=expected, got=repr(value))


def require_count(name: str, value: int, least: int, fix: str | None = None) -> None:
    """Check a number of things.

    Raises:
        ConfigurationError: Not an integer, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an integer of at least {least}"
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value), fix=fix)


def require_tolerance(**tolerances: float | None) -> None:
    """Check tolerances, by their names.

    Raises:
        ConfigurationError: One of them is negative, infinite or NaN.
    """
    for name, value in tolerances.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise ConfigurationError(f"{name} is out of range.", expected="a finite number ≥ 0", got=repr(value))


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type of a recurrence: that of its vectors, but at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def start_vectors(v: Tensor, depth: int, dtype: torch.dtype | None) -> Tensor:
    """The start vectors of a Krylov space in the type that was asked for.

    Raises:
        ConfigurationError: Something that is no stack of real floating-point vectors, or a depth below one.
    """
    if not isinstance(v, Tensor) or v.ndim == 0 or not v.is_floating_point() or v.numel() == 0:
        raise ConfigurationError(
            "These are no start vectors.",
            expected="a floating-point tensor [n], or a stack [..., n]",
            got=f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__,
        )
    require_count("depth", depth, 1)
    return v if dtype is None else v.to(dtype)
