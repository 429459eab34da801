"""Matrix-free linear algebra with derivatives; independent of networks.

An *operator* is any callable on row-stacked vectors ``[..., n] -> [..., m]``, or an :class:`Operator`. All results are
differentiable in the vectors and in the tensors that the operator depends on; no graph of a product is stored.

======================================  ============================================================================
to get …                                use
======================================  ============================================================================
eigenvalues of a symmetric operator     :func:`eigsh`; a whole Krylov space: :func:`lanczos`
singular values                         :func:`svds`, :func:`bidiagonalize`; of any square operator: :func:`arnoldi`
``f(A) v``, ``vᵀ f(A) v``               :func:`matrix_function`, :func:`bilinear`
``log det A``, ``tr f(A)``              :func:`slq_logdet`, :func:`slq_trace`
``tr A``, ``diag A``                    :func:`trace`, :func:`diagonal`
``A⁻¹ b`` for a positive definite A     :func:`cg`
``argmin ‖Ax − b‖² + λ²‖x‖²``           :func:`lsmr`
projection of v onto the null space     :func:`project_null_space`
a low-rank approximation                :func:`nystrom`
======================================  ============================================================================

Estimates come as an :class:`Estimate` with a standard error, solutions as a :class:`Solution` with a residual and a
:class:`Status`. ``docs/linalg.md`` has costs and examples.
"""

from laplace_plus.linalg.arnoldi import ArnoldiDecomposition, LanczosDecomposition, arnoldi, lanczos
from laplace_plus.linalg.arnoldi_functions import arnoldi_function, of_eigenvalues, phi
from laplace_plus.linalg.bidiagonalization import Bidiagonalization, bidiagonalize
from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.lsmr import LeastSquaresSolution, lsmr
from laplace_plus.linalg.matrices import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    as_operator,
    from_scipy,
)
from laplace_plus.linalg.matrix_functions import FunctionValue, bilinear, matrix_function
from laplace_plus.linalg.null_space import (
    AlternatingProjection,
    LSMRProjection,
    SVDProjection,
    project_null_space,
)
from laplace_plus.linalg.nystrom import NystromApproximation, nystrom
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.partial_eigen import PartialEigen, PartialSVD, eigsh, svds
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.linalg.results import Estimate, Solution, Status
from laplace_plus.linalg.slq import slq_logdet, slq_trace
from laplace_plus.linalg.traces import diagonal, trace

__all__ = [
    "AlternatingProjection",
    "ArnoldiDecomposition",
    "Bidiagonalization",
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Estimate",
    "FunctionValue",
    "arnoldi_function",
    "of_eigenvalues",
    "phi",
    "Identity",
    "Kronecker",
    "LanczosDecomposition",
    "LeastSquaresSolution",
    "LSMRProjection",
    "NystromApproximation",
    "Operator",
    "PartialEigen",
    "PartialSVD",
    "SVDProjection",
    "Solution",
    "Status",
    "arnoldi",
    "as_operator",
    "bidiagonalize",
    "bilinear",
    "cg",
    "diagonal",
    "draw_probes",
    "eigsh",
    "from_scipy",
    "lanczos",
    "lsmr",
    "matrix_function",
    "nystrom",
    "project_null_space",
    "slq_logdet",
    "slq_trace",
    "svds",
    "trace",
]
