"""Checks of arguments, called where a user's call comes in and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NonFiniteError, unknown_option

PRODUCTS: ContextVar[float] = ContextVar("products", default=0.0)
"""Machine epsilon of the type in which a network computes products, where that is shorter than the vectors' type."""


LARGEST = 2**32
"""Most entries of a matrix that is written out: 65 536 × 65 536, 16 GiB in float32."""


def zeros(name: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Zeros ``[rows, columns]`` for a matrix that is written out, of a tensor's type and where it is.

    :class:`ConfigurationError` beyond :data:`LARGEST` entries, or where there is no memory for them.
    """
    try:
        if rows * columns > LARGEST:
            raise MemoryError
        return like.new_zeros(rows, columns)
    except (MemoryError, RuntimeError):  # of torch's allocators
        size = rows * columns * like.element_size() / 2**30
        what, got = f"{name} cannot be written out.", f"{rows} × {columns}, {size:,.0f} GiB"
        expected = "a matrix that fits into memory, of at most 2³² entries"
        fix = 'Select fewer parameters, such as parameters="last_layer", or ask for products, samples or variances: '
        fix += "posterior.variance(), sample(n), functional_posterior(x)."
        raise ConfigurationError(what, expected=expected, got=got, fix=fix) from None


def count(name: str, value: Any, least: int = 1, fix: str | None = None) -> int:
    """``value``, or :class:`ConfigurationError` unless it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an integer of at least {least}"
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value), fix=fix)
    return value


def number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> float:
    """``value``, or :class:`ConfigurationError` unless it is a finite number > ``above`` in [``least``, ``most``]."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not known or not (value > above and least <= value <= most):
        bounds = [f"> {above:g}"] * (above > -math.inf) + [f"≥ {least:g}"] * (least > -math.inf)
        expected = " ".join(["a finite number", *bounds, *[f"≤ {most:g}"] * (most < math.inf)])
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value))
    return value


def positive(name: str, value: Any) -> float:
    """``value``, or :class:`ConfigurationError` unless it is a finite number > 0."""
    return number(name, value, above=0.0)


def choice(name: str, value: Any, options: Iterable[Any], fix: str | None = None) -> Any:
    """``value``, or :class:`ConfigurationError` unless it is one of the options."""
    options = list(options)
    if not isinstance(value, type(None) | str | int | float) or value not in options:
        expected = ", ".join(map(repr, options))
        raise ConfigurationError(f"Unknown {name}.", expected=expected, got=repr(value), fix=fix)
    return value


def options(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` for an option that is not known; it says what is nearest."""
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown_option(owner, str(name), known)


def generator(value: Any) -> torch.Generator | None:
    """``value``, or :class:`ConfigurationError` unless it is a generator of torch, or None."""
    if not isinstance(value, torch.Generator | None):
        expected = "torch.Generator().manual_seed(0), say, or None"
        raise ConfigurationError("The generator is no torch.Generator.", expected=expected, got=repr(value))
    return value


def finite(name: str, value: Tensor, fix: str = "Check inputs and weights; half precision may overflow.") -> Tensor:
    """``value``, or :class:`NonFiniteError` if an entry is NaN or infinite."""
    if not math.isfinite(value.detach().sum()):  # a tenth of the time that looking at each one takes
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            got = f"{bad} of {value.numel()} entries NaN or infinite"
            fix += " Mask logits by torch.finfo(logits.dtype).min, not −inf." * bool((value == -math.inf).any())
            raise NonFiniteError(f"{name} is not finite.", expected="finite numbers", got=got, fix=fix)
    return value


def shape(name: str, value: Any, wanted: Sequence[int | None], fix: str | None = None) -> Tensor:
    """``value``, or :class:`ConfigurationError` unless it is a tensor of that shape; None stands for any size."""
    own = tuple(value.shape) if isinstance(value, Tensor) else None
    if own is None or len(own) != len(wanted) or any(w not in (None, n) for n, w in zip(own, wanted, strict=True)):
        text = ", ".join("any" if n is None else str(n) for n in wanted)
        got = type(value).__name__ if own is None else str(list(own))
        raise ConfigurationError(f"{name} has another shape.", expected=f"a tensor [{text}]", got=got, fix=fix)
    return value
