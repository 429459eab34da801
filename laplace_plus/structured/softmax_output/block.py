"""The curvature of a linear output layer: its data rows, or a dense matrix where that is smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.blocks import Block, Factor, register_block
from laplace_plus.structured.dense import DenseBlock
from laplace_plus.structured.log_determinants import Spectrum
from laplace_plus.structured.softmax_output.precision import SoftmaxOutputFactor, SoftmaxOutputRows


@register_block
class SoftmaxOutputBlock(Block):
    """``H = Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ``, exactly, or without the outer products ``p pᵀ``.

    With fewer rows N than the matrix has columns, ``C·i``, features and probabilities say everything about it. They
    take ``N·(C + i)`` numbers, and :class:`SoftmaxOutputFactor` inverts it through matrices of N × N. With more rows
    the block turns into a dense one.

    Args:
        rows: Features and probabilities, or the dense block that they have become.
        shape: ``(1, C, i)``.
    """

    storage: ClassVar[str] = "head"

    def __init__(self, rows: SoftmaxOutputRows | DenseBlock, shape: tuple[int, int, int]):
        self.shape, self.n_components = shape, 1
        self._dense = rows if isinstance(rows, DenseBlock) else None
        self._pieces = [rows] if isinstance(rows, SoftmaxOutputRows) else []
        self._settle()

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> SoftmaxOutputBlock:
        if "features" not in tensors:
            return cls(DenseBlock.from_tensors(tensors, shape), shape)
        return cls(SoftmaxOutputRows(tensors["features"], tensors["scales"], bool(tensors["coupled"])), shape)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """What the block is, for summaries."""
        if self._dense is not None:
            return self._dense.kind
        return f"dense, from {self.n_rows} rows of data"

    @property
    def n_rows(self) -> int:
        """N, the number of rows that are held."""
        return sum(len(piece.features) for piece in self._pieces)

    @property
    def rows(self) -> SoftmaxOutputRows:
        """The rows of all data so far."""
        if len(self._pieces) > 1:
            features = torch.cat([piece.features for piece in self._pieces])
            scales = torch.cat([piece.scales for piece in self._pieces])
            self._pieces = [SoftmaxOutputRows(features, scales, self._pieces[0].coupled)]
        return self._pieces[0]

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, SoftmaxOutputBlock)
        if self._dense is None and other._dense is None:
            self._pieces.extend(other._pieces)
            self._settle()
            return
        self._dense, self._pieces = self._as_dense(), []
        self._dense.add_(other._as_dense())

    def _settle(self) -> None:
        """Turn dense where there are more rows than that has columns."""
        if self.n_rows > self.shape[1] * self.shape[2]:
            self._dense, self._pieces = self._as_dense(), []

    def _as_dense(self) -> DenseBlock:
        if self._dense is not None:
            return self._dense
        rows = self.rows
        return DenseBlock(rows.dense()[None, None], self.shape)

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if self._dense is not None:
            return self._dense.factor(weights, diagonal)
        return SoftmaxOutputFactor(self.rows, weights[0], diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense.log_determinant(weights, diagonal)
        return SoftmaxOutputLogDeterminant.apply(self.rows, weights[0], diagonal)

    @override
    def spectrum(self) -> Spectrum | None:
        return None if self._dense is None else self._dense.spectrum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense.dense(weights)
        return (self.rows.dense() * weights[0].to(self.rows.features))[None].to(weights.dtype)

    @override
    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense.quadratic(weights, vectors)
        outputs, scales = self.rows.features.to(vectors) @ vectors[:, 0].mT, self.rows.scales.to(vectors)  # [k, N, C]
        mean = (scales * outputs).sum(-1, keepdim=True) if self.rows.coupled else 0
        return weights[0] * (scales * (outputs - mean).square()).sum((1, 2))

    @override
    def is_zero(self) -> bool:
        return not all(bool(tensor.any()) for name, tensor in self.tensors().items() if name != "coupled")

    @override
    def tensors(self) -> dict[str, Tensor]:
        if self._dense is not None:
            return self._dense.tensors()
        rows = self.rows
        return {"features": rows.features, "scales": rows.scales, "coupled": torch.tensor(rows.coupled)}

    @override
    def clone(self) -> SoftmaxOutputBlock:
        return SoftmaxOutputBlock(self.rows if self._dense is None else self._dense.clone(), self.shape)


class SoftmaxOutputLogDeterminant(torch.autograd.Function):
    """``log det (w H + D)`` with its exact derivatives, ``tr (M⁻¹ H)`` and the diagonal of ``M⁻¹``."""

    @staticmethod
    def forward(ctx: Any, rows: SoftmaxOutputRows, weight: Tensor, diagonal: Tensor) -> Tensor:
        """The value; see :class:`SoftmaxOutputFactor`."""
        wanted = any(ctx.needs_input_grad[1:])
        factor = SoftmaxOutputFactor(rows, weight, diagonal, derivatives=wanted and not diagonal.ndim)
        if wanted:
            found = factor.variances() if diagonal.ndim else factor.trace_of_inverse()
            by_diagonal = found.to(diagonal).view_as(diagonal)
            # tr M⁻¹ (w H + D) = P
            left = factor.n_outputs * factor.n_features - (by_diagonal * diagonal).sum()
            ctx.save_for_backward(left / weight, by_diagonal)
        return factor.log_determinant()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        """The derivatives by ``weight`` and ``diagonal``."""
        (gradient,) = gradients
        by_weight, by_diagonal = ctx.saved_tensors
        return None, (gradient * by_weight).to(by_weight), (gradient * by_diagonal).to(by_diagonal)
