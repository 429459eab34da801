"""Classical Gram–Schmidt: the part of a Krylov method that is not the operator.

Two passes leave a vector orthogonal to the basis to rounding (L. Giraud, J. Langou, M. Rozložník and J. van den Eshof,
"Rounding error analysis of the classical Gram–Schmidt orthogonalization process", Numerische Mathematik 2005). Unlike
the modified process, each pass is two matrix–vector products, for which a basis is best stored by rows:
``[..., k, n]``.
"""

from __future__ import annotations

from torch import Tensor

from laplace_plus import kernels


def orthogonalize(basis: Tensor, vectors: Tensor, *, passes: int = 2) -> tuple[Tensor, Tensor]:
    """What remains of vectors outside of the span of an orthonormal basis, ``w − Qᵀ(Q w)``.

    Args:
        basis: Q, ``[batch, k, n]``, orthonormal rows (rows of zeros do no harm); may be a slice of the first rows of a
            larger tensor.
        vectors: w, ``[batch, n]``, or ``[batch, p, n]`` for several vectors per basis.
        passes: How often. One is enough where the vectors are almost orthogonal already.

    Returns:
        The remainder, of the shape of ``vectors``, and the coefficients Q w, ``[batch, k]`` or ``[batch, p, k]``,
        summed over the passes.
    """
    if vectors.ndim == 2:
        return kernels.orthogonalize(basis, vectors, passes=passes)
    coefficients = vectors.new_zeros(*vectors.shape[:2], basis.shape[1])
    for _ in range(passes):
        new = kernels.inner_products(vectors, basis)
        vectors = vectors.baddbmm(new, basis, alpha=-1)
        coefficients = coefficients + new
    return vectors, coefficients


def combine(coefficients: Tensor, basis: Tensor) -> Tensor:
    """The combination ``Σ_k x_k q_k`` of basis vectors: ``[batch, k]`` and ``[batch, k, n]`` give ``[batch, n]``."""
    if basis.shape[0] == 1:
        return (coefficients[0] @ basis[0])[None]
    return (coefficients[:, None] @ basis)[:, 0]


def coordinates(basis: Tensor, vectors: Tensor) -> Tensor:
    """The inner products with basis vectors: ``[batch, k, n]`` and ``[batch, n]`` give ``[batch, k]``."""
    if basis.shape[0] == 1:
        return kernels.inner_products(basis[0], vectors[0])[None]
    return kernels.inner_products(vectors[:, None], basis)[:, 0]
