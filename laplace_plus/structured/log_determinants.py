"""``log det(w H + δ)`` as a function of w and δ, for a matrix H whose eigenvalues are known.

With one weight w and one δ the determinant depends on ``u = log(w/δ)`` alone,

    log det(w H + δ I) = n log δ + Σ_i log(1 + exp(log λ_i + u)),

and ``x ↦ log(1 + exp(x + u))`` is analytic in the strip ``|Im x| < π`` whatever u is. Interpolating it between
Chebyshev points on short intervals therefore replaces the whole spectrum by a few hundred *nodes* with weights, once
and for all u. The error falls geometrically in the number of points (Trefethen, "Approximation Theory and Approximation
Practice", 2013, theorem 8.2). Evidence and derivatives then cost the same for millions of eigenvalues as for hundreds.

Diagonals that differ from entry to entry, and several weights, take one pass over the eigenvalues for the value and all
derivatives together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

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


class Spectrum:
    """The function ``(w, δ) ↦ log det(w H + δ I)`` of a symmetric H.

    Args:
        values: The eigenvalues of H, of any shape and real type; kept, not copied. If one is negative, every evaluation
            takes a pass over all of them.

    Attributes:
        size: How many eigenvalues there are.
        is_definite: Whether none is negative.

    Example:
        >>> spectrum = Spectrum(torch.tensor([0.0, 1.0, 3.0]))
        >>> round(spectrum.log_determinant(torch.tensor(2.0), torch.tensor(1.0)).exp().item(), 6)
        21.0
    """

    def __init__(self, values: Tensor):
        self.size = values.numel()
        self._values: Tensor | None = values.detach()
        self._evaluations = 0
        self._nodes: tuple[Tensor, Tensor] | None = None
        self.is_definite = bool((self._values >= 0).all())
        if self.is_definite and self.size <= CHUNK:
            self._compress()

    @classmethod
    def of_products(cls, rows: Tensor, columns: Tensor) -> Spectrum:
        """The spectrum of eigenvalues ``rows_i · columns_j``, none negative, without writing out these products."""
        result = cls.__new__(cls)
        result.size = rows.numel() * columns.numel()
        result._values, result._evaluations, result.is_definite = None, 0, True
        (left, left_weights), (right, right_weights) = _nodes_of(rows.detach()), _nodes_of(columns.detach())
        nodes = (left[:, None] + right).flatten()
        result._nodes = _condense(nodes, (left_weights[:, None] * right_weights).flatten())
        return result

    def log_determinant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """``log det(w H + δ I)``, 0-d float64.

        Args:
            weight: Positive w, 0-d.
            shift: Positive δ, 0-d.

        Returns:
            Differentiable in both, any number of times; to about 1e-13 of ``Σ |log(w λ + δ)|``.

        Raises:
            NotPositiveDefiniteError: An eigenvalue ``w λ + δ`` is not positive.
        """
        weight, shift = weight.double(), shift.double()
        self._evaluations += 1
        if self._nodes is None and self.is_definite and self._evaluations > WORTHWHILE:
            self._compress()
        if self._nodes is None:
            assert self._values is not None
            return log_determinant(self._values.flatten()[None], weight[None], shift)
        if not bool(shift.detach() > 0):
            raise not_positive_definite(shift.item())
        nodes, node_weights = self._nodes
        level = shift.log()
        ratio = weight.log() - level
        return self.size * level + node_weights @ torch.logaddexp(nodes + ratio, torch.zeros_like(ratio))

    def nodes(self) -> tuple[Tensor, Tensor] | None:
        """Quadrature nodes (logarithms of eigenvalues) and weights, ``[m]`` float64; None if an eigenvalue is negative.

        They replace all positive eigenvalues in sums of smooth functions.
        """
        if self._nodes is None and self.is_definite:
            self._compress()
        return self._nodes

    def _compress(self) -> None:
        assert self._values is not None
        self._nodes, self._values = _nodes_of(self._values), None


class JoinedSpectra:
    """The spectra of the blocks of a block-diagonal matrix, of which several may share a δ.

    Args:
        spectra: One for each block, none with negative eigenvalues.
        groups: For each block the number of its δ, from 0 to R−1; each number occurs.

    Attributes:
        nodes: Quadrature nodes of all groups, ``[m]`` float64.
    """

    def __init__(self, spectra: Sequence[Spectrum], groups: Sequence[int]):
        nodes, weights, sizes = [], [], []
        for group in range(max(groups) + 1):
            members = [spectrum for spectrum, own in zip(spectra, groups, strict=True) if own == group]
            pairs = [pair for pair in (spectrum.nodes() for spectrum in members) if pair is not None]
            assert len(pairs) == len(members)
            own_nodes, own_weights = _condense(*(torch.cat(both) for both in zip(*pairs, strict=True)))
            nodes.append(own_nodes)
            weights.append(own_weights)
            sizes.append(sum(spectrum.size for spectrum in members))
        self.nodes, self._weights = torch.cat(nodes), torch.cat(weights)
        lengths = torch.tensor([len(own) for own in nodes])
        self._group = torch.repeat_interleave(torch.arange(len(nodes)), lengths).to(self.nodes.device)
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=self.nodes.device)

    def log_determinant(self, weight: Tensor, shifts: Tensor) -> Tensor:
        """``Σ_b log det(w H_b + δ_g(b) I)``, 0-d float64.

        Args:
            weight: Positive w, 0-d float64.
            shifts: Positive δ, ``[R]`` float64.

        Returns:
            Differentiable in both, any number of times.
        """
        levels = shifts.log()
        ratios = (weight.log() - levels)[self._group]
        return self._sizes @ levels + self._weights @ torch.logaddexp(self.nodes + ratios, torch.zeros_like(ratios))


def _nodes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``[m]`` of the logarithms of the positive values, a bounded number of values at a time."""
    parts = []
    flat = values.flatten()
    for start in range(0, max(1, len(flat)), 16 * CHUNK):
        logarithms = flat[start : start + 16 * CHUNK].double()
        logarithms = logarithms[logarithms > 0].log()
        parts.append(_condense(logarithms, torch.ones_like(logarithms)))
    if len(parts) == 1:
        return parts[0]
    return _condense(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


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
    """``Σ_i log(Σ_k w_k λ_ki + δ_i)`` with closed-form derivatives, all from one pass in float64.

    Args:
        values: λ, ``[K, n]``, of any real type; not differentiated.
        weights: w, ``[K]``.
        shift: δ, 0-d or ``[n]``.

    Returns:
        0-d float64, differentiable in weights and shift, any number of times.

    Raises:
        NotPositiveDefiniteError: A term ``Σ_k w_k λ_ki + δ_i`` is not positive.
    """
    result: Tensor = _LogDeterminant.apply(values, weights.double(), shift.double())
    return result


class _LogDeterminant(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, values: Tensor, weights: Tensor, shift: Tensor) -> Tensor:
        by_weights, by_shift = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        total = shift.new_zeros(())
        smallest = shift.new_full((), torch.inf)
        weight_gradient = torch.zeros_like(weights) if by_weights else None
        shift_gradient = torch.zeros_like(shift) if by_shift else None
        for part, wide, terms in _chunks(values, weights, shift):
            smallest = torch.minimum(smallest, terms.amin())  # NaN wins
            if by_weights or by_shift:
                inverse = terms.reciprocal()
                if weight_gradient is not None:
                    weight_gradient += wide @ inverse
                if shift_gradient is not None and shift.ndim:
                    shift_gradient[part] = inverse
                elif shift_gradient is not None:
                    shift_gradient += inverse.sum()
            total += terms.log_().sum()
        if values.shape[1] and not bool(smallest > 0):
            raise not_positive_definite(smallest.item())
        ctx.save_for_backward(values, weights, shift)
        ctx.gradients = weight_gradient, shift_gradient
        return total

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        by_weights, by_shift = ctx.gradients
        if torch.is_grad_enabled():  # for second derivatives autograd has to see the formula
            values, weights, shift = ctx.saved_tensors
            inverse = (weights @ values.double() + shift).reciprocal()
            if by_weights is not None:
                by_weights = values.double() @ inverse
            if by_shift is not None:
                by_shift = inverse if shift.ndim else inverse.sum()
        return (
            None,
            None if by_weights is None else gradient * by_weights,
            None if by_shift is None else gradient * by_shift,
        )


def _chunks(values: Tensor, weights: Tensor, shift: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of the columns with their λ ``[K, m]`` in float64 and their terms ``Σ_k w_k λ_k + δ`` ``[m]``."""
    for start in range(0, values.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        wide = values[:, part].double()
        terms = wide[0] * weights[0] if len(weights) == 1 else weights @ wide
        yield part, wide, terms.add_(shift[part] if shift.ndim else shift)


def not_positive_definite(smallest: float) -> NotPositiveDefiniteError:
    """The error for a posterior precision with an eigenvalue that is not positive."""
    return NotPositiveDefiniteError(
        "The posterior precision is not positive definite.",
        expected="curvature/temperature + prior precision with positive eigenvalues",
        got=f"an eigenvalue of {smallest:.3g}",
        fix="Raise the prior precision, or use the GGN instead of an indefinite Hessian.",
    )
