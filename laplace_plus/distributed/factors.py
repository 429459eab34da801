"""Matrices that are shared out among the ranks: who decomposes them, and who keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.distributed.group import Group
from laplace_plus.distributed.messages import broadcast_
from laplace_plus.errors import DistributedError
from laplace_plus.structured.gram_sum import EigenPairs, GramSum


class OwnedSum(GramSum):
    """A sum that the rank ``owner`` has; the others only know its size, and what the owner tells of its eigenpairs.

    Adding to it adds on the owner and does nothing on the other ranks, so all ranks have to add the same. It is
    ``like`` another sum in size and type; ``total [G, d, d]`` is the sum on that rank, None on the others.
    """

    is_formed: bool = True
    is_thin: bool = False

    def __init__(self, like: GramSum, owner: int, total: Tensor | None):
        GramSum.__init__(self, like.groups, like.size, dtype=like.dtype, device=like.device)
        self.owner, self.is_here, self._total = owner, total is not None, total

    @override
    def add_rows(self, rows: Tensor) -> None:
        if self.is_here:
            GramSum.add_rows(self, rows)

    @override
    def add_products(self, add: Callable[[Tensor], None]) -> None:
        if self.is_here:
            GramSum.add_products(self, add)

    @override
    def add_(self, other: GramSum) -> None:
        if self.is_here:
            GramSum.add_(self, other)

    @override
    def matrix(self) -> Tensor:
        if self._total is None:
            what = f"A Kronecker factor lies on rank {self.owner} alone."
            expected = "what follows from its eigendecomposition, which every rank has"
            fix = "Fit with Ranks(shard_factors=False), or save() on all ranks and load()."
            raise DistributedError(what, expected=expected, got="a call that takes the factor itself", fix=fix)
        return GramSum.matrix(self)

    @override
    def clone(self) -> OwnedSum:
        return OwnedSum(self, self.owner, self.matrix().clone() if self.is_here else None)


@contextmanager
def gathered(group: Group, owned: Sequence[OwnedSum]) -> Iterator[None]:
    """Lend every sum to rank 0 for a while; all ranks enter together."""
    with group.together() if owned else nullcontext():
        for part in owned:
            empty = torch.empty(part.groups, part.size, part.size, dtype=part.dtype, device=part.device)
            copy = part.matrix() if part.is_here else empty
            broadcast_(group, [copy], part.owner)
            if group.rank == 0:
                part._total = copy
    try:
        yield
    finally:
        for part in owned:
            part._total = part._total if part.is_here else None


def assign(costs: Sequence[float], n_ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Which rank does which task: the longest first, each to the rank that has the least to do.

    No rank gets more than 4/3 of what it gets in the best assignment (Graham, 1969). The same on every rank; ``loads``
    is what each of them has to do already.

    Example:
        >>> assign([1, 8, 2, 7], 2)
        [0, 0, 1, 1]
    """
    load = [0.0] * n_ranks if loads is None else list(loads)
    owners = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        owners[task] = load.index(min(load))
        load[owners[task]] += costs[task]
    return owners


def balanced_eigen(group: Group, sums: Sequence[GramSum]) -> list[EigenPairs]:
    """Eigendecompositions of sums that every rank has, each matrix decomposed by one rank.

    All ranks get the same bits of these, also where eigenvalues coincide and vectors are a matter of choice. Sums of
    few rows are decomposed by every rank, through the small Gram matrix of their rows. :class:`DistributedError` if
    another rank failed.
    """
    owners = [part.owner if isinstance(part, OwnedSum) else -1 for part in sums]
    costs = [float(part.groups * part.size**3) for part in sums]
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(group.size)]
    free = [number for number, part in enumerate(sums) if owners[number] < 0 and not part.is_thin]
    for number, owner in zip(free, assign([costs[n] for n in free], group.size, loads), strict=True):
        owners[number] = owner
    pairs = []
    messages: list[list[Tensor]] = [[] for _ in range(group.size)]
    for part, owner in zip(sums, owners, strict=True):
        if owner in (group.rank, -1):
            pair = part.eigen()
        else:
            values = torch.empty(part.groups, part.size, dtype=part.dtype, device=part.device)
            pair = EigenPairs(values, values.new_empty(part.groups, part.size, part.size))
        if owner >= 0:
            assert pair.vectors is not None
            values, vectors = pair.values.contiguous(), pair.vectors.contiguous()
            pair = EigenPairs(values, vectors)
            messages[owner] += [values, vectors]
        pairs.append(pair)
    for rank, tensors in enumerate(messages):
        broadcast_(group, tensors, rank)
    return pairs
