"""The abstract stack, and stacks that are written out already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.chunks import chunk_bytes, slices

_WRITTEN = 4
"""How many times the caches a chunk takes that is written out for what others do with it."""

_JOINT = 64
"""How many times the caches a chunk takes that is multiplied with all others: each of them is written out anew."""


class ExampleGradients(ABC):
    """V × B matrices of shape ``[G, o, i]``."""

    n_cotangents: int
    n_examples: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The matrices of some examples, written out: ``[V, b, G, o, i]``."""

    def entries(self, examples: slice, positions: Tensor) -> Tensor:
        """Some entries of the matrices of some examples, ``[V, b, n]``.

        Args:
            examples: Which examples.
            positions: ``[n]`` positions in the flattened ``[G, o, i]`` array.
        """
        start, stop, _ = examples.indices(self.n_examples)
        each, limit = self.n_bytes() // max(1, self.n_examples), chunk_bytes(self.device, of_caches=_WRITTEN)
        parts = [slice(start + part.start, start + part.stop) for part in slices(stop - start, each, limit)]
        return torch.cat([self.dense(part).flatten(2)[..., positions] for part in parts or [examples]], 1)

    @abstractmethod
    def select(self, directions: Tensor) -> ExampleGradients:
        """The stack of some of the directions only."""

    def n_bytes(self) -> int:
        """Memory that all matrices take when they are written out."""
        groups, rows, columns = self.shape
        item = torch.finfo(self.dtype).bits // 8
        return self.n_cotangents * self.n_examples * groups * rows * columns * item

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of a slice of the examples and their matrices ``[V, b, G, o, i]``, a bounded number at a time."""
        limit = chunk_bytes(self.device, of_caches=_WRITTEN)
        for examples in slices(self.n_examples, self.n_bytes() // max(1, self.n_examples), limit):
            yield examples, self.dense(examples)

    def squares(self) -> Tensor:
        """The sum over directions and examples of the squared entries, ``[G, o, i]``."""
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.add_squares_(total)
        return total

    def add_squares_(self, total: Tensor) -> None:
        """Add the sum over directions and examples of the squared entries to ``total [G, o, i]``."""
        for _, values in self.chunks():
            total += values.square().sum((0, 1))

    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        """Weighted inner products of the matrices, ``Σ_goi w_goi P_v,n,goi P_v',n',goi``.

        Args:
            weights: Non-negative ``[G, o, i]``.
            mode: ``"full"`` for ``[B, V, V]`` (each example with itself), ``"diagonal"`` for ``[B, V]``, ``"joint"``
                for ``[B, V, B, V]`` (all examples with each other).
        """
        if mode == "joint":
            return self._joint(weights)
        parts = []
        for _, values in self.chunks():
            flat = values.flatten(2).transpose(0, 1)  # [b, V, p]
            if mode == "diagonal":
                parts.append(flat.square() @ weights.flatten())
            else:
                parts.append((flat * weights.flatten()) @ flat.mT)
        return torch.cat(parts)

    def project(self, matrices: Tensor) -> Tensor:
        """Inner products ``⟨P_vn, U_r⟩`` with some matrices ``U [r, G, o, i]``, ``[V, B, r]``."""
        flat = matrices.flatten(1).mT.to(self.dtype)
        return torch.cat([values.flatten(2) @ flat for _, values in self.chunks()], 1)

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> ExampleGradients:
        """The same matrices with sums taken in another type."""

    def _joint(self, weights: Tensor) -> Tensor:
        # Pairs of chunks, so that no more than two chunks are ever written out; one of each pair is known by symmetry.
        v, b = self.n_cotangents, self.n_examples
        result = weights.new_zeros(b, v, b, v)
        each = self.n_bytes() // max(1, b)
        cuts = list(slices(b, each, chunk_bytes(self.device, of_caches=_JOINT)))
        for number, own in enumerate(cuts):
            weighted = (self.dense(own) * weights).flatten(2).flatten(0, 1)  # [vb, p]
            for other in cuts[: number + 1]:
                others = self.dense(other).flatten(2).flatten(0, 1)
                block = (weighted @ others.T).view(v, own.stop - own.start, v, -1)
                result[own, :, other] = block.permute(1, 0, 3, 2)
                result[other, :, own] = block.permute(3, 2, 1, 0)
        return result


@dataclass
class DenseGradients(ExampleGradients):
    """Matrices that are written out already.

    Attributes:
        values: ``[V, B, G, o, i]``.
    """

    values: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.values.shape[:2]
        self.shape = tuple(self.values.shape[2:])  # type: ignore[assignment]
        self.dtype, self.device = self.values.dtype, self.values.device

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.values[:, examples]

    @override
    def select(self, directions: Tensor) -> DenseGradients:
        return DenseGradients(self.values[directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> DenseGradients:
        return DenseGradients(self.values.to(dtype))
