"""Positive definite matrices that are ready to be inverted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.structured.bases import Basis, CoordinateMap, DenseBasis, KroneckerBasis
from laplace_plus.structured.gradients import ExampleGradients, OuterGradients
from laplace_plus.structured.parameter_slices import ParameterSlices


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
        basis: Prepares stacks for :meth:`weigh`; factors that share it can share what it prepared.
    """

    basis: CoordinateMap

    @abstractmethod
    def quadratic_form(self, rotated: ExampleGradients, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for gradients in coordinates of :attr:`basis`; mode as in :meth:`ExampleGradients.quadratic`."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """``log det M``, 0-d float64."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Draws from N(0, M⁻¹) for standard normal ``noise [n, G, o, i]``."""

    @property
    def reads_matrices(self) -> bool:
        """Whether :meth:`sample` reads matrices larger than a draw, so that many draws at a time are quicker."""
        return True

    def add_draws_(self, batches: Iterable[tuple[Tensor, Tensor]], placement: ParameterSlices) -> None:
        """Add draws to vectors, at the places of this matrix's entries.

        Args:
            batches: Pairs of standard normal ``noise [n, G, o, i]``, which may be overwritten, and vectors ``[n, P]``.
            placement: The places.
        """
        for noise, vectors in batches:
            placement.add_(vectors, self.sample(noise))

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonal of ``M⁻¹``, ``[G, o, i]``."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """``M⁻¹`` written out, ``[G, n, n]`` with n = o·i; only for small n."""

    def quadratic(self, stack: ExampleGradients, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for the matrices of a stack; ``mode`` as in :meth:`ExampleGradients.quadratic`."""
        return self.quadratic_form(self.basis.coordinates(stack), mode)


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
    def log_determinant(self) -> Tensor:
        return self.values.double().log().sum() + self.log_scale

    @override
    def quadratic_form(self, rotated: ExampleGradients, mode: str) -> Tensor:
        if isinstance(rotated, OuterGradients):
            rotated = rotated.without_zeros()
        return rotated.quadratic(self.values.reciprocal().to(rotated.dtype), mode)

    @override
    def sample(self, noise: Tensor) -> Tensor:
        return self.basis.expand(noise * self.values.rsqrt())

    @property
    @override
    def reads_matrices(self) -> bool:
        return isinstance(self.basis, DenseBasis)

    @override
    def add_draws_(self, batches: Iterable[tuple[Tensor, Tensor]], placement: ParameterSlices) -> None:
        deviations, basis = self.values.rsqrt(), self.basis
        for noise, vectors in batches:
            noise *= deviations
            if isinstance(basis, KroneckerBasis) and noise.shape[:2] == (1, 1) and placement.is_contiguous:
                # One large matrix: the second product is added in place, without a result of its own.
                rows = basis.left[0] @ noise[0, 0]
                for columns, view in placement.views(vectors):
                    if basis.right is None:
                        view[0, 0] += rows[:, columns]
                    else:
                        view[0, 0].addmm_(rows, basis.right[0, columns].mT)
            else:
                placement.add_(vectors, basis.expand(noise))

    @override
    def variances(self) -> Tensor:
        return self.basis.diagonal(self.values.reciprocal())

    @override
    def covariance(self) -> Tensor:
        groups, rows, columns = self.values.shape
        n = rows * columns
        identity = torch.eye(n, dtype=self.values.dtype, device=self.values.device).view(n, 1, rows, columns)
        columns_of = self.basis.expand(identity.expand(n, groups, rows, columns) * self.values.rsqrt()).flatten(2)
        return torch.einsum("kgi,kgj->gij", columns_of, columns_of)
