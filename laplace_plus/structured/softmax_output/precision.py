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

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import _memory
from laplace_plus._memory import chunk_bytes, slices
from laplace_plus.kernels import symmetric_eigen, symmetric_update, symmetrize_
from laplace_plus.structured.blocks import Factor, IdentityBasis
from laplace_plus.structured.dense import clamp_rounding
from laplace_plus.structured.gradients import ExampleGradients, OuterGradients, OutputLayerGradients
from laplace_plus.structured.log_determinants import not_positive_definite

_BYTES = 8
"""Everything is computed in float64: under tuned priors ``I + S_c`` of trained networks is too ill-conditioned for
float32. Its condition number is 3400 for a ResNet-18 with 1000 classes."""

CACHE_BYTES = 4 * 2**20
"""Bytes of N × N matrices that are worked on at a time; larger chunks leave a processor's caches."""


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


@dataclass(frozen=True)
class _Inverses:
    """For some classes c: ``E_c`` and what comes with it.

    Attributes:
        classes: Which.
        matrices: ``E_c [c, N, N]``.
        log_determinant: ``Σ_c log det (I + S_c)``, 0-d float64.
        trace: ``Σ_c tr T_c``, 0-d float64.
        squares: ``Σ_c P_c^½ T_c² P_c^½ [N, N]``, where derivatives are wanted; its lower triangle.
    """

    classes: slice
    matrices: Tensor
    log_determinant: Tensor
    trace: Tensor
    squares: Tensor | None


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

    def __init__(
        self,
        rows: SoftmaxOutputRows,
        weight: Tensor,
        diagonal: Tensor,
        *,
        derivatives: bool = False,
    ):
        smallest = diagonal.detach().min()
        if not smallest > 0:
            raise not_positive_definite(smallest.item())
        self.basis = IdentityBasis()  # everything is computed from features
        self.rows, self.weight = rows, weight.detach().double()
        self.diagonal = (diagonal[0] if diagonal.ndim else diagonal).detach().double()
        self.n_rows, self.n_outputs = rows.scales.shape
        self.n_features = rows.features.shape[1]
        self.derivatives = derivatives
        self._kept: list[_Inverses] | None = None
        self._packed: Tensor | None = None
        self._n_asked = 0

    # -- the matrices of each class ------------------------------------------------------------------------------------

    @cached_property
    def _features(self) -> Tensor:
        return self.rows.features.double()

    def _own(self, classes: slice) -> Tensor:
        """D of some classes, 0-d or ``[c, i]``."""
        return self.diagonal[classes] if self.diagonal.ndim else self.diagonal

    def _scaled(self, classes: slice) -> Tensor:
        """``Φ D_c⁻¹`` for some classes, ``[c, N, i]`` (or ``[1, N, i]`` where they are all alike)."""
        inverse = self._own(classes).reciprocal()
        return self._features[None] * (inverse[:, None] if inverse.ndim else inverse)

    @cached_property
    def _gram(self) -> Tensor | None:
        """``Φ D⁻¹ Φᵀ [1, N, N]``, where all classes share it."""
        return None if self.diagonal.ndim else self._scaled(slice(0, 1)) @ self._features.T

    def _roots(self, classes: slice) -> tuple[Tensor, Tensor]:
        """A root L of ``I + S_c = L Lᵀ [c, N, N]``, triangular, and ``(w P_c)^½ [c, N, 1]``."""
        scale = (self.weight * self.rows.scales[:, classes].double()).sqrt().T[:, :, None]
        gram = self._scaled(classes) @ self._features.T if self._gram is None else self._gram
        shifted = gram * scale * scale.mT
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        lower, failed = torch.linalg.cholesky_ex(shifted)
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
        ceiling = min(CACHE_BYTES, _memory.budget(self._features.device) // 8)
        width = max(self.n_rows, self.n_features) if self.diagonal.ndim else self.n_rows
        return slices(self.n_outputs, _BYTES * self.n_rows * width, ceiling)

    def _invert(self, classes: slice) -> _Inverses:
        lower, scale = self._roots(classes)
        inverse = torch.cholesky_inverse(lower)  # T_c
        squares = None
        if self.derivatives:
            squares = symmetric_update(inverse.new_zeros(inverse.shape[1:]), (inverse * scale.mT).flatten(0, 1))
        trace = inverse.diagonal(dim1=-2, dim2=-1).sum()
        return _Inverses(classes, inverse * scale * scale.mT, _log_determinant(lower), trace, squares)

    def inverses(self) -> Iterator[_Inverses]:
        """``E_c`` of all classes, some at a time; kept where they fit into the memory budget."""
        if self._kept is not None:
            yield from self._kept
            return
        size = self.n_outputs * self.n_rows**2 * _BYTES
        fits = not self.derivatives and size <= _memory.budget(self._features.device) // 2
        kept: list[_Inverses] | None = [] if fits else None
        for classes in self._slices():
            found = self._invert(classes)
            if kept is not None:
                kept.append(found)
            yield found
        self._kept = kept

    @cached_property
    def _totals(self) -> _Inverses:
        """The sums over all classes, with K ``[N, N]`` in place of its terms, float64."""
        total = torch.zeros(self.n_rows, self.n_rows, dtype=torch.float64, device=self._features.device)
        log_determinant, trace, squares = total.new_zeros(()), total.new_zeros(()), torch.zeros_like(total)
        for own in self.inverses():
            total += own.matrices.sum(0)
            log_determinant += own.log_determinant
            trace += own.trace
            if own.squares is not None:
                squares += own.squares
        symmetrize_(squares)
        return _Inverses(slice(0, self.n_outputs), total, log_determinant, trace, squares)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[N]`` of ``K / w``, at most one, and eigenvectors, float64."""
        values, vectors = symmetric_eigen(self._totals.matrices / self.weight)
        return clamp_rounding(values), vectors

    @cached_property
    def _whitener(self) -> Tensor | None:
        """``R [N, N]`` with ``R Rᵀ = K⁻¹``; None without ``p pᵀ``."""
        if not self.rows.coupled:
            return None
        lower, failed = torch.linalg.cholesky_ex(self._totals.matrices)
        if not failed:
            identity = torch.eye(self.n_rows, dtype=lower.dtype, device=lower.device)
            return torch.linalg.solve_triangular(lower, identity, upper=False).mT
        values, vectors = self._spectrum
        kept = torch.where(values > 0, values, torch.inf)
        return vectors * (self.weight * kept).rsqrt()

    # -- determinants --------------------------------------------------------------------------------------------------

    @override
    def log_determinant(self) -> Tensor:
        n_own = 1 if self.diagonal.ndim else self.n_outputs * self.n_features
        own = self._totals.log_determinant + n_own * self.diagonal.log().sum()
        if not self.rows.coupled:
            return own
        lower, failed = torch.linalg.cholesky_ex(self._totals.matrices / self.weight)
        if failed:
            values = self._spectrum[0]
            return own + torch.where(values > 0, values, 1.0).log().sum()
        return own + _log_determinant(lower)

    def trace_of_inverse(self) -> Tensor:
        """``tr M⁻¹`` for a diagonal D that is one number, 0-d float64; needs ``derivatives``."""
        totals, white = self._totals, self._whitener
        own = self.n_outputs * (self.n_features - self.n_rows) + totals.trace
        if white is not None:
            # E_c G E_c = E_c − (w P_c)^½ T_c² (w P_c)^½, and the rest is tr K⁻¹ Σ_c E_c G E_c.
            assert totals.squares is not None
            own = own + (white * ((totals.matrices - totals.squares) @ white)).sum()
        return own / self.diagonal

    # -- covariances ---------------------------------------------------------------------------------------------------

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        gradients = coordinates
        if isinstance(gradients, OuterGradients):
            gradients = OutputLayerGradients.of(gradients) or gradients
        if isinstance(gradients, OutputLayerGradients) and gradients.is_shared:
            return self._of_outputs(gradients.features, gradients.outputs, mode).to(gradients.dtype)
        if mode == "joint":
            return self._of_matrices(gradients.dense(slice(0, gradients.n_examples)), mode).to(gradients.dtype)
        if isinstance(gradients, OutputLayerGradients):
            examples = zip(gradients.features[:, None], gradients.outputs, strict=True)
            results = [self._of_outputs(features, outputs, mode) for features, outputs in examples]
        else:
            results = [self._of_matrices(values, mode) for _, values in gradients.chunks()]
        return torch.cat(results).to(gradients.dtype)

    def _of_outputs(self, features: Tensor, outputs: Tensor, mode: str) -> Tensor:
        """Covariances of chosen outputs ``[V]`` at features ``[B, i]``; distinct outputs are uncorrelated a priori."""
        features = features.double()
        if mode == "diagonal" and self._is_complete(outputs) and self._prepares(len(features)):
            return self._all_variances(features)
        own, shared = [], []
        for inverse, columns in self._chosen(outputs):
            quadratic, pulled = self._pull(features, outputs[columns], inverse, joint=mode == "joint")
            own.append(quadratic)
            if self._whitener is not None:
                white = (pulled.flatten(0, 1) @ self._whitener).unflatten(0, pulled.shape[:2])  # [v, B, N]
                shared.append(white.square().sum(-1) if mode == "diagonal" else white)
        values = torch.cat(own)  # [V, B], joint [V, B, B]
        if mode == "diagonal":
            return (values + torch.cat(shared) if shared else values).clamp(min=0).T
        same = (outputs[:, None] == outputs).to(values.dtype)
        if mode == "joint":
            result = values.permute(1, 0, 2)[..., None] * same[:, None]  # [B, V, B, V]
            if shared:
                white = torch.cat(shared).transpose(0, 1).flatten(0, 1)
                result = result + (white @ white.T).view_as(result)
            return result
        result = values.T[:, :, None] * same
        if shared:
            white = torch.cat(shared).transpose(0, 1)  # [B, V, N]
            result = result + white @ white.mT
        return result

    def _is_complete(self, outputs: Tensor) -> bool:
        """Whether all outputs are chosen, in their order."""
        return len(outputs) == self.n_outputs and bool((outputs[1:] > outputs[:-1]).all())

    def _prepares(self, n_examples: int) -> bool:
        """Whether so many examples have been asked for that :meth:`_all_variances` pays off, and memory allows it.

        Its preparation costs as much as about N examples cost without.
        """
        if self._packed is not None or self.diagonal.ndim:
            return self._packed is not None
        self._n_asked += n_examples
        size = self.n_outputs * self.n_rows * (self.n_rows + 1) // 2 * _BYTES
        return 4 * self._n_asked >= self.n_rows and size <= _memory.budget(self._features.device) // 2

    def _all_variances(self, features: Tensor) -> Tensor:
        """Variances of all outputs at features ``[B, i]``, ``[B, C]``, as one matrix product over pairs of rows.

        With one precision δ they are ``φᵀφ/δ − kᵀ M_c k`` for ``k = Φ φ / δ`` and ``M_c = E_c − E_c K⁻¹ E_c``. Of the
        pairs (m, n) and (n, m) of a symmetric matrix one is enough: half the memory and operations of ``M_c k``.
        """
        s, t = torch.tril_indices(self.n_rows, self.n_rows, device=features.device)
        if self._packed is None:
            white = self._whitener
            twice = torch.where(s == t, 1.0, 2.0).double()
            self._packed = features.new_empty(self.n_outputs, len(s))
            for own in self.inverses():
                matrices = own.matrices
                if white is not None:
                    half = matrices @ white
                    matrices = torch.baddbmm(matrices, half, half.mT, alpha=-1)
                self._packed[own.classes] = matrices[:, s, t] * twice
        delta = self.diagonal
        keys = features @ self._features.T / delta
        prior = features.square().sum(1, keepdim=True) / delta
        cuts = slices(len(keys), len(s) * _BYTES, chunk_bytes(keys.device, of_caches=64))
        taken = [(keys[cut][:, s] * keys[cut][:, t]) @ self._packed.T for cut in cuts]
        return (prior - torch.cat(taken)).clamp(min=0)

    def _chosen(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """``E_c [v, N, N]`` of chosen outputs, some at a time and in their order, with their places in ``outputs``."""
        _ = self._whitener  # computes the inverses, and keeps them where memory allows it
        if self._is_complete(outputs):
            for own in self.inverses():
                yield own.matrices, own.classes
            return
        step = next(self._slices()).stop
        for start in range(0, len(outputs), step):
            columns = slice(start, start + step)
            yield torch.stack([self._one(int(c)) for c in outputs[columns]]), columns

    def _one(self, c: int) -> Tensor:
        """``E_c [N, N]`` of one class."""
        if self._kept is None:
            return self._invert(slice(c, c + 1)).matrices[0]
        width = self._kept[0].classes.stop
        return self._kept[c // width].matrices[c % width]

    def _pull(self, features: Tensor, outputs: Tensor, inverse: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        """``φᵀ (Φᵀ w P_c Φ + D_c)⁻¹ φ'`` of chosen outputs, ``[v, B(, B)]``, and ``E_c k_c [v, B, N]``."""
        reciprocal = self.diagonal.reciprocal()
        scaled = features * (reciprocal[outputs][:, None] if reciprocal.ndim else reciprocal)  # [(v,) B, i]
        keys = scaled @ self._features.T  # [(v,) B, N]
        pulled = keys @ inverse
        if joint:
            return scaled @ features.T - pulled @ keys.mT, pulled
        return (scaled * features).sum(-1) - (pulled * keys).sum(-1), pulled

    def _of_matrices(self, values: Tensor, mode: str) -> Tensor:
        """Covariances of any linear functions ``[V, b, 1, C, i]`` of the weights."""
        v, b = values.shape[:2]
        matrices = values[:, :, 0].flatten(0, 1).double()  # [Vb, C, i]
        prior = matrices * self.diagonal.reciprocal()
        total = torch.einsum("xci,yci->xy", prior, matrices)
        pulled = total.new_zeros(v * b, self.n_rows)
        _ = self._whitener
        for own in self.inverses():
            keys = prior[:, own.classes].transpose(0, 1) @ self._features.T  # [c, Vb, N]
            products = keys @ own.matrices
            total -= torch.einsum("cxn,cyn->xy", products, keys)
            pulled += products.sum(0)
        if self._whitener is not None:
            white = pulled @ self._whitener
            total = total + white @ white.T
        whole = total.view(v, b, v, b)
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
        flat = noise[:, 0].double()  # [n, C, i]
        deviation = self.diagonal.rsqrt()
        result = flat * deviation
        drawn = result.new_zeros(len(flat), self.n_rows)
        for classes in self._slices():
            lower, root = self._roots(classes)
            keys = root * (self._features @ result[:, classes].permute(1, 2, 0))  # X ε, [c, N, n]
            unit = torch.eye(self.n_rows, dtype=lower.dtype, device=lower.device)
            inner = torch.linalg.solve_triangular(lower + unit, keys, upper=False)
            inner = torch.linalg.solve_triangular(lower.mT, inner, upper=True)
            back = ((root * inner).mT @ self._features).transpose(0, 1)  # [n, c, i]
            result[:, classes] -= back / self._own(classes)
            scales = self.rows.scales[:, classes].double()
            drawn += (result[:, classes] @ self._features.T * scales.T).sum(1)
        if not self.rows.coupled:
            return result[:, None].to(noise.dtype)
        values, vectors = self._spectrum
        root_value = torch.where(values > 0, values, torch.inf).sqrt()
        gain = 1 / (root_value * (1 + root_value))
        mixed = (drawn @ vectors) * gain @ vectors.mT  # [s, N]
        for own in self.inverses():
            back = ((mixed @ own.matrices) @ self._features).transpose(0, 1)  # [s, c, i]
            result[:, own.classes] += back / self._own(own.classes)
        return result[:, None].to(noise.dtype)

    @override
    def variances(self) -> Tensor:
        result = torch.empty(self.n_outputs, self.n_features, dtype=torch.float64, device=self._features.device)
        white = self._whitener
        for own in self.inverses():
            scaled = self._scaled(own.classes)
            products = own.matrices @ scaled  # [c, N, i]
            taken = (products * scaled).sum(1)
            if white is not None:
                taken = taken - (white.mT @ products).square().sum(1)
            result[own.classes] = self._own(own.classes).reciprocal() - taken
        return result.clamp(min=0)[None].to(self.rows.features.dtype)

    @override
    def covariance(self) -> Tensor:
        n = self.n_outputs * self.n_features
        identity = torch.eye(n, dtype=torch.float64, device=self._features.device)
        values = identity.view(n, 1, 1, self.n_outputs, self.n_features)
        return self._of_matrices(values, "full")[:1].to(self.rows.features.dtype)


def _log_determinant(lower: Tensor) -> Tensor:
    """``Σ log det L Lᵀ`` of triangular matrices, 0-d float64."""
    return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()
