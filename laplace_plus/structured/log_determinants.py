"""``log det(w H + δ)`` as a function of w and δ, for a matrix H whose eigenvalues are known.

With one weight w and one δ the determinant depends on ``u = log(w/δ)`` alone,

    log det(w H + δ I) = n log δ + Σ_i log(1 + exp(log λ_i + u)),

and ``x ↦ log(1 + exp(x + u))`` is analytic in the strip ``|Im x| < π`` whatever u is. Interpolating it between
Chebyshev points on short intervals therefore replaces the whole spectrum by a few hundred *nodes* with weights, once
and for all u. The error falls geometrically in the number of points (Trefethen, "Approximation Theory and Approximation
Practice", 2013, theorem 8.2). Evidence and derivatives then cost the same for millions of eigenvalues as for hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import softplus

from laplace_plus.errors import NotPositiveDefiniteError

HALF_WIDTH = 1.0
"""Half the length of an interval of logarithms of eigenvalues; :data:`POINTS` follows from it."""

POINTS = 18
"""Interpolation points on each interval. Its Bernstein ellipse that reaches ±iπ has ρ = π + √(π² + 1) = 6.4, and the
error is about ρ⁻¹⁸ = 3e-15."""

WORTHWHILE = 16
"""Evaluations of a long spectrum after which its nodes are computed, which takes as long as about 25 evaluations."""

CHUNK = 2**16
"""Entries that a pass takes at a time: in float64 they fill half a core's own cache (EPYC, Zen 4)."""

_LINEAR = 40.0
"""From here on ``log(1 + exp x)`` equals x in float64."""


class Spectrum:
    """The function ``(w, δ) ↦ log det(w H + δ I)`` of a symmetric H.

    Args:
        sides: The eigenvalues of H, of any shape and real type; kept, not copied. If one is negative, every evaluation
            takes a pass over all of them. Or two vectors, none negative, whose products are the eigenvalues.

    Example:
        >>> spectrum = Spectrum(torch.tensor([0.0, 1.0, 3.0]))
        >>> round(spectrum.log_determinant(torch.tensor(2.0), torch.tensor(1.0)).exp().item(), 6)
        21.0
    """

    def __init__(self, *sides: Tensor):
        self._sides = [side.detach() for side in sides]
        self.size = math.prod(side.numel() for side in sides)
        self.is_definite = all(bool((side >= 0).all()) for side in self._sides)
        self._evaluations = 0 if len(sides) == 1 and self.size > CHUNK else WORTHWHILE

    def log_determinant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """``log det(w H + δ I)``, 0-d float64, for positive w and δ, 0-d; to about 1e-13 of ``Σ |log(w λ + δ)|``.

        Differentiable in both, any number of times. NotPositiveDefiniteError if ``w λ + δ`` is not positive for some λ.
        """
        self._evaluations += 1
        found = self.nodes if self._evaluations > WORTHWHILE else None
        if found is None:
            return log_determinant(self._sides[0].flatten()[None], weight[None], shift)
        weight, shift = weight.double(), shift.double()
        require_positive(shift)
        level = shift.log()
        return self.size * level + found[1] @ softplus(found[0] + weight.log() - level, threshold=_LINEAR)

    @cached_property
    def nodes(self) -> tuple[Tensor, Tensor] | None:
        """Quadrature nodes (logarithms of eigenvalues) and weights, ``[m]`` float64; None if an eigenvalue is negative.

        They replace all positive eigenvalues in sums of smooth functions.
        """
        if not self.is_definite:
            return None
        nodes, weights = _nodes_of(self._sides[0])
        for side in self._sides[1:]:
            more, more_weights = _nodes_of(side)
            nodes, weights = _condense((nodes[:, None] + more).flatten(), (weights[:, None] * more_weights).flatten())
        return nodes, weights


class JoinedSpectra:
    """The spectra of a block-diagonal matrix's blocks, none with negative eigenvalues, several of which share a δ.

    ``groups`` holds for each block the number of its δ, from 0 to R−1; each number occurs.
    """

    def __init__(self, spectra: Sequence[Spectrum], groups: Sequence[int]):
        nodes, weights = [], []
        for group in range(max(groups) + 1):
            members = [spectrum for spectrum, own in zip(spectra, groups, strict=True) if own == group]
            pairs = [spectrum.nodes for spectrum in members if spectrum.nodes is not None]
            own_nodes, own_weights = _condense(*map(torch.cat, zip(*pairs, strict=True)))
            nodes.append(own_nodes)
            weights.append(own_weights)
        self.nodes, self._weights = torch.cat(nodes), torch.cat(weights)
        lengths = torch.tensor([len(own) for own in nodes])
        self._group = torch.repeat_interleave(torch.arange(len(nodes)), lengths).to(self.nodes.device)

    def log_ratio(self, weight: Tensor, levels: Tensor) -> Tensor:
        """``Σ_b log det(w/δ_g(b) H_b + I)``, 0-d float64; differentiable in w > 0, 0-d, and log δ, ``[R]`` or 0-d."""
        levels = levels[self._group] if levels.ndim else levels
        return self._weights @ softplus(self.nodes + weight.log() - levels, threshold=_LINEAR)


def _nodes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``[m]`` of the logarithms of the positive values, a bounded number of values at a time."""
    parts = []
    for part in values.flatten().split(16 * CHUNK):
        logarithms = part[part > 0].double().log()
        parts.append(_condense(logarithms, torch.ones_like(logarithms)))
    return parts[0] if len(parts) == 1 else _condense(*map(torch.cat, zip(*parts, strict=True)))


def _condense(nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Chebyshev points and weights that integrate smooth functions as the given nodes ``[n]`` and weights do."""
    if not len(nodes):
        return nodes, weights
    # All spectra share one grid of intervals, so that nodes coincide when they are condensed again.
    interval = (nodes / (2 * HALF_WIDTH)).floor()
    local = (nodes / HALF_WIDTH - 2 * interval - 1).clamp(-1, 1)
    first = interval.min()
    interval = (interval - first).long()
    occupied, interval = interval.unique(return_inverse=True)
    if len(occupied) * POINTS >= len(nodes):
        return nodes, weights
    # Moments of the Chebyshev polynomials on each interval, by their three-term recurrence.
    moments = nodes.new_zeros(POINTS, len(occupied))
    previous, current = torch.ones_like(local), local
    for degree in range(POINTS):
        moments[degree].index_add_(0, interval, weights * previous)
        previous, current = current, 2 * local * current - previous
    angles = math.pi * (torch.arange(POINTS, dtype=nodes.dtype, device=nodes.device) + 0.5) / POINTS
    moments[1:] *= 2
    polynomials = torch.cos(angles[:, None] * torch.arange(POINTS, dtype=nodes.dtype, device=nodes.device))
    centres = (occupied + first) * (2 * HALF_WIDTH) + HALF_WIDTH
    return (centres + HALF_WIDTH * angles.cos()[:, None]).flatten(), (polynomials @ moments / POINTS).flatten()


def log_determinant(values: Tensor, weights: Tensor, shift: Tensor) -> Tensor:
    """``Σ_i log(Σ_k w_k λ_ki + δ_i)``, 0-d float64, a bounded number of terms at a time.

    For values λ ``[K, n]``, which are not differentiated, weights w ``[K]`` and a shift δ, 0-d or ``[n]``.
    Differentiable in both, any number of times. NotPositiveDefiniteError where a term's argument is not positive.
    """
    weights, shift = weights.double(), shift.double()
    total = shift.new_zeros(())
    shifts = shift.split(CHUNK) if shift.ndim else repeat(shift)
    for part, own in zip(values.split(CHUNK, 1), shifts, strict=False):
        terms = weights @ part.double() + own
        if terms.numel():
            require_positive(terms)
        total = total + terms.log().sum()
    return total


def require_positive(values: Tensor) -> None:
    """Raise :class:`NotPositiveDefiniteError` where an eigenvalue of a posterior precision is not positive, or NaN."""
    smallest = values.detach().min()
    if not smallest > 0:
        raise not_positive_definite(smallest.item())


def not_positive_definite(smallest: float) -> NotPositiveDefiniteError:
    """The error for a posterior precision with an eigenvalue that is not positive."""
    return NotPositiveDefiniteError(
        "The posterior precision is not positive definite.",
        expected="curvature/temperature + prior precision with positive eigenvalues",
        got=f"an eigenvalue of {smallest:.3g}",
        fix="Raise the prior precision, or use the GGN instead of an indefinite Hessian.",
    )
