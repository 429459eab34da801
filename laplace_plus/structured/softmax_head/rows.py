"""What the exact curvature of a linear head with many outputs is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadRows:
    """What a head's curvature is made of.

    Attributes:
        features: ``Φ [N, i]``.
        scales: ``p [N, C]``.
        coupled: Whether ``p_n p_nᵀ`` is taken away; the scales of a row then sum to one.
    """

    features: Tensor
    scales: Tensor
    coupled: bool

    def dense(self) -> Tensor:
        """The curvature written out, ``[C·i, C·i]``."""
        size, width = self.scales.shape[1], self.features.shape[1]
        result = self.features.new_zeros(size, width, size, width)
        own = self.scales * self._rest() if self.coupled else self.scales
        for c in range(size):
            last = size if self.coupled else c + 1
            row = self.scales[:, c:last] * (-self.scales[:, c : c + 1] if self.coupled else 0)
            row[:, 0] = own[:, c]
            weighted = (row[:, :, None] * self.features[:, None]).flatten(1)  # [N, (C − c)·i]
            block = (self.features.T @ weighted).view(width, last - c, width)
            result[c, :, c:last] = block
            result[c:last, :, c] = block.permute(1, 2, 0)
        return result.view(size * width, size * width)

    def _rest(self) -> Tensor:
        """``1 − p [N, C]``; for the most probable class the sum of all others, which keeps its digits beside one."""
        top = self.scales.argmax(1, keepdim=True)
        others = self.scales.scatter(1, top, 0.0).sum(1, keepdim=True)
        return (1 - self.scales).scatter(1, top, others)
