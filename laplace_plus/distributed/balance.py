"""Eigendecompositions that are shared out among the ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_plus.distributed.buckets import broadcast_
from laplace_plus.distributed.group import Group
from laplace_plus.distributed.owned import OwnedSum
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, eigen_together


def assign(costs: Sequence[float], n_ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Which rank does which task: the longest first, each to the rank that has the least to do.

    No rank gets more than 4/3 of what it gets in the best assignment (Graham, 1969). The same on every rank.

    Args:
        costs: Of each task.
        n_ranks: How many ranks there are.
        loads: What each of them has to do already.

    Returns:
        The rank of each task.

    Example:
        >>> assign([1, 8, 2, 7], 2)
        [0, 0, 1, 1]
    """
    ranks = [(0.0 if loads is None else loads[rank], rank) for rank in range(n_ranks)]
    heapq.heapify(ranks)
    owners = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        load, rank = heapq.heappop(ranks)
        owners[task] = rank
        heapq.heappush(ranks, (load + costs[task], rank))
    return owners


def balanced_eigen(group: Group, sums: Sequence[GramSum]) -> list[EigenPairs]:
    """Eigendecompositions of sums that every rank has, each computed by one rank and known to all.

    All ranks get the same bits, also where eigenvalues coincide and vectors are a matter of choice. What a rank
    computes goes to the others in one broadcast for each type.

    Args:
        group: The ranks.
        sums: The same on every rank.

    Raises:
        DistributedError: Another rank failed.
    """
    owners = _owners(sums, group.size)
    own = [number for number, owner in enumerate(owners) if owner == group.rank]
    pairs = dict(zip(own, eigen_together([sums[number] for number in own]), strict=True))
    is_thin = {number: pair._leading is not None for number, pair in pairs.items()}
    widths = group.exchange("the eigendecompositions", {n: (is_thin[n], _sent(pairs[n])[1].shape[-1]) for n in own})
    announced: dict[int, tuple[bool, int]] = {number: entry for theirs in widths for number, entry in theirs.items()}
    arrived: list[tuple[Tensor, Tensor]] = []
    for number, part in enumerate(sums):
        if number in pairs:
            arrived.append(_sent(pairs[number]))
            continue
        values = torch.empty(part.groups, part.size, dtype=part.dtype, device=part.device)
        arrived.append((values, values.new_empty(part.groups, part.size, announced[number][1])))
    for rank in range(group.size):
        broadcast_(group, [t for pair, owner in zip(arrived, owners, strict=True) if owner == rank for t in pair], rank)
    return [
        EigenPairs(values, vectors) if announced[number][0] else EigenPairs(values, None, vectors)
        for number, (values, vectors) in enumerate(arrived)
    ]


def _owners(sums: Sequence[GramSum], n_ranks: int) -> list[int]:
    """Which rank decomposes what; sums that lie on one rank are decomposed there."""
    owners = [part.owner if isinstance(part, OwnedSum) else -1 for part in sums]
    before = [0.0] * n_ranks
    for part, owner in zip(sums, owners, strict=True):
        if owner >= 0:
            before[owner] += _cost(part)
    free = [number for number, owner in enumerate(owners) if owner < 0]
    for number, owner in zip(free, assign([_cost(sums[n]) for n in free], n_ranks, before), strict=True):
        owners[number] = owner
    return owners


def _sent(pair: EigenPairs) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and those vectors that have been computed."""
    vectors = pair.vectors if pair._leading is None else pair._leading
    return pair.values.contiguous(), vectors.contiguous()


def _cost(part: GramSum) -> float:
    """About the number of operations; n³ for a matrix, less where only a few rows are there."""
    if part.is_thin:
        rows = part.scaled_rows(1.0).shape[1]
        return float(part.groups * rows**2 * (rows + part.size))
    return float(part.groups * part.size**3)
