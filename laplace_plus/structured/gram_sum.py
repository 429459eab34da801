"""Sums of outer products ``Σ x xᵀ`` whose products are put off until they pay.

A symmetric update with few rows reads and writes the whole d × d matrix for little arithmetic, and a matrix of fewer
rows than columns holds less than its rows do. So rows stay rows until there are as many as the matrix has columns, and
are multiplied together then; where there never are as many, the matrix is never formed, and its eigendecomposition is
that of the rows' small Gram matrix. What comes out is the same sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.linalg.symmetric import require_finite, symmetric_eigen

STACKED_UP_TO = 256
"""Larger matrices are decomposed one by one."""

_THIN = 0.75
"""A matrix of up to so many rows for each column is decomposed through its rows' Gram matrix."""


@dataclass
class ThinEigen:
    """The eigenvectors of ``XᵀX`` with eigenvalues λ > 0, as they follow from those of ``XXᵀ``: ``XᵀV Λ^{-1/2}``.

    Attributes:
        rows: X ``[G, n, d]``.
        inner: V ``[G, n, r]``, float64.
        roots: ``λ^{1/2} [G, r]``, float64; zeros where a group has less than r.
    """

    rows: Tensor
    inner: Tensor
    roots: Tensor

    def leading(self) -> Tensor:
        """The vectors ``[G, d, r]``, up to rounding orthonormal, with columns of zeros for eigenvalues of zero."""
        scale = torch.where(self.roots > 0, self.roots, 1.0).reciprocal() * (self.roots > 0)
        return ((self.rows.double().mT @ self.inner) * scale[:, None, :]).to(self.rows.dtype)


class EigenPairs:
    """An eigendecomposition whose vectors are only written out when they are asked for.

    A few leading vectors are completed by a basis of their complement through Householder reflections, which also make
    up for their rounding. That basis follows from the leading vectors: it does not depend on the order of the data.

    Args:
        values: ``[G, d]``.
        leading: Orthonormal vectors ``[G, d, r]`` of the r first values, where all other values are zero; or None.
        vectors: All vectors ``[G, d, d]``, or None.
        thin: What leading vectors are made of when they are needed, or None.
    """

    def __init__(
        self,
        values: Tensor,
        leading: Tensor | None = None,
        vectors: Tensor | None = None,
        thin: ThinEigen | None = None,
    ):
        self.values = values
        self._given, self._vectors, self._thin = leading, vectors, thin

    @property
    def vectors(self) -> Tensor:
        """Orthogonal ``[G, d, d]`` with eigenvectors as columns."""
        if self._vectors is None:
            groups, size = self.values.shape
            leading = self._leading
            assert leading is not None
            identity = torch.eye(size, dtype=leading.dtype, device=leading.device).expand(groups, size, size)
            self._vectors = torch.ormqr(*torch.geqrf(leading), identity)
            self._given = self._thin = None
        return self._vectors

    @property
    def _leading(self) -> Tensor | None:
        if self._given is None and self._thin is not None:
            self._given = self._thin.leading()
        return self._given


class GramSum:
    """``Σ x xᵀ`` over rows x, for each of G groups.

    Args:
        groups: G.
        size: d.
        dtype: The type that products are summed in.
        device: Where.
    """

    def __init__(self, groups: int, size: int, *, dtype: torch.dtype, device: torch.device):
        self.groups, self.size, self.dtype, self.device = groups, size, dtype, device
        self._total: Tensor | None = None
        self._is_symmetric = True
        self._rows: list[Tensor] = []
        self._n_rows = 0

    @classmethod
    def of(cls, matrix: Tensor) -> GramSum:
        """The sum that a matrix ``[G, d, d]`` holds already; the matrix is taken over, not copied."""
        result = cls(matrix.shape[0], matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        result._total = matrix
        return result

    @classmethod
    def of_rows(cls, rows: Tensor) -> GramSum:
        """The sum over rows ``[G, n, d]``, which are taken over, not copied, and stay rows."""
        result = cls(rows.shape[0], rows.shape[2], dtype=rows.dtype, device=rows.device)
        result._rows, result._n_rows = [rows], rows.shape[1]
        return result

    def add_rows(self, rows: Tensor) -> None:
        """Add ``Σ x xᵀ`` over rows ``[G, n, d]``, which are copied where they are kept."""
        count = rows.shape[1]
        if count >= self.size:
            kernels.symmetric_update(self._lower(), rows)
            return
        if count:
            self._rows.append(rows.detach().to(self.dtype, copy=True))
            self._n_rows += count
        if self._n_rows >= self.size:
            self._multiply()

    def add_products(self, add: Callable[[Tensor], None]) -> None:
        """Let a function add to the lower triangles of the matrices ``[G, d, d]`` itself."""
        add(self._lower())

    def add_(self, other: GramSum) -> None:
        """Add another sum in place."""
        if other._total is not None:
            self._lower().add_(other._total)
        for rows in other._rows:
            self.add_rows(rows)

    def matrix(self) -> Tensor:
        """The sum as symmetric matrices ``[G, d, d]``, kept from now on as such."""
        if self._rows or self._total is None:
            self._multiply()
        assert self._total is not None
        if not self._is_symmetric:
            kernels.symmetrize_(self._total)
            self._is_symmetric = True
        return self._total

    def dense(self) -> Tensor:
        """The sum as symmetric matrices ``[G, d, d]``; rows stay rows."""
        return self.matrix() if self.is_formed else self.clone().matrix()

    @property
    def is_formed(self) -> bool:
        """Whether a matrix is there; otherwise only rows are."""
        return self._total is not None

    def scaled_rows(self, weight: float | Tensor) -> Tensor:
        """The rows ``[G, n, d]`` times ``√weight``, where no matrix has been formed."""
        assert self._total is None
        empty = torch.zeros(self.groups, 0, self.size, dtype=self.dtype, device=self.device)
        rows = torch.cat([empty, *self._rows], 1)
        return rows if isinstance(weight, float) and weight == 1.0 else rows * weight**0.5

    def eigen(self) -> EigenPairs:
        """The eigendecomposition; where only rows are there, eigenvalues are not negative."""
        if self.is_thin:
            return _eigen_of_rows(self.scaled_rows(1.0))
        values, vectors = symmetric_eigen(self.matrix())
        return EigenPairs(values, None, vectors)

    @property
    def is_thin(self) -> bool:
        """Whether the rows are so few that it is quicker to decompose them than the matrix."""
        return self._total is None and self._n_rows <= _THIN * self.size

    def clone(self) -> GramSum:
        """A copy that may be added to."""
        result = GramSum(self.groups, self.size, dtype=self.dtype, device=self.device)
        result._total = None if self._total is None else self._total.clone()
        # rows are never written to
        result._is_symmetric, result._rows, result._n_rows = self._is_symmetric, list(self._rows), self._n_rows
        return result

    def parts(self) -> list[Tensor]:
        """The tensors that hold the sum as it is now; a matrix's upper triangle may not be filled in."""
        return [*self._rows, *([] if self._total is None else [self._total])]

    def _lower(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros(self.groups, self.size, self.size, dtype=self.dtype, device=self.device)
        self._is_symmetric = False
        return self._total

    def _multiply(self) -> None:
        rows, self._rows, self._n_rows = self._rows, [], 0
        total = self._lower()
        if rows:
            kernels.symmetric_update(total, rows[0] if len(rows) == 1 else torch.cat(rows, 1))


def stored(sums: Sequence[GramSum], name: str) -> dict[str, Tensor]:
    """The sums as they are: matrices ``[K, G, d, d]`` under ``name``, or rows under ``name_rows.0`` and so on."""
    if not any(part.is_formed for part in sums):
        return {f"{name}_rows.{number}": part.scaled_rows(1.0) for number, part in enumerate(sums)}
    return {name: sums[0].dense()[None] if len(sums) == 1 else torch.stack([part.dense() for part in sums])}


def restored(tensors: Mapping[str, Tensor], name: str) -> list[GramSum]:
    """What :func:`stored` stored."""
    if name in tensors:
        return [GramSum.of(matrix) for matrix in tensors[name]]
    count = sum(key.startswith(f"{name}_rows.") for key in tensors)
    return [GramSum.of_rows(tensors[f"{name}_rows.{number}"]) for number in range(count)]


def combine(sums: Sequence[GramSum], weights: Tensor) -> GramSum:
    """``Σ_k w_k S_k`` for non-negative weights ``[K]``, as a new sum."""
    first = sums[0]
    if all(not part.is_formed for part in sums):
        result = GramSum(first.groups, first.size, dtype=first.dtype, device=first.device)
        for part, weight in zip(sums, weights.to(first.dtype), strict=True):
            result.add_rows(part.scaled_rows(weight))
        return result
    return GramSum.of(torch.einsum("k,kgop->gop", weights.to(first.dtype), torch.stack([s.matrix() for s in sums])))


def eigen_together(sums: Sequence[GramSum]) -> list[EigenPairs]:
    """The eigendecompositions of several sums; small matrices of equal size are decomposed in one call.

    Larger ones keep a device busy by themselves.
    """
    found: dict[int, EigenPairs] = {}
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(sums):
        if part.is_thin or part.size > STACKED_UP_TO:
            found[number] = part.eigen()
        else:
            alike[part.size, part.dtype, part.device].append(number)
    for numbers in alike.values():
        counts = [sums[number].groups for number in numbers]
        values, vectors = symmetric_eigen(torch.cat([sums[number].matrix() for number in numbers]))
        for number, its_values, its_vectors in zip(numbers, values.split(counts), vectors.split(counts), strict=True):
            found[number] = EigenPairs(its_values, None, its_vectors)
    return [found[number] for number in range(len(sums))]


def _eigen_of_rows(rows: Tensor) -> EigenPairs:
    """The eigendecomposition of ``XᵀX`` for ``[G, n, d]`` with n < d, from that of ``XXᵀ``.

    Eigenvalues below n roundings of the largest one (in float64) are rounding, and count as zero.
    """
    require_finite(rows)
    groups, n, size = rows.shape
    wide = rows.double()
    gram = kernels.symmetric_update(wide.new_zeros(groups, n, n), wide.mT)
    values, inner = kernels.symmetric_eigen(gram)  # which only looks at the lower triangle
    values, inner = values.flip(-1), inner.flip(-1)  # the largest first: they are the most accurate
    kept = values > max(1, n) * torch.finfo(torch.float64).eps * values[..., :1].clamp(min=0)
    values = torch.where(kept, values, 0.0)
    rank = int(kept.sum(-1).max()) if n else 0
    full = rows.new_zeros(groups, size)
    full[:, :rank] = values[..., :rank]
    return EigenPairs(full, thin=ThinEigen(rows, inner[..., :rank].contiguous(), values[..., :rank].sqrt()))
