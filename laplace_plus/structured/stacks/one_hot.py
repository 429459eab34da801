"""Stacks of matrices with few columns that are not zero: the gradients of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.stacks.base import DenseStack, Stack
from laplace_plus.structured.stacks.sizes import chunk_bytes, require_room, slices

_COMPACT = 16
"""How many times the caches the compact form of a chunk takes."""


@dataclass
class OneHotStack(Stack):
    """Matrices whose right sides are unit vectors, as an embedding's are: column ``index_ns`` receives ``left_vns``.

    Attributes:
        index: ``[B, S]`` integers below ``n_columns``.
        left: ``[V, B, S, o]``.
        n_columns: i, the number of columns.
    """

    index: Tensor
    left: Tensor
    n_columns: int
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.left.dtype, torch.float32)
        self.device = self.left.device
        self.shape = (1, self.left.shape[-1], self.n_columns)

    def compact(self, examples: slice) -> tuple[Tensor, Tensor]:
        """The matrices ``[V, b, 1, o, u]`` over the u columns that occur in these examples, and those columns."""
        columns, position = torch.unique(self.index[examples], return_inverse=True)
        left = self.left[:, examples].to(self.dtype)  # [V, b, S, o]
        values = left.new_zeros(*left.shape[:2], left.shape[3], len(columns))
        target = position[None, :, None, :].expand(left.shape[0], -1, left.shape[3], -1)
        return values.scatter_add(3, target, left.transpose(2, 3))[:, :, None], columns

    def compact_chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the examples with their :meth:`compact` form, of bounded size."""
        item = torch.finfo(self.dtype).bits // 8
        positions = self.index.shape[1]
        # u grows with the number of examples in a chunk, hence the square root.
        each = self.n_directions * self.shape[1] * positions * item
        step = max(1, int((chunk_bytes(self.device, of_caches=_COMPACT) / max(1, each)) ** 0.5))
        for start in range(0, self.n_examples, step):
            examples = slice(start, start + step)
            yield examples, *self.compact(examples)

    @override
    def dense(self, examples: slice) -> Tensor:
        compact, columns = self.compact(examples)
        values = compact.new_zeros(*compact.shape[:-1], self.n_columns)
        return values.index_copy(-1, columns, compact)

    @override
    def select(self, directions: Tensor) -> OneHotStack:
        return OneHotStack(self.index, self.left[directions], self.n_columns, self.compute_dtype)

    @override
    def in_dtype(self, dtype: torch.dtype) -> OneHotStack:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        parts = [DenseStack(values).project(matrices[..., columns]) for _, values, columns in self.compact_chunks()]
        return torch.cat(parts, 1)

    @override
    def add_squares_(self, total: Tensor) -> None:
        for examples in self._merged_chunks():
            values = self.merged(examples).square().sum(0)  # [b, S, o]
            total[0].index_add_(1, self.index[examples].flatten(), values.flatten(0, 1).T.to(total.dtype))

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if mode == "joint":
            values, columns = self.compact(slice(None))
            return DenseStack(values).quadratic(weights[:, :, columns], "joint")
        parts = []
        by_column = weights[0].T  # [i, o]
        for examples in self._merged_chunks():
            flat = self.merged(examples).flatten(2).transpose(0, 1)  # [b, V, S·o]
            own = by_column[self.index[examples]].flatten(1)  # [b, S·o]
            if mode == "diagonal":
                parts.append(torch.bmm(flat.square(), own[:, :, None])[..., 0])
            else:
                parts.append((flat * own[:, None]) @ flat.mT)
        return torch.cat(parts)

    def merged(self, examples: slice) -> Tensor:
        """Left sides ``[V, b, S, o]``, those of one column added up at the first of its positions, zero elsewhere."""
        index = self.index[examples]
        left = self.left[:, examples].to(self.dtype)
        first = (index[:, :, None] == index[:, None]).to(torch.uint8).argmax(-1)  # [b, S]
        target = first[None, :, :, None].expand_as(left)
        return torch.zeros_like(left).scatter_add(2, target, left)

    def _merged_chunks(self) -> Iterator[slice]:
        positions, item = self.index.shape[1], torch.finfo(self.dtype).bits // 8
        each = positions * (self.n_directions * self.shape[1] * item + positions)
        require_room(each, "the output gradients of one example at an embedding", self.device)
        return slices(self.n_examples, each, chunk_bytes(self.device, of_caches=_COMPACT))
