"""Symmetric matrices of low rank, with what stochastic Lanczos quadrature knows of the rest of the spectrum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.kernels import symmetric_eigen
from laplace_plus.linalg.results import standard_error
from laplace_plus.structured.blocks import Block, register_block
from laplace_plus.structured.log_determinants import not_positive_definite
from laplace_plus.structured.low_rank_factor import LowRankCoordinates, LowRankFactor, gram, low_rank_log_determinant


@dataclass(frozen=True)
class SampledSpectrum:
    """Gauss quadratures of a symmetric positive semi-definite H, one for each of m random vectors.

    ``tr f(H) ≈ 1/m Σ_jk weight_jk f(node_jk)`` for any f with f(0) = 0 (stochastic Lanczos quadrature; S. Ubaru,
    J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017).

    Attributes:
        nodes: ``[2, m, K]`` float64: after K Lanczos steps, and after three quarters of them, padded with zeros.
        weights: ``[2, m, K]`` float64.
    """

    nodes: Tensor
    weights: Tensor

    @classmethod
    def unknown(cls, device: torch.device | None = None) -> SampledSpectrum:
        """Quadratures without any random vector."""
        none = torch.zeros(2, 0, 0, dtype=torch.float64, device=device)
        return cls(none, none)

    @classmethod
    def of(cls, tridiagonal: Tensor, scale: Tensor, *, floor: float = 0.0) -> SampledSpectrum:
        """From Lanczos decompositions for random vectors with ``E[v vᵀ] = I``.

        Args:
            tridiagonal: The matrices T of the decompositions, ``[m, K, K]``.
            scale: The reciprocals of the vectors' norms, ``[m]``.
            floor: Nodes up to this value are rounding errors and count as zero.
        """
        matrix = tridiagonal.double()
        depth = matrix.shape[-1]
        norms = scale.double().square().reciprocal()
        nodes, weights = [], []
        for steps in (depth, depth - max(1, depth // 4)):
            values, vectors = torch.linalg.eigh(matrix[:, :steps, :steps])
            first = vectors[:, 0] if steps else values
            nodes.append(_padded(torch.where(values > floor, values, 0.0), depth))
            weights.append(_padded(first.square() * norms[:, None], depth))
        return cls(torch.stack(nodes), torch.stack(weights))

    def __len__(self) -> int:
        """Number of random vectors."""
        return self.nodes.shape[1]

    @property
    def depth(self) -> int:
        """K."""
        return self.nodes.shape[2]

    def trace(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``tr f(H)``, differentiable in what f depends on; m must be positive.

        Returns:
            0-d float64 each: the estimate, its standard error over the vectors (infinite for a single one), and the
            change by the last quarter of the Lanczos steps.
        """
        full, earlier = (self.weights * f(self.nodes)).sum(-1)
        return full.mean(), standard_error(full), (full - earlier).detach().mean().abs()

    def plus(self, other: SampledSpectrum) -> SampledSpectrum:
        """The quadratures of a sum of traces. Where one has fewer vectors, each of them has a larger weight."""
        parts = [part for part in (self, other) if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else self
        rows = max(len(part) for part in parts)
        nodes, weights = [], []
        for part in parts:
            missing = (0, 0, 0, rows - len(part))
            nodes.append(torch.nn.functional.pad(part.nodes, missing))
            weights.append(torch.nn.functional.pad(part.weights * (rows / len(part)), missing))
        return SampledSpectrum(torch.cat(nodes, -1), torch.cat(weights, -1))


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]))


@register_block
@dataclass
class LowRankBlock(Block):
    """``H = Uᵀ diag(values) U + H_rest`` over a vector of n entries.

    The rest only enters determinants. Random vectors orthogonal to U estimated its spectrum, so that it can be
    evaluated for every prior precision without another product.

    Attributes:
        values: Positive ``[r]``, float64.
        vectors: U, ``[r, n]``. Formulas do not take its rows to be exactly orthonormal.
        rest: The spectrum of the rest.
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
            As :meth:`SampledSpectrum.trace`; zeros where the rest was not estimated. Differentiable.

        Raises:
            UnsupportedError: A diagonal that differs from entry to entry.
        """
        if not len(self.rest):
            zero = torch.zeros((), dtype=torch.float64, device=self.vectors.device)
            return zero, zero, zero
        if diagonal.ndim:
            raise UnsupportedError(
                "The remainder of a low-rank curvature is only known under one prior precision for all parameters.",
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
        return low_rank_log_determinant(self.values * weight, self.vectors, diagonal)

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

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> LowRankBlock:
        return cls(tensors["values"], tensors["vectors"], SampledSpectrum(tensors["nodes"], tensors["node_weights"]))

    @override
    def clone(self) -> LowRankBlock:
        return LowRankBlock(self.values.clone(), self.vectors.clone(), self.rest)
