"""Checks of arguments, called where a user's call comes in and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from difflib import get_close_matches
from operator import ge, gt, le, lt
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import WORDS, ConfigurationError, NonFiniteError

PRODUCTS: ContextVar[float] = ContextVar("products", default=0.0)
"""Machine epsilon of the type in which a network computes products, where that is shorter than the vectors' type."""

_BOUNDS = {"above": (">", gt), "least": ("≥", ge), "most": ("≤", le), "below": ("<", lt)}

LARGEST = 2**32
"""Most entries of a matrix that is written out: 65 536 × 65 536, 16 GiB in float32."""


def zeros(name: str, rows: int, columns: int, like: Tensor, fix: str | None = None) -> Tensor:
    """Zeros ``[rows, columns]`` for a matrix that is written out, of a tensor's type and where it is.

    :class:`ConfigurationError` beyond :data:`LARGEST` entries, or where there is no memory for them.
    """
    with suppress(MemoryError, RuntimeError):  # of torch's allocators
        if rows * columns <= LARGEST:
            return like.new_zeros(rows, columns)
    raise ConfigurationError(
        f"{name} cannot be written out.",
        expected="a matrix that fits into memory, of at most 2³² entries",
        got=f"{rows} × {columns}, {rows * columns * like.element_size() / 2**30:,.0f} GiB",
        fix=fix or 'Select parameters="last_layer", or ask for variance(), sample(n), functional_posterior(x).',
    )


def count(name: str, value: Any, least: int = 1, fix: str | None = None) -> int:
    """``value``, or :class:`ConfigurationError` unless it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an integer of at least {least}"
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value), fix=fix)
    return value


def number(name: str, value: Any, **bounds: Any) -> float:
    """``value``, or :class:`ConfigurationError` unless it is a finite number in the bounds of :func:`numbers`."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    given = torch.tensor(value if known else math.nan, dtype=torch.float64, device="cpu")
    numbers(name, given, got=repr(value), **bounds)
    return value


def numbers(
    name: str, values: Tensor, *, error: Any = ConfigurationError, got: Any = None, fix: Any = None, **bounds: float
) -> Tensor:
    """``values``, or an error unless all are finite, > ``above``, ≥ ``least``, ≤ ``most`` and < ``below``."""
    low, high = (end.item() for end in values.detach().aminmax()) if values.numel() else (math.nan, math.nan)
    inside = (_BOUNDS[kind][1](end, bound) for kind, bound in bounds.items() for end in (low, high))
    if not math.isfinite(high - low) or not all(inside):  # of NaN among the values, both ends are
        found = f"{low:.4g}" if values.numel() == 1 else f"{values.numel()} numbers from {low:.4g} to {high:.4g}"
        expected = ["a finite number", *(f"{_BOUNDS[kind][0]} {bound:g}" for kind, bound in bounds.items())]
        raise error(f"{name} is out of range.", expected=" ".join(expected), got=got or found, fix=fix)
    return values


def weights(name: str, value: Any, wanted: Sequence[int | None]) -> Tensor:
    """``value``, or :class:`ConfigurationError` unless it is a tensor of that shape of weights ≥ 0, not all zero."""
    numbers(name, shape(name, value, wanted), least=0.0)
    numbers(f"The largest one of {name}", value.max(), above=0.0)
    return value


def describe(tree: Any) -> str:
    """A tree's types and shapes, as one line for an error message: ``(float32 [2, 3], {mask: NoneType})``."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        shown = [describe(child) for child in tree[:4]] + (["..."] if len(tree) > 4 else [])
        return "(" + ", ".join(shown) + ")"
    return type(tree).__name__


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


def options(owner: str, given: Iterable[Any], known: Iterable[str], word: str = "option") -> None:
    """Raise :class:`ConfigurationError` for an unknown one; it says what is nearest, or what it is called here."""
    known = list(dict.fromkeys(known))
    for name in map(str, given):
        if name not in known:
            near = get_close_matches(name, known, 1)
            fix = f"Write {WORDS[name]}" if name in WORDS else f"Did you mean {near[0]!r}?" if near else None
            expected = ", ".join(known) or "none"
            raise ConfigurationError(f"{owner} has no {word} {name!r}.", expected=expected, got=repr(name), fix=fix)


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
        what, expected = f"{name} has another shape.", f"a tensor [{text}]"
        raise ConfigurationError(what, expected=expected, got=describe(value), fix=fix)
    return value
