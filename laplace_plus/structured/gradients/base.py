"""Batched per-example gradients: the interface, and gradients that are written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.chunks import limit, slices

_WRITTEN = 4
"""MiB of a chunk that is written out. Smaller chunks make many small products."""

_JOINT = 64
"""The same for products of all examples with each other, in which each chunk is written out once for every other."""


class ExampleGradients(ABC):
    """V × B matrices ``P_vn`` of shape ``[G, o, i]``: the gradients of V cotangents for B examples.

    Attributes:
        n_cotangents: V.
        n_examples: B.
        shape: ``(G, o, i)``.
        dtype: The type in which sums are taken.
        device: Where they are.
    """

    n_cotangents: int
    n_examples: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The matrices of some examples, written out: ``[V, b, G, o, i]``."""

    @abstractmethod
    def select(self, cotangents: Tensor) -> ExampleGradients:
        """The gradients of some cotangents, given by their indices."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> ExampleGradients:
        """The same matrices with sums taken in another type."""

    def entries(self, examples: slice, positions: Tensor) -> Tensor:
        """Entries of some examples' matrices at ``[n]`` positions in the flattened array, ``[V, b, n]``."""
        start, stop, _ = examples.indices(self.n_examples)
        cuts = slices(stop - start, self.bytes_each(), limit(self.device, _WRITTEN))
        parts = [slice(start + cut.start, start + cut.stop) for cut in cuts] or [examples]
        return torch.cat([self.dense(part).flatten(2)[..., positions] for part in parts], 1)

    def bytes_each(self) -> int:
        """Memory that the matrices of one example take when they are written out."""
        groups, rows, columns = self.shape
        return self.n_cotangents * groups * rows * columns * self.dtype.itemsize

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of a slice of the examples and their matrices ``[V, b, G, o, i]``, a bounded number at a time."""
        for examples in slices(self.n_examples, self.bytes_each(), limit(self.device, _WRITTEN)):
            yield examples, self.dense(examples)

    def squares(self) -> Tensor:
        """``Σ_vn P_vn²``, entry by entry, ``[G, o, i]``."""
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.add_squares_(total)
        return total

    def add_squares_(self, total: Tensor) -> None:
        """Add ``Σ_vn P_vn²``, entry by entry, to ``total [G, o, i]``."""
        for _, values in self.chunks():
            total += values.square().sum((0, 1))

    def by_component(self, components: Tensor, count: int) -> list[ExampleGradients]:
        """The gradients of each component's cotangents; components are ``[V]`` integers below ``count``."""
        if count == 1:
            return [self]
        return [self.select((components == number).nonzero().squeeze(-1)) for number in range(count)]

    def add_component_squares_(self, totals: Tensor, components: Tensor) -> None:
        """Add the squares of the cotangents of each component to ``totals [K, G, o, i]``; components are ``[V]``."""
        for total, own in zip(totals, self.by_component(components, len(totals)), strict=True):
            if own.dtype == total.dtype:
                own.add_squares_(total)
            else:
                total += own.squares()

    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        """Weighted inner products of the matrices, ``Σ_goi w_goi P_v,n,goi P_v',n',goi``.

        Args:
            weights: Non-negative ``[G, o, i]``.
            mode: ``"full"`` for ``[B, V, V]`` (each example with itself), ``"diagonal"`` for ``[B, V]``, ``"joint"``
                for ``[B, V, B, V]`` (all examples with each other).
        """
        if mode == "joint":
            return self._joint(weights)
        results = []
        for _, values in self.chunks():
            flat = values.flatten(2).transpose(0, 1)  # [b, V, p]
            if mode == "diagonal":
                results.append(flat.square() @ weights.flatten())
            else:
                results.append((flat * weights.flatten()) @ flat.mT)
        return torch.cat(results)

    def project(self, matrices: Tensor) -> Tensor:
        """Inner products ``⟨P_vn, U_r⟩`` with some matrices ``U [r, G, o, i]``, ``[V, B, r]``."""
        flat = matrices.flatten(1).mT.to(self.dtype)
        return torch.cat([values.flatten(2) @ flat for _, values in self.chunks()], 1)

    def _joint(self, weights: Tensor) -> Tensor:
        # No more than two chunks are written out at a time; symmetry gives the other half of the pairs.
        v, b = self.n_cotangents, self.n_examples
        result = weights.new_zeros(b, v, b, v)
        cuts = list(slices(b, self.bytes_each(), limit(self.device, _JOINT)))
        for number, own in enumerate(cuts):
            weighted = self.dense(own).mul(weights).flatten(2).flatten(0, 1)  # [vb, p]
            for other in cuts[: number + 1]:
                block = weighted @ self.dense(other).flatten(2).flatten(0, 1).T
                block = block.view(v, -1, v, other.stop - other.start)
                result[own, :, other] = block.permute(1, 0, 3, 2)
                result[other, :, own] = block.permute(3, 2, 1, 0)
        return result


@dataclass
class DenseGradients(ExampleGradients):
    """Gradients that are written out, as ``values [V, B, G, o, i]``."""

    values: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.values.shape[:2]
        self.shape = tuple(self.values.shape[2:])  # type: ignore[assignment]
        self.dtype, self.device = self.values.dtype, self.values.device

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.values[:, examples]

    @override
    def select(self, cotangents: Tensor) -> DenseGradients:
        return DenseGradients(self.values[cotangents])

    @override
    def in_dtype(self, dtype: torch.dtype) -> DenseGradients:
        return DenseGradients(self.values.to(dtype))
