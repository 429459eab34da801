"""Which entries of a network's parameters a posterior is about.

A selection is given as ``"all"`` (everything that requires gradients), ``"last_layer"``, parameter or module names and
globs, a predicate, or a mask; :func:`select` turns each into an ordered list of parameters, some with an element-wise
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from laplace_plus.errors import SelectionError

Selection = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | Mapping[str, Tensor] | Tensor
"""What a user may pass as ``parameters=``."""


@dataclass(frozen=True)
class Selected:
    """One selected parameter.

    Attributes:
        name: Its name in ``model.named_parameters()``.
        layer: Name of the module that owns it (``""`` for the root).
        shape: Its whole shape.
        mask: Flat bool tensor over its entries, or None where all are selected.
    """

    name: str
    layer: str
    shape: torch.Size
    mask: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of selected entries."""
        return self.shape.numel() if self.mask is None else int(self.mask.sum())


def last_layer_of(model: nn.Module) -> str:
    """Name of the last module, in order of definition, that owns parameters."""
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if not owners:
        raise SelectionError("The network has no parameters.", expected="at least one nn.Parameter", got="none")
    return owners[-1]


def select(model: nn.Module, selection: Selection, *, last_layer: str | None = None) -> tuple[Selected, ...]:
    """Resolve a selection against a network.

    Args:
        model: The network.
        selection: See the module's docstring. Names match whole parameter names, whole module names (then everything
            below the module) and shell-style globs over either. A mask is a bool tensor over all parameter entries in
            ``model.parameters()`` order, or a mapping from parameter names to bool tensors of their shapes.
        last_layer: Name of the module that is the last layer, where execution order has told; by default the last
            one defined.

    Returns:
        The selected parameters in ``model.named_parameters()`` order.

    Raises:
        SelectionError: Nothing is selected, a name matches nothing, or a mask has the wrong shape or type.
    """
    parameters = dict(model.named_parameters())
    masks: dict[str, Tensor | None]
    if isinstance(selection, Tensor):
        masks = dict(_split_mask(parameters, selection))
    elif isinstance(selection, Mapping):
        masks = dict(_check_masks(parameters, selection))
    elif callable(selection):
        masks = {name: None for name, parameter in parameters.items() if selection(name, parameter)}
    elif selection == "all":
        masks = {name: None for name, parameter in parameters.items() if parameter.requires_grad}
    elif selection == "last_layer":
        layer = last_layer_of(model) if last_layer is None else last_layer
        owned = {id(p) for p in model.get_submodule(layer).parameters(recurse=False)}
        masks = {name: None for name, parameter in parameters.items() if id(parameter) in owned}
    else:
        patterns = [selection] if isinstance(selection, str) else list(selection)
        masks = _match(parameters, patterns)
    if not masks:
        raise SelectionError(
            "The selection contains no parameters.",
            expected='"all", "last_layer", names, globs, a predicate or a mask that select at least one entry',
            got=repr(selection) if isinstance(selection, str) else type(selection).__name__,
            fix="For frozen networks, name the parameters: \"all\" means those that require gradients.",
        )
    return tuple(
        Selected(name, name.rpartition(".")[0], parameter.shape, masks[name])
        for name, parameter in parameters.items()
        if name in masks
    )


def _match(parameters: dict[str, nn.Parameter], patterns: list[str]) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SelectionError("A selection by name takes strings.", expected="str", got=type(pattern).__name__)
        below = pattern + "."
        globs = (pattern, below + "*")
        hits = [n for n in parameters if n.startswith(below) or any(fnmatchcase(n, glob) for glob in globs)]
        if not hits:
            raise SelectionError(
                f"No parameter matches {pattern!r}.",
                expected="a parameter name, a module name or a glob over them",
                got=f"a network with {', '.join(list(parameters)[:6])}{', …' if len(parameters) > 6 else ''}",
                fix="Print [name for name, _ in model.named_parameters()] to see the names.",
            )
        found |= dict.fromkeys(hits)
    return found


def _split_mask(parameters: dict[str, nn.Parameter], mask: Tensor) -> Iterable[tuple[str, Tensor | None]]:
    total = sum(p.numel() for p in parameters.values())
    if mask.dtype is not torch.bool or mask.shape != (total,):
        raise SelectionError(
            "A flat mask covers all parameter entries.",
            expected=f"bool of shape ({total},)",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            fix="Build it in model.parameters() order, or pass a mapping from names to masks.",
        )
    pieces = mask.split([p.numel() for p in parameters.values()])
    return _reduced((name, piece) for name, piece in zip(parameters, pieces, strict=True))


def _check_masks(
    parameters: dict[str, nn.Parameter], masks: Mapping[str, Tensor]
) -> Iterable[tuple[str, Tensor | None]]:
    for name, mask in masks.items():
        if name not in parameters:
            raise SelectionError(f"The mask names {name!r}, which the network does not have.", got=repr(name))
        if mask.dtype is not torch.bool or mask.shape != parameters[name].shape:
            raise SelectionError(
                f"The mask of {name!r} does not fit.",
                expected=f"bool of shape {tuple(parameters[name].shape)}",
                got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            )
    return _reduced((name, masks[name].flatten()) for name in parameters if name in masks)


def _reduced(masks: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor | None]]:
    """Drop empty masks and forget full ones."""
    for name, mask in masks:
        if mask.any():
            yield name, None if mask.all() else mask.detach().clone()
