"""Covariances and precisions with structure: positive semi-definite matrices that are stored as blocks.

``stacks`` holds batched per-example gradients as sums of outer products, ``bases`` the bases in which a structured
matrix is diagonal, ``blocks``, ``kronecker`` and ``low_rank`` the matrices themselves, ``factor`` the inverse of such a
matrix plus a diagonal one, and ``softmax_output`` the exact curvature of a softmax output layer with many classes.
"""

from laplace_plus.structured.bases import Basis, DenseBasis, IdentityBasis, KroneckerBasis
from laplace_plus.structured.blocks import Block, DenseBlock, DiagonalBlock
from laplace_plus.structured.factor import Factor
from laplace_plus.structured.gradients import DenseGradients, EmbeddingGradients, ExampleGradients, OuterGradients
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.kronecker import KroneckerBlock
from laplace_plus.structured.low_rank import LowRankBlock
from laplace_plus.structured.slq_remainder import SampledSpectrum

__all__ = [
    "Basis",
    "Block",
    "DenseBasis",
    "DenseBlock",
    "DenseGradients",
    "DiagonalBlock",
    "Factor",
    "GramSum",
    "IdentityBasis",
    "KroneckerBasis",
    "KroneckerBlock",
    "LowRankBlock",
    "EmbeddingGradients",
    "OuterGradients",
    "SampledSpectrum",
    "ExampleGradients",
]
