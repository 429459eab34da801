"""Sums of outer products ``Σ x xᵀ`` whose products are postponed until they pay.

A symmetric update with few rows reads and writes the whole d × d matrix for little arithmetic, and few rows take less
memory than their product. So rows stay rows until there are d of them, and are multiplied together then. Where there
never are as many, the matrix is never formed, and its eigendecomposition is that of the rows' small Gram matrix: of
n rows it takes ``O(n² d)`` operations in place of ``O(d³)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus._memory import CHUNK_BYTES, require_free
from laplace_plus.kernels import require_finite, symmetric_eigen

_THIN = 0.75
"""Rows for each column up to which the Gram matrix of the rows is decomposed. With more, completing its eigenvectors
takes as long as the eigenvectors of the sum."""


@dataclass
class EigenPairs:
    """Eigenvalues ``[G, d]`` and orthogonal eigenvectors ``[G, d, d]``, as columns; None for unit vectors."""

    values: Tensor
    vectors: Tensor | None


class ThinEigenPairs(EigenPairs):
    """Eigenpairs of ``XᵀX`` of rank r. The vectors ``[G, d, r]`` are formed, and completed, when they are asked for.

    Determinants and traces take eigenvalues alone. Householder reflections complete the leading vectors, and correct
    their rounding. The completed basis does not depend on the order of the data.
    """

    def __init__(self, values: Tensor, rows: Tensor, combinations: Tensor):
        self.values, self.rows, self.combinations = values, rows, combinations

    @cached_property
    def vectors(self) -> Tensor:  # type: ignore[override]
        """Orthogonal eigenvectors ``[G, d, d]``: ``Xᵀ [G, d, n]`` times the combinations ``[G, n, r]``, completed."""
        leading = (self.rows.double().mT @ self.combinations).to(self.rows.dtype)
        groups, size = self.values.shape
        rows = leading.new_zeros(groups, size, size)  # transposed, as LAPACK goes by columns: it works in place
        rows.diagonal(dim1=1, dim2=2).fill_(1)
        return torch.ormqr(*torch.geqrf(leading), rows.mT, transpose=True, out=rows.mT).mT


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
        """The sum that is a matrix ``[G, d, d]``, or a diagonal ``[G, d]``, already; it is not copied."""
        if matrix.ndim == 2:
            return DiagonalSum(matrix)
        result = cls(matrix.shape[0], matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        result._total = matrix
        return result

    @classmethod
    def of_rows(cls, rows: Tensor) -> GramSum:
        """The sum over rows ``[G, n, d]``, which are not copied."""
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
            self._rows.append(rows.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format))
            self._n_rows += count
        if self._n_rows >= self.size:
            self._multiply()

    def set_aside(self) -> list[Tensor]:
        """Take out the rows that are not multiplied yet."""
        rows, self._rows, self._n_rows = self._rows, [], 0
        return rows

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
        """The sum as symmetric matrices ``[G, d, d]``; from now on it is kept as such."""
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
        """Whether a matrix has been formed; otherwise there are only rows."""
        return self._total is not None

    @property
    def is_thin(self) -> bool:
        """Whether there are so few rows that decomposing their Gram matrix is faster."""
        return self._total is None and self._n_rows <= _THIN * self.size

    def rows(self) -> Tensor:
        """The rows ``[G, n, d]``, where no matrix has been formed."""
        assert self._total is None
        if len(self._rows) != 1:
            empty = torch.zeros(self.groups, 0, self.size, dtype=self.dtype, device=self.device)
            self._rows = [torch.cat([empty, *self._rows], 1)]
        return self._rows[0]

    def eigen(self) -> EigenPairs:
        """The eigendecomposition; where there are only rows, no eigenvalue is negative."""
        return _eigen_of_rows(self.rows()) if self.is_thin else EigenPairs(*symmetric_eigen(self.matrix()))

    def clone(self) -> GramSum:
        """A copy that may be added to."""
        result = GramSum(self.groups, self.size, dtype=self.dtype, device=self.device)
        result._total = None if self._total is None else self._total.clone()
        result._is_symmetric, result._n_rows = self._is_symmetric, self._n_rows
        result._rows = list(self._rows)  # rows are never written to
        return result

    def _lower(self) -> Tensor:
        if self._total is None:
            size = self.groups * self.size**2 * self.dtype.itemsize
            if size > CHUNK_BYTES:
                fix = "Select fewer parameters, or use lp.Diagonal."
                require_free(size, f"A dense factor of {self.size:,} rows", self.device, fix)
            self._total = torch.zeros(self.groups, self.size, self.size, dtype=self.dtype, device=self.device)
        self._is_symmetric = False
        return self._total

    def _multiply(self) -> None:
        rows, self._rows, self._n_rows = self._rows, [], 0
        total = self._lower()
        if rows:
            kernels.symmetric_update(total, rows[0] if len(rows) == 1 else torch.cat(rows, 1))


class DiagonalSum(GramSum):
    """The diagonal of ``Σ x xᵀ``: ``values [G, d]``, which are added to in place."""

    is_formed = is_thin = True

    def __init__(self, values: Tensor):
        super().__init__(*values.shape, dtype=values.dtype, device=values.device)
        self.values = values

    @override
    def add_rows(self, rows: Tensor) -> None:
        self.values += rows.to(self.dtype).square().sum(1)

    @override
    def add_(self, other: GramSum) -> None:
        self.values += other.matrix()

    @override
    def matrix(self) -> Tensor:
        return self.values

    @override
    def eigen(self) -> EigenPairs:
        return EigenPairs(self.values, None)

    @override
    def clone(self) -> DiagonalSum:
        return DiagonalSum(self.values.clone())


def stored(sums: Sequence[GramSum], name: str) -> dict[str, Tensor]:
    """The sums as they are: matrices ``[K, G, d, d]`` under ``name``, or rows under ``name_rows.0`` and so on."""
    if not any(own.is_formed for own in sums):
        return {f"{name}_rows.{number}": own.rows() for number, own in enumerate(sums)}
    return {name: torch.stack([own.dense() for own in sums]) if len(sums) > 1 else sums[0].dense()[None]}


def restored(tensors: Mapping[str, Tensor], name: str) -> list[GramSum]:
    """The sums from what :func:`stored` returned."""
    if name in tensors:
        # In memory of its own, as it was added up: how a product is rounded depends on where its factors lie.
        return [GramSum.of(matrix.clone()) for matrix in tensors[name]]
    count = sum(key.startswith(f"{name}_rows.") for key in tensors)
    return [GramSum.of_rows(tensors[f"{name}_rows.{number}"]) for number in range(count)]


def combine(sums: Sequence[GramSum], weights: Tensor) -> GramSum:
    """``Σ_k w_k S_k`` for non-negative weights ``[K]``, as a new sum."""
    first, weights = sums[0], weights.to(sums[0].dtype)
    if any(own.is_formed for own in sums):
        return GramSum.of(torch.tensordot(weights, torch.stack([own.matrix() for own in sums]), 1))
    result = GramSum(first.groups, first.size, dtype=first.dtype, device=first.device)
    for own, weight in zip(sums, weights, strict=True):
        result.add_rows(own.rows() * weight.sqrt())
    return result


def _eigen_of_rows(rows: Tensor) -> ThinEigenPairs:
    """The eigendecomposition of ``XᵀX`` for ``[G, n, d]`` with n < d, from ``XXᵀ = V Λ Vᵀ``: vectors ``XᵀV Λ^-½``.

    Eigenvalues below ``n ε`` times the largest one, with float64's ε, are rounding errors, and count as zero.
    """
    require_finite(rows)
    groups, n, size = rows.shape
    wide = rows.double()
    gram = kernels.symmetric_update(wide.new_zeros(groups, n, n), wide.mT)
    values, inner = kernels.symmetric_eigen(gram)  # which reads only the lower triangle
    values, inner = values.flip(-1), inner.flip(-1)  # the largest first: they are the most accurate
    kept = values > max(1, n) * torch.finfo(torch.float64).eps * values[..., :1].clamp(min=0)
    values = torch.where(kept, values, 0.0)
    rank = int(kept.sum(-1).max()) if n else 0
    scales = torch.where(kept, values, torch.inf).rsqrt()[..., None, :rank]  # zero columns where a group has less
    full = rows.new_zeros(groups, size)
    full[:, :rank] = values[..., :rank]
    return ThinEigenPairs(full, rows, inner[..., :rank] * scales)
