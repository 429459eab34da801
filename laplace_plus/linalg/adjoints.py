r"""The derivative of Krylov decompositions, without a graph of any product.

A decomposition ``A Q = Q H + R Eᵀ`` with orthonormal Q is defined by its equations, and its derivative is the solution
of the adjoint system of these equations (N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of
large matrices", NeurIPS 2024): K transposed products and one vector–Jacobian product in what the operator depends on.

With the p start vectors as further columns, ``[X  A Q_{K}] = Q H⁺ + …``, the extended ``H⁺ = [S H]`` is upper
trapezoidal (for Arnoldi's and Lanczos' p = 1 a start vector and a Hessenberg matrix; a band for p > 1), and all is one
recurrence for the multipliers Λ of these columns, from the last to the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.kernels import inner_products
from laplace_plus.linalg.krylov import Products
from laplace_plus.linalg.orthogonalization import combine, coordinates


def krylov_pullback(
    products: Products,
    vectors: Tensor,
    extended: Tensor,
    residuals: Tensor,
    vectors_cotangent: Tensor,
    extended_cotangent: Tensor,
    residuals_cotangent: Tensor,
    *,
    rank: Tensor | None = None,
    reproject: bool = True,
    symmetric: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Pull cotangents of a Krylov decomposition back to its start vectors and to the operator's tensors.

    Args:
        products: The operator.
        vectors: Q, ``[batch, K, n]``.
        extended: H⁺, ``[batch, K, p + K]``: in the first p columns S with ``X = Q S``, then ``Q A Qᵀ``.
        residuals: ``[batch, p, n]``: what ``Q H`` leaves of the last p columns of A Q.
        vectors_cotangent: Of the shape of ``vectors``.
        extended_cotangent: Of the shape of ``extended``; zero below its diagonal.
        residuals_cotangent: Of the shape of ``residuals``.
        rank: ``[batch]``, for p = 1: the length of each decomposition, where they differ.
        reproject: Whether to enforce ``Q Λ = H̄`` where the adjoint fulfils it in exact arithmetic. Without it errors
            grow like the condition number of the Krylov matrix.
        symmetric: Whether H is a band, above its diagonal, too.

    Returns:
        The gradient in the start vectors, ``[batch, p, n]``, and one for each of the operator's tensors.
    """
    batch, depth, n = vectors.shape
    p = extended.shape[-1] - depth
    # cotangents of what lies beyond a vector's own rank belong to constants
    if rank is not None:
        inside = torch.arange(depth, device=rank.device) < rank[:, None]
        vectors_cotangent = vectors_cotangent * inside[..., None]
        columns = torch.cat([inside.new_ones(batch, p), inside], dim=-1)
        extended_cotangent = extended_cotangent * (inside[..., None] & columns[:, None])
    multipliers = vectors.new_zeros(batch, p + depth, n)
    if rank is None:
        last = extended_cotangent[..., depth:]  # [batch, K, p]
    else:
        last = extended_cotangent.gather(-1, rank[:, None, None].expand(batch, depth, 1))
    eta = last - inner_products(vectors, residuals_cotangent)  # [batch, K, p]
    ends = residuals_cotangent + eta.mT @ vectors
    if rank is None:
        multipliers[:, depth:] = ends
    else:
        multipliers.scatter_(1, rank[:, None, None].expand(batch, 1, n), ends)
    pi = extended @ extended_cotangent.mT - inner_products(vectors_cotangent, vectors)
    gamma = torch.zeros_like(pi)
    fused = not products.has_transpose
    gradients: tuple[Tensor, ...] | None = None
    transposed = multipliers.new_zeros(0)
    for k in reversed(range(depth)):
        if (k + 1) % p == 0:  # p columns are known at a time
            for j in range(k + 1, k + 1 + p):
                if reproject:
                    multipliers[:, j] = _reprojected(multipliers[:, j], vectors, extended_cotangent, j)
            known = multipliers[:, k + 1 : k + 1 + p].reshape(batch * p, n)
            if fused:
                transposed, new = products.pullback(vectors[:, k + 1 - p : k + 1].reshape(batch * p, n), known)
                gradients = new if gradients is None else tuple(x + y for x, y in zip(gradients, new, strict=True))
            else:
                transposed = products.transposed(known)
            transposed = transposed.reshape(batch, p, n)
        w = transposed[:, k % p]
        row = pi[:, k, : k + 1] - coordinates(vectors[:, : k + 1], w)
        row[:, k] /= 2
        gamma[:, k, : k + 1] = row
        both = gamma[:, k] + gamma[:, :, k]
        stop = min(k + 2 * p + 1, p + depth) if symmetric else p + depth
        xi = vectors_cotangent[:, k] + combine(eta[:, k], residuals) + combine(both, vectors) + w
        xi = xi - combine(extended[:, k, k + 1 : stop], multipliers[:, k + 1 : stop])
        new_multiplier = xi / extended[:, k, k, None]
        if rank is not None:
            new_multiplier = torch.where((rank > k)[:, None], new_multiplier, multipliers[:, k])
        multipliers[:, k] = new_multiplier
    if reproject:
        for j in range(p):
            multipliers[:, j] = _reprojected(multipliers[:, j], vectors, extended_cotangent, j)
    if gradients is None:
        gradients = products.parameter_pullback(vectors, multipliers[:, p:])
    return multipliers[:, :p], gradients


def _reprojected(multiplier: Tensor, vectors: Tensor, cotangent: Tensor, j: int) -> Tensor:
    basis = vectors[:, : j + 1]
    return multiplier + combine(cotangent[:, : j + 1, j] - coordinates(basis, multiplier), basis)


def or_zeros(cotangent: Tensor | None, like: Tensor) -> Tensor:
    """A cotangent, or zeros where there is none."""
    return torch.zeros_like(like) if cotangent is None else cotangent
