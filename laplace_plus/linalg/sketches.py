"""The range of random products with a matrix, ``Y = A Ω = Q R``, and what it loses with each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.kernels import vector_norm


class Sketch:
    """A QR decomposition that grows by blocks of columns, so that nothing of it is computed again.

    Args:
        products: The first columns of Y by rows, ``[k, n]``.

    Attributes:
        basis: Q by rows, ``[m, n]``.
        triangle: R, ``[m, m]`` in float64.
    """

    def __init__(self, products: Tensor):
        basis, triangle = torch.linalg.qr(products.mT)
        self.basis, self.triangle = basis.mT.contiguous(), triangle.double()

    def extend(self, products: Tensor) -> Tensor:
        """Add columns ``[k, n]``; returns the new rows of the basis, ``[k, n]``."""
        m, k = len(self.basis), len(products)
        inside = products.new_zeros(m, k)
        for _ in range(2):
            coefficients = self.basis @ products.mT
            products = products - coefficients.mT @ self.basis
            inside = inside + coefficients
        basis, triangle = torch.linalg.qr(products.mT)
        above = torch.cat([self.triangle, inside.double()], 1)
        below = torch.cat([triangle.new_zeros(k, m), triangle], 1).double()
        self.triangle = torch.cat([above, below])
        new = basis.mT.contiguous()
        self.basis = torch.cat([self.basis, new])
        return new

    def leave_one_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the range loses with each column.

        The projection onto the span of all columns but the i-th is ``Q (B Bᵀ − sᵢ sᵢᵀ) Qᵀ``, where the columns of B
        span the range of R. If yᵢ lies in the span of the others, nothing is lost and sᵢ is zero: so it is for each i
        where the operator's rank is smaller than the number of probes.

        Returns:
            B ``[m, r]``, ``Bᵀ R`` ``[r, m]`` and ``Bᵀ sᵢ`` as columns ``[r, m]``; r is the numerical rank.
        """
        left, values, right = torch.linalg.svd(self.triangle)  # R = left · diag(values) · right
        rank = int((values > 4 * torch.finfo(values.dtype).eps * values[:1]).sum())
        left, values, right = left[:, :rank], values[:rank], right[:rank]
        # A column is needed for the range if and only if its leverage is one.
        needed = (1 - right.square().sum(0)) <= 1e-8
        lost = right / values[:, None]
        lost = torch.where(needed, lost / torch.linalg.vector_norm(lost, dim=0).clamp_min(1e-300), 0.0)
        return left, values[:, None] * right, lost


def require_squares(products: Tensor, lengths: Tensor) -> None:
    """Check that products whose lengths are zero are zero.

    Raises:
        OperatorError: The squares of their entries underflow.
    """
    vanished = (lengths == 0) & (products != 0).any(-1)
    if bool(vanished.any()):
        raise OperatorError(
            "The operator's products are too small for their type: their squares vanish.",
            expected=f"entries above {torch.finfo(products.dtype).tiny ** 0.5:.0e}",
            got=f"{float(products.abs().max()):.1e}",
            fix="Scale the operator, or use a wider type.",
        )


def frobenius_norm(products: Tensor) -> float:
    """Of row-stacked products ``[k, n]``.

    Raises:
        OperatorError: See :func:`require_squares`.
    """
    lengths = vector_norm(products)
    if bool((lengths == 0).any()):
        require_squares(products, lengths)
    return float(lengths.double().norm())
