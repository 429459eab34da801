"""What the tests know about a network, and data for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace_plus as lp


@dataclass(frozen=True)
class Architecture:
    """A network, and data that it takes.

    Attributes:
        name: Its name among the tests.
        build: Makes the module.
        inputs: Makes the inputs of n examples.
        n_outputs: C.
        positions: Trailing shape of the targets (tokens, pixels).
        likelihood: The likelihood.
        last_layer: The parameters that ``"last_layer"`` must find.
        general: The parameters that may take the general path; every other one must follow a rule.
        as_mapping: Whether the target is yielded inside a mapping, as Hugging Face data sets do.
        flat: Whether the loader yields ``(x1, x2, y)``.
        tolerance: Relative error that the network's own rounding makes inevitable.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    n_outputs: int
    last_layer: tuple[str, ...]
    general: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    likelihood: Any = "classification"
    as_mapping: bool = False
    flat: bool = False
    tolerance: float = 1e-9

    def model(self) -> nn.Module:
        """A module in float64 with weights that leave nothing at a special value such as zero."""
        torch.manual_seed(0)
        model = self.build().double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += noise * (0.3 if parameter.ndim < 2 else max(1, parameter[0].numel()) ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer += 0.2 * torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
                elif name.endswith("running_var"):
                    buffer *= 0.5 + torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
        return model.eval()

    def data(self, n: int) -> tuple[Any, Tensor]:
        """Inputs and targets of n examples."""
        torch.manual_seed(2)
        inputs = self.inputs(n)
        if isinstance(self.likelihood, lp.Gaussian):
            return inputs, torch.randn(n, *self.positions, self.n_outputs, dtype=torch.float64)
        return inputs, torch.randint(0, self.n_outputs, (n, *self.positions))

    def loader(self, n: int, first: int) -> list[Any]:
        """Two batches, the first with ``first`` of the n examples."""
        inputs, target = self.data(n)
        parts = [(take(inputs, slice(0, first)), target[:first]), (take(inputs, slice(first, n)), target[first:])]
        if self.as_mapping:
            return [{**x, "labels": y} for x, y in parts]
        return [(*x, y) for x, y in parts] if self.flat else parts


def take(inputs: Any, examples: slice) -> Any:
    """Some of the examples of a batch."""
    if isinstance(inputs, Tensor):
        return inputs[examples]
    if isinstance(inputs, dict):
        return {key: take(value, examples) for key, value in inputs.items()}
    return tuple(take(value, examples) for value in inputs)


def imported(name: str) -> Any:
    """A module of a library that takes seconds to import: only tests that run its networks wait for it."""
    return pytest.importorskip(name)


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def tokens(length: int, vocabulary: int = 11) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(1, vocabulary, (n, length))


def padded(length: int) -> Callable[[int], dict[str, Tensor]]:
    """Token sequences of different lengths with their attention masks, padded on the right."""

    def make(n: int) -> dict[str, Tensor]:
        lengths = torch.randint(2, length + 1, (n, 1))
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": torch.randint(1, 11, (n, length)) * mask, "attention_mask": mask}

    return make


def pair(left: Callable[[int], Any], right: Callable[[int], Any]) -> Callable[[int], tuple[Any, Any]]:
    return lambda n: (left(n), right(n))


def mapping(make: Callable[[int], Tensor], name: str) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {name: make(n)}


def named(**make: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {name: one(n) for name, one in make.items()}


def weights(layer: str) -> tuple[str, ...]:
    return (f"{layer}.weight", f"{layer}.bias")
