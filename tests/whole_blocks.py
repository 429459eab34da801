"""Blocks of a curvature, written out."""

from __future__ import annotations

import torch

from laplace_plus.structured import Block, DenseBlock, KroneckerBlock


def whole_tensors(block: Block) -> dict[str, torch.Tensor]:
    """What makes up a block, with matrices for sums that are still kept as rows."""
    if isinstance(block, KroneckerBlock):
        own = {"left": block.left, "right": block.right, "count": block.count}
        return own if block.corrected is None else own | {"corrected": block.corrected}
    return {"matrix": block.matrix} if isinstance(block, DenseBlock) else block.tensors()
