"""Symmetric matrices of low rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.linalg.symmetric import symmetric_eigen
from laplace_plus.structured.blocks import Block
from laplace_plus.structured.factor import not_positive_definite
from laplace_plus.structured.low_rank_factor import LowRankCoordinates, LowRankFactor, gram, log_determinant
from laplace_plus.structured.slq_remainder import SampledSpectrum


@dataclass
class LowRankBlock(Block):
    """``H = Uᵀ diag(values) U`` over a vector of n entries, and what is known of the rest.

    The rest only enters determinants, and is known by what random vectors orthogonal to U found of its spectrum, so
    that it can be evaluated for every prior precision without another product.

    Attributes:
        values: Positive ``[r]``, float64.
        vectors: U, ``[r, n]``. Formulas do not take its rows to be exactly orthonormal.
        rest: The spectrum of what is not in the pairs.
    """

    values: Tensor
    vectors: Tensor
    rest: SampledSpectrum

    storage: ClassVar[str] = "low rank"
    _spectrum: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.kind = f"rank {len(self.values)}"
        self.n_components = 1
        self.shape = (1, 1, self.vectors.shape[1])

    @override
    def add_(self, other: Block) -> None:
        """Add another block in place: the pairs of both are kept.

        The determinants of the two rests multiply, which is an upper bound of the sum's.
        """
        assert isinstance(other, LowRankBlock)
        self.values = torch.cat([self.values, other.values])
        self.vectors = torch.cat([self.vectors, other.vectors])
        self.rest = self.rest.plus(other.rest)
        self.__post_init__()
        self._spectrum = None

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of H, ``[r]`` float64, for vectors that need not be orthonormal."""
        if self._spectrum is None:
            root = self.values.sqrt()
            self._spectrum = symmetric_eigen(root[:, None] * gram(self.vectors, None) * root)[0].clamp(min=0)
        return self._spectrum

    def remainder(self, weights: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``tr log(I + H_rest/δ)`` for a diagonal δ that is one number.

        Returns:
            As :meth:`SampledSpectrum.trace`; zeros where nothing is known of the rest. Differentiable.

        Raises:
            UnsupportedError: A diagonal that differs from entry to entry.
        """
        if not len(self.rest):
            zero = torch.zeros((), dtype=torch.float64, device=self.vectors.device)
            return zero, zero, zero
        if diagonal.ndim:
            raise UnsupportedError(
                "What the low-rank curvature leaves out is only known under one prior precision for all parameters.",
                expected='structure="scalar"',
                got=f"one precision for each of {diagonal.numel()} parameters",
                fix="Pass remainder_probes=0 to take the evidence of the low-rank curvature alone.",
            )
        ratio = weights[0].double() / diagonal.double()
        return self.rest.trace(lambda nodes: torch.log1p(nodes * ratio))

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        weight, diagonal = weights[0].double(), diagonal.double()
        if not bool((diagonal.detach() > 0).all()):
            raise not_positive_definite(diagonal.detach().min().item())
        rest = self.remainder(weights, diagonal)[0]
        if not diagonal.ndim:
            own = torch.log1p(self.eigenvalues() * weight / diagonal).sum()
            return own + rest + diagonal.log() * self.shape[2]
        return log_determinant(self.values * weight, self.vectors, diagonal)

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> LowRankFactor:
        return LowRankFactor(LowRankCoordinates(self.vectors), self.values * weights[0].double(), diagonal.double())

    @override
    def dense(self, weights: Tensor) -> Tensor:
        wide = self.vectors.double()
        return ((wide.T * (self.values * weights[0].double())) @ wide).to(weights.dtype)[None]

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {
            "values": self.values,
            "vectors": self.vectors,
            "nodes": self.rest.nodes,
            "node_weights": self.rest.weights,
        }

    @override
    def clone(self) -> LowRankBlock:
        return LowRankBlock(self.values.clone(), self.vectors.clone(), self.rest)
