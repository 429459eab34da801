"""The exact curvature of a linear output layer with many outputs: block-diagonal minus a matrix of low rank.

With features ``φ_n ∈ R^i`` and output Hessians ``diag p_n − p_n p_nᵀ`` (softmax), the curvature of the layer is

    H = Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ = blockdiag_c(Φᵀ P_c Φ) − U Uᵀ,   U_n = p_n ⊗ φ_n,

with ``P_c = diag_n(p_nc)``. So ``H + D`` is inverted by Woodbury's identity from C matrices of N × N and one more,
and never takes ``(C·i)²`` numbers. With ``G_c = Φ D_c⁻¹ Φᵀ``, ``S_c = P_c^½ G_c P_c^½`` and

    E_c = (G_c + P_c⁻¹)⁻¹ = P_c^½ (I + S_c)⁻¹ P_c^½,   K = Σ_c E_c,

the matrix that Woodbury's identity inverts is K, a sum of positive semi-definite terms without any cancellation, and

    log det (H + D) = Σ_c [log det D_c + log det (I + S_c)] + log det K,
    φᵀ [(H + D)⁻¹]_cc' φ' = δ_cc' φᵀ (D_c⁻¹ − D_c⁻¹ Φᵀ E_c Φ D_c⁻¹) φ' + (E_c k_c)ᵀ K⁻¹ (E_c' k'_c'),   k_c = Φ D_c⁻¹ φ.

These are the formulas of Laplace's method for Gaussian process classification with a linear kernel (Williams and
Barber, 1998; Rasmussen and Williams, 2006, section 3.5). Without ``p pᵀ`` (many binary outputs) only the blocks remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured.blocks import Block, Factor, IdentityBasis, register_block
from laplace_plus.structured.dense import DenseBlock, clamp_rounding
from laplace_plus.structured.gradients import MIB, ExampleGradients, slices
from laplace_plus.structured.log_determinants import Spectrum, require_positive
from laplace_plus.structured.one_hot import OutputLayerGradients

_BYTES = 8
"""Everything is computed in float64: under tuned priors ``I + S_c`` of trained networks is too ill-conditioned for
float32. Its condition number is 3400 for a ResNet-18 with 1000 classes."""

_CACHES = 4 * MIB
"""Bytes of N × N matrices that are worked on at a time; larger chunks leave a processor's caches."""

_EVALUATIONS = 4
"""By counted operations one inversion takes ``C N³`` and ``(C i)³``. On digits, fits, tunings and predictions with 10
classes and 256 features take 0.6 times as long by 200 rows as by a dense matrix, but 4 times as long by 600."""

_KEPT = 2**30
"""Bytes of the classes' matrices that are kept for predictions, which take a third of the time then."""


@dataclass(frozen=True)
class SoftmaxOutputRows:
    """The data rows that make up the curvature of a linear output layer.

    Attributes:
        features: ``Φ [N, i]``.
        scales: ``p [N, C]``.
        coupled: Whether ``p_n p_nᵀ`` is taken away; the scales of a row then sum to one.
    """

    features: Tensor
    scales: Tensor
    coupled: bool

    def dense(self) -> Tensor:
        """The curvature written out, ``[C·i, C·i]``."""
        size, width = self.scales.shape[1], self.features.shape[1]
        result = self.features.new_zeros(size, width, size, width)
        own = self.scales
        if (
            self.coupled
        ):  # p (1 − p); for the most probable class 1 − p is the sum of all others, which keeps its digits
            top = own.argmax(1, keepdim=True)
            own = own * (1 - own).scatter(1, top, own.scatter(1, top, 0.0).sum(1, keepdim=True))
        for c in range(size):
            row = own[:, c : c + 1]
            if self.coupled:
                row = torch.cat([row, -self.scales[:, c : c + 1] * self.scales[:, c + 1 :]], 1)
            last = c + row.shape[1]
            weighted = (row[:, :, None] * self.features[:, None]).flatten(1)  # [N, (last − c)·i]
            block = (self.features.T @ weighted).view(width, last - c, width)
            result[c, :, c:last] = block
            result[c:last, :, c] = block.permute(1, 2, 0)
        return result.view(size * width, size * width)


class SoftmaxOutputFactor(Factor):
    """``M = w H + D`` for an output layer's curvature H, inverted by Woodbury's identity.

    Args:
        rows: The data rows that H is made of.
        weight: w, 0-d.
        diagonal: D, 0-d or ``[1, C, i]``.

    Raises:
        NotPositiveDefiniteError: An entry of D is zero, negative or NaN.
    """

    def __init__(self, rows: SoftmaxOutputRows, weight: Tensor, diagonal: Tensor):
        require_positive(diagonal)
        self.basis = IdentityBasis()  # everything is computed from features
        self.rows, self.weight = rows, weight.detach().double()
        self.diagonal = (diagonal[0] if diagonal.ndim else diagonal).detach().double()
        self.n_rows, self.n_outputs = rows.scales.shape
        self.n_features = rows.features.shape[1]
        self._features = rows.features.double()

    # -- the matrices of each class ------------------------------------------------------------------------------------

    def _over(self, values: Tensor, classes: slice | Tensor) -> Tensor:
        """``v D_c⁻¹`` of some classes for rows ``[n, i]``: ``[c, n, i]``, or ``[n, i]`` where they are all alike."""
        return values / (self.diagonal[classes][:, None] if self.diagonal.ndim else self.diagonal)

    @cached_property
    def _gram(self) -> Tensor:
        """``Φ D⁻¹ Φᵀ [N, N]``, where all classes share it."""
        return self._features @ self._features.T / self.diagonal

    def _roots(self, classes: slice | Tensor) -> tuple[Tensor, Tensor]:
        """A triangular root L of ``I + S_c = L Lᵀ [c, N, N]``, and ``(w P_c)^½ [c, N, 1]``."""
        scale = (self.weight * self.rows.scales[:, classes].double()).sqrt().T[:, :, None]
        gram = self._over(self._features, classes) @ self._features.T if self.diagonal.ndim else self._gram
        shifted = (gram * scale).mul_(scale.mT)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        return torch.linalg.cholesky(shifted.mT), scale  # columns lie together, as LAPACK has them

    def _slices(self) -> Iterator[slice]:
        width = max(self.n_rows, self.n_features) if self.diagonal.ndim else self.n_rows
        return slices(self.n_outputs, _BYTES * self.n_rows * width, _CACHES)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, ``Σ log det (I + S_c)``, and all ``E_c`` where they fit into :data:`_KEPT`; one pass over the classes."""
        total = self._features.new_zeros(self.n_rows, self.n_rows)
        log_determinant, kept = total.new_zeros(()), None
        if self.n_outputs * total.numel() * _BYTES <= _KEPT:
            kept = total.new_empty(self.n_outputs, self.n_rows, self.n_rows)
        for classes in self._slices():
            lower, scale = self._roots(classes)
            log_determinant += 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()
            inverses = _inverse(lower, scale)
            total += inverses.sum(0)
            if kept is not None:
                kept[classes] = inverses
        return total, log_determinant, kept

    def _inverses(self, classes: slice | Tensor) -> Tensor:
        """``E_c [c, N, N]`` of some classes."""
        kept = self._sums[2]
        return _inverse(*self._roots(classes)) if kept is None else kept[classes]

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Positive eigenvalues ``[k]`` of ``K / w``, at most one, and eigenvectors ``[N, k]``; none if not coupled."""
        if not self.rows.coupled:
            return self._features.new_zeros(0), self._features.new_zeros(self.n_rows, 0)
        values, vectors = symmetric_eigen(self._sums[0] / self.weight)
        positive = clamp_rounding(values) > 0
        return values[positive], vectors[:, positive]

    @cached_property
    def _coupling(self) -> Tensor:
        """``R [N, k]`` with ``R Rᵀ = K⁻¹``."""
        values, vectors = self._spectrum
        return vectors * (self.weight * values).rsqrt()

    @override
    def log_determinant(self) -> Tensor:
        n_own = 1 if self.diagonal.ndim else self.n_outputs * self.n_features
        return self._sums[1] + n_own * self.diagonal.log().sum() + self._spectrum[0].log().sum()

    # -- covariances ---------------------------------------------------------------------------------------------------

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        if isinstance(coordinates, OutputLayerGradients) and coordinates.is_shared:
            result = self._of_outputs(coordinates.features, coordinates.outputs, mode, coordinates.centre)
        elif mode == "joint":
            result = self._of_matrices(coordinates.dense(slice(0, coordinates.n_examples)), mode)
        else:
            result = torch.cat([self._of_matrices(values, mode) for _, values in coordinates.chunks()])
        return result.to(coordinates.dtype)

    def _of_outputs(self, features: Tensor, outputs: Tensor, mode: str, centre: Tensor | None = None) -> Tensor:
        """Covariances of chosen outputs ``[V]`` at features ``[B, i]``; distinct outputs are uncorrelated a priori.

        With weights ``centre [B, C]``, variances of all outputs less their weighted mean.
        """
        features = features.double()
        priors, whites = [], []
        for part in outputs.split(next(self._slices()).stop):
            scaled = self._over(features, part)  # [(v,) B, i]
            keys = scaled @ self._features.T  # [(v,) B, N]
            pulled = keys @ self._inverses(part)  # [v, B, N]
            if mode == "joint":
                priors.append(scaled @ features.T - pulled @ keys.mT)
            else:
                priors.append((scaled * features).sum(-1) - (pulled * keys).sum(-1))
            white = pulled @ self._coupling
            whites.append(white.square().sum(-1) if mode == "diagonal" and centre is None else white)
        own, shared = torch.cat(priors), torch.cat(whites)  # [V, B], joint [V, B, B], and [V, B, N]
        if centre is not None:
            w = centre.T.double()  # [C, B]
            shared = (shared - (w[..., None] * shared).sum(0)).square().sum(-1)
            own = own * (1 - 2 * w) + (w.square() * own).sum(0)
        if mode == "diagonal":
            return (own + shared).clamp(min=0).T
        same, shared = (outputs[:, None] == outputs).to(own.dtype), shared.transpose(0, 1)
        if mode == "full":
            return own.T[:, :, None] * same + shared @ shared.mT
        result = own.permute(1, 0, 2)[..., None] * same[:, None]  # [B, V, B, V]
        return result + (shared.flatten(0, 1) @ shared.flatten(0, 1).T).view_as(result)

    def _of_matrices(self, values: Tensor, mode: str) -> Tensor:
        """Covariances of any linear functions ``[V, b, 1, C, i]`` of the weights."""
        v, b = values.shape[:2]
        matrices = values[:, :, 0].flatten(0, 1).double()  # [Vb, C, i]
        prior = matrices / self.diagonal
        total = torch.einsum("xci,yci->xy", prior, matrices)
        pulled = total.new_zeros(v * b, self.n_rows)
        for classes in self._slices():
            keys = prior[:, classes].transpose(0, 1) @ self._features.T  # [c, Vb, N]
            products = keys @ self._inverses(classes)
            total -= torch.einsum("cxn,cyn->xy", products, keys)
            pulled += products.sum(0)
        white = pulled @ self._coupling
        whole = (total + white @ white.T).view(v, b, v, b)
        if mode == "joint":
            return whole.permute(1, 0, 3, 2)
        each = whole.diagonal(dim1=1, dim2=3)  # [V, V, b]
        return each.diagonal(dim1=0, dim2=1) if mode == "diagonal" else each.permute(2, 0, 1)

    # -- samples and variances of the weights --------------------------------------------------------------------------

    @override
    def sample(self, noise: Tensor) -> Tensor:
        """Draws from N(0, M⁻¹).

        ``D^-½ (I − Xᵀ L⁻ᵀ (L + I)⁻¹ X)`` with ``X = (w P_c)^½ Φ D_c^-½`` and ``L Lᵀ = I + X Xᵀ`` is a root of a block's
        inverse (Andrews, 1968), and the part of low rank follows from K's eigenvectors.
        """
        result = noise[:, 0].double() * self.diagonal.rsqrt()  # [n, C, i]
        drawn = result.new_zeros(len(result), self.n_rows)
        for classes in self._slices():
            lower, root = self._roots(classes)
            keys = root * (self._features @ result[:, classes].permute(1, 2, 0))  # X ε, [c, N, n]
            unit = torch.eye(self.n_rows, dtype=lower.dtype, device=lower.device)
            inner = torch.linalg.solve_triangular(lower + unit, keys, upper=False)
            inner = torch.linalg.solve_triangular(lower.mT, inner, upper=True)
            result[:, classes] -= ((root * inner).mT @ self._over(self._features, classes)).transpose(0, 1)  # [n, c, i]
            drawn += (result[:, classes] @ self._features.T * self.rows.scales[:, classes].double().T).sum(1)
        if self.rows.coupled:
            values, vectors = self._spectrum
            mixed = (drawn @ vectors) / (values.sqrt() * (1 + values.sqrt())) @ vectors.mT  # [n, N]
            for classes in self._slices():
                scaled = self._over(self._features, classes)
                result[:, classes] += (mixed @ self._inverses(classes) @ scaled).transpose(0, 1)
        return result[:, None].to(noise.dtype)

    @override
    def variances(self) -> Tensor:
        return self.wide_variances()[None].to(self.rows.features.dtype)

    def wide_variances(self) -> Tensor:
        """The diagonal of ``M⁻¹``, ``[C, i]`` float64."""
        parts = []
        for classes in self._slices():
            scaled = self._over(self._features, classes)
            products = self._inverses(classes) @ scaled  # [c, N, i]
            parts.append((self._coupling.mT @ products).square().sum(1) - (products * scaled).sum(1))
        return (self.diagonal.reciprocal() + torch.cat(parts)).clamp(min=0)


def _inverse(lower: Tensor, scale: Tensor) -> Tensor:
    """``E_c = P_c^½ (L Lᵀ)⁻¹ P_c^½ [c, N, N]``, whose rows lie together."""
    return torch.cholesky_inverse(lower).mT.mul_(scale).mul_(scale.mT)


@register_block
class SoftmaxOutputBlock(Block):
    """``H = Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ``, exactly, or without the outer products ``p pᵀ``.

    With few rows N, features and probabilities say everything about it. They take ``N·(C + i)`` numbers, and
    :class:`SoftmaxOutputFactor` inverts it through C matrices of N × N. Where a matrix of ``C·i`` takes less time, the
    block turns into a dense one.

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
        return self._dense.kind if self._dense is not None else f"dense, from {len(self.rows.features)} rows of data"

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
        """Turn dense where a tuning takes longer by rows, which are decomposed anew for each precision."""
        if sum(len(piece.features) for piece in self._pieces) > self.shape[1] ** (2 / 3) * self.shape[2] / _EVALUATIONS:
            self._dense, self._pieces = self._as_dense(), []

    def _as_dense(self) -> DenseBlock:
        if self._dense is not None:
            return self._dense
        return DenseBlock(self.rows.dense()[None, None], self.shape)

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if self._dense is not None:
            return self._dense.factor(weights, diagonal)
        return SoftmaxOutputFactor(self.rows, weights[0], diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense.log_determinant(weights, diagonal)
        factor = SoftmaxOutputFactor(self.rows, weights[0], diagonal)
        value = factor.log_determinant()
        if not (weights.requires_grad or diagonal.requires_grad):
            return value
        # Its derivatives are the diagonal of M⁻¹ and tr M⁻¹ H, where tr M⁻¹ (w H + D) = C i.
        variances = factor.wide_variances()[None]
        rest = (variances.numel() - (variances * diagonal.detach()).sum()) / weights[0].detach()
        value = value + (variances * (diagonal - diagonal.detach())).sum()
        return value + rest * (weights[0] - weights[0].detach())

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
