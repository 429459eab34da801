"""Structured positive semi-definite matrices over the entries of a ``[G, o, i]`` array.

A block is a sum of K *components*, ``H(w) = Σ_k w_k H_k``, so that a curvature whose outputs carry different noise
levels can be reweighted without being computed again; K = 1 in all other cases. Blocks add up in place while data
stream by, are diagonalised once, and never know which network they came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.errors import NonFiniteError, UnsupportedError
from laplace_plus.linalg.bases import Basis, DenseBasis, IdentityBasis, KroneckerBasis
from laplace_plus.linalg.factor import EigenFactor, Factor, not_positive_definite

# Rounding makes eigenvalues of a semi-definite matrix slightly negative, by about n · eps of the largest one.
ROUNDING = 64.0


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[..., n]`` and vectors ``[..., n, n]`` of symmetric matrices, computed in float64.

    Kronecker factors are often rank-deficient, with rows of exact zeros (padding, dead units), and float32 solvers fail
    to converge on them; float64 costs twice the time and has not failed. Rows and columns that are exactly zero are
    taken out first where there is one matrix, because they are eigenvectors already.

    Raises:
        NonFiniteError: The matrix has NaN or infinite entries.
    """
    if not torch.isfinite(matrix).all():
        raise NonFiniteError(
            "A curvature factor is not finite.",
            expected="finite activations and output gradients",
            got=f"NaN or Inf in a factor of shape {tuple(matrix.shape)}",
            fix="Look for NaNs in the data, or run the network in float32 if it overflows in half precision.",
        )
    wide = matrix.double()
    wide = (wide + wide.mT) / 2
    alive = (wide != 0).any(-1).flatten(0, -2).any(0) if wide.ndim > 2 else (wide != 0).any(-1)
    if alive.all() or not alive.any():
        return _eigh(wide, matrix.dtype)
    n, keep, dead = wide.shape[-1], alive.nonzero().squeeze(-1), (~alive).nonzero().squeeze(-1)
    values, vectors = _eigh(wide[..., keep[:, None], keep], matrix.dtype)
    all_values = values.new_zeros(*values.shape[:-1], n)
    all_values[..., len(dead) :] = values
    all_vectors = values.new_zeros(*values.shape[:-1], n, n)
    all_vectors[..., dead, torch.arange(len(dead), device=dead.device)] = 1
    all_vectors[..., keep[:, None], torch.arange(len(dead), n, device=dead.device)] = vectors
    return all_values, all_vectors


def _eigh(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, vectors = kernels.symmetric_eigen(matrix)
    return values.to(dtype), vectors.to(dtype)


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


class EigenBlock(Block):
    """A block that is diagonal in a known basis."""

    @abstractmethod
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        """A basis in which ``H(w)`` is diagonal and the diagonal ``[G, o, i]``.

        Args:
            weights: Component weights ``w [K]``, whose type the diagonal takes; the result is differentiable in them
                only where K = 1.
        """

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
        if diagonal.ndim and not isinstance(self.eigen(weights)[0], IdentityBasis):
            return self.factor(weights, diagonal).log_determinant()
        values = self.eigen(weights)[1].double() + diagonal.double()
        if not (values.detach() > 0).all():
            raise not_positive_definite(values.detach().min().item())
        return values.log().sum()


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
    def dense(self, weights: Tensor) -> Tensor:
        return torch.diag_embed(self.eigen(weights)[1].flatten(1))

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}


class _OnceDiagonalised(EigenBlock):
    """Shared by the blocks whose eigendecomposition is worth keeping."""

    _cache: tuple[Tensor, Basis, Tensor] | None = None
    dtype: torch.dtype

    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        # With one component the weight only scales the eigenvalues, so the decomposition is that of the bare matrix.
        single = self.n_components == 1
        key = (torch.ones_like(weights) if single else weights.detach()).to(self.dtype)
        if self._cache is None or not torch.equal(self._cache[0], key):
            self._cache = (key, *self._decompose(key))
        _, basis, values = self._cache
        values = values.to(weights.dtype)
        return basis, values * weights[0] if single else values

    @abstractmethod
    def _decompose(self, weights: Tensor) -> tuple[Basis, Tensor]: ...


@dataclass
class DenseBlock(_OnceDiagonalised):
    """G dense matrices.

    Attributes:
        matrix: ``[K, G, n, n]``.
        shape: ``[G, o, i]`` with o·i = n.
    """

    matrix: Tensor
    shape: tuple[int, int, int]

    storage: ClassVar[str] = "dense"
    _semi_definite: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.kind = "dense"
        self.dtype = self.matrix.dtype
        self.n_components = self.matrix.shape[0]

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DenseBlock)
        self.matrix += other.matrix
        self._cache = self._semi_definite = None

    def _decompose(self, weights: Tensor) -> tuple[Basis, Tensor]:
        values, vectors = symmetric_eigen(self._combined(weights))
        return DenseBasis(vectors), clamp_rounding(values).view(self.shape)

    def _without_rounding(self) -> Tensor:
        """The components in float64, without the slightly negative eigenvalues that rounding gave them.

        A Cholesky decomposition of H plus a tiny diagonal would stumble over them.
        """
        if self._semi_definite is None:
            values, vectors = symmetric_eigen(self.matrix)
            vectors = vectors.double()
            self._semi_definite = (vectors * clamp_rounding(values).double()[..., None, :]) @ vectors.mT
        return self._semi_definite

    def _combined(self, weights: Tensor) -> Tensor:
        return torch.einsum("k,kgnm->gnm", weights, self.matrix.to(weights.dtype))

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
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
        return {"matrix": self.matrix}


@dataclass
class KroneckerBlock(_OnceDiagonalised):
    """Kronecker products ``H_k = left_k ⊗ right / count``, group by group.

    With ``corrected`` the eigenvalues are those measured in the Kronecker eigenbasis instead (EKFAC, George et al.,
    2018), ``H_k = U diag(corrected_k) Uᵀ``.

    Attributes:
        left: ``[K, G, o, o]``, sums of ``g gᵀ``.
        right: ``[G, i, i]``, sums of ``a aᵀ``; or ``[G, i]`` where that sum is diagonal (an embedding's).
        count: 0-d float64: the number of rows in ``right``'s sum.
        corrected: ``[K, G, o, i]`` or None.
        basis_weights: The weights at which the eigenbasis of ``corrected`` was fixed, ``[K]``.
    """

    left: Tensor
    right: Tensor
    count: Tensor
    corrected: Tensor | None = None
    basis_weights: Tensor | None = None
    storage: ClassVar[str] = "Kronecker"

    def __post_init__(self) -> None:
        self.kind = "Kronecker" if self.corrected is None else "eigenvalue-corrected Kronecker"
        self.n_components = self.left.shape[0]
        self.dtype = self.left.dtype
        self.shape = (self.left.shape[1], self.left.shape[2], self.right.shape[1])

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, KroneckerBlock)
        if self.corrected is not None:  # the basis stays what it is; what is measured in it comes by add_corrected_
            return
        self.left += other.left
        self.right += other.right
        self.count = self.count + other.count
        self._cache = None

    def add_corrected_(self, squares: Tensor) -> None:
        """Add squared gradients ``[K, G, o, i]``, measured in :meth:`kronecker_basis`, to the corrected eigenvalues."""
        assert self.corrected is not None
        self.corrected += squares

    def with_correction(self, weights: Tensor) -> KroneckerBlock:
        """The same factors with corrected eigenvalues of zero, measured from now on in the basis at ``weights``."""
        empty = self.left.new_zeros(self.n_components, *self.shape)
        return KroneckerBlock(self.left, self.right, self.count, empty, weights.detach().clone())

    def kronecker_basis(self) -> Basis:
        """The eigenbasis of the Kronecker factors, fixed where the eigenvalues are corrected."""
        assert self.basis_weights is not None
        return self._eigenbasis(self.basis_weights)[0]

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        if self.corrected is None:
            return _OnceDiagonalised.eigen(self, weights)
        return self.kronecker_basis(), torch.einsum("k,kgoi->goi", weights, self.corrected.to(weights.dtype))

    def _eigenbasis(self, weights: Tensor) -> tuple[Basis, Tensor]:
        if self._cache is None:  # the weights are fixed with the basis
            self._cache = (weights, *self._decompose(weights))
        return self._cache[1:]

    def _decompose(self, weights: Tensor) -> tuple[Basis, Tensor]:
        left_values, left = symmetric_eigen(torch.einsum("k,kgop->gop", weights, self.left))
        if self.right.ndim == 2:
            right_values, right = self.right, None
        else:
            right_values, right = symmetric_eigen(self.right)
        values = left_values.clamp(min=0)[:, :, None] * right_values.clamp(min=0)[:, None, :]
        return KroneckerBasis(left, right), values / self.count.to(values)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.n_components == 1 or self.corrected is not None or not weights.requires_grad:
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

    @override
    def tensors(self) -> dict[str, Tensor]:
        stored = {"left": self.left, "right": self.right, "count": self.count}
        if self.corrected is not None and self.basis_weights is not None:
            stored |= {"corrected": self.corrected, "basis_weights": self.basis_weights}
        return stored
