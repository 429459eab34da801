"""Batched per-example gradients, kept as sums of outer products for as long as possible.

An :class:`ExampleGradients` holds one matrix for each of V cotangents and B examples, all of one shape ``[G, o, i]``
(G independent groups of o × i matrices; G = 1 for all but grouped layers). The gradient of a linear layer is a matrix
of rank S, the number of positions at which the layer is used. Its two sides take less memory and fewer operations than
the matrix. Matrices are written out a bounded number at a time, and only where no other form takes fewer operations.
"""

from laplace_plus.structured.gradients.base import (
    MIB,
    DenseGradients,
    ExampleGradients,
    OuterGradients,
    concatenate,
    slices,
)
from laplace_plus.structured.gradients.composed import (
    DerivedGradients,
    JoinedGradients,
    MappedGradients,
    SelectedGradients,
)
from laplace_plus.structured.gradients.one_hot import EmbeddingGradients, OutputLayerGradients

__all__ = [
    "MIB",
    "DenseGradients",
    "DerivedGradients",
    "EmbeddingGradients",
    "ExampleGradients",
    "JoinedGradients",
    "MappedGradients",
    "OuterGradients",
    "OutputLayerGradients",
    "SelectedGradients",
    "concatenate",
    "slices",
]
