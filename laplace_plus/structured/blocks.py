"""Structured positive semi-definite matrices over the entries of a ``[G, o, i]`` array.

A block is a sum of K *components*, ``H(w) = Σ_k w_k H_k``, so that a curvature whose outputs carry different noise
levels can be reweighted without being computed again; K = 1 in all other cases. Blocks add up in place while data
stream by, are diagonalised once, and never know which network they came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.errors import UnsupportedError
from laplace_plus.structured import inverse_roots
from laplace_plus.structured.bases import Basis, DenseBasis, IdentityBasis
from laplace_plus.structured.factor import EigenFactor, Factor, not_positive_definite
from laplace_plus.structured.gram_sum import (
    STACKED_UP_TO,
    EigenPairs,
    GramSum,
    combine,
    eigen_together,
    require_finite,
    stored,
    symmetric_eigen,
)
from laplace_plus.structured.log_determinants import Spectrum, log_determinant
from laplace_plus.structured.low_rank_factor import LowRankCoordinates, LowRankFactor
from laplace_plus.structured.low_rank_factor import log_determinant as low_rank_log_determinant

# Rounding makes eigenvalues of a semi-definite matrix slightly negative, by about n · eps of the largest one.
ROUNDING = 64.0


def clamp_rounding(values: Tensor) -> Tensor:
    """Zero out the negative eigenvalues that rounding produces in a semi-definite matrix; leave real ones."""
    n = values.shape[-1]
    scale = values.abs().amax(-1, keepdim=True) if n else values
    tolerance = ROUNDING * n * torch.finfo(values.dtype).eps * scale
    return torch.where(values.abs() <= tolerance, values.clamp(min=0), values)


class Block(ABC):
    """A structured matrix ``Σ_k w_k H_k`` over the entries of a ``[G, o, i]`` array."""

    storage: ClassVar[str]
    kind: str
    shape: tuple[int, int, int]
    n_components: int

    @abstractmethod
    def add_(self, other: Block) -> None:
        """Add another block of the same structure in place."""

    @abstractmethod
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        """The matrix ``H(w) + diagonal``, ready to be inverted.

        Args:
            weights: ``w [K]``.
            diagonal: 0-d, or ``[G, o, i]`` where the structure allows one.

        Raises:
            UnsupportedError: The structure cannot add a diagonal that is not a multiple of the identity.
            NotPositiveDefiniteError: The sum is not positive definite.
        """

    @abstractmethod
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        """``log det(H(w) + diagonal)``, 0-d float64; differentiable in both arguments.

        Raises:
            UnsupportedError: The structure cannot add a diagonal that is not a multiple of the identity.
            NotPositiveDefiniteError: The sum is not positive definite.
        """

    @abstractmethod
    def dense(self, weights: Tensor) -> Tensor:
        """``H(w)`` written out, ``[G, n, n]`` with n = o·i."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What makes up the block, for storage."""

    @abstractmethod
    def clone(self) -> Block:
        """A copy that further data may be added to."""

    def parts(self) -> list[Tensor]:
        """The tensors that hold the block as it is now, whatever their form."""
        return list(self.tensors().values())

    def is_finite(self) -> bool:
        """Whether there are no NaNs or infinities."""
        return all(kernels.all_finite(tensor) for tensor in self.parts())

    def n_bytes(self) -> int:
        """Memory that the block takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parts())


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

    def eigenvalues(self, weights: Tensor) -> Tensor:
        """The diagonal ``[G, o, i]`` alone, which takes less than :meth:`eigen` where no basis is asked for."""
        return self.eigen(weights)[1]

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if diagonal.ndim:
            raise UnsupportedError(
                f"A {self.kind} block cannot hold a prior precision that differs from entry to entry.",
                expected="one prior precision for all parameters of a layer",
                got=f"one for each of {diagonal.numel()} parameters",
                fix='Use a scalar or "layerwise" prior precision, or lp.Diagonal or lp.Full.',
            )
        basis, values = self.eigen(weights)
        return EigenFactor(basis, values + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim:
            return self.factor(weights, diagonal).log_determinant()
        if self.n_components > 1:
            return log_determinant(self.eigenvalues(weights).flatten()[None], torch.ones_like(weights[:1]), diagonal)
        return self.spectrum(weights).log_determinant(weights[0], diagonal)

    def spectrum(self, weights: Tensor) -> Spectrum:
        """Where K = 1, the eigenvalues at a weight of one, prepared for determinants; kept until the block changes."""
        kept = self._kept_eigenvalues(weights)
        version = -1 if kept.is_inference() else kept._version
        if self._spectrum is None or self._spectrum[0] is not kept or self._spectrum[1] != version:
            self._spectrum = kept, version, self._make_spectrum(kept)
        return self._spectrum[2]

    @abstractmethod
    def _kept_eigenvalues(self, weights: Tensor) -> Tensor:
        """Where K = 1, the diagonal at a weight of one: the same tensor until the block changes."""

    def _make_spectrum(self, values: Tensor) -> Spectrum:
        return Spectrum(values)


@dataclass
class DiagonalBlock(EigenBlock):
    """A diagonal matrix.

    Attributes:
        values: ``[K, G, o, i]``.
    """

    values: Tensor

    storage: ClassVar[str] = "diagonal"

    def __post_init__(self) -> None:
        self.kind = "diagonal"
        self.n_components = self.values.shape[0]
        self.shape = tuple(self.values.shape[1:])  # type: ignore[assignment]

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DiagonalBlock)
        self.values += other.values

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        return IdentityBasis(), torch.einsum("k,kgoi->goi", weights, self.values.to(weights.dtype))

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        basis, values = self.eigen(weights)
        return EigenFactor(basis, values + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return EigenBlock.log_determinant(self, weights, diagonal)
        return log_determinant(self.values.flatten(1), weights, diagonal.flatten() if diagonal.ndim else diagonal)

    @override
    def _kept_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.values

    @override
    def dense(self, weights: Tensor) -> Tensor:
        return torch.diag_embed(self.eigen(weights)[1].flatten(1))

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    @override
    def clone(self) -> DiagonalBlock:
        return DiagonalBlock(self.values.clone())


class Diagonalised:
    """The diagonal form of a matrix, with a basis that is only written out when it is asked for.

    Args:
        values: ``[G, o, i]``.
        make_basis: Gives the basis.
    """

    def __init__(self, values: Tensor, make_basis: Callable[[], Basis]):
        self.values = values
        self._make_basis = make_basis

    @cached_property
    def basis(self) -> Basis:
        """The basis."""
        return self._make_basis()


class OnceDiagonalised(EigenBlock):
    """Shared by the blocks whose eigendecomposition is worth keeping."""

    _cache: tuple[Tensor, Diagonalised] | None = None
    dtype: torch.dtype

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        return self._diagonalised(weights).basis, self.eigenvalues(weights)

    @override
    def eigenvalues(self, weights: Tensor) -> Tensor:
        values = self._diagonalised(weights).values.to(weights.dtype)
        return values * weights[0] if self.n_components == 1 else values

    @override
    def _kept_eigenvalues(self, weights: Tensor) -> Tensor:
        return self._diagonalised(weights).values

    @abstractmethod
    def factors(self, weights: Tensor) -> list[GramSum]:
        """The sums whose eigendecompositions :meth:`eigen` is made of; with one component, at a weight of one."""

    @abstractmethod
    def diagonalise(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Diagonalised:
        """The diagonal form that follows from the eigendecompositions of :meth:`factors`."""

    def is_diagonalised(self, weights: Tensor) -> bool:
        """Whether the eigendecomposition at these weights is there already."""
        return self._cache is not None and torch.equal(self._cache[0], self._key(weights))

    def adopt_eigen(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> None:
        """Take the eigendecompositions of :meth:`factors`, as if they had been computed here."""
        self._cache = (self._key(weights), self.diagonalise(self._key(weights), pairs))

    def changed(self) -> None:
        """Forget the eigendecomposition, after something was added to a sum."""
        self._cache = None

    def _key(self, weights: Tensor) -> Tensor:
        # With one component the weight only scales the eigenvalues, so the decomposition is that of the bare matrix.
        return (torch.ones_like(weights) if self.n_components == 1 else weights.detach()).to(self.dtype)

    def _diagonalised(self, weights: Tensor) -> Diagonalised:
        if not self.is_diagonalised(weights):
            self.adopt_eigen(weights, [factor.eigen() for factor in self.factors(self._key(weights))])
        assert self._cache is not None
        return self._cache[1]


def _dense_basis(pairs: EigenPairs) -> Basis:
    return DenseBasis(pairs.vectors)


def diagonalise_together(blocks: Iterable[Block], weights: Tensor) -> None:
    """Diagonalise the small blocks that are not yet; matrices of equal size are decomposed in one call.

    Blocks with a large matrix wait until they are asked, since some questions take eigenvalues alone.
    """
    unknown = [b for b in blocks if isinstance(b, OnceDiagonalised) and not b.is_diagonalised(weights)]
    factors = [(block, block.factors(block._key(weights))) for block in unknown]
    small = [(block, own) for block, own in factors if all(factor.size <= STACKED_UP_TO for factor in own)]
    pairs = iter(eigen_together([factor for _, own in small for factor in own]))
    for block, own in small:
        block.adopt_eigen(weights, [next(pairs) for _ in own])


class DenseBlock(OnceDiagonalised):
    """G dense matrices.

    Args:
        matrix: ``[K, G, n, n]``, or for each component the sum that makes it up.
        shape: ``[G, o, i]`` with o·i = n.
    """

    storage: ClassVar[str] = "dense"

    def __init__(self, matrix: Tensor | Sequence[GramSum], shape: tuple[int, int, int]):
        self.sums = [GramSum.of(m) for m in matrix] if isinstance(matrix, Tensor) else list(matrix)
        self.shape = shape
        self.kind = "dense"
        self.dtype = self.sums[0].dtype
        self.n_components = len(self.sums)
        self.changed()

    @property
    def matrix(self) -> Tensor:
        """The components ``[K, G, n, n]``."""
        if self.n_components == 1:
            return self.sums[0].dense()[None]
        return torch.stack([part.dense() for part in self.sums])

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DenseBlock)
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine.add_(theirs)
        self.changed()

    @override
    def changed(self) -> None:
        self._cache = None
        self._semi_definite: Tensor | None = None
        self._values_alone: Tensor | None = None
        self._n_roots = 0

    def _avoids_vectors(self, weights: Tensor) -> bool:
        """Whether eigenvectors would cost much more than what can be had without."""
        n = self.shape[1] * self.shape[2]
        thin = self.n_components == 1 and self.sums[0].is_thin
        return n >= inverse_roots.LARGE and not thin and not self.is_diagonalised(weights)

    @override
    def _kept_eigenvalues(self, weights: Tensor) -> Tensor:
        if self._values_alone is None and not self._avoids_vectors(weights):
            return OnceDiagonalised._kept_eigenvalues(self, weights)
        if self._values_alone is None:
            matrix = self.sums[0].matrix()
            require_finite(matrix)
            values = inverse_roots.eigenvalues(matrix)
            self._values_alone = clamp_rounding(values).view(self.shape)
        return self._values_alone

    @override
    def factors(self, weights: Tensor) -> list[GramSum]:
        return [self.sums[0] if self.n_components == 1 else combine(self.sums, weights)]

    @override
    def diagonalise(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Diagonalised:
        (only,) = pairs
        return Diagonalised(clamp_rounding(only.values).view(self.shape), partial(_dense_basis, only))

    def _without_rounding(self) -> Tensor:
        """The components in float64, without the slightly negative eigenvalues that rounding gave them.

        A Cholesky decomposition of H plus a tiny diagonal would stumble over them.
        """
        if self._semi_definite is None:
            values, vectors = symmetric_eigen(self.matrix.double())
            limit = ROUNDING * values.shape[-1] * torch.finfo(self.dtype).eps * values.abs().amax(-1, keepdim=True)
            values = torch.where(values.abs() <= limit, values.clamp(min=0), values)
            self._semi_definite = (vectors * values[..., None, :]) @ vectors.mT
        return self._semi_definite

    def _combined(self, weights: Tensor) -> Tensor:
        return torch.einsum("k,kgnm->gnm", weights, self.matrix.to(weights.dtype))

    def _few_rows(self) -> Tensor | None:
        """The rows X ``[m, n]`` of ``H = XᵀX``, where writing out a basis of all n directions would take far more."""
        n = self.shape[1] * self.shape[2]
        if self.n_components > 1 or self.shape[0] > 1 or n < inverse_roots.LARGE or not self.sums[0].is_thin:
            return None
        return self.sums[0].scaled_rows(1.0)[0]

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        rows = self._few_rows()
        if rows is not None:
            values = weights[0].double().expand(len(rows))
            return LowRankFactor(LowRankCoordinates(rows), values, diagonal.double())
        if self._avoids_vectors(weights) and (diagonal.ndim or self._n_roots < inverse_roots.PATIENCE):
            root = inverse_roots.inverse_root(self._combined(weights), diagonal, self.shape)
            if root is not None:
                self._n_roots += 1
                return root
        if diagonal.ndim == 0:
            return EigenBlock.factor(self, weights, diagonal)
        # H + D = D^½ (D^-½ H D^-½ + I) D^½; the inner matrix is diagonalised for this D.
        scale = diagonal.flatten(1).rsqrt()
        values, vectors = symmetric_eigen(scale[..., None] * self._combined(weights) * scale[:, None, :])
        values = clamp_rounding(values).view(self.shape) + 1
        return EigenFactor(DenseBasis(vectors, scale), values, scale.log().sum() * -2)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return EigenBlock.log_determinant(self, weights, diagonal)
        rows = self._few_rows()
        if rows is not None:
            return low_rank_log_determinant(weights[0].double().expand(len(rows)), rows, diagonal.double())
        full = torch.einsum("k,kgnm->gnm", weights.double(), self._without_rounding())
        full = full + torch.diag_embed(diagonal.double().expand(self.shape).flatten(1))
        lower, failed = torch.linalg.cholesky_ex(full)
        if failed.any():
            smallest = torch.linalg.eigvalsh(full.detach()).min().item()
            raise not_positive_definite(smallest)
        return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()

    @override
    def dense(self, weights: Tensor) -> Tensor:
        return self._combined(weights)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return stored(self.sums, "matrix")

    @override
    def clone(self) -> DenseBlock:
        return DenseBlock([part.clone() for part in self.sums], self.shape)

    @override
    def parts(self) -> list[Tensor]:
        return [tensor for part in self.sums for tensor in part.parts()]
