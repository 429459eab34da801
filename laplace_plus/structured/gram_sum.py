"""Sums of outer products ``Σ x xᵀ`` whose products are postponed until they pay.

A symmetric update with few rows reads and writes the whole d × d matrix for little arithmetic, and few rows take less
memory than their product. So rows stay rows until there are d of them, and are multiplied together then. Where there
never are as many, the matrix is never formed, and its eigendecomposition is that of the rows' small Gram matrix: of
n rows it takes ``O(n² d)`` operations in place of ``O(d³)``. A sum of limited rank keeps the leading eigenpairs alone,
so that it has few rows however many are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """Eigenvalues ``[G, d]`` and orthogonal eigenvectors ``[G, d, d]``, as columns; None for unit vectors.

    The vectors of sums of limited rank are :class:`Reflections`.
    """

    values: Tensor
    vectors: Any


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


class ThinEigenPairs(EigenPairs):
    """Eigenpairs of ``XᵀX`` of rank r. The vectors ``[G, d, r]`` are formed, and completed, when they are asked for.

    Determinants and traces take eigenvalues alone. Householder reflections complete the leading vectors, and correct
    their rounding. The completed basis does not depend on the order of the data. It may stay ``implicit``.
    """

    def __init__(self, values: Tensor, rows: Tensor, combinations: Tensor, implicit: bool):
        self.values, self.rows, self.combinations, self.implicit = values, rows, combinations, implicit

    @cached_property
    def vectors(self) -> Any:
        """Orthogonal eigenvectors ``[G, d, d]``: ``Xᵀ [G, d, n]`` times the combinations ``[G, n, r]``, completed."""
        leading = self.rows.double().mT @ self.combinations
        if self.implicit:
            return Reflections.completing(leading).to(self.rows.dtype)
        leading = leading.to(self.rows.dtype)
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
        rank: How many eigenpairs are kept, where these are not all: no ``d × d`` matrix is formed. Thin singular value
            decompositions of more than twice as many rows have left out a semi-definite matrix of trace ``discarded``.
    """

    def __init__(self, groups: int, size: int, *, dtype: torch.dtype, device: torch.device, rank: int | None = None):
        self.groups, self.size, self.dtype, self.device = groups, size, dtype, device
        self.rank = None if rank is None or rank >= size else rank
        self.discarded: Any = 0.0
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
    def of_rows(cls, rows: Tensor, limit: Tensor | None = None) -> GramSum:
        """The sum over rows ``[G, n, d]``, which are not copied, as :meth:`parts` told it."""
        if limit is not None:
            fits = limit.shape == (1 + len(rows),) and limit.dtype == torch.float64 and rows.is_floating_point()
            if not fits or not 1 <= limit[0] < 2**31 or not bool((limit >= 0).all() and limit.isfinite().all()):
                raise ValueError(f"rows of {rows.dtype} with a limit of {limit.tolist()}")
        rank = None if limit is None else int(limit[0])
        result = cls(rows.shape[0], rows.shape[2], dtype=rows.dtype, device=rows.device, rank=rank)
        result.discarded = 0.0 if limit is None else limit[1:]
        result._rows, result._n_rows = [rows], rows.shape[1]
        return result

    def add_rows(self, rows: Tensor) -> None:
        """Add ``Σ x xᵀ`` over rows ``[G, n, d]``, which are copied where they are kept."""
        count = rows.shape[1]
        if self.rank is None and count >= self.size:
            kernels.symmetric_update(self._lower(), rows)
            return
        for part in rows.split(count if self.rank is None else 1024, 1) if count else ():
            self._rows.append(part.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format))
            self._n_rows += part.shape[1]
            if self.rank is not None and self._n_rows > 2 * self.rank:
                leading, self.discarded = self.leading()
                self._rows, self._n_rows = [leading], leading.shape[1]
        if self.rank is None and self._n_rows >= self.size:
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
        self.discarded = self.discarded + other.discarded

    def matrix(self) -> Tensor:
        """The sum as symmetric matrices ``[G, d, d]``; from now on it is kept as such, unless its rank is limited."""
        if self.rank is not None:
            rows = self.leading()[0]
            return rows.mT @ rows
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
        return self.rank is not None or (self._total is None and self._n_rows <= _THIN * self.size)

    def rows(self) -> Tensor:
        """The rows ``[G, n, d]``, where no matrix has been formed."""
        assert self._total is None
        if len(self._rows) != 1:
            empty = torch.zeros(self.groups, 0, self.size, dtype=self.dtype, device=self.device)
            self._rows = [torch.cat([empty, *self._rows], 1)]
        return self._rows[0]

    def parts(self) -> dict[str, Tensor]:
        """The rows, and where the rank is limited the ``limit [1 + G]``: the rank and the discarded trace, float64."""
        if self.rank is None:
            return {"rows": self.rows()}
        limit = torch.tensor([self.rank] + [0.0] * self.groups, dtype=torch.float64, device=self.device)
        limit[1:] += self.discarded
        return {"rows": self.rows(), "limit": limit}

    def leading(self) -> tuple[Tensor, Tensor]:
        """``Lᵀ [G, k, d]`` of the leading eigenpairs, ``L Lᵀ ≤ Σ x xᵀ``, and the trace ``[G]`` of the difference."""
        rows = self.rows()
        few = rows if self.rank is None or rows.shape[1] <= 4 * self.rank else _condensed(rows, 2 * self.rank)
        pairs = _eigen_of_rows(few, self.rank)
        kept = pairs.values.double()
        leading = (pairs.combinations * kept[:, None, : pairs.combinations.shape[2]].sqrt()).mT @ few.double()
        lost = rows.double().square().sum((1, 2)) - kept.sum(1)
        return leading.to(self.dtype), self.discarded + lost.clamp(min=0)

    def eigen(self) -> EigenPairs:
        """The eigendecomposition; where there are only rows, no eigenvalue is negative."""
        return _eigen_of_rows(self.rows(), self.rank) if self.is_thin else EigenPairs(*symmetric_eigen(self.matrix()))

    def clone(self) -> GramSum:
        """A copy that may be added to."""
        result = GramSum(self.groups, self.size, dtype=self.dtype, device=self.device, rank=self.rank)
        result.discarded = self.discarded
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
        return {f"{name}_{key}.{n}": tensor for n, own in enumerate(sums) for key, tensor in own.parts().items()}
    return {name: torch.stack([own.dense() for own in sums]) if len(sums) > 1 else sums[0].dense()[None]}


def restored(tensors: Mapping[str, Tensor], name: str) -> list[GramSum]:
    """The sums from what :func:`stored` returned."""
    if name in tensors:
        # In memory of its own, as it was added up: how a product is rounded depends on where its factors lie.
        return [GramSum.of(matrix.clone()) for matrix in tensors[name]]
    count = sum(key.startswith(f"{name}_rows.") for key in tensors)
    return [GramSum.of_rows(tensors[f"{name}_rows.{n}"], tensors.get(f"{name}_limit.{n}")) for n in range(count)]


def combine(sums: Sequence[GramSum], weights: Tensor) -> GramSum:
    """``Σ_k w_k S_k`` for non-negative weights ``[K]``, as a new sum."""
    first, weights = sums[0], weights.to(sums[0].dtype)
    if any(own.is_formed for own in sums):
        return GramSum.of(torch.tensordot(weights, torch.stack([own.matrix() for own in sums]), 1))
    rows = weighted_rows(sums, weights)
    rank = None if first.rank is None else rows.shape[1]
    result = GramSum(first.groups, first.size, dtype=first.dtype, device=first.device, rank=rank)
    result.add_rows(rows)
    return result


def weighted_rows(sums: Sequence[GramSum], weights: Tensor) -> Tensor:
    """``X [G, n, d]`` with ``XᵀX = Σ_k w_k S_k`` for sums of rows; differentiable in the positive weights ``[K]``."""
    each = [own.rows() if own.rank is None else own.leading()[0] for own in sums]
    return torch.cat([rows.to(weights.dtype) * weight.sqrt() for rows, weight in zip(each, weights, strict=True)], 1)


def _condensed(rows: Tensor, rank: int) -> Tensor:
    """``QᵀX`` for ``X [G, n, d]`` with orthonormal Q ``[G, n, r]`` that holds nearly the leading left singular vectors.

    By subspace iteration (Halko, Martinsson and Tropp, 2011) from a fixed start. ``XᵀQ QᵀX ≤ XᵀX`` whatever Q.
    """
    start = torch.randn(rows.shape[2], rank, generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    basis = torch.linalg.qr(rows @ start.to(rows.device))[0]
    for _ in range(2):
        basis = torch.linalg.qr(rows @ (rows.mT @ basis))[0]
    return basis.mT @ rows


def _eigen_of_rows(rows: Tensor, rank: int | None) -> ThinEigenPairs:
    """The eigendecomposition of ``XᵀX`` for ``[G, n, d]`` with n < d, from ``XXᵀ = V Λ Vᵀ``: vectors ``XᵀV Λ^-½``.

    Eigenvalues below ``n ε`` times the largest one, with float64's ε, are rounding errors, and count as zero, as do all
    but the largest where the ``rank`` is limited.
    """
    require_finite(rows)
    groups, n, size = rows.shape
    wide = rows.double()
    gram = kernels.symmetric_update(wide.new_zeros(groups, n, n), wide.mT)
    values, inner = kernels.symmetric_eigen(gram)  # which reads only the lower triangle
    values, inner = values.flip(-1), inner.flip(-1)  # the largest first: they are the most accurate
    kept = values > max(1, n) * torch.finfo(torch.float64).eps * values[..., :1].clamp(min=0)
    kept[:, n if rank is None else rank :] = False
    values = torch.where(kept, values, 0.0)
    found = int(kept.sum(-1).max()) if n else 0
    scales = torch.where(kept, values, torch.inf).rsqrt()[..., None, :found]  # zero columns where a group has less
    full = rows.new_zeros(groups, size)
    full[:, :found] = values[..., :found]
    return ThinEigenPairs(full, rows, inner[..., :found] * scales, rank is not None)
