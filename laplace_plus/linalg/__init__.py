"""Structured linear algebra that knows nothing of networks.

``stacks`` holds batches of matrices that are kept as sums of outer products, ``bases`` the orthogonal (or merely
invertible) bases in which a structured matrix is diagonal, ``blocks`` the structured positive semi-definite matrices
themselves, and ``factor`` the inverse of such a matrix plus a diagonal one.
"""

from laplace_plus.linalg.bases import Basis, DenseBasis, IdentityBasis, KroneckerBasis
from laplace_plus.linalg.blocks import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from laplace_plus.linalg.factor import Factor
from laplace_plus.linalg.lanczos import lanczos
from laplace_plus.linalg.low_rank import LowRankBlock
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.partial_eigen import eigsh
from laplace_plus.linalg.results import Estimate, Solution, Status
from laplace_plus.linalg.stacks import DenseStack, OneHotStack, OuterStack, Stack

__all__ = [
    "Basis",
    "Block",
    "DenseBasis",
    "DenseBlock",
    "DenseStack",
    "DiagonalBlock",
    "Estimate",
    "Factor",
    "IdentityBasis",
    "KroneckerBasis",
    "KroneckerBlock",
    "LowRankBlock",
    "OneHotStack",
    "Operator",
    "OuterStack",
    "Solution",
    "Stack",
    "Status",
    "eigsh",
    "lanczos",
]
