"""Gradients with a one-hot side: those of embeddings, and those of a linear output layer's own outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.chunks import chunk_bytes, require_room, slices
from laplace_plus.structured.gradients.base import DenseGradients, ExampleGradients
from laplace_plus.structured.gradients.outer import OuterGradients

_COMPACT = 16
"""How many times the caches the compact form of a chunk takes."""


@dataclass
class EmbeddingGradients(ExampleGradients):
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
        self.n_cotangents, self.n_examples = self.left.shape[:2]
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
        each = self.n_cotangents * self.shape[1] * positions * item
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
    def select(self, directions: Tensor) -> EmbeddingGradients:
        return EmbeddingGradients(self.index, self.left[directions], self.n_columns, self.compute_dtype)

    @override
    def in_dtype(self, dtype: torch.dtype) -> EmbeddingGradients:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        parts = [DenseGradients(values).project(matrices[..., columns]) for _, values, columns in self.compact_chunks()]
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
            return DenseGradients(values).quadratic(weights[:, :, columns], "joint")
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
        each = positions * (self.n_cotangents * self.shape[1] * item + positions)
        require_room(each, "the output gradients of one example at an embedding", self.device)
        return slices(self.n_examples, each, chunk_bytes(self.device, of_caches=_COMPACT))


@dataclass
class OutputLayerGradients(ExampleGradients):
    """Matrices ``e_c φ_nᵀ`` of shape ``[1, C, i]``, one for each chosen output c and example n.

    Attributes:
        features: ``φ [B, i]``.
        outputs: Chosen outputs ``[V]``, or ``[B, V]`` where each example has its own.
        n_outputs: C.
    """

    features: Tensor
    outputs: Tensor
    n_outputs: int

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.outputs.shape[-1], self.features.shape[0]
        self.shape = (1, self.n_outputs, self.features.shape[1])
        self.dtype, self.device = self.features.dtype, self.features.device

    @classmethod
    def of(cls, stack: OuterGradients) -> OutputLayerGradients | None:
        """The same stack, where its left sides are unit vectors that all examples share; None for any other stack."""
        if stack.n_positions != 1 or stack.shape[0] != 1 or not (stack.is_shared or stack.n_examples == 1):
            return None
        left = stack.expand_left(stack.raw_left[:, :1]).flatten(1)  # [V, C]
        outputs = left.argmax(-1)
        if not bool(((left != 0).sum(-1) == 1).all() and (left.gather(1, outputs[:, None]) == 1).all()):
            return None
        return cls(stack.right(slice(0, stack.n_examples))[:, 0, 0], outputs, left.shape[1])

    @property
    def is_shared(self) -> bool:
        """Whether the examples share their outputs."""
        return self.outputs.ndim == 1

    @override
    def dense(self, examples: slice) -> Tensor:
        features = self.features[examples]
        values = features.new_zeros(self.n_cotangents, len(features), 1, *self.shape[1:])
        chosen = self.outputs if self.is_shared else self.outputs[examples]
        index = chosen.expand(len(features), -1).T  # [V, b]
        direction, example = torch.arange(self.n_cotangents)[:, None], torch.arange(len(features))
        values[direction, example, 0, index] = features
        return values

    @override
    def select(self, directions: Tensor) -> OutputLayerGradients:
        return replace(self, outputs=self.outputs[..., directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> OutputLayerGradients:
        return replace(self, features=self.features.to(dtype))

    def rotated(self, left: Tensor | None, right: Tensor) -> OutputLayerGradients | OuterGradients:
        """``Lᵀ P N`` for a left side L ``[C, C]`` (None for the identity) and a right side N ``[i, i]``."""
        features = self.features @ right
        if left is None:
            return replace(self, features=features)
        rows = left[self.outputs]  # [V, C] or [B, V, C]
        rows = rows[:, None].expand(-1, self.n_examples, -1) if self.is_shared else rows.transpose(0, 1)
        return OuterGradients(features[:, None, None], rows[:, :, None, None])

    def mapped(self, matrix: Tensor, examples: slice = slice(None)) -> Tensor:
        """The flattened matrices times ``[C·i, m]``, ``[V, b, m]``."""
        blocks = matrix.unflatten(0, self.shape[1:])
        if self.is_shared:
            return torch.einsum("bi,vim->vbm", self.features[examples], blocks[self.outputs])
        return torch.einsum("bi,bvim->vbm", self.features[examples], blocks[self.outputs[examples]])

    @override
    def project(self, matrices: Tensor) -> Tensor:
        flat = matrices[:, 0].to(self.dtype).permute(1, 2, 0).flatten(0, 1)  # [C·i, r]
        return self.mapped(flat)

    @override
    def squares(self) -> Tensor:
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        squares = self.features.square()
        if self.is_shared:
            total[0].index_add_(0, self.outputs, squares.sum(0).expand(self.n_cotangents, -1))
        else:
            total[0].index_add_(0, self.outputs.flatten(), squares.repeat_interleave(self.n_cotangents, 0))
        return total

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        weights = weights[0]
        if mode == "joint":
            return self._joint_quadratic(weights)
        if self.is_shared:
            every = self.n_cotangents == self.n_outputs and bool((self.outputs[1:] > self.outputs[:-1]).all())
            values = self.features.square() @ (weights if every else weights[self.outputs]).T  # [B, V]
        else:
            values = torch.einsum("bi,bvi->bv", self.features.square(), weights[self.outputs])
        if mode == "diagonal":
            return values
        same = self.outputs[..., :, None] == self.outputs[..., None, :]
        return values[:, :, None] * same

    def _joint_quadratic(self, weights: Tensor) -> Tensor:
        n, v = self.n_examples, self.n_cotangents
        chosen = self.outputs.expand(n, v)
        result = weights.new_zeros(n, v, n, v)
        for example in range(n):
            # ⟨e_c φ_b, e_c' φ_b'⟩ is zero unless c = c'.
            weighted = self.features[example] * weights[chosen[example]]  # [V, i]
            same = chosen[example][:, None, None] == chosen  # [V, B, V]
            result[example] = (weighted @ self.features.T)[:, :, None] * same
        return result
