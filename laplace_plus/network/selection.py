"""Selection of the parameters that a posterior covers.

A selection is given as ``"all"`` (everything that requires gradients), ``"last_layer"`` (on the path to the outputs),
``"lora"`` (the active low-rank adapters), parameter or module names and globs, a predicate, or a mask. :func:`select`
turns each into an ordered list of parameters, some with an element-wise mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus.errors import SelectionError

Selection = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | Mapping[str, Tensor] | Tensor
"""What a user may pass as ``parameters=``."""

_Named = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Selected:
    """One selected parameter.

    Attributes:
        name: Its name in ``model.named_parameters()``; or a further name of a tied parameter (see :func:`uses`), which
            means the use in that module alone.
        layer: Name of the layer that owns it (``""`` for the root); see :func:`layer_of`.
        shape: Its whole shape.
        mask: Flat bool tensor over its entries, or None where all are selected.
    """

    name: str
    layer: str
    shape: torch.Size
    mask: Tensor | None = None

    @cached_property
    def size(self) -> int:
        """Number of selected entries."""
        return self.shape.numel() if self.mask is None else int(self.mask.sum())


# Names of torch.nn.utils.parametrize: the tensors that a layer's tensor is computed from, and the modules that compute
# it, which may have parameters and parametrizations of their own.
_PARAMETRIZED = re.compile(r"(?:(?P<layer>.*?)\.)?parametrizations\.[^\W\d]\w*\.(?:original\d*|\d+\..+)")

_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes of ``torch.compile`` and data-parallel wrappers before the names of a network's parameters."""


def layer_of(parameter_name: str) -> str:
    """Name of the layer that a parameter belongs to: the module that owns it, ``""`` for the root.

    A parametrized weight (:mod:`torch.nn.utils.parametrize`, e.g. weight normalisation) is computed from tensors of
    submodules. These tensors belong to the layer that has the weight.

    Example:
        >>> layer_of("2.bias"), layer_of("2.parametrizations.weight.original0"), layer_of("bias")
        ('2', '2', '')
    """
    parametrized = _PARAMETRIZED.fullmatch(parameter_name)
    return (parametrized["layer"] or "") if parametrized else parameter_name.rpartition(".")[0]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The further names of each parameter that has any, by its name in ``model.named_parameters()``."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def uses(model: nn.Module) -> _Named:
    """The parameters of each module by name, tied ones under several; a module that is held twice counts once."""
    found: _Named = {}
    for prefix, module in model.named_modules():
        found.update(module.named_parameters(prefix, recurse=False, remove_duplicate=False))
    return found


def last_layer_of(model: nn.Module) -> str:
    """Name of the last layer, in order of definition, that has parameters; the root's where none has."""
    return layer_of(list(uses(model) or [""])[-1])


def select(model: nn.Module, selection: Selection, *, last_layer: str | None = None) -> tuple[Selected, ...]:
    """Resolve a selection against a network.

    Args:
        model: The network.
        selection: See the module's docstring. Names match whole parameter names, whole module names (then everything
            below the module) and shell-style globs over either. A mask is a bool tensor over all parameter entries in
            ``model.parameters()`` order, or a mapping from parameter names to bool tensors of their shapes. Names
            without a match are also tried as further names of tied parameters, which mean the use in that module alone,
            and without the prefixes of compiled and data-parallel wrappers. The last layer is a use alone, too.
        last_layer: Name of the last layer (see :func:`layer_of`), once that is known; by default the last one defined.

    Returns:
        The selected parameters in ``model.named_parameters()`` order.

    Raises:
        SelectionError: Nothing is selected, a name matches nothing, or a mask has the wrong shape or type.
    """
    parameters, every = dict(model.named_parameters()), uses(model)
    masks: dict[str, Tensor | None]
    if isinstance(selection, (Tensor, Mapping)):
        masks = _check_masks(parameters, every, selection)
    elif callable(selection) and not isinstance(selection, nn.Module):
        masks = {name: None for name, parameter in parameters.items() if selection(name, parameter)}
    elif isinstance(selection, str) and selection == "all":
        masks = {name: None for name, parameter in parameters.items() if parameter.requires_grad}
    elif isinstance(selection, str) and selection == "last_layer":
        layer = last_layer_of(model) if last_layer is None else last_layer
        masks = {name: None for name in every if layer_of(name) == layer}
    elif isinstance(selection, str) and selection == "lora":
        masks = dict.fromkeys(adapter_parameters(model))
    elif isinstance(selection, Iterable) and not isinstance(selection, nn.Module):
        masks = _match(parameters, every, [selection] if isinstance(selection, str) else selection)
    else:
        masks = {}
    if not masks:
        expected = '"all", "last_layer", names, globs, a predicate or a mask that select at least one entry'
        got = repr(selection) if isinstance(selection, str) else type(selection).__name__
        fix = 'For frozen networks, name the parameters: "all" means those that require gradients.'
        raise SelectionError("The selection contains no parameters.", expected=expected, got=got, fix=fix)
    whole = {id(parameter) for name, parameter in parameters.items() if name in masks}  # further names add nothing
    return tuple(
        Selected(name, layer_of(name), parameter.shape, masks[name])
        for name, parameter in every.items()
        if name in masks and (name in parameters or id(parameter) not in whole)
    )


def trained(name: str, parameter: nn.Parameter) -> bool:
    """Selects every weight that was trained and is real."""
    return parameter.requires_grad and not parameter.is_complex()


def refine(selected: Iterable[Selected], chosen: Tensor | None = None) -> dict[str, Tensor]:
    """Masks by parameter name for a selection, or for its ``chosen`` entries ``[P]``; they are a selection again."""
    masks, start = {}, 0
    for item in selected:
        mask = torch.ones(item.shape.numel(), dtype=torch.bool) if item.mask is None else item.mask.cpu().clone()
        if chosen is not None:
            mask[mask.clone()] = chosen[start : start + item.size].cpu()
        masks[item.name] = mask.view(item.shape)
        start += item.size
    return masks


def _spellings(name: str) -> Iterator[str]:
    """The name, then the name without one wrapper prefix, without two, and so on."""
    yield name
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
        yield name


def _match(parameters: _Named, every: _Named, patterns: Iterable[str]) -> dict[str, Tensor | None]:
    def hits(pattern: str) -> list[str]:
        globs = (pattern, f"{pattern}.*")
        found = [n for n in every if n.startswith(f"{pattern}.") or any(fnmatchcase(n, glob) for glob in globs)]
        return [n for n in found if n in parameters] or found

    found: dict[str, Tensor | None] = {}
    for pattern in patterns:
        names = next(filter(None, map(hits, _spellings(pattern))), None)
        if names is None:
            what = f"No parameter matches {pattern!r}."
            got = f"a network with {', '.join(list(parameters)[:6])}{', …' if len(parameters) > 6 else ''}"
            fix = "Print [name for name, _ in model.named_parameters()] to see the names."
            raise SelectionError(what, expected="a parameter name, a module name or a glob over them", got=got, fix=fix)
        found |= dict.fromkeys(names)
    return found


def _check_masks(parameters: _Named, every: _Named, masks: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Flat masks by parameter name: without the empty ones, and None in place of full ones."""
    if isinstance(masks, Tensor):
        sizes = [parameter.numel() for parameter in parameters.values()]
        _check_mask(masks, "of all parameter entries", (sum(sizes),))
        masks = {n: part.reshape(parameters[n].shape) for n, part in zip(parameters, masks.split(sizes), strict=True)}
    known: dict[str, Tensor | None] = {}
    for given, mask in masks.items():
        name = next((spelling for spelling in _spellings(str(given)) if spelling in every), None)
        if name is None or any(every[name] is every[other] for other in known):
            what = f"The mask named {given!r} belongs to no parameter, or to one that has a mask already."
            expected = "names of the network's parameters, each at most once"
            fix = "Print [name for name, _ in model.named_parameters()] to see the names."
            raise SelectionError(what, expected=expected, got=", ".join(map(str, masks)), fix=fix)
        _check_mask(mask, f"of {name!r}", every[name].shape)
        known[name] = None if mask.all() else mask.detach().flatten().clone()
    return {name: mask for name, mask in known.items() if mask is None or mask.any()}


def _check_mask(mask: Any, of_what: str, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != shape:
        expected = f"a bool tensor of shape {tuple(shape)}, in model.parameters() order"
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise SelectionError(f"The mask {of_what} does not fit.", expected=expected, got=got)


# -- low-rank adapters -------------------------------------------------------------------------------------------------
#
# A layer with a low-rank adapter (LoRA; Hu et al., 2021, arXiv:2106.09685) adds ``s B A x`` to its output, with ``A
# [r, d_in]`` and ``B [d_out, r]``. It may hold several by name, of which some are active. Those of PEFT's layers are
# found by their attributes, without importing it.

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
                    a, b = (_names_in(module, prefix, kind, adapter) for kind in (first, second))
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
                found += _names_in(module, prefix, kind, adapter)
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


def _names_in(module: nn.Module, prefix: str, kind: str, adapter: str) -> list[str]:
    """Full names of the parameters that one adapter has in one of a module's dictionaries."""
    start = f"{kind}.{adapter}"
    names = [name for name, _ in module.named_parameters() if name == start or name.startswith(f"{start}.")]
    return [f"{prefix}.{name}" if prefix else name for name in names]
