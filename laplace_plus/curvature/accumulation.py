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
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Structure,
    used_differently,
)
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.network.gradients import Gradients
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
from laplace_plus.structured.chunks import MIB, slices
from laplace_plus.structured.layout import CHANNELS, EMBEDDING, GENERAL, MATRIX, Layout
from laplace_plus.structured.limited_rank import gram_sum

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
        self._blocks: dict[str, Block] = {}
        for layout, block in self.total.blocks:
            self._blocks[layout.key] = block
        self._touched: set[str] = set()
        self.deferred: list[Callable[[], None]] = []

    @abstractmethod
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        """Add the cotangents ``[V, B, *, C]``, which belong to components ``[V]``."""

    def finish(self) -> Curvature:
        """The sum, after all cotangents; blocks that no batch has used so far are zero."""
        for late in self.deferred:
            late()
        covered: set[str] = set()
        for layout, _ in self.total.blocks:
            covered.update(layout.names)
        for layout in self.gradients.layouts:
            if covered.isdisjoint(layout.names):
                network = self.gradients.network
                zeros = torch.zeros((self.n_components, *layout.shape), dtype=network.dtype, device=network.device)
                self.total.blocks.append((layout, DiagonalBlock(zeros)))
        return self.total

    def blocks(self, cotangents: Tensor) -> Iterator[tuple[Layout, ExampleGradients]]:
        """Per-example gradients of each of the structure's blocks, those of earlier batches where they can be."""
        own = self.gradients.layouts
        layouts = self.structure.layouts(self.gradients.network, own)
        if layouts is own:
            known: dict[str, list[Layout]] = {}
            for layout, block in self.total.blocks:
                if layout.rule != GENERAL or _holds(block):
                    for name in layout.names:
                        known.setdefault(name, []).append(layout)
            chosen: dict[str, Layout] = {}
            for layout in own:
                for name in layout.names:
                    for earlier in known.get(name, [layout]):
                        chosen[earlier.key] = earlier
            layouts = list(chosen.values())
        return self.gradients.blocks(cotangents, layouts)

    def block(self, layout: Layout, kind: type[B], create: Callable[[], B]) -> tuple[B, bool]:
        """The block of a layout, and whether this batch comes to it for the first time."""
        is_new = layout.key not in self._touched
        self._touched.add(layout.key)
        if layout.key not in self._blocks:
            self._make_room(layout)
            self._blocks[layout.key] = create()
            self.total.blocks.append((layout, self._blocks[layout.key]))
        block = self._blocks[layout.key]
        if not isinstance(block, kind):
            raise used_differently([layout.key])
        return block, is_new

    def _make_room(self, layout: Layout) -> None:
        """Take out zero blocks of parameters that no earlier batch has used; DataError if one has used them otherwise.

        Several blocks of one rule may share a parameter, as those of attention do.
        """
        others, shared, is_used, is_alike = [], [], False, True
        for own, block in self.total.blocks:
            if set(own.names).isdisjoint(layout.names):
                others.append((own, block))
                continue
            shared.append(own.key)
            is_used = is_used or own.rule != GENERAL or _holds(block)
            is_alike = is_alike and own.rule == layout.rule
        if is_used and not is_alike:
            raise used_differently([layout.key])
        if not is_used:
            self.total.blocks = others
            for key in shared:
                self._blocks.pop(key, None)

    def add_squares(self, layout: Layout, gradients: ExampleGradients, components: Tensor) -> None:
        """Add the squared gradients to a diagonal block."""
        shape, dtype = (self.n_components, *layout.shape), self.gradients.network.dtype
        zeros = partial(torch.zeros, shape, dtype=dtype, device=gradients.device)
        self.block(layout, DiagonalBlock, lambda: DiagonalBlock(zeros()))[0].add(gradients, components)

    def add_outer_products(self, layout: Layout, gradients: ExampleGradients, components: Tensor) -> None:
        """Add ``Σ_vn vec(P) vec(P)ᵀ`` to a dense block."""
        groups, rows, columns = layout.shape
        gram = partial(GramSum, dtype=self.gradients.network.dtype, device=gradients.device)
        sums = [gram(groups, rows * columns) for _ in range(self.n_components)]
        self.block(layout, DenseBlock, partial(DenseBlock, sums, layout.shape))[0].add(gradients, components)


def _holds(block: Block) -> bool:
    """Whether anything was added to a block."""
    return any(bool(tensor.any()) for tensor in block.tensors().values())


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
        for layout, gradients in self.blocks(cotangents):
            if layout.rule in (MATRIX, EMBEDDING) and isinstance(gradients, (OuterGradients, EmbeddingGradients)):
                self._add_product(layout, gradients, components)
            elif layout.rule == CHANNELS or layout.n_entries <= self.structure.dense_limit:
                self.add_outer_products(layout, gradients, components)
            else:
                self.add_squares(layout, gradients, components)

    def _add_product(self, layout: Layout, gradients: OuterGradients | EmbeddingGradients, components: Tensor) -> None:
        """Add ``Σ g gᵀ``, or ``Σ g²`` for a last layer with many outputs, and the inputs to a Kronecker block."""
        groups, rows, columns = layout.shape
        capture, k = self.gradients.capture, self.n_components
        options: Any = {"dtype": self.gradients.network.dtype, "device": gradients.device}
        is_last = groups == 1 and rows == capture.output_shape[-1] and capture.last_used in layout.names
        diagonal = is_last and rows > self.structure.dense_outputs and isinstance(gradients, OuterGradients)
        if isinstance(gradients, EmbeddingGradients):
            right: Any = torch.zeros(groups, columns, **options)
        else:  # groups that share their input (attention's projections) share its factor
            right = gram_sum(gradients.right_shape[0], columns, self.structure.factor_rank, **options)
        left: Any = []
        if diagonal:
            left = torch.zeros(k, 1, rows, **options)
        else:
            for _ in range(k):
                left.append(gram_sum(groups, rows, None if is_last else self.structure.factor_rank, **options))
        nothing = torch.zeros((), dtype=torch.float64)
        block, is_new = self.block(layout, KroneckerBlock, partial(KroneckerBlock, left, right, nothing))
        block.add(gradients, components, summed=self.structure.weight_sharing == "reduce")
        waits = self._tokens is not None and self._await(block, gradients, layout, self._tokens, is_new)
        if is_new and not waits:
            self._add_inputs(block, gradients, layout)

    def _await(
        self, block: Any, gradients: OuterGradients | EmbeddingGradients, layout: Layout, tokens: Tensor, is_new: bool
    ) -> bool:
        """Defer the inputs of a layer whose positions are those of the tokens; False for other layers."""
        assert self._waiting is not None
        names = set(layout.names)
        uses = Counter(call.rows for call in self.gradients.capture.calls if {part.name for part in call.rows} == names)
        # The tokens may come once for each use of the weight.
        if is_new and any(gradients.n_positions == count * tokens.shape[1] for count in uses.values()):
            inputs = self._waiting[layout.key] = _Inputs(gradients, tokens)
            self.deferred.append(lambda: self._add_inputs(block, inputs.gradients, layout, inputs.kept()))
        if layout.key in self._waiting:
            self._waiting[layout.key].note(gradients)
        return layout.key in self._waiting

    def _add_inputs(
        self, block: Any, gradients: OuterGradients | EmbeddingGradients, layout: Layout, kept: Tensor | None = None
    ) -> None:
        """Add ``Σ a aᵀ`` and its count, over all positions of used examples, or over those ``kept [B, S]``."""
        expand, total, n_positions = self.structure.weight_sharing == "expand", block.right_sum, gradients.n_positions
        own = None if kept is None else kept[self.used]
        if own is None:
            block.count = block.count + int(self.used.sum()) * (n_positions if expand else 1)
        else:
            block.count = block.count + int(own.sum() if expand else own.any(1).sum())
        if isinstance(gradients, EmbeddingGradients):
            if not expand and n_positions > 1:
                what = f"KFAC-reduce makes the input factor of {layout.names[0]!r} dense over its whole vocabulary."
                expected = 'weight_sharing="expand" where embeddings are selected'
                fix = 'Use weight_sharing="expand", or leave the embedding out of the selection.'
                raise UnsupportedError(what, expected=expected, got='weight_sharing="reduce"', fix=fix)
            index = gradients.index[self.used] if own is None else gradients.index[self.used][own]
            total.values += torch.bincount(index.flatten(), minlength=gradients.n_columns).to(total.values)
            return
        groups, width = gradients.right_shape
        every = bool(self.used.all())
        for examples in slices(gradients.n_examples, n_positions * groups * width * 4, 256 * MIB):
            raw = gradients.raw_right[examples] if every else gradients.raw_right[examples][self.used[examples]]
            own = None if kept is None else kept[examples][self.used[examples]]
            direct = gradients.add_right_products if total.rank is None else None
            if expand and own is None and direct is not None and len(raw) * n_positions >= width:
                direct(raw, total.lower())
                continue
            right = gradients.expand_right(raw)  # [b, S, G, i]
            if own is not None:
                right = right[own] if expand else _means(right, own, total.dtype)
            else:
                right = right.flatten(0, 1) if expand else right.mean(1, dtype=total.dtype)
            total.add_rows(right.movedim(1, 0))


# -- padding -----------------------------------------------------------------------------------------------------------


def token_mask(inputs: Any, n_examples: int) -> Tensor | None:
    """The mask among a batch's inputs as ``[B, T]``, true for tokens; None where there is none or it hides nothing."""
    mask = inputs.get(MASK_KEY) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != n_examples:
        return None
    tokens = mask != 0
    is_mask = torch.equal(tokens.to(mask.dtype), mask)  # and not numbers that are added to the attention scores
    return None if not is_mask or bool(tokens.all()) else tokens


class _Inputs:
    """A layer's inputs, which wait until all cotangents have told which positions are padding.

    A masked position may count all the same. The network may ignore the mask, or the mask may be about another sequence
    of the same length (a decoder's positions under the encoder's mask). So an example's masked positions are padding if
    no output gradient of any cotangent reaches them, however data and cotangents are cut.
    """

    def __init__(self, gradients: OuterGradients | EmbeddingGradients, tokens: Tensor):
        self.gradients = gradients.select(torch.zeros(0, dtype=torch.long))  # only the inputs are kept
        self.tokens = tokens.to(gradients.device).repeat(1, gradients.n_positions // tokens.shape[1])
        self.is_reached = torch.zeros(len(tokens), dtype=torch.bool, device=gradients.device)

    def note(self, gradients: OuterGradients | EmbeddingGradients) -> None:
        """Take some cotangents into account."""
        for examples in gradients.side_chunks():
            left = gradients.expand_left(gradients.raw_left[:, examples])  # [V, b, S, G, o]
            reached = (left != 0).flatten(3).any(-1).any(0)  # [b, S]
            self.is_reached[examples] |= (reached & ~self.tokens[examples]).any(1)

    def kept(self) -> Tensor:
        """``[B, S]``: the positions that are not padding."""
        return self.tokens | self.is_reached[:, None]


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
        got = f"one that {ACCUMULATIONS[structure].__name__} adds up"
        raise ConfigurationError(f"{structure.__name__} is registered already.", expected="a new structure", got=got)
    ACCUMULATIONS[structure] = accumulation
