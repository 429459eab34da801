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
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.structured.gradients import ExampleGradients


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
        reads_matrices: Whether :meth:`sample` reads matrices larger than a draw, so that many draws at a time are
            faster.
    """

    basis: CoordinateMap
    reads_matrices: ClassVar[bool] = True

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

    @abstractmethod
    def covariance(self) -> Tensor:
        """``M⁻¹`` written out, ``[G, n, n]`` with n = o·i; only for small n."""

    def quadratic(self, gradients: ExampleGradients, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for gradients; mode as in :meth:`ExampleGradients.quadratic`."""
        return self.quadratic_form(self.basis.coordinates(gradients), mode)


class Block(ABC):
    """A structured matrix ``Σ_k w_k H_k`` over the entries of a ``[G, o, i]`` array.

    Attributes:
        storage: Names the kind of block in checkpoints.
        forms: The axes of each of :meth:`tensors`, for :func:`check_forms`; those that have none are not checked, and a
            subclass does not inherit them.
        kind: What the block is, for summaries and errors.
        shape: ``(G, o, i)``.
        n_components: K.
    """

    storage: ClassVar[str]
    forms: ClassVar[Mapping[str, str]] = {}
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
        """``log det(H(w) + diagonal)``, 0-d float64; differentiable in both arguments; errors as :meth:`factor`."""

    @abstractmethod
    def dense(self, weights: Tensor) -> Tensor:
        """``H(w)`` written out, ``[G, n, n]`` with n = o·i."""

    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """``vᵀ H(w) v`` for vectors ``[k, G, o, i]``, ``[k]``; differentiable in them."""
        flat = vectors.flatten(2)
        return torch.einsum("kgn,gnm,kgm->k", flat, self.dense(weights).to(flat), flat)

    def parts(self) -> list[Tensor]:
        """The tensors that hold the block as it is now, whatever their form."""
        return list(self.tensors().values())

    def is_zero(self) -> bool:
        """Whether ``H(w)`` is zero, whatever the weights."""
        return not any(bool(part.any()) for part in self.parts())

    def changed(self) -> None:  # noqa: B027  -- most blocks keep nothing
        """Forget what was computed from the sums, after something was added to them."""

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
    groups, rows, columns = shape
    check_forms(tensors, vars(_KINDS[storage]).get("forms", {}), G=groups, o=rows, i=columns, n=rows * columns, t=2)
    return _KINDS[storage].from_tensors(tensors, shape)


def check_forms(tensors: Mapping[str, Tensor], forms: Mapping[str, str], **sizes: int) -> None:
    """Raise :class:`CheckpointError` unless tensors have the axes that their names, up to a dot, stand for.

    An axis is a letter. It has the size that is given, or else the same one throughout; ``*`` is an axis of any size.
    Of ``"KGoo KGo"`` either will do.
    """
    for name, tensor in tensors.items():
        known = forms.get(name.split(".")[0])
        axes = next((form for form in known.split(" ") if len(form) == tensor.ndim), None) if known is not None else ""
        found = zip(axes or "", tensor.shape, strict=False)
        if axes is None or any(sizes.setdefault(axis, size) != size for axis, size in found if axis != "*"):
            what, got = f"The tensor {name!r} has another shape.", str(list(tensor.shape))
            raise CheckpointError(what, expected=f"[{known}] with {sizes}", got=got)
