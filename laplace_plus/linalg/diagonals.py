"""Stochastic estimates of the diagonal of a matrix that is only known by its products.

* Hutchinson: the mean of ``ω ∘ A ω`` over random ω with ``E[ω ωᵀ] = I`` (Bekas, Kokiopoulou and Saad, "An Estimator for
  the Diagonal of a Matrix", 2007).
* XDiag: every probe serves for a sketch of the range, whose part of the diagonal is computed, and, left out of it, for
  the remainder (Epperly, Tropp and Webber, "XTrace: Making the Most of Every Sample in Stochastic Trace Estimation",
  2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from laplace_plus.linalg.arguments import (
    require_choice,
    require_count,
    require_tolerance,
    without_autocast,
    working_type,
)
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, number_type, require_finite
from laplace_plus.linalg.probes import (
    Probes,
    dense,
    draw_probes,
    exact_is_due,
    jackknife,
    multiply,
    parameter_gradients,
    standard_error,
)
from laplace_plus.linalg.results import Estimate
from laplace_plus.linalg.sketches import Sketch

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
    off-diagonal part of row i over √m; XDiag's is that of A less its best approximation of rank m/2, about. Where the
    budget covers the dimension, ``matvecs ≥ n``, the diagonal is exact, from n products. XDiag keeps 2 ``matvecs``
    vectors.

    The value is differentiable in the tensors that the operator depends on. Its gradient is the same estimator applied
    to ``∂A/∂θ``, the probes and bases held fixed: unbiased, exact where the value is, and with ``"hutchinson"`` also
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
        tolerance: Add batches of ``matvecs`` products until the norm of the standard errors is below this part of the
            norm of the diagonal. None uses ``matvecs`` products and no more.
        absolute_tolerance: With ``tolerance``, a norm of the standard errors that is good enough in any case.
        cap: Limit on the number of products with a tolerance; 20 ``matvecs`` by default.
        generator: Where the randomness comes from; torch's global generator by default.
        dtype: Type of the vectors; that of the operator's tensors by default.
        device: Device of the vectors; that of the operator's tensors by default.
        parameters: The tensors A depends on, if they are not to be found from its autograd graph.

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
    require_count("n", n, 1)
    fewest = 4 if method == "xdiag" else 2
    require_count("matvecs", matvecs, min(fewest, n), f"{method} needs {fewest}, or n for the exact diagonal.")
    require_tolerance(tolerance=tolerance, absolute_tolerance=absolute_tolerance)
    cap = 20 * matvecs if cap is None else cap
    require_count("cap", cap, matvecs)
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, rmatvec=rmatvec, symmetric=symmetric, parameters=parameters)
    if matvecs >= n:
        return _exact(operator, dtype, device)
    estimator = (_XDiag if method == "xdiag" else _Hutchinson)(operator, dtype)
    count = matvecs // 2 if method == "xdiag" else matvecs
    while True:
        new = draw_probes(distribution, count, n, generator=generator, dtype=dtype, device=device)
        estimator.add(new.to(working_type(dtype)))
        value, sem = estimator.estimate()
        require_finite("The diagonal estimator", value)
        # One host synchronisation per batch, and only where there is something to decide.
        met = tolerance is None or bool(sem.norm() <= torch.clamp(tolerance * value.norm(), min=absolute_tolerance))
        if met or operator.matvecs + min(matvecs, n) > cap:
            break
        if exact_is_due(operator.matvecs, matvecs, n, cap):
            return _exact(operator, dtype, device)

    def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if cotangents[0] is None:
            return [None] * len(operator.tensors)
        return parameter_gradients(operator, *estimator.frame(cotangents[0]), dtype)

    probes_used = len(estimator.probes)
    (value,) = attach([value], operator.tensors, pullback)
    return Estimate(value, sem, operator.matvecs, met, probes=probes_used)


def _exact(operator: LinearMap, dtype: torch.dtype, device: torch.device) -> Estimate:
    """The diagonal itself, from n products."""
    identity, rows = dense(operator, dtype, device)
    entries = rows.diagonal().to(working_type(dtype), copy=True)
    require_finite("The diagonal", entries)

    def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if cotangents[0] is None:
            return [None] * len(operator.tensors)
        return parameter_gradients(operator, identity, torch.diag(cotangents[0]), dtype)

    (value,) = attach([entries], operator.tensors, pullback)
    return Estimate(value, torch.zeros_like(entries), operator.matvecs, True)


class _Hutchinson:
    def __init__(self, operator: LinearMap, dtype: torch.dtype):
        self.operator, self.dtype = operator, dtype
        self.probes = self.products = torch.empty(0)

    def add(self, probes: Tensor) -> None:
        products = multiply(self.operator, probes, self.dtype)
        first = not len(self.probes)
        self.products = products if first else torch.cat([self.products, products])
        self.probes = probes if first else torch.cat([self.probes, probes])

    def estimate(self) -> tuple[Tensor, Tensor]:
        samples = self.probes * self.products
        return samples.mean(0), standard_error(samples)

    def frame(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.probes, weights * self.probes / len(self.probes)


class _XDiag:
    def __init__(self, operator: LinearMap, dtype: torch.dtype):
        self.operator, self.dtype = operator, dtype
        self.probes = self.products = torch.empty(0)

    def add(self, probes: Tensor) -> None:
        columns = multiply(self.operator, probes, self.dtype)
        require_finite("The diagonal estimator", columns)
        if not len(self.probes):
            self.probes, self.range = probes, Sketch(columns)
            self.products = self._transposed(self.range.basis)
        else:
            self.probes = torch.cat([self.probes, probes])
            self.products = torch.cat([self.products, self._transposed(self.range.extend(columns))])

    def _transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u``."""
        products = self.operator.transposed(vectors.to(self.dtype)).to(vectors.dtype)
        require_finite("The diagonal estimator", products)
        return products

    def estimate(self) -> tuple[Tensor, Tensor]:
        basis, (rotation, columns, lost) = self.range.basis, self.range.leave_one_out()
        to_range = rotation.mT.to(basis.dtype)
        captured = (to_range @ basis * (to_range @ self.products)).sum(0)  # diag(Q Qᵀ A)
        directions = (rotation @ lost).mT.to(basis.dtype)
        parts, images = directions @ basis, directions @ self.products  # sᵢ and Aᵀ sᵢ as vectors of length n
        scaled = (lost * columns).sum(0)[:, None].to(basis.dtype) * self.probes
        # Without probe i the range lacks one direction sᵢ: its part of the captured diagonal goes, and the remainder
        # of the product with probe i is what lies in that direction.
        samples = parts * (scaled - images)
        spread, m = standard_error(samples), len(self.probes)
        if len(lost) == m > 2:  # with a smaller rank each sample is exact, or near it
            spread = (spread * jackknife(_without_each(lost, parts, images, scaled, samples))).sqrt()
        return captured + samples.mean(0), spread

    def frame(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        m = len(self.probes)
        rotation, _, lost = self.range.leave_one_out()
        basis = rotation.mT.to(self.range.basis.dtype) @ self.range.basis
        average = torch.eye(len(lost), dtype=lost.dtype, device=lost.device) - lost @ lost.mT / m
        weighted = weights * self.probes
        inside = (basis @ weighted.mT).double()
        inside = (inside - lost * (lost * inside).sum(0)).mT.to(basis.dtype)
        return (
            torch.cat([weights * basis, self.probes]),
            torch.cat([average.to(basis.dtype) @ basis, (weighted - inside @ basis) / m]),
        )


def _without_each(lost: Tensor, parts: Tensor, images: Tensor, scaled: Tensor, samples: Tensor) -> Tensor:
    """XDiag's estimates without each of its probes, less the captured diagonal, ``[m, n]``.

    Without the probes i and j the range lacks span(sᵢ, s_j), and the product with probe i keeps what lies in the
    direction of that span that is orthogonal to s_j. In row j of each product is the sum over i.
    """
    m = len(parts)
    cosine = (lost.mT @ lost).fill_diagonal_(0.0)
    apart = (1 - cosine.square()).clamp_min(1e-12).reciprocal().fill_diagonal_(0.0)
    weights, mixed = apart.to(parts.dtype), (apart * cosine).to(parts.dtype)
    twice = (apart * cosine.square()).sum(1)[:, None].to(parts.dtype)
    sums = weights @ samples + (mixed @ parts) * images + (mixed @ (images - scaled) - twice * images) * parts
    return sums / (m - 1) - parts * images
