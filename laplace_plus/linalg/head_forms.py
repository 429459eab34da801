"""Quadratic forms of many symmetric matrices in the same vectors, as one matrix product over half of their entries."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SQUARE = 32
"""Squares on the diagonal are kept whole from this size on."""


def squares(n: int, start: int = 0) -> list[tuple[slice, slice]]:
    """Rows and columns of the rectangles that cover the lower triangle of an n × n matrix, by halves of halves."""
    if n <= SMALLEST_SQUARE:
        return [(slice(start, start + n), slice(start, start + n))]
    half = n // 2
    lower = (slice(start + half, start + n), slice(start, start + half))
    return [lower, *squares(half, start), *squares(n - half, start + half)]


class QuadraticForms:
    """``A_c = [[a_c, b_cᵀ], [b_c, M_c]]`` for many c: symmetric, with few rows above many.

    ``φᵀ A_c φ = ⟨A_c, φ φᵀ⟩``, so that the forms of all c in all vectors are one product of the matrices' entries and
    of the vectors' pairwise products; of the pairs (m, n) and (n, m) one is enough. It takes half the operations of
    ``A_c φ``, is one large product instead of many small ones, and keeps little more than half of the numbers.

    Args:
        n_matrices: How many.
        n: Side of ``M_c``.
        n_leading: Side t of ``a_c``.
        like: Type and device of the entries.
    """

    def __init__(self, n_matrices: int, n: int, n_leading: int, like: Tensor):
        self.n, self.n_leading = n, n_leading
        self.squares = squares(n)
        self.entries = like.new_empty(n_matrices, self.width(n, n_leading))

    @staticmethod
    def width(n: int, n_leading: int) -> int:
        """How many entries of a matrix are kept."""
        area = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in squares(n))
        return area + n * n_leading + n_leading**2

    def put(self, which: slice, leading: Tensor, across: Tensor, matrices: Tensor, roots: Tensor | None) -> None:
        """Set some of the matrices.

        Args:
            which: Their places.
            leading: ``a [c, t, t]``.
            across: ``b [c, n, t]``.
            matrices: ``[c, n, n]``, for M up to the roots.
            roots: ``Y [c, n, r]`` of what is taken away, ``M = matrices − Y Yᵀ``.
        """
        target = self.entries[which]
        start = self.n_leading * (self.n + self.n_leading)
        target[:, :start] = torch.cat([leading, across], 1).flatten(1)
        for rows, columns in self.squares:
            block = matrices[:, rows, columns]
            if roots is not None:
                block = torch.baddbmm(block, roots[:, rows], roots[:, columns].mT, alpha=-1)
            stop = start + block[0].numel()
            target[:, start:stop].view(block.shape).copy_(block)
            start = stop

    def __call__(self, leading: Tensor, vectors: Tensor) -> Tensor:
        """``⟨A_c, φ φᵀ⟩`` of all matrices for ``φ = (leading [B, t], vectors [B, n])``, ``[B, c]``."""
        products = vectors.new_empty(len(vectors), self.entries.shape[1])
        t = self.n_leading
        start = t * (self.n + t)
        both = torch.cat([leading, 2 * vectors], 1)
        torch.mul(both[:, :, None], leading[:, None], out=products[:, :start].view(len(vectors), t + self.n, t))
        for rows, columns in self.squares:
            shape = (len(vectors), rows.stop - rows.start, columns.stop - columns.start)
            stop = start + shape[1] * shape[2]
            twice = vectors if rows == columns else both[:, t:]
            target = products[:, start:stop].view(shape)
            torch.mul(twice[:, rows, None], vectors[:, None, columns], out=target)
            start = stop
        return products @ self.entries.T
