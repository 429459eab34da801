"""Stacks of matrices that are kept as sums of outer products for as long as possible.

A *stack* holds one matrix for each of V directions and B examples, all of one shape ``[G, o, i]`` (G independent groups
of o × i matrices; G = 1 for all but grouped layers). The gradient of a linear layer is such a matrix of rank S, the
number of positions at which the layer is used, and writing it out costs S times less or B·o·i more than keeping its two
sides. Only :meth:`Stack.chunks` writes matrices out, a bounded number at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

CHUNK_BYTES = 256 * 2**20
"""How many bytes of written-out matrices are alive at a time."""


def slices(length: int, bytes_each: int, limit: int | None = None) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of at most ``limit`` bytes (one element at the least)."""
    step = max(1, (CHUNK_BYTES if limit is None else limit) // max(1, bytes_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class Stack(ABC):
    """V × B matrices of shape ``[G, o, i]``."""

    n_directions: int
    n_examples: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def dense(self, examples: slice) -> Tensor:
        """The matrices of some examples, written out: ``[V, b, G, o, i]``."""

    @abstractmethod
    def select(self, directions: Tensor) -> Stack:
        """The stack of some of the directions only."""

    def n_bytes(self) -> int:
        """Memory that all matrices take when they are written out."""
        groups, rows, columns = self.shape
        item = torch.finfo(self.dtype).bits // 8
        return self.n_directions * self.n_examples * groups * rows * columns * item

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of a slice of the examples and their matrices ``[V, b, G, o, i]``, a bounded number at a time."""
        for examples in slices(self.n_examples, self.n_bytes() // max(1, self.n_examples)):
            yield examples, self.dense(examples)

    def squares(self) -> Tensor:
        """The sum over directions and examples of the squared entries, ``[G, o, i]``."""
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for _, values in self.chunks():
            total += values.square().sum((0, 1))
        return total

    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        """Weighted inner products of the matrices, ``Σ_goi w_goi P_v,n,goi P_v',n',goi``.

        Args:
            weights: Non-negative ``[G, o, i]``.
            mode: ``"full"`` for ``[B, V, V]`` (each example with itself), ``"diagonal"`` for ``[B, V]``, ``"joint"``
                for ``[B, V, B, V]`` (all examples with each other).
        """
        if mode == "joint":
            return self._joint(weights)
        parts = []
        for _, values in self.chunks():
            weighted = (values * weights).flatten(2)  # [V, b, goi]
            if mode == "diagonal":
                parts.append((weighted * values.flatten(2)).sum(-1).T)
            else:
                parts.append(torch.einsum("vbp,wbp->bvw", weighted, values.flatten(2)))
        return torch.cat(parts)

    def project(self, matrices: Tensor) -> Tensor:
        """Inner products ``⟨P_vn, U_r⟩`` with some matrices ``U [r, G, o, i]``, ``[V, B, r]``."""
        flat = matrices.flatten(1).mT.to(self.dtype)
        return torch.cat([values.flatten(2) @ flat for _, values in self.chunks()], 1)

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Stack:
        """The same matrices with sums taken in another type."""

    def _joint(self, weights: Tensor) -> Tensor:
        # Pairs of chunks, so that no more than two chunks are ever written out.
        v, b = self.n_directions, self.n_examples
        result = weights.new_zeros(b, v, b, v)
        for left, values in self.chunks():
            weighted = (values * weights).flatten(2)
            for right, others in self.chunks():
                block = torch.einsum("vbp,wcp->bvcw", weighted, others.flatten(2))
                result[left, :, right] = block
        return result


@dataclass
class DenseStack(Stack):
    """Matrices that are written out already.

    Attributes:
        values: ``[V, B, G, o, i]``.
    """

    values: Tensor

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.values.shape[:2]
        self.shape = tuple(self.values.shape[2:])  # type: ignore[assignment]
        self.dtype, self.device = self.values.dtype, self.values.device

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.values[:, examples]

    @override
    def select(self, directions: Tensor) -> DenseStack:
        return DenseStack(self.values[directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> DenseStack:
        return DenseStack(self.values.to(dtype))


def _same(x: Tensor) -> Tensor:
    return x


@dataclass
class OuterStack(Stack):
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
    """

    raw_right: Tensor
    raw_left: Tensor
    expand_right: Callable[[Tensor], Tensor] = _same
    expand_left: Callable[[Tensor], Tensor] = _same
    compute_dtype: torch.dtype | None = None
    add_right_products: Callable[[Tensor, Tensor], None] | None = None

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.raw_left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.raw_left.dtype, torch.float32)
        self.device = self.raw_left.device
        with torch.no_grad():
            left, right = self.sides(slice(0, 1))
        self.n_positions = right.shape[1]
        # The groups may share one right side, which then has G = 1 and is broadcast.
        self.right_shape = (right.shape[2], right.shape[3])
        self.shape = (left.shape[3], left.shape[4], right.shape[3])

    @property
    def is_shared(self) -> bool:
        """Whether all examples have the same left side (an expanded tensor), as one-hot directions have."""
        return self.n_examples > 1 and self.n_positions == 1 and self.raw_left.stride(1) == 0

    def sides(self, examples: slice) -> tuple[Tensor, Tensor]:
        """Left ``[V, b, S, G, o]`` and right ``[b, S, G, i]`` side of some examples."""
        left = self.expand_left(self.raw_left[:, examples]).to(self.dtype)
        return left, self.right(examples)

    def right(self, examples: slice) -> Tensor:
        """Right side ``[b, S, G, i]`` of some examples."""
        return self.expand_right(self.raw_right[examples]).to(self.dtype)

    def side_chunks(self) -> Iterator[slice]:
        """Slices of the examples whose two sides are of bounded size."""
        groups, rows, columns = self.shape
        item = torch.finfo(self.dtype).bits // 8
        each = self.n_positions * groups * (self.n_directions * rows + columns) * item
        return slices(self.n_examples, each)

    @override
    def dense(self, examples: slice) -> Tensor:
        left, right = self.sides(examples)
        return torch.einsum("vbsgo,bsgi->vbgoi", left, right)

    @override
    def select(self, directions: Tensor) -> OuterStack:
        return replace(self, raw_left=self.raw_left[directions])

    @override
    def in_dtype(self, dtype: torch.dtype) -> OuterStack:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        groups, rows, columns = self.shape
        count, item = len(matrices), torch.finfo(self.dtype).bits // 8
        # Either every matrix of the stack is written out, or each row of its right side meets every U.
        written = self.n_directions * rows * columns * (self.n_positions + count)
        met = self.n_positions * rows * count * (columns + self.n_directions)
        if written < met:
            return Stack.project(self, matrices)
        parts, matrices = [], matrices.to(self.dtype)
        each = self.n_positions * groups * (rows * (count + self.n_directions) + columns) * item
        for examples in slices(self.n_examples, each):
            left, right = self.sides(examples)
            meeting = torch.einsum("bsgi,rgoi->bsgor", right, matrices)
            parts.append(torch.einsum("vbsgo,bsgor->vbr", left, meeting))
        return torch.cat(parts, 1)

    @override
    def squares(self) -> Tensor:
        if self.n_positions > 1:
            return Stack.squares(self)
        # Rank one: the square of an outer product is the outer product of squares.
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for examples in self.side_chunks():
            left, right = self.sides(examples)
            total += torch.einsum("bgo,bgi->goi", left[:, :, 0].square().sum(0), right[:, 0].square())
        return total

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if self.n_positions > 1:
            return Stack.quadratic(self, weights, mode)
        every = slice(0, self.n_examples)
        right = self.right(every)[:, 0]  # [B, G, i]
        left = self.expand_left(self.raw_left[:, :1] if self.is_shared else self.raw_left).to(self.dtype)[:, :, 0]
        if mode == "joint":
            cross = torch.einsum("bgi,goi,cgi->bcgo", right, weights, right)
            left = left.expand(-1, self.n_examples, -1, -1)
            return torch.einsum("vbgo,bcgo,wcgo->bvcw", left, cross, left)
        scale = torch.einsum("bgi,goi->bgo", right.square(), weights)
        if mode == "diagonal" and self.is_shared:
            return scale.flatten(1) @ left[:, 0].square().flatten(1).T
        if mode == "diagonal":
            return torch.einsum("vbgo,bgo->bv", left.square(), scale)
        left = left.expand(-1, self.n_examples, -1, -1)
        return torch.einsum("vbgo,bgo,wbgo->bvw", left, scale, left)


@dataclass
class SubsetStack(Stack):
    """Some entries of another stack's matrices, as ``[1, 1, n]`` matrices.

    Attributes:
        whole: The stack with all entries.
        positions: ``[n]`` positions in the flattened ``[G, o, i]`` array.
    """

    whole: Stack
    positions: Tensor

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.whole.n_directions, self.whole.n_examples
        self.dtype, self.device = self.whole.dtype, self.whole.device
        self.shape = (1, 1, len(self.positions))

    @override
    def dense(self, examples: slice) -> Tensor:
        return self.whole.dense(examples).flatten(2)[..., self.positions][:, :, None, None]

    @override
    def select(self, directions: Tensor) -> SubsetStack:
        return SubsetStack(self.whole.select(directions), self.positions)

    @override
    def in_dtype(self, dtype: torch.dtype) -> SubsetStack:
        return SubsetStack(self.whole.in_dtype(dtype), self.positions)


@dataclass
class JoinedStack(Stack):
    """Several stacks side by side, as ``[1, 1, n]`` matrices.

    Attributes:
        parts: Pairs of a stack and the ``[G, o, i]`` positions that its entries take among the n.
        size: n.
    """

    parts: list[tuple[Stack, Tensor]]
    size: int

    def __post_init__(self) -> None:
        first = self.parts[0][0]
        self.n_directions, self.n_examples, self.device = first.n_directions, first.n_examples, first.device
        self.dtype = first.dtype
        for stack, _ in self.parts:
            self.dtype = torch.promote_types(self.dtype, stack.dtype)
        self.shape = (1, 1, self.size)

    @override
    def dense(self, examples: slice) -> Tensor:
        result: Tensor | None = None
        for stack, positions in self.parts:
            values = stack.dense(examples)
            if result is None:
                result = torch.zeros(*values.shape[:2], self.size, dtype=self.dtype, device=self.device)
            result[..., positions.flatten().to(self.device)] = values.flatten(2).to(self.dtype)
        assert result is not None
        return result[:, :, None, None]

    @override
    def select(self, directions: Tensor) -> JoinedStack:
        return JoinedStack([(stack.select(directions), positions) for stack, positions in self.parts], self.size)

    @override
    def in_dtype(self, dtype: torch.dtype) -> JoinedStack:
        return JoinedStack([(stack.in_dtype(dtype), positions) for stack, positions in self.parts], self.size)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        parts = [stack.project(own).to(self.dtype) for stack, own in self._share(matrices)]
        return sum(parts[1:], parts[0])

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        parts = [
            stack.quadratic(own[0].to(stack.dtype), mode).to(self.dtype) for stack, own in self._share(weights[None])
        ]
        return sum(parts[1:], parts[0])

    def _share(self, values: Tensor) -> Iterator[tuple[Stack, Tensor]]:
        """Each part with its own entries of ``[r, 1, 1, n]`` values."""
        flat = values.flatten(1)
        for stack, positions in self.parts:
            yield stack, flat[:, positions.flatten().to(flat.device)].unflatten(1, stack.shape)


@dataclass
class MappedStack(Stack):
    """A stack whose matrices pass through a linear map as they are written out.

    Attributes:
        source: The stack.
        matrix: ``[G, n, n]``, applied to flattened ``[o·i]`` matrices from the right.
    """

    source: Stack
    matrix: Tensor

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples, self.shape = (
            self.source.n_directions,
            self.source.n_examples,
            self.source.shape,
        )
        self.dtype, self.device = self.source.dtype, self.source.device

    @override
    def dense(self, examples: slice) -> Tensor:
        values = self.source.dense(examples).flatten(3)  # [V, b, G, n]
        return torch.einsum("vbgn,gnm->vbgm", values, self.matrix.to(values.dtype)).unflatten(3, self.shape[1:])

    @override
    def select(self, directions: Tensor) -> MappedStack:
        return MappedStack(self.source.select(directions), self.matrix)

    @override
    def in_dtype(self, dtype: torch.dtype) -> MappedStack:
        return MappedStack(self.source.in_dtype(dtype), self.matrix)


def concatenate(stacks: list[OuterStack]) -> OuterStack:
    """The sum of stacks over the same matrices: several uses of one weight are positions of one use."""
    if len(stacks) == 1:
        return stacks[0]
    every = slice(None)
    lefts, rights = zip(*(stack.sides(every) for stack in stacks), strict=True)
    return OuterStack(torch.cat(rights, 1), torch.cat(lefts, 2), compute_dtype=stacks[0].dtype)


@dataclass
class OneHotStack(Stack):
    """Matrices whose right sides are unit vectors, as an embedding's are: column ``index_ns`` receives ``left_vns``.

    Attributes:
        index: ``[B, S]`` integers below ``n_columns``.
        left: ``[V, B, S, o]``.
        n_columns: i, the number of columns.
    """

    index: Tensor
    left: Tensor
    n_columns: int
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.n_directions, self.n_examples = self.left.shape[:2]
        self.dtype = self.compute_dtype or torch.promote_types(self.left.dtype, torch.float32)
        self.device = self.left.device
        self.shape = (1, self.left.shape[-1], self.n_columns)

    def compact(self, examples: slice) -> tuple[Tensor, Tensor]:
        """The matrices ``[V, b, 1, o, u]`` over the u columns that occur in these examples, and those columns."""
        columns, position = torch.unique(self.index[examples], return_inverse=True)
        left = self.left[:, examples].to(self.dtype)  # [V, b, S, o]
        values = left.new_zeros(*left.shape[:2], left.shape[3], len(columns))
        target = position[None, :, None, :].expand(left.shape[0], -1, left.shape[3], -1)
        return values.scatter_add(3, target, left.transpose(2, 3))[:, :, None], columns

    def compact_chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the examples with their :meth:`compact` form, of bounded size."""
        item = torch.finfo(self.dtype).bits // 8
        positions = self.index.shape[1]
        # u grows with the number of examples in a chunk, hence the square root.
        each = self.n_directions * self.shape[1] * positions * item
        step = max(1, int((CHUNK_BYTES / max(1, each)) ** 0.5))
        for start in range(0, self.n_examples, step):
            examples = slice(start, start + step)
            yield examples, *self.compact(examples)

    @override
    def dense(self, examples: slice) -> Tensor:
        compact, columns = self.compact(examples)
        values = compact.new_zeros(*compact.shape[:-1], self.n_columns)
        return values.index_copy(-1, columns, compact)

    @override
    def select(self, directions: Tensor) -> OneHotStack:
        return OneHotStack(self.index, self.left[directions], self.n_columns, self.compute_dtype)

    @override
    def in_dtype(self, dtype: torch.dtype) -> OneHotStack:
        return replace(self, compute_dtype=dtype)

    @override
    def project(self, matrices: Tensor) -> Tensor:
        parts = [DenseStack(values).project(matrices[..., columns]) for _, values, columns in self.compact_chunks()]
        return torch.cat(parts, 1)

    @override
    def squares(self) -> Tensor:
        total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for _, values, columns in self.compact_chunks():
            total.index_add_(2, columns, values.square().sum((0, 1)))
        return total

    @override
    def quadratic(self, weights: Tensor, mode: str) -> Tensor:
        if mode == "joint":
            values, columns = self.compact(slice(None))
            return DenseStack(values).quadratic(weights[:, :, columns], "joint")
        return torch.cat(
            [DenseStack(values).quadratic(weights[:, :, columns], mode) for _, values, columns in self.compact_chunks()]
        )
