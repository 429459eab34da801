"""What a run of training consists of between two epochs: taken, put back, and brought into a form without pickling.

State dictionaries of optimisers and schedulers are trees of numbers, texts and tensors. :func:`pack` turns such a tree
into one that JSON can hold, and named tensors; whatever it finds besides is refused by name.
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
"""The key that marks, among dictionaries, those that stand for something else."""


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A tree as JSON can hold it; its tensors go to ``tensors``, under names that begin with ``name``.

    Args:
        tree: Nested dictionaries (with keys of any such kind), counters, lists and tuples of numbers, texts, ``None``
            and tensors.
        tensors: Is added to.
        name: Of the tree.

    Raises:
        CheckpointError: Something else is in it.
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
    """What :func:`pack` was given."""
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


# -- the network ------------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, persistent or not."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


def put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a network the values that :func:`weights_of` copied, in the tensors that it has."""
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(weights[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# -- randomness -------------------------------------------------------------------------------------------------------


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a ``DataLoader`` and its samplers hold, or any loader in an attribute ``generator``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(held): held for held in (getattr(holder, "generator", None) for holder in holders)}
    return [held for held in found.values() if isinstance(held, torch.Generator)]


def random_state(generators: list[torch.Generator], device: torch.device) -> list[Tensor]:
    """The states of torch's global generators (of the CPU, and of the device) and of others."""
    states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def seeded(generators: list[torch.Generator], device: torch.device) -> Iterator[None]:
    """The CPU's global generator and others start from one and the same seed within, and go on after as before."""
    states = random_state(generators, device)
    try:
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(0)
        yield
    finally:
        set_random_state(states, generators, device)


def set_random_state(states: list[Tensor], generators: list[torch.Generator], device: torch.device) -> None:
    """Put back what :func:`random_state` returned.

    Raises:
        CheckpointError: There are more generators now, or fewer.
    """
    if len(states) != 1 + len(generators) + (device.type == "cuda"):
        raise CheckpointError(
            "The checkpoint was written with other generators of random numbers.",
            expected=f"{len(states)} of torch, the loaders and the caller together, on the same kind of device",
            got=f"{1 + len(generators) + (device.type == 'cuda')}",
            fix="Pass the same loaders and the same generator as before.",
        )
    torch.set_rng_state(states[0].cpu())
    for generator, state in zip(generators, states[1:], strict=False):
        generator.set_state(state.cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[-1].cpu(), device)
