"""Stacks of sums of outer products: the gradients of linear layers and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.structured.chunks import chunk_bytes, require_room, slices
from laplace_plus.structured.gradients import contractions
from laplace_plus.structured.gradients.base import ExampleGradients
from laplace_plus.structured.gradients.contractions import Form, Turns, times

_SIDES = 8
"""How many times the caches the two sides of a chunk may take: products with a basis are quicker with many rows."""

_FEW = 16
"""One entry in so many, or fewer, is had sooner by products of the rows that it is in than from whole matrices."""


def _same(x: Tensor) -> Tensor:
    return x


@dataclass
class OuterGradients(ExampleGradients):
    """Matrices ``P_vn = Σ_s left_vns right_nsᵀ``, group by group.

    The two sides may be given in a raw form that is only expanded for a few examples at a time (a convolution's patches
    take k² times the memory of its input).

    Attributes:
        raw_right: Tensor with the B examples first; ``expand_right`` turns some of them into ``[b, S, G, i]``.
        raw_left: Tensor with V directions, then B examples first; ``expand_left`` makes ``[V, b, S, G, o]`` of it.
        expand_right: See above.
        expand_left: See above.
        compute_dtype: The type in which sums are taken, at least float32.
        add_right_products: Adds ``Σ_s a aᵀ`` of some of the raw right side to the lower triangles of ``[G, i, i]``,
            where there is a quicker way than to expand it first.
        left_turn: L ``[G, o, o]``, or None.
        right_turn: R ``[G, i, i]``, or None: the matrices are ``Lᵀ P R``, which is computed from the rows of the two
            sides or from P, whichever takes fewer operations.
        right_sizes: ``(S, G, i)`` of the expanded right side, where that is known without expanding any of it.
    """

    raw_right: Tensor
    raw_left: Tensor
    expand_right: Callable[[Tensor], Tensor] = _same
    expand_left: Callable[[Tensor], Tensor] = _same
    compute_dtype: torch.dtype | None = None
    add_right_products: Callable[[Tensor, Tensor], None] | None = None
    left_turn: Tensor | None = None
    right_turn: Tensor | None = None
    right_sizes: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.n_cotangents, self.n_examples = self.raw_left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.raw_left.dtype, torch.float32)
        self.device = self.raw_left.device
        with torch.no_grad():
            rows, columns = self.expand_left(self.raw_left[:1, :1]).shape[3:]
            sizes = self.right(slice(0, 1)).shape[1:] if self.right_sizes is None else self.right_sizes
        # The groups may share one right side, which then has G = 1 and is broadcast.
        self.n_positions, self.right_shape = sizes[0], (sizes[1], sizes[2])
        self.shape = (rows, columns, sizes[2])

    @property
    def is_shared(self) -> bool:
        """Whether all examples have the same left side (an expanded tensor), as one-hot directions have."""
        return self.n_examples > 1 and self.n_positions == 1 and self.raw_left.stride(1) == 0

    def sides(self, examples: slice) -> tuple[Tensor, Tensor]:
        """Left ``[V, b, S, G, o]`` and right ``[b, S, G, i]`` side of some examples."""
        return self.left(examples), self.right(examples)

    def left(self, examples: slice) -> Tensor:
        """Left side ``[V, b, S, G, o]`` of some examples."""
        left = self.expand_left(self.raw_left[:, examples]).to(self.dtype)
        return left if self.left_turn is None else times(left, self.left_turn.to(self.dtype))

    def right(self, examples: slice) -> Tensor:
        """Right side ``[b, S, G, i]`` of some examples."""
        right = self.expand_right(self.raw_right[examples]).to(self.dtype)
        return right if self.right_turn is None else times(right, self.right_turn.to(self.dtype))

    def turned(self, left: Tensor, right: Tensor) -> OuterGradients:
        """The stack of ``Lᵀ P R``, for ``L [G, o, o]`` and ``R [G, i, i]``."""
        return replace(
            self,
            compute_dtype=torch.promote_types(self.dtype, left.dtype),
            add_right_products=None,
            left_turn=left if self.left_turn is None else self.left_turn @ left,
            right_turn=right if self.right_turn is None else self.right_turn @ right,
        )

    def _deferring(self) -> tuple[OuterGradients, Turns]:
        """The stack without the turns that are less work once matrices are written out, and those turns."""
        _, rows, columns = self.shape
        left = self.left_turn if columns < self.n_positions else None
        right = self.right_turn if self.n_cotangents * rows < self.n_positions else None
        if left is None and right is None:
            return self, contractions.NO_TURNS
        rest = replace(
            self,
            compute_dtype=self.dtype,
            left_turn=None if left is not None else self.left_turn,
            right_turn=None if right is not None else self.right_turn,
        )
        cast = [None if matrix is None else matrix.to(self.dtype) for matrix in (left, right)]
        return rest, Turns(*cast)

    def without_zeros(self) -> OuterGradients:
        """The same matrices without the positions where all left sides are zero, if there are any.

        Of a layer behind which only one token is read on, the output gradients of all other tokens are zeros.
        """
        if self.n_positions == 1 or self.records or not self.n_cotangents or not self.n_examples:
            return self
        used = torch.zeros(self.n_positions, dtype=torch.bool, device=self.device)
        first = slice(0, 1)
        rest = [(slice(number, number + 1), slice(None)) for number in range(1, self.n_cotangents)]
        # A few matrices tell for most layers, even where rectifiers leave some rows of each without gradient.
        for directions, examples in [(first, first), (first, slice(1, 8)), (first, slice(8, None)), *rest]:
            raw = self.raw_left[directions, examples]
            if raw.shape[1]:
                used |= (self.expand_left(raw) != 0).any(-1).any(-1).any(1).any(0)
            if used.all():
                return self
        places = used.nonzero().squeeze(-1) if used.any() else used.new_zeros(1, dtype=torch.long)
        expand_left, expand_right = self.expand_left, self.expand_right
        some = replace(
            self,
            compute_dtype=self.dtype,
            add_right_products=None,
            expand_left=lambda raw: expand_left(raw)[:, :, places],
            expand_right=lambda raw: expand_right(raw)[:, places],
            right_sizes=(len(places), *self.right_shape),
        )
        if len(places) > 1:
            return some
        # Products of single rows are taken for all examples together: they are expanded here, a few at a time.
        cuts = list(self.side_chunks())
        return replace(
            some,
            raw_left=torch.cat([some.expand_left(self.raw_left[:, part]) for part in cuts], 1),
            raw_right=torch.cat([some.expand_right(self.raw_right[part]) for part in cuts]),
            expand_left=_same,
            expand_right=_same,
        )

    @property
    def records(self) -> bool:
        """Whether gradients flow to a side."""
        return torch.is_grad_enabled() and (self.raw_left.requires_grad or self.raw_right.requires_grad)

    def _costs(self, costs: dict[Form, int]) -> dict[Form, int]:
        if self.left_turn is not None or self.right_turn is not None:
            turning = contractions.turning_costs(self.n_cotangents, self.n_positions, *self.shape[1:])
            return {form: cost + turning[form] for form, cost in costs.items()}
        return costs

    def side_chunks(self, n_examples: int | None = None) -> Iterator[slice]:
        """Slices of the examples, or of so many of them, whose two sides are of bounded size.

        Raises:
            ConfigurationError: The memory budget does not hold the sides of one example.
        """
        groups, rows, columns = self.shape
        item = torch.finfo(self.dtype).bits // 8
        each = self.n_positions * groups * (self.n_cotangents * rows + columns) * item
        require_room(each, "the input and output gradients of one example at one layer", self.device)
        count = self.n_examples if n_examples is None else n_examples
        return slices(count, each, chunk_bytes(self.device, of_caches=_SIDES))

    @override
    def dense(self, examples: slice) -> Tensor:
        rest, turns = self._deferring()
        left, right = rest.sides(examples)
        ((_, values),) = contractions.written(left, right, self.n_bytes(), turns)
        return values.movedim(2, 0)

    @override
    def entries(self, examples: slice, positions: Tensor) -> Tensor:
        groups, rows, columns = self.shape
        if _FEW * len(positions) > groups * rows * columns:
            return ExampleGradients.entries(self, examples, positions)
        row = positions // columns
        column = positions % columns + (row // rows * columns if self.right_shape[0] > 1 else 0)
        start, stop, _ = examples.indices(self.n_examples)
        if self.n_positions == 1:
            left, right = self.sides(examples)
            return left[:, :, 0].flatten(2)[..., row] * right[:, 0].flatten(1)[:, column]
        # Entries of one row have one left side: a small product for each row that has any.
        order = row.argsort(stable=True)
        there, counts = row[order].unique_consecutive(return_counts=True)
        columns_of = column[order].split(counts.tolist())
        parts = []
        for part in self.side_chunks(stop - start):
            left, right = self.sides(slice(start + part.start, start + part.stop))
            left = left.flatten(3).permute(3, 1, 0, 2)[there]  # [r, b, V, S]
            right = right.flatten(2).permute(2, 0, 1).contiguous()  # [G·i, b, S]
            found = [torch.bmm(one, right[own].permute(1, 2, 0)) for one, own in zip(left, columns_of, strict=True)]
            parts.append(torch.cat(found, 2).transpose(0, 1))
        return (
            torch.cat(parts, 1)[..., order.argsort()] if parts else ExampleGradients.entries(self, examples, positions)
        )

    @override
    def select(self, directions: Tensor) -> OuterGradients:
        return replace(self, raw_left=self.raw_left[directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> OuterGradients:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        groups, rows, columns = self.shape
        count, item = len(matrices), torch.finfo(self.dtype).bits // 8
        # Either every matrix of the stack is written out, or each row of its right side meets every U.
        streamed = self.n_cotangents * rows * columns * (self.n_positions + count)
        met = self.n_positions * rows * count * (columns + self.n_cotangents)
        if streamed < met:
            return ExampleGradients.project(self, matrices)
        parts = []
        by_column = matrices.to(self.dtype).permute(1, 3, 0, 2).flatten(2)  # [G, i, r·o]
        each = self.n_positions * groups * (rows * (count + self.n_cotangents) + columns) * item
        for examples in slices(self.n_examples, each, chunk_bytes(self.device, of_caches=_SIDES)):
            left, right = self.sides(examples)
            right = right.expand(-1, -1, groups, -1).movedim(2, 0).flatten(1, 2)  # [G, bS, i]
            meeting = (right @ by_column).view(groups, left.shape[1], self.n_positions, count, rows)  # [G, b, S, r, o]
            meeting = meeting.permute(1, 2, 0, 4, 3).flatten(1, 3)  # [b, S·G·o, r]
            parts.append((left.transpose(0, 1).flatten(2) @ meeting).transpose(0, 1))
        return torch.cat(parts, 1)

    @override
    def add_squares_(self, total: Tensor, form: Form | None = None) -> None:
        if self.n_cotangents == 0:  # a component that none of a few directions belongs to
            return
        if form is None and (some := self.without_zeros()) is not self:
            some.add_squares_(total)
            return
        costs = contractions.square_costs(self.n_cotangents, self.n_positions, *self.shape[1:])
        chosen = contractions.cheapest(self._costs(costs)) if form is None else form
        source, turns = self._deferring() if chosen == "stream" else (self, contractions.NO_TURNS)
        for examples in self.side_chunks():
            left, right = source.sides(examples)
            if chosen == "gram":
                self._add_gram_squares(total, left, right)
                continue
            for part in self._inner(len(right), self._bytes_of_matrices()):
                contractions.add_streamed_squares(total, left[:, part], right[part], chunk_bytes(self.device), turns)

    def _add_gram_squares(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        groups, rows, columns = self.shape
        pairs = self.n_positions * (self.n_positions + 1) // 2
        each = pairs * groups * (2 * rows + columns) * total.element_size()
        for part in self._inner(len(right), each, _SIDES):
            contractions.add_gram_squares(total, left[:, part], right[part])

    @override
    def quadratic(self, weights: Tensor, mode: str, form: Form | None = None) -> Tensor:
        """Weighted inner products; arguments as for :meth:`ExampleGradients.quadratic`.

        Args:
            weights: Non-negative ``[G, o, i]``.
            mode: ``"full"``, ``"diagonal"`` or ``"joint"``.
            form: Of the computation where there are several positions, as in
                :mod:`~laplace_plus.structured.gradients.contractions`; by default the one with the fewest operations.
                ``"separable"`` needs weights of rank one, and there is none across examples.
        """
        if self.n_positions == 1:
            return self._rank_one_quadratic(weights, mode)
        if mode == "joint":
            return self._joint_quadratic(weights, form)
        costs = self._costs(contractions.quadratic_costs(self.n_cotangents, self.n_positions, *self.shape[1:], mode))
        sides = contractions.separated(weights) if form in (None, "separable") else None
        if sides is None:
            del costs["separable"]
        chosen = contractions.cheapest(costs) if form is None else form
        source, turns = self._deferring() if chosen == "stream" else (self, contractions.NO_TURNS)
        parts, limit = [], chunk_bytes(self.device)
        scale = weights.sqrt() if chosen == "stream" and mode == "full" else weights
        for examples in self.side_chunks():
            left, right = source.sides(examples)
            for part in self._inner(len(right), self._bytes_of(chosen), 1 if chosen == "stream" else _SIDES):
                own = left[:, part], right[part]
                if chosen == "stream":
                    parts.append(contractions.streamed_quadratic(*own, scale, mode, limit, turns))
                elif chosen == "gram":
                    parts.append(contractions.gram_quadratic(*own, weights, mode))
                else:
                    assert sides is not None
                    parts.append(contractions.separable_quadratic(*own, sides, mode))
        return torch.cat(parts)

    def _joint_quadratic(self, weights: Tensor, form: Form | None) -> Tensor:
        costs = contractions.joint_costs(self.n_examples, self.n_cotangents, self.n_positions, *self.shape[1:])
        if (contractions.cheapest(costs) if form is None else form) == "stream":
            return ExampleGradients.quadratic(self, weights, "joint")
        v, b = self.n_cotangents, self.n_examples
        result = weights.new_zeros(b, v, b, v)
        pairs, groups = self.n_positions**2, self.shape[0]
        each = pairs * groups * (2 * self.shape[1] + self.shape[2]) * weights.element_size()
        for examples in self.side_chunks():
            left, right = self.sides(examples)
            for number in range(examples.stop):
                other_left, other_right = self.sides(slice(number, number + 1))
                for part in self._inner(len(right), each, _SIDES):
                    first = examples.start + part.start
                    own = slice(max(first, number), examples.start + part.stop)  # the rest is known by symmetry
                    if own.start >= own.stop:
                        continue
                    chosen = slice(own.start - examples.start, own.stop - examples.start)
                    block = contractions.cross_gram(
                        left[:, chosen], right[chosen], other_left[:, 0], other_right[0], weights
                    )
                    result[own, :, number] = block
                    result[number, :, own] = block.permute(2, 0, 1)
        return result

    def _rank_one_quadratic(self, weights: Tensor, mode: str) -> Tensor:
        right = self.right(slice(0, self.n_examples))[:, 0]  # [B, G, i]
        left = self.sides(slice(0, 1 if self.is_shared else self.n_examples))[0][:, :, 0]
        if mode == "joint":
            return self._rank_one_joint(left.expand(-1, self.n_examples, -1, -1), right, weights)
        scale = contractions.through(right.square(), weights).flatten(1)  # [B, G·o]
        left = left.flatten(2).transpose(0, 1)  # [B or 1, V, G·o]
        if mode == "diagonal" and self.is_shared:
            return scale @ left[0].square().T
        if mode == "diagonal":
            return torch.bmm(left.square(), scale[:, :, None])[..., 0]
        return (left * scale[:, None]) @ left.mT

    def _rank_one_joint(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        v, b = left.shape[:2]
        rows = left.flatten(2).transpose(0, 1)  # [B, V, G·o]
        result = weights.new_zeros(b, v, b, v)
        for number in range(b):
            kernel = contractions.through(right[number:] * right[number], weights).flatten(1)  # [c, G·o]
            block = (rows[number] * kernel[:, None]) @ rows[number:].mT  # [c, V, V']
            result[number, :, number:] = block.transpose(0, 1)
            result[number:, :, number] = block.mT
        return result

    def _inner(self, n_examples: int, bytes_each: int, of_caches: int = 1) -> Iterator[slice]:
        """Slices of some examples whose sides are at hand, for what is made of them."""
        return slices(n_examples, bytes_each, chunk_bytes(self.device, of_caches=of_caches))

    def _bytes_of_matrices(self) -> int:
        return self.n_bytes() // max(1, self.n_examples)

    def _bytes_of(self, form: Form) -> int:
        """What a form makes of one example."""
        groups, rows, columns = self.shape
        s, v, item = self.n_positions, self.n_cotangents, torch.finfo(self.dtype).bits // 8
        if form == "stream":
            return self._bytes_of_matrices()
        if form == "gram":
            return groups * (s * (s + 1) // 2 * columns + s * rows * (2 * s + v)) * item
        return groups * s * (s + columns + 2 * v * rows) * item


def concatenate(stacks: list[OuterGradients]) -> OuterGradients:
    """The sum of stacks over the same matrices: several uses of one weight are positions of one use."""
    if len(stacks) == 1:
        return stacks[0]
    every = slice(None)
    lefts, rights = zip(*(stack.sides(every) for stack in stacks), strict=True)
    return OuterGradients(torch.cat(rights, 1), torch.cat(lefts, 2), compute_dtype=stacks[0].dtype)
