"""Gradients made of other gradients: some of their entries, several side by side, and linear maps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.gradients.base import ExampleGradients


@dataclass
class SelectedGradients(ExampleGradients):
    """Some entries of other gradients, as ``[1, 1, n]`` matrices.

    Attributes:
        source: The gradients with all entries.
        positions: ``[n]`` positions in the flattened ``[G, o, i]`` array.
    """

    source: ExampleGradients
    positions: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.source.n_cotangents, self.source.n_examples
        self.dtype, self.device = self.source.dtype, self.source.device
        self.shape = (1, 1, len(self.positions))

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.source.entries(examples, self.positions)[:, :, None, None]

    @override
    def select(self, cotangents: Tensor) -> SelectedGradients:
        return replace(self, source=self.source.select(cotangents))

    @override
    def in_dtype(self, dtype: torch.dtype) -> SelectedGradients:
        return replace(self, source=self.source.in_dtype(dtype))


@dataclass
class JoinedGradients(ExampleGradients):
    """The gradients of several layers side by side, as one matrix for each example.

    Attributes:
        layers: Pairs of gradients and the ``[G, o, i]`` positions that their entries take among the n.
        size: n.
        matrix_shape: The shape ``[G, o, i]`` of the joint matrices, by default ``[1, 1, n]``.
    """

    layers: list[tuple[ExampleGradients, Tensor]]
    size: int
    matrix_shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        first = self.layers[0][0]
        self.n_cotangents, self.n_examples, self.device = first.n_cotangents, first.n_examples, first.device
        self.dtype = first.dtype
        for gradients, _ in self.layers:
            self.dtype = torch.promote_types(self.dtype, gradients.dtype)
        self.shape = self.matrix_shape or (1, 1, self.size)

    @override
    def dense(self, examples: slice) -> Tensor:
        result: Tensor | None = None
        for gradients, positions in self.layers:
            values = gradients.dense(examples)
            if result is None:
                result = torch.zeros(*values.shape[:2], self.size, dtype=self.dtype, device=self.device)
            result[..., positions.flatten().to(self.device)] = values.flatten(2).to(self.dtype)
        assert result is not None
        return result.unflatten(2, self.shape)

    @override
    def select(self, cotangents: Tensor) -> JoinedGradients:
        return replace(self, layers=[(layer.select(cotangents), positions) for layer, positions in self.layers])

    @override
    def in_dtype(self, dtype: torch.dtype) -> JoinedGradients:
        return replace(self, layers=[(layer.in_dtype(dtype), positions) for layer, positions in self.layers])

    @override
    def project(self, matrices: Tensor) -> Tensor:
        results = [layer.project(own).to(self.dtype) for layer, own in self._by_layer(matrices)]
        return sum(results[1:], results[0])

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        results = [
            layer.quadratic(own[0].to(layer.dtype), mode).to(self.dtype) for layer, own in self._by_layer(weights[None])
        ]
        return sum(results[1:], results[0])

    def _by_layer(self, values: Tensor) -> Iterator[tuple[ExampleGradients, Tensor]]:
        """Each layer with its own entries of ``[r, G, o, i]`` values."""
        flat = values.flatten(1)
        for gradients, positions in self.layers:
            yield gradients, flat[:, positions.flatten().to(flat.device)].unflatten(1, gradients.shape)


@dataclass
class MappedGradients(ExampleGradients):
    """Gradients whose matrices pass through a linear map as they are written out.

    Attributes:
        source: The gradients.
        matrix: ``[G, n, n]``, applied to flattened ``[o·i]`` matrices from the right.
    """

    source: ExampleGradients
    matrix: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.source.n_cotangents, self.source.n_examples
        self.shape, self.dtype, self.device = self.source.shape, self.source.dtype, self.source.device

    @override
    def dense(self, examples: slice) -> Tensor:
        values = self.source.dense(examples).flatten(3)  # [V, b, G, n]
        v, b, groups, n = values.shape
        rows = values.movedim(2, 0).reshape(groups, v * b, n)
        mapped = torch.bmm(rows, self.matrix.to(values.dtype)).view(groups, v, b, n)
        return mapped.movedim(0, 2).unflatten(3, self.shape[1:])

    @override
    def select(self, cotangents: Tensor) -> MappedGradients:
        return replace(self, source=self.source.select(cotangents))

    @override
    def in_dtype(self, dtype: torch.dtype) -> MappedGradients:
        return replace(self, source=self.source.in_dtype(dtype))
