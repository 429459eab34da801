"""Sums of outer products ``Σ x xᵀ`` whose products are put off until they pay.

A symmetric update with few rows reads and writes the whole d × d matrix for little arithmetic, and a matrix of fewer
rows than columns holds less than its rows do. So rows stay rows until there are as many as the matrix has columns, and
are multiplied together then; where there never are as many, the matrix is never formed, and its eigendecomposition is
that of the rows' small triangular factor. What comes out is the same sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.errors import NonFiniteError
from laplace_plus.linalg.stacks.contractions import times

_STACKED_UP_TO = 256
"""Larger matrices are decomposed one by one."""

_THIN = 0.75
"""A matrix of up to so many rows for each column is decomposed through its rows' triangular factor."""


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[..., n]`` and vectors ``[..., n, n]`` of symmetric matrices, computed in float64.

    Kronecker factors are often rank-deficient, with rows of exact zeros (padding, dead units), on which float32 solvers
    fail to converge now and then, and give small eigenvalues that are the rounding of the largest one. Rows and columns
    that are exactly zero are taken out first, because they are eigenvectors already.

    Raises:
        NonFiniteError: The matrix has NaN or infinite entries.
    """
    require_finite(matrix)
    alive = matrix.abs().sum(-1) != 0
    alive = alive.flatten(0, -2).any(0) if matrix.ndim > 2 else alive
    if alive.all() or not alive.any():
        return kernels.symmetric_eigen(matrix)
    n, keep, dead = matrix.shape[-1], alive.nonzero().squeeze(-1), (~alive).nonzero().squeeze(-1)
    values, vectors = kernels.symmetric_eigen(matrix[..., keep[:, None], keep])
    all_values = values.new_zeros(*values.shape[:-1], n)
    all_values[..., len(dead) :] = values
    all_vectors = vectors.new_zeros(*values.shape[:-1], n, n)
    all_vectors[..., dead, torch.arange(len(dead), device=dead.device)] = 1
    all_vectors[..., keep[:, None], torch.arange(len(dead), n, device=dead.device)] = vectors
    return all_values, all_vectors


def require_finite(matrix: Tensor) -> None:
    """Raise :class:`NonFiniteError` for NaNs and infinities."""
    if not kernels.all_finite(matrix):
        raise NonFiniteError(
            "A curvature factor is not finite.",
            expected="finite activations and output gradients",
            got=f"NaN or Inf in a factor of shape {tuple(matrix.shape)}",
            fix="Look for NaNs in the data, or run the network in float32 if it overflows in half precision.",
        )


@dataclass
class ThinEigen:
    """The eigenvectors of ``XᵀX`` for ``[G, n, d]`` rows X with n < d, in the factored form in which they are found.

    ``Xᵀ = Q T`` with Householder reflections Q and triangular T gives ``XᵀX = Q T Tᵀ Qᵀ``, and with ``T Tᵀ = V Λ Vᵀ``
    the orthogonal matrix of all eigenvectors is ``U = Q diag(V, I)``.

    Attributes:
        reflections: ``[G, d, n]`` as ``geqrf`` returns them: T above, the reflections below.
        scales: ``[G, n]``, the reflections' scales.
        inner: V ``[G, n, n]``.
    """

    reflections: Tensor
    scales: Tensor
    inner: Tensor

    def leading(self) -> Tensor:
        """The n first columns of U, which span the rows, ``[G, d, n]``."""
        return self._reflect(F.pad(self.inner, (0, 0, 0, self._n_missing)))

    def written(self) -> Tensor:
        """U, ``[G, d, d]``."""
        groups, size, count = self.reflections.shape
        blocks = self.inner.new_zeros(groups, size, size)
        blocks[:, :count, :count] = self.inner
        blocks[:, count:, count:].diagonal(dim1=1, dim2=2).fill_(1)
        return self._reflect(blocks)

    def rotate(self, rows: Tensor) -> Tensor:
        """``x U`` for rows ``[G, m, d]``."""
        count = self.inner.shape[-1]
        turned = torch.ormqr(self.reflections, self.scales, rows.mT, left=True, transpose=True).mT
        return torch.cat([turned[..., :count] @ self.inner, turned[..., count:]], -1)

    def own(self) -> Tensor:
        """``X U`` for the rows themselves without its last columns, which are zero, ``[G, n, n]``."""
        return self.reflections[:, : self.inner.shape[-1]].triu().mT @ self.inner

    @property
    def _n_missing(self) -> int:
        return self.reflections.shape[1] - self.inner.shape[-1]

    def _reflect(self, columns: Tensor) -> Tensor:
        return torch.ormqr(self.reflections, self.scales, columns, left=True, transpose=False)


class EigenPairs:
    """An eigendecomposition whose vectors are only written out when they are asked for.

    Args:
        values: ``[G, d]``.
        leading: Orthonormal vectors ``[G, d, n]`` of the n first values, where all other values are zero; or None.
        vectors: All vectors ``[G, d, d]``, or None.
        thin: All vectors in factored form, or None.
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
            if self._thin is not None:
                self._vectors = self._thin.written()
            else:
                assert self._given is not None
                # Householder reflections add a basis of the complement.
                self._vectors = torch.linalg.qr(self._given, mode="complete").Q
            self._given = self._thin = None
        return self._vectors

    @property
    def _leading(self) -> Tensor | None:
        return self._given if self._thin is None else self._thin.leading()

    def rotate(self, rows: Tensor) -> Tensor:
        """``x U`` for rows ``[m, G, d]``; few of them do not have the vectors written out."""
        if self._thin is None or len(rows) >= rows.shape[-1]:
            return times(rows, self.vectors)
        groups = len(self.values)
        return self._thin.rotate(rows.expand(-1, groups, -1).transpose(0, 1)).transpose(0, 1)

    @property
    def n_own(self) -> int:
        """How many rows n were decomposed, if that is what was, and their vectors are not written out yet; else 0."""
        return 0 if self._thin is None else self._thin.inner.shape[-1]

    def own_coordinates(self) -> Tensor:
        """``X U`` for the rows X that were decomposed, short of columns of zeros, ``[n, G, n]``."""
        assert self._thin is not None
        return self._thin.own().transpose(0, 1)


class FactorSum:
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
    def of(cls, matrix: Tensor) -> FactorSum:
        """The sum that a matrix ``[G, d, d]`` holds already; the matrix is taken over, not copied."""
        result = cls(matrix.shape[0], matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        result._total = matrix
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

    def add_(self, other: FactorSum) -> None:
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

    def holds(self, rows: Tensor) -> bool:
        """Whether the rows ``[G, n, d]`` are all that was ever added, in the same order, and none is multiplied yet."""
        if self._total is not None or rows.shape != (self.groups, self._n_rows, self.size):
            return False
        given = rows.split([part.shape[1] for part in self._rows], 1)
        return all(torch.equal(part, own) for part, own in zip(self._rows, given, strict=True))

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

    def clone(self) -> FactorSum:
        """A copy that may be added to."""
        result = FactorSum(self.groups, self.size, dtype=self.dtype, device=self.device)
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


def combine(sums: Sequence[FactorSum], weights: Tensor) -> FactorSum:
    """``Σ_k w_k S_k`` for non-negative weights ``[K]``, as a new sum."""
    first = sums[0]
    if all(not part.is_formed for part in sums):
        result = FactorSum(first.groups, first.size, dtype=first.dtype, device=first.device)
        for part, weight in zip(sums, weights.to(first.dtype), strict=True):
            result.add_rows(part.scaled_rows(weight))
        return result
    return FactorSum.of(torch.einsum("k,kgop->gop", weights.to(first.dtype), torch.stack([s.matrix() for s in sums])))


def eigen_together(sums: Sequence[FactorSum]) -> list[EigenPairs]:
    """The eigendecompositions of several sums; small matrices of equal size are decomposed in one call.

    Larger ones keep a device busy by themselves.
    """
    found: dict[int, EigenPairs] = {}
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(sums):
        if part.is_thin or part.size > _STACKED_UP_TO:
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
    """The eigendecomposition of ``XᵀX`` for ``[G, n, d]`` with n < d, from that of a matrix n × n.

    Singular values are known to about n roundings of the largest one in the rows' type, and their squares, which are
    the eigenvalues, to as many in float64 besides; eigenvalues that are no larger than this count as zero.
    """
    require_finite(rows)
    groups, n, size = rows.shape
    dtype = torch.promote_types(rows.dtype, torch.float32)
    full = rows.new_zeros(groups, size)
    if n == 0:
        return EigenPairs(full, rows.new_zeros(groups, size, 0))
    reflections, scales = torch.geqrf(rows.to(dtype).mT)
    triangle = reflections[:, :n].triu().double()
    values, inner = kernels.symmetric_eigen(triangle @ triangle.mT)
    values, inner = values.flip(-1), inner.flip(-1)
    limit = values[..., :1] * (n * max(torch.finfo(dtype).eps ** 2 * n, torch.finfo(torch.float64).eps))
    full[:, :n] = torch.where(values > limit, values, 0.0)
    thin = ThinEigen(reflections, scales, inner.to(dtype))
    if dtype != rows.dtype:
        return EigenPairs(full, None, thin.written().to(rows.dtype))
    return EigenPairs(full, thin=thin)
