"""Kronecker-factored blocks, with and without corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.bases import Basis, ColumnBasis, KroneckerBasis
from laplace_plus.structured.blocks import Block, Diagonalised, EigenBlock, OnceDiagonalised
from laplace_plus.structured.gradients import ExampleGradients
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, combine, restored, stored
from laplace_plus.structured.log_determinants import Spectrum, log_determinant


class _KroneckerForm(Diagonalised):
    """The diagonal form of a Kronecker product, with the eigendecompositions that it comes from."""

    def __init__(self, values: Tensor, left: EigenPairs, right: EigenPairs | None):
        super().__init__(values, partial(_basis, left, right))
        self.left, self.right = left, right


class KroneckerBlock(OnceDiagonalised):
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
        self.left_sums = [GramSum.of(part) for part in left] if isinstance(left, Tensor) else list(left)
        self.right_sum = right if isinstance(right, GramSum) or right.ndim == 2 else GramSum.of(right)
        self.count, self.corrected, self.basis_weights = count, corrected, basis_weights
        self.kind = "Kronecker" if corrected is None else "eigenvalue-corrected Kronecker"
        self.n_components = len(self.left_sums)
        first = self.left_sums[0]
        self.dtype = first.dtype
        columns = self.right_sum.shape[1] if isinstance(self.right_sum, Tensor) else self.right_sum.size
        self.shape = (first.groups, first.size, columns)

    @property
    def left(self) -> Tensor:
        """The sums of ``g gᵀ``, ``[K, G, o, o]``."""
        if self.n_components == 1:
            return self.left_sums[0].dense()[None]
        return torch.stack([part.dense() for part in self.left_sums])

    @property
    def right(self) -> Tensor:
        """The sum of ``a aᵀ``, ``[G, i, i]``, or ``[G, i]`` where it is diagonal."""
        return self.right_sum if isinstance(self.right_sum, Tensor) else self.right_sum.dense()

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, KroneckerBlock)
        if self.corrected is not None:  # the basis stays what it is; what is measured in it comes by add_corrected_
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

    def add_corrected_(self, squares: Tensor) -> None:
        """Add squared gradients ``[K, G, o, i]``, measured in :meth:`kronecker_basis`, to the corrected eigenvalues."""
        assert self.corrected is not None
        self.corrected += squares

    def correct_(self, stack: ExampleGradients, components: Tensor) -> None:
        """Add the squares of a stack's matrices in :meth:`kronecker_basis` to the corrected eigenvalues.

        Args:
            stack: Matrices ``[G, o, i]``.
            components: ``[V]``: the component that each direction belongs to.
        """
        assert self.corrected is not None
        rotated = self.kronecker_basis().coordinates(stack)
        for number, total in enumerate(self.corrected):
            part = rotated
            if self.n_components > 1:
                part = rotated.select((components == number).nonzero().squeeze(-1))
            if part.dtype == total.dtype:
                part.add_squares_(total)
            else:
                total += part.squares()

    def with_correction(self, weights: Tensor) -> KroneckerBlock:
        """The same factors with corrected eigenvalues of zero, measured from now on in the basis at ``weights``."""
        empty = torch.zeros(self.n_components, *self.shape, dtype=self.dtype, device=self.left_sums[0].device)
        return KroneckerBlock(self.left_sums, self.right_sum, self.count, empty, weights.detach().to(empty))

    def kronecker_basis(self) -> Basis:
        """The eigenbasis of the Kronecker factors, fixed where the eigenvalues are corrected."""
        return self._form().basis

    def _form(self) -> _KroneckerForm:
        assert self.basis_weights is not None
        form = self._diagonalised(self.basis_weights)
        assert isinstance(form, _KroneckerForm)
        return form

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        basis = self.kronecker_basis() if self.corrected is not None else self._diagonalised(weights).basis
        return basis, self.eigenvalues(weights)

    @override
    def eigenvalues(self, weights: Tensor) -> Tensor:
        if self.corrected is None:
            return OnceDiagonalised.eigenvalues(self, weights)
        return torch.einsum("k,kgoi->goi", weights, self.corrected.to(weights.dtype))

    @override
    def factors(self, weights: Tensor) -> list[GramSum]:
        left = self.left_sums[0] if self.n_components == 1 else combine(self.left_sums, weights)
        return [left, self.right_sum] if isinstance(self.right_sum, GramSum) else [left]

    @override
    def diagonalise(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Diagonalised:
        left, right = pairs[0], pairs[1] if len(pairs) > 1 else None
        right_values = self.right if right is None else right.values
        right_values = right_values.clamp(min=0)[:, None, :] / self.count.to(self.dtype)
        return _KroneckerForm(left.values.clamp(min=0)[:, :, None] * right_values, left, right)

    @override
    def _key(self, weights: Tensor) -> Tensor:
        # A corrected block's basis stays where it was fixed, whatever the weights are now.
        return OnceDiagonalised._key(self, weights) if self.basis_weights is None else self.basis_weights

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
    def _kept_eigenvalues(self, weights: Tensor) -> Tensor:
        return OnceDiagonalised._kept_eigenvalues(self, weights) if self.corrected is None else self.corrected

    @override
    def _make_spectrum(self, values: Tensor) -> Spectrum:
        largest = values.amax()
        if self.corrected is not None or len(values) > 1 or not bool(largest > 0):
            return Spectrum(values)
        # One outer product, whose sides are its largest row and column.
        return Spectrum.of_products(values[0].amax(1).double(), values[0].amax(0).double() / largest.double())

    @override
    def dense(self, weights: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        n = self.shape[1] * self.shape[2]
        identity = torch.eye(n, dtype=values.dtype, device=values.device).view(n, 1, *self.shape[1:])
        vectors = basis.expand(identity.expand(n, *self.shape)).flatten(2)  # [n, G, n]: rows are basis vectors
        return torch.einsum("ngi,gn,ngj->gij", vectors, values.flatten(1), vectors)

    @override
    def tensors(self) -> dict[str, Tensor]:
        result = stored(self.left_sums, "left") | {"count": self.count}
        if isinstance(self.right_sum, GramSum) and not self.right_sum.is_formed:
            result["right_rows"] = self.right_sum.scaled_rows(1.0)
        else:
            result["right"] = self.right
        if self.corrected is None or self.basis_weights is None:
            return result
        # What was measured belongs to this very basis, which another decomposition would give in another order.
        form = self._form()
        result |= {"corrected": self.corrected, "basis_weights": self.basis_weights, "left_vectors": form.left.vectors}
        return result if form.right is None else result | {"right_vectors": form.right.vectors}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> KroneckerBlock:
        """Rebuild a block from its :meth:`tensors`."""
        right = GramSum.of_rows(tensors["right_rows"]) if "right_rows" in tensors else tensors["right"]
        diagonal = isinstance(right, Tensor) and right.ndim == 2
        corrected, weights = tensors.get("corrected"), tensors.get("basis_weights")
        block = cls(restored(tensors, "left"), right, tensors["count"], corrected, weights)
        if corrected is not None and weights is not None:
            block.adopt_eigen(
                weights, [_basis_alone(tensors[f"{side}_vectors"]) for side in ("left", "right")[: 1 + (not diagonal)]]
            )
        return block

    @override
    def clone(self) -> KroneckerBlock:
        corrected = None if self.corrected is None else self.corrected.clone()
        left, right = [part.clone() for part in self.left_sums], self.right_sum.clone()
        result = KroneckerBlock(left, right, self.count.clone(), corrected, self.basis_weights)
        if corrected is not None:
            result._cache = self._cache  # what was measured belongs to this very basis
        return result

    @override
    def parts(self) -> list[Tensor]:
        result = [tensor for part in self.left_sums for tensor in part.parts()]
        result += [self.right_sum] if isinstance(self.right_sum, Tensor) else self.right_sum.parts()
        return result if self.corrected is None else [*result, self.corrected]


def _basis_alone(vectors: Tensor) -> EigenPairs:
    """Eigenvectors whose values nobody asks for, corrected ones standing in for them."""
    return EigenPairs(vectors.new_zeros(vectors.shape[:2]), None, vectors)


def _basis(left: EigenPairs, right: EigenPairs | None) -> Basis:
    return KroneckerBasis(left.vectors, None if right is None else right.vectors)


class DiagonalOutputBlock(OnceDiagonalised):
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
