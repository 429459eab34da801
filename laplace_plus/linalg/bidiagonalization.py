r"""Golub and Kahan's bidiagonalisation of a rectangular operator, with its adjoint derivative.

G. Golub and W. Kahan, "Calculating the singular values and pseudo-inverse of a matrix", SIAM Journal on Numerical
Analysis 1965. It is Lanczos' process for ``[[0, A], [Aᵀ, 0]]`` from ``(0, v)``, whose vectors are ``(0, v_1), (u_1, 0),
(0, v_2), …``. The derivative is the adjoint of that process without its zeros; the condition number is not squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.kernels import inner_products, vector_norm
from laplace_plus.linalg.adjoints import or_zeros
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.krylov import (
    breakdown_limit,
    combine,
    coordinates,
    invariant,
    krylov_map,
    orthogonalize,
    product_length,
    stacked,
    truncated_depth,
)
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach
from laplace_plus.linalg.operators import Operator


@dataclass(frozen=True)
class Bidiagonalization:
    """``A V = U B`` and ``Aᵀ U = V Bᵀ + r e_Kᵀ`` with orthonormal U and V, ``v_1 = c v`` and B upper bidiagonal.

    Where the process ends early for a start vector (``rank`` < K), its rows of U, V and B beyond its rank are zero, and
    the equations hold with ``e_rank``.

    Attributes:
        left: U by rows, ``[..., K, m]``.
        right: V by rows, ``[..., K, n]``.
        diagonal: Diagonal of B, ``[..., K]``, not negative.
        off_diagonal: Superdiagonal of B, ``[..., K − 1]``, not negative.
        residual: r, ``[..., n]``.
        scale: c = 1/‖v‖, ``[...]``.
        rank: ``[...]`` integers, the number of pairs found; at most K, and zero for a start vector with A v = 0.
        matvecs: Number of operator–vector products, transposed ones included.
        converged: Whether all Krylov spaces are invariant, so that B has singular values of A only.
    """

    left: Tensor
    right: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    residual: Tensor
    scale: Tensor
    rank: Tensor
    matvecs: int
    converged: bool

    def bidiagonal(self) -> Tensor:
        """B as a dense matrix, ``[..., K, K]``."""
        return _bidiagonal(self.diagonal, self.off_diagonal)


@without_autocast
def bidiagonalize(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    rmatvec: Matvec | None = None,
    m: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
) -> Bidiagonalization:
    """Decompose an m × n operator from a start vector of length n, with full re-orthogonalisation of both sides.

    Costs ``depth`` products with A and as many with Aᵀ (of the whole stack), ``4(m + n)K²`` floating-point operations,
    and memory for K vectors of each length. The result is differentiable in ``v`` and in the tensors that the operator
    depends on, at the same cost again; no graph of a product is stored.

    Args:
        matvec: A, an operator on row-stacked vectors, ``[..., n] -> [..., m]``.
        v: Start vector ``[n]``, or a stack ``[..., n]``, which is multiplied together.
        depth: K ≥ 1; at most min(m, n) steps are taken.
        rmatvec: Aᵀ, ``[..., m] -> [..., n]``; by default torch differentiates through ``matvec``.
        m: Length of the output vectors of A; by default the operator's, or n for a plain callable.
        parameters: The tensors to differentiate in, where they cannot be found from the operator.
        tolerance: The process ends where a new vector before normalisation is at most ``tolerance`` times the largest
            product with a unit vector so far; ten times machine epsilon by default.
        dtype: Type of the start vectors; that of ``v`` by default. Half precision is used for products only.

    Raises:
        ConfigurationError: A bad start vector, depth or tolerance.
        OperatorError: A start vector of zero, an operator of another shape or type, or a wrong transpose.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.tensor([[3.0, 0.0], [4.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
        >>> v = torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> result = bidiagonalize(lambda x: x @ a.T, v, depth=2, m=3)
        >>> [round(float(s), 6) for s in torch.linalg.svdvals(result.bidiagonal())]
        [6.708204, 2.236068]
    """
    start = start_vectors(v, depth, dtype)
    if m is None:
        m = matvec.shape[0] if isinstance(matvec, Operator) else start.shape[-1]
    operator = krylov_map(matvec, start, m=m, rmatvec=rmatvec, parameters=parameters)
    shape = start.shape[:-1]
    with torch.no_grad():
        found = _golub_kahan(operator, stacked(start), min(depth, m, operator.n), tolerance)
        left, right, alpha, beta, residual, scale, rank, ended, adjointness = found
        kept = max(truncated_depth("Bidiagonalisation", scale, rank, alpha, beta, residual), 1)
        _require_transpose(adjointness, start.dtype)
        ragged = rank if bool((rank < kept).any()) else None
        outputs = (
            left[:, :kept].reshape(*shape, kept, -1),
            right[:, :kept].reshape(*shape, kept, -1),
            alpha[:, :kept].reshape(*shape, kept),
            beta[:, : kept - 1].reshape(*shape, kept - 1),
            residual.reshape(start.shape),
            scale.reshape(shape),
        )

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        gradient, gradients = _pullback(operator, stacked(start), outputs, cotangents, ragged)
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    matvecs = operator.matvecs
    left, right, alpha, beta, residual, scale = attach(outputs, [start, *operator.tensors], pullback)
    return Bidiagonalization(left, right, alpha, beta, residual, scale, rank.reshape(shape), matvecs, bool(ended.all()))


def _golub_kahan(operator: LinearMap, start: Tensor, depth: int, tolerance: float | None) -> tuple[Tensor, ...]:
    (batch, n), m = start.shape, operator.m
    limit = breakdown_limit(tolerance, start.dtype)
    norm = vector_norm(start)
    scale = norm.reciprocal()
    left, right = start.new_zeros(batch, depth, m), start.new_zeros(batch, depth, n)
    alpha, beta = start.new_zeros(batch, depth), start.new_zeros(batch, depth)
    residual, largest, adjointness = torch.zeros_like(start), torch.zeros_like(norm), torch.zeros_like(norm)
    active = torch.ones_like(norm, dtype=torch.bool)
    rank = torch.zeros_like(norm, dtype=torch.int64)
    vector = start * scale[:, None]
    for k in range(depth):
        product = operator(vector)
        largest = torch.maximum(largest, vector_norm(product) if k else product_length(product))
        rest, _ = orthogonalize(left[:, :k], product) if k else (product, product)
        size = vector_norm(rest)
        # where A v lies in the span of the left vectors, the right vector v is dropped and stays in the residual
        active = active & ~invariant(size, limit * largest)
        right[:, k] = torch.where(active[:, None], vector, 0.0)
        left[:, k] = torch.where(active[:, None], rest / size[:, None], 0.0)
        alpha[:, k] = torch.where(active, size, 0.0)
        rank += active
        product = operator.transposed(left[:, k].contiguous())
        largest = torch.maximum(largest, vector_norm(product))
        rest, along = orthogonalize(right[:, : k + 1], product)
        # vᵀ(Aᵀu) = uᵀ(Av) = α checks the caller's transpose without a product
        adjointness = torch.maximum(adjointness, (along[:, k] - alpha[:, k]).abs() / largest)
        residual = torch.where(active[:, None], rest, residual)
        size = vector_norm(rest)
        active = active & ~invariant(size, limit * largest)
        beta[:, k] = torch.where(active, size, 0.0)
        vector = torch.where(active[:, None], rest / size[:, None], 0.0)
    return left, right, alpha, beta, residual, scale, rank, ~active | (rank == n), adjointness


def _require_transpose(adjointness: Tensor, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).eps ** 0.5
    if bool((adjointness > limit).any()):
        raise OperatorError(
            "rmatvec is not the transpose of the operator.",
            expected=f"uᵀ(A v) = (Aᵀu)ᵀv to a relative {limit:.0e}",
            got=f"a relative difference of {float(adjointness.max()):.1e}",
            fix="Check rmatvec, or leave it out where torch can differentiate through matvec.",
        )


def _pullback(
    operator: LinearMap,
    start: Tensor,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    rank: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The adjoint of Lanczos' process for the augmented operator; its multipliers alternate between both sides."""
    (depth, m), n = outputs[0].shape[-2:], outputs[1].shape[-1]
    given = [or_zeros(c, o) for c, o in zip(cotangents, outputs, strict=True)]
    left, right, left_, right_ = (
        x.reshape(-1, depth, size) for x, size in ((outputs[0], m), (outputs[1], n), (given[0], m), (given[1], n))
    )
    residual, residual_ = outputs[4].reshape(-1, n), given[4].reshape(-1, n)
    scale, scale_ = outputs[5].reshape(-1), given[5].reshape(-1)
    small = _bidiagonal(outputs[2], outputs[3]).reshape(-1, depth, depth)
    # B and Bᵀ in the augmented matrix have half of the cotangent each
    small_ = _bidiagonal(given[2], given[3]).reshape(-1, depth, depth) / 2
    if rank is None:
        rank = torch.full(scale.shape, depth, dtype=torch.int64, device=scale.device)
    inside = torch.arange(depth, device=rank.device) < rank[:, None]
    left_, right_ = left_ * inside[..., None], right_ * inside[..., None]
    small_ = small_ * (inside[..., None] & inside[:, None])
    last = (rank - 1).clamp(min=0)[:, None, None].expand(-1, 1, depth)
    eta = small_.gather(1, last)[:, 0] - coordinates(right, residual_)
    end = residual_ + combine(eta, right)
    left_pi = small @ small_.mT - inner_products(left_, left)
    right_pi = small.mT @ small_ - inner_products(right_, right)
    right_pi[:, 0, 0] -= scale_ * scale
    left_gamma, right_gamma = torch.zeros_like(left_pi), torch.zeros_like(right_pi)
    phi, psi = torch.zeros_like(left), torch.zeros_like(right)  # multipliers of A v_k and of Aᵀ u_k
    following = torch.zeros_like(left[:, 0])
    multiplier = torch.zeros_like(end)
    for k in reversed(range(depth)):
        here = (rank > k)[:, None]
        multiplier = torch.where((rank == k + 1)[:, None], end, torch.where(here, multiplier, 0.0))
        psi[:, k] = multiplier = _reprojected(multiplier, right, small_[:, k], min(k + 2, depth))
        product = operator(multiplier)
        both = _gamma_row(left_gamma, left_pi, left, product, k)
        rest = left_[:, k] + combine(both, left) + product
        if k + 1 < depth:
            rest = rest - small[:, k, k + 1, None] * following
        rest = torch.where(here, rest / small[:, k, k, None], 0.0)
        phi[:, k] = following = _reprojected(rest, left, small_[:, :, k], k + 1)
        product = operator.transposed(following)
        both = _gamma_row(right_gamma, right_pi, right, product, k)
        rest = right_[:, k] + combine(both, right) + product - small[:, k, k, None] * multiplier
        rest = rest + eta[:, k, None] * residual
        multiplier = rest / small[:, k - 1, k, None] if k else rest * scale[:, None]
    # at rank zero only c = 1/‖v‖ depends on v
    gradient = torch.where((rank > 0)[:, None], multiplier, -(scale_ * scale**3)[:, None] * start)
    return gradient, operator.parameter_pullback(torch.cat([right, psi], 1), torch.cat([phi, left], 1))


def _reprojected(multiplier: Tensor, basis: Tensor, target: Tensor, size: int) -> Tensor:
    """Enforce ``q_iᵀ λ = target_i`` for the first ``size`` vectors, which holds in exact arithmetic."""
    basis = basis[:, :size]
    return multiplier + combine(target[:, :size] - coordinates(basis, multiplier), basis)


def _gamma_row(gamma: Tensor, pi: Tensor, basis: Tensor, product: Tensor, k: int) -> Tensor:
    """Fill row k of the multipliers of orthonormality, and return that row of ``Γ + Γᵀ``."""
    row = pi[:, k, : k + 1] - coordinates(basis[:, : k + 1], product)
    row[:, k] /= 2
    gamma[:, k, : k + 1] = row
    return gamma[:, k] + gamma[:, :, k]


def _bidiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    return torch.diag_embed(diagonal) + torch.diag_embed(off_diagonal, 1)
