r"""The derivative of Krylov decompositions, without a graph of any product.

A decomposition ``A Q = Q H + R Eᵀ`` with orthonormal Q is defined by its equations. Its derivative solves the adjoint
system of these equations (N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of large
matrices", NeurIPS 2024): K transposed products and one vector–Jacobian product in the operator's tensors.

With the p start vectors as additional columns, ``[X  A Q_{K}] = Q H⁺ + …``. The extended matrix ``H⁺ = [S H]`` is upper
trapezoidal: for p = 1 (Arnoldi, Lanczos) it holds the norm of the start vector and a Hessenberg matrix, for p > 1 a
band matrix. The multipliers Λ of these columns follow from one recurrence, from the last column to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_plus.kernels import inner_products
from laplace_plus.linalg.krylov import combine, coordinates
from laplace_plus.linalg.linear_maps import LinearMap, add_gradients


def krylov_pullback(
    operator: LinearMap,
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
        operator: The operator.
        vectors: Q, ``[batch, K, n]``.
        extended: H⁺, ``[batch, K, p + K]``: S with ``X = Q S`` in the first p columns, then ``Q A Qᵀ``.
        residuals: ``[batch, p, n]``, the last p columns of ``A Q − Q H``.
        vectors_cotangent: Of the shape of ``vectors``.
        extended_cotangent: Of the shape of ``extended``; zero below its diagonal.
        residuals_cotangent: Of the shape of ``residuals``.
        rank: ``[batch]``, for p = 1: the length of each decomposition, where they differ.
        reproject: Whether to enforce ``Q Λ = H̄``, which the exact adjoint fulfils. Without it errors grow like the
            condition number of the Krylov matrix.
        symmetric: Whether H is banded above its diagonal as well.

    Returns:
        The gradient in the start vectors, ``[batch, p, n]``, and one for each of the operator's tensors.
    """
    batch, depth, n = vectors.shape
    p = extended.shape[-1] - depth
    # entries beyond the rank of a decomposition are constant
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
    fused = not operator.has_transpose
    gradients: tuple[Tensor, ...] = ()
    transposed = multipliers.new_zeros(0)
    for k in reversed(range(depth)):
        if (k + 1) % p == 0:  # p columns are known at a time
            for j in range(k + 1, k + 1 + p):
                if reproject:
                    multipliers[:, j] = _reprojected(multipliers[:, j], vectors, extended_cotangent, j)
            known = multipliers[:, k + 1 : k + 1 + p].reshape(batch * p, n)
            if fused:
                transposed, new = operator.pullback(vectors[:, k + 1 - p : k + 1].reshape(batch * p, n), known)
                gradients = add_gradients(gradients, new)
            else:
                transposed = operator.transposed(known)
            transposed = transposed.reshape(batch, p, n)
        w = transposed[:, k % p]
        row = pi[:, k, : k + 1] - coordinates(vectors[:, : k + 1], w)
        row[:, k] /= 2
        gamma[:, k, : k + 1] = row
        both = gamma[:, k] + gamma[:, :, k]
        stop = min(k + 2 * p + 1, p + depth) if symmetric else p + depth
        xi = vectors_cotangent[:, k] + combine(eta[:, k], residuals) + combine(both, vectors) + w
        xi = xi - combine(extended[:, k, k + 1 : stop], multipliers[:, k + 1 : stop])
        multiplier = xi / extended[:, k, k, None]
        if rank is not None:
            multiplier = torch.where((rank > k)[:, None], multiplier, multipliers[:, k])
        multipliers[:, k] = multiplier
    if reproject:
        for j in range(p):
            multipliers[:, j] = _reprojected(multipliers[:, j], vectors, extended_cotangent, j)
    if not fused:
        gradients = operator.parameter_pullback(vectors, multipliers[:, p:])
    return multipliers[:, :p], gradients


def _reprojected(multiplier: Tensor, vectors: Tensor, cotangent: Tensor, j: int) -> Tensor:
    """Enforce ``q_iᵀ λ_j = H̄_ij`` for i ≤ j."""
    basis = vectors[:, : j + 1]
    return multiplier + combine(cotangent[:, : j + 1, j] - coordinates(basis, multiplier), basis)


def hessenberg_pullback(
    operator: LinearMap,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    rank: Tensor | None,
    reproject: bool = True,
    symmetric: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """:func:`krylov_pullback` for decompositions with one start vector each.

    Args:
        operator: The operator.
        outputs: Vectors ``[..., K, n]``, Hessenberg matrix ``[..., K, K]``, residual ``[..., n]`` and scale ``[...]``.
        cotangents: One for each of these, or None.
        rank: ``[batch]``, where not all are of rank K.
        reproject: See :func:`krylov_pullback`.
        symmetric: Whether H is tridiagonal.

    Returns:
        The gradient in the start vectors, ``[batch, n]``, and one for each of the operator's tensors.
    """
    vectors, hessenberg, residual, scale = outputs
    vectors_, hessenberg_, residual_, scale_ = (or_zeros(c, o) for c, o in zip(cotangents, outputs, strict=True))
    depth, n = vectors.shape[-2:]
    extended = torch.nn.functional.pad(hessenberg.reshape(-1, depth, depth), (1, 0))
    extended[:, 0, 0] = 1 / scale.reshape(-1)
    extended_ = torch.nn.functional.pad(hessenberg_.reshape(-1, depth, depth).triu(-1), (1, 0))
    extended_[:, 0, 0] = -(scale_ * scale * scale).reshape(-1)
    gradient, gradients = krylov_pullback(
        operator,
        vectors.reshape(-1, depth, n),
        extended,
        residual.reshape(-1, 1, n),
        vectors_.reshape(-1, depth, n),
        extended_,
        residual_.reshape(-1, 1, n),
        rank=rank,
        reproject=reproject,
        symmetric=symmetric,
    )
    return gradient[:, 0], gradients


def or_zeros(cotangent: Tensor | None, like: Tensor) -> Tensor:
    """A cotangent, or zeros where there is none."""
    return torch.zeros_like(like) if cotangent is None else cotangent
