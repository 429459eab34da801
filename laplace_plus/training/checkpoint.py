"""The state of a training run between two epochs: taken, put back, and written without pickling.

State dictionaries of optimizers and schedulers are trees of numbers, texts and tensors. :func:`pack` turns such a tree
into JSON and named tensors; anything else is refused by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus.errors import CheckpointError

TAG = "kind of entry"
"""The key of dictionaries that stand for something that JSON does not have."""


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A tree as JSON; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises CheckpointError for anything but numbers, texts, ``None``, tensors, and lists and mappings of them.
    """
    if isinstance(tree, Tensor):
        unique = f"{name}#{len(tensors)}" if name in tensors else name
        tensors[unique] = tree
        return {TAG: "tensor", "name": unique}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {TAG: "float", "value": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, (list, tuple)):
        values = [pack(value, tensors, f"{name}.{number}") for number, value in enumerate(tree)]
        return values if isinstance(tree, list) else {TAG: "tuple", "values": values}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and key != TAG for key in tree) and not isinstance(tree, Counter):
            return {key: pack(value, tensors, f"{name}.{key}") for key, value in tree.items()}
        items = [
            [pack(key, tensors, f"{name}.key"), pack(value, tensors, f"{name}.{key}")] for key, value in tree.items()
        ]
        return {TAG: "counter" if isinstance(tree, Counter) else "items", "items": items}
    raise CheckpointError(
        f"{name} cannot be stored.",
        expected="numbers, texts, tensors, and lists and dictionaries of them",
        got=f"a {type(tree).__name__}",
        fix="Train without checkpoint=, or with an optimizer and a scheduler whose state_dict() holds only these.",
    )


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(tree, list):
        return [unpack(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: unpack(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind == "float":
        return float(tree["value"])
    if kind == "tuple":
        return tuple(unpack(value, tensors) for value in tree["values"])
    items = {unpack(key, tensors): unpack(value, tensors) for key, value in tree["items"]}
    return Counter(items) if kind == "counter" else items


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, persistent or not."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


def put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the values that :func:`weights_of` copied into the network's own tensors."""
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(weights[name])


class Generators:
    """The generators of random numbers that a run depends on.

    They are torch's global ones (of the CPU, and of the device), the caller's, and those that a ``DataLoader`` and its
    samplers hold, or any loader in an attribute ``generator``.
    """

    def __init__(self, device: torch.device, loaders: list[Any], generator: torch.Generator | None):
        holders: list[Any] = []
        for loader in loaders:
            batch_sampler = getattr(loader, "batch_sampler", None)
            holders += [
                loader,
                getattr(loader, "sampler", None),
                batch_sampler,
                getattr(batch_sampler, "sampler", None),
            ]
        held = [torch.default_generator, *(getattr(holder, "generator", None) for holder in holders), generator]
        if device.type == "cuda":
            torch.cuda.init()
            held.append(torch.cuda.default_generators[device.index])
        self._all = list({id(own): own for own in held if isinstance(own, torch.Generator)}.values())

    def state(self) -> list[Tensor]:
        """All states: the CPU's, the loaders' and the caller's, the device's."""
        return [generator.get_state() for generator in self._all]

    def restore(self, states: list[Tensor]) -> None:
        """Put back what :meth:`state` returned; CheckpointError if then there was another number of generators."""
        if len(states) != len(self._all):
            raise CheckpointError(
                "The checkpoint was written with other generators of random numbers.",
                expected=f"{len(states)} of torch, the loaders and the caller together, on the same kind of device",
                got=f"{len(self._all)}",
                fix="Pass the same loaders and the same generator as before.",
            )
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state.cpu())

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Start all from one seed within, and put them back after."""
        states = self.state()
        try:
            for generator in self._all:
                generator.manual_seed(0)
            yield
        finally:
            self.restore(states)
