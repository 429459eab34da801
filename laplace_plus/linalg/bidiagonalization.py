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
from laplace_plus.kernels import inner_products, orthogonalize, vector_norm
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.krylov import (
    breakdown_limit,
    combine,
    coordinates,
    flattened,
    invariant,
    orthonormality_row,
    product_length,
    reprojected,
    stacked,
    truncated_depth,
)
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.results import agreement


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
        return torch.diag_embed(self.diagonal) + torch.diag_embed(self.off_diagonal, 1)


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
        tolerance: The process ends where a new vector before normalisation is at most ``tolerance`` times the largest
            product with a unit vector so far; ten times machine epsilon by default.
        dtype: Type of the vectors.
        parameters: The tensors to differentiate in.

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
    start = start_vectors(v, depth, dtype, tolerance)
    if m is None:
        m = matvec.shape[0] if isinstance(matvec, Operator) else start.shape[-1]
    operator = LinearMap(
        matvec, start.shape[-1], m=m, rmatvec=rmatvec, parameters=parameters, dtype=start.dtype, single=start.ndim == 1
    )
    shape, rows = start.shape[:-1], stacked(start)
    found, rank, converged = _golub_kahan(operator, rows, min(depth, m, operator.n), tolerance, start.dtype)

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        gradient, gradients = _pullback(operator, rows, outputs, cotangents, rank)
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    matvecs = operator.matvecs
    outputs = [x.reshape((*shape, *x.shape[1:])) for x in found]
    left, right, small, residual, norm = attach(outputs, [start, *operator.tensors], pullback)
    diagonal, above = small.diagonal(dim1=-2, dim2=-1), small.diagonal(1, dim1=-2, dim2=-1)
    return Bidiagonalization(left, right, diagonal, above, residual, 1 / norm, rank.reshape(shape), matvecs, converged)


def _golub_kahan(
    operator: LinearMap, start: Tensor, depth: int, tolerance: float | None, outer: torch.dtype
) -> tuple[tuple[Tensor, ...], Tensor, bool]:
    """U, V, B, the residual and the norm of the start vector, each with its batch first; ranks; whether all ended."""
    batch, n = start.shape
    limit = breakdown_limit(tolerance, start.dtype)
    norm = vector_norm(start)
    left, right = (start.new_zeros(batch, depth, length) for length in (operator.m, n))
    small = start.new_zeros(batch, depth, depth + 1)
    residual, largest, adjointness = torch.zeros_like(start), torch.zeros_like(norm), torch.zeros_like(norm)
    active = torch.ones_like(norm, dtype=torch.bool)
    rank = torch.zeros_like(norm, dtype=torch.int64)
    vector = start / norm[:, None]

    def step(product: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is orthogonal to a basis, the coefficients in it, the length of the first, and the next vector."""
        nonlocal largest, active
        largest = torch.maximum(largest, vector_norm(product) if basis.shape[1] else product_length(product))
        rest, along = orthogonalize(basis, product) if basis.shape[1] else (product, product)
        size = vector_norm(rest)
        active = active & ~invariant(size, limit * largest)
        return rest, along, torch.where(active, size, 0.0), torch.where(active[:, None], rest / size[:, None], 0.0)

    for k in range(depth):
        # where A v lies in the span of the left vectors, the right vector v is dropped and stays in the residual
        _, _, small[:, k, k], left[:, k] = step(operator(vector), left[:, :k])
        right[:, k] = torch.where(active[:, None], vector, 0.0)
        rank += active
        here = active
        rest, along, small[:, k, k + 1], vector = step(operator.transposed(left[:, k].contiguous()), right[:, : k + 1])
        residual = torch.where(here[:, None], rest, residual)
        # vᵀ(Aᵀu) = uᵀ(Av) = α checks the caller's transpose without a product
        adjointness = torch.maximum(adjointness, (along[:, k] - small[:, k, k]).abs() / largest)
    kept = max(truncated_depth(norm, rank, small, residual), 1)
    allowed = agreement(outer)
    if bool((adjointness > allowed).any()):
        what = "rmatvec is not the transpose of the operator."
        got = f"a relative difference of {float(adjointness.max()):.1e}"
        fix = "Check rmatvec, or leave it out where torch can differentiate through matvec."
        raise OperatorError(what, expected=f"uᵀ(A v) = (Aᵀu)ᵀv to a relative {allowed:.0e}", got=got, fix=fix)
    found = left[:, :kept], right[:, :kept], small[:, :kept, :kept], residual, norm
    return found, rank, bool((~active | (rank == n)).all())


def _pullback(
    operator: LinearMap, start: Tensor, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], rank: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The adjoint of Lanczos' process for the augmented operator; its multipliers alternate between both sides."""
    depth, m, n = outputs[2].shape[-1], operator.m, operator.n
    shapes = [(-1, depth, m), (-1, depth, n), (-1, depth, depth), (-1, n), (-1,)]
    (left, right, small, residual, norm), given = flattened(outputs, cotangents, shapes)
    left_, right_, small_, residual_, norm_ = given
    inside = torch.arange(depth, device=rank.device) < rank[:, None]
    left_, right_ = left_ * inside[..., None], right_ * inside[..., None]
    # B and Bᵀ in the augmented matrix have half of the cotangent each
    small_ = small_.triu().tril(1) * (inside[..., None] & inside[:, None]) / 2
    last = (rank - 1).clamp(min=0)[:, None, None].expand(-1, 1, depth)
    eta = small_.gather(1, last)[:, 0] - coordinates(right, residual_)
    end = residual_ + combine(eta, right)
    left_pi = small @ small_.mT - inner_products(left_, left)
    right_pi = small.mT @ small_ - inner_products(right_, right)
    right_pi[:, 0, 0] += norm_ * norm
    left_gamma, right_gamma = torch.zeros_like(left_pi), torch.zeros_like(right_pi)
    phi, psi = torch.zeros_like(left), torch.zeros_like(right)  # multipliers of A v_k and of Aᵀ u_k
    following = torch.zeros_like(left[:, 0])
    multiplier = torch.zeros_like(end)
    for k in reversed(range(depth)):
        here = (rank > k)[:, None]
        multiplier = torch.where((rank == k + 1)[:, None], end, torch.where(here, multiplier, 0.0))
        psi[:, k] = multiplier = reprojected(multiplier, right, small_[:, k], min(k + 2, depth))
        product = operator(multiplier)
        both = orthonormality_row(left_gamma, left_pi, left, product, k)
        rest = left_[:, k] + combine(both, left) + product
        if k + 1 < depth:
            rest = rest - small[:, k, k + 1, None] * following
        rest = torch.where(here, rest / small[:, k, k, None], 0.0)
        phi[:, k] = following = reprojected(rest, left, small_[:, :, k], k + 1)
        product = operator.transposed(following)
        both = orthonormality_row(right_gamma, right_pi, right, product, k)
        rest = right_[:, k] + combine(both, right) + product - small[:, k, k, None] * multiplier
        rest = rest + eta[:, k, None] * residual
        multiplier = rest / (small[:, k - 1, k, None] if k else norm[:, None])
    # at rank zero only c = 1/‖v‖ depends on v
    gradient = torch.where((rank > 0)[:, None], multiplier, (norm_ / norm)[:, None] * start)
    return gradient, operator.parameter_pullback(torch.cat([right, psi], 1), torch.cat([phi, left], 1))
