"""Low-rank adapters in a network, found by their attributes: those of PEFT's layers, without importing it.

A layer with a low-rank adapter (LoRA; Hu et al., 2021, arXiv:2106.09685) adds ``s B A x`` to its output, with ``A
[r, d_in]`` and ``B [d_out, r]``. It may hold several adapters by name, of which some are active.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from laplace_plus.errors import SelectionError

MERGED = "merged_adapters"
"""The attribute that tells PEFT's layers from others."""

_PAIRS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_FURTHER = ("lora_magnitude_vector", "modules_to_save")


def adapter_pairs(model: nn.Module) -> dict[str, str]:
    """Names of the parameters A of the active adapters, each with that of its B.

    Raises:
        SelectionError: There is no active adapter, or one that is disabled or merged into the weights.
    """
    found = {}
    for prefix, module, adapters in _active(model):
        for first, second in _PAIRS.items():
            for adapter in adapters:
                if adapter in getattr(module, first, ()):
                    a, b = (_names(module, prefix, kind, adapter) for kind in (first, second))
                    found[next(name for name in a if not name.endswith(".bias"))] = b[0]
    if not found:
        what = "The network has no active low-rank adapter."
        expected = "layers with lora_A, lora_B and an active adapter, such as those of peft.get_peft_model"
        fix = "Call model.set_adapter(name), or name the parameters."
        raise SelectionError(what, expected=expected, got=type(model).__name__, fix=fix)
    return found


def adapter_parameters(model: nn.Module) -> list[str]:
    """Names of all parameters of the active adapters: A, B, DoRA's magnitudes, and modules that are saved with them.

    Raises:
        SelectionError: As for :func:`adapter_pairs`.
    """
    found = list(adapter_pairs(model))
    for prefix, module, adapters in _active(model):
        for kind in (*_PAIRS, *_PAIRS.values(), *_FURTHER):
            for adapter in adapters:
                found += _names(module, prefix, kind, adapter)
    return list(dict.fromkeys(found))


def adapter_tensors(model: nn.Module) -> dict[str, str]:
    """Names of the tensors of PEFT's adapters, each with that of its adapter if that is idle, or else ``""``."""
    found = {}
    for prefix, module in model.named_modules():
        known: Any = module
        kinds = tuple(f"{kind}." for kind in getattr(module, "adapter_layer_names", ()))
        for name in filter(lambda name: name.startswith(kinds), module.state_dict() if kinds else ()):
            adapter = name.removeprefix(next(filter(name.startswith, kinds))).split(".")[0]
            found[f"{prefix}.{name}" if prefix else name] = "" if adapter in known.active_adapters else adapter
    return found


def adapter_state(module: nn.Module) -> str:
    """Which adapters a layer of PEFT, one with the attribute ``MERGED``, uses; as text."""
    known: Any = module
    text = f" with adapters {known.active_adapters}, merged {known.merged_adapters}"
    return text + ", disabled" * bool(known.disable_adapters)


def _active(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules that hold adapters: name, module and names of its active ones."""
    for prefix, module in model.named_modules():
        held = [kind for kind in (*_PAIRS, *_FURTHER) if isinstance(getattr(module, kind, None), nn.Module)]
        if held == ["modules_to_save"] and getattr(module, "disable_adapters", False) is True:
            continue  # the active adapter has no copy of this module
        if held:
            for state, fix in (("merged", "model.unmerge_adapter()"), ("disable_adapters", "model.enable_adapters()")):
                if getattr(module, state, False) is True:
                    what = f"The adapter of {prefix!r} is not in use by itself: {state} is set."
                    raise SelectionError(what, expected="an active adapter beside its layer", got=state, fix=fix)
            adapters: Any = getattr(module, "active_adapters", [])
            yield prefix, module, [adapters] if isinstance(adapters, str) else list(adapters)


def _names(module: nn.Module, prefix: str, kind: str, adapter: str) -> list[str]:
    """Full names of the parameters that one adapter has in one of a module's dictionaries."""
    start = f"{kind}.{adapter}"
    names = [name for name, _ in module.named_parameters() if name == start or name.startswith(f"{start}.")]
    return [f"{prefix}.{name}" if prefix else name for name in names]
