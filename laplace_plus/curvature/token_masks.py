"""Which positions of a layer's input are padding.

Sequences of different lengths are padded to one length T and come with an attention mask ``[B, T]``. Padding has no
part in the loss, but its activations would enter the input factors of Kronecker curvature, and make a fit depend on how
long the longest sequence of each batch is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature.calls import Call
from laplace_plus.curvature.layouts import Layout
from laplace_plus.structured import EmbeddingGradients, OuterGradients

MASK_KEY = "attention_mask"
"""The key under which a mapping's inputs may hold a mask ``[B, T]``, zero for padding and one for tokens."""


def token_mask(inputs: Any, n_examples: int) -> Tensor | None:
    """The mask among a batch's inputs as ``[B, T]``, true for tokens; None where there is none or it hides nothing."""
    mask = inputs.get(MASK_KEY) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != n_examples:
        return None
    tokens = mask != 0
    is_mask = torch.equal(tokens.to(mask.dtype), mask)  # and not numbers that are added to the scores, say
    return None if not is_mask or bool(tokens.all()) else tokens


def has_tokens(layout: Layout, calls: Sequence[Call], n_positions: int, n_tokens: int) -> bool:
    """Whether a block's positions are those of the tokens, once for each use of its weight."""
    uses = Counter(call.rows for call in calls)
    names = set(layout.names)
    return any(n_positions == count * n_tokens for rows, count in uses.items() if {part.name for part in rows} == names)


class Padding:
    """Finds the positions of one block's input that are padding, while directions go by.

    A masked position may count all the same: the mask may be about another sequence of the same length (a decoder's
    positions under the encoder's mask), or the network may ignore it. So an example's masked positions are padding if
    no output gradient of any direction reaches them, which does not depend on how data and directions are cut.

    Args:
        tokens: The mask ``[B, T]``, true for tokens.
        stack: The block's gradients in the first directions.
    """

    def __init__(self, tokens: Tensor, stack: OuterGradients | EmbeddingGradients):
        n_positions = stack.index.shape[1] if isinstance(stack, EmbeddingGradients) else stack.n_positions
        self.tokens = tokens.to(stack.device).repeat(1, n_positions // tokens.shape[1])
        self.is_reached = torch.zeros(len(tokens), dtype=torch.bool, device=stack.device)

    def note(self, stack: OuterGradients | EmbeddingGradients) -> None:
        """Take some directions into account."""
        masked = ~self.tokens
        if isinstance(stack, EmbeddingGradients):
            self.is_reached |= ((stack.left != 0).any(-1).any(0) & masked).any(1)
            return
        for examples in stack.side_chunks():
            left = stack.expand_left(stack.raw_left[:, examples])  # [V, b, S, G, o]
            self.is_reached[examples] |= ((left != 0).flatten(3).any(-1).any(0) & masked[examples]).any(1)

    def kept(self) -> Tensor:
        """``[B, S]``: the positions that are not padding."""
        return self.tokens | self.is_reached[:, None]
