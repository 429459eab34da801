r"""Quadratic forms in a Kronecker eigenbasis whose eigenvalues do not differ where the curvature adds nothing.

A posterior precision has eigenvalues ``γ_k α_j + δ``: curvature of rapidly decaying spectra γ and α, and a prior
precision δ. For most k and j the first term is less than a few roundings of the second, so that their reciprocals
``D_kj`` are the same for all those k, and an eigenbasis is as good as any other orthonormal basis of the same space.

Sort rows and columns by their largest eigenvalue, and let ``v/2 ≤ D_kj ≤ v`` on the *plain* of the last ``o − m`` rows
and ``i − r`` columns, where v is the reciprocal of the prior precision. Then of ``Lᵀ P R`` with ``P = Σ_s g_s a_sᵀ``
four parts remain:

* the first m rows, with all columns, which are written out as ever;
* the other rows of the first r columns, which are written out and only then turned, since r is less than the number of
  positions as a rule;
* the plain as though it were level, ``v Σ_st ⟨c_s, c_t⟩ Σ_j a_sj a_tj``, for which nothing is written out and the
  coordinates c refer to any basis N of the complement of the first m eigenvectors ``L₁``;
* what is too much in that, ``Σ_kj (v − D_kj) P_kj P'_kj``, over the entries of the plain where ``D_kj`` differs from v
  by more than roundings. They lie below a staircase: of column j the first ``h_j`` rows, and h falls. The rest of the
  plain is the *plateau*. The upper rows of the staircase are had from the left side, turned to these eigenvectors alone
  (``V S (o − m)`` multiplications for a row), those further down, which few columns reach, from the columns
  ``Σ_s c_s a_sj``, written out and then turned (``V (o − m)`` for an entry).

A cheap basis is that of a block reflection (Schreiber & Parlett, 1988). With ``L₁ = [A; B]``, A its first m rows,

    N = [0; I] + ([A; B] − [I; 0]) M,    M = −(I − Aᵀ)⁻¹ Bᵀ,

is orthonormal and orthogonal to L₁ (multiply out), so that ``Nᵀ g = g₂ − Mᵀ (g₁ − L₁ᵀ g)`` takes ``m (o − m)``
multiplications where ``L₁ᵀ g`` is known, and both together ``o² − (o − m)²`` in place of o². The signs of the
eigenvectors are free: those of Householder's method keep ``I − Aᵀ`` well-conditioned (Ballard et al., 2015).

*Error.* On the plateau the eigenvalues differ by a factor of at most ``1 + 2ε``, with ε 64 roundings of the type
(7.6e-6 in float32, 1.4e-14 in float64), and v is the reciprocal of the middle, so that each D_kj changes by a factor
between ``1 − ε`` and ``1 + ε``. ``P D Pᵀ`` is a sum of squares for any P: no variance changes by more than a factor
``1 ± ε``, and no covariance by more than ε times the product of the two standard deviations.

Something is subtracted, but never much: with X the sum over the plain as though it were level and Y what is too much
in it, ``D ≥ v/2`` means ``Y ≤ X/2``, and of a variance, which is ``X − Y ≥ X/2`` at the least, the roundings of X and Y
are ``(X + Y) / (X − Y) ≤ 3`` times what they are of a sum of positive terms.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from laplace_plus.structured.stacks import OuterStack, chunk_bytes, contractions, slices

ROUNDINGS = 64
"""By so many roundings of the type a variance may change."""

_STEP = 8
"""Numbers of columns are multiples of this, those of rows of twice as many: products are quicker where rows begin at
multiples of a cache line."""

_DEPTH = 2
"""By this factor at the most the level of the plain is above its entries: so little is lost by subtracting."""

_PANEL = 32
"""Rows of the staircase that are worked on together, with as many columns as the first of them has."""

_GROUP = 16
"""Columns of the staircase that are worked on together, with as many rows as the first of them has."""

_STEEP = 96
"""Columns whose heights differ by so many rows are not worked on together."""

_LEAST = 2**20
"""Operations for one example below which there is nothing to save."""

_WORTH = 0.9
"""The share of the operations that has to be left for a plateau to be used."""

_CACHES = 2
"""How many times a core's cache the output gradients may take of the examples that are worked on together."""


@dataclass(frozen=True)
class Staircase:
    """The entries of the plain that differ from its level, as blocks.

    Attributes:
        panels: ``(first row, last row + 1, last column + 1)`` of blocks that begin at the first column of the plain:
            those had from turned rows of the left side.
        groups: ``(first column, last column + 1, last row + 1)`` of blocks that begin below the panels.
    """

    panels: tuple[tuple[int, int, int], ...] = ()
    groups: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Plateau:
    """A plateau of the eigenvalues, with what quadratic forms read of the eigenbasis.

    Attributes:
        rows: Order of the rows ``[o]``: those that differ first.
        columns: Order of the columns ``[i]``.
        n_rows: m, how many rows are apart from the plain.
        n_columns: r, how many columns are.
        left: The eigenvectors L ``[o, o]``.
        right: The eigenvectors R ``[i, i]``.
        values: Eigenvalues ``[o, i]``.
        stairs: What is to be subtracted.
    """

    rows: Tensor
    columns: Tensor
    n_rows: int
    n_columns: int
    left: Tensor
    right: Tensor
    values: Tensor
    stairs: Staircase = Staircase()
    _kept: dict[tuple[str, torch.dtype], _Scales] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def _scales(self, mode: str, dtype: torch.dtype) -> _Scales:
        key = mode, dtype
        if key not in self._kept:
            m, r, begin = self.n_rows, self.n_columns, self._n_turned
            inverse = self.values[self.rows][:, self.columns].double().reciprocal()
            # The plateau reaches to the last row and column; v belongs to the middle of its eigenvalues.
            highest = float(inverse[m:, r:].max())
            level = 2 * highest / (1 + max(1.0, highest / float(self._lowest(inverse))))
            excess = (level - inverse).clamp_(min=0)  # some on the staircase, too, may be as high as the plateau
            if mode == "full":
                inverse, excess = inverse.sqrt(), excess.sqrt()
            own = inverse[:m].to(dtype)
            panels = [excess[start:stop, r:last].to(dtype) for start, stop, last in self.stairs.panels]
            blocks = []
            for start in range(0, r, _GROUP):
                stop = min(start + _GROUP, r)
                top = inverse[m:, start:stop].mT.to(dtype).contiguous()
                blocks.append(_Block(slice(start, stop), slice(None), top, 1))
            for start, stop, last in self.stairs.groups:
                below = excess[begin:last, start:stop].mT.to(dtype).contiguous()
                blocks.append(_Block(slice(start, stop), slice(begin - m, last - m), below, -1))
            self._kept[key] = _Scales(own, level, panels, blocks)
        return self._kept[key]

    @property
    def _n_turned(self) -> int:
        """The first row that no panel has."""
        return self.stairs.panels[-1][1] if self.stairs.panels else self.n_rows

    def _lowest(self, inverse: Tensor) -> Tensor:
        """The smallest D on the plateau, from D in order."""
        flat = inverse.clone()
        flat[: self.n_rows] = flat[:, : self.n_columns] = math.inf
        for start, stop, last in self.stairs.panels:
            flat[start:stop, :last] = math.inf
        for start, stop, last in self.stairs.groups:
            flat[:last, start:stop] = math.inf
        return flat.amin()

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
        m, r, begin = self.n_rows, self.n_columns, self._n_turned
        dtype, (v, b, s, o) = g.dtype, g.shape
        scales, inner = self._scales(mode, dtype), self.inner.to(dtype)
        # With the positions outside, what is written out and what weighs positions are one product for all directions.
        g = g.permute(1, 2, 0, 3).reshape(b * s * v, o)
        leading = self.leading.to(dtype)
        first = g @ leading
        rest = complement_rows(leading, self.mix.to(dtype), g, first)
        sides, flat = rest.view(b, s, -1), a[..., r:]
        total = _meet((flat @ flat.mT).mul_(scales.level) @ sides, sides, v, mode)
        limit = chunk_bytes(g.device, of_caches=_CACHES) // g.element_size()
        for blocks in _together(scales.blocks, limit // (b * v * (o - m))):
            start = blocks[0].columns.start
            some = a[..., start : blocks[-1].columns.stop].mT @ sides  # [b, c, V·(o − m)]
            for block in blocks:
                own = some[:, block.columns.start - start : block.columns.stop - start]
                turned = own.reshape(-1, o - m) @ inner[:, block.rows]
                total.add_(_weighed(turned.view(b, len(block.scale), v, -1), block.scale, mode), alpha=block.sign)
        if m:
            _add_streamed(total, first.view(b, s, v, -1), a, scales.own, mode)
        if self.stairs.panels:
            turned = (rest @ inner[:, : begin - m]).view(b, s, v, -1)
            for (start, stop, last), scale in zip(self.stairs.panels, scales.panels, strict=True):
                _add_streamed(total, turned[..., start - m : stop - m], a[..., r:last], scale, mode, sign=-1)
        return total


@dataclass(frozen=True)
class _Block:
    """Some columns with some of the rows after the first m, which have these numbers among themselves.

    Attributes:
        columns: Which.
        rows: Which.
        scale: What weighs them, ``[columns, rows]``.
        sign: Whether that is added or subtracted.
    """

    columns: slice
    rows: slice
    scale: Tensor
    sign: int


@dataclass(frozen=True)
class _Scales:
    """D, or what is to be subtracted from v, of the parts; square roots in mode "full".

    Attributes:
        own: D of the first rows, ``[m, i]``.
        level: v itself.
        panels: What is subtracted, ``[rows, columns]`` for each panel.
        blocks: The first columns, and the groups of the staircase.
    """

    own: Tensor
    level: float
    panels: list[Tensor]
    blocks: list[_Block]


def _together(blocks: list[_Block], n_columns: int) -> Iterator[list[_Block]]:
    """Neighbouring blocks with at most so many columns in all, or one of them."""
    some: list[_Block] = []
    for block in blocks:
        if some and block.columns.stop - some[0].columns.start > n_columns:
            yield some
            some = []
        some.append(block)
    if some:
        yield some


def _weighed(values: Tensor, scale: Tensor, mode: str) -> Tensor:
    """The form of entries ``[b, c, V, n]``, which are overwritten, for weights ``[c, n]``."""
    if mode == "diagonal":
        return values.square_().mul_(scale[:, None]).sum((1, 3))
    b, c, v, n = values.shape
    scaled = values.new_empty(b, v, c, n)
    torch.mul(values, scale[:, None], out=scaled.transpose(1, 2))
    return scaled.flatten(2) @ scaled.flatten(2).mT


def _add_streamed(total: Tensor, left: Tensor, a: Tensor, scale: Tensor, mode: str, sign: int = 1) -> None:
    """Add the form for a few rows ``left [b, S, V, m]``, written out with the columns ``a [b, S, c]``."""
    limit = chunk_bytes(left.device)
    by_direction = left.permute(2, 0, 1, 3)[:, :, :, None]
    for part in slices(len(a), left.shape[2] * scale.numel() * a.element_size(), limit):
        sides = by_direction[:, part], a[part, :, None]
        total[part].add_(contractions.streamed_quadratic(*sides, scale[None], mode, limit), alpha=sign)


def _meet(left: Tensor, right: Tensor, directions: int, mode: str) -> Tensor:
    """Inner products of ``[b, S, V·n]`` with each other, ``[b, V, V]`` or ``[b, V]``."""
    left, right = left.unflatten(2, (directions, -1)), right.unflatten(2, (directions, -1))
    if mode == "diagonal":
        return torch.linalg.vecdot(left, right).sum(1)
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1).mT).unflatten(0, left.shape[:2]).sum(1)


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
    lowest, eps = ordered.min(), torch.finfo(stack.dtype).eps
    flat, deep = (_heights(ordered, lowest * ratio) for ratio in (1 + 2 * ROUNDINGS * eps, _DEPTH))
    reaching = [bisect.bisect_left(flat, -row, key=lambda height: -height) for row in range(o)]
    best, choice = _WORTH * before, None
    for r in range(0, i, _STEP):
        for m in {_in_steps(heights[r]) for heights in (flat, deep)}:
            if m < o and (cost := _cost(v, s, o, i, m, r, mode)) < best:
                more, stairs = _stairs(v, s, m, r, flat, reaching, mode)
                if cost + more < best:
                    best, choice = cost + more, (m, r, stairs)
    if choice is None:
        return None
    m, r, stairs = choice
    return Plateau(rows, columns, m, r, stack.left_turn[0], stack.right_turn[0], values, stairs)


def _heights(ordered: Tensor, limit: Tensor) -> list[int]:
    """For each column the row after which no value of it and of those after it is above a limit."""
    # Of each row the largest value from some column on.
    above = ordered.flip(1).cummax(1).values.flip(1) > limit
    return (above * torch.arange(1, len(ordered) + 1, device=ordered.device)[:, None]).amax(0).tolist()


def _in_steps(n_rows: int) -> int:
    return -(-n_rows // (2 * _STEP)) * 2 * _STEP


def _cost(v: int, s: int, o: int, i: int, m: int, r: int, mode: str) -> float:
    """Operations for one example, without those for the staircase."""
    turning = v * s * (o * o - (o - m) ** 2) + s * i * i
    own = contractions.quadratic_costs(v, s, m, i, mode)["stream"] if m else 0
    top = contractions.quadratic_costs(v, s, o - m, r, mode)["stream"] + v * r * (o - m) ** 2 if r else 0
    return turning + own + top + contractions.quadratic_costs(v, s, o - m, i - r, mode)["separable"]


def _stairs(
    v: int, s: int, m: int, r: int, heights: list[int], reaching: list[int], mode: str
) -> tuple[float, Staircase]:
    """The staircase on a plain, cut where that is least work, and the operations for one example.

    Args:
        v: Directions.
        s: Positions.
        m: Where the plain begins, among rows.
        r: The same among columns.
        heights: Of all columns, falling.
        reaching: For each row, how many columns have it.
        mode: "full" or "diagonal".
    """
    panels: list[tuple[int, int, int]] = []
    spent, best, choice = 0, math.inf, Staircase()
    entry, closing = (contractions.quadratic_costs(v, length, 1, 1, mode)["stream"] for length in (s, 0))
    o, i = len(reaching), len(heights)
    begin, end = m, min(o, _in_steps(heights[r]))
    while True:
        groups, cost, start = [], spent, r
        columns = reaching[begin] if begin < end else r
        while start < columns:
            steep = reaching[heights[start] - _STEEP] if heights[start] >= _STEEP else i
            # A few columns that are left over before a steep place go with the others.
            stop = min(columns, steep if steep <= start + _GROUP + _STEP else start + _GROUP)
            last = min(o, _in_steps(heights[start]))
            groups.append((start, stop, last))
            cost += (stop - start) * (v * (o - m) * (s + last - begin) + closing * (last - begin))
            start = stop
        if cost < best:
            best, choice = cost, Staircase(tuple(panels), tuple(groups))
        if not groups:
            return best, choice
        stop, columns = min(begin + _PANEL, end), min(i, -(-columns // _STEP) * _STEP)
        panels.append((begin, stop, columns))
        spent += (stop - begin) * (v * s * (o - m) + entry * (columns - r))
        begin = stop
