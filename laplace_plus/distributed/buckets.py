"""Many tensors in one message: flat buckets, one for each type, with symmetric matrices as triangles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laplace_plus.distributed.group import Group


def pack_symmetric(matrix: Tensor) -> Tensor:
    """The lower triangles of symmetric matrices ``[…, n, n]`` without gaps, ``[…, n(n+1)/2]``.

    In the rectangular full packed format (Gustavson et al., 2010): the second half's triangle is turned over into the
    place that the first half's leaves free, so that whole blocks are copied and no index is needed.
    """
    n = matrix.shape[-1]
    first, second = (n + 1) // 2, n // 2
    upper = matrix[..., first:, first:].mT.triu()
    square = matrix.new_zeros(*matrix.shape[:-2], first + 1 - n % 2, first)
    if n % 2:
        square += matrix[..., :first, :first].tril()
        square[..., :second, 1:] += upper
    else:
        square[..., 1:, :] += matrix[..., :first, :first].tril()
        square[..., :second, :] += upper
    return torch.cat([square.flatten(-2), matrix[..., first:, :first].flatten(-2)], -1)


def unpack_symmetric_(packed: Tensor, matrix: Tensor) -> None:
    """Undo :func:`pack_symmetric`: write ``[…, n(n+1)/2]`` to the symmetric matrices ``[…, n, n]``."""
    n = matrix.shape[-1]
    first, second = (n + 1) // 2, n // 2
    height = first + 1 - n % 2
    square = packed[..., : height * first].unflatten(-1, (height, first))
    if n % 2:
        above, below = square, square[..., :second, 1:]
    else:
        above, below = square[..., 1:, :], square[..., :second, :]
    matrix[..., first:, :first] = packed[..., height * first :].unflatten(-1, (second, first))
    matrix[..., :first, first:] = matrix[..., first:, :first].mT
    matrix[..., :first, :first] = above.tril() + above.tril(-1).mT
    matrix[..., first:, first:] = below.triu() + below.triu(1).mT


def _length(tensor: Tensor, symmetric: bool) -> int:
    if not symmetric:
        return tensor.numel()
    n = tensor.shape[-1]
    return tensor.shape[:-2].numel() * n * (n + 1) // 2


def _through(
    group: Group,
    tensors: Sequence[Tensor],
    symmetric: Sequence[bool],
    send: Callable[[Tensor], object],
    *,
    gives: bool = True,
    takes: bool = True,
) -> None:
    """Pack tensors of each type into one, ``send`` these once every rank has got so far, and unpack them in place."""
    buckets: list[tuple[Tensor, list[tuple[Tensor, bool, Tensor]]]] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        chosen = [(t, s) for t, s in zip(tensors, symmetric, strict=True) if t.dtype == dtype and t.numel()]
        lengths = [_length(tensor, packed) for tensor, packed in chosen]
        if not lengths:
            continue
        flat = torch.empty(sum(lengths), dtype=dtype, device=group.transport(chosen[0][0].device))
        entries = [(tensor, packed, piece) for (tensor, packed), piece in zip(chosen, flat.split(lengths), strict=True)]
        for tensor, packed, piece in entries if gives else ():
            piece.copy_((pack_symmetric(tensor) if packed else tensor).flatten())
        buckets.append((flat, entries))
    # Whatever can go wrong on one rank alone has gone wrong by now.
    group.exchange("a message", [(str(flat.dtype), len(flat)) for flat, _ in buckets])
    for flat, _ in buckets:
        send(flat)
    for _, entries in buckets if takes else ():
        for tensor, packed, piece in entries:
            arrived = piece.to(tensor.device)
            if packed:
                unpack_symmetric_(arrived.view(*tensor.shape[:-2], -1), tensor)
            else:
                tensor.copy_(arrived.view(tensor.shape))


def sum_(group: Group, tensors: Iterable[Tensor], symmetric: Iterable[bool] | None = None) -> None:
    """Replace tensors by their sums over the ranks: one ``all_reduce`` for each type among them.

    Every rank gets the same bits. Extra memory is one copy of the tensors, half of one for symmetric matrices.

    Args:
        group: The ranks.
        tensors: Of the same shapes and types, in the same order, on every rank; changed in place.
        symmetric: Which of them are symmetric matrices ``[…, n, n]``; by default none.
    """
    given = list(tensors)
    flags = [False] * len(given) if symmetric is None else list(symmetric)
    _through(group, given, flags, lambda flat: dist.all_reduce(flat, group=group.process_group))


def collect_(group: Group, tensors: Iterable[Tensor], owners: Iterable[int]) -> None:
    """Replace symmetric matrices by their sums over the ranks, each on the rank that owns it.

    One ``reduce`` for each type and owner; on the other ranks the tensors are left with nothing of use.

    Args:
        group: The ranks.
        tensors: ``[…, n, n]`` of the same shapes and types, in the same order, on every rank; changed in place.
        owners: For each, the number of its rank within the group.
    """
    owned = list(zip(tensors, owners, strict=True))
    for rank in range(group.size):
        given = [tensor for tensor, owner in owned if owner == rank]

        def send(flat: Tensor, to: int = rank) -> None:
            dist.reduce(flat, group=group.process_group, group_dst=to)

        _through(group, given, [True] * len(given), send, takes=group.rank == rank)


def broadcast_(group: Group, tensors: Iterable[Tensor], source: int) -> None:
    """Replace tensors by those of one rank: one ``broadcast`` for each type among them.

    Args:
        group: The ranks.
        tensors: Of the same shapes and types, in the same order, on every rank; changed in place.
        source: That rank's number within the group.
    """
    given = list(tensors)

    def send(flat: Tensor) -> None:
        dist.broadcast(flat, group=group.process_group, group_src=source)

    _through(group, given, [False] * len(given), send, gives=group.rank == source, takes=group.rank != source)
