"""Adding up a batch's curvature, a chunk of directions at a time, into the sums of all data.

Sums are updated in place. The inputs of a Kronecker factor are the same for every chunk of directions, so they enter
with the first one. Only where an attention mask hides tokens do they enter with the last one, when it is known that no
direction reaches the masked positions: the inputs at these are then left out, of ``Σ a aᵀ`` and of its count (or of
the mean over positions, where positions are summed first).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.layouts import CHANNELS, EMBEDDING, MATRIX, Layout
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Structure,
    used_differently,
)
from laplace_plus.curvature.token_masks import Padding, has_tokens, token_mask
from laplace_plus.errors import UnsupportedError
from laplace_plus.structured import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EmbeddingGradients,
    ExampleGradients,
    GramSum,
    KroneckerBlock,
    OuterGradients,
)
from laplace_plus.structured.chunks import slices
from laplace_plus.structured.kronecker import DiagonalOutputBlock

B = TypeVar("B", bound=Block)


class Accumulation(ABC):
    """Adds one batch's curvature to a sum.

    Args:
        gradients: The batch's per-example gradients.
        structure: What to add up.
        n_components: K.
        used: ``[B]``: whether an example has any target that is not ignored.
        total: The sum so far, which is added to.

    Attributes:
        total: The sum.
    """

    def __init__(
        self, gradients: Gradients, structure: Structure, n_components: int, used: Tensor, total: Curvature | None
    ):
        self.gradients, self.structure, self.n_components, self.used = gradients, structure, n_components, used
        self.total = Curvature([]) if total is None else total
        self._blocks = {layout.key: block for layout, block in self.total}
        self._is_begun = total is not None
        self._touched: set[str] = set()

    @abstractmethod
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        """Add the directions ``[V, B, *, C]``, which belong to components ``[V]``."""

    def finish(self) -> Curvature:
        """The sum, after all directions of the batch.

        Raises:
            DataError: The batch did not use every parameter in the way that earlier ones did.
        """
        if self._touched != self._blocks.keys():
            raise used_differently(sorted(self._touched ^ self._blocks.keys()))
        return self.total

    def block(self, layout: Layout, kind: type[B], create: Callable[[], B]) -> tuple[B, bool]:
        """The block of a layout, and whether this batch comes to it for the first time."""
        is_new = layout.key not in self._touched
        self._touched.add(layout.key)
        if layout.key not in self._blocks:
            if self._is_begun:
                raise used_differently([layout.key])
            self._blocks[layout.key] = create()
            self.total.blocks.append((layout, self._blocks[layout.key]))
        block = self._blocks[layout.key]
        if not isinstance(block, kind):
            raise used_differently([layout.key])
        return block, is_new

    def parts(self, stack: ExampleGradients, components: Tensor) -> list[ExampleGradients]:
        """The directions of each component."""
        return by_component(stack, components, self.n_components)

    def add_squares(self, layout: Layout, stack: ExampleGradients, components: Tensor) -> None:
        """Add the squared gradients to a diagonal block."""
        network = self.gradients.network

        def create() -> DiagonalBlock:
            shape = (self.n_components, *layout.shape)
            return DiagonalBlock(torch.zeros(shape, dtype=network.dtype, device=stack.device))

        block, _ = self.block(layout, DiagonalBlock, create)
        for number, part in enumerate(self.parts(stack, components)):
            if part.dtype == block.values.dtype:
                part.add_squares_(block.values[number])
            else:
                block.values[number] += part.squares()

    def add_outer_products(self, layout: Layout, stack: ExampleGradients, components: Tensor) -> None:
        """Add ``Σ_vn vec(P) vec(P)ᵀ`` to a dense block."""
        groups, rows, columns = layout.shape
        block, _ = self.block(
            layout, DenseBlock, lambda: DenseBlock(self._sums(groups, rows * columns, stack.device), layout.shape)
        )
        block.changed()
        for total, part in zip(block.sums, self.parts(stack, components), strict=True):
            for _, values in part.chunks():
                total.add_rows(values.flatten(3).flatten(0, 1).movedim(1, 0))  # [G, Vb, n]

    def _sums(self, groups: int, size: int, device: torch.device) -> list[GramSum]:
        dtype = self.gradients.network.dtype
        return [GramSum(groups, size, dtype=dtype, device=device) for _ in range(self.n_components)]


def by_component(stack: ExampleGradients, components: Tensor, n_components: int) -> list[ExampleGradients]:
    """The directions of each component."""
    if n_components == 1:
        return [stack]
    return [stack.select((components == k).nonzero().squeeze(-1)) for k in range(n_components)]


class DiagonalAccumulation(Accumulation):
    """For :class:`DiagonalStructure`."""

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        for layout, stack in self.gradients.stacks(cotangents):
            self.add_squares(layout, stack, components)


class FullAccumulation(Accumulation):
    """For :class:`FullStructure`."""

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        self.add_outer_products(*self.gradients.whole(cotangents), components)


class KroneckerAccumulation(Accumulation):
    """For :class:`KroneckerStructure`."""

    def __init__(
        self, gradients: Gradients, structure: Structure, n_components: int, used: Tensor, total: Curvature | None
    ):
        super().__init__(gradients, structure, n_components, used, total)
        capture = gradients.capture
        self._tokens = None if capture.pointwise else token_mask(capture.inputs, capture.n_examples)
        self._waiting: dict[str, _Inputs] = {}

    @override
    def finish(self) -> Curvature:
        for inputs in self._waiting.values():
            self._add_right(inputs.block, inputs.stack, inputs.layout, inputs.padding.kept())
        self._waiting.clear()
        return super().finish()

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        assert isinstance(self.structure, KroneckerStructure)
        for layout, stack in self.gradients.stacks(cotangents):
            if layout.rule in (MATRIX, EMBEDDING) and isinstance(stack, (OuterGradients, EmbeddingGradients)):
                self._add_products(layout, stack, components, self.structure.weight_sharing)
            elif layout.rule == CHANNELS or layout.n_entries <= self.structure.dense_limit:
                self.add_outer_products(layout, stack, components)
            else:
                self.add_squares(layout, stack, components)

    def _add_products(
        self, layout: Layout, stack: OuterGradients | EmbeddingGradients, components: Tensor, weight_sharing: str
    ) -> None:
        groups, rows, columns = layout.shape
        if isinstance(stack, OuterGradients) and self._keeps_diagonal(layout):
            self._add_diagonal_outputs(layout, stack, components, weight_sharing)
            return

        def create() -> KroneckerBlock:
            nothing = torch.zeros((), dtype=torch.float64)
            left = self._sums(groups, rows, stack.device)
            if isinstance(stack, EmbeddingGradients):
                counts = torch.zeros(groups, columns, dtype=self.gradients.network.dtype, device=stack.device)
                return KroneckerBlock(left, counts, nothing)
            # Groups that share their input (attention's projections) share its factor.
            return KroneckerBlock(left, self._sums(stack.right_shape[0], columns, stack.device)[0], nothing)

        block, is_new = self.block(layout, KroneckerBlock, create)
        block.changed()
        for total, part in zip(block.left_sums, self.parts(stack, components), strict=True):
            _add_left(total, part, weight_sharing)
        self._add_inputs(block, stack, layout, is_new)

    def _keeps_diagonal(self, layout: Layout) -> bool:
        """Whether this is the last layer, and so wide that its output factor is kept as a diagonal."""
        assert isinstance(self.structure, KroneckerStructure)
        capture, (groups, rows, _) = self.gradients.capture, layout.shape
        is_last = groups == 1 and rows == capture.output_shape[-1] and capture.last_used in layout.names
        return is_last and self.structure.keeps_diagonal(rows)

    def _add_diagonal_outputs(
        self, layout: Layout, stack: OuterGradients, components: Tensor, weight_sharing: str
    ) -> None:
        """Add ``Σ g²`` and ``Σ a aᵀ`` to the block of a last layer with many outputs."""

        def create() -> DiagonalOutputBlock:
            left = torch.zeros(self.n_components, *layout.shape[:2], dtype=self.gradients.network.dtype)
            right = self._sums(1, layout.shape[2], stack.device)[0]
            return DiagonalOutputBlock(left.to(stack.device), right, torch.zeros((), dtype=torch.float64))

        block, is_new = self.block(layout, DiagonalOutputBlock, create)
        block.changed()
        for number, part in enumerate(self.parts(stack, components)):
            assert isinstance(part, OuterGradients)
            for examples in part.side_chunks():
                left = part.expand_left(part.raw_left[:, examples])  # [V, b, S, 1, o]
                left = left.sum(2, keepdim=True) if weight_sharing == "reduce" else left
                block.left[number] += left.to(block.left.dtype).square().sum((0, 1, 2))
        self._add_inputs(block, stack, layout, is_new)

    def _add_inputs(
        self,
        block: KroneckerBlock | DiagonalOutputBlock,
        stack: OuterGradients | EmbeddingGradients,
        layout: Layout,
        is_new: bool,
    ) -> None:
        """Add the inputs with the first directions, or, where tokens are masked, keep them for :meth:`finish`."""
        if is_new and (self._tokens is None or not self._has_tokens(layout, stack)):
            self._add_right(block, stack, layout)
        elif is_new:
            assert self._tokens is not None
            self._waiting[layout.key] = _Inputs(block, _without_left(stack), layout, Padding(self._tokens, stack))
        if layout.key in self._waiting:
            self._waiting[layout.key].padding.note(stack)

    def _has_tokens(self, layout: Layout, stack: OuterGradients | EmbeddingGradients) -> bool:
        assert self._tokens is not None
        n_positions = stack.index.shape[1] if isinstance(stack, EmbeddingGradients) else stack.n_positions
        return has_tokens(layout, self.gradients.capture.calls, n_positions, self._tokens.shape[1])

    def _add_right(
        self,
        block: KroneckerBlock | DiagonalOutputBlock,
        stack: OuterGradients | EmbeddingGradients,
        layout: Layout,
        kept: Tensor | None = None,
    ) -> None:
        """Add ``Σ a aᵀ`` and its count, over all positions of used examples, or over those ``kept [B, S]``."""
        assert isinstance(self.structure, KroneckerStructure)
        expand = self.structure.weight_sharing == "expand"
        if isinstance(stack, EmbeddingGradients):
            assert isinstance(block.right_sum, Tensor)
            index = _checked(stack, self.structure.weight_sharing, layout)
            index = index[self.used] if kept is None else index[kept & self.used[:, None]]
            block.right_sum += torch.bincount(index.flatten(), minlength=stack.n_columns).to(block.right_sum)
            block.count = block.count + index.numel()
            return
        total = block.right_sum
        assert isinstance(total, GramSum)
        groups, width = stack.right_shape
        every = bool(self.used.all())
        for examples in slices(stack.n_examples, stack.n_positions * groups * width * 4):
            raw = stack.raw_right[examples] if every else stack.raw_right[examples][self.used[examples]]
            own = None if kept is None else kept[examples][self.used[examples]]
            direct = stack.add_right_products
            if expand and own is None and direct is not None and len(raw) * stack.n_positions >= width:
                total.add_products(partial(direct, raw))
                continue
            right = stack.expand_right(raw)  # [b, S, G, i]
            if own is not None:
                right = right[own] if expand else _means(right, own, total.dtype)
            else:
                right = right.flatten(0, 1) if expand else right.mean(1, dtype=total.dtype)
            total.add_rows(right.movedim(1, 0))
        if kept is None:
            block.count = block.count + int(self.used.sum()) * (stack.n_positions if expand else 1)
        else:
            own = kept[self.used]
            block.count = block.count + int(own.sum() if expand else own.any(1).sum())


@dataclass
class _Inputs:
    """A layer's inputs, to be added when it is known which of them are padding."""

    block: KroneckerBlock | DiagonalOutputBlock
    stack: OuterGradients | EmbeddingGradients
    layout: Layout
    padding: Padding


def _without_left(stack: OuterGradients | EmbeddingGradients) -> OuterGradients | EmbeddingGradients:
    """The stack in no direction, which holds on to its right side alone."""
    if isinstance(stack, EmbeddingGradients):
        return replace(stack, left=stack.left.new_empty(0, *stack.left.shape[1:]))
    return replace(stack, raw_left=stack.raw_left.new_empty(0, *stack.raw_left.shape[1:]))


def _means(right: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Means ``[n, G, i]`` of rows ``[b, S, G, i]`` over the ``kept [b, S]`` positions of the examples that have any."""
    sums = right.masked_fill(~kept[:, :, None, None], 0).sum(1, dtype=dtype)
    counts = kept.sum(1)[:, None, None]
    return (sums / counts.clamp(min=1))[kept.any(1)]


def _add_left(total: GramSum, stack: ExampleGradients, weight_sharing: str) -> None:
    """Add ``Σ g gᵀ``, ``[G, o, o]``."""
    if isinstance(stack, EmbeddingGradients):
        total.add_rows(stack.left.flatten(0, 2)[None])
        return
    assert isinstance(stack, OuterGradients)
    for examples in stack.side_chunks():
        left = stack.expand_left(stack.raw_left[:, examples])  # [V, b, S, G, o]
        if weight_sharing == "reduce":
            total.add_rows(left.sum(2, dtype=total.dtype).flatten(0, 1).movedim(1, 0))
        elif left.stride(-1) != 1 and left.shape[2] > 1:
            # Channels before pixels, as convolutions have them: columns are copied in runs, and rows would not be.
            columns = left.permute(3, 4, 0, 1, 2).flatten(2)
            total.add_rows(columns.mT)
        else:
            total.add_rows(left.flatten(0, 2).movedim(1, 0))


def _checked(stack: EmbeddingGradients, weight_sharing: str, layout: Layout) -> Tensor:
    """The look-ups ``[B, S]``, of which KFAC-reduce allows one for each example."""
    if weight_sharing == "reduce" and stack.index.shape[1] > 1:
        raise UnsupportedError(
            f"KFAC-reduce makes the input factor of {layout.names[0]!r} dense over its whole vocabulary.",
            expected='weight_sharing="expand" where embeddings are selected',
            got='weight_sharing="reduce"',
            fix='Use weight_sharing="expand", or leave the embedding out of the selection.',
        )
    return stack.index


ACCUMULATIONS: dict[type, type[Accumulation]] = {
    DiagonalStructure: DiagonalAccumulation,
    FullStructure: FullAccumulation,
    KroneckerStructure: KroneckerAccumulation,
}
