"""Stochastic estimates of the diagonal of an operator.

* Hutchinson: the mean of ``ω ∘ A ω`` over random ω with ``E[ω ωᵀ] = I`` (Bekas, Kokiopoulou and Saad, "An Estimator for
  the Diagonal of a Matrix", 2007).
* XDiag: every probe is used for a sketch of the range, where the diagonal is exact, and, left out of it, for the
  correction (Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample in Stochastic Trace Estimation",
  2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.linalg.arguments import require_choice, without_autocast
from laplace_plus.linalg.estimators import Hutchinson, SketchEstimator
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, number_type
from laplace_plus.linalg.probes import Probes
from laplace_plus.linalg.results import Estimate, jackknife, standard_error

DiagonalMethod = Literal["xdiag", "hutchinson"]
"""Names of the estimators of :func:`diagonal`."""


@without_autocast
def diagonal(
    matvec: Matvec,
    n: int,
    *,
    matvecs: int = 60,
    method: DiagonalMethod = "xdiag",
    rmatvec: Matvec | None = None,
    symmetric: bool = False,
    distribution: Probes = "signs",
    tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    cap: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate the diagonal of A.

    Both estimators are unbiased, entry by entry. With m products, Hutchinson's error in entry i is the norm of the
    off-diagonal entries of row i over √m. XDiag's error is about that of A less its best approximation of rank m/2.
    Where the budget covers the dimension, ``matvecs ≥ n``, the diagonal is exact, from n products. XDiag stores 2
    ``matvecs`` vectors.

    The value is differentiable in the tensors that the operator depends on. Its gradient is the same estimator applied
    to ``∂A/∂θ`` with probes and bases held fixed: unbiased, exact where the value is, and with ``"hutchinson"`` also
    the gradient of the computed value.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator; it need be neither symmetric nor definite.
        n: Its size.
        matvecs: Number of products, for XDiag half with A and half with its transpose; at least 4 for XDiag and 2 for
            Hutchinson, or at least n.
        method: The estimator.
        rmatvec: The transpose, where A is not symmetric and torch cannot differentiate through it.
        symmetric: Whether A is its own transpose, so that XDiag need not differentiate to multiply with it.
        distribution: Of the probes; signs have no variance on the diagonal part of A.
        tolerance: Add batches of ``matvecs`` products until the norm of the standard errors is below this
            fraction of the norm of the diagonal. None uses ``matvecs`` products.
        absolute_tolerance: With ``tolerance``, a norm of the standard errors that is small enough in any case.
        cap: Limit on the number of products with a tolerance; 20 ``matvecs`` by default.
        generator: Source of the randomness; torch's global generator by default.
        dtype: Type of the vectors; that of the operator's tensors by default.
        device: Device of the vectors; that of the operator's tensors by default.
        parameters: The tensors A depends on, where they cannot be found from its autograd graph.

    Returns:
        ``value [n]`` and ``sem [n]``, of the vectors' type (float32 for half precision).

    Raises:
        ConfigurationError: An unknown method, or a budget that is too small for it.
        OperatorError: The operator is not square, or has no transpose where it is needed.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(0.5 ** torch.arange(100.0))
        >>> estimate = diagonal(lambda v: v @ matrix, 100, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(estimate.value, matrix.diagonal(), atol=1e-5)
        True
    """
    require_choice("diagonal method", method, DiagonalMethod)
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, rmatvec=rmatvec, symmetric=symmetric, parameters=parameters, dtype=dtype)
    kind = _XDiag if method == "xdiag" else Hutchinson
    estimator = kind(torch.mul, operator, distribution, generator, dtype, device)
    return estimator.run(method, matvecs, cap, tolerance, absolute_tolerance)


class _XDiag(SketchEstimator):
    transposed = True

    @override
    def estimate(self) -> tuple[Tensor, Tensor]:
        basis, (change, columns, lost) = self.range.basis, self.range.leave_one_out()
        to_range = change.mT.to(basis.dtype)
        captured = (to_range @ basis * (to_range @ self.products)).sum(0)  # diag(Q Qᵀ A)
        components = (change @ lost).mT.to(basis.dtype)
        parts, images = components @ basis, components @ self.products  # sᵢ and Aᵀ sᵢ as vectors of length n
        scaled = (lost * columns).sum(0)[:, None].to(basis.dtype) * self.probes
        # Without probe i the range lacks the direction sᵢ. Its share of the captured diagonal is subtracted, and the
        # component of the product with probe i along sᵢ is added.
        samples = parts * (scaled - images)
        spread, m = standard_error(samples), len(self.probes)
        if len(lost) == m > 2:  # with a smaller rank each sample is nearly exact
            spread = (spread * jackknife(_without_each(lost, parts, images, scaled, samples))).sqrt()
        return captured + samples.mean(0), spread

    @override
    def frame(self, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        m = len(self.probes)
        change, _, lost = self.range.leave_one_out()
        basis = change.mT.to(self.range.basis.dtype) @ self.range.basis
        average = torch.eye(len(lost), dtype=lost.dtype, device=lost.device) - lost @ lost.mT / m
        weighted = cotangent * self.probes
        inside = (basis @ weighted.mT).double()
        inside = (inside - lost * (lost * inside).sum(0)).mT.to(basis.dtype)
        return (
            torch.cat([cotangent * basis, self.probes]),
            torch.cat([average.to(basis.dtype) @ basis, (weighted - inside @ basis) / m]),
        )


def _without_each(lost: Tensor, parts: Tensor, images: Tensor, scaled: Tensor, samples: Tensor) -> Tensor:
    """XDiag's estimates without each of its probes, less the captured diagonal, ``[m, n]``.

    Without the probes i and j the range lacks span(sᵢ, s_j). The product with probe i keeps its component along the
    vector of that span that is orthogonal to s_j. Row j of each product is the sum over i.
    """
    m = len(parts)
    cosine = (lost.mT @ lost).fill_diagonal_(0.0)
    apart = (1 - cosine.square()).clamp_min(1e-12).reciprocal().fill_diagonal_(0.0)
    weights, mixed = apart.to(parts.dtype), (apart * cosine).to(parts.dtype)
    twice = (apart * cosine.square()).sum(1)[:, None].to(parts.dtype)
    sums = weights @ samples + (mixed @ parts) * images + (mixed @ (images - scaled) - twice * images) * parts
    return sums / (m - 1) - parts * images
