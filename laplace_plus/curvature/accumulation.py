"""Adding up a batch's curvature, a chunk of cotangents at a time, into the sums of all data.

Sums are updated in place. The inputs of a Kronecker factor are the same for every chunk of cotangents, so they enter
with the first chunk. Where an attention mask hides tokens, or where examples share rows, they enter with the last
chunk: what no cotangent's gradient reaches is padding, or a row of other examples. It is left out of ``Σ a aᵀ`` and of
its count, or of the mean where positions are summed first. A fit then does not depend on the longest sequence of each
batch, nor on which examples a batch joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature.structures import Curvature, Structure, used_differently
from laplace_plus.errors import UnsupportedError
from laplace_plus.network.gradients import Gradients
from laplace_plus.structured import Block, DiagonalBlock, EmbeddingGradients, KroneckerBlock, OuterGradients
from laplace_plus.structured.composed import SummedGradients
from laplace_plus.structured.gradients import MIB, slices
from laplace_plus.structured.layout import GENERAL, Layout

MASK_KEY = "attention_mask"
"""The key under which a mapping's inputs may hold a mask ``[B, T]``, zero for padding and one for tokens."""


class Accumulation:
    """Adds one batch's curvature to a sum.

    Args:
        gradients: The batch's per-example gradients.
        structure: The structure of the sum.
        n_components: K, the number of noise levels whose curvatures are kept apart.
        share: ``[B]``: how often an example counts, 0 where all of its targets are ignored.
        total: The sum so far, which is added to; None begins one.

    Attributes:
        together: Whether each cotangent is of all examples together, whose gradients are then summed; but a Kronecker
            factor is of the single rows' own curvatures.
        corrects: Whether this is the second pass of EKFAC, which adds to the eigenvalues alone.
    """

    together = False

    def __init__(
        self, gradients: Gradients, structure: Structure, n_components: int, share: Tensor, total: Curvature | None
    ):
        self.gradients, self.structure, self.n_components = gradients, structure, n_components
        self.used, self._share = share > 0, share
        ones, every, self._kept = torch.stack([(share == 1).sum(), self.used.sum(), share.double().sum()]).tolist()
        self._is_weighted, self._every = ones < every, every == len(share)  # a card is waited for once
        self.total = Curvature([]) if total is None else total
        self._is_first = True  # chunk of cotangents
        self._expands = getattr(structure, "weight_sharing", "expand") == "expand"  # positions as examples of their own
        self.corrects = False
        self._waiting: dict[str, _Inputs] = {}
        capture = gradients.capture
        self._tokens: Any = None
        if isinstance(capture.inputs, Mapping) and not capture.pointwise:
            self._tokens = token_mask(capture.inputs, capture.n_examples)
        self._blocks: dict[str, Block] = {}
        self._goes_on = bool(self.total.blocks)
        known: dict[str, list[Layout]] = {}  # by the names of parameters, how earlier batches use them
        for layout, block in self.total.blocks:
            self._blocks[layout.key] = block
            self.corrects = self.corrects or (isinstance(block, KroneckerBlock) and block.corrected is not None)
            if layout.rule != GENERAL or not block.is_zero():
                for name in layout.names:
                    known.setdefault(name, []).append(layout)
        self.layouts = structure.layouts(gradients.network, gradients.layouts)
        if known and self.layouts is gradients.layouts:
            chosen: dict[str, Layout] = {}
            for layout in self.layouts:
                for name in layout.names:
                    for earlier in known.get(name, [layout]):
                        chosen[earlier.key] = earlier
            self.layouts = [*chosen.values()]

    def add(self, cotangents: Tensor, components: Tensor) -> None:
        """Add the cotangents ``[V, B, *, C]``, which belong to components ``[V]``."""
        for layout, own in self.gradients.blocks(cotangents, self.layouts):
            block = self._blocks.get(layout.key)
            summed = SummedGradients(own) if self.together else own
            if self.corrects:
                if isinstance(block, KroneckerBlock):
                    block.add(summed, components)
                continue
            if block is None:
                capture, dtype = self.gradients.capture, self.gradients.network.dtype
                is_last = layout.shape[1] == capture.output_shape[-1] and capture.last_used in layout.names
                if self._goes_on:
                    self._make_room(layout)
                block = self.structure.create(layout, own, self.n_components, dtype, is_last=is_last)
                self._blocks[layout.key] = block
                self.total.blocks.append((layout, block))
            if not isinstance(block, KroneckerBlock):
                block.add(summed, components)
                continue
            if not isinstance(own, (OuterGradients, EmbeddingGradients)):
                raise used_differently([layout.key])
            block.add(own, components, summed=not self._expands)
            if self._is_first:
                is_hidden = self._tokens is not None and self._are_tokens(own, layout)
                if own.shares_rows or is_hidden:
                    self._waiting[layout.key] = _Inputs(block, own, layout, self._tokens if is_hidden else None)
                else:
                    self._add_inputs(block, own, layout)
            if layout.key in self._waiting:
                self._waiting[layout.key].note(own)
        self._is_first = False

    def finish(self) -> Curvature:
        """The sum, after all cotangents; blocks that no batch has used so far are zero."""
        for inputs in self._waiting.values():
            self._add_inputs(inputs.block, inputs.gradients, inputs.layout, inputs.kept())
        covered: set[str] = set()
        for layout, _ in self.total.blocks:
            covered.update(layout.names)
        for layout in self.gradients.layouts:
            if covered.isdisjoint(layout.names):
                network = self.gradients.network
                zeros = torch.zeros((self.n_components, *layout.shape), dtype=network.dtype, device=network.device)
                self.total.blocks.append((layout, DiagonalBlock(zeros)))
        return self.total

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
            is_used = is_used or own.rule != GENERAL or not block.is_zero()
            is_alike = is_alike and own.rule == layout.rule
        if is_used and not is_alike:
            raise used_differently([layout.key])
        if not is_used:
            self.total.blocks = others
            for key in shared:
                self._blocks.pop(key, None)

    def _are_tokens(self, gradients: OuterGradients | EmbeddingGradients, layout: Layout) -> bool:
        """Whether a layer's positions are those of the tokens, which may come once for each use of the weight."""
        for rows, members in self.gradients.capture.groups.items():
            is_of_layer = {part.name for part in rows} == set(layout.names)
            if is_of_layer and gradients.n_positions == len(members) * self._tokens.shape[1]:
                return True
        return False

    def _add_inputs(
        self, block: Any, gradients: OuterGradients | EmbeddingGradients, layout: Layout, kept: Tensor | None = None
    ) -> None:
        """Add ``Σ w a aᵀ`` and ``Σ w``, over all positions of used examples, or over those ``kept [B, S]``."""
        expand, total, n_positions = self._expands, block.right_sum, gradients.n_positions
        share = self._share if self._every else self._share[self.used]
        own = None if kept is None else kept[self.used]
        if own is None:
            block.count = block.count + self._kept * (n_positions if expand else 1)
        else:
            block.count = block.count + float((share.double() * (own.sum(1) if expand else own.any(1))).sum())
        if isinstance(gradients, EmbeddingGradients):
            if not expand and n_positions > 1:
                what = f"KFAC-reduce makes the input factor of {layout.names[0]!r} dense over its whole vocabulary."
                expected = 'weight_sharing="expand" where embeddings are selected'
                fix = 'Use weight_sharing="expand", or leave the embedding out of the selection.'
                raise UnsupportedError(what, expected=expected, got='weight_sharing="reduce"', fix=fix)
            index = gradients.index[self.used]
            own = torch.ones_like(index, dtype=torch.bool) if own is None else own
            counts = torch.bincount(index[own], share[:, None].expand(own.shape)[own], minlength=gradients.n_columns)
            total.values += counts.to(total.values)
            return
        groups, width = gradients.right_shape
        for examples in slices(gradients.n_examples, n_positions * groups * width * 4, 256 * MIB):
            raw = gradients.raw_right[examples] if self._every else gradients.raw_right[examples][self.used[examples]]
            own = None if kept is None else kept[examples][self.used[examples]]
            direct = None if self._is_weighted or total.rank is not None else gradients.add_right_products
            if expand and own is None and direct is not None and len(raw) * n_positions >= width:
                direct(raw, total.lower())
                continue
            right = gradients.expand_right(raw)  # [b, S, G, i]
            if self._is_weighted:
                share = self._share[examples][self.used[examples]]
                right = right * share.sqrt()[:, None, None, None]
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
    """A layer's inputs, which wait until all cotangents have told which positions count.

    Of rows of the whole batch, each example's are those that its output gradients reach. A masked position may count
    all the same: the network may ignore the mask, or the mask may be about another sequence of the same length (a
    decoder's positions under the encoder's mask). So an example's masked positions are padding if no output gradient of
    any cotangent reaches them, however data and cotangents are cut.
    """

    def __init__(
        self,
        block: KroneckerBlock,
        gradients: OuterGradients | EmbeddingGradients,
        layout: Layout,
        tokens: Tensor | None,
    ):
        self.block, self.layout = block, layout
        self.gradients = gradients.select(torch.zeros(0, dtype=torch.long))  # only the inputs are kept
        n, size, device = gradients.n_examples, gradients.n_positions, gradients.device
        self.tokens = None if tokens is None else tokens.to(device).repeat(1, size // tokens.shape[1])
        self.is_reached = torch.zeros(n, size, dtype=torch.bool, device=device)

    def note(self, gradients: OuterGradients | EmbeddingGradients) -> None:
        """Take some cotangents into account."""
        left = gradients.expand_left(gradients.raw_left)  # [V, B, S, G, o]
        self.is_reached |= (left != 0).flatten(3).any(-1).any(0)

    def kept(self) -> Tensor:
        """``[B, S]``: the positions that count."""
        if self.tokens is None:
            return self.is_reached
        return self.tokens | (self.is_reached & ~self.tokens).any(1, keepdim=True)


def _means(right: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Means ``[n, G, i]`` of rows ``[b, S, G, i]`` over the ``kept [b, S]`` positions of the examples that have any."""
    sums = right.masked_fill(~kept[:, :, None, None], 0).sum(1, dtype=dtype)
    counts = kept.sum(1)[:, None, None]
    return (sums / counts.clamp(min=1))[kept.any(1)]
