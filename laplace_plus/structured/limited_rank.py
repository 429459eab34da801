"""Sums of outer products of which only the leading eigenpairs are kept, so that no ``d × d`` matrix is ever formed.

The sum has few rows however many are added: thin singular value decompositions of more than twice as many rows as the
rank leave out a positive semi-definite matrix, whose trace is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.gram_sum import EigenPairs, GramSum, eigen_of_rows, weighted_rows

_AT_ONCE = 1024
"""Rows that are added before the sum is decomposed again."""


class Reflections:
    """Orthogonal matrices ``I − A Bᵀ`` that multiply without being formed, from A and B ``[..., d, k]``."""

    def __init__(self, a: Tensor, b: Tensor):
        self.sides, self.dtype = (a, b), a.dtype

    @classmethod
    def completing(cls, leading: Tensor) -> Reflections:
        """Those whose first k columns are, up to their signs, orthonormal or zero columns ``[..., d, k]``."""
        packed, scales = torch.geqrf(leading)
        b = packed.tril(-1)
        b.diagonal(dim1=-2, dim2=-1).fill_(1)
        b = b * (scales != 0)[..., None, :]  # zero where nothing is reflected
        inverse = (b.mT @ b).triu()  # a product of reflections is I − B T Bᵀ, T upper triangular, T⁻¹ + T⁻ᵀ = Bᵀ B
        inverse.diagonal(dim1=-2, dim2=-1).div_(2).add_(scales == 0)
        return cls(torch.linalg.solve_triangular(inverse, b, upper=True, left=False), b)

    @property
    def mT(self) -> Reflections:  # noqa: N802  -- as of tensors
        """The transposed matrices."""
        return Reflections(*self.sides[::-1])

    def to(self, dtype: torch.dtype) -> Reflections:
        """The matrices in another type."""
        return Reflections(*(side.to(dtype) for side in self.sides))

    def __len__(self) -> int:
        return len(self.sides[0])

    def __getitem__(self, group: int) -> Reflections:
        return Reflections(*(side[group] for side in self.sides))

    def __matmul__(self, other: Tensor) -> Tensor:
        return other - self.sides[0] @ (self.sides[1].mT @ other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return other - (other @ self.sides[0]) @ self.sides[1].mT

    def squares(self, values: Tensor) -> Tensor:
        """``Σ_j R_ij² v_j`` for ``v [G, d, n]``, whose rows beyond the k leading ones are alike."""
        size, rank = self.sides[0].shape[-2:]
        leading = self @ torch.eye(size, rank, dtype=self.dtype, device=values.device)
        return values[:, -1:] + leading.square() @ (values[:, :rank] - values[:, -1:])


class LimitedSum(GramSum):
    """``Σ x xᵀ`` over rows x for each of G groups, of which ``rank`` < d eigenpairs are kept.

    Attributes:
        discarded: The trace ``[G]`` of what was left out so far, float64.
    """

    is_thin = True

    def __init__(self, groups: int, size: int, rank: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(groups, size, dtype=dtype, device=device)
        self.rank: int = rank
        self.discarded: Any = torch.zeros(groups, dtype=torch.float64, device=device)

    @classmethod
    def of_rows(cls, rows: Tensor, limit: Tensor) -> LimitedSum:
        """The sum over rows ``[G, n, d]`` with a ``limit [1 + G]``, as of :meth:`tensors`."""
        result = cls(rows.shape[0], rows.shape[2], int(limit[0]), dtype=rows.dtype, device=rows.device)
        # In memory of their own, as they were added up: how a product is rounded depends on where its factors lie.
        result._rows, result.discarded = [rows.clone()], limit[1:].clone()
        return result

    @override
    def add_rows(self, rows: Tensor) -> None:
        for part in rows.split(_AT_ONCE, 1):
            self._keep(part)
            if self.n_rows > 2 * self.rank:
                leading, self.discarded = self.leading()
                self._rows = [leading]

    @override
    def add_(self, other: GramSum) -> None:
        assert isinstance(other, LimitedSum)
        super().add_(other)
        self.discarded = self.discarded + other.discarded

    @override
    def matrix(self) -> Tensor:
        rows = self.leading()[0]
        return rows.mT @ rows

    def leading(self) -> tuple[Tensor, Tensor]:
        """``Lᵀ [G, k, d]`` of the leading eigenpairs, ``L Lᵀ ≤ Σ x xᵀ``, and the trace ``[G]`` of the difference."""
        rows = self.all_rows()
        few = rows if rows.shape[1] <= 4 * self.rank else _condensed(rows, 2 * self.rank)
        values, vectors = eigen_of_rows(few, self.rank)
        kept = values.double()
        leading = (vectors * kept[:, None, : vectors.shape[2]].sqrt()).mT
        lost = rows.double().square().sum((1, 2)) - kept.sum(1)
        return leading.to(self.dtype).contiguous(), self.discarded + lost.clamp(min=0)

    @override
    def eigen(self) -> EigenPairs:
        values, vectors = eigen_of_rows(self.all_rows(), self.rank)
        return EigenPairs(values, Reflections.completing(vectors).to(self.dtype))

    @override
    def tensors(self, name: str) -> dict[str, Tensor]:
        limit = torch.cat([self.discarded.new_tensor([self.rank]), self.discarded])
        return {f"{name}.rows": self.all_rows(), f"{name}.limit": limit}

    @override
    def clone(self) -> LimitedSum:
        result = LimitedSum(self.groups, self.size, self.rank, dtype=self.dtype, device=self.device)
        result._rows, result.discarded = list(self._rows), self.discarded  # neither is ever written to
        return result


def gram_sum(groups: int, size: int, rank: int | None, *, dtype: torch.dtype, device: torch.device) -> GramSum:
    """An empty sum, of limited rank where that is less than d."""
    if rank is None or rank >= size:
        return GramSum(groups, size, dtype=dtype, device=device)
    return LimitedSum(groups, size, rank, dtype=dtype, device=device)


def combine_limited(sums: Sequence[LimitedSum], weights: Tensor) -> GramSum:
    """``Σ_k w_k S_k`` for non-negative weights ``[K]``, as a new sum that leaves out nothing more."""
    first = sums[0]
    rows = weighted_rows([own.leading()[0] for own in sums], weights.to(first.dtype))
    result = gram_sum(first.groups, first.size, rows.shape[1], dtype=first.dtype, device=first.device)
    result.add_rows(rows)
    return result


def _condensed(rows: Tensor, rank: int) -> Tensor:
    """``QᵀX`` for ``X [G, n, d]`` with orthonormal Q ``[G, n, r]`` that holds nearly the leading left singular vectors.

    By subspace iteration (Halko, Martinsson and Tropp, 2011) from a fixed start. ``XᵀQ QᵀX ≤ XᵀX`` whatever Q.
    """
    start = torch.randn(rows.shape[2], rank, generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    basis = torch.linalg.qr(rows @ start.to(rows.device))[0]
    for _ in range(2):
        basis = torch.linalg.qr(rows @ (rows.mT @ basis))[0]
    return basis.mT @ rows
