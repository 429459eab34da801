r"""Batched per-example gradients, kept as sums of outer products for as long as possible.

An :class:`ExampleGradients` holds one matrix for each of V cotangents and B examples, all of one shape ``[G, o, i]``
(G independent groups of o × i matrices; G = 1 for all but grouped layers). The gradient of a linear layer is a matrix
of rank S, the number of positions at which the layer is used. Its two sides take less memory and fewer operations than
the matrix. Matrices are written out a bounded number at a time, and only where no other form takes fewer operations.

For one example of a linear layer or a convolution ``P_v = Σ_s g_vs a_sᵀ`` with output gradients ``g [V, S, G, o]`` and
inputs ``a [S, G, i]`` at S positions (tokens, pixels). Weighted inner products ``Q_vw = Σ_oi D_oi P_v,oi P_w,oi`` have
two forms:

* *written*: write out the P, a few examples at a time; ``V S o i`` multiplications and as many more for each of P's
  entries as their squares take;
* *paired*: ``K_st,o = Σ_i a_si a_ti D_oi`` for the ``S (S + 1)/2`` pairs of positions, then
  ``Q_vw = Σ_sto g_vs,o K_st,o g_wt,o``; ``S² o i/2`` and ``V S² o`` multiplications.

Predictions of a ResNet-18 with 10 classes take half the time by pairs, for the 16 positions of its last convolutions;
for a transformer's 128 tokens pairs take seven times longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

MIB = 2**20

_WRITTEN = 4 * MIB
"""Bytes of a chunk that is written out, a few of one core's own caches (EPYC, Zen 4)."""

_JOINT = 64 * MIB
"""The same for products of all examples with each other, in which each chunk is written out once for every other."""

_SIDES = 8 * MIB
"""Bytes of a chunk of both sides of outer products: products with a basis are faster with many rows."""

_EVERY = slice(None)

_TINY = 4096
"""Matrices of fewer entries are rotated by one product for all examples: 3 times as fast for 4 groups of 64 × 5."""

_ENTRY = 10
"""Multiply-adds of a large matrix product in the time of one operation entry by entry within the caches (float32)."""


def slices(length: int, bytes_each: int, limit: int, device: torch.device | None = None) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes, and of at least one element.

    This is the one loop that bounds memory: a convolution's patches, and gradients in place of their two sides, take
    many times the memory of what they are made of. On a ``device`` without such caches chunks have up to 256 MiB.
    """
    limit = limit if device is None or device.type == "cpu" else 256 * MIB
    step = max(1, limit // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class ExampleGradients(ABC):
    """V × B matrices ``P_vn`` of shape ``[G, o, i]``: the gradients of V cotangents for B examples.

    Attributes:
        n_cotangents: V.
        n_examples: B.
        shape: ``(G, o, i)``.
        dtype: The type in which sums are taken.
        device: Where they are.
        shares_rows: Whether the positions are rows of the whole batch, of which each example may reach any.
    """

    shares_rows = False
    n_cotangents: int
    n_examples: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The matrices of some examples, written out: ``[V, b, G, o, i]``."""

    @abstractmethod
    def select(self, cotangents: Tensor) -> ExampleGradients:
        """The gradients of some cotangents, given by their indices."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> ExampleGradients:
        """The same matrices with sums taken in another type."""

    def bytes_each(self) -> int:
        """Memory that the matrices of one example take when they are written out."""
        groups, rows, columns = self.shape
        return self.n_cotangents * groups * rows * columns * self.dtype.itemsize

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of a slice of the examples and their matrices ``[V, b, G, o, i]``, a bounded number at a time."""
        for examples in slices(self.n_examples, self.bytes_each(), _WRITTEN, self.device):
            yield examples, self.dense(examples)

    def total(self) -> Tensor:
        """The sums over all examples, ``Σ_n P_vn``, ``[V, G, o, i]``."""
        return sum([values.sum(1) for _, values in self.chunks()], torch.zeros((), dtype=self.dtype))

    def add_squares_(self, total: Tensor) -> None:
        """Add ``Σ_vn P_vn²``, entry by entry, to ``total [G, o, i]``."""
        for _, values in self.chunks():
            total += values.square().sum((0, 1))

    def by_component(self, components: Tensor, count: int) -> list[ExampleGradients]:
        """The gradients of each component's cotangents; components are ``[V]`` integers below ``count``."""
        if count == 1:
            return [self]
        return [self.select((components == number).nonzero().squeeze(-1)) for number in range(count)]

    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        """Weighted inner products of the matrices, ``Σ_goi w_goi P_v,n,goi P_v',n',goi``.

        Args:
            weights: Non-negative ``[G, o, i]``.
            mode: ``"full"`` for ``[B, V, V]`` (each example with itself), ``"diagonal"`` for ``[B, V]``, ``"joint"``
                for ``[B, V, B, V]`` (all examples with each other).
        """
        if mode == "joint":
            return self._joint(weights)
        results = []
        for _, values in self.chunks():
            flat = values.flatten(2).transpose(0, 1)  # [b, V, p]
            if mode == "diagonal" or self.n_cotangents == 1:
                squares = flat.square() @ weights.flatten()
                results.append(squares if mode == "diagonal" else squares[:, :, None])
            else:
                results.append((flat * weights.flatten()) @ flat.mT)
        return torch.cat(results)

    def in_basis(self, left: Any, right: Any) -> ExampleGradients:
        """The gradients ``Lᵀ P R``, for ``L [G, o, ·]`` and ``R [G or 1, i, ·]``; None for the identity."""
        values = self.dense(slice(0, self.n_examples))
        if left is not None and self.shape[1] * self.shape[2] < _TINY:
            values = times(values.movedim(-1, 2), left).movedim(2, -1).contiguous()
        elif left is not None:
            values = left.to(values.dtype).mT @ values
        if right is None:
            return DenseGradients(values)
        return DenseGradients(values @ (right[0] if len(right) == 1 else right).to(values.dtype))

    def project(self, matrices: Tensor) -> Tensor:
        """Inner products ``⟨P_vn, U_r⟩`` with some matrices ``U [r, G, o, i]``, ``[V, B, r]``."""
        flat = matrices.flatten(1).mT.to(self.dtype)
        return torch.cat([values.flatten(2) @ flat for _, values in self.chunks()], 1)

    def _joint(self, weights: Tensor) -> Tensor:
        # No more than two chunks are written out at a time; symmetry gives the other half of the pairs.
        v, b = self.n_cotangents, self.n_examples
        result = weights.new_zeros(b, v, b, v)
        cuts = list(slices(b, self.bytes_each(), _JOINT, self.device))
        for number, own in enumerate(cuts):
            weighted = self.dense(own).mul(weights).flatten(2).flatten(0, 1)  # [vb, p]
            for other in cuts[: number + 1]:
                block = weighted @ self.dense(other).flatten(2).flatten(0, 1).T
                block = block.view(v, -1, v, other.stop - other.start)
                result[own, :, other] = block.permute(1, 0, 3, 2)
                result[other, :, own] = block.permute(3, 2, 1, 0)
        return result


@dataclass
class DenseGradients(ExampleGradients):
    """Gradients that are written out, as ``values [V, B, G, o, i]``."""

    values: Tensor

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.values.shape[:2]
        self.shape = tuple(self.values.shape[2:])  # type: ignore[assignment]
        self.dtype, self.device = self.values.dtype, self.values.device

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.values[:, examples]

    @override
    def select(self, cotangents: Tensor) -> DenseGradients:
        return DenseGradients(self.values[cotangents])

    @override
    def in_dtype(self, dtype: torch.dtype) -> DenseGradients:
        return DenseGradients(self.values.to(dtype))


def times(rows: Tensor, matrices: Any) -> Tensor:
    """``x_g U_g`` for rows ``[..., G or 1, n]`` and ``U [G, n, m]``, as one matrix product for each group."""
    matrices = matrices if matrices.dtype == rows.dtype else matrices.to(rows.dtype)
    if rows.shape[-2] == matrices.shape[0] == 1:
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
        right_sizes: ``(S, G, i)`` of the expanded right side, where that is known without expanding any of it.
    """

    raw_right: Tensor
    raw_left: Tensor
    expand_right: Callable[[Tensor], Tensor] = torch.positive  # the tensor itself
    expand_left: Callable[[Tensor], Tensor] = torch.positive
    compute_dtype: torch.dtype | None = None
    add_right_products: Callable[[Tensor, Tensor], None] | None = None
    right_sizes: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.raw_left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.raw_left.dtype, torch.float32)
        self.device = self.raw_left.device
        groups, rows = self.expand_left(self.raw_left[:1, :1]).shape[3:]
        if self.right_sizes is None:
            _, positions, right_groups, width = self.expand_right(self.raw_right[:1]).shape
            self.right_sizes = positions, right_groups, width
        self.n_positions, self.right_shape = self.right_sizes[0], self.right_sizes[1:]
        self.shape = (groups, rows, self.right_sizes[2])

    def left(self, examples: slice) -> Tensor:
        """Left side ``[V, b, S, G, o]`` of some examples."""
        return self.expand_left(self.raw_left[:, examples]).to(self.dtype)

    def right(self, examples: slice) -> Tensor:
        """Right side ``[b, S, G or 1, i]`` of some examples."""
        return self.expand_right(self.raw_right[examples]).to(self.dtype)

    @override
    def in_basis(self, left: Any, right: Any) -> ExampleGradients:
        if right is None:
            return super().in_basis(left, right)
        dtype = torch.promote_types(self.dtype, right.dtype)
        if self.n_positions == 1:  # multiplied once, for every quadratic form that follows
            rows, columns = self.expand_left(self.raw_left).to(dtype), self.expand_right(self.raw_right).to(dtype)
            columns, rows = times(columns, right), rows if left is None else times(rows, left)
            return OuterGradients(columns, rows, right_sizes=(1, *columns.shape[2:]))
        # Matrices take fewer operations than a side with more positions than they have vectors, and less memory.
        left_first = self.n_positions <= self.shape[2]
        right_first = self.n_positions <= self.n_cotangents * self.shape[1]

        def expand_right(raw: Tensor) -> Tensor:
            rows = self.expand_right(raw).to(dtype)
            return times(rows, right) if right_first else rows

        def expand_left(raw: Tensor) -> Tensor:
            rows = self.expand_left(raw).to(dtype)
            return times(rows, left) if left_first and left is not None else rows

        rotated = (self.n_positions, max(self.right_shape[0], len(right)), right.shape[2])
        sizes = rotated if right_first else self.right_sizes
        sides = OuterGradients(self.raw_right, self.raw_left, expand_right, expand_left, dtype, right_sizes=sizes)
        if left_first and right_first:
            return sides
        values = torch.cat([sides.dense(examples) for examples in sides.side_chunks()], 1)
        return DenseGradients(values).in_basis(None if left_first else left, None if right_first else right)

    def side_chunks(self, bytes_each: int = 0) -> Iterator[slice]:
        """Slices whose sides and so many bytes for each are of bounded size."""
        groups, rows, columns = self.shape
        each = self.n_positions * groups * (self.n_cotangents * rows + columns) * self.dtype.itemsize
        return slices(self.n_examples, max(each, bytes_each), _SIDES, self.device)

    @override
    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for some in self.side_chunks():  # sides are rotated for more examples than matrices are written out
            sides = OuterGradients(self.right(some), self.left(some), compute_dtype=self.dtype)
            for own in slices(sides.n_examples, self.bytes_each(), _WRITTEN, self.device):
                yield slice(some.start + own.start, some.start + own.stop), sides.dense(own)

    @override
    def dense(self, examples: slice) -> Tensor:
        left, right = self.left(examples), self.right(examples)
        if self.n_positions == 1:
            return left.squeeze(2).unsqueeze(-1) * right.squeeze(1).unsqueeze(-2)
        if right.shape[2] > 1:
            return torch.einsum("vbsgo,bsgi->vbgoi", left, right)
        # One product for all groups and cotangents, for which torch would copy the right side, as the left one lies.
        if left.stride(-1) == 1:
            rows = left.permute(1, 2, 0, 3, 4).flatten(2).mT
        else:
            rows = left.permute(1, 0, 3, 4, 2).flatten(1, 3)
        values = rows @ right.squeeze(2)  # [b, V·G·o, i]
        return values.unflatten(1, (len(left), *left.shape[3:])).transpose(0, 1)

    @override
    def total(self) -> Tensor:
        total = torch.zeros(self.n_cotangents, *self.shape, dtype=self.dtype, device=self.device)
        for some in self.side_chunks():
            right = self.right(some).expand(-1, -1, self.shape[0], -1)
            total += torch.einsum("vbsgo,bsgi->vgoi", self.left(some), right)
        return total

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
        written = self.n_cotangents * columns * (self.n_positions + count)
        if written < self.n_positions * count * (columns + self.n_cotangents):
            return super().project(matrices)
        results = []
        by_column = matrices.to(self.dtype).permute(1, 3, 0, 2).flatten(2)  # [G, i, r·o]
        for examples in self.side_chunks(self.n_positions * groups * rows * count * self.dtype.itemsize):
            products = times(self.right(examples), by_column).unflatten(-1, (count, rows))  # [b, S, G, r, o]
            products = products.transpose(3, 4).flatten(1, 3)  # [b, S·G·o, r]
            results.append((self.left(examples).transpose(0, 1).flatten(2) @ products).transpose(0, 1))
        return torch.cat(results, 1)

    def _pairs(self) -> bool:
        """Whether pairs of positions take fewer operations than written matrices."""
        v, s, columns = self.n_cotangents, self.n_positions, self.shape[2]
        return s * s * (columns / 2 + _ENTRY * v) < columns * v * (s + 2 * _ENTRY)

    @override
    def add_squares_(self, total: Tensor) -> None:
        if self.n_positions > 1:
            super().add_squares_(total)
            return
        for examples in self.side_chunks():
            g, a = self.left(examples).square().sum((0, 2)), self.right(examples).square()[:, 0]
            total += torch.einsum("bgo,bgi->goi", g, a.expand(-1, self.shape[0], -1))

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if self.n_positions > 1:
            written = mode == "joint" or not self._pairs()
            return super().quadratic(weights, mode) if written else self._paired(weights, mode)
        right = self.right(_EVERY).squeeze(1)  # [B, G, i]
        left = self.left(_EVERY).flatten(2).transpose(0, 1)  # [B, V, G·o]
        if mode == "joint":
            return _rank_one_joint(left, right, weights)
        scale = times(right.square(), weights.mT).flatten(1)  # [B, G·o]
        if mode == "diagonal":
            return torch.bmm(left.square(), scale[:, :, None])[..., 0]
        return torch.bmm(left * scale.unsqueeze(1), left.mT)

    def _paired(self, weights: Tensor, mode: str) -> Tensor:
        groups, rows, columns = self.shape
        n, v = self.n_positions, self.n_cotangents
        s, t = torch.tril_indices(n, n, device=self.device)
        place = torch.empty(n, n, dtype=torch.long, device=self.device)
        place[s, t] = place[t, s] = torch.arange(len(s), device=self.device)
        results = []
        for examples in self.side_chunks(groups * (len(s) * columns + n * rows * (2 * n + v)) * self.dtype.itemsize):
            left, right = self.left(examples), self.right(examples)
            kernel = times(right[:, s] * right[:, t], weights.mT).flatten(2)[:, place]  # [b, S, S, G·o]
            flat = left.flatten(3).transpose(0, 1)  # [b, V, S, G·o]
            met = kernel[:, None, :, 0] * flat[:, :, 0, None]  # Σ_t K_st,o g_vt,o: [b, V, S, G·o]
            for position in range(1, n):
                met = torch.addcmul(met, kernel[:, None, :, position], flat[:, :, position, None])
            results.append((flat * met).sum((2, 3)) if mode == "diagonal" else met.flatten(2) @ flat.flatten(2).mT)
        return torch.cat(results)


def _rank_one_joint(rows: Tensor, right: Tensor, weights: Tensor) -> Tensor:
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
    left, right = torch.cat([use.left(_EVERY) for use in uses], 2), torch.cat([use.right(_EVERY) for use in uses], 1)
    result = OuterGradients(right, left, compute_dtype=uses[0].dtype)
    result.shares_rows = any(use.shares_rows for use in uses)
    return result
