r"""Gradients that are sums of outer products, as those of linear layers and convolutions are.

For one example ``P_v = Σ_s g_vs a_sᵀ`` with output gradients ``g [V, S, G, o]`` and inputs ``a [S, G, i]`` at S
positions (tokens, pixels). Weighted inner products ``Q_vw = Σ_oi D_oi P_v,oi P_w,oi`` have two forms:

* *written*: write out the P, a few examples at a time; ``V S o i`` multiplications for the matrices and ``V² o i`` for
  their products (``V o i`` for the squares alone);
* *paired*: ``K_st,o = Σ_i a_si a_ti D_oi`` for the ``S (S + 1)/2`` pairs of positions, then
  ``Q_vw = Σ_sto g_vs,o K_st,o g_wt,o``; ``S² o i/2`` and ``V S² o`` multiplications.

The sum of squares ``Σ_v P_v²`` has both forms as well; in the second it is ``Σ_st (Σ_v g_vs,o g_vt,o)(a_si a_ti)``, one
product over all examples and pairs. The form with fewer operations is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.chunks import limit, slices
from laplace_plus.structured.gradients.base import ExampleGradients

_SIDES = 8
"""MiB of a chunk of both sides: products with a basis are faster with many rows."""

_WRITTEN = 2
"""MiB of a part of the written matrices."""

_EVERY = slice(None)

_FEW = 16
"""Up to one entry in so many is computed by itself, faster than with whole matrices."""

# Costs in multiply-adds of a large matrix product, measured on one core of an EPYC (Zen 4) in float32: an operation
# entry by entry within the caches, and one in products of fewer than _WIDE vectors with each other.
_ENTRY, _NARROW, _WIDE = 10, 3, 32


def times(rows: Tensor, matrices: Tensor) -> Tensor:
    """``x_g U_g`` for rows ``[..., G or 1, n]`` and ``U [G, n, m]``, as one matrix product for each group."""
    matrices = matrices if matrices.dtype == rows.dtype else matrices.to(rows.dtype)
    if rows.shape[-2] == len(matrices) == 1:
        return rows.contiguous() @ matrices[0]  # of others torch would make many small products
    lead = rows.shape[:-2]
    rows = rows.expand(*lead, len(matrices), -1)
    by_group = rows.movedim(-2, 0).reshape(len(matrices), lead.numel(), rows.shape[-1])
    return (by_group @ matrices).transpose(0, 1).unflatten(0, lead)


@dataclass
class OuterGradients(ExampleGradients):
    """Matrices ``P_vn = Σ_s left_vns right_nsᵀ``, group by group.

    The two sides may be given in a raw form that is expanded for a few examples at a time: a convolution's patches take
    k² times the memory of its input.

    Attributes:
        raw_right: Tensor with the B examples first; ``expand_right`` maps some of them to ``[b, S, G, i]``. Groups that
            share one right side have ``G = 1`` there.
        raw_left: Tensor with V cotangents, then B examples first; ``expand_left`` maps it to ``[V, b, S, G, o]``.
        expand_right: See above.
        expand_left: See above.
        compute_dtype: The type in which sums are taken, at least float32.
        add_right_products: Adds ``Σ_s a aᵀ`` of some of the raw right side to the lower triangles of ``[G, i, i]``,
            where that is faster than expanding it first.
        left_basis: L ``[G, o, o]``, or None.
        right_basis: R ``[G, i, i]``, or None: the matrices are ``Lᵀ P R``.
        right_sizes: ``(S, G, i)`` of the expanded right side, where that is known without expanding any of it.
    """

    raw_right: Tensor
    raw_left: Tensor
    expand_right: Callable[[Tensor], Tensor] = torch.positive  # the tensor itself
    expand_left: Callable[[Tensor], Tensor] = torch.positive
    compute_dtype: torch.dtype | None = None
    add_right_products: Callable[[Tensor, Tensor], None] | None = None
    left_basis: Tensor | None = None
    right_basis: Tensor | None = None
    right_sizes: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.raw_left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.raw_left.dtype, torch.float32)
        self.device = self.raw_left.device
        left = self.raw_left if self.expand_left is torch.positive else self.expand_left(self.raw_left[:1, :1])
        rows, columns = left.shape[3:]
        if self.right_sizes is None:
            _, positions, right_groups, width = self.expand_right(self.raw_right[:1]).shape
            self.right_sizes = positions, right_groups, width
        self.n_positions, self.right_shape = self.right_sizes[0], self.right_sizes[1:]
        self.shape = (rows, columns, self.right_sizes[2])

    def left(self, examples: slice, *, in_basis: bool = True) -> Tensor:
        """Left side ``[V, b, S, G, o]`` of some examples."""
        left = self.raw_left if examples == _EVERY else self.raw_left[:, examples]
        left = left if self.expand_left is torch.positive else self.expand_left(left)
        left = left if left.dtype == self.dtype else left.to(self.dtype)
        return times(left, self.left_basis) if in_basis and self.left_basis is not None else left

    def right(self, examples: slice, *, in_basis: bool = True) -> Tensor:
        """Right side ``[b, S, G or 1, i]`` of some examples."""
        right = self.raw_right if examples == _EVERY else self.raw_right[examples]
        right = right if self.expand_right is torch.positive else self.expand_right(right)
        right = right if right.dtype == self.dtype else right.to(self.dtype)
        return times(right, self.right_basis) if in_basis and self.right_basis is not None else right

    def in_basis(self, left: Tensor | None, right: Tensor) -> OuterGradients:
        """The gradients ``Lᵀ P R``, for ``L [G, o, o]`` (None for the identity) and ``R [G or 1, i, i]``."""
        dtype = self.dtype if self.dtype == right.dtype else torch.promote_types(self.dtype, right.dtype)
        if self.n_positions == 1:  # multiplied once, for every quadratic form that follows
            rows, columns = self.left(_EVERY), self.right(_EVERY)
            if dtype != self.dtype:
                rows, columns = rows.to(dtype), columns.to(dtype)
            rows = rows if left is None else times(rows, left)
            return OuterGradients(times(columns, right), rows, compute_dtype=dtype)
        left_basis = self.left_basis if left is None or self.left_basis is None else self.left_basis @ left
        return replace(
            self,
            compute_dtype=dtype,
            add_right_products=None,
            left_basis=left if self.left_basis is None else left_basis,
            right_basis=right if self.right_basis is None else self.right_basis @ right,
            right_sizes=(self.n_positions, max(self.right_shape[0], len(right)), self.shape[2]),
        )

    def side_chunks(self, bytes_each: int = 0) -> Iterator[slice]:
        """Slices whose sides and so many bytes for each are of bounded size."""
        groups, rows, columns = self.shape
        each = self.n_positions * groups * (self.n_cotangents * rows + columns) * self.dtype.itemsize
        return slices(self.n_examples, max(each, bytes_each), limit(self.device, _SIDES))

    def _written(self, examples: slice, *, whole: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        """The matrices of some examples, a bounded part at a time: which examples, which rows, and ``[b, G, V, r, i]``.

        The change of basis multiplies the sides, or the written matrices where these are smaller.
        """
        groups, rows, columns = self.shape
        late_left = None if columns >= self.n_positions else self.left_basis
        late_right = None if self.n_cotangents * rows >= self.n_positions else self.right_basis
        left = self.left(examples, in_basis=late_left is None)
        right = self.right(examples, in_basis=late_right is None).expand(-1, -1, groups, -1).transpose(1, 2)
        each, room, step = self.bytes_each(), limit(self.device, _WRITTEN), rows
        if whole:
            room = max(1, len(right) * each)
        elif late_left is None:  # that mixes the rows
            step = max(1, min(rows, room * rows // max(1, each)))
        for cut in list(slices(len(right), each, room)) or [slice(0, 0)]:
            for start in range(0, rows, step):
                part = left[:, cut, ..., start : start + step]
                if left.stride(-1) == 1:  # copy in the order in which the entries lie
                    factors = part.permute(1, 3, 2, 0, 4).flatten(3).mT
                else:
                    factors = part.permute(1, 3, 0, 4, 2).flatten(2, 3)
                values = factors @ right[cut]  # [b, G, V·r, i]
                values = values if late_right is None else values @ late_right.to(self.dtype)
                values = values.unflatten(2, (self.n_cotangents, -1))
                if late_left is not None:  # one product for all examples and columns: [b, V, i, G, o] times L
                    by_row = times(values.permute(0, 2, 4, 1, 3), late_left)
                    values = by_row.permute(0, 3, 1, 4, 2)
                yield cut, slice(start, start + step), values

    @override
    def dense(self, examples: slice) -> Tensor:
        if self.n_positions == 1:
            return self.left(examples).squeeze(2).unsqueeze(-1) * self.right(examples).squeeze(1).unsqueeze(-2)
        ((_, _, values),) = self._written(examples, whole=True)
        return values.movedim(2, 0)

    @override
    def entries(self, examples: slice, positions: Tensor) -> Tensor:
        groups, rows, columns = self.shape
        if _FEW * len(positions) > groups * rows * columns:
            return ExampleGradients.entries(self, examples, positions)
        row = positions // columns
        column = positions % columns + (row // rows * columns if self.right_shape[0] > 1 else 0)
        start, stop, _ = examples.indices(self.n_examples)
        each = self.n_cotangents * self.n_positions * len(positions) * self.dtype.itemsize
        results = [self.left(slice(0, 0)).new_zeros(self.n_cotangents, 0, len(positions))]
        for cut in slices(stop - start, each, limit(self.device, _SIDES)):
            own = slice(start + cut.start, start + cut.stop)
            results.append((self.left(own).flatten(3)[..., row] * self.right(own).flatten(2)[..., column]).sum(2))
        return torch.cat(results, 1)

    @override
    def select(self, cotangents: Tensor) -> OuterGradients:
        return replace(self, raw_left=self.raw_left[cotangents])

    @override
    def in_dtype(self, dtype: torch.dtype) -> OuterGradients:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        groups, rows, columns = self.shape
        count = len(matrices)
        # Either every P is written out, or each row of the right side meets every U.
        written = self.n_cotangents * rows * columns * (self.n_positions + count)
        if written < self.n_positions * rows * count * (columns + self.n_cotangents):
            return ExampleGradients.project(self, matrices)
        results = []
        by_column = matrices.to(self.dtype).permute(1, 3, 0, 2).flatten(2)  # [G, i, r·o]
        for examples in self.side_chunks(self.n_positions * groups * rows * count * self.dtype.itemsize):
            products = times(self.right(examples), by_column).unflatten(-1, (count, rows))  # [b, S, G, r, o]
            products = products.transpose(3, 4).flatten(1, 3)  # [b, S·G·o, r]
            results.append((self.left(examples).transpose(0, 1).flatten(2) @ products).transpose(0, 1))
        return torch.cat(results, 1)

    def _writes(self, mode: str) -> bool:
        """Whether writing out the matrices takes fewer operations than pairs of positions."""
        v, s, (_, o, i) = self.n_cotangents, self.n_positions, self.shape
        pairs = s * (s + 1) // 2
        if mode == "squares":
            written = o * i * v * (s + 2 * _ENTRY)
            paired = pairs * (o * i + _ENTRY * (3 * v * o + 2 * i))
        else:
            product = v * (_NARROW if v < _WIDE else 1)
            written = o * i * v * (s + (2 * _ENTRY if mode == "diagonal" else product + _ENTRY))
            paired = pairs * i * (o + _ENTRY) + _ENTRY * s * s * o * (v + 1)
            paired += v * s * o * (_ENTRY if mode == "diagonal" else product)
        if self.left_basis is not None or self.right_basis is not None:
            written += min(v * s * o * o, v * i * o * o) + min(s * i * i, v * o * i * i)
            paired += v * s * o * o + s * i * i
        return written < paired

    @override
    def add_squares_(self, total: Tensor) -> None:
        if self.n_cotangents == 0:  # of a component to which none of these cotangents belongs
            return
        groups, rows, columns = self.shape
        if self._writes("squares"):
            for examples in self.side_chunks():
                for _, part, values in self._written(examples):
                    total[:, part] += values.square().sum((0, 2))
            return
        s, t = torch.tril_indices(self.n_positions, self.n_positions, device=self.device)
        twice = torch.where(s == t, 1, 2)[:, None, None]
        for examples in self.side_chunks(len(s) * groups * (2 * rows + columns) * self.dtype.itemsize):
            left, right = self.left(examples), self.right(examples)
            if self.n_positions == 1:
                g, a = left.square().sum(0), right.square()
            else:
                g = left[0].index_select(1, s) * left[0].index_select(1, t)  # [b, T, G, o]
                for own in left[1:]:
                    g.addcmul_(own.index_select(1, s), own.index_select(1, t))
                g, a = g.mul_(twice), right.index_select(1, s) * right.index_select(1, t)
            a = a.expand(-1, -1, groups, -1)
            total.baddbmm_(g.flatten(0, 1).permute(1, 2, 0), a.flatten(0, 1).transpose(0, 1))

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if self.n_positions > 1:
            if mode == "joint":
                return self._joint(weights)
            return self._written_quadratic(weights, mode) if self._writes(mode) else self._paired(weights, mode)
        right = self.right(_EVERY).squeeze(1)  # [B, G, i]
        left = self.left(_EVERY).flatten(2).transpose(0, 1)  # [B, V, G·o]
        if mode == "joint":
            return self._rank_one_joint(left, right, weights)
        scale = times(right.square(), weights.mT).flatten(1)  # [B, G·o]
        if mode == "diagonal":
            return torch.bmm(left.square(), scale[:, :, None])[..., 0]
        return torch.bmm(left * scale.unsqueeze(1), left.mT)

    def _written_quadratic(self, weights: Tensor, mode: str) -> Tensor:
        results, roots, v = [], weights.sqrt(), self.n_cotangents
        for examples in self.side_chunks():
            n = examples.stop - examples.start
            total = weights.new_zeros((n, v) if mode == "diagonal" else (n, v, v))
            for cut, rows, values in self._written(examples):
                flat = values.mul_(roots[:, None, rows]).flatten(3)  # in place, without new memory
                total[cut] += flat.square().sum((1, 3)) if mode == "diagonal" else (flat @ flat.mT).sum(1)
            results.append(total)
        return torch.cat(results)

    def _paired(self, weights: Tensor, mode: str) -> Tensor:
        groups, rows, columns = self.shape
        n, v = self.n_positions, self.n_cotangents
        s, t = torch.tril_indices(n, n, device=self.device)
        place = torch.empty(n, n, dtype=torch.long, device=self.device)
        place[s, t] = place[t, s] = torch.arange(len(s), device=self.device)
        results = []
        for examples in self.side_chunks(groups * (len(s) * columns + n * rows * (2 * n + v)) * self.dtype.itemsize):
            left, right = self.left(examples), self.right(examples)
            products = right.index_select(1, s) * right.index_select(1, t)
            kernel = times(products, weights.mT).flatten(2)[:, place]  # [b, S, S, G·o]
            flat = left.flatten(3).transpose(0, 1)  # [b, V, S, G·o]
            met = kernel[:, None, :, 0] * flat[:, :, 0, None]  # Σ_t K_st,o g_vt,o: [b, V, S, G·o]
            for position in range(1, n):
                met = torch.addcmul(met, kernel[:, None, :, position], flat[:, :, position, None])
            results.append((flat * met).sum((2, 3)) if mode == "diagonal" else met.flatten(2) @ flat.flatten(2).mT)
        return torch.cat(results)

    def _rank_one_joint(self, rows: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        """All pairs of examples for left sides ``[B, V, G·o]`` and right sides ``[B, G, i]`` at one position."""
        b, v = rows.shape[:2]
        result = weights.new_zeros(b, v, b, v)
        for number in range(b):
            kernel = times(right[number:] * right[number], weights.mT).flatten(1)  # [c, G·o]
            block = (rows[number] * kernel[:, None]) @ rows[number:].mT  # [c, V, V']
            result[number, :, number:] = block.transpose(0, 1)
            result[number:, :, number] = block.mT
        return result


def concatenate(uses: list[OuterGradients]) -> OuterGradients:
    """The gradient of a weight that is used several times: the positions of all uses are positions of one."""
    if len(uses) == 1:
        return uses[0]
    every = slice(None)
    left, right = torch.cat([use.left(every) for use in uses], 2), torch.cat([use.right(every) for use in uses], 1)
    return OuterGradients(right, left, compute_dtype=uses[0].dtype)
