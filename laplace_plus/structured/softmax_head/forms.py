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
        self.squares = squares(n)
        self.leading = like.new_empty(n_matrices, n_leading * (n + n_leading))
        # One array for each square, so that the same squares of several matrices lie side by side: products are then
        # written where they are kept, by one call for all of these matrices.
        sides = [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in self.squares]
        self.blocks = [like.new_empty(n_matrices, *side) for side in sides]

    @staticmethod
    def width(n: int, n_leading: int) -> int:
        """How many entries of a matrix are kept."""
        area = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in squares(n))
        return area + n * n_leading + n_leading**2

    def put_leading(self, which: slice, leading: Tensor, across: Tensor) -> None:
        """Set ``a [c, t, t]`` and ``b [c, n, t]`` of some of the matrices."""
        self.leading[which] = torch.cat([leading, across], 1).flatten(1)

    def put(self, which: slice, matrices: Tensor, roots: Tensor | None) -> None:
        """Set M of some of the matrices.

        Args:
            which: Their places.
            matrices: ``[c, n, n]``, for M up to the roots.
            roots: ``Y [c, n, r]`` of what is taken away, ``M = matrices − Y Yᵀ``.
        """
        for (rows, columns), blocks in zip(self.squares, self.blocks, strict=True):
            if roots is None:
                blocks[which] = matrices[:, rows, columns]
            else:
                left, right, block = roots[:, rows], roots[:, columns].mT, matrices[:, rows, columns]
                torch.baddbmm(block, left, right, alpha=-1, out=blocks[which])

    def __call__(self, leading: Tensor, vectors: Tensor) -> Tensor:
        """``⟨A_c, φ φᵀ⟩`` of all matrices for ``φ = (leading [B, t], vectors [B, n])``, ``[B, c]``."""
        both = torch.cat([leading, 2 * vectors], 1)
        result = (both[:, :, None] * leading[:, None]).flatten(1) @ self.leading.T
        twice = both[:, leading.shape[1] :]
        for (rows, columns), blocks in zip(self.squares, self.blocks, strict=True):
            factors = vectors if rows == columns else twice
            products = factors[:, rows, None] * vectors[:, None, columns]
            result.addmm_(products.flatten(1), blocks.flatten(1).T)
        return result
