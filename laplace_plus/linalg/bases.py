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

from laplace_plus.linalg.stacks import CHUNK_BYTES, DenseStack, MappedStack, OneHotStack, OuterStack, Stack


class Rotation(ABC):
    """What several quadratic forms ``P M⁻¹ P'`` have in common: the coordinates that they weigh."""

    @abstractmethod
    def rotate(self, stack: Stack) -> Stack:
        """Coordinates of a stack's matrices, ``Rᵀ P``."""


class Basis(Rotation):
    """An invertible linear map R on arrays ``[G, o, i]``."""

    @abstractmethod
    def expand(self, coordinates: Tensor) -> Tensor:
        """``R z`` for coordinates ``[n, G, o, i]``."""

    @abstractmethod
    def spread(self, variances: Tensor) -> Tensor:
        """The diagonal of ``R diag(variances) Rᵀ``, ``[G, o, i]``."""


class IdentityBasis(Basis):
    """R = I."""

    @override
    def rotate(self, stack: Stack) -> Stack:
        return stack

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        return coordinates

    @override
    def spread(self, variances: Tensor) -> Tensor:
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
    def rotate(self, stack: Stack) -> Stack:
        left, right = self.left.to(stack.dtype), None if self.right is None else self.right.to(stack.dtype)
        if isinstance(stack, OneHotStack) and right is None:
            return OneHotStack(stack.index, stack.left.to(stack.dtype) @ left[0], stack.n_columns)
        if isinstance(stack, OuterStack) and right is not None:
            if stack.n_positions == 1:  # small: rotate once, for however many weightings follow
                source = stack.expand_left(stack.raw_left[:, :1] if stack.is_shared else stack.raw_left)
                rotated = torch.einsum("vbsgo,gop->vbsgp", source.to(left.dtype), left)
                return OuterStack(
                    torch.einsum("bsgi,gij->bsgj", stack.right(slice(0, stack.n_examples)).to(left.dtype), right),
                    rotated.expand(-1, stack.n_examples, -1, -1, -1),
                )
            # Otherwise the rows stay in their raw form until a chunk of them is asked for.
            expand_left, expand_right = stack.expand_left, stack.expand_right

            def rotated_left(x: Tensor) -> Tensor:
                return torch.einsum("vbsgo,gop->vbsgp", expand_left(x).to(left.dtype), left)

            def rotated_right(x: Tensor) -> Tensor:
                return torch.einsum("bsgi,gij->bsgj", expand_right(x).to(left.dtype), right)

            return OuterStack(stack.raw_right, stack.raw_left, rotated_right, rotated_left, left.dtype)
        values = torch.einsum("gop,vbgoi->vbgpi", left, stack.dense(slice(0, stack.n_examples)))
        return DenseStack(values if right is None else torch.einsum("vbgpi,gij->vbgpj", values, right))

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        values = self.left @ coordinates
        return values if self.right is None else values @ self.right.mT

    @override
    def spread(self, variances: Tensor) -> Tensor:
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
    def rotate(self, stack: Stack) -> Stack:
        mapped = MappedStack(stack, self._matrix())
        if stack.n_bytes() > CHUNK_BYTES:
            return mapped
        return DenseStack(mapped.dense(slice(0, stack.n_examples)))  # small: map once, for however many weightings

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        flat = coordinates.flatten(2)
        return torch.einsum("gnm,kgm->kgn", self._matrix(), flat).view_as(coordinates)

    @override
    def spread(self, variances: Tensor) -> Tensor:
        return torch.einsum("gnm,gm->gn", self._matrix().square(), variances.flatten(1)).view_as(variances)
