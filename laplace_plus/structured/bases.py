"""Bases in which a structured matrix is diagonal.

A basis is an invertible linear map R on ``[G, o, i]`` arrays. ``rotate`` applies Rᵀ to every matrix of a stack (so that
``J R`` is what comes out for a Jacobian J), ``expand`` applies R to coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._memory import budget
from laplace_plus.structured.chunks import CHUNK_BYTES
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    MappedGradients,
    OuterGradients,
    OutputLayerGradients,
)
from laplace_plus.structured.gradients.contractions import times


class CoordinateMap(ABC):
    """What several quadratic forms ``P M⁻¹ P'`` have in common: the coordinates that they weigh."""

    @abstractmethod
    def coordinates(self, stack: ExampleGradients) -> ExampleGradients:
        """Coordinates of a stack's matrices, ``Rᵀ P``."""


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
    def coordinates(self, stack: ExampleGradients) -> ExampleGradients:
        return stack

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
        left: ``[G, o, o]``.
        right: ``[G, i, i]``, or None where the right side is the identity.
    """

    left: Tensor
    right: Tensor | None

    @override
    def coordinates(self, stack: ExampleGradients) -> ExampleGradients:
        left, right = self.left.to(stack.dtype), None if self.right is None else self.right.to(stack.dtype)
        if isinstance(stack, OutputLayerGradients) and right is not None:
            return stack.rotated(left[0], right[0])
        if isinstance(stack, EmbeddingGradients) and right is None:
            return EmbeddingGradients(stack.index, stack.left.to(stack.dtype) @ left[0], stack.n_columns)
        if isinstance(stack, OuterGradients) and right is not None:
            if stack.n_positions == 1:  # small: rotate once, for however many weightings follow
                source, _ = stack.sides(slice(0, 1 if stack.is_shared else stack.n_examples))
                rotated = times(source, left)
                return OuterGradients(
                    times(stack.right(slice(0, stack.n_examples)), right),
                    rotated.expand(-1, stack.n_examples, -1, -1, -1),
                )
            return stack.turned(left, right)
        values = left.mT @ stack.dense(slice(0, stack.n_examples))
        return DenseGradients(values if right is None else values @ right)

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        values = self.left @ coordinates
        return values if self.right is None else values @ self.right.mT

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        values = self.left.square() @ variances
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
    def coordinates(self, stack: ExampleGradients) -> ExampleGradients:
        if isinstance(stack, OutputLayerGradients):
            return DenseGradients(stack.mapped(self._matrix()[0].to(stack.dtype)).unflatten(-1, stack.shape))
        mapped = MappedGradients(stack, self._matrix())
        if stack.n_bytes() > min(CHUNK_BYTES, budget(stack.device) // 4):
            return mapped
        return DenseGradients(mapped.dense(slice(0, stack.n_examples)))  # small: map once, for however many weightings

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        flat = coordinates.flatten(2)
        return (self._matrix() @ flat.movedim(0, -1)).movedim(-1, 0).reshape(coordinates.shape)

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return (self._matrix().square() @ variances.flatten(1)[..., None]).view_as(variances)


@dataclass(frozen=True)
class ColumnBasis(Basis):
    """``R z = z Nᵀ`` group by group: the left side is the identity.

    Attributes:
        right: N, orthogonal ``[G, i, i]``.
    """

    right: Tensor

    @override
    def coordinates(self, stack: ExampleGradients) -> ExampleGradients:
        right = self.right.to(stack.dtype)
        if isinstance(stack, OuterGradients):
            stack = OutputLayerGradients.of(stack) or stack
        if isinstance(stack, OutputLayerGradients):
            return stack.rotated(None, right[0])
        if isinstance(stack, OuterGradients):
            expand_left, expand_right = stack.expand_left, stack.expand_right

            def rotated(x: Tensor) -> Tensor:
                return torch.einsum("bsgi,gij->bsgj", expand_right(x).to(right.dtype), right)

            return OuterGradients(stack.raw_right, stack.raw_left, rotated, expand_left, right.dtype)
        return DenseGradients(torch.einsum("vbgoi,gij->vbgoj", stack.dense(slice(0, stack.n_examples)), right))

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        return coordinates @ self.right.mT

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return variances @ self.right.square().mT
