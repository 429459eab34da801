"""Inverses of many symmetric positive definite matrices of one size, mostly by matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BLOCK = 32
"""Matrices of this size are inverted by their Cholesky decompositions."""


@dataclass(frozen=True)
class Quarters:
    """Symmetric matrices ``[c, n, n]`` as their parts.

    Attributes:
        first: The first half of the rows and columns, ``[c, h, h]``.
        corner: The other rows of the first columns, ``[c, n − h, h]``.
        rest: The other rows and columns, ``[c, n − h, n − h]``.
    """

    first: Tensor
    corner: Tensor
    rest: Tensor

    def write_into(self, result: Tensor) -> None:
        """Write the whole matrices."""
        half = self.first.shape[-1]
        result[:, :half, :half] = self.first
        result[:, half:, :half] = self.corner
        result[:, :half, half:] = self.corner.mT
        result[:, half:, half:] = self.rest

    def times(self, rows: Tensor) -> Tensor:
        """``x A`` for rows ``[c, t, n]``."""
        half = self.first.shape[-1]
        one, two = rows[..., :half], rows[..., half:]
        return torch.cat([one @ self.first + two @ self.corner, one @ self.corner.mT + two @ self.rest], -1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums of the matrices with several weights ``[m, c]``, ``[m, n, n]``."""
        parts = [
            (weights @ part.flatten(1)).unflatten(1, part.shape[1:]) for part in (self.first, self.corner, self.rest)
        ]
        size = self.first.shape[-1] + self.rest.shape[-1]
        result = weights.new_empty(len(weights), size, size)
        Quarters(*parts).write_into(result)
        return result


def inverse_by_blocks(matrices: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Inverses of symmetric positive definite matrices ``[c, n, n]``, by Schur complements of halves.

    All but the smallest blocks are matrix products, which a processor does many times as fast as it factorises: four
    of halves, so 4/3 n³ operations for a matrix.

    Returns:
        The inverses; the sum of the matrices' log-determinants, 0-d float64; and whether some matrix turned out not to
        be positive definite, in which case neither means anything.
    """
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    roots = matrices.new_empty(matrices.shape[:-1])
    succeeded = _invert_into(result, roots, matrices)
    return result, 2 * roots.double().log().sum(), not succeeded


def inverse_in_quarters(matrices: Tensor) -> Quarters | None:
    """The same inverses of matrices of two rows or more, in parts; None if some matrix is not positive definite."""
    return _quarters(matrices.new_empty(matrices.shape[:-1]), matrices)


def _invert_into(result: Tensor, roots: Tensor, matrices: Tensor) -> bool:
    """Write the inverses and the diagonals of Cholesky factors, ``[c, n]``, where there are any; whether there are."""
    if matrices.shape[-1] <= SMALLEST_BLOCK:
        lower, failed = torch.linalg.cholesky_ex(matrices)
        if failed.any():
            return False
        torch.cholesky_inverse(lower, out=result)
        roots.copy_(lower.diagonal(dim1=-2, dim2=-1))
        return True
    quarters = _quarters(roots, matrices)
    if quarters is None:
        return False
    # Products are computed where blocks lie side by side, and copied: into a larger matrix they would be one by one.
    quarters.write_into(result)
    return True


def _quarters(roots: Tensor, matrices: Tensor) -> Quarters | None:
    """The inverses, and the diagonals of Cholesky factors written; None where there are none."""
    n = matrices.shape[-1]
    half = n // 2
    across = matrices[:, :half, half:]
    first, rest = matrices.new_empty(len(matrices), half, half), matrices.new_empty(len(matrices), n - half, n - half)
    if not _invert_into(first, roots[:, :half], matrices[:, :half, :half]):
        return None
    left = first @ across
    complement = torch.baddbmm(matrices[:, half:, half:], across.mT, left, alpha=-1)
    if not _invert_into(rest, roots[:, half:], complement):
        return None
    corner = rest @ left.mT
    first.baddbmm_(left, corner)
    return Quarters(first, corner.neg_(), rest)


def log_determinant_of(lower: Tensor) -> Tensor:
    """``Σ log det L Lᵀ`` of triangular matrices, 0-d float64."""
    return 2 * lower.diagonal(dim1=-2, dim2=-1).double().log().sum()


def raised(scales: Tensor, gram: Tensor, dtype: torch.dtype) -> Tensor:
    """``w p`` of some classes ``[N, c]`` as ``[c, N]`` that may be inverted, for ``G_c [1 or c, N, N]``.

    Probabilities that are zero, or nearly, are raised to where ``w p_nc φ_nᵀ D_c⁻¹ φ_n`` is the square of the type's
    rounding error ε. All of them together change ``w H + D`` by less than N ε² times itself.
    """
    own = gram.diagonal(dim1=-2, dim2=-1).double()
    return torch.maximum(scales.T, torch.finfo(dtype).eps ** 2 / torch.where(own > 0, own, 1.0))
