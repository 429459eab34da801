"""Structured positive semi-definite matrices over the entries of a ``[G, o, i]`` array.

A block is a sum of K *components*, ``H(w) = Σ_k w_k H_k``, so that a curvature whose outputs carry different noise
levels can be reweighted without being computed again; K = 1 in all other cases. Gradients are added in place while data
stream by. A factor is a block plus a diagonal, ready to be inverted. Neither knows a network.

A block of another kind is a subclass of :class:`Block` with a ``storage`` kind and a ``from_tensors`` of its own;
:func:`register_block` makes it known, so that posteriors which hold it can be loaded.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.structured.gradients import MIB, ExampleGradients
from laplace_plus.structured.layout import Places
from laplace_plus.structured.log_determinants import Spectrum

TILE = 2**20
"""Numbers that are drawn at a time, or one draw's where it has more. Seeded draws depend on this value."""

_AT_ONCE = 256
"""With so many draws at a time, reading a matrix larger than a draw takes little time beside the arithmetic."""


class CoordinateMap(ABC):
    """The coordinates of gradients in which several quadratic forms ``P M⁻¹ P'`` are cheap."""

    @abstractmethod
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        """Coordinates of the gradients' matrices, ``Rᵀ P``."""


class Basis(CoordinateMap):
    """An invertible linear map R on arrays ``[G, o, i]``."""

    @abstractmethod
    def expand(self, coordinates: Tensor) -> Tensor:
        """``R z`` for coordinates ``[n, G, o, i]``."""

    @abstractmethod
    def diagonal(self, variances: Tensor) -> Tensor:
        """The diagonal of ``R diag(variances) Rᵀ``, ``[G, o, i]``."""

    def matrix(self, variances: Tensor) -> Tensor:
        """``R diag(variances) Rᵀ`` written out, ``[G, n, n]``."""
        groups, rows, columns = variances.shape
        n = rows * columns
        identity = torch.eye(n, dtype=variances.dtype, device=variances.device).view(n, 1, rows, columns)
        vectors = self.expand(identity.expand(n, groups, rows, columns)).flatten(2)  # [n, G, n]: rows are basis vectors
        return torch.einsum("ngi,gn,ngj->gij", vectors, variances.flatten(1), vectors)


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

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonal of ``M⁻¹``, ``[G, o, i]``."""

    def covariance(self) -> Tensor:
        """``M⁻¹`` written out, ``[G, n, n]`` with n = o·i; only for small n."""
        groups, rows, columns = (like := self.variances()).shape
        n = rows * columns
        units = torch.eye(n, dtype=like.dtype, device=like.device).view(n, 1, rows, columns)
        return self.solve(units.expand(n, groups, rows, columns).contiguous()).flatten(2).transpose(0, 1)


def add_draws_(result: Tensor, factor: Factor, places: Places, generator: torch.Generator | None = None) -> None:
    """Add draws from N(0, M⁻¹) of a factor to the vectors ``[n, P]``, where the entries of M lie among the P.

    White noise is drawn in tiles of a fixed size and in a fixed order: seeded draws do not depend on how many of them
    are computed at a time. The source of randomness may live on another device.
    """
    n, shape = len(result), torch.Size(places.shape)
    size = max(1, shape.numel())
    tile = min(n, max(1, TILE // size))
    at_once = min(n, max(1, min(_AT_ONCE, 256 * MIB // (8 * size)) // tile) * tile)  # few float64 arrays of 256 MiB
    source = result.device if generator is None else generator.device
    noise = torch.empty(at_once, *shape, dtype=result.dtype, device=result.device)
    for start in range(0, n, at_once):
        drawn = noise[: min(at_once, n - start)]
        for part in drawn.split(tile):
            part.copy_(torch.randn(part.shape, dtype=part.dtype, device=source, generator=generator))
        places.add_(result[start : start + len(drawn)], factor.sample(drawn))


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

    def add(self, gradients: ExampleGradients, components: Tensor) -> None:
        """Add the outer products of gradients ``[V, B]``, whose cotangents belong to ``components [V]``, in place."""
        raise NotImplementedError(f"{type(self).__name__} is not made of gradients")

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
        """``log det(H(w) + diagonal)``, 0-d float64; differentiable in both arguments; errors as :meth:`factor`."""

    def spectrum(self) -> Spectrum | None:
        """The eigenvalues of H at a weight of one, where they are known for one component and none is negative."""
        return None

    @property
    def is_sampled(self) -> bool:
        """Whether random vectors estimate a part of determinants."""
        return False

    def sampled_determinants(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        """What each of m random vectors tells of log det, ``[m]``, up to what they share; where it is sampled."""
        raise NotImplementedError(f"{type(self).__name__} needs no random vectors")

    def diagonal(self, weights: Tensor) -> Tensor:
        """``diag H(w)``, ``[G, o, i]``."""
        return self.dense(weights).diagonal(dim1=-2, dim2=-1).reshape(self.shape)

    @abstractmethod
    def dense(self, weights: Tensor) -> Tensor:
        """``H(w)`` written out, ``[G, n, n]`` with n = o·i."""

    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """``vᵀ H(w) v`` for vectors ``[k, G, o, i]``, ``[k]``; differentiable in them."""
        flat = vectors.flatten(2)
        return torch.einsum("kgn,gnm,kgm->k", flat, self.dense(weights).to(flat), flat)

    # -- storage and sums ----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Block:
        """Rebuild a block of this shape from its :meth:`tensors`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make up the block, for storage and for sums over processes."""

    @abstractmethod
    def add_(self, other: Block) -> None:
        """Add another block of the same structure in place."""

    def clone(self) -> Block:
        """A copy that further data may be added to."""
        return copy.deepcopy(self)

    def parts(self) -> list[Tensor]:
        """The tensors that hold the block as it is now, whatever their form."""
        return list(self.tensors().values())

    def is_zero(self) -> bool:
        """Whether ``H(w)`` is zero, whatever the weights."""
        return not any(bool(part.any()) for part in self.parts())

    def n_bytes(self) -> int:
        """Memory that the block takes."""
        return sum(tensor.nbytes for tensor in self.parts())


B = TypeVar("B", bound=type[Block])
_KINDS: dict[str, type[Block]] = {}


def register_block(cls: B) -> B:
    """Make a kind of block known by its ``storage``, so that saved posteriors which hold such blocks can be loaded.

    May be used as a decorator. Raises :class:`ConfigurationError` if another class has this kind.
    """
    known = _KINDS.setdefault(cls.storage, cls)
    if known.__qualname__ != cls.__qualname__ or known.__module__ != cls.__module__:
        got = f"storage = {cls.storage!r}, which belongs to {known.__name__}"
        what = f"Cannot register the block {cls.__name__}."
        raise ConfigurationError(what, expected="a storage kind of its own", got=got)
    _KINDS[cls.storage] = cls
    return cls


def block_from_tensors(storage: str, shape: tuple[int, int, int], tensors: Mapping[str, Tensor]) -> Block:
    """Rebuild a block from its registered kind (else CheckpointError), its shape, and its :meth:`Block.tensors`."""
    if storage not in _KINDS:
        what = f"A saved curvature holds a block of the unknown kind {storage!r}."
        fix = "Import the package that registers this kind with lp.structured.register_block."
        raise CheckpointError(what, expected=", ".join(sorted(_KINDS)), fix=fix)
    return _KINDS[storage].from_tensors(tensors, shape)
