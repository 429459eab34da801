"""Blocks that are diagonal in a known basis, above all Kronecker products.

These come with corrected eigenvalues (EKFAC), and with a diagonal output factor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.structured.blocks import Basis, Block, Factor, register_block
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    OuterGradients,
    OutputLayerGradients,
)
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, Reflections, combine, restored, stored, weighted_rows
from laplace_plus.structured.log_determinants import Spectrum, log_determinant, require_positive


@dataclass(frozen=True)
class EigenFactor(Factor):
    """The matrix ``M = R⁻ᵀ diag(values) R⁻¹``, whose inverse is ``R diag(1/values) Rᵀ``.

    Attributes:
        basis: R.
        values: Positive ``[G, o, i]``.
        log_scale: ``−2 log |det R|``, zero for orthogonal bases.

    Raises:
        NotPositiveDefiniteError: A value is zero, negative or NaN.
    """

    basis: Basis
    values: Tensor
    log_scale: Tensor | float = field(default=0.0)

    reads_matrices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.values.detach().min() > 0:
            require_positive(self.values)

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        weights = self.values.reciprocal()
        return coordinates.quadratic(
            weights if weights.dtype == coordinates.dtype else weights.to(coordinates.dtype), mode
        )

    @override
    def log_determinant(self) -> Tensor:
        return self.values.double().log().sum() + self.log_scale

    @override
    def sample(self, noise: Tensor) -> Tensor:
        return self.basis.expand(noise * self.values.rsqrt())

    @override
    def variances(self) -> Tensor:
        return self.basis.diagonal(self.values.reciprocal())

    @override
    def covariance(self) -> Tensor:
        return self.basis.matrix(self.values.reciprocal())


class EigenBlock(Block):
    """A block that is diagonal in a known basis."""

    _spectrum: tuple[Tensor, int, Spectrum] | None = None

    @abstractmethod
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        """A basis in which ``H(w)`` is diagonal and the diagonal ``[G, o, i]``.

        Args:
            weights: Component weights ``w [K]``, whose type the diagonal takes; the result is differentiable in them
                only where K = 1.
        """

    @override
    def is_zero(self) -> bool:
        part = self.parts()[0]
        values = self.eigen(torch.ones(self.n_components, dtype=part.dtype, device=part.device))[1]
        return not bool(values.nan_to_num().any())  # where all data are ignored, a factor is 0 / 0

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if diagonal.ndim:
            what = f"A {self.kind} block cannot hold a prior precision that differs from entry to entry."
            expected, got = "one prior precision for a layer", f"one for each of {diagonal.numel()} parameters"
            fix = 'Use a scalar or "layerwise" prior precision, or lp.Diagonal or lp.Full.'
            raise UnsupportedError(what, expected=expected, got=got, fix=fix)
        basis, values = self.eigen(weights)
        return EigenFactor(basis, values + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim:
            return self.factor(weights, diagonal).log_determinant()
        if self.n_components > 1:
            return log_determinant(self.eigen(weights)[1].flatten()[None], torch.ones_like(weights[:1]), diagonal)
        return self.spectrum(weights).log_determinant(weights[0], diagonal)

    @override
    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        return basis.coordinates(DenseGradients(vectors[None])).quadratic(values, "diagonal")[:, 0]

    def spectrum(self, weights: Tensor) -> Spectrum:
        """Where K = 1, the eigenvalues at a weight of one, prepared for determinants; kept until the block changes."""
        values = self._unit_eigenvalues(weights)
        version = -1 if values.is_inference() else values._version
        if self._spectrum is None or self._spectrum[0] is not values or self._spectrum[1] != version:
            self._spectrum = values, version, Spectrum(*self._sides(values))
        return self._spectrum[2]

    @abstractmethod
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        """Where K = 1, the diagonal at a weight of one: the same tensor until the block changes."""

    def _sides(self, values: Tensor) -> tuple[Tensor, ...]:
        """The diagonal as :class:`Spectrum` takes it."""
        return (values,)


@dataclass
class Diagonalised:
    """The diagonal form ``values [G, o, i]`` of a matrix, and its basis once it was asked for.

    It follows from eigendecompositions, at the component weights ``key``, or at all where that is None.
    """

    key: Tensor | None
    pairs: Sequence[EigenPairs]
    values: Tensor
    basis: Basis | None = None


class DecomposedBlock(EigenBlock):
    """A block that keeps its eigendecomposition until it changes."""

    dtype: torch.dtype
    _cache: Diagonalised | None = None

    @abstractmethod
    def factors(self, weights: Tensor) -> list[GramSum]:
        """The sums whose eigendecompositions are needed; with one component, at a weight of one."""

    @abstractmethod
    def diagonal_of(self, pairs: Sequence[EigenPairs]) -> Tensor:
        """The diagonal ``[G, o, i]`` that follows from the eigendecompositions of :meth:`factors`."""

    @abstractmethod
    def basis_of(self, pairs: Sequence[EigenPairs]) -> Basis:
        """The basis that follows from them."""

    def key(self, weights: Tensor) -> Tensor | None:
        """The weights ``[K]`` that an eigendecomposition belongs to; None where one serves all weights."""
        return None if self.n_components == 1 else weights.detach().to(self.dtype)

    def factors_at(self, weights: Tensor) -> list[GramSum]:
        """:meth:`factors` at the weights of :meth:`key`."""
        key = self.key(weights)
        return self.factors(torch.ones_like(weights, dtype=self.dtype) if key is None else key)

    def is_diagonalised(self, weights: Tensor) -> bool:
        """Whether the eigendecomposition at these weights is known."""
        if self._cache is None or self.n_components == 1:
            return self._cache is not None
        key = self.key(weights)
        return key is None or (self._cache.key is not None and torch.equal(self._cache.key, key))

    def adopt_eigen(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> None:
        """Take over the eigendecompositions of :meth:`factors`."""
        self._cache = Diagonalised(self.key(weights), pairs, self.diagonal_of(pairs))

    @override
    def changed(self) -> None:
        self._cache = None

    @override
    def parts(self) -> list[Tensor]:
        # Those of sums as they are: an upper triangle may not be filled in.
        found, waiting = [], list(vars(self).values())
        while waiting:
            item = waiting.pop(0)
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, GramSum)):
                waiting[:0] = item if isinstance(item, list) else vars(item).values()
        return found

    def diagonalised(self, weights: Tensor) -> Diagonalised:
        """The diagonal form; with one component, at a weight of one."""
        if self._cache is None or (self.n_components > 1 and not self.is_diagonalised(weights)):
            self.adopt_eigen(weights, [own.eigen() for own in self.factors_at(weights)])
            assert self._cache is not None
        return self._cache

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        form = self.diagonalised(weights)
        if form.basis is None:
            form.basis = self.basis_of(form.pairs)
        values = form.values.to(weights.dtype)
        return form.basis, values * weights[0] if self.n_components == 1 else values

    @override
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.diagonalised(weights).values


@dataclass(frozen=True)
class KroneckerBasis(Basis):
    """``R z = L z Nᵀ`` group by group, with orthogonal sides.

    Attributes:
        left: L ``[G, o, o]``, a tensor or :class:`Reflections`, or None for the identity.
        right: N ``[G or 1, i, i]``, likewise.
    """

    left: Any
    right: Any

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        left, right = self.left, self.right
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
        return _by_squares(self.right, _by_squares(self.left, variances).mT).mT


def _by_squares(side: Any, values: Tensor) -> Tensor:
    """``Σ_j L_ij² v_j`` for ``v [G, d, n]``, whose rows beyond the k leading ones are alike under reflections."""
    if not isinstance(side, Reflections):
        return values if side is None else side.square() @ values
    size, rank = side.sides[0].shape[-2:]
    leading = side @ torch.eye(size, rank, dtype=side.dtype, device=values.device)
    return values[:, -1:] + leading.square() @ (values[:, :rank] - values[:, -1:])


@register_block
class KroneckerBlock(DecomposedBlock):
    """Kronecker products ``H_k = left_k ⊗ right / count``, group by group.

    With ``corrected`` the eigenvalues are those measured in the Kronecker eigenbasis instead (EKFAC, George et al.,
    2018), ``H_k = U diag(corrected_k) Uᵀ``.

    Args:
        left: ``[K, G, o, o]``, sums of ``g gᵀ``; or ``[K, G, o]``, their diagonals; or for each component the
            :class:`GramSum`.
        right: ``[G, i, i]``, sums of ``a aᵀ``, or the :class:`GramSum`; or ``[G, i]`` where that sum is diagonal (an
            embedding's).
        count: 0-d float64: the number of rows in ``right``'s sum.
        corrected: ``[K, G, o, i]`` or None.
        basis_weights: The weights at which the eigenbasis of ``corrected`` was fixed, ``[K]``.

    Attributes:
        corrected: The corrected eigenvalues, or None.
    """

    storage: ClassVar[str] = "Kronecker"
    forms: ClassVar[Mapping[str, str]] = {
        "left": "KGoo KGo",
        "left_rows": "G*o",
        "left_limit": "*",
        "right": "Gii Gi",
        "right_rows": "G*i",
        "right_limit": "*",
        "corrected": "KGoi",
        "count": "",
        "basis_weights": "K",
        "left_vectors": "Goo",
        "right_vectors": "Gii",
    }

    def __init__(
        self,
        left: Tensor | Sequence[GramSum],
        right: Tensor | GramSum,
        count: Tensor,
        corrected: Tensor | None = None,
        basis_weights: Tensor | None = None,
    ):
        self.left_sums = [GramSum.of(own) for own in left] if isinstance(left, Tensor) else list(left)
        self.right_sum = GramSum.of(right) if isinstance(right, Tensor) else right
        self.count, self.corrected, self.basis_weights = count, corrected, basis_weights
        first = self.left_sums[0]
        self.kind = "Kronecker" if corrected is None else "eigenvalue-corrected Kronecker"
        if rank := self.right_sum.rank or first.rank:
            self.kind = f"Kronecker of rank-{rank} factors"
        self.n_components, self.dtype = len(self.left_sums), first.dtype
        self.shape = (first.groups, first.size, self.right_sum.size)

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> KroneckerBlock:
        right: Any = tensors.get("right")
        right = GramSum.of_rows(tensors["right_rows"], tensors.get("right_limit")) if right is None else right
        corrected, weights = tensors.get("corrected"), tensors.get("basis_weights")
        block = cls(restored(tensors, "left"), right, tensors["count"], corrected, weights)
        if corrected is not None and weights is not None:
            # Corrected eigenvalues replace those of the factors, which were not saved.
            pairs = []
            for name, own in (("left_vectors", block.left_sums[0]), ("right_vectors", block.right_sum)):
                zeros = torch.zeros(own.groups, own.size, dtype=own.dtype, device=own.device)
                pairs.append(EigenPairs(zeros, tensors.get(name)))
            block.adopt_eigen(weights, pairs)
        return block

    @override
    def tensors(self) -> dict[str, Tensor]:
        result = stored(self.left_sums, "left") | {"count": self.count}
        if self.right_sum.is_formed:
            result["right"] = self.right
        else:
            result |= {f"right_{name}": own for name, own in self.right_sum.parts().items()}
        if self.corrected is None or self.basis_weights is None:
            return result
        # Corrected eigenvalues belong to this very basis; another decomposition could give another order.
        result |= {"corrected": self.corrected, "basis_weights": self.basis_weights}
        pairs = self.diagonalised(self.basis_weights).pairs
        for name, own in zip(("left_vectors", "right_vectors"), pairs, strict=True):
            if own.vectors is not None:
                result[name] = own.vectors
        return result

    @override
    def clone(self) -> KroneckerBlock:
        corrected = None if self.corrected is None else self.corrected.clone()
        left, right = [own.clone() for own in self.left_sums], self.right_sum.clone()
        result = type(self)(left, right, self.count.clone(), corrected, self.basis_weights)
        if corrected is not None:
            result._cache = self._cache  # corrected eigenvalues belong to this very basis
        return result

    @property
    def left(self) -> Tensor:
        """The sums of ``g gᵀ``, ``[K, G, o, o]``, or their diagonals ``[K, G, o]``."""
        return torch.stack([own.dense() for own in self.left_sums])

    @property
    def right(self) -> Tensor:
        """The sum of ``a aᵀ``, ``[G, i, i]``, or ``[G, i]`` where it is diagonal."""
        return self.right_sum.dense()

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, KroneckerBlock)
        if self.corrected is not None:  # the basis stays; what is measured in it comes by correct_
            return
        for mine, theirs in zip(self.left_sums, other.left_sums, strict=True):
            mine.add_(theirs)
        self.right_sum.add_(other.right_sum)
        self.count = self.count + other.count
        self.changed()

    @property
    def discarded_trace(self) -> float:
        """The share of the trace that factors of limited rank leave out, at component weights of one."""
        sides = self.left_sums, [self.right_sum]
        if all(own[0].rank is None for own in sides):
            return 0.0
        ones = torch.ones(self.n_components, dtype=self.dtype, device=self.left_sums[0].device)
        kept, whole = ones.new_ones(()), ones.new_ones(())
        for sums, pair in zip(sides, self.diagonalised(ones).pairs, strict=True):
            trace = pair.values.double().sum(1)
            kept, whole = kept * trace, whole * (trace + sum(own.leading()[1] for own in sums if own.rank is not None))
        return float(1 - kept.sum() / whole.sum()) if bool(whole.any()) else 0.0

    def with_correction(self, weights: Tensor) -> KroneckerBlock:
        """The same factors with corrected eigenvalues of zero, measured from now on in the basis at ``weights``."""
        empty = torch.zeros(self.n_components, *self.shape, dtype=self.dtype, device=self.left_sums[0].device)
        return KroneckerBlock(self.left_sums, self.right_sum, self.count, empty, weights.detach().to(empty))

    def correct_(self, gradients: ExampleGradients, components: Tensor) -> None:
        """Add the squares of gradients in :meth:`kronecker_basis` to the corrected eigenvalues.

        ``components [V]`` are those that the cotangents belong to.
        """
        assert self.corrected is not None
        self.kronecker_basis().coordinates(gradients).add_component_squares_(self.corrected, components)

    def kronecker_basis(self) -> Basis:
        """The eigenbasis of the Kronecker factors, which is fixed where the eigenvalues are corrected."""
        assert self.basis_weights is not None
        return self.eigen(self.basis_weights)[0]

    @override
    def key(self, weights: Tensor) -> Tensor | None:
        return super().key(weights) if self.basis_weights is None else self.basis_weights

    @override
    def factors(self, weights: Tensor) -> list[GramSum]:
        left = self.left_sums[0] if self.n_components == 1 else combine(self.left_sums, weights)
        return [left, self.right_sum]

    @override
    def diagonal_of(self, pairs: Sequence[EigenPairs]) -> Tensor:
        left, right = (pair.values.clamp(min=0) for pair in pairs)
        return left[:, :, None] * (right[:, None, :] / self.count.to(self.dtype))

    @override
    def basis_of(self, pairs: Sequence[EigenPairs]) -> Basis:
        return KroneckerBasis(pairs[0].vectors, pairs[1].vectors)

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        basis, values = super().eigen(weights)
        if self.corrected is not None:
            values = torch.tensordot(weights, self.corrected.to(weights.dtype), 1)
        return basis, values

    @override
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.diagonalised(weights).values if self.corrected is None else self.corrected

    @override
    def _sides(self, values: Tensor) -> tuple[Tensor, ...]:
        if self.corrected is not None or len(values) > 1 or not bool(values.amax() > 0):
            return (values,)
        # The eigenvalues are products, of the largest row and of the largest column.
        return values[0].amax(1).double(), values[0].amax(0).double() / values.amax().double()

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.corrected is not None and self.n_components > 1 and diagonal.ndim == 0:
            return log_determinant(self.corrected.flatten(1), weights, diagonal)
        if self.n_components == 1 or diagonal.ndim or not weights.requires_grad:
            return EigenBlock.log_determinant(self, weights, diagonal)
        # Only the left eigenvalues depend on the weights, and eigvalsh has a stable derivative.
        if self.left_sums[0].rank is None:
            left = _eigenvalues(torch.tensordot(weights, self.left.to(weights.dtype), 1))
        else:
            rows = weighted_rows(self.left_sums, weights)
            left = _eigenvalues(rows @ rows.mT)[:, -self.shape[1] :]
            left = torch.nn.functional.pad(left, (self.shape[1] - left.shape[1], 0))
        right = self.right if self.right_sum.rank is None else self.right_sum.eigen().values
        right = _eigenvalues(right.to(left.dtype)) / self.count.to(left)
        return torch.log(left[:, :, None] * right[:, None, :] + diagonal).sum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        return basis.matrix(values)


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues ``[G, d]`` of positive semi-definite matrices, which may be given by their diagonals."""
    return matrices if matrices.ndim == 2 else torch.linalg.eigvalsh(matrices).clamp(min=0)


@register_block
class DiagonalOutputBlock(KroneckerBlock):
    """``H_k = diag(left_k) ⊗ right / count``, group by group: KFAC without the covariances between outputs.

    For softmax the dense output factor ``G = Σ_n diag p_n − p_n p_nᵀ`` has rows that sum to zero, so that
    ``0 ≤ G ≤ 2 diag G`` (Gershgorin): the posterior's precision is at most twice as large as here in any direction, and
    the variance of a single output is at least as large as here.
    """

    storage: ClassVar[str] = "diagonal-output Kronecker"
    forms: ClassVar[Mapping[str, str]] = KroneckerBlock.forms

    def __init__(self, left: Tensor | Sequence[GramSum], right: Tensor | GramSum, count: Tensor, *nothing: None):
        super().__init__(left, right, count)
        self.kind = "Kronecker with a diagonal output factor"
