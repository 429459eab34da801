"""Fast kernels below the linear algebra, each beside its plain-torch reference: they know tensors and nothing else.

| what | reference | Triton on CUDA |
|---|---|---|
| :func:`symmetric_update`, :func:`symmetrize_` | ``syrk`` or matrix products | one triangle, rows split, batched |
| :func:`convolution_factor` | products of lags, or patches in chunks | – |
| :func:`orthogonalize` | matrix–vector products | three passes over the basis, not four |
| :func:`inner`, :func:`inner_products`, :func:`vector_norm` | sums of bounded length | – |
| :func:`symmetric_eigen` | LAPACK, or torch's solvers | – |

A stated rule decides which one runs; :func:`use` overrides it, see :mod:`laplace_plus.kernels.selection`. None of the
functions builds an autograd graph.
"""

from laplace_plus.kernels.convolution import convolution_factor
from laplace_plus.kernels.eigen import require_finite, symmetric_eigen
from laplace_plus.kernels.gram_schmidt import inner, inner_products, orthogonalize, vector_norm
from laplace_plus.kernels.selection import use
from laplace_plus.kernels.symmetric_update import all_finite, symmetric_update, symmetrize_

__all__ = [
    "all_finite",
    "convolution_factor",
    "inner",
    "orthogonalize",
    "inner_products",
    "require_finite",
    "symmetric_eigen",
    "symmetric_update",
    "symmetrize_",
    "use",
    "vector_norm",
]
