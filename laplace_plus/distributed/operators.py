"""A sum of one operator per rank, for algorithms that run on rank 0."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.distributed.group import Group
from laplace_plus.distributed.messages import broadcast_, sum_
from laplace_plus.linalg.operators import Operator

_PRODUCT = "a product with the curvature"


class SummedOperator(Operator):
    """The sum of one symmetric operator per rank, ``own [n, n]``; None where a rank has none.

    Rank 0 runs the algorithm; the others :meth:`serve` its products until it calls :meth:`finish`. The result therefore
    does not depend on whether ranks round alike. A product costs one broadcast and one reduction of the vectors.
    """

    symmetric = True

    def __init__(self, group: Group, own: Operator | None, size: int, *, dtype: torch.dtype, device: torch.device):
        self.group, self.own = group, own
        self.shape, self.dtype, self.device = (size, size), dtype, device

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        rows = vectors.detach().reshape(-1, self.shape[1]).contiguous()
        self.group.exchange(_PRODUCT, len(rows))
        return self._multiply(rows).view(vectors.shape)

    def serve(self) -> None:
        """Take part in rank 0's products until it finishes; :class:`DistributedError` if another rank failed."""
        while (count := self.group.exchange(_PRODUCT)[0]) is not None:
            self._multiply(torch.empty(count, self.shape[1], dtype=self.dtype, device=self.device))

    def finish(self) -> None:
        """Tell the other ranks that no further products follow."""
        self.group.exchange(_PRODUCT, None)

    def _multiply(self, rows: Tensor) -> Tensor:
        broadcast_(self.group, [rows], 0)
        result = torch.zeros_like(rows) if self.own is None else self.own(rows).contiguous()
        sum_(self.group, [result])
        return result
