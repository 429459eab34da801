"""Inverses of many symmetric positive definite matrices of one size, mostly by matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_BLOCK = 32
"""Matrices of this size are inverted by their Cholesky decompositions."""


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


def _invert_into(result: Tensor, roots: Tensor, matrices: Tensor) -> bool:
    """Write the inverses and the diagonals of Cholesky factors, ``[c, n]``, where there are any; whether there are."""
    if matrices.shape[-1] <= SMALLEST_BLOCK:
        lower, failed = torch.linalg.cholesky_ex(matrices)
        if failed.any():
            return False
        torch.cholesky_inverse(lower, out=result)
        roots.copy_(lower.diagonal(dim1=-2, dim2=-1))
        return True
    n = matrices.shape[-1]
    half = n // 2
    across = matrices[:, :half, half:]
    # Products are computed where blocks lie side by side, and copied: into a larger matrix they would be one by one.
    first, rest = matrices.new_empty(len(matrices), half, half), matrices.new_empty(len(matrices), n - half, n - half)
    if not _invert_into(first, roots[:, :half], matrices[:, :half, :half]):
        return False
    left = first @ across
    complement = torch.baddbmm(matrices[:, half:, half:], across.mT, left, alpha=-1)
    if not _invert_into(rest, roots[:, half:], complement):
        return False
    corner = (rest @ left.mT).neg_()
    result[:, :half, :half] = first.baddbmm_(left, corner, alpha=-1)
    result[:, half:, :half] = corner
    result[:, :half, half:] = corner.mT
    result[:, half:, half:] = rest
    return True


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
