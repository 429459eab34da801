"""The gradients of a linear head's own outputs: rows of a matrix that are zero but for one.

Where a layer's output is the network's own, the gradient of output c is the layer's input in row c, ``e_c φᵀ``. With
many outputs not even the unit vectors may be written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.stacks import OuterStack, Stack


@dataclass
class HeadStack(Stack):
    """Matrices ``e_c φ_nᵀ`` of shape ``[1, C, i]``, one for each chosen output c and example n.

    Attributes:
        features: ``φ [B, i]``.
        outputs: Chosen outputs ``[V]``, or ``[B, V]`` where each example has its own.
        n_outputs: C.
    """

    features: Tensor
    outputs: Tensor
    n_outputs: int

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.outputs.shape[-1], self.features.shape[0]
        self.shape = (1, self.n_outputs, self.features.shape[1])
        self.dtype, self.device = self.features.dtype, self.features.device

    @classmethod
    def of(cls, stack: OuterStack) -> HeadStack | None:
        """The same stack, where its left sides are unit vectors that all examples share; None for any other stack."""
        if stack.n_positions != 1 or stack.shape[0] != 1 or not (stack.is_shared or stack.n_examples == 1):
            return None
        left = stack.expand_left(stack.raw_left[:, :1]).flatten(1)  # [V, C]
        outputs = left.argmax(-1)
        if not bool(((left != 0).sum(-1) == 1).all() and (left.gather(1, outputs[:, None]) == 1).all()):
            return None
        return cls(stack.right(slice(0, stack.n_examples))[:, 0, 0], outputs, left.shape[1])

    @property
    def is_shared(self) -> bool:
        """Whether the examples share their outputs."""
        return self.outputs.ndim == 1

    @override
    def dense(self, examples: slice) -> Tensor:
        features = self.features[examples]
        values = features.new_zeros(self.n_directions, len(features), 1, *self.shape[1:])
        chosen = self.outputs if self.is_shared else self.outputs[examples]
        index = chosen.expand(len(features), -1).T  # [V, b]
        direction, example = torch.arange(self.n_directions)[:, None], torch.arange(len(features))
        values[direction, example, 0, index] = features
        return values

    @override
    def select(self, directions: Tensor) -> HeadStack:
        return replace(self, outputs=self.outputs[..., directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> HeadStack:
        return replace(self, features=self.features.to(dtype))

    def rotated(self, left: Tensor | None, right: Tensor) -> HeadStack | OuterStack:
        """``Lᵀ P N`` for a left side L ``[C, C]`` (None for the identity) and a right side N ``[i, i]``."""
        features = self.features @ right
        if left is None:
            return replace(self, features=features)
        rows = left[self.outputs]  # [V, C] or [B, V, C]
        rows = rows[:, None].expand(-1, self.n_examples, -1) if self.is_shared else rows.transpose(0, 1)
        return OuterStack(features[:, None, None], rows[:, :, None, None])

    def mapped(self, matrix: Tensor, examples: slice = slice(None)) -> Tensor:
        """The flattened matrices times ``[C·i, m]``, ``[V, b, m]``."""
        blocks = matrix.unflatten(0, self.shape[1:])
        if self.is_shared:
            return torch.einsum("bi,vim->vbm", self.features[examples], blocks[self.outputs])
        return torch.einsum("bi,bvim->vbm", self.features[examples], blocks[self.outputs[examples]])

    @override
    def project(self, matrices: Tensor) -> Tensor:
        flat = matrices[:, 0].to(self.dtype).permute(1, 2, 0).flatten(0, 1)  # [C·i, r]
        return self.mapped(flat)

    @override
    def squares(self) -> Tensor:
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        squares = self.features.square()
        if self.is_shared:
            total[0].index_add_(0, self.outputs, squares.sum(0).expand(self.n_directions, -1))
        else:
            total[0].index_add_(0, self.outputs.flatten(), squares.repeat_interleave(self.n_directions, 0))
        return total

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        weights = weights[0]
        if mode == "joint":
            return self._joint_quadratic(weights)
        if self.is_shared:
            every = self.n_directions == self.n_outputs and bool((self.outputs[1:] > self.outputs[:-1]).all())
            values = self.features.square() @ (weights if every else weights[self.outputs]).T  # [B, V]
        else:
            values = torch.einsum("bi,bvi->bv", self.features.square(), weights[self.outputs])
        if mode == "diagonal":
            return values
        same = self.outputs[..., :, None] == self.outputs[..., None, :]
        return values[:, :, None] * same

    def _joint_quadratic(self, weights: Tensor) -> Tensor:
        n, v = self.n_examples, self.n_directions
        chosen = self.outputs.expand(n, v)
        result = weights.new_zeros(n, v, n, v)
        for example in range(n):
            # ⟨e_c φ_b, e_c' φ_b'⟩ is zero unless c = c'.
            weighted = self.features[example] * weights[chosen[example]]  # [V, i]
            same = chosen[example][:, None, None] == chosen  # [V, B, V]
            result[example] = (weighted @ self.features.T)[:, :, None] * same
        return result
