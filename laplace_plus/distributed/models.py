"""Plain copies of models whose parameters are sharded over ranks.

A model under FSDP2 (``torch.distributed.fsdp.fully_shard``) or with other DTensor parameters gathers its weights during
the forward pass. All ranks would have to run it equally often, and no function that it calls would see a plain weight.
The whole weights are therefore gathered once, into a module of the same structure without communicating hooks.
"""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus.errors import UnsupportedError

_HOME = "torch.distributed."


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are, or may be, sharded over ranks (FSDP2); UnsupportedError for the first FSDP."""
    if "torch.distributed.tensor" not in sys.modules:  # then there are no DTensors
        return False
    for module in model.modules():
        if _is_a(module, "FullyShardedDataParallel"):
            what = "The first version of FSDP flattens parameters."
            expected = "a module sharded with torch.distributed.fsdp.fully_shard, or none"
            fix = "Use fully_shard, or load the full state dict into a plain module."
            raise UnsupportedError(what, expected=expected, got="a FullyShardedDataParallel module", fix=fix)
        if _is_a(module, "FSDPModule"):
            return True
    return any(_is_a(tensor, "DTensor") for tensor in _tensors(model))


def plain_module(model: nn.Module) -> nn.Module:
    """The model itself, or, where it is sharded, a copy with whole parameters; then to be called on all ranks.

    The model stays as it is, except that weights which a forward pass has left gathered are sharded again.

    Raises:
        UnsupportedError: A part of the model cannot be copied.
    """
    if not is_sharded(model):
        return model
    _reshard(model)
    memo: dict[int, Any] = {id(buffer): _whole(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
    shells = {}
    for module in model.modules():
        cls: Any = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(_HOME))
        shells[module] = memo[id(module)] = cls.__new__(cls)
    for module, shell in shells.items():
        try:
            vars(shell).update(copy.deepcopy(_without_communication(vars(module)), memo))
        except Exception as error:
            what, expected = f"The sharded model cannot be copied: {error}.", "modules that copy.deepcopy can copy"
            fix = "Load the full state dict into a plain module and pass that one."
            raise UnsupportedError(what, expected=expected, got=type(module).__name__, fix=fix) from error
    return shells[model]


def sharded_source(model: nn.Module) -> weakref.ref[nn.Module] | None:
    """The module, without wrappers, whose parameters are sharded; None if there is none.

    The reference is weak: sharded models cannot be copied, and neither could a posterior that holds one.
    """
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        return sharded_source(inner)
    return weakref.ref(model) if is_sharded(model) else None


def refresh_(plain: nn.Module, source: weakref.ref[nn.Module] | None) -> None:
    """Copy the weights of a :func:`sharded_source` into its :func:`plain_module`; to be called on all ranks."""
    model = None if source is None else source()
    if model is not None:
        _reshard(model)
        with torch.no_grad():
            for mine, theirs in zip(_tensors(plain), _tensors(model), strict=True):
                mine.copy_(_whole(theirs))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _is_a(value: object, name: str) -> bool:
    """Whether a value belongs to a class of ``torch.distributed``, whose modules take long to import."""
    return any(cls.__name__ == name and cls.__module__.startswith(_HOME) for cls in type(value).__mro__)


def _whole(tensor: Tensor) -> Tensor:
    detached: Any = tensor.detach()
    return (detached.full_tensor() if _is_a(tensor, "DTensor") else detached).clone()


def _reshard(model: nn.Module) -> None:
    # Gathered weights may have a lower precision than the shards.
    for module in model.modules():
        if _is_a(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]


def _without_communication(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without those of ``torch.distributed``: hooks and bookkeeping."""
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, dict) and not name.startswith("__"):
            value = type(value)((key, entry) for key, entry in value.items() if not _communicates(entry))
        if not name.startswith("__composable_api"):
            kept[name] = value
    return kept


def _communicates(value: Any) -> bool:
    owner = type(getattr(value, "__self__", value))
    home = getattr(value, "__module__", None) if owner is type(value) else owner.__module__
    return not isinstance(value, (Tensor, nn.Module)) and isinstance(home, str) and home.startswith(_HOME)
