"""A Kronecker product whose output factor is kept as its diagonal, for layers with very many outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.bases import Basis
from laplace_plus.structured.blocks import Block, Diagonalised, OnceDiagonalised
from laplace_plus.structured.gram_sum import EigenPairs, FactorSum
from laplace_plus.structured.log_determinants import Spectrum
from laplace_plus.structured.softmax_head.gradients import HeadStack
from laplace_plus.structured.stacks import DenseStack, OuterStack, Stack


@dataclass(frozen=True)
class ColumnBasis(Basis):
    """``R z = z Nᵀ`` group by group: the left side is the identity.

    Attributes:
        right: N, orthogonal ``[G, i, i]``.
    """

    right: Tensor

    @override
    def rotate(self, stack: Stack) -> Stack:
        right = self.right.to(stack.dtype)
        if isinstance(stack, OuterStack):
            stack = HeadStack.of(stack) or stack
        if isinstance(stack, HeadStack):
            return stack.rotated(None, right[0])
        if isinstance(stack, OuterStack):
            expand_left, expand_right = stack.expand_left, stack.expand_right

            def rotated(x: Tensor) -> Tensor:
                return torch.einsum("bsgi,gij->bsgj", expand_right(x).to(right.dtype), right)

            return OuterStack(stack.raw_right, stack.raw_left, rotated, expand_left, right.dtype)
        return DenseStack(torch.einsum("vbgoi,gij->vbgoj", stack.dense(slice(0, stack.n_examples)), right))

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        return coordinates @ self.right.mT

    @override
    def spread(self, variances: Tensor) -> Tensor:
        return variances @ self.right.square().mT


class DiagonalOutputBlock(OnceDiagonalised):
    """``H_k = diag(left_k) ⊗ right / count``, group by group: KFAC without the covariances between outputs.

    For softmax the dense output factor ``G = Σ_n diag p_n − p_n p_nᵀ`` has rows that sum to zero, so that
    ``0 ≤ G ≤ 2 diag G`` (Gershgorin): the posterior's precision is at most twice as large as here in any direction, and
    the variance of a single output is at least as large as here.

    Args:
        left: ``[K, G, o]``, sums of ``g²``.
        right: ``[G, i, i]``, sums of ``a aᵀ``, or the :class:`FactorSum`.
        count: 0-d float64: the number of rows in ``right``'s sum.
    """

    storage: ClassVar[str] = "diagonal-output Kronecker"

    def __init__(self, left: Tensor, right: Tensor | FactorSum, count: Tensor):
        self.left, self.count = left, count
        self.right_sum = right if isinstance(right, FactorSum) else FactorSum.of(right)
        self.kind = "Kronecker with a diagonal output factor"
        self.n_components, self.dtype = len(left), left.dtype
        self.shape = (left.shape[1], left.shape[2], self.right_sum.size)

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DiagonalOutputBlock)
        self.left = self.left + other.left
        self.right_sum.add_(other.right_sum)
        self.count = self.count + other.count
        self.changed()

    @override
    def factors(self, weights: Tensor) -> list[FactorSum]:
        return [self.right_sum]

    @override
    def diagonalise(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Diagonalised:
        (right,) = pairs
        left = torch.einsum("k,kgo->go", weights, self.left)
        values = left[:, :, None] * (right.values.clamp(min=0) / self.count.to(self.dtype))[:, None, :]
        return Diagonalised(values, partial(_column_basis, right))

    @override
    def _make_spectrum(self, values: Tensor) -> Spectrum:
        largest = values.amax()
        if len(values) > 1 or not bool(largest > 0):
            return Spectrum(values)
        # One outer product, whose sides are its largest row and column.
        return Spectrum.of_products(values[0].amax(1).double(), values[0].amax(0).double() / largest.double())

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.n_components == 1 or not weights.requires_grad:
            return OnceDiagonalised.log_determinant(self, weights, diagonal)
        left = torch.einsum("k,kgo->go", weights, self.left.to(weights.dtype))
        right = self.right_sum.eigen().values.to(left).clamp(min=0) / self.count.to(left)
        return torch.log(left[:, :, None] * right[:, None, :] + diagonal).sum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        left = torch.einsum("k,kgo->go", weights, self.left.to(weights.dtype))
        right = self.right_sum.matrix().to(weights.dtype) / self.count.to(weights.dtype)
        return torch.einsum("go,op,gij->goipj", left, torch.eye(left.shape[1]).to(left), right).flatten(1, 2).flatten(2)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right_sum.matrix(), "count": self.count}

    @override
    def clone(self) -> DiagonalOutputBlock:
        return DiagonalOutputBlock(self.left.clone(), self.right_sum.clone(), self.count.clone())

    @override
    def parts(self) -> list[Tensor]:
        return [self.left, *self.right_sum.parts()]


def _column_basis(right: EigenPairs) -> ColumnBasis:
    return ColumnBasis(right.vectors)
