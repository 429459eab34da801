r"""Weighted inner products and squares of sums of outer products, in whichever form takes the fewest operations.

For one example, ``P_v = Σ_s g_vs a_sᵀ`` with ``g [V, S, o]`` and ``a [S, i]``; a weight ``D [o, i]`` on its entries.
Three forms give ``Q_vw = Σ_oi D_oi P_v,oi P_w,oi``:

* *stream*: write the P out, a few rows of a few examples at a time, and multiply them; V S o i multiplications for the
  matrices and V² o i for their products (V o i for the squares alone);
* *gram*: ``K_st,o = Σ_i a_si a_ti D_oi`` for the S (S + 1)/2 pairs of positions, one product with D for all examples,
  then ``Q_vw = Σ_sto g_vs,o K_st,o g_wt,o``; S² o i/2 and V S² o multiplications;
* *separable*, where ``D = u vᵀ``: ``K_st`` does not depend on o, and S² i + V S² o multiplications remain.

The sum of the squares, ``Σ_v P_v²``, has the first two forms as well: in the second one it is
``Σ_st (Σ_v g_vs,o g_vt,o) (a_si a_ti)``, one product over all examples and pairs.

Groups come as further axes: ``g [V, b, S, G, o]``, ``a [b, S, G, i]`` and ``D [G, o, i]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Form = Literal["stream", "gram", "separable"]

# Costs of operations in multiply-adds of a large matrix product, on one core of an EPYC (Zen 4) in float32: entry by
# entry within the caches; products of V vectors with each other, V small.
_ENTRY, _NARROW, _WIDE = 10, 3, 32


def turning_costs(directions: int, positions: int, rows: int, columns: int) -> dict[Form, int]:
    """Operations of ``Lᵀ P R`` for one example and group: on both sides' rows, or on what is smaller (stream)."""
    v, s, o, i = directions, positions, rows, columns
    on_sides = v * s * o * o + s * i * i
    return {
        "stream": min(v * s * o * o, v * i * o * o) + min(s * i * i, v * o * i * i),
        "gram": on_sides,
        "separable": on_sides,
    }


def quadratic_costs(directions: int, positions: int, rows: int, columns: int, mode: str) -> dict[Form, int]:
    """Operations for one example and group, by form."""
    v, s, o, i = directions, positions, rows, columns
    pairs = s * (s + 1) // 2
    narrow = v * (_NARROW if v < _WIDE else 1)
    streamed = o * i * v * (s + (2 * _ENTRY if mode == "diagonal" else narrow + _ENTRY))
    closing = v * s * o * (_ENTRY if mode == "diagonal" else narrow)
    return {
        "stream": streamed,
        "gram": pairs * i * (o + _ENTRY) + _ENTRY * s * s * o * (v + 1) + closing,
        "separable": s * s * i + v * s * s * o + closing + _ENTRY * s * (i + v * o),
    }


def joint_costs(examples: int, directions: int, positions: int, rows: int, columns: int) -> dict[Form, int]:
    """The same for products across examples, for all pairs of examples together."""
    n, v, s, o, i = examples, directions, positions, rows, columns
    together = n * (n + 1) // 2
    narrow = v * (_NARROW if v < _WIDE else 1)
    kernel = _ENTRY * s * s * o * v + narrow * v * s * o
    return {
        "stream": n * v * o * i * (s + _ENTRY) + n * n * v * v * o * i,
        "gram": together * (s * s * i * (o + _ENTRY) + kernel),
    }


def square_costs(directions: int, positions: int, rows: int, columns: int) -> dict[Form, int]:
    """Operations of the summed squares for one example and group, by form."""
    v, s, o, i = directions, positions, rows, columns
    pairs = s * (s + 1) // 2
    return {
        "stream": o * i * v * (s + 2 * _ENTRY),
        "gram": pairs * (o * i + _ENTRY * (3 * v * o + 2 * i)),
    }


def cheapest(costs: dict[Form, int]) -> Form:
    """The form with the fewest operations."""
    return min(costs, key=lambda form: costs[form])


def separated(weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """``u [G, o]`` and ``v [G, i]`` with ``weights = u vᵀ`` up to rounding, or None."""
    first = weights[:, :1, :1]
    if not bool((first != 0).all()):
        return None
    left, right = weights[:, :, 0], weights[:, 0] / first[:, 0]
    tolerance = 4 * torch.finfo(weights.dtype).eps
    product = left[:, :, None] * right[:, None]
    return (left, right) if bool((product - weights).abs().le(tolerance * weights.abs()).all()) else None


def through(rows: Tensor, weights: Tensor) -> Tensor:
    """``Σ_i x_i D_oi`` for ``x [..., G or 1, i]``, ``[..., G, o]``."""
    groups = weights.shape[0]
    if groups == 1:
        return rows @ weights[0].T
    lead = rows.shape[:-2]
    flat = rows.expand(*lead, groups, -1).flatten(0, -3).transpose(0, 1)  # [G, n, i]
    return torch.bmm(flat, weights.mT).transpose(0, 1).unflatten(0, lead)


def times(rows: Tensor, matrices: Tensor) -> Tensor:
    """``x_g U_g`` for rows ``[..., G, n]`` and ``U [G, n, m]``, as one matrix product for each group."""
    lead, groups = rows.shape[:-2], rows.shape[-2]
    if groups == 1 and len(matrices) == 1:
        return (rows.reshape(lead.numel(), rows.shape[-1]) @ matrices[0]).view(*lead, 1, matrices.shape[-1])
    rows = rows.expand(*lead, len(matrices), -1)
    by_group = rows.movedim(-2, 0).reshape(len(matrices), lead.numel(), rows.shape[-1])
    return torch.bmm(by_group, matrices).transpose(0, 1).unflatten(0, lead)


@dataclass(frozen=True)
class Turns:
    """What multiplies written-out matrices, ``Lᵀ P R``, where that is less work than with the rows of both sides.

    Attributes:
        left: L ``[G, o, o]``, or None for the identity.
        right: R ``[G or 1, i, i]``, or None for the identity.
    """

    left: Tensor | None = None
    right: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Turned ``[b, G, V, o, i]``."""
        if self.right is not None:
            values = _by_group(values.flatten(2, 3), self.right).view_as(values)
        if self.left is not None:
            b, groups, v, rows, columns = values.shape
            last = values.transpose(3, 4).reshape(b, groups, v * columns, rows)
            values = _by_group(last, self.left).view(b, groups, v, columns, rows).transpose(3, 4)
        return values


def _by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    """``x U_g`` for ``x [b, G, n, i]``."""
    if rows.shape[1] == 1:
        return (rows.flatten(0, 2) @ matrices[0]).view(*rows.shape[:3], -1)
    return rows @ matrices


NO_TURNS = Turns()


def written(left: Tensor, right: Tensor, limit: int, turns: Turns = NO_TURNS) -> Iterator[tuple[slice, Tensor]]:
    """The matrices, some rows at a time, ``[b, G, V, r, i]``.

    Without gradients all are written to one piece of memory: use each before asking for the next.
    """
    v, b, s, groups, rows = left.shape
    columns = right.shape[-1]
    step = max(1, min(rows, limit // max(1, v * b * groups * columns * left.element_size())))
    if turns.left is not None:  # mixes the rows
        step = rows
    a = right.expand(-1, -1, groups, -1).transpose(1, 2).reshape(b * groups, s, columns)
    recording = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    memory = None if recording else left.new_empty(b * groups * v * step * columns)
    for start in range(0, rows, step):
        part = left[..., start : start + step]
        r = part.shape[-1]
        if left.stride(-1) == 1:  # copy in the order in which the entries lie
            g = part.permute(1, 3, 2, 0, 4).reshape(b * groups, s, v * r).mT
        else:
            g = part.permute(1, 3, 0, 4, 2).reshape(b * groups, v * r, s)
        if memory is None:
            values = g @ a
        else:
            values = memory[: b * groups * v * r * columns].view(b * groups, v * r, columns)
            torch.bmm(g, a, out=values)
        yield slice(start, start + r), turns(values.view(b, groups, v, r, columns))


def streamed_quadratic(
    left: Tensor, right: Tensor, scale: Tensor, mode: str, limit: int, turns: Turns = NO_TURNS
) -> Tensor:
    """``[b, V, V]`` for square roots of weights, or ``[b, V]`` in mode "diagonal" for the weights themselves."""
    v, b, _, groups, _ = left.shape
    diagonal = mode == "diagonal"
    result = left.new_zeros(b * groups, v, 1 if diagonal else v)
    for rows, values in written(left, right, limit, turns):
        fresh = values.requires_grad
        if diagonal:
            squares = values.square() if fresh else values.square_()
            own = scale[:, rows].flatten(1)  # [G, r·i]
            if groups == 1:
                part = squares.reshape(b, v, -1) @ own[0, :, None]
            else:
                part = (squares.flatten(3) @ own[None, :, :, None]).flatten(0, 1)
        else:
            scaled = values * scale[:, None, rows] if fresh else values.mul_(scale[:, None, rows])
            flat = scaled.reshape(b * groups, v, -1)
            part = flat @ flat.mT
        result = result + part if fresh else result.add_(part)
    total = result.unflatten(0, (b, groups)).sum(1)
    return total[..., 0] if diagonal else total


def gram_quadratic(left: Tensor, right: Tensor, weights: Tensor, mode: str) -> Tensor:
    """``[b, V, V]``, or ``[b, V]`` in mode "diagonal"."""
    positions = left.shape[2]
    s, t = torch.tril_indices(positions, positions, device=left.device)
    kernel = through(right[:, s] * right[:, t], weights)  # [b, T, G, o]
    place = torch.empty(positions, positions, dtype=torch.long, device=left.device)
    place[s, t] = place[t, s] = torch.arange(len(s), device=left.device)
    rows = left.flatten(3).transpose(0, 1)  # [b, V, S, G·o]
    met = _meet(kernel.flatten(2)[:, place], rows)
    return _close(rows, met, mode)


def cross_gram(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor, weights: Tensor) -> Tensor:
    """Products of some examples with one other, ``[b, V, V']`` for ``other_left [V', S, G, o]``."""
    kernel = through(right[:, :, None] * other_right, weights).flatten(3)  # [b, S, S', G·o]
    met = _meet(kernel, other_left.flatten(2)[None])  # [b, V', S, G·o]
    return left.flatten(3).transpose(0, 1).flatten(2) @ met.flatten(2).mT


def separable_quadratic(left: Tensor, right: Tensor, weights: tuple[Tensor, Tensor], mode: str) -> Tensor:
    """``[b, V, V]``, or ``[b, V]`` in mode "diagonal", for weights ``u vᵀ``."""
    v, b, s, groups, _ = left.shape
    rows, columns = weights
    a = right.expand(-1, -1, groups, -1).transpose(1, 2)  # [b, G, S, i]
    inner = ((a * columns[:, None]) @ a.mT).flatten(0, 1)  # [bG, S, S]
    g = left.permute(1, 3, 2, 0, 4).reshape(b * groups, s, -1)  # [bG, S, V·o]
    met = torch.bmm(inner, g).view(b, groups, s, v, -1) * rows[:, None, None]
    g = g.view(b, groups, s, v, -1)
    if mode == "diagonal":
        return (met * g).sum((1, 2, 4))
    order = (0, 3, 1, 2, 4)
    return met.permute(order).flatten(2) @ g.permute(order).flatten(2).mT


def add_streamed_squares(total: Tensor, left: Tensor, right: Tensor, limit: int, turns: Turns = NO_TURNS) -> None:
    """Add ``Σ_vb P²`` to ``total [G, o, i]``."""
    recording = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if turns is NO_TURNS and right.stride(1) == 1 and right.shape[1] > 1 and not recording:
        _add_squares_by_column(total, left, right, limit)
        return
    for rows, values in written(left, right, limit, turns):
        total[:, rows] += values.square_().sum((0, 2))


def _add_squares_by_column(total: Tensor, left: Tensor, right: Tensor, limit: int) -> None:
    """The same where a right column's positions lie side by side, as those of patches do.

    The transposed matrices, a right column in each row, take a tenth to a quarter less time.
    """
    v, b, s, groups, rows = left.shape
    columns = right.shape[-1]
    step = max(1, min(rows, limit // max(1, v * b * groups * columns * left.element_size())))
    a = right.expand(-1, -1, groups, -1).permute(0, 2, 3, 1).reshape(b * groups, columns, s)
    memory = left.new_empty(b * groups * v * step * columns)
    for start in range(0, rows, step):
        part = left[..., start : start + step]
        r = part.shape[-1]
        if left.stride(-1) == 1:
            g = part.permute(1, 3, 2, 0, 4).reshape(b * groups, s, v * r)
        else:
            g = part.permute(1, 3, 0, 4, 2).reshape(b * groups, v * r, s).mT
        values = memory[: b * groups * v * r * columns].view(b * groups, columns, v * r)
        torch.bmm(a, g, out=values)
        squares = values.square_().view(b, groups, columns, v, r).sum(0).sum(2)  # [G, i, r]
        total[:, start : start + r] += squares.mT


def add_gram_squares(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``Σ_vb P²`` to ``total [G, o, i]``."""
    positions, groups = left.shape[2], left.shape[3]
    if positions == 1:
        a, g = right.square(), left.square().sum(0)
    else:
        s, t = torch.tril_indices(positions, positions, device=left.device)
        twice = torch.where(s == t, 1.0, 2.0).to(left.dtype)[:, None, None]
        a = right[:, s] * right[:, t]
        g = left[0][:, s] * left[0][:, t]
        for one in left[1:]:
            g.addcmul_(one[:, s], one[:, t])
        g *= twice
    a, g = a.expand(-1, -1, groups, -1).flatten(0, 1), g.flatten(0, 1)  # [bT, G, i], [bT, G, o]
    if groups == 1:
        total[0].addmm_(g[:, 0].T, a[:, 0])
    else:
        total.baddbmm_(g.permute(1, 2, 0), a.transpose(0, 1))


def _meet(kernel: Tensor, rows: Tensor) -> Tensor:
    """``Σ_t K_st,o g_vt,o`` for ``K [b, S, T, n]`` and ``g [b or 1, V, T, n]``, ``[b, V, S, n]``."""
    met = kernel[:, None, :, 0] * rows[:, :, 0, None]
    for t in range(1, kernel.shape[2]):
        factors = kernel[:, None, :, t], rows[:, :, t, None]
        met = torch.addcmul(met, *factors) if met.requires_grad else met.addcmul_(*factors)
    return met


def _close(rows: Tensor, met: Tensor, mode: str) -> Tensor:
    if mode == "diagonal":
        return (rows * met).sum((2, 3))
    return met.flatten(2) @ rows.flatten(2).mT
