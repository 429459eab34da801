"""Sums and broadcasts over ranks, with many tensors in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from laplace_plus.distributed.group import Group


def _through(group: Group, tensors: Iterable[Tensor], send: Callable[[Tensor], object], *, takes: bool = True) -> None:
    """Pack tensors of each type into one, ``send`` these once every rank has got so far, and unpack them in place."""
    by_dtype: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(str(tensor.dtype), []).append(tensor)
    buckets: list[tuple[Tensor, list[Tensor]]] = []
    for _, chosen in sorted(by_dtype.items()):
        device = group.transport(chosen[0].device)
        buckets.append((torch.cat([tensor.flatten().to(device) for tensor in chosen]), chosen))
    # Whatever can go wrong on one rank alone has gone wrong by now.
    group.exchange("a message", [(str(flat.dtype), len(flat)) for flat, _ in buckets])
    for flat, _ in buckets:
        send(flat)
    for flat, chosen in buckets if takes else ():
        for tensor, arrived in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
            tensor.copy_(arrived.view(tensor.shape))


def sum_(group: Group, tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their sums over the ranks: one ``all_reduce`` for each type among them.

    They have the same shapes, types and order on every rank, which gets the same bits. Extra memory is one copy of
    them.
    """
    _through(group, tensors, lambda flat: dist.all_reduce(flat, group=group.process_group))


def broadcast_(group: Group, tensors: Iterable[Tensor], source: int) -> None:
    """Replace tensors, as for :func:`sum_`, by those of the rank ``source``: one ``broadcast`` for each type."""

    def send(flat: Tensor) -> None:
        dist.broadcast(flat, group=group.process_group, group_src=source)

    _through(group, tensors, send, takes=group.rank != source)  # the source's own tensors are not written to
