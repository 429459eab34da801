"""Symmetric matrices whose terms lie on several ranks, as operators."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.distributed.buckets import broadcast_, sum_
from laplace_plus.distributed.group import Group
from laplace_plus.linalg.operators import Operator

_PRODUCT = "a product with the curvature"


class SummedOperator(Operator):
    """The sum of one symmetric operator for each rank, multiplied at the word of rank 0.

    Rank 0 runs the algorithm; the others :meth:`serve` its products until it calls :meth:`finish`. So nothing depends
    on whether ranks that compute the same thing also round in the same way. A product costs one broadcast and one
    reduction of the vectors.

    Args:
        group: The ranks.
        own: This rank's term, ``[n, n]``; None where it has none.
        size: n.
        dtype: Type of the vectors.
        device: Where they live.
    """

    symmetric = True

    def __init__(self, group: Group, own: Operator | None, size: int, *, dtype: torch.dtype, device: torch.device):
        self.group, self.own = group, own
        self.shape, self.dtype, self.device = (size, size), dtype, device

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        stack = vectors.detach().reshape(-1, self.shape[1]).contiguous()
        self.group.exchange(_PRODUCT, len(stack))
        return self._multiply(stack).view(vectors.shape)

    def serve(self) -> None:
        """Take part in rank 0's products until it is done.

        Raises:
            DistributedError: Another rank failed.
        """
        while (count := self.group.exchange(_PRODUCT)[0]) is not None:
            self._multiply(torch.empty(count, self.shape[1], dtype=self.dtype, device=self.device))

    def finish(self) -> None:
        """Let the other ranks go."""
        self.group.exchange(_PRODUCT, None)

    def _multiply(self, stack: Tensor) -> Tensor:
        broadcast_(self.group, [stack], 0)
        result = torch.zeros_like(stack) if self.own is None else self.own(stack).contiguous()
        sum_(self.group, [result])
        return result

    @override
    def _transpose(self) -> Operator:
        return self

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return ()
