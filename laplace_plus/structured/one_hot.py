"""Gradients with a one-hot side: those of embeddings, and those of a linear output layer's own outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.gradients import MIB, DenseGradients, ExampleGradients, OuterGradients, slices
from laplace_plus.structured.gram_sum import formed

_COMPACT = 16 * MIB
"""Bytes of a chunk of an embedding's gradients."""


@dataclass
class EmbeddingGradients(ExampleGradients):
    """Matrices ``[1, o, i]`` whose right sides are unit vectors: column ``index_ns`` receives ``left_vns``.

    Attributes:
        index: ``[B, S]`` integers below ``n_columns``.
        left: ``[V, B, S, o]``.
        n_columns: i, the size of the vocabulary.
        compute_dtype: The type in which sums are taken, at least float32.
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
        self.n_positions = self.left.shape[2]
        # As of OuterGradients.
        self.raw_left, self.expand_left = self.left[:, :, :, None], torch.positive

    def compact(self, examples: slice) -> tuple[Tensor, Tensor]:
        """The matrices ``[V, b, 1, o, u]`` over the u columns that occur in these examples, and those columns."""
        columns, position = torch.unique(self.index[examples], return_inverse=True)
        left = self.left[:, examples].to(self.dtype)  # [V, b, S, o]
        values = left.new_zeros(*left.shape[:2], left.shape[3], len(columns))
        target = position[None, :, None, :].expand(left.shape[0], -1, left.shape[3], -1)
        return values.scatter_add(3, target, left.transpose(2, 3))[:, :, None], columns

    @override
    def dense(self, examples: slice) -> Tensor:
        compact, columns = self.compact(examples)
        values = compact.new_zeros(*compact.shape[:-1], self.n_columns)
        return values.index_copy(-1, columns, compact)

    @override
    def total(self) -> Tensor:
        index, left = self.index.reshape(1, -1), self.left.flatten(1, 2).unsqueeze(1)
        return replace(self, index=index, left=left).dense(slice(0, 1)).squeeze(1)  # as positions of one example

    @override
    def select(self, cotangents: Tensor) -> EmbeddingGradients:
        return replace(self, left=self.left[cotangents])

    @override
    def in_dtype(self, dtype: torch.dtype) -> EmbeddingGradients:
        return replace(self, compute_dtype=dtype)

    @override
    def in_basis(self, left: Any, right: Any) -> ExampleGradients:
        if left is None or right is not None:
            return super().in_basis(left, right)
        return replace(self, left=self.left.to(self.dtype) @ left.to(self.dtype)[0])

    @override
    def project(self, matrices: Tensor) -> Tensor:
        by_column = matrices[:, 0].permute(2, 1, 0)  # [i, o, r]
        results = []
        for examples in self._chunks(len(matrices)):
            rows = by_column[self.index[examples]].to(self.dtype).flatten(1, 2)  # [b, S·o, r]
            results.append(self.left[:, examples].to(self.dtype).transpose(0, 1).flatten(2) @ rows)
        return torch.cat(results).transpose(0, 1)

    @override
    def add_squares_(self, total: Tensor) -> None:
        for examples in self._chunks():
            values = self._merged(examples).square().sum(0)  # [b, S, o]
            total[0].index_add_(1, self.index[examples].flatten(), values.flatten(0, 1).T.to(total.dtype))

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if mode == "joint":
            values, columns = self.compact(slice(None))
            return DenseGradients(values).quadratic(weights[:, :, columns], "joint")
        results = []
        by_column = weights[0].T  # [i, o]
        for examples in self._chunks():
            flat = self._merged(examples).flatten(2).transpose(0, 1)  # [b, V, S·o]
            own = by_column[self.index[examples]].flatten(1)  # [b, S·o]
            if mode == "diagonal":
                results.append(torch.bmm(flat.square(), own[:, :, None])[..., 0])
            else:
                results.append((flat * own[:, None]) @ flat.mT)
        return torch.cat(results)

    def _merged(self, examples: slice) -> Tensor:
        """Left sides ``[V, b, S, o]``, those of one column added up at the first of its positions, zero elsewhere."""
        index, left = self.index[examples], self.left[:, examples].to(self.dtype)
        first = (index[:, :, None] == index[:, None]).to(torch.uint8).argmax(-1)  # [b, S]
        target = first[None, :, :, None].expand_as(left)
        return torch.zeros_like(left).scatter_add(2, target, left)

    def _chunks(self, count: int = 0) -> Iterator[slice]:
        """Slices of the examples with so many vectors besides their left sides."""
        positions = self.index.shape[1]
        each = positions * ((self.n_cotangents + count) * self.shape[1] * self.dtype.itemsize + positions)
        return slices(self.n_examples, each, _COMPACT, self.device)


@dataclass
class OutputLayerGradients(ExampleGradients):
    """Matrices ``(e_c − w_n) φ_nᵀ [1, C, i]``: the gradient of a linear output layer's output c for example n.

    Attributes:
        features: The layer's inputs ``φ [B, i]``.
        outputs: Chosen outputs ``[V]``, or ``[B, V]`` where each example has its own.
        n_outputs: C.
        centre: Weights ``w [B, C]`` of the mean that is taken from all outputs, which sum to one; None for zero.
        left: A basis L ``[C, C]`` of centred gradients ``Lᵀ P``; None for the identity.
    """

    features: Tensor
    outputs: Tensor
    n_outputs: int
    centre: Tensor | None = None
    left: Tensor | None = None

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.outputs.shape[-1], self.features.shape[0]
        self.shape = (1, self.n_outputs, self.features.shape[1])
        self.dtype, self.device = self.features.dtype, self.features.device

    @property
    def is_shared(self) -> bool:
        """Whether the examples share their outputs."""
        return self.outputs.ndim == 1

    @override
    def dense(self, examples: slice) -> Tensor:
        features = self.features[examples]
        chosen = self.outputs if self.is_shared else self.outputs[examples]
        unit = torch.nn.functional.one_hot(chosen.expand(len(features), -1), self.n_outputs).to(self.dtype)
        unit = unit if self.centre is None else unit - self.centre[examples, None]
        unit = unit if self.left is None else unit @ self.left
        return torch.einsum("bvc,bi->vbci", unit, features)[:, :, None]

    @override
    def select(self, cotangents: Tensor) -> OutputLayerGradients:
        return replace(self, outputs=self.outputs[..., cotangents])

    @override
    def in_dtype(self, dtype: torch.dtype) -> OutputLayerGradients:
        return replace(self, features=self.features.to(dtype))

    @override
    def in_basis(self, left: Any, right: Any) -> ExampleGradients:
        features = self.features if right is None else self.features @ right.to(self.dtype)[0]
        left = None if left is None else formed(left).to(self.dtype)[0]
        if left is None or self.centre is not None:
            return replace(self, features=features, left=left)
        rows = left[self.outputs]  # [V, C] or [B, V, C]
        rows = rows[:, None].expand(-1, self.n_examples, -1) if self.is_shared else rows.transpose(0, 1)
        return OuterGradients(features[:, None, None], rows[:, :, None, None])

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if self.centre is not None:
            if mode != "diagonal" or not self.is_shared:
                return super().quadratic(weights, mode)
            each = self.features.square() @ weights[0].T  # [B, C]
            if self.left is not None:
                rows = self.left - self.left.mean(0)  # or rounding would be that of what all outputs share
                mean, rows = self.centre @ rows, rows[self.outputs]
                shared = (each * mean.square()).sum(-1, keepdim=True)
                return (each @ rows.square().T - 2 * (each * mean) @ rows.T + shared).clamp_min(0.0)
            shared = (self.centre.square() * each).sum(-1, keepdim=True)
            return (each * (1 - 2 * self.centre))[:, self.outputs] + shared
        chosen, own = self.outputs, weights[0][self.outputs]  # [V, i] or [B, V, i]
        if mode == "joint":  # ⟨e_c φ_b, e_c' φ_b'⟩ is zero unless c = c'
            chosen = chosen.expand(self.n_examples, -1)
            values = (self.features[:, None] * own) @ self.features.T  # [B, V, B]
            return values[..., None] * (chosen[:, :, None, None] == chosen)
        values = torch.einsum("bi,vi->bv" if self.is_shared else "bi,bvi->bv", self.features.square(), own)
        return values if mode == "diagonal" else values[:, :, None] * (chosen[..., :, None] == chosen[..., None, :])
