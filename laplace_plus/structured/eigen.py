"""Blocks that are diagonal in a known basis, and what follows from that for their inverses and determinants."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.blocks import Basis, Block, Factor, IdentityBasis, register_block
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients
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

    def __post_init__(self) -> None:
        require_positive(self.values)

    @override
    def quadratic_form(self, coordinates: ExampleGradients, mode: str) -> Tensor:
        return coordinates.quadratic(self._inverse.to(coordinates.dtype), mode)

    @cached_property
    def _inverse(self) -> Tensor:
        return self.values.reciprocal()  # kept for all predictions: a division of as many numbers as there are weights

    @override
    def log_determinant(self) -> Tensor:
        return self.values.double().log().sum() + self.log_scale

    @override
    def sample(self, noise: Tensor) -> Tensor:
        return self.basis.expand(noise * self.values.rsqrt())

    @override
    def variances(self) -> Tensor:
        return self.basis.diagonal(self.values.reciprocal())


class EigenBlock(Block):
    """A block that is diagonal in a known basis."""

    _spectrum: Spectrum | None = None

    @abstractmethod
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        """A basis in which ``H(w)`` is diagonal and the diagonal ``[G, o, i]``.

        Args:
            weights: Component weights ``w [K]``, whose type the diagonal takes; the result is differentiable in them
                only where K = 1.
        """

    @override
    def diagonal(self, weights: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        return basis.diagonal(values.to(next(iter(self.parts())).dtype))

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        basis, values = self.eigen(weights)
        return EigenFactor(basis, values + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim:
            return self.factor(weights, diagonal).log_determinant()
        spectrum = self.spectrum()
        if spectrum is None:
            return log_determinant(self.eigen(weights)[1].flatten()[None], torch.ones_like(weights[:1]), diagonal)
        require_positive(diagonal)
        return spectrum.log_ratio(weights[0], diagonal) + diagonal.double().log() * math.prod(self.shape)

    @override
    def spectrum(self) -> Spectrum | None:
        if self._spectrum is None and self.n_components == 1:
            part = self.parts()[0]
            left, right = self._sides(torch.ones(1, dtype=part.dtype, device=part.device))
            if not bool((left < 0).any() or (right < 0).any()):
                self._spectrum = Spectrum.of(left, right)
        return self._spectrum

    def _sides(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Where K = 1, the eigenvalues at a weight of one as products of ``[G, m]`` and ``[G or 1, n]``."""
        values = self.eigen(weights)[1].flatten()[None]
        return values, torch.ones_like(values[:, :1])

    @override
    def dense(self, weights: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        return basis.matrix(values)

    @override
    def quadratic(self, weights: Tensor, vectors: Tensor) -> Tensor:
        basis, values = self.eigen(weights)
        return basis.coordinates(DenseGradients(vectors[None])).quadratic(values, "diagonal")[:, 0]


@register_block
@dataclass
class DiagonalBlock(EigenBlock):
    """A diagonal matrix; its ``values`` are ``[K, G, o, i]``."""

    values: Tensor

    storage: ClassVar[str] = "diagonal"

    def __post_init__(self) -> None:
        self.kind = "diagonal"
        self.n_components = self.values.shape[0]
        self.shape = tuple(self.values.shape[1:])  # type: ignore[assignment]

    @override
    def add(self, gradients: ExampleGradients, components: Tensor) -> None:
        for total, own in zip(self.values, gradients.by_component(components, self.n_components), strict=True):
            own.add_squares_(total)
        self._spectrum = None

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        return IdentityBasis(), torch.tensordot(weights, self.values.to(weights.dtype), 1)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return EigenBlock.log_determinant(self, weights, diagonal)
        return log_determinant(self.values.flatten(1), weights, diagonal.flatten() if diagonal.ndim else diagonal)

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
        self._spectrum = None
