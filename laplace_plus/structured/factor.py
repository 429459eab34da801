"""Positive definite matrices M that are ready to be inverted, and the bases in which they are diagonal.

A basis is an invertible linear map R on ``[G, o, i]`` arrays. :meth:`Basis.coordinates` applies Rᵀ to per-example
gradients (a Jacobian J becomes ``J R``), :meth:`Basis.expand` applies R to coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._memory import CHUNK_BYTES, budget
from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    MappedGradients,
    OuterGradients,
    OutputLayerGradients,
)


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


@dataclass(frozen=True)
class DenseBasis(Basis):
    """``R = diag(scale) U`` with orthogonal ``U [G, n, n]``, n = o·i.

    Attributes:
        vectors: ``U``.
        scale: ``[G, n]`` or None for ones.
    """

    vectors: Tensor
    scale: Tensor | None = None

    def _matrix(self) -> Tensor:
        return self.vectors if self.scale is None else self.scale[..., None] * self.vectors

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        matrix = self._matrix()
        if isinstance(gradients, OutputLayerGradients):
            return DenseGradients(gradients.times(matrix[0].to(gradients.dtype)).unflatten(-1, gradients.shape))
        mapped = MappedGradients(gradients, matrix)
        n_examples = gradients.n_examples
        if n_examples * gradients.bytes_each() > min(CHUNK_BYTES, budget(gradients.device) // 4):
            return mapped
        return DenseGradients(mapped.dense(slice(0, n_examples)))  # multiplied once, for every quadratic form

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        flat = coordinates.flatten(2)
        return (self._matrix() @ flat.movedim(0, -1)).movedim(-1, 0).reshape(coordinates.shape)

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return (self._matrix().square() @ variances.flatten(1)[..., None]).view_as(variances)


def not_positive_definite(smallest: float) -> NotPositiveDefiniteError:
    """The error for a posterior precision with an eigenvalue that is not positive."""
    return NotPositiveDefiniteError(
        "The posterior precision is not positive definite.",
        expected="curvature/temperature + prior precision with positive eigenvalues",
        got=f"an eigenvalue of {smallest:.3g}",
        fix="Raise the prior precision, or use the GGN instead of an indefinite Hessian.",
    )


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
        return isinstance(self.basis, DenseBasis)

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
