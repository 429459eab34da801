"""Adding up a batch's curvature, a chunk of cotangents at a time, into the sums of all data.

Sums are updated in place. The inputs of a Kronecker factor are the same for every chunk of cotangents, so they enter
with the first chunk. Where an attention mask hides tokens, they enter with the last chunk: a masked position is padding
if no cotangent's gradient reaches it. Padding is left out of ``Σ a aᵀ`` and of its count, or of the mean where
positions are summed first. A fit then does not depend on the longest sequence of each batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._memory import slices
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.structures import (
    CHANNELS,
    EMBEDDING,
    MATRIX,
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Layout,
    Structure,
    used_differently,
)
from laplace_plus.errors import ConfigurationError, UnsupportedError
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
from laplace_plus.structured.kronecker import DiagonalOutputBlock

B = TypeVar("B", bound=Block)

MASK_KEY = "attention_mask"
"""The key under which a mapping's inputs may hold a mask ``[B, T]``, zero for padding and one for tokens."""


class Accumulation(ABC):
    """Adds one batch's curvature to a sum.

    Args:
        gradients: The batch's per-example gradients.
        structure: The structure of the sum.
        n_components: K, the number of noise levels whose curvatures are kept apart.
        used: ``[B]``: whether an example has any target that is not ignored.
        total: The sum so far, which is added to; None begins one.

    Attributes:
        total: The sum.
        deferred: Functions that :meth:`finish` calls first.
    """

    def __init__(
        self, gradients: Gradients, structure: Structure, n_components: int, used: Tensor, total: Curvature | None
    ):
        self.gradients, self.structure, self.n_components, self.used = gradients, structure, n_components, used
        self.total = Curvature([]) if total is None else total
        self._is_begun = total is not None
        self._blocks: dict[str, Block] = {}
        for layout, block in self.total.blocks:
            self._blocks[layout.key] = block
        self._touched: set[str] = set()
        self.deferred: list[Callable[[], None]] = []

    @abstractmethod
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        """Add the cotangents ``[V, B, *, C]``, which belong to components ``[V]``."""

    def finish(self) -> Curvature:
        """The sum, after all cotangents of the batch.

        Raises:
            DataError: The batch did not use every parameter in the way that earlier ones did.
        """
        for late in self.deferred:
            late()
        if self._touched != self._blocks.keys():
            raise used_differently(sorted(self._touched ^ self._blocks.keys()))
        return self.total

    def blocks(self, cotangents: Tensor) -> Iterator[tuple[Layout, ExampleGradients]]:
        """Per-example gradients of each of the structure's blocks."""
        own = self.gradients.layouts
        layouts = self.structure.layouts(self.gradients.network, own)
        return self.gradients.blocks(cotangents, None if layouts is own else layouts)

    def block(self, layout: Layout, kind: type[B], create: Callable[[], B]) -> tuple[B, bool]:
        """The block of a layout, and whether this batch comes to it for the first time."""
        is_new = layout.key not in self._touched
        self._touched.add(layout.key)
        if layout.key not in self._blocks and not self._is_begun:
            self._blocks[layout.key] = create()
            self.total.blocks.append((layout, self._blocks[layout.key]))
        block = self._blocks.get(layout.key)
        if not isinstance(block, kind):
            raise used_differently([layout.key])
        return block, is_new

    def by_component(self, gradients: ExampleGradients, components: Tensor) -> list[ExampleGradients]:
        """The gradients of each component's cotangents."""
        if self.n_components == 1:
            return [gradients]
        return [gradients.select((components == k).nonzero().squeeze(-1)) for k in range(self.n_components)]

    def add_squares(self, layout: Layout, gradients: ExampleGradients, components: Tensor) -> None:
        """Add the squared gradients to a diagonal block."""

        def create() -> DiagonalBlock:
            shape, dtype = (self.n_components, *layout.shape), self.gradients.network.dtype
            return DiagonalBlock(torch.zeros(shape, dtype=dtype, device=gradients.device))

        block, _ = self.block(layout, DiagonalBlock, create)
        for total, part in zip(block.values, self.by_component(gradients, components), strict=True):
            if part.dtype == total.dtype:
                part.add_squares_(total)
            else:
                total += part.squares()

    def add_outer_products(self, layout: Layout, gradients: ExampleGradients, components: Tensor) -> None:
        """Add ``Σ_vn vec(P) vec(P)ᵀ`` to a dense block."""
        groups, rows, columns = layout.shape

        def create() -> DenseBlock:
            dtype, device = self.gradients.network.dtype, gradients.device
            size = rows * columns
            sums = [GramSum(groups, size, dtype=dtype, device=device) for _ in range(self.n_components)]
            return DenseBlock(sums, layout.shape)

        block, _ = self.block(layout, DenseBlock, create)
        block.changed()
        for total, part in zip(block.sums, self.by_component(gradients, components), strict=True):
            for _, values in part.chunks():
                total.add_rows(values.flatten(3).flatten(0, 1).movedim(1, 0))  # [G, Vb, n]


class DiagonalAccumulation(Accumulation):
    """A diagonal block for each of the structure's layouts."""

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        for layout, gradients in self.blocks(cotangents):
            self.add_squares(layout, gradients, components)


class DenseAccumulation(Accumulation):
    """A dense block for each of the structure's layouts."""

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        for layout, gradients in self.blocks(cotangents):
            self.add_outer_products(layout, gradients, components)


class KroneckerAccumulation(Accumulation):
    """For :class:`KroneckerStructure`."""

    structure: KroneckerStructure
    _tokens: Tensor | None = None
    _waiting: dict[str, _Inputs] | None = None

    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        capture = self.gradients.capture
        if self._waiting is None:
            self._waiting = {}
            if isinstance(capture.inputs, Mapping) and not capture.pointwise:
                self._tokens = token_mask(capture.inputs, capture.n_examples)
        for layout, gradients in self.gradients.blocks(cotangents):
            if layout.rule in (MATRIX, EMBEDDING) and isinstance(gradients, (OuterGradients, EmbeddingGradients)):
                self._add_product(layout, gradients, components)
            elif layout.rule == CHANNELS or layout.n_entries <= self.structure.dense_limit:
                self.add_outer_products(layout, gradients, components)
            else:
                self.add_squares(layout, gradients, components)

    def _add_product(self, layout: Layout, gradients: OuterGradients | EmbeddingGradients, components: Tensor) -> None:
        """Add ``Σ g gᵀ``, or ``Σ g²`` for a last layer with many outputs, and the inputs to a Kronecker block."""
        groups, rows, columns = layout.shape
        capture, device = self.gradients.capture, gradients.device
        is_last = groups == 1 and rows == capture.output_shape[-1] and capture.last_used in layout.names
        diagonal = is_last and isinstance(gradients, OuterGradients) and self.structure.keeps_diagonal(rows)

        def create() -> KroneckerBlock | DiagonalOutputBlock:
            nothing, dtype = torch.zeros((), dtype=torch.float64), self.gradients.network.dtype
            if isinstance(gradients, EmbeddingGradients):
                right: Any = torch.zeros(groups, columns, dtype=dtype, device=device)
            else:  # groups that share their input (attention's projections) share its factor
                right = GramSum(gradients.right_shape[0], columns, dtype=dtype, device=device)
            if diagonal:
                left = torch.zeros(self.n_components, groups, rows, dtype=dtype, device=device)
                return DiagonalOutputBlock(left, right, nothing)
            sums = []
            for _ in range(self.n_components):
                sums.append(GramSum(groups, rows, dtype=dtype, device=device))
            return KroneckerBlock(sums, right, nothing)

        kind: Any = DiagonalOutputBlock if diagonal else KroneckerBlock
        block, is_new = self.block(layout, kind, create)
        block.changed()
        parts = [gradients] if self.n_components == 1 else self.by_component(gradients, components)
        for total, part in zip(block.left if diagonal else block.left_sums, parts, strict=True):
            _add_left(total, part, self.structure.weight_sharing == "reduce")
        if self._tokens is not None and self._await(block, gradients, layout, self._tokens, is_new):
            return
        if is_new:
            self._add_inputs(block, gradients, layout)

    def _await(
        self, block: Any, gradients: OuterGradients | EmbeddingGradients, layout: Layout, tokens: Tensor, is_new: bool
    ) -> bool:
        """Defer the inputs of a layer whose positions are those of the tokens; False for other layers."""
        assert self._waiting is not None
        if is_new and self._are_tokens(layout, gradients, tokens.shape[1]):
            inputs = self._waiting[layout.key] = _Inputs(gradients, tokens)
            self.deferred.append(lambda: self._add_inputs(block, inputs.gradients, layout, inputs.kept()))
        if layout.key in self._waiting:
            self._waiting[layout.key].note(gradients)
        return layout.key in self._waiting

    def _are_tokens(self, layout: Layout, gradients: OuterGradients | EmbeddingGradients, n_tokens: int) -> bool:
        """Whether a block's positions are those of the tokens, once for each use of its weight."""
        uses, names = Counter(call.rows for call in self.gradients.capture.calls), set(layout.names)
        own = [count for rows, count in uses.items() if {part.name for part in rows} == names]
        return any(_n_positions(gradients) == count * n_tokens for count in own)

    def _add_inputs(
        self, block: Any, gradients: OuterGradients | EmbeddingGradients, layout: Layout, kept: Tensor | None = None
    ) -> None:
        """Add ``Σ a aᵀ`` and its count, over all positions of used examples, or over those ``kept [B, S]``."""
        expand, total = self.structure.weight_sharing == "expand", block.right_sum
        if isinstance(gradients, EmbeddingGradients):
            if not expand and gradients.index.shape[1] > 1:
                raise UnsupportedError(
                    f"KFAC-reduce makes the input factor of {layout.names[0]!r} dense over its whole vocabulary.",
                    expected='weight_sharing="expand" where embeddings are selected',
                    got='weight_sharing="reduce"',
                    fix='Use weight_sharing="expand", or leave the embedding out of the selection.',
                )
            index = gradients.index[self.used] if kept is None else gradients.index[kept & self.used[:, None]]
            total += torch.bincount(index.flatten(), minlength=gradients.n_columns).to(total)
            block.count = block.count + index.numel()
            return
        groups, width = gradients.right_shape
        every = bool(self.used.all())
        for examples in slices(gradients.n_examples, gradients.n_positions * groups * width * 4):
            raw = gradients.raw_right[examples] if every else gradients.raw_right[examples][self.used[examples]]
            own = None if kept is None else kept[examples][self.used[examples]]
            direct = gradients.add_right_products
            if expand and own is None and direct is not None and len(raw) * gradients.n_positions >= width:
                total.add_products(partial(direct, raw))
                continue
            right = gradients.expand_right(raw)  # [b, S, G, i]
            if own is not None:
                right = right[own] if expand else _means(right, own, total.dtype)
            else:
                right = right.flatten(0, 1) if expand else right.mean(1, dtype=total.dtype)
            total.add_rows(right.movedim(1, 0))
        if kept is None:
            block.count = block.count + int(self.used.sum()) * (gradients.n_positions if expand else 1)
        else:
            own = kept[self.used]
            block.count = block.count + int(own.sum() if expand else own.any(1).sum())


def _add_left(total: Any, gradients: ExampleGradients, reduce: bool) -> None:
    """Add ``Σ g gᵀ`` to sums ``[G, o, o]``, or ``Σ g²`` to a tensor ``[G, o]``."""
    if isinstance(gradients, EmbeddingGradients):
        total.add_rows(gradients.left.flatten(0, 2)[None])
        return
    assert isinstance(gradients, OuterGradients)
    for examples in gradients.side_chunks():
        left = gradients.expand_left(gradients.raw_left[:, examples])  # [V, b, S, G, o]
        left = left.sum(2, keepdim=True, dtype=total.dtype) if reduce else left
        if isinstance(total, Tensor):
            total += left.to(total.dtype).square().sum((0, 1, 2))
        elif left.stride(-1) != 1 and left.shape[2] > 1:
            # Channels before pixels, as convolutions have them: contiguous runs are copied for columns, not for rows.
            total.add_rows(left.permute(3, 4, 0, 1, 2).flatten(2).mT)
        else:
            total.add_rows(left.flatten(0, 2).movedim(1, 0))


# -- padding -----------------------------------------------------------------------------------------------------------


def token_mask(inputs: Any, n_examples: int) -> Tensor | None:
    """The mask among a batch's inputs as ``[B, T]``, true for tokens; None where there is none or it hides nothing."""
    mask = inputs.get(MASK_KEY) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != n_examples:
        return None
    tokens = mask != 0
    is_mask = torch.equal(tokens.to(mask.dtype), mask)  # and not numbers that are added to the attention scores
    return None if not is_mask or bool(tokens.all()) else tokens


@dataclass
class _Inputs:
    """A layer's inputs, which wait until all cotangents have told which positions are padding.

    A masked position may count all the same: the mask may be about another sequence of the same length (a decoder's
    positions under the encoder's mask), or the network may ignore it. So an example's masked positions are padding if
    no output gradient of any cotangent reaches them, however data and cotangents are cut.
    """

    gradients: OuterGradients | EmbeddingGradients
    tokens: Tensor

    def __post_init__(self) -> None:
        own = self.gradients
        self.tokens = self.tokens.to(own.device).repeat(1, _n_positions(own) // self.tokens.shape[1])
        self.is_reached = torch.zeros(len(self.tokens), dtype=torch.bool, device=own.device)
        # Without output gradients (V = 0): only the inputs are kept.
        if isinstance(own, EmbeddingGradients):
            self.gradients = replace(own, left=own.left.new_empty(0, *own.left.shape[1:]))
        else:
            self.gradients = replace(own, raw_left=own.raw_left.new_empty(0, *own.raw_left.shape[1:]))

    def note(self, gradients: OuterGradients | EmbeddingGradients) -> None:
        """Take some cotangents into account."""
        masked = ~self.tokens
        if isinstance(gradients, EmbeddingGradients):
            self.is_reached |= ((gradients.left != 0).any(-1).any(0) & masked).any(1)
            return
        for examples in gradients.side_chunks():
            left = gradients.expand_left(gradients.raw_left[:, examples])  # [V, b, S, G, o]
            self.is_reached[examples] |= ((left != 0).flatten(3).any(-1).any(0) & masked[examples]).any(1)

    def kept(self) -> Tensor:
        """``[B, S]``: the positions that are not padding."""
        return self.tokens | self.is_reached[:, None]


def _n_positions(gradients: OuterGradients | EmbeddingGradients) -> int:
    return gradients.index.shape[1] if isinstance(gradients, EmbeddingGradients) else gradients.n_positions


def _means(right: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Means ``[n, G, i]`` of rows ``[b, S, G, i]`` over the ``kept [b, S]`` positions of the examples that have any."""
    sums = right.masked_fill(~kept[:, :, None, None], 0).sum(1, dtype=dtype)
    counts = kept.sum(1)[:, None, None]
    return (sums / counts.clamp(min=1))[kept.any(1)]


# -- structures --------------------------------------------------------------------------------------------------------

ACCUMULATIONS: dict[type[Structure], type[Accumulation]] = {
    DiagonalStructure: DiagonalAccumulation,
    FullStructure: DenseAccumulation,
    KroneckerStructure: KroneckerAccumulation,
}


def register_structure(structure: type[Structure], accumulation: type[Accumulation]) -> None:
    """Tell the native backend how the curvature of a structure is added up.

    Args:
        structure: A subclass of :class:`Structure`.
        accumulation: How its blocks are added up: :class:`DenseAccumulation`, :class:`DiagonalAccumulation`, or another
            subclass of :class:`Accumulation`.

    Raises:
        ConfigurationError: The structure is registered with another accumulation.
    """
    if ACCUMULATIONS.get(structure, accumulation) is not accumulation:
        raise ConfigurationError(
            f"{structure.__name__} is registered already.",
            expected="a new structure",
            got=f"one that {ACCUMULATIONS[structure].__name__} adds up",
        )
    ACCUMULATIONS[structure] = accumulation
