"""Sums of outer products of which each lies on one rank only: memory is shared out with the eigendecompositions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import DistributedError
from laplace_plus.structured.gram_sum import EigenPairs, GramSum


class OwnedSum(GramSum):
    """A sum that one rank owns; the other ranks only know its size, and what the owner tells them of its eigenpairs.

    Adding to it adds on the owner and does nothing on the other ranks, so all ranks have to add the same.

    Args:
        groups: G.
        size: d.
        owner: The rank that has the sum.
        total: The sum ``[G, d, d]`` on that rank, None on the others.
        dtype: The type that products are summed in.
        device: Where.
    """

    def __init__(
        self, groups: int, size: int, *, owner: int, total: Tensor | None, dtype: torch.dtype, device: torch.device
    ):
        GramSum.__init__(self, groups, size, dtype=dtype, device=device)
        self.owner, self.is_here = owner, total is not None
        self._total = total

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
            raise DistributedError(
                f"A Kronecker factor lies on rank {self.owner} alone.",
                expected="what follows from its eigendecomposition, which every rank has",
                got="a call that takes the factor itself",
                fix="Fit with Ranks(shard_factors=False), or save() on all ranks and load().",
            )
        return GramSum.matrix(self)

    @property
    @override
    def is_formed(self) -> bool:
        return True

    @property
    @override
    def is_thin(self) -> bool:
        return False

    @override
    def eigen(self) -> EigenPairs:
        self.matrix()
        return GramSum.eigen(self)

    @override
    def clone(self) -> OwnedSum:
        total = self.matrix().clone() if self.is_here else None
        return OwnedSum(self.groups, self.size, owner=self.owner, total=total, dtype=self.dtype, device=self.device)

    def empty(self) -> Tensor:
        """A tensor that the sum fits into, ``[G, d, d]``."""
        return torch.empty(self.groups, self.size, self.size, dtype=self.dtype, device=self.device)

    def hold(self, total: Tensor) -> None:
        """Keep a copy of the sum for a while, on a rank that does not own it."""
        self._total = total

    def release(self) -> None:
        """Let the copy go."""
        if not self.is_here:
            self._total = None
