"""Scalar curvature of a loss surface ``θ ↦ (θ, L(θ))``.

With ``g = ∇L``, ``H = ∇²L`` and ``β = 1/(1 + ‖g‖²)``, Gauss' equation for a graph gives

    S = β [(tr H)² − tr(H²)] − 2β² [tr(H) gᵀH g − ‖H g‖²]

the sum over pairs of principal curvatures, ``(Σκ)² − Σκ²``. At a stationary point it is ``(tr H)² − tr(H²)``; a Hessian
of rank one has none, however sharp. It depends on the scale of L, e.g. on whether L is a sum or a mean over data, and a
reparametrisation of the weights changes it. Pouplin, Roy, Singh and Arvanitidis, "On the curvature of the loss
landscape", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.geometry.landscape import FunctionLandscape, Landscape
from laplace_plus.linalg import Estimate, draw_probes, eigsh
from laplace_plus.linalg.estimates import jackknife
from laplace_plus.linalg.linear_maps import require_finite


def scalar_curvature(landscape: Landscape | Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The scalar curvature S of the loss surface at a point, from the Hessian written out.

    Costs P Hessian-vector products and memory for P² numbers.

    Args:
        landscape: The loss surface, or a function of ``[P]``.
        point: ``[P]``.

    Returns:
        0-d, of the point's type.

    Raises:
        ConfigurationError: A point that is no vector.
        NonFiniteError: Derivatives that are not finite there.
        UnsupportedError: A loss that cannot be differentiated twice.

    Example:
        >>> sphere = lambda point: -(4 - point.square().sum()).sqrt()  # of radius 2, seen from its centre
        >>> scalar_curvature(sphere, torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64))  # 3 · 2 / 2²
        tensor(1.5000, dtype=torch.float64)
    """
    surface = _Surface(landscape, point)
    hessian = surface.products(torch.eye(len(point), dtype=point.dtype, device=point.device))
    hessian = (hessian + hessian.mT) / 2
    trace, bend = hessian.trace(), hessian @ surface.gradient
    pairs = trace.square() - hessian.square().sum()
    return _curvature(surface, pairs, trace, bend)


def estimate_scalar_curvature(
    landscape: Landscape | Callable[[Tensor], Tensor],
    point: Tensor,
    *,
    probes: int = 100,
    deflate: int = 0,
    generator: torch.Generator | None = None,
) -> Estimate:
    """An unbiased estimate of S from ``probes + 1`` Hessian-vector products, in memory for as many vectors.

    ``(tr H)²`` is the mean of ``t_i t_j`` over pairs of different probes, ``t_i = v_iᵀ H v_i``, since the square of a
    mean would be biased; ``tr(H²)`` is that of ``‖H v_i‖²``. The two nearly cancel where one eigenvalue of H dominates.
    ``deflate=k`` then removes the eigenvectors of the k eigenvalues largest in magnitude and counts their contribution
    exactly, whether or not they are accurate. The standard error is the jackknife's.

    Args:
        landscape: The loss surface, or a function of ``[P]``, over *all* data: S is not linear in the loss, so that no
            subset gives an unbiased estimate.
        point: ``[P]``.
        probes: Number m ≥ 2 of random vectors of signs; two give no standard error.
        deflate: Number of eigenvectors to remove.
        generator: Source of randomness.

    Returns:
        The estimate, its value 0-d; ``sem`` is infinite for two probes.

    Raises:
        ConfigurationError: Numbers of probes or eigenvectors out of range, or a point that is no vector.
        NonFiniteError: Derivatives that are not finite there.
        UnsupportedError: A loss that cannot be differentiated twice.
    """
    surface, n = _Surface(landscape, point), len(point)
    checks.count("probes", probes, 2)
    checks.count("deflate", deflate, 0)
    basis = point.new_zeros(0, n)
    if deflate:
        options: Any = {"generator": generator, "dtype": point.dtype, "device": point.device}
        basis = eigsh(surface.products, n, deflate, which="magnitude", **options).vectors
    image = surface.products(basis) if deflate else basis  # [j, P]
    block = image @ basis.mT
    block_trace = block.trace()
    # The part of ‖H‖_F² that involves the basis: twice ‖H U‖², less the part within the basis, counted twice.
    block_square = 2 * image.square().sum() - block.square().sum()
    v = draw_probes("signs", probes, n, generator=generator, dtype=point.dtype, device=point.device)
    v = v - (v @ basis.mT) @ basis
    h = surface.products(v)
    t, s = (v * h).sum(1), (h - (h @ basis.mT) @ basis).square().sum(1)
    bend = surface.products(surface.gradient)

    def combined(m: int, first: Tensor, squares: Tensor, lengths: Tensor) -> Tensor:
        """S from sums over m probes of t, t² and s."""
        trace = block_trace + first / m
        pairs = block_trace.square() - block_square
        pairs = pairs + 2 * block_trace * first / m + (first.square() - squares) / (m * (m - 1)) - lengths / m
        return _curvature(surface, pairs, trace, bend)

    value = combined(probes, t.sum(), t.square().sum(), s.sum())
    sem = torch.full_like(value, float("inf"))
    if probes > 2:  # the jackknife leaves one out, and an estimate takes two
        sem = jackknife(combined(probes - 1, t.sum() - t, t.square().sum() - t.square(), s.sum() - s))
    return Estimate(value, sem, surface.count, True, probes=probes)


def _curvature(surface: _Surface, pairs: Tensor, trace: Tensor, bend: Tensor) -> Tensor:
    """S from ``(tr H)² − tr(H²)``, ``tr H`` and ``H g``."""
    g, beta = surface.gradient, surface.beta
    return beta * pairs - 2 * beta.square() * (trace * (g @ bend) - bend @ bend)


class _Surface:
    """A landscape at one point: its gradient, and products with its Hessian."""

    def __init__(self, landscape: Landscape | Callable[[Tensor], Tensor], point: Tensor):
        checks.shape("point", point, [None])
        self._landscape = landscape if isinstance(landscape, Landscape) else FunctionLandscape(landscape)
        self._point, self.count = point.detach(), 0
        self.gradient = self._landscape.gradient(self._point[None])[0]
        require_finite("the loss's gradient", self.gradient)
        self.beta = 1 / (1 + self.gradient.square().sum())

    def products(self, vectors: Tensor) -> Tensor:
        """``H v`` for ``[..., P]``."""
        rows = vectors.reshape(-1, vectors.shape[-1])
        self.count += len(rows)
        products = self._landscape.derivatives(self._point.expand_as(rows), rows).products
        require_finite("the loss's Hessian", products)
        return products.view(vectors.shape)
