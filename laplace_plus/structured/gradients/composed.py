"""Stacks made of other stacks: parts of them, several side by side, and mapped ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.gradients.base import ExampleGradients


@dataclass
class SelectedGradients(ExampleGradients):
    """Some entries of another stack's matrices, as ``[1, 1, n]`` matrices.

    Attributes:
        whole: The stack with all entries.
        positions: ``[n]`` positions in the flattened ``[G, o, i]`` array.
    """

    whole: ExampleGradients
    positions: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.whole.n_cotangents, self.whole.n_examples
        self.dtype, self.device = self.whole.dtype, self.whole.device
        self.shape = (1, 1, len(self.positions))

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.whole.entries(examples, self.positions)[:, :, None, None]

    @override
    def select(self, directions: Tensor) -> SelectedGradients:
        return SelectedGradients(self.whole.select(directions), self.positions)

    @override
    def in_dtype(self, dtype: torch.dtype) -> SelectedGradients:
        return SelectedGradients(self.whole.in_dtype(dtype), self.positions)


@dataclass
class JoinedGradients(ExampleGradients):
    """Several stacks side by side, as ``[1, 1, n]`` matrices.

    Attributes:
        parts: Pairs of a stack and the ``[G, o, i]`` positions that its entries take among the n.
        size: n.
    """

    parts: list[tuple[ExampleGradients, Tensor]]
    size: int

    def __post_init__(self) -> None:
        first = self.parts[0][0]
        self.n_cotangents, self.n_examples, self.device = first.n_cotangents, first.n_examples, first.device
        self.dtype = first.dtype
        for stack, _ in self.parts:
            self.dtype = torch.promote_types(self.dtype, stack.dtype)
        self.shape = (1, 1, self.size)

    @override
    def dense(self, examples: slice) -> Tensor:
        result: Tensor | None = None
        for stack, positions in self.parts:
            values = stack.dense(examples)
            if result is None:
                result = torch.zeros(*values.shape[:2], self.size, dtype=self.dtype, device=self.device)
            result[..., positions.flatten().to(self.device)] = values.flatten(2).to(self.dtype)
        assert result is not None
        return result[:, :, None, None]

    @override
    def select(self, directions: Tensor) -> JoinedGradients:
        return JoinedGradients([(stack.select(directions), positions) for stack, positions in self.parts], self.size)

    @override
    def in_dtype(self, dtype: torch.dtype) -> JoinedGradients:
        return JoinedGradients([(stack.in_dtype(dtype), positions) for stack, positions in self.parts], self.size)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        parts = [stack.project(own).to(self.dtype) for stack, own in self._share(matrices)]
        return sum(parts[1:], parts[0])

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        parts = [
            stack.quadratic(own[0].to(stack.dtype), mode).to(self.dtype) for stack, own in self._share(weights[None])
        ]
        return sum(parts[1:], parts[0])

    def _share(self, values: Tensor) -> Iterator[tuple[ExampleGradients, Tensor]]:
        """Each part with its own entries of ``[r, 1, 1, n]`` values."""
        flat = values.flatten(1)
        for stack, positions in self.parts:
            yield stack, flat[:, positions.flatten().to(flat.device)].unflatten(1, stack.shape)


@dataclass
class MappedGradients(ExampleGradients):
    """A stack whose matrices pass through a linear map as they are written out.

    Attributes:
        source: The stack.
        matrix: ``[G, n, n]``, applied to flattened ``[o·i]`` matrices from the right.
    """

    source: ExampleGradients
    matrix: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples, self.shape = (
            self.source.n_cotangents,
            self.source.n_examples,
            self.source.shape,
        )
        self.dtype, self.device = self.source.dtype, self.source.device

    @override
    def dense(self, examples: slice) -> Tensor:
        values = self.source.dense(examples).flatten(3)  # [V, b, G, n]
        v, b, groups, n = values.shape
        rows = values.movedim(2, 0).reshape(groups, v * b, n)
        mapped = torch.bmm(rows, self.matrix.to(values.dtype)).view(groups, v, b, n)
        return mapped.movedim(0, 2).unflatten(3, self.shape[1:])

    @override
    def select(self, directions: Tensor) -> MappedGradients:
        return MappedGradients(self.source.select(directions), self.matrix)

    @override
    def in_dtype(self, dtype: torch.dtype) -> MappedGradients:
        return MappedGradients(self.source.in_dtype(dtype), self.matrix)
