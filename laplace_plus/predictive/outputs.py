"""Which outputs are asked for, and whether their variances or all covariances."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.network import batches

MANY_OUTPUTS = 64
"""With more outputs than this, links that need only variances get only variances: covariances would take C times the
memory, and the links ignore them."""

Outputs = Literal["diagonal", "independent"] | Sequence[int] | Sequence[bool] | slice | Tensor | None

_OF_LINKS: dict[str, Outputs] = {"gumbel": "independent", "network": "independent", "probit": "diagonal"}


def outputs_for(link: str, n_outputs: int) -> Outputs:
    """What a link needs of so many outputs: variances where those do, or else all covariances."""
    return _OF_LINKS.get(link) if n_outputs > MANY_OUTPUTS else None


def require_outputs(shape: torch.Size, expected: int | None, inputs: Any) -> None:
    """Raise :class:`DataError` for no examples, or another number of outputs, as of an example without a batch axis."""
    if not shape.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got=batches.describe(inputs))
    if expected is not None and shape[-1] != expected:
        what = "The network gives another number of outputs than while fitting."
        fix = "Pass a batch: x[None] for one input."
        got = f"outputs of shape {tuple(shape)} for inputs {batches.describe(inputs)}"
        raise DataError(what, expected=f"{expected} outputs for each example", got=got, fix=fix)


def wants_variances(outputs: Outputs, joint: bool) -> bool:
    """Whether a choice of outputs is of variances only; refuses other texts, and these with ``joint``."""
    if isinstance(outputs, str) and (outputs not in ("diagonal", "independent") or joint):
        expected = 'None, "diagonal", "independent" (neither with joint=True) or indices'
        raise ConfigurationError("Unknown choice of outputs.", expected=expected, got=f"{outputs!r}, joint={joint}")
    return isinstance(outputs, str)


def output_indices(outputs: Sequence[int] | Sequence[bool] | slice | Tensor, shape: torch.Size) -> Tensor:
    """A choice of outputs as indices from 0 to C−1: ``[K]``, or ``[B, *, K]`` where each example has its own.

    ConfigurationError for anything else: an index that is out of range would end a process on a GPU.
    """
    n_outputs = shape[-1]
    try:
        is_mixed = isinstance(outputs, (list, tuple)) and len({isinstance(entry, bool) for entry in outputs}) > 1
        chosen = torch.as_tensor(range(n_outputs)[outputs] if isinstance(outputs, slice) else outputs)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        is_mixed, chosen = True, torch.zeros(0)
    if chosen.dtype is torch.bool and chosen.shape == (n_outputs,):
        chosen = chosen.nonzero().squeeze(-1)
    integers = not (is_mixed or chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool)
    chosen = chosen.long() if integers else chosen
    known = integers and chosen.ndim > 0 and chosen.numel() > 0
    known = known and -n_outputs <= int(chosen.min()) and int(chosen.max()) < n_outputs
    if not known or (chosen.ndim > 1 and chosen.shape[:-1] != shape[:-1]):
        expected = (
            f"indices below {n_outputs}, a slice or a bool mask of length {n_outputs}, at least one; or integers "
        )
        expected += f"{[*shape[:-1], 'K']} below {n_outputs}, for each example"
        what = "The network does not have these outputs."
        raise ConfigurationError(what, expected=expected, got=reprlib.repr(outputs))
    return chosen % n_outputs


def pick(values: Tensor, outputs: Outputs) -> Tensor:
    """The chosen ones of ``[B, *, C]`` values, ``[B, *, K]``; all of them where variances or everything is wanted."""
    if outputs is None or isinstance(outputs, str):
        return values
    chosen = output_indices(outputs, values.shape).to(values.device)
    return values.gather(-1, chosen.expand(*values.shape[:-1], chosen.shape[-1]))
