"""Which entries of a network's tensors are read to see whether they have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_WHOLE, _SAMPLED = 4096, 512
"""Entries up to which each public method compares all of a tensor, and how many of a larger one."""


def entries_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """By type and device: entries of tensors, as views into plain ones, and as copies of others."""
    entries: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        part, step = tensor.detach(), 1
        if tensor.layout != torch.strided:  # which might not fit in memory as a dense tensor
            part = part.to_sparse_coo().coalesce()
            entries.setdefault((torch.long, part.device), []).append(part.indices().flatten())
            part = part.values()
        elif type(tensor) not in (Tensor, nn.Parameter):
            part = part.double()
        else:
            if not tensor.is_contiguous():  # in the order in which the entries lie, if that is without gaps
                part = part.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
            if tensor.numel() > _WHOLE:
                step = tensor.numel() // _SAMPLED | 1
        part = part.flatten()
        entries.setdefault((part.dtype, part.device), []).append(part[::step] if step > 1 else part)
    return [*entries.values()]
