"""Stacks of matrices that are kept as sums of outer products for as long as possible.

A *stack* holds one matrix for each of V directions and B examples, all of one shape ``[G, o, i]`` (G independent groups
of o × i matrices; G = 1 for all but grouped layers). The gradient of a linear layer is such a matrix of rank S, the
number of positions at which the layer is used, and writing it out costs S times less or B·o·i more than keeping its two
sides. Matrices are written out a bounded number at a time, and only where
:mod:`~laplace_plus.structured.stacks.contractions` finds no form that takes fewer operations.
"""

from __future__ import annotations

from laplace_plus.structured.stacks.base import DenseStack, Stack
from laplace_plus.structured.stacks.composed import JoinedStack, MappedStack, SubsetStack
from laplace_plus.structured.stacks.one_hot import OneHotStack
from laplace_plus.structured.stacks.outer import OuterStack, concatenate
from laplace_plus.structured.stacks.sizes import CACHE_BYTES, CHUNK_BYTES, chunk_bytes, require_room, slices

__all__ = [
    "CACHE_BYTES",
    "CHUNK_BYTES",
    "DenseStack",
    "JoinedStack",
    "MappedStack",
    "OneHotStack",
    "OuterStack",
    "Stack",
    "SubsetStack",
    "chunk_bytes",
    "concatenate",
    "require_room",
    "slices",
]
