"""Symmetric matrices of low rank, with what stochastic Lanczos quadrature knows of the rest of the spectrum.

With eigenpairs (Λ, U) of H and the rest R, ``M = w UᵀΛU + D`` and ``M⁻¹ = S Sᵀ``,

    log det(w H + D) = log det M + tr log(I + C),    C = w Sᵀ R S.

Under a common δ, C is ``(w/δ) R``: one Lanczos decomposition for each random vector z serves every w and δ. Other
diagonals D need products anew, but their derivatives none:

    ∂ tr log(I + C) / ∂D_p = −E (S z)_p (S C (I + C)⁻¹ z)_p,

where the vectors ``C (I + C)⁻¹ z`` lie in the Krylov spaces of the values (arXiv 2405.17277 has such gradients in
general). The vectors z are always the same, so that the function is smooth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from laplace_plus.checks import PRODUCTS
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.kernels import inner_products, symmetric_eigen
from laplace_plus.linalg import LanczosDecomposition, Operator, eigsh, lanczos, nystrom
from laplace_plus.linalg.estimates import draw_probes, standard_error
from laplace_plus.linalg.linear_maps import attach_one, epsilon
from laplace_plus.structured.blocks import Block, CoordinateMap, Factor, register_block
from laplace_plus.structured.composed import DerivedGradients
from laplace_plus.structured.gradients import MIB, ExampleGradients, slices
from laplace_plus.structured.log_determinants import require_positive

PAIRS, MOST_RESTARTS, REMAINDER_DEPTH = 50, 50, 20
"""Eigenpairs where nobody asks for a rank, and restarts of their search; steps for each vector for the rest."""

WHOLE = 1000
"""Sides up to which H is written out by products with the unit vectors, and nothing is estimated. On two layers of 16
units the search for 50 pairs alone took twenty times as long."""


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
    def exact(cls, values: Tensor, without: Tensor | None = None) -> SampledSpectrum:
        """All eigenvalues ``[k]``, as two vectors that agree: standard errors are zero.

        ``without`` are eigenvalues ``[j]`` of another matrix, whose traces are subtracted.
        """
        nodes = torch.cat([values, values[:0] if without is None else without]).double()
        weights = torch.ones_like(nodes)
        weights[len(values) :] = -1
        return cls(nodes.repeat(2, 2, 1), weights.repeat(2, 2, 1))

    @classmethod
    def of(cls, found: Sequence[LanczosDecomposition], *, floor: float = 0.0) -> SampledSpectrum:
        """From Lanczos decompositions; nodes up to ``floor`` are rounding errors and count as zero."""
        depth = max(own.hessenberg.shape[-1] for own in found)
        padded = [pad(own.hessenberg, (0, depth - own.hessenberg.shape[-1]) * 2) for own in found]
        matrix, norms = torch.cat(padded).double(), torch.cat([own.scale for own in found]).double() ** -2
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

    def forms(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``zᵀ f(H) z`` for each vector z, ``[m]``, and the same after fewer steps; differentiable in f."""
        full, earlier = (self.weights * f(self.nodes)).sum(-1)
        return full, earlier

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


def _log_determinant(matrix: Tensor) -> Tensor:
    return 2 * torch.linalg.cholesky(matrix).diagonal().log().sum()


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

    The rest only enters determinants: its spectrum, or what random vectors told of it, under one prior precision, and
    products under several.

    Attributes:
        values: Positive ``[r]``, float64.
        vectors: U, ``[r, n]``. Formulas do not take its rows to be exactly orthonormal.
        rest: The spectrum of the rest.
        operator: Products with H, ``[k, n] -> [k, n]``, where they are at hand.
    """

    values: Tensor
    vectors: Tensor
    rest: SampledSpectrum
    operator: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    storage: ClassVar[str] = "low rank"
    _spectrum: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.kind = f"rank {len(self.values)}"
        self.n_components = 1
        self.shape = (1, 1, self.vectors.shape[1])

    @classmethod
    def of(
        cls,
        operator: Operator,
        rank: int | None,
        probes: int,
        *,
        tolerance: float = 1e-4,
        generator: torch.Generator | None = None,
    ) -> LowRankBlock:
        """The leading pairs of H, and what ``probes`` random vectors tell of the rest; warns of pairs that are missing.

        Costs two to three products for each pair (:data:`PAIRS`, or all up to :data:`WHOLE`, without a rank), and 20
        for each random vector; memory is ``2 rank + 1`` vectors, at least 20 more than the rank, or 80 more.
        """
        total, whole = operator.shape[0], operator.shape[0] <= WHOLE
        rank = min(total if rank is None and whole else rank or PAIRS, total)
        tolerance, wanted = max(tolerance, 2 * PRODUCTS.get()), total if whole else rank  # of half precision
        limits: Any = {"max_restarts": MOST_RESTARTS, "subspace": total + 2 if whole else None}
        pairs = eigsh(operator, total, wanted, tolerance=tolerance, generator=generator, **limits)
        if not pairs.converged:
            warn(
                f"Of {wanted} eigenpairs of the curvature, {len(pairs.values)} met the tolerance of {tolerance:g} "
                f"within {MOST_RESTARTS} restarts; only these are kept. Raise the tolerance, or ask for a lower rank.",
                ConvergenceWarning,
            )
        values = pairs.values.double()
        # Values below ten units of rounding of the largest one are rounding errors, whatever the number of weights.
        rounding = 10 * torch.finfo(pairs.values.dtype).eps
        kept = values > rounding * values.clamp(min=0).amax() if len(values) else values > 0
        positive, vectors, none = values[kept], pairs.vectors[kept], SampledSpectrum.unknown(values.device)
        found = cls(positive[:rank], vectors[:rank], none)
        if probes == 0 or len(positive) <= rank and (whole or not bool(kept.all())):
            return found
        if whole:
            return replace(found, rest=SampledSpectrum.exact(positive[rank:]))
        floor = rounding * float(values.amax()) if len(values) else 0.0
        return found._with_rest(operator, probes, floor, generator)

    @classmethod
    def spanned(
        cls, operator: Operator, start: Tensor, probes: int, *, generator: torch.Generator | None = None
    ) -> LowRankBlock:
        """The Nyström approximation ``H Vᵀ (V H Vᵀ)⁻¹ V H`` by products with V, ``start [r, n]``; probes as :meth:`of`.

        It is at most H, and is H where V spans its range. The rest is the part of H beside it; up to :data:`WHOLE`
        determinants are those of H.
        """
        n = operator.shape[0]
        pairs = nystrom(operator, n, len(start), start=start)
        floor = 10 * epsilon(pairs.values.dtype) * float(pairs.values.amax())
        kept = pairs.values > floor
        found = cls(pairs.values[kept].double(), pairs.vectors[kept], SampledSpectrum.unknown(pairs.values.device))
        if probes == 0:
            return found
        if n > WHOLE:
            return found._with_rest(operator, probes, floor, generator)
        values = symmetric_eigen(operator(torch.eye(n).to(found.vectors)).double())[0]
        return replace(found, rest=SampledSpectrum.exact(values[values > floor], found.values))

    def _with_rest(
        self, operator: Operator, probes: int, floor: float, generator: torch.Generator | None
    ) -> LowRankBlock:
        """The block with what random vectors tell of the part of H beside U."""
        options: Any = {"dtype": operator.dtype, "device": operator.device, "generator": generator}
        drawn = draw_probes("signs", probes, operator.shape[0], **options)
        spaces = self._krylov(lambda z: self._beside(operator(self._beside(z))), self._beside(drawn))
        return replace(self, rest=SampledSpectrum.of(spaces, floor=floor))

    def _beside(self, vectors: Tensor) -> Tensor:
        """The part of vectors ``[k, n]`` that is orthogonal to U."""
        return vectors - inner_products(vectors, self.vectors) @ self.vectors

    def _krylov(self, product: Callable[[Tensor], Tensor], start: Tensor) -> list[LanczosDecomposition]:
        """Decompositions for start vectors ``[k, n]``, four at a time or more."""
        depth = min(REMAINDER_DEPTH, start.shape[1])
        parts = start.split(max(4, 256 * MIB // (8 * depth * start.shape[1])))
        # Where the pairs are complete, the rest is rounding error and not even symmetric.
        return [lanczos(product, part, depth, parameters=(), check_symmetry=False) for part in parts]

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

    @cached_property
    def _matrix(self) -> Tensor:
        """H written out, float64."""
        assert self.operator is not None
        return self.operator(torch.eye(self.shape[2]).to(self.vectors)).double()

    @property
    @override
    def is_sampled(self) -> bool:
        return len(self.rest) > 0

    @override
    def sampled_determinants(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        return self.forms(weights, diagonal)[0]

    @override
    def diagonal(self, weights: Tensor) -> Tensor:
        return (weights[0] * self.values @ self.vectors.double().square()).view(self.shape)

    def forms(self, weights: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        """``zᵀ log(I + C) z`` for each of the random vectors, as :meth:`SampledSpectrum.forms`; differentiable.

        Raises:
            UnsupportedError: A diagonal that differs from entry to entry, and no products.
        """
        weight, diagonal = weights[0].double(), diagonal.double()
        if not diagonal.ndim:
            return self.rest.forms(lambda nodes: torch.log1p(nodes * (weight / diagonal)))
        if self.operator is None:
            what = "The remainder of a low-rank curvature is only known under one prior precision for all parameters."
            fix = "Pass remainder_probes=0 to take the evidence of the low-rank curvature alone."
            got = f"one precision for each of {diagonal.numel()} parameters"
            raise UnsupportedError(what, expected='structure="scalar"', got=got, fix=fix)
        n = self.vectors.shape[1]
        if n <= WHOLE:
            whole = _log_determinant(weight * self._matrix + diagonal.flatten().diag())
            return ((whole - self._of_pairs(weight, diagonal)).expand(2),) * 2
        with torch.no_grad():
            own = diagonal.flatten()
            factor, root, operator = self.factor(weight[None], diagonal), own.sqrt(), self.operator

            def turned(vectors: Tensor) -> Tensor:  # S v
                return factor.sample(vectors.view(-1, *self.shape)).flatten(1)

            def product(vectors: Tensor) -> Tensor:
                moved = self._beside(operator(self._beside(turned(vectors))))
                return (turned(moved / root) * (root * weight)).to(vectors)

            signs = draw_probes("signs", len(self.rest), n, generator=torch.Generator().manual_seed(0))
            signs = signs.to(self.vectors)
            spaces = self._krylov(product, signs)
            slopes = []  # of each vector in D
            for space, z in zip(spaces, signs.split([len(space.scale) for space in spaces]), strict=True):
                values, vectors = torch.linalg.eigh(space.hessenberg.double())
                shrunk = (values / (1 + values) * vectors[:, 0])[:, None] * vectors / space.scale[:, None, None]
                y = (shrunk.sum(-1)[:, None].to(z) @ space.vectors)[:, 0]
                slopes.append(-turned(z) * turned(y))
            slope = torch.cat(slopes)
            full, earlier = SampledSpectrum.of(spaces).forms(torch.log1p)

        def pullback(cotangent: Tensor) -> tuple[Tensor, Tensor]:
            gradient = cotangent @ slope.double()
            return -(gradient @ own) / weight, gradient.view_as(diagonal)

        return attach_one(full, [weight, diagonal], pullback), earlier

    def remainder(self, weights: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``tr log(I + C)``, differentiable; zeros where the rest was not estimated; errors as :meth:`forms`.

        Returns:
            0-d float64 each: the estimate, its standard error (infinite for a single vector), and the change by the
            last quarter of the Lanczos steps.
        """
        if not len(self.rest):
            zero = torch.zeros((), dtype=torch.float64, device=self.vectors.device)
            return zero, zero, zero
        full, earlier = self.forms(weights, diagonal)
        return full.mean(), standard_error(full.detach()), (full - earlier).detach().mean().abs()

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        weight, diagonal = weights[0].double(), diagonal.double()
        require_positive(diagonal)
        rest = self.remainder(weights, diagonal)[0]
        if not diagonal.ndim:
            own = torch.log1p(self.eigenvalues() * weight / diagonal).sum()
            return own + rest + diagonal.log() * self.shape[2]
        return self._of_pairs(weight, diagonal) + rest

    def _of_pairs(self, weight: Tensor, diagonal: Tensor) -> Tensor:
        """``log det M`` for a diagonal ``[1, 1, n]``."""
        root = (self.values * weight).sqrt()
        inner = root[:, None] * gram(self.vectors, diagonal) * root
        return _log_determinant(inner + torch.eye(len(root)).to(inner)) + diagonal.log().sum()

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
