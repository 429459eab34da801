"""``log det(w H + δ)`` as a function of w and δ, for a matrix H whose eigenvalues are known.

With one weight w and one δ the determinant depends on ``u = log(w/δ)`` alone,

    log det(w H + δ I) = n log δ + Σ_i log(1 + exp(log λ_i + u)),

and ``x ↦ log(1 + exp(x + u))`` is analytic in the strip ``|Im x| < π`` whatever u is. Interpolating it between
Chebyshev points on short intervals therefore replaces the whole spectrum by a few hundred *nodes* with weights, once
and for all u. The error falls geometrically in the number of points (Trefethen, "Approximation Theory and Approximation
Practice", 2013, theorem 8.2). A Kronecker product has the products of two short spectra as its eigenvalues, so that its
nodes cost next to nothing; those of other matrices take as long as about 25 evaluations. Evidence and derivatives then
cost the same for millions of eigenvalues as for hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

CHUNK = 2**16
"""Entries that a pass takes at a time: in float64 they fill half a core's own cache (EPYC, Zen 4)."""

_LINEAR = 40.0
"""From here on ``log(1 + exp x)`` equals x in float64."""


class Spectrum:
    """The function ``(w, δ) ↦ Σ_b log det(w/δ_b H_b + I)`` for matrices without negative eigenvalues.

    Args:
        nodes: Logarithms of eigenvalues, or what stands for them, ``[m]``.
        weights: How many eigenvalues each of them stands for, ``[m]``.
        groups: Which δ each belongs to, ``[m]``, where there are several.

    Example:
        >>> spectrum = Spectrum.of(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 3.0]]))
        >>> round(spectrum.log_ratio(torch.tensor(2.0), torch.tensor(1.0)).exp().item(), 5)
        21.0
    """

    def __init__(self, nodes: Tensor, weights: Tensor, groups: Tensor | None = None):
        self.nodes, self.weights = nodes, weights
        self.groups = None if groups is None else groups.to(nodes.device)

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> Spectrum:
        """Of G groups of eigenvalues ``left_i right_j``, ``[G, m]`` and ``[G or 1, n]``."""
        found = []
        for rows, columns in zip(left, right.expand(len(left), -1), strict=True):
            (nodes, weights), (more, more_weights) = _nodes_of(rows), _nodes_of(columns)
            found.append(_condense((nodes[:, None] + more).flatten(), (weights[:, None] * more_weights).flatten()))
        return cls(*_concatenated(found))

    @classmethod
    def joined(cls, spectra: Sequence[Spectrum], groups: Sequence[int]) -> Spectrum:
        """Of a block-diagonal matrix, given each block's and the number of its δ: one evaluation costs as much."""
        members: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for spectrum, group in zip(spectra, groups, strict=True):
            members.setdefault(group, []).append((spectrum.nodes, spectrum.weights))
        found = [_condense(*_concatenated(pairs)) for pairs in members.values()]
        counts = torch.tensor([len(nodes) for nodes, _ in found])
        return cls(*_concatenated(found), torch.tensor(list(members)).repeat_interleave(counts))

    def log_ratio(self, weight: Tensor, shift: Tensor) -> Tensor:
        """The function, 0-d float64, at ``w > 0``, 0-d, and ``δ > 0``, 0-d or ``[R]``; to about 1e-13 of its terms.

        Differentiable in both, any number of times.
        """
        levels = shift.double().log()
        if levels.ndim and self.groups is not None:
            levels = levels.index_select(0, self.groups)
        return self.weights @ softplus(self.nodes + weight.double().log() - levels, threshold=_LINEAR)


def _nodes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``[m]`` of the logarithms of the positive values, a bounded number of values at a time."""
    parts = []
    for part in values.detach().split(16 * CHUNK):
        logarithms = part[part > 0].double().log()
        parts.append(_condense(logarithms, torch.ones_like(logarithms)))
    return parts[0] if len(parts) == 1 else _condense(*_concatenated(parts))


def _concatenated(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The nodes and the weights of several pairs of them."""
    return torch.cat([nodes for nodes, _ in pairs]), torch.cat([weights for _, weights in pairs])


def _condense(nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Chebyshev points and weights that integrate smooth functions as the given nodes ``[n]`` and weights do."""
    if not len(nodes):
        return nodes, weights
    # All spectra share one grid of intervals, so that nodes coincide when they are condensed again.
    interval = (nodes / (2 * HALF_WIDTH)).floor()
    local = (nodes / HALF_WIDTH - 2 * interval - 1).clamp(-1, 1)
    first = interval.min()
    occupied, interval = (interval - first).long().unique(return_inverse=True)
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
        raise NotPositiveDefiniteError(
            "The posterior precision is not positive definite.",
            expected="curvature/temperature + prior precision with positive eigenvalues",
            got=f"an eigenvalue of {smallest.item():.3g}",
            fix="Raise the prior precision, or use the GGN instead of an indefinite Hessian.",
        )
