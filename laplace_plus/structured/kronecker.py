"""Kronecker-factored blocks: with corrected eigenvalues (EKFAC), and with a diagonal output factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.blocks import Basis, Block, DecomposedBlock, EigenBlock, register_block
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    OuterGradients,
    OutputLayerGradients,
)
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, combine, restored, stored
from laplace_plus.structured.log_determinants import Spectrum, log_determinant


@dataclass(frozen=True)
class KroneckerBasis(Basis):
    """``R z = L z Nᵀ`` group by group, with orthogonal sides.

    Attributes:
        left: L ``[G, o, o]``, or None for the identity.
        right: N ``[G or 1, i, i]``, or None for the identity.
    """

    left: Tensor | None
    right: Tensor | None

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        left, right = self.left, self.right
        if left is None and isinstance(gradients, OuterGradients):
            gradients = OutputLayerGradients.of(gradients) or gradients
        if isinstance(gradients, OuterGradients) and right is not None:
            return gradients.in_basis(left, right)
        left = None if left is None else left.to(gradients.dtype)
        right = None if right is None else right.to(gradients.dtype)
        if isinstance(gradients, OutputLayerGradients) and right is not None:
            return gradients.in_basis(None if left is None else left[0], right[0])
        if isinstance(gradients, EmbeddingGradients) and left is not None and right is None:
            return EmbeddingGradients(
                gradients.index, gradients.left.to(gradients.dtype) @ left[0], gradients.n_columns
            )
        values = gradients.dense(slice(0, gradients.n_examples))
        values = values if left is None else left.mT @ values
        return DenseGradients(values if right is None else values @ right)

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        values = coordinates if self.left is None else self.left @ coordinates
        return values if self.right is None else values @ self.right.mT

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        values = variances if self.left is None else self.left.square() @ variances
        return values if self.right is None else values @ self.right.square().mT


def _product_spectrum(values: Tensor) -> Spectrum:
    """The spectrum of eigenvalues ``[G, o, i]`` that are an outer product in each group."""
    largest = values.amax()
    if len(values) > 1 or not bool(largest > 0):
        return Spectrum(values)
    # The two sides are the largest row and column.
    return Spectrum.of_products(values[0].amax(1).double(), values[0].amax(0).double() / largest.double())


@register_block
class KroneckerBlock(DecomposedBlock):
    """Kronecker products ``H_k = left_k ⊗ right / count``, group by group.

    With ``corrected`` the eigenvalues are those measured in the Kronecker eigenbasis instead (EKFAC, George et al.,
    2018), ``H_k = U diag(corrected_k) Uᵀ``.

    Args:
        left: ``[K, G, o, o]``, sums of ``g gᵀ``; or for each component the :class:`GramSum`.
        right: ``[G, i, i]``, sums of ``a aᵀ``, or the :class:`GramSum`; or ``[G, i]`` where that sum is diagonal (an
            embedding's).
        count: 0-d float64: the number of rows in ``right``'s sum.
        corrected: ``[K, G, o, i]`` or None.
        basis_weights: The weights at which the eigenbasis of ``corrected`` was fixed, ``[K]``.

    Attributes:
        corrected: The corrected eigenvalues, or None.
    """

    storage: ClassVar[str] = "Kronecker"

    def __init__(
        self,
        left: Tensor | Sequence[GramSum],
        right: Tensor | GramSum,
        count: Tensor,
        corrected: Tensor | None = None,
        basis_weights: Tensor | None = None,
    ):
        self.left_sums = [GramSum.of(own) for own in left] if isinstance(left, Tensor) else list(left)
        self.right_sum = right if isinstance(right, GramSum) or right.ndim == 2 else GramSum.of(right)
        self.count, self.corrected, self.basis_weights = count, corrected, basis_weights
        self.kind = "Kronecker" if corrected is None else "eigenvalue-corrected Kronecker"
        self.n_components = len(self.left_sums)
        first = self.left_sums[0]
        self.dtype = first.dtype
        columns = self.right_sum.shape[1] if isinstance(self.right_sum, Tensor) else self.right_sum.size
        self.shape = (first.groups, first.size, columns)

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> KroneckerBlock:
        right = GramSum.of_rows(tensors["right_rows"]) if "right_rows" in tensors else tensors["right"]
        corrected, weights = tensors.get("corrected"), tensors.get("basis_weights")
        block = cls(restored(tensors, "left"), right, tensors["count"], corrected, weights)
        if corrected is not None and weights is not None:
            # Corrected eigenvalues replace those of the factors, which were not saved.
            bases = [tensors[name] for name in ("left_vectors", "right_vectors") if name in tensors]
            block.adopt_eigen(weights, [EigenPairs(u.new_zeros(u.shape[:2]), u) for u in bases])
        return block

    @override
    def tensors(self) -> dict[str, Tensor]:
        result = stored(self.left_sums, "left") | {"count": self.count}
        if isinstance(self.right_sum, GramSum) and not self.right_sum.is_formed:
            result["right_rows"] = self.right_sum.rows()
        else:
            result["right"] = self.right
        if self.corrected is None or self.basis_weights is None:
            return result
        # Corrected eigenvalues belong to this very basis; another decomposition could give another order.
        result |= {"corrected": self.corrected, "basis_weights": self.basis_weights}
        for name, own in zip(
            ("left_vectors", "right_vectors"), self.diagonalised(self.basis_weights).pairs, strict=False
        ):
            result[name] = own.vectors
        return result

    @override
    def clone(self) -> KroneckerBlock:
        corrected = None if self.corrected is None else self.corrected.clone()
        left, right = [own.clone() for own in self.left_sums], self.right_sum.clone()
        result = KroneckerBlock(left, right, self.count.clone(), corrected, self.basis_weights)
        if corrected is not None:
            result._cache = self._cache  # corrected eigenvalues belong to this very basis
        return result

    @property
    def left(self) -> Tensor:
        """The sums of ``g gᵀ``, ``[K, G, o, o]``."""
        return torch.stack([own.dense() for own in self.left_sums])

    @property
    def right(self) -> Tensor:
        """The sum of ``a aᵀ``, ``[G, i, i]``, or ``[G, i]`` where it is diagonal."""
        return self.right_sum if isinstance(self.right_sum, Tensor) else self.right_sum.dense()

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, KroneckerBlock)
        if self.corrected is not None:  # the basis stays; what is measured in it comes by add_corrected_
            return
        for mine, theirs in zip(self.left_sums, other.left_sums, strict=True):
            mine.add_(theirs)
        if isinstance(self.right_sum, Tensor):
            self.right_sum += other.right
        else:
            assert isinstance(other.right_sum, GramSum)
            self.right_sum.add_(other.right_sum)
        self.count = self.count + other.count
        self.changed()

    def with_correction(self, weights: Tensor) -> KroneckerBlock:
        """The same factors with corrected eigenvalues of zero, measured from now on in the basis at ``weights``."""
        empty = torch.zeros(self.n_components, *self.shape, dtype=self.dtype, device=self.left_sums[0].device)
        return KroneckerBlock(self.left_sums, self.right_sum, self.count, empty, weights.detach().to(empty))

    def add_corrected_(self, squares: Tensor) -> None:
        """Add squared gradients ``[K, G, o, i]``, measured in :meth:`kronecker_basis`, to the corrected eigenvalues."""
        assert self.corrected is not None
        self.corrected += squares

    def correct_(self, gradients: ExampleGradients, components: Tensor) -> None:
        """Add the squares of gradients in :meth:`kronecker_basis` to the corrected eigenvalues.

        Args:
            gradients: Matrices ``[G, o, i]``.
            components: ``[V]``: the component that each cotangent belongs to.
        """
        assert self.corrected is not None
        coordinates = self.kronecker_basis().coordinates(gradients)
        for number, total in enumerate(self.corrected):
            own = coordinates
            if self.n_components > 1:
                own = coordinates.select((components == number).nonzero().squeeze(-1))
            if own.dtype == total.dtype:
                own.add_squares_(total)
            else:
                total += own.squares()

    def kronecker_basis(self) -> Basis:
        """The eigenbasis of the Kronecker factors, which is fixed where the eigenvalues are corrected."""
        assert self.basis_weights is not None
        return self.diagonalised(self.basis_weights).basis

    @override
    def key(self, weights: Tensor) -> Tensor | None:
        return super().key(weights) if self.basis_weights is None else self.basis_weights

    @override
    def factors(self, weights: Tensor) -> list[GramSum]:
        left = self.left_sums[0] if self.n_components == 1 else combine(self.left_sums, weights)
        return [left, self.right_sum] if isinstance(self.right_sum, GramSum) else [left]

    @override
    def diagonal_of(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Tensor:
        right = self.right if len(pairs) == 1 else pairs[1].values
        right = right.clamp(min=0)[:, None, :] / self.count.to(self.dtype)
        return pairs[0].values.clamp(min=0)[:, :, None] * right

    @override
    def basis_of(self, pairs: Sequence[EigenPairs]) -> Basis:
        return KroneckerBasis(pairs[0].vectors, pairs[1].vectors if len(pairs) > 1 else None)

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        if self.corrected is None:
            return DecomposedBlock.eigen(self, weights)
        return self.kronecker_basis(), self.eigenvalues(weights)

    @override
    def eigenvalues(self, weights: Tensor) -> Tensor:
        if self.corrected is None:
            return DecomposedBlock.eigenvalues(self, weights)
        return torch.einsum("k,kgoi->goi", weights, self.corrected.to(weights.dtype))

    @override
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.diagonalised(weights).values if self.corrected is None else self.corrected

    @override
    def _make_spectrum(self, values: Tensor) -> Spectrum:
        return _product_spectrum(values) if self.corrected is None else Spectrum(values)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.corrected is not None and self.n_components > 1 and diagonal.ndim == 0:
            return log_determinant(self.corrected.flatten(1), weights, diagonal)
        if self.n_components == 1 or diagonal.ndim or not weights.requires_grad:
            return EigenBlock.log_determinant(self, weights, diagonal)
        # Only the left eigenvalues depend on the weights, and eigvalsh has a stable derivative.
        left = torch.linalg.eigvalsh(torch.einsum("k,kgop->gop", weights, self.left.to(weights.dtype))).clamp(min=0)
        right = self.right.to(left.dtype)
        right = (right if right.ndim == 2 else torch.linalg.eigvalsh(right)).clamp(min=0)
        return torch.log(left[:, :, None] * right[:, None, :] / self.count.to(left) + diagonal).sum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        n = self.shape[1] * self.shape[2]
        identity = torch.eye(n, dtype=values.dtype, device=values.device).view(n, 1, *self.shape[1:])
        vectors = basis.expand(identity.expand(n, *self.shape)).flatten(2)  # [n, G, n]: rows are basis vectors
        return torch.einsum("ngi,gn,ngj->gij", vectors, values.flatten(1), vectors)


@register_block
class DiagonalOutputBlock(DecomposedBlock):
    """``H_k = diag(left_k) ⊗ right / count``, group by group: KFAC without the covariances between outputs.

    For softmax the dense output factor ``G = Σ_n diag p_n − p_n p_nᵀ`` has rows that sum to zero, so that
    ``0 ≤ G ≤ 2 diag G`` (Gershgorin): the posterior's precision is at most twice as large as here in any direction, and
    the variance of a single output is at least as large as here.

    Args:
        left: ``[K, G, o]``, sums of ``g²``.
        right: ``[G, i, i]``, sums of ``a aᵀ``, or the :class:`GramSum`.
        count: 0-d float64: the number of rows in ``right``'s sum.
    """

    storage: ClassVar[str] = "diagonal-output Kronecker"

    def __init__(self, left: Tensor, right: Tensor | GramSum, count: Tensor):
        self.left, self.count = left, count
        self.right_sum = right if isinstance(right, GramSum) else GramSum.of(right)
        self.kind = "Kronecker with a diagonal output factor"
        self.n_components, self.dtype = len(left), left.dtype
        self.shape = (left.shape[1], left.shape[2], self.right_sum.size)

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> DiagonalOutputBlock:
        return cls(tensors["left"], tensors["right"], tensors["count"])

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right_sum.matrix(), "count": self.count}

    @override
    def clone(self) -> DiagonalOutputBlock:
        return DiagonalOutputBlock(self.left.clone(), self.right_sum.clone(), self.count.clone())

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DiagonalOutputBlock)
        self.left = self.left + other.left
        self.right_sum.add_(other.right_sum)
        self.count = self.count + other.count
        self.changed()

    @override
    def factors(self, weights: Tensor) -> list[GramSum]:
        return [self.right_sum]

    @override
    def diagonal_of(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Tensor:
        left = torch.einsum("k,kgo->go", weights, self.left)
        return left[:, :, None] * (pairs[0].values.clamp(min=0) / self.count.to(self.dtype))[:, None, :]

    @override
    def basis_of(self, pairs: Sequence[EigenPairs]) -> Basis:
        return KroneckerBasis(None, pairs[0].vectors)

    @override
    def _make_spectrum(self, values: Tensor) -> Spectrum:
        return _product_spectrum(values)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.n_components == 1 or not weights.requires_grad:
            return EigenBlock.log_determinant(self, weights, diagonal)
        left = torch.einsum("k,kgo->go", weights, self.left.to(weights.dtype))
        right = self.right_sum.eigen().values.to(left).clamp(min=0) / self.count.to(left)
        return torch.log(left[:, :, None] * right[:, None, :] + diagonal).sum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        left = torch.einsum("k,kgo->go", weights, self.left.to(weights.dtype))
        right = self.right_sum.matrix().to(weights.dtype) / self.count.to(weights.dtype)
        return torch.einsum("go,op,gij->goipj", left, torch.eye(left.shape[1]).to(left), right).flatten(1, 2).flatten(2)
