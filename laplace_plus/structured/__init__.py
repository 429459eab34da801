"""Covariances and precisions with structure: positive semi-definite matrices that are stored as blocks.

``gradients``, ``one_hot`` and ``composed`` hold batched per-example gradients; ``blocks``, ``eigen``, ``kronecker``,
``dense``, ``low_rank`` and ``softmax_output`` the matrices, the inverse of such a matrix plus a diagonal one, and the
bases in which it is diagonal; ``layout``, ``gram_sum`` and ``log_determinants`` what blocks are made of.
"""

from laplace_plus.structured.blocks import Basis, Block, Factor, IdentityBasis, register_block
from laplace_plus.structured.dense import DenseBasis, DenseBlock
from laplace_plus.structured.eigen import DiagonalBlock, EigenBlock, EigenFactor
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients, OuterGradients
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.kronecker import KroneckerBasis, KroneckerBlock
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
    "OuterGradients",
    "register_block",
]
