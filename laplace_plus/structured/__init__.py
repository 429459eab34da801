"""Covariances and precisions with structure: positive semi-definite matrices that are stored as blocks.

``gradients`` holds batched per-example gradients as sums of outer products; ``blocks``, ``eigen``, ``kronecker``,
``dense`` and ``low_rank`` the matrices, the inverse of such a matrix plus a diagonal one, and the bases in which it is
diagonal; ``gram_sum``, ``limited_rank`` and ``log_determinants`` what blocks are made of; and ``softmax_output`` the
exact curvature of a softmax output layer with many classes.
"""

from laplace_plus.structured.blocks import Basis, Block, Factor, IdentityBasis, register_block
from laplace_plus.structured.dense import DenseBasis, DenseBlock
from laplace_plus.structured.eigen import DiagonalBlock, EigenBlock, EigenFactor
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients, OuterGradients
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.kronecker import KroneckerBasis, KroneckerBlock
from laplace_plus.structured.low_rank import LowRankBlock, SampledSpectrum
from laplace_plus.structured.one_hot import EmbeddingGradients

__all__ = [
    "Basis",
    "Block",
    "DenseBasis",
    "DenseBlock",
    "DenseGradients",
    "DiagonalBlock",
    "EigenBlock",
    "EigenFactor",
    "EmbeddingGradients",
    "ExampleGradients",
    "Factor",
    "GramSum",
    "IdentityBasis",
    "KroneckerBasis",
    "KroneckerBlock",
    "LowRankBlock",
    "OuterGradients",
    "SampledSpectrum",
    "register_block",
]
