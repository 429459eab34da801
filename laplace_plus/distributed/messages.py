"""Sums and broadcasts over ranks, with many tensors in one message, and sums of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from laplace_plus.distributed.group import Group
from laplace_plus.linalg.operators import Operator

_PRODUCT = "a product with the curvature"


def _through(
    group: Group, tensors: Sequence[Tensor], send: Callable[[Tensor], object], *, gives: bool = True, takes: bool = True
) -> None:
    """Pack tensors of each type into one, ``send`` these once every rank has got so far, and unpack them in place."""
    buckets: list[tuple[Tensor, list[Tensor]]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        chosen = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
        if chosen:
            device = group.transport(chosen[0].device)
            flat = torch.empty(sum(tensor.numel() for tensor in chosen), dtype=dtype, device=device)
            if gives:
                torch.cat([tensor.flatten().to(device) for tensor in chosen], out=flat)
            buckets.append((flat, chosen))
    # Whatever can go wrong on one rank alone has gone wrong by now.
    group.exchange("a message", [(str(flat.dtype), len(flat)) for flat, _ in buckets])
    for flat, _ in buckets:
        send(flat)
    for flat, chosen in buckets if takes else ():
        for tensor, arrived in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
            tensor.copy_(arrived.view(tensor.shape))


def sum_(group: Group, tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their sums over the ranks: one ``all_reduce`` for each type among them.

    Every rank gets the same bits. Extra memory is one copy of the tensors.

    Args:
        group: The ranks.
        tensors: Of the same shapes and types, in the same order, on every rank; changed in place.
    """
    _through(group, list(tensors), lambda flat: dist.all_reduce(flat, group=group.process_group))


def broadcast_(group: Group, tensors: Iterable[Tensor], source: int) -> None:
    """Replace tensors by those of one rank: one ``broadcast`` for each type among them.

    Args:
        group: The ranks.
        tensors: Of the same shapes and types, in the same order, on every rank; changed in place.
        source: That rank's number within the group.
    """

    def send(flat: Tensor) -> None:
        dist.broadcast(flat, group=group.process_group, group_src=source)

    _through(group, list(tensors), send, gives=group.rank == source, takes=group.rank != source)


class SummedOperator(Operator):
    """The sum of one symmetric operator per rank.

    Rank 0 runs the algorithm; the others :meth:`serve` its products until it calls :meth:`finish`. The result therefore
    does not depend on whether ranks round alike. A product costs one broadcast and one reduction of the vectors.

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
        rows = vectors.detach().reshape(-1, self.shape[1]).contiguous()
        self.group.exchange(_PRODUCT, len(rows))
        return self._multiply(rows).view(vectors.shape)

    def serve(self) -> None:
        """Take part in rank 0's products until it finishes.

        Raises:
            DistributedError: Another rank failed.
        """
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

    @override
    def _transpose(self) -> Operator:
        return self

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return ()
