"""Jacobi's method for batches of small symmetric matrices: one matrix for each program, held in registers.

In each round, every index i is rotated with its partner ``i ⊕ r`` (bitwise, so that the rounds r = 1 … n − 1 of a sweep
meet each pair once, all disjoint within a round). Sizes are padded to a power of two with zeros that no rotation mixes.
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, on_its_device, power_of_two, tl

LARGEST = 32
_MOST_SWEEPS = 16


@jit
def off_diagonal(matrix, row, column):
    """Sum of squares outside of the diagonal."""
    return tl.sum(tl.sum(tl.where(row == column, 0.0, matrix * matrix), 1), 0)


@jit
def jacobi(matrices, values, vectors, n, tolerance, SIZE: tl.constexpr, MOST_SWEEPS: tl.constexpr):
    """Eigenvalues in no order, and eigenvectors as columns."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < n) & (column < n)
    lower = tl.maximum(row, column) * n + tl.minimum(row, column)
    matrix = tl.load(matrices + program * n * n + lower, mask=inside, other=0.0)
    basis = (row == column).to(matrix.dtype)
    rest = off_diagonal(matrix, row, column)
    bound = tolerance * tl.sum(tl.sum(matrix * matrix, 1), 0)
    sweep = 0
    while (sweep < MOST_SWEEPS) & (rest > bound):
        for turn in range(1, SIZE):
            partner_row = tl.broadcast_to(row ^ turn, (SIZE, SIZE))
            partner_column = tl.broadcast_to(column ^ turn, (SIZE, SIZE))
            here = tl.sum(tl.where(row == column, matrix, 0.0), 1)
            there = tl.sum(tl.where(partner_row == column, tl.broadcast_to(here[None, :], (SIZE, SIZE)), 0.0), 1)
            first = tl.arange(0, SIZE) < (tl.arange(0, SIZE) ^ turn)
            # both partners must see the same entry, or rounding would make the rotation slightly askew
            entry = tl.where(
                first,
                tl.sum(tl.where(partner_row == column, matrix, 0.0), 1),
                tl.sum(tl.where(row == partner_column, matrix, 0.0), 0),
            )
            zero = entry == 0.0
            ratio = tl.where(first, there - here, here - there) / tl.where(zero, 1.0, 2.0 * entry)
            tangent = tl.where(ratio < 0.0, -1.0, 1.0) / (tl.abs(ratio) + tl.sqrt(ratio * ratio + 1.0))
            tangent = tl.where(zero, 0.0, tangent).to(matrix.dtype)
            cosine = 1.0 / tl.sqrt(tangent * tangent + 1.0)
            sine = tl.where(first, -tangent, tangent) * cosine
            matrix = cosine[:, None] * matrix + sine[:, None] * tl.gather(matrix, partner_row, 0)
            matrix = cosine[None, :] * matrix + sine[None, :] * tl.gather(matrix, partner_column, 1)
            basis = cosine[:, None] * basis + sine[:, None] * tl.gather(basis, partner_row, 0)
        rest = off_diagonal(matrix, row, column)
        sweep += 1
    diagonal = tl.sum(tl.where(row == column, matrix, 0.0), 1)
    tl.store(values + program * n + tl.arange(0, SIZE), diagonal, mask=tl.arange(0, SIZE) < n)
    tl.store(vectors + program * n * n + column * n + row, basis, mask=inside)


@on_its_device
def eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues ``[B, n]`` and eigenvectors, as columns, ``[B, n, n]``, of the lower triangles.

    Args:
        matrices: ``[B, n, n]`` of float32 or float64, n ≤ 32.
    """
    matrices = matrices.contiguous()
    batch, n, _ = matrices.shape
    values, vectors = matrices.new_empty(batch, n), torch.empty_like(matrices)
    tolerance = torch.finfo(matrices.dtype).eps ** 2
    jacobi[(batch,)](
        matrices, values, vectors, n, tolerance, SIZE=power_of_two(n, 2), MOST_SWEEPS=_MOST_SWEEPS,
        num_warps=1 if n <= 16 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    values, order = values.sort(-1)
    return values, vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
