"""Sketches ``Y = A Ω`` of an operator by random vectors: a QR decomposition, and the core ``Ωᵀ A Ω``."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.errors import NotPositiveDefiniteError, OperatorError
from laplace_plus.linalg.krylov import product_length
from laplace_plus.linalg.linear_maps import require_finite


class Sketch:
    """A QR decomposition ``Y = Q R`` of columns ``[m, n]``.

    Attributes:
        basis: Q by rows, ``[m, n]``.
        triangle: R, ``[m, m]`` in float64.
    """

    def __init__(self, products: Tensor):
        basis, triangle = torch.linalg.qr(products.mT)
        self.basis, self.triangle = basis.mT.contiguous(), triangle.double()

    def leave_one_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """The direction that the range loses without each column.

        The projection onto the span of all columns but the i-th is ``Q (B Bᵀ − sᵢ sᵢᵀ) Qᵀ``, where the columns of B
        span the range of R. If yᵢ lies in the span of the others, sᵢ is zero. This holds for every i where the rank of
        the operator is smaller than the number of probes.

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


def frobenius_norm(products: Tensor) -> float:
    """The Frobenius norm of row-stacked products ``[k, n]``; :class:`NonFiniteError` if squares under- or overflow."""
    lengths = product_length(products)
    require_finite("The product with random vectors", lengths)
    return float(lengths.double().norm())


def symmetric_core(core: Tensor, n: int, norm: float, eps: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of ``Ωᵀ A Ω [m, m]`` in float64, for a positive semi-definite A of size n.

    Columns of Ω have norm √n, ``A Ω`` has the Frobenius norm ``norm``, and A multiplied in the precision ``eps``.
    Raises NonFiniteError; OperatorError and NotPositiveDefiniteError beyond what rounding explains.
    """
    require_finite("The product with random vectors", core)
    largest = core.abs().max()
    if bool((core - core.mT).abs().max() > eps**0.5 * largest + 10 * eps * norm * n**0.5):
        what = "The operator is not symmetric."
        got = f"a difference of {(core - core.mT).abs().max().item():.3g} in {largest.item():.3g}"
        fix = 'Use method="xtrace", which is right for every square operator, if this is an estimate of a trace.'
        raise OperatorError(what, expected="vᵀ A w = wᵀ A v for all vectors", got=got, fix=fix)
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    smallest = float(values[0])
    if smallest < -10 * eps * norm * n**0.5:
        what = "The operator is not positive semi-definite."
        got = f"a quadratic form of {smallest:.3g} beside one of {values[-1].item():.3g}"
        fix = 'Use method="xtrace", which is right for every square operator, if this is an estimate of a trace.'
        raise NotPositiveDefiniteError(what, expected="vᵀ A v ≥ 0 for all vectors", got=got, fix=fix)
    return values, vectors
