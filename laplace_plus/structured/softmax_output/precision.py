"""The precision of a linear output layer with many outputs: block-diagonal minus a matrix of low rank.

With features ``φ_n ∈ R^i`` and output Hessians ``diag p_n − p_n p_nᵀ`` (softmax), the curvature of the layer is

    H = Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ = blockdiag_c(Φᵀ P_c Φ) − U Uᵀ,   U_n = p_n ⊗ φ_n,

with ``P_c = diag_n(p_nc)``. So ``H + D`` is inverted by Woodbury's identity from C matrices of N × N and one more,
and never takes ``(C·i)²`` numbers. With ``G_c = Φ D_c⁻¹ Φᵀ``, ``S_c = P_c^½ G_c P_c^½`` and

    T_c = (I + S_c)⁻¹,   E_c = (G_c + P_c⁻¹)⁻¹ = P_c^½ T_c P_c^½,   K = Σ_c E_c,

the matrix that Woodbury's identity inverts is K, a sum of positive semi-definite terms without any cancellation, and

    log det (H + D) = Σ_c [log det D_c + log det (I + S_c)] + log det K,
    φᵀ [(H + D)⁻¹]_cc' φ' = δ_cc' φᵀ (D_c⁻¹ − D_c⁻¹ Φᵀ E_c Φ D_c⁻¹) φ' + (E_c k_c)ᵀ K⁻¹ (E_c' k'_c'),   k_c = Φ D_c⁻¹ φ.

These are the formulas of Laplace's method for Gaussian process classification with a linear kernel (Williams and
Barber, 1998; Rasmussen and Williams, 2006, section 3.5). Without ``p pᵀ`` (many binary outputs) only the blocks remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.kernels import symmetric_eigen, symmetric_update, symmetrize_
from laplace_plus.structured.blocks import Factor, IdentityBasis
from laplace_plus.structured.chunks import MIB, limit, slices
from laplace_plus.structured.dense import clamp_rounding
from laplace_plus.structured.gradients import ExampleGradients, OutputLayerGradients
from laplace_plus.structured.log_determinants import require_positive

_BYTES = 8
"""Everything is computed in float64: under tuned priors ``I + S_c`` of trained networks is too ill-conditioned for
float32. Its condition number is 3400 for a ResNet-18 with 1000 classes."""

_CACHES = 4 * MIB
"""Bytes of N × N matrices that are worked on at a time; larger chunks leave a processor's caches."""

_KEPT = 2**30
"""Bytes of the classes' matrices that are kept for predictions; larger ones are computed whenever they are used."""


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
        own = self.scales * self._rest() if self.coupled else self.scales
        for c in range(size):
            last = size if self.coupled else c + 1
            row = self.scales[:, c:last] * (-self.scales[:, c : c + 1] if self.coupled else 0)
            row[:, 0] = own[:, c]
            weighted = (row[:, :, None] * self.features[:, None]).flatten(1)  # [N, (C − c)·i]
            block = (self.features.T @ weighted).view(width, last - c, width)
            result[c, :, c:last] = block
            result[c:last, :, c] = block.permute(1, 2, 0)
        return result.view(size * width, size * width)

    def _rest(self) -> Tensor:
        """``1 − p [N, C]``; for the most probable class the sum of all others, which keeps its digits beside one."""
        top = self.scales.argmax(1, keepdim=True)
        others = self.scales.scatter(1, top, 0.0).sum(1, keepdim=True)
        return (1 - self.scales).scatter(1, top, others)


class _Totals(NamedTuple):
    """Float64 sums over classes: K, ``Σ log det (I + S_c)``, ``Σ tr T_c``, and if wanted ``Σ P_c^½ T_c² P_c^½``."""

    matrix: Tensor
    log_determinant: Tensor
    trace: Tensor
    squares: Tensor


class SoftmaxOutputFactor(Factor):
    """``M = w H + D`` for an output layer's curvature H, inverted by Woodbury's identity.

    Args:
        rows: The data rows that H is made of.
        weight: w, 0-d.
        diagonal: D, 0-d or ``[1, C, i]``.
        derivatives: Whether :meth:`trace_of_inverse` will be asked for.

    Raises:
        NotPositiveDefiniteError: An entry of D is zero, negative or NaN.
    """

    def __init__(self, rows: SoftmaxOutputRows, weight: Tensor, diagonal: Tensor, *, derivatives: bool = False):
        require_positive(diagonal)
        self.basis = IdentityBasis()  # everything is computed from features
        self.rows, self.weight, self.derivatives = rows, weight.detach().double(), derivatives
        self.diagonal = (diagonal[0] if diagonal.ndim else diagonal).detach().double()
        self.n_rows, self.n_outputs = rows.scales.shape
        self.n_features = rows.features.shape[1]
        self._features = rows.features.double()
        self._kept: Tensor | None = None
        self._packed: Tensor | None = None

    # -- the matrices of each class ------------------------------------------------------------------------------------

    def _scaled(self, classes: Any) -> Tensor:
        """``Φ D_c⁻¹`` for some classes, ``[c, N, i]``, or ``[N, i]`` where they are all alike."""
        return self._features / (self.diagonal[classes][:, None] if self.diagonal.ndim else self.diagonal)

    @cached_property
    def _gram(self) -> Tensor:
        """``Φ D⁻¹ Φᵀ [N, N]``, where all classes share it."""
        return self._scaled(None) @ self._features.T

    def _roots(self, classes: Any) -> tuple[Tensor, Tensor]:
        """A root L of ``I + S_c = L Lᵀ [c, N, N]``, triangular, and ``(w P_c)^½ [c, N, 1]``."""
        scale = (self.weight * self.rows.scales[:, classes].double()).sqrt().T[:, :, None]
        gram = self._scaled(classes) @ self._features.T if self.diagonal.ndim else self._gram
        shifted = (gram * scale).mul_(scale.mT)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        lower, failed = torch.linalg.cholesky_ex(shifted.mT)  # columns lie together, as LAPACK has them
        if failed.any():  # rounding has made S_c indefinite
            wrong = failed.nonzero().squeeze(-1)
            values, vectors = symmetric_eigen(shifted[wrong])
            values = clamp_rounding(values - 1).clamp(min=0) + 1
            root = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
            # The triangular root is a factor of the QR decomposition of the symmetric one.
            upper = torch.linalg.qr(root, mode="r").R
            lower[wrong] = (upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None]).mT
        return lower, scale

    def _slices(self) -> Iterator[slice]:
        width = max(self.n_rows, self.n_features) if self.diagonal.ndim else self.n_rows
        return slices(self.n_outputs, _BYTES * self.n_rows * width, _CACHES)

    def _affords(self, numbers: int) -> bool:
        """Whether so many numbers for each class may be kept."""
        return self.n_outputs * numbers * _BYTES <= _KEPT

    @cached_property
    def _totals(self) -> _Totals:
        """One pass over the classes, whose ``E_c`` are kept where they fit into :data:`_KEPT`."""
        total = self._features.new_zeros(self.n_rows, self.n_rows)
        log_determinant, trace, squares = total.new_zeros(()), total.new_zeros(()), torch.zeros_like(total)
        kept = None  # for other threads only once it is filled
        if not self.derivatives and self._affords(self.n_rows**2):
            kept = total.new_empty(self.n_outputs, self.n_rows, self.n_rows)
        for classes in self._slices():
            lower, scale = self._roots(classes)
            inverse = torch.cholesky_inverse(lower).mT  # T_c, whose rows lie together
            if self.derivatives:
                symmetric_update(squares, (inverse * scale.mT).flatten(0, 1))
            trace += inverse.diagonal(dim1=-2, dim2=-1).sum()
            log_determinant += _log_determinant(lower)
            inverse.mul_(scale).mul_(scale.mT)
            total += inverse.sum(0)
            if kept is not None:
                kept[classes] = inverse
        self._kept = kept
        symmetrize_(squares)
        return _Totals(total, log_determinant, trace, squares)

    def _inverses(self, classes: Any) -> Tensor:
        """``E_c [c, N, N]`` of some classes."""
        if self._kept is not None:
            return self._kept[classes]
        lower, scale = self._roots(classes)
        return torch.cholesky_inverse(lower).mT.mul_(scale).mul_(scale.mT)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[N]`` of ``K / w``, at most one, infinite for those of zero, and eigenvectors, float64."""
        values, vectors = symmetric_eigen(self._totals.matrix / self.weight)
        values = clamp_rounding(values)
        return torch.where(values > 0, values, torch.inf), vectors

    @cached_property
    def _coupling(self) -> tuple[Tensor, Tensor]:
        """``log det (K / w)`` and ``R [N, N]`` with ``R Rᵀ = K⁻¹``; zero and no columns without ``p pᵀ``."""
        if not self.rows.coupled:
            return self.weight.new_zeros(()), self._features.new_zeros(self.n_rows, 0)
        lower, failed = torch.linalg.cholesky_ex(self._totals.matrix / self.weight)
        if failed:
            values, vectors = self._spectrum
            return values[values.isfinite()].log().sum(), vectors * (self.weight * values).rsqrt()
        identity = torch.eye(self.n_rows, dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower, identity, upper=False).mT
        return _log_determinant(lower), root / self.weight.sqrt()

    # -- determinants --------------------------------------------------------------------------------------------------

    @override
    def log_determinant(self) -> Tensor:
        n_own = 1 if self.diagonal.ndim else self.n_outputs * self.n_features
        return self._totals.log_determinant + n_own * self.diagonal.log().sum() + self._coupling[0]

    def trace_of_inverse(self) -> Tensor:
        """``tr M⁻¹`` for a diagonal D that is one number, 0-d float64; needs ``derivatives``."""
        totals, white = self._totals, self._coupling[1]
        own = self.n_outputs * (self.n_features - self.n_rows) + totals.trace
        # E_c G E_c = E_c − (w P_c)^½ T_c² (w P_c)^½, and the rest is tr K⁻¹ Σ_c E_c G E_c.
        return (own + (white * ((totals.matrix - totals.squares) @ white)).sum()) / self.diagonal

    # -- covariances ---------------------------------------------------------------------------------------------------

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        _ = self._totals  # keeps the inverses where they fit
        if isinstance(coordinates, OutputLayerGradients) and coordinates.is_shared:
            result = self._of_outputs(coordinates.features, coordinates.outputs, mode, coordinates.centre)
        elif isinstance(coordinates, OutputLayerGradients) and mode != "joint" and coordinates.centre is None:
            examples = zip(coordinates.features[:, None], coordinates.outputs, strict=True)
            result = torch.cat([self._of_outputs(features, outputs, mode) for features, outputs in examples])
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
        if mode == "diagonal" and centre is None and len(outputs) == self.n_outputs and self._prepares:
            return self._all_variances(features)[:, outputs]
        priors, whites = [], []
        for part in outputs.split(next(self._slices()).stop):
            # A slice of the inverses is no copy.
            chosen: Any = slice(int(part[0]), int(part[-1]) + 1) if bool((part.diff() == 1).all()) else part
            scaled = features / (self.diagonal[chosen][:, None] if self.diagonal.ndim else self.diagonal)  # [(v,) B, i]
            keys = scaled @ self._features.T  # [(v,) B, N]
            pulled = keys @ self._inverses(chosen)  # [v, B, N]
            if mode == "joint":
                priors.append(scaled @ features.T - pulled @ keys.mT)
            else:
                priors.append((scaled * features).sum(-1) - (pulled * keys).sum(-1))
            white = pulled @ self._coupling[1]
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

    @property
    def _prepares(self) -> bool:
        """Whether :meth:`_all_variances` is possible: it takes a quarter of the time, once it is prepared."""
        return self.diagonal.ndim == 0 and self._affords(self.n_rows * (self.n_rows + 1) // 2)

    def _all_variances(self, features: Tensor) -> Tensor:
        """Variances of all outputs at features ``[B, i]``, ``[B, C]``, as one matrix product over pairs of rows.

        With one precision δ: ``φᵀφ/δ − kᵀ M_c k``, ``k = Φ φ / δ``, and half of symmetric ``M_c = E_c − E_c K⁻¹ E_c``.
        """
        s, t = torch.tril_indices(self.n_rows, self.n_rows, device=features.device)
        if self._packed is None:
            packed = features.new_empty(self.n_outputs, len(s))
            for classes in self._slices():
                matrices = self._inverses(classes)
                half = matrices @ self._coupling[1]
                both = torch.baddbmm(matrices, half, half.mT, alpha=-1).flatten(1)
                torch.index_select(both, 1, s * self.n_rows + t, out=packed[classes])
            self._packed = packed
        keys = self._features @ features.T / self.diagonal  # [N, B]: pairs of rows lie together
        prior = features.square().sum(1) / self.diagonal
        twice = torch.where(s == t, 1.0, 2.0).double()[:, None]
        cuts = slices(len(features), len(s) * _BYTES, limit(keys.device, 64))
        taken = [self._packed @ (keys[s, cut] * keys[t, cut]).mul_(twice) for cut in cuts]
        return (prior - torch.cat(taken, 1)).clamp(min=0).T

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
        white = pulled @ self._coupling[1]
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
            result[:, classes] -= ((root * inner).mT @ self._scaled(classes)).transpose(0, 1)  # [n, c, i]
            drawn += (result[:, classes] @ self._features.T * self.rows.scales[:, classes].double().T).sum(1)
        if self.rows.coupled:
            values, vectors = self._spectrum
            mixed = (drawn @ vectors) / (values.sqrt() * (1 + values.sqrt())) @ vectors.mT  # [n, N]
            for classes in self._slices():
                result[:, classes] += (mixed @ self._inverses(classes) @ self._scaled(classes)).transpose(0, 1)
        return result[:, None].to(noise.dtype)

    @override
    def variances(self) -> Tensor:
        parts = []
        _ = self._totals
        for classes in self._slices():
            scaled = self._scaled(classes)
            products = self._inverses(classes) @ scaled  # [c, N, i]
            parts.append((self._coupling[1].mT @ products).square().sum(1) - (products * scaled).sum(1))
        result = self.diagonal.reciprocal() + torch.cat(parts)
        return result.clamp(min=0)[None].to(self.rows.features.dtype)


def _log_determinant(lower: Tensor) -> Tensor:
    """``Σ log det L Lᵀ`` of triangular matrices, 0-d float64."""
    return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()
