"""The state of a training run between two epochs: taken, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus.errors import CheckpointError


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
            what = "The checkpoint was written with other generators of random numbers."
            expected = f"{len(states)} of torch, the loaders and the caller together, on the same kind of device"
            fix = "Pass the same loaders and the same generator as before."
            raise CheckpointError(what, expected=expected, got=f"{len(self._all)}", fix=fix)
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
