"""Inverses of many symmetric positive definite matrices of one size, mostly by matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_BLOCK = 32
"""Matrices of this size are inverted by their Cholesky decompositions."""


def inverse_by_blocks(matrices: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Inverses of symmetric positive definite matrices ``[c, n, n]``, by Schur complements of halves.

    All but the smallest blocks are matrix products, which a processor does many times as fast as it factorises.

    Returns:
        The inverses; the sum of the matrices' log-determinants, 0-d float64; and whether some matrix turned out not to
        be positive definite, in which case neither means anything.
    """
    n = matrices.shape[-1]
    if n <= SMALLEST_BLOCK:
        lower, failed = torch.linalg.cholesky_ex(matrices)
        return torch.cholesky_inverse(lower), log_determinant_of(lower), bool(failed.any())
    half = n // 2
    first, log_determinant, failed = inverse_by_blocks(matrices[:, :half, :half])
    if failed:
        return first, log_determinant, True
    across = matrices[:, :half, half:]
    left = first @ across
    rest, own, failed = inverse_by_blocks(torch.baddbmm(matrices[:, half:, half:], across.mT, left, alpha=-1))
    if failed:
        return rest, own, True
    # The corner is computed twice, since processors multiply faster than they transpose.
    corner = rest @ left.mT
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    result[:, :half, :half] = torch.baddbmm(first, left, corner)
    result[:, :half, half:] = torch.baddbmm(rest.new_zeros(()), left, rest, beta=0, alpha=-1)
    torch.neg(corner, out=result[:, half:, :half])
    result[:, half:, half:] = rest
    return result, log_determinant + own, False


def log_determinant_of(lower: Tensor) -> Tensor:
    """``Σ log det L Lᵀ`` of triangular matrices, 0-d float64."""
    return 2 * lower.diagonal(dim1=-2, dim2=-1).double().log().sum()
