"""The inverse of a matrix of low rank plus a diagonal one.

All sums run in float64 whatever type the vectors have: a variance under a low-rank precision is the prior's minus what
the data took away, a difference of nearly equal numbers where the data determine much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._memory import slices
from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured.blocks import CoordinateMap, Factor
from laplace_plus.structured.gradients import ExampleGradients
from laplace_plus.structured.log_determinants import not_positive_definite


@dataclass(frozen=True)
class LowRankCoordinates(CoordinateMap):
    """The gradients themselves and their inner products with the vectors U ``[r, n]``."""

    vectors: Tensor

    @override
    def coordinates(self, gradients: ExampleGradients) -> ProjectedGradients:
        return ProjectedGradients(gradients.in_dtype(torch.float64), self.vectors)


class ProjectedGradients(ExampleGradients):
    """Gradients together with the inner products of their matrices with some vectors.

    Args:
        source: The gradients, of n entries each.
        vectors: U, ``[r, n]``.
    """

    def __init__(self, source: ExampleGradients, vectors: Tensor):
        self.source, self.vectors = source, vectors
        self.n_cotangents, self.n_examples, self.shape = source.n_cotangents, source.n_examples, source.shape
        self.dtype, self.device = source.dtype, source.device

    @cached_property
    def projections(self) -> Tensor:
        """``⟨P_vn, U_r⟩``, ``[V, B, r]``."""
        return self.source.project(self.vectors[:, None, None])

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.source.dense(examples)

    @override
    def select(self, cotangents: Tensor) -> ProjectedGradients:
        return ProjectedGradients(self.source.select(cotangents), self.vectors)

    @override
    def in_dtype(self, dtype: torch.dtype) -> ProjectedGradients:
        return ProjectedGradients(self.source.in_dtype(dtype), self.vectors)

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        return self.source.quadratic(weights, mode)


@dataclass(frozen=True)
class LowRankFactor(Factor):
    """``M = Uᵀ diag(values) U + D``, inverted by Woodbury's identity.

    With ``A = D^-½ Uᵀ diag(values)^½`` and ``AᵀA = Q diag(λ) Qᵀ``, every function of M follows from those r numbers:
    ``g(I + AAᵀ) = g(1) I + A Q diag((g(1+λ) − g(1))/λ) Qᵀ Aᵀ``.

    Attributes:
        basis: Holds U, ``[r, n]``.
        values: Positive ``[r]``, float64.
        diagonal: D, 0-d or ``[1, 1, n]``, float64.

    Raises:
        NotPositiveDefiniteError: An entry of D is zero, negative or NaN.
    """

    basis: LowRankCoordinates
    values: Tensor
    diagonal: Tensor

    def __post_init__(self) -> None:
        smallest = self.diagonal.detach().min()
        if not smallest > 0:
            raise not_positive_definite(smallest.item())

    @cached_property
    def _inner(self) -> tuple[Tensor, Tensor]:
        """λ ``[r]`` and ``diag(values)^½ Q`` ``[r, r]``."""
        root = self.values.sqrt()
        flat = self.diagonal.flatten() if self.diagonal.ndim else None
        inner = gram(self.basis.vectors, flat) / (1.0 if self.diagonal.ndim else self.diagonal)
        numbers, vectors = symmetric_eigen(root[:, None] * inner * root)
        return numbers.clamp(min=0), root[:, None] * vectors

    def _over_columns(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the n entries with ``Qᵀ diag(values)^½ U`` and D there, a bounded number at a time."""
        mix, vectors = self._inner[1], self.basis.vectors
        for columns in slices(vectors.shape[1], 2 * 8 * max(1, len(vectors))):
            diagonal = self.diagonal.flatten()[columns] if self.diagonal.ndim else self.diagonal
            yield columns, mix.mT @ vectors[:, columns].double(), diagonal

    @override
    def log_determinant(self) -> Tensor:
        count = 1 if self.diagonal.ndim else self.basis.vectors.shape[1]
        return torch.log1p(self._inner[0]).sum() + self.diagonal.log().sum() * count

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        assert isinstance(coordinates, ProjectedGradients)
        inverse = self.diagonal.reciprocal().expand(coordinates.shape)
        values, mix = self._inner
        if self.diagonal.ndim:
            projections = coordinates.source.project(self.basis.vectors[:, None, None] * inverse)
        else:
            projections = coordinates.projections / self.diagonal
        taken = projections @ (mix * (1 + values).rsqrt())  # [V, B, r]
        prior = coordinates.source.quadratic(inverse, mode)
        if mode == "diagonal":
            return (prior - taken.square().sum(-1).T).clamp(min=0)
        if mode == "joint":
            return prior - torch.einsum("vbr,wcr->bvcw", taken, taken)
        return prior - torch.einsum("vbr,wbr->bvw", taken, taken)

    @override
    def sample(self, noise: Tensor) -> Tensor:
        flat = noise.flatten(1).double()
        coordinates = torch.zeros(len(flat), len(self.values), dtype=flat.dtype, device=flat.device)
        for columns, rows, diagonal in self._over_columns():
            coordinates += (flat[:, columns] * diagonal.rsqrt()) @ rows.mT
        root = (1 + self._inner[0]).sqrt()
        coordinates /= -(root * (1 + root))
        result = torch.empty_like(flat)
        for columns, rows, diagonal in self._over_columns():
            result[:, columns] = (flat[:, columns] + coordinates @ rows * diagonal.rsqrt()) * diagonal.rsqrt()
        return result.view_as(noise).to(noise.dtype)

    @override
    def variances(self) -> Tensor:
        vectors, values = self.basis.vectors, self._inner[0]
        result = torch.empty(vectors.shape[1], dtype=torch.float64, device=vectors.device)
        for columns, rows, diagonal in self._over_columns():
            taken = ((rows / diagonal).square() / (1 + values)[:, None]).sum(0)
            result[columns] = diagonal.reciprocal() - taken
        return result[None, None].to(vectors.dtype)

    @override
    def covariance(self) -> Tensor:
        vectors = self.basis.vectors
        inverse = self.diagonal.reciprocal().expand(1, 1, vectors.shape[1]).flatten()
        values, mix = self._inner
        rows = mix.mT @ vectors.double() * inverse
        return (torch.diag(inverse) - (rows.mT / (1 + values)) @ rows)[None].to(vectors.dtype)


def gram(vectors: Tensor, diagonal: Tensor | None) -> Tensor:
    """``U D⁻¹ Uᵀ`` in float64, ``[r, r]``, a bounded number of columns at a time; differentiable in D ``[n]``."""
    result = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=vectors.device)
    for columns in slices(vectors.shape[1], 2 * 8 * max(1, len(vectors))):
        wide = vectors[:, columns].double()
        result = result + (wide if diagonal is None else wide / diagonal[columns]) @ wide.mT
    return result


def low_rank_log_determinant(values: Tensor, vectors: Tensor, diagonal: Tensor) -> Tensor:
    """``log det(Uᵀ diag(values) U + D)``, 0-d float64; differentiable in values and D.

    Args:
        values: Non-negative ``[r]``, float64.
        vectors: U, ``[r, n]``.
        diagonal: D, with n entries, float64.
    """
    root, flat = values.sqrt(), diagonal.flatten()
    inner = root[:, None] * gram(vectors, flat) * root
    lower = torch.linalg.cholesky(inner + torch.eye(len(root), dtype=inner.dtype, device=inner.device))
    return 2 * lower.diagonal().log().sum() + flat.log().sum()
