"""Matrix-free linear algebra with derivatives; independent of networks.

An *operator* is any callable on row-stacked vectors ``[..., n] -> [..., m]``, or an :class:`Operator`. All results are
differentiable in the vectors and in the tensors that the operator depends on; no graph of a product is stored.

``docs/linalg.md`` tells which function is for which job, with costs and examples.

Common arguments:

* ``parameters``: The tensors to differentiate in, where they cannot be found from the operator or are not leaves of
  the autograd graph of a product.
* ``dtype``, ``device``: Type and device of random vectors; by default those of the operator's tensors. Half precision
  is used for products only: recurrences run in float32.
* ``generator``: Source of the randomness; torch's global generator by default.

Estimates come as an :class:`Estimate` with a standard error, solutions as a :class:`Solution` with a residual and a
:class:`Status`.
"""

from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.estimates import Estimate, draw_probes
from laplace_plus.linalg.krylov import ArnoldiDecomposition, LanczosDecomposition, arnoldi, lanczos
from laplace_plus.linalg.linear_maps import as_operator
from laplace_plus.linalg.lsmr import LeastSquaresSolution, lsmr
from laplace_plus.linalg.matrix_functions import (
    FunctionValue,
    arnoldi_function,
    matrix_function,
    of_eigenvalues,
    phi,
)
from laplace_plus.linalg.null_space import (
    AlternatingProjection,
    LSMRProjection,
    SVDProjection,
    project_null_space,
)
from laplace_plus.linalg.nystrom import NystromApproximation, nystrom
from laplace_plus.linalg.operators import Dense, Diagonal, Identity, Operator
from laplace_plus.linalg.partial_eigen import PartialEigen, eigsh
from laplace_plus.linalg.quadrature import slq_logdet, slq_trace
from laplace_plus.linalg.solving import Solution, Status
from laplace_plus.linalg.traces import diagonal, trace

__all__ = [
    "AlternatingProjection",
    "ArnoldiDecomposition",
    "Dense",
    "Diagonal",
    "Estimate",
    "FunctionValue",
    "arnoldi_function",
    "of_eigenvalues",
    "phi",
    "Identity",
    "LanczosDecomposition",
    "LeastSquaresSolution",
    "LSMRProjection",
    "NystromApproximation",
    "Operator",
    "PartialEigen",
    "SVDProjection",
    "Solution",
    "Status",
    "arnoldi",
    "as_operator",
    "cg",
    "diagonal",
    "draw_probes",
    "eigsh",
    "lanczos",
    "lsmr",
    "matrix_function",
    "nystrom",
    "project_null_space",
    "slq_logdet",
    "slq_trace",
    "trace",
]
