r"""Quadratic forms in a Kronecker eigenbasis whose eigenvalues do not differ where the curvature adds nothing.

A posterior precision has eigenvalues ``γ_k α_j + δ``: curvature of rapidly decaying spectra γ and α, and a prior
precision δ. For most k and j the first term is less than a few roundings of the second, so that their reciprocals
``D_kj`` are the same for all those k, and an eigenbasis is as good as any other orthonormal basis of the same space.

Sort rows and columns by their largest eigenvalue, and let ``D_kj ≈ v_j`` on the *plateau* of the last ``o − m`` rows
and ``i − r`` columns. Then of ``Lᵀ P R`` with ``P = Σ_s g_s a_sᵀ`` three parts remain:

* the first m rows, with all columns, which are written out as ever;
* the other rows of the first r columns, which are written out and only then turned, since r is less than the number of
  positions as a rule;
* the plateau, ``Σ_st ⟨c_s, c_t⟩ Σ_j v_j a_sj a_tj``, for which nothing is written out and the coordinates c refer to
  any basis N of the complement of the first m eigenvectors ``L₁``.

A cheap basis is that of a block reflection (Schreiber & Parlett, 1988). With ``L₁ = [A; B]``, A its first m rows,

    N = [0; I] + ([A; B] − [I; 0]) M,    M = −(I − Aᵀ)⁻¹ Bᵀ,

is orthonormal and orthogonal to L₁ (multiply out), so that ``Nᵀ g = g₂ − Mᵀ (g₁ − L₁ᵀ g)`` takes ``m (o − m)``
multiplications where ``L₁ᵀ g`` is known, and both together ``o² − (o − m)²`` in place of o². The signs of the
eigenvectors are free: those of Householder's method keep ``I − Aᵀ`` well-conditioned (Ballard et al., 2015).

*Error.* On the plateau the eigenvalues of a column differ by a factor of at most ``1 + 2ε``, with ε 64 roundings of the
type (7.6e-6 in float32, 1.4e-14 in float64), and v_j is the reciprocal of the middle, so that each D_kj changes by a
factor between ``1 − ε`` and ``1 + ε``. ``P D Pᵀ`` is a sum of squares for any P: no variance changes by more than a
factor ``1 ± ε``, and no covariance by more than ε times the product of the two standard deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from laplace_plus.linalg.stacks import OuterStack, chunk_bytes, contractions, slices

ROUNDINGS = 64
"""By so many roundings of the type a variance may change."""

_STEP = 8
"""Numbers of columns are multiples of this, those of rows of twice as many: products are quicker where rows begin at
multiples of a cache line."""

_LEAST = 2**20
"""Operations for one example below which there is nothing to save."""

_WORTH = 0.9
"""The share of the operations that has to be left for a plateau to be used."""

_CACHES = 2
"""How many times a core's cache the output gradients may take of the examples that are worked on together."""


@dataclass(frozen=True)
class Plateau:
    """A plateau of the eigenvalues, with what quadratic forms read of the eigenbasis.

    Attributes:
        rows: Order of the rows ``[o]``: those that differ first.
        columns: Order of the columns ``[i]``.
        n_rows: m, how many rows differ.
        n_columns: r, how many columns are apart from the plateau.
        left: The eigenvectors L ``[o, o]``.
        right: The eigenvectors R ``[i, i]``.
        values: Eigenvalues ``[o, i]``.
    """

    rows: Tensor
    columns: Tensor
    n_rows: int
    n_columns: int
    left: Tensor
    right: Tensor
    values: Tensor
    _kept: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def leading(self) -> Tensor:
        """L₁ ``[o, m]``, with signs for :attr:`mix`."""
        return self._reflection[0]

    @cached_property
    def mix(self) -> Tensor:
        """M ``[m, o − m]``."""
        return self._reflection[1]

    @cached_property
    def inner(self) -> Tensor:
        """``Nᵀ L₂``, which turns coordinates in N to those of the other eigenvectors L₂, ``[o − m, o − m]``."""
        return complement_rows(self.leading, self.mix, self.left[:, self.rows[self.n_rows :]].mT).mT

    @cached_property
    def _reflection(self) -> tuple[Tensor, Tensor]:
        return reflection(self.left[:, self.rows[: self.n_rows]])

    def _scales(self, mode: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the first rows ``[m, i]``, of the first columns ``[r, o − m]`` and of the plateau ``[i − r]``.

        The former two are square roots in mode "full".
        """
        key = mode, dtype
        if key not in self._kept:
            m, r = self.n_rows, self.n_columns
            values = self.values[self.rows][:, self.columns]
            flat = values[m:, r:]
            level = 2 / (flat.amin(0) + flat.amax(0))
            power = torch.rsqrt if mode == "full" else torch.reciprocal
            self._kept[key] = power(values[:m]).to(dtype), power(values[m:, :r].mT).to(dtype), level.to(dtype)
        return self._kept[key]

    def quadratic(self, stack: OuterStack, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for a stack that was not turned; ``mode`` is "full" or "diagonal"."""
        limit = chunk_bytes(stack.device, of_caches=_CACHES)
        each = stack.n_directions * stack.n_positions * stack.shape[1] * torch.finfo(stack.dtype).bits // 8
        turn = self.right.to(stack.dtype)
        parts = []
        for examples in stack.side_chunks():
            right = stack.right(examples)[:, :, 0]
            right = (right.flatten(0, 1) @ turn).index_select(1, self.columns).view_as(right)
            for part in slices(len(right), each, limit):
                left = stack.left(slice(examples.start + part.start, examples.start + part.stop))
                parts.append(self._of(left[:, :, :, 0], right[part], mode))
        return torch.cat(parts)

    def _of(self, g: Tensor, a: Tensor, mode: str) -> Tensor:
        """For ``g [V, b, S, o]`` and turned ``a [b, S, i]``."""
        m, r = self.n_rows, self.n_columns
        dtype, (v, b, s, _) = g.dtype, g.shape
        own, top, level = self._scales(mode, dtype)
        g = g.reshape(v * b * s, -1)
        leading = self.leading.to(dtype)
        first = g @ leading
        rest = complement_rows(leading, self.mix.to(dtype), g, first).view(v, b, s, -1)
        flat = a[..., r:]
        total = _meet(((flat * level) @ flat.mT) @ rest, rest, mode)
        if r:
            turned = ((a[..., :r].mT @ rest).flatten(0, 2) @ self.inner.to(dtype)).view(v, b, r, -1)
            if mode == "diagonal":
                total += (turned.square_().flatten(2) @ top.flatten()).mT
            else:
                turned *= top
                total += _meet(turned, turned, mode)
        if m:
            first, right, limit = first.view(v, b, s, 1, m), a[:, :, None], chunk_bytes(g.device)
            for part in slices(b, v * m * a.shape[-1] * a.element_size(), limit):
                sides = first[:, part], right[part]
                total[part] += contractions.streamed_quadratic(*sides, own[None], mode, limit)
        return total


def _meet(left: Tensor, right: Tensor, mode: str) -> Tensor:
    """Inner products of ``[V, b, S, n]`` with each other, ``[b, V, V]`` or ``[b, V]``."""
    if mode == "diagonal":
        return torch.linalg.vecdot(left.flatten(2), right.flatten(2)).mT
    return left.flatten(2).transpose(0, 1) @ right.flatten(2).permute(1, 2, 0)


def reflection(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors ``[o, m]``, orthonormal, with other signs, and the M ``[m, o − m]`` that gives their complement."""
    wide, m = vectors.double(), vectors.shape[1]
    if not m:
        return vectors, vectors.mT
    triangle, scales = torch.geqrf(wide)
    signs = triangle.diagonal().sign()
    # Where only zeros are left below the diagonal, LAPACK reflects nothing, and the sign is the unfavourable one.
    wide = wide * torch.where(scales == 0, -signs, signs)
    upper, lower = wide[:m], wide[m:]
    identity = torch.eye(m, dtype=wide.dtype, device=wide.device)
    mix = torch.linalg.solve(upper.mT - identity, lower.mT)
    return wide.to(vectors.dtype), mix.to(vectors.dtype)


def complement_rows(leading: Tensor, mix: Tensor, rows: Tensor, first: Tensor | None = None) -> Tensor:
    """``x N`` for rows ``[n, o]``, where ``first = x L₁`` may be known already, ``[n, o − m]``."""
    m = mix.shape[0]
    if not m:
        return rows
    first = rows @ leading if first is None else first
    return torch.addmm(rows[:, m:], first - rows[:, :m], mix)


def typical_length(positions: int) -> int:
    """A length for sequences of similar lengths, which share plateaus: half a power of two, rounded."""
    return round(2 ** (round(2 * math.log2(positions)) / 2))


def find(stack: OuterStack, values: Tensor, mode: str) -> Plateau | None:
    """The plateau that saves the most operations for such a stack, or None where none is worth it.

    Args:
        stack: Turned by the eigenvectors, ``G = 1``.
        values: Positive eigenvalues ``[1, o, i]``, which need not be products.
        mode: "full" or "diagonal".
    """
    v, s, (_, o, i) = stack.n_directions, typical_length(stack.n_positions), stack.shape
    assert stack.left_turn is not None and stack.right_turn is not None
    turning = contractions.turning_costs(v, s, o, i)
    costs = contractions.quadratic_costs(v, s, o, i, mode)
    before = min(turning[form] + costs[form] for form in ("stream", "gram"))
    if before < _LEAST:
        return None
    values = values[0]
    rows, columns = values.amax(1).argsort(descending=True), values.amax(0).argsort(descending=True)
    ordered = values[rows][:, columns]
    limit = ordered.min() * (1 + 2 * ROUNDINGS * torch.finfo(stack.dtype).eps)
    # Of each row the largest value from some column on; what follows the last row above the limit is flat.
    above = ordered.flip(1).cummax(1).values.flip(1) > limit
    differing = (above * torch.arange(1, o + 1, device=values.device)[:, None]).amax(0).tolist()
    best, choice = _WORTH * before, None
    for r in range(0, i, _STEP):
        m = -(-differing[r] // (2 * _STEP)) * 2 * _STEP
        if m < o and (cost := _cost(v, s, o, i, m, r, mode)) < best:
            best, choice = cost, (m, r)
    if choice is None:
        return None
    return Plateau(rows, columns, *choice, stack.left_turn[0], stack.right_turn[0], values)


def _cost(v: int, s: int, o: int, i: int, m: int, r: int, mode: str) -> float:
    """Operations for one example."""
    turning = v * s * (o * o - (o - m) ** 2) + s * i * i
    own = contractions.quadratic_costs(v, s, m, i, mode)["stream"] if m else 0
    top = contractions.quadratic_costs(v, s, o - m, r, mode)["stream"] + v * r * (o - m) ** 2 if r else 0
    return turning + own + top + contractions.quadratic_costs(v, s, o - m, i - r, mode)["separable"]
