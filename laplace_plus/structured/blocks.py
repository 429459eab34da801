"""Structured positive semi-definite matrices over the entries of a ``[G, o, i]`` array.

A block is a sum of K *components*, ``H(w) = Σ_k w_k H_k``, so that a curvature whose outputs carry different noise
levels can be reweighted without being computed again; K = 1 in all other cases. Blocks are summed in place while data
stream by, are diagonalised once, and do not know their network.

A factor is a block plus a diagonal, ready to be inverted. It is diagonal in a basis, an invertible linear map R on
``[G, o, i]`` arrays: :meth:`Basis.coordinates` applies Rᵀ to per-example gradients (a Jacobian J becomes ``J R``),
:meth:`Basis.expand` applies R to coordinates.

A block of another kind is a subclass of :class:`Block` with a ``storage`` kind and a ``from_tensors`` of its own;
:func:`register_block` makes it known, so that posteriors which hold it can be loaded and updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import CheckpointError, ConfigurationError, UnsupportedError
from laplace_plus.structured.gradients import ExampleGradients
from laplace_plus.structured.gram_sum import EigenPairs, GramSum
from laplace_plus.structured.log_determinants import Spectrum, log_determinant, not_positive_definite


class CoordinateMap(ABC):
    """The coordinates of gradients in which several quadratic forms ``P M⁻¹ P'`` are cheap."""

    @abstractmethod
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        """Coordinates of the gradients' matrices, ``Rᵀ P``."""


class Basis(CoordinateMap):
    """An invertible linear map R on arrays ``[G, o, i]``.

    Attributes:
        is_large: Whether R is a matrix much larger than an array.
    """

    is_large: bool = False

    @abstractmethod
    def expand(self, coordinates: Tensor) -> Tensor:
        """``R z`` for coordinates ``[n, G, o, i]``."""

    @abstractmethod
    def diagonal(self, variances: Tensor) -> Tensor:
        """The diagonal of ``R diag(variances) Rᵀ``, ``[G, o, i]``."""


class IdentityBasis(Basis):
    """R = I."""

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        return gradients

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        return coordinates

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return variances


class Factor(ABC):
    """A positive definite matrix M over the entries of a ``[G, o, i]`` array.

    Attributes:
        basis: Computes coordinates of gradients for :meth:`quadratic_form`; factors that share it share coordinates.
    """

    basis: CoordinateMap

    @abstractmethod
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for gradients in coordinates of :attr:`basis`; mode as in :meth:`ExampleGradients.quadratic`."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """``log det M``, 0-d float64."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Draws from N(0, M⁻¹) for standard normal ``noise [n, G, o, i]``."""

    def solve(self, vectors: Tensor) -> Tensor:
        """``M⁻¹ v`` for ``[k, G, o, i]``, by ``M⁻¹ = S Sᵀ`` with the S that maps white noise to draws."""
        with torch.enable_grad():
            noise = torch.zeros_like(vectors, requires_grad=True)
            (pulled,) = torch.autograd.grad(self.sample(noise), noise, vectors)
        return self.sample(pulled).detach()

    @property
    def reads_matrices(self) -> bool:
        """Whether :meth:`sample` reads matrices larger than a draw, so that many draws at a time are faster."""
        return True

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonal of ``M⁻¹``, ``[G, o, i]``."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """``M⁻¹`` written out, ``[G, n, n]`` with n = o·i; only for small n."""

    def quadratic(self, gradients: ExampleGradients, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for gradients; mode as in :meth:`ExampleGradients.quadratic`."""
        return self.quadratic_form(self.basis.coordinates(gradients), mode)


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

    def __post_init__(self) -> None:
        smallest = self.values.detach().min()
        if not smallest > 0:
            raise not_positive_definite(smallest.item())

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        return coordinates.quadratic(self.values.reciprocal().to(coordinates.dtype), mode)

    @override
    def log_determinant(self) -> Tensor:
        return self.values.double().log().sum() + self.log_scale

    @override
    def sample(self, noise: Tensor) -> Tensor:
        return self.basis.expand(noise * self.values.rsqrt())

    @property
    @override
    def reads_matrices(self) -> bool:
        return self.basis.is_large

    @override
    def variances(self) -> Tensor:
        return self.basis.diagonal(self.values.reciprocal())

    @override
    def covariance(self) -> Tensor:
        groups, rows, columns = self.values.shape
        n = rows * columns
        identity = torch.eye(n, dtype=self.values.dtype, device=self.values.device).view(n, 1, rows, columns)
        roots = self.basis.expand(identity.expand(n, groups, rows, columns) * self.values.rsqrt()).flatten(2)
        return torch.einsum("kgi,kgj->gij", roots, roots)


class Block(ABC):
    """A structured matrix ``Σ_k w_k H_k`` over the entries of a ``[G, o, i]`` array.

    Attributes:
        storage: Names the kind of block in checkpoints.
        kind: What the block is, for summaries and errors.
        shape: ``(G, o, i)``.
        n_components: K.
    """

    storage: ClassVar[str]
    kind: str
    shape: tuple[int, int, int]
    n_components: int

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Block:
        """Rebuild a block of this shape from its :meth:`tensors`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make up the block, for storage."""

    @abstractmethod
    def add_(self, other: Block) -> None:
        """Add another block of the same structure in place."""

    @abstractmethod
    def clone(self) -> Block:
        """A copy that further data may be added to."""

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

    def parts(self) -> list[Tensor]:
        """The tensors that hold the block as it is now, whatever their form."""
        return list(self.tensors().values())

    def changed(self) -> None:  # noqa: B027  -- most blocks keep nothing
        """Forget what was computed from the sums, after something was added to them."""

    def n_bytes(self) -> int:
        """Memory that the block takes."""
        return sum(tensor.nbytes for tensor in self.parts())


B = TypeVar("B", bound=type[Block])
_KINDS: dict[str, type[Block]] = {}


def register_block(cls: B) -> B:
    """Make a kind of block known by its ``storage``, so that saved posteriors which hold such blocks can be loaded.

    May be used as a decorator.

    Args:
        cls: The class.

    Returns:
        The class.

    Raises:
        ConfigurationError: Another class has this kind.
    """
    known = _KINDS.setdefault(cls.storage, cls)
    if known.__qualname__ != cls.__qualname__ or known.__module__ != cls.__module__:
        raise ConfigurationError(
            f"Cannot register the block {cls.__name__}.",
            expected="a storage kind of its own",
            got=f"storage = {cls.storage!r}, which belongs to {known.__name__}",
            fix="Choose another value of storage.",
        )
    _KINDS[cls.storage] = cls
    return cls


def block_from_tensors(storage: str, shape: tuple[int, int, int], tensors: Mapping[str, Tensor]) -> Block:
    """Rebuild a block from its kind, its shape, and what :meth:`Block.tensors` returned.

    Raises:
        CheckpointError: No block of this kind has been registered.
    """
    if storage not in _KINDS:
        raise CheckpointError(
            f"A saved curvature holds a block of the unknown kind {storage!r}.",
            expected=", ".join(sorted(_KINDS)),
            got=storage,
            fix="Import the package that registers this kind with lp.structured.register_block.",
        )
    return _KINDS[storage].from_tensors(tensors, shape)


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

    @abstractmethod
    def eigenvalues(self, weights: Tensor) -> Tensor:
        """The diagonal ``[G, o, i]`` alone, which takes less than :meth:`eigen` where no basis is needed."""

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
        values = self._unit_eigenvalues(weights)
        version = -1 if values.is_inference() else values._version
        if self._spectrum is None or self._spectrum[0] is not values or self._spectrum[1] != version:
            self._spectrum = values, version, self._make_spectrum(values)
        return self._spectrum[2]

    @abstractmethod
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        """Where K = 1, the diagonal at a weight of one: the same tensor until the block changes."""

    def _make_spectrum(self, values: Tensor) -> Spectrum:
        return Spectrum(values)


@register_block
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

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> DiagonalBlock:
        return cls(tensors["values"])

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DiagonalBlock)
        self.values += other.values

    @override
    def clone(self) -> DiagonalBlock:
        return DiagonalBlock(self.values.clone())

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        return IdentityBasis(), self.eigenvalues(weights)

    @override
    def eigenvalues(self, weights: Tensor) -> Tensor:
        return torch.einsum("k,kgoi->goi", weights, self.values.to(weights.dtype))

    @override
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.values

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        return EigenFactor(IdentityBasis(), self.eigenvalues(weights) + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return EigenBlock.log_determinant(self, weights, diagonal)
        return log_determinant(self.values.flatten(1), weights, diagonal.flatten() if diagonal.ndim else diagonal)

    @override
    def dense(self, weights: Tensor) -> Tensor:
        return torch.diag_embed(self.eigenvalues(weights).flatten(1))


@dataclass
class Diagonalised:
    """The diagonal form of a matrix, with a basis that is only written out when it is needed.

    Attributes:
        key: The component weights that it belongs to, or None for all.
        pairs: The eigendecompositions that it follows from.
        values: The diagonal ``[G, o, i]``.
        make_basis: Gives the basis from ``pairs``.
    """

    key: Tensor | None
    pairs: Sequence[EigenPairs]
    values: Tensor
    make_basis: Callable[[Sequence[EigenPairs]], Basis]

    @cached_property
    def basis(self) -> Basis:
        """The basis."""
        return self.make_basis(self.pairs)


class DecomposedBlock(EigenBlock):
    """A block that keeps its eigendecomposition until it changes."""

    dtype: torch.dtype
    _cache: Diagonalised | None = None

    @abstractmethod
    def factors(self, weights: Tensor) -> list[GramSum]:
        """The sums whose eigendecompositions are needed; with one component, at a weight of one."""

    @abstractmethod
    def diagonal_of(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> Tensor:
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
        if self._cache is None:
            return False
        key = self.key(weights)
        return key is None or (self._cache.key is not None and torch.equal(self._cache.key, key))

    def adopt_eigen(self, weights: Tensor, pairs: Sequence[EigenPairs]) -> None:
        """Take over the eigendecompositions of :meth:`factors`."""
        key = self.key(weights)
        at = torch.ones_like(weights, dtype=self.dtype) if key is None else key
        self._cache = Diagonalised(key, pairs, self.diagonal_of(at, pairs), self.basis_of)

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
        values = form.values.to(weights.dtype)
        return form.basis, values * weights[0] if self.n_components == 1 else values

    @override
    def eigenvalues(self, weights: Tensor) -> Tensor:
        values = self.diagonalised(weights).values.to(weights.dtype)
        return values * weights[0] if self.n_components == 1 else values

    @override
    def _unit_eigenvalues(self, weights: Tensor) -> Tensor:
        return self.diagonalised(weights).values
