"""Symmetric matrices of low rank, with what stochastic Lanczos quadrature knows of the rest of the spectrum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured.blocks import Block, CoordinateMap, Factor, register_block
from laplace_plus.structured.composed import DerivedGradients
from laplace_plus.structured.gradients import MIB, ExampleGradients, slices
from laplace_plus.structured.log_determinants import require_positive


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
        """From tridiagonal matrices ``[m, K, K]`` of Lanczos decompositions for vectors of norms ``1 / scale [m]``.

        Nodes up to ``floor`` are rounding errors and count as zero.
        """
        matrix = tridiagonal.double()
        depth = matrix.shape[-1]
        norms = scale.double().square().reciprocal()
        nodes, weights = [], []
        for steps in (depth, depth - max(1, depth // 4)):
            values, vectors = torch.linalg.eigh(matrix[:, :steps, :steps])
            first = vectors[:, 0] if steps else values
            missing = (0, depth - steps)
            nodes.append(pad(torch.where(values > floor, values, 0.0), missing))
            weights.append(pad(first.square() * norms[:, None], missing))
        return cls(torch.stack(nodes), torch.stack(weights))

    def __len__(self) -> int:
        """Number of random vectors."""
        return self.nodes.shape[1]

    def trace(self, f: Callable[[Tensor], Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
        """``tr f(H)`` for H ``[n, n]``, differentiable in what f depends on; m must be positive.

        With signs as entries the variance for one vector is ``2 (‖f(H)‖² − Σ f(H)_ii²)``, at most ``2 (‖f(H)‖² −
        tr² f(H)/n)``. The same vectors estimate that better than the few values tell their variance, whose
        distribution is skewed: intervals are those of a normal distribution.

        Returns:
            0-d float64 each: the estimate, its standard error (infinite for a single vector), and the change by the
            last quarter of the Lanczos steps.
        """
        values = f(self.nodes)
        full, earlier = (self.weights * values).sum(-1)
        squares, value = (self.weights[0] * values[0].square()).sum(-1).mean(), full.mean()
        sem = (2 / len(full) * (squares - value.square() / n)).clamp(min=0).sqrt().detach()
        sem = sem if len(full) > 1 else torch.full_like(sem, torch.inf)
        return value, sem, (full - earlier).detach().mean().abs()

    def plus(self, other: SampledSpectrum) -> SampledSpectrum:
        """The quadratures of a sum of traces. Where one has fewer vectors, each of them has a larger weight."""
        parts = [part for part in (self, other) if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else self
        rows = max(len(part) for part in parts)
        nodes, weights = [], []
        for part in parts:
            missing = (0, 0, 0, rows - len(part))
            nodes.append(pad(part.nodes, missing))
            weights.append(pad(part.weights * (rows / len(part)), missing))
        return SampledSpectrum(torch.cat(nodes, -1), torch.cat(weights, -1))


@dataclass(frozen=True)
class LowRankCoordinates(CoordinateMap):
    """The gradients themselves, in float64, and their inner products with the vectors U ``[r, n]``."""

    vectors: Tensor

    @override
    def coordinates(self, gradients: ExampleGradients) -> ProjectedGradients:
        return ProjectedGradients(gradients.in_dtype(torch.float64), self.vectors)


@dataclass
class ProjectedGradients(DerivedGradients):
    """Gradients together with the inner products of their matrices with some ``vectors`` U, ``[r, n]``."""

    vectors: Tensor

    @cached_property
    def projections(self) -> Tensor:
        """``⟨P_vn, U_r⟩``, ``[V, B, r]``."""
        return self.source.project(self.vectors[:, None, None])

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.source.dense(examples)


@dataclass(frozen=True)
class LowRankFactor(Factor):
    """``M = Uᵀ diag(values) U + D``, inverted by Woodbury's identity in float64.

    With ``A = D^-½ Uᵀ diag(values)^½`` and ``AᵀA = Q diag(λ) Qᵀ``, every function of M follows from those r numbers:
    ``g(I + AAᵀ) = g(1) I + A Q diag((g(1+λ) − g(1))/λ) Qᵀ Aᵀ``. A variance is the prior's minus what the data took
    away, a difference of nearly equal numbers where the data determine much.

    The ``basis`` holds U, ``[r, n]``; ``values [r]`` and the ``diagonal`` D, 0-d or ``[1, 1, n]``, are positive and
    float64. NotPositiveDefiniteError for a D that is not.
    """

    basis: LowRankCoordinates
    values: Tensor
    diagonal: Tensor

    def __post_init__(self) -> None:
        require_positive(self.diagonal)

    @cached_property
    def _inner(self) -> tuple[Tensor, Tensor]:
        """λ ``[r]`` and ``diag(values)^½ Q`` ``[r, r]``."""
        root = self.values.sqrt()
        numbers, vectors = symmetric_eigen(root[:, None] * gram(self.basis.vectors, self.diagonal) * root)
        return numbers.clamp(min=0), root[:, None] * vectors

    @cached_property
    def _taken(self) -> Tensor:
        """``diag(values)^½ Q (1 + λ)^-½ [r, k]``, by which what the data took away follows from products with U.

        Directions with a λ so small that rounding of U changes variances by more are left out.
        """
        numbers, mix = self._inner
        kept = numbers > torch.finfo(self.basis.vectors.dtype).eps / 64
        return mix[:, kept] * (1 + numbers[kept]).rsqrt()

    @override
    def log_determinant(self) -> Tensor:
        n_alike = self.basis.vectors.shape[1] // self.diagonal.numel()
        return torch.log1p(self._inner[0]).sum() + self.diagonal.log().sum() * n_alike

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        assert isinstance(coordinates, ProjectedGradients)
        inverse = self.diagonal.reciprocal().expand(coordinates.shape)
        if self.diagonal.ndim:
            taken = coordinates.source.project(self.basis.vectors[:, None, None] * inverse) @ self._taken
        else:
            taken = coordinates.projections / self.diagonal @ self._taken
        prior = coordinates.source.quadratic(inverse, mode)
        if mode == "diagonal":
            return (prior - taken.square().sum(-1).T).clamp(min=0)
        if mode == "joint":
            return prior - torch.einsum("vbr,wcr->bvcw", taken, taken)
        taken = taken.transpose(0, 1)
        return prior - taken @ taken.mT

    @override
    def sample(self, noise: Tensor) -> Tensor:
        flat = noise.flatten(1).double()
        coordinates = torch.zeros(len(flat), len(self.values), dtype=flat.dtype, device=flat.device)
        numbers, mix = self._inner
        for columns, vectors, diagonal in _columns(self.basis.vectors, self.diagonal):
            coordinates += (flat[:, columns] * diagonal.rsqrt()) @ vectors.mT @ mix
        root = (1 + numbers).sqrt()
        coordinates /= -(root * (1 + root))
        result = torch.empty_like(flat)
        for columns, vectors, diagonal in _columns(self.basis.vectors, self.diagonal):
            moved = coordinates @ mix.mT @ vectors * diagonal.rsqrt()
            result[:, columns] = (flat[:, columns] + moved) * diagonal.rsqrt()
        return result.view_as(noise).to(noise.dtype)

    @override
    def variances(self) -> Tensor:
        numbers, mix = self._inner
        parts = []
        for _, vectors, diagonal in _columns(self.basis.vectors, self.diagonal):
            taken = ((mix.mT @ vectors / diagonal).square() / (1 + numbers)[:, None]).sum(0)
            parts.append(diagonal.reciprocal() - taken)
        return torch.cat(parts)[None, None].to(self.basis.vectors.dtype)


def _columns(vectors: Tensor, diagonal: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the n entries with U and D there in float64, a bounded number at a time; D is 0-d or has n entries."""
    flat = diagonal.flatten().expand(vectors.shape[1])
    for columns in slices(vectors.shape[1], 2 * 8 * max(1, len(vectors)), 256 * MIB):
        yield columns, vectors[:, columns].double(), flat[columns]


def gram(vectors: Tensor, diagonal: Tensor) -> Tensor:
    """``U D⁻¹ Uᵀ`` in float64, ``[r, r]``; differentiable in D, 0-d or with n entries."""
    result = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=vectors.device)
    for _, wide, own in _columns(vectors, diagonal):
        result = result + (wide / own) @ wide.mT
    return result


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
            root, one = self.values.sqrt(), torch.ones((), dtype=torch.float64, device=self.values.device)
            self._spectrum = symmetric_eigen(root[:, None] * gram(self.vectors, one) * root)[0].clamp(min=0)
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
            what = "The remainder of a low-rank curvature is only known under one prior precision for all parameters."
            fix = "Pass remainder_probes=0 to take the evidence of the low-rank curvature alone."
            got = f"one precision for each of {diagonal.numel()} parameters"
            raise UnsupportedError(what, expected='structure="scalar"', got=got, fix=fix)
        ratio = weights[0].double() / diagonal.double()
        return self.rest.trace(lambda nodes: torch.log1p(nodes * ratio), self.vectors.shape[1])

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        weight, diagonal = weights[0].double(), diagonal.double()
        require_positive(diagonal)
        rest = self.remainder(weights, diagonal)[0]
        if not diagonal.ndim:
            own = torch.log1p(self.eigenvalues() * weight / diagonal).sum()
            return own + rest + diagonal.log() * self.shape[2]
        root = (self.values * weight).sqrt()
        inner = root[:, None] * gram(self.vectors, diagonal) * root
        lower = torch.linalg.cholesky(inner + torch.eye(len(root), dtype=inner.dtype, device=inner.device))
        return 2 * lower.diagonal().log().sum() + diagonal.log().sum()

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> LowRankFactor:
        return LowRankFactor(LowRankCoordinates(self.vectors), self.values * weights[0].double(), diagonal.double())

    @override
    def dense(self, weights: Tensor) -> Tensor:
        wide = self.vectors.double()
        return ((wide.T * (self.values * weights[0].double())) @ wide).to(weights.dtype)[None]

    @override
    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        projections = vectors.flatten(1) @ self.vectors.T.to(vectors)
        return projections.double().square() @ (self.values * weights[0].double())

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
