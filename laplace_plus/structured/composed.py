"""Gradients made of other gradients: some of their entries, several side by side, and linear maps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.gradients import ExampleGradients
from laplace_plus.structured.layout import Places


@dataclass
class DerivedGradients(ExampleGradients):
    """Gradients that follow from others, their ``source``, example by example."""

    source: ExampleGradients

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.source.n_cotangents, self.source.n_examples
        self.shape, self.dtype, self.device = self.source.shape, self.source.dtype, self.source.device

    @override
    def select(self, cotangents: Tensor) -> ExampleGradients:
        return replace(self, source=self.source.select(cotangents))

    @override
    def in_dtype(self, dtype: torch.dtype) -> ExampleGradients:
        return replace(self, source=self.source.in_dtype(dtype))


@dataclass
class SelectedGradients(DerivedGradients):
    """Some entries of other gradients, as ``[1, 1, n]`` matrices.

    Attributes:
        positions: ``[n]`` positions in the flattened ``[G, o, i]`` array.
    """

    positions: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape = (1, 1, len(self.positions))

    @override
    def bytes_each(self) -> int:
        return self.source.bytes_each()  # which is written out

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.source.dense(examples).flatten(2)[:, :, None, None, self.positions]


@dataclass
class SummedGradients(DerivedGradients):
    """The sums of other gradients over all their examples, as those of one example."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_examples = 1

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.source.total().unsqueeze(1)


@dataclass
class JoinedGradients(ExampleGradients):
    """The gradients of several layers side by side, as one matrix for each example.

    Attributes:
        layers: Pairs of gradients and the places that their ``[G, o, i]`` entries take among the n.
        size: n.
        matrix_shape: The shape ``[G, o, i]`` of the joint matrices, by default ``[1, 1, n]``.
    """

    layers: list[tuple[ExampleGradients, Places]]
    size: int
    matrix_shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        first = self.layers[0][0]
        self.n_cotangents, self.n_examples, self.device = first.n_cotangents, first.n_examples, first.device
        self.dtype = reduce(torch.promote_types, [layer.dtype for layer, _ in self.layers])
        self.shape = self.matrix_shape or (1, 1, self.size)

    @override
    def dense(self, examples: slice) -> Tensor:
        start, stop, _ = examples.indices(self.n_examples)
        result = torch.zeros(self.n_cotangents, stop - start, self.size, dtype=self.dtype, device=self.device)
        for layer, places in self.layers:  # one layer at a time beside the result
            places.scatter_(result, layer.dense(examples))
        return result.unflatten(2, self.shape)

    @override
    def select(self, cotangents: Tensor) -> JoinedGradients:
        return replace(self, layers=[(layer.select(cotangents), places) for layer, places in self.layers])

    @override
    def in_dtype(self, dtype: torch.dtype) -> JoinedGradients:
        return replace(self, layers=[(layer.in_dtype(dtype), places) for layer, places in self.layers])

    @override
    def project(self, matrices: Tensor) -> Tensor:
        return self._total(matrices, lambda layer, own: layer.project(own))

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        return self._total(weights[None], lambda layer, own: layer.quadratic(own[0].to(layer.dtype), mode))

    def _total(self, values: Tensor, function: Callable[[ExampleGradients, Tensor], Tensor]) -> Tensor:
        """The sum of a function of each layer and its own entries of ``[r, G, o, i]`` values."""
        results = []
        for layer, places in self.layers:
            own = places.gather(values.flatten(1))
            results.append(function(layer, own).to(self.dtype))
        return sum(results[1:], results[0])


@dataclass
class MappedGradients(DerivedGradients):
    """Gradients whose matrices pass through a linear map as they are written out.

    Attributes:
        function: The map of flattened ``[o·i]`` matrices, ``[..., G, n] -> [..., G, n]``.
    """

    function: Callable[[Tensor], Tensor]

    @override
    def dense(self, examples: slice) -> Tensor:
        values = self.source.dense(examples).flatten(3)
        return self.function(values).unflatten(-1, self.shape[1:])
