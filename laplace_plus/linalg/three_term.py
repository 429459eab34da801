"""Lanczos' three-term recurrence: bare or with selective re-orthogonalisation, and the adjoint of the bare one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_plus.kernels import inner, three_term_update, vector_norm
from laplace_plus.linalg.adjoints import or_zeros
from laplace_plus.linalg.krylov import Krylov, Products, breakdown_limit, ended, kept_where, product_length
from laplace_plus.linalg.orthogonalization import orthogonalize


def three_term(
    products: Products, start: Tensor, depth: int, tolerance: float | None, *, selective: bool
) -> tuple[Krylov, int]:
    """The three-term recurrence ``b_k q_{k+1} = A q_k − a_k q_k − b_{k−1} q_{k−1}``.

    Args:
        products: The operator.
        start: ``[batch, n]``.
        depth: K ≤ n.
        tolerance: See :class:`~laplace_plus.linalg.krylov.ArnoldiProcess`.
        selective: Whether to re-orthogonalise whenever the estimated loss of orthogonality exceeds the square root of
            the rounding, then and in the following step.

    Returns:
        The decomposition with a tridiagonal matrix, and the number of steps with re-orthogonalisation.
    """
    batch, n = start.shape
    limit = breakdown_limit(tolerance, start.dtype)
    norm = vector_norm(start)
    scale = norm.reciprocal()
    basis = start.new_empty(batch, depth, n)
    diagonal, off_diagonal = start.new_zeros(batch, depth), start.new_zeros(batch, depth)
    residual, largest = torch.zeros_like(start), torch.zeros_like(norm)
    going = torch.ones_like(norm, dtype=torch.bool)
    rank = torch.zeros_like(norm, dtype=torch.int64)
    estimates = _LossOfOrthogonality(batch, depth, n, start) if selective else None
    again, count = False, 0
    vector = start * scale[:, None]
    for k in range(depth):
        basis[:, k] = vector
        product = products(vector)
        length = product_length(product, k)
        largest = torch.maximum(largest, length)
        small = torch.maximum(limit * largest, breakdown_limit(None, start.dtype) * length)
        previous = (basis[:, k - 1], off_diagonal[:, k - 1]) if k else (None, None)
        rest, alpha, _ = three_term_update(product, vector, *previous)
        # a second pass against the last two vectors costs little and keeps them orthogonal to rounding
        rest, correction = orthogonalize(basis[:, max(k - 1, 0) : k + 1], rest, passes=1)
        diagonal[:, k] = alpha + correction[:, -1]
        size = vector_norm(rest)
        if estimates is not None:
            lost = estimates.advance(k, diagonal, off_diagonal, size, largest, going & (size > small))
            if again or lost:
                rest, _ = orthogonalize(basis[:, : k + 1], rest)
                size = vector_norm(rest)
                estimates.reset(k)
                again, count = lost and not again, count + 1
        residual = kept_where(going, rest, residual)
        rank += going
        going = going & ~ended(size, small)
        off_diagonal[:, k] = torch.where(going, size, 0.0)
        if k + 1 < depth:
            vector = rest * torch.where(going, size.reciprocal(), 0.0)[:, None]
    side = torch.diag_embed(off_diagonal[:, :-1], 1)
    matrix = torch.diag_embed(diagonal) + side + side.mT
    return Krylov(basis, matrix, residual, scale, rank, ~going | (rank == n)), count


class _LossOfOrthogonality:
    """Simon's recurrence for ``ω_jk ≈ q_jᵀ q_k``, one row at a time.

    Args:
        batch: Number of start vectors.
        depth: Number of steps.
        n: Length of the vectors.
        like: A tensor of the type and on the device to work in.
    """

    def __init__(self, batch: int, depth: int, n: int, like: Tensor):
        self.eps = torch.finfo(like.dtype).eps
        self.fresh = self.eps * n**0.5
        self.previous = like.new_zeros(batch, depth + 1)
        self.current = like.new_zeros(batch, depth + 1)
        self.current[:, 0] = 1

    def advance(
        self, j: int, diagonal: Tensor, off_diagonal: Tensor, size: Tensor, norm: Tensor, going: Tensor
    ) -> bool:
        """Estimate row j + 1, and say whether any of it exceeds the square root of the rounding."""
        following = torch.zeros_like(self.current)
        if j > 0:
            rows, a, b = slice(0, j), diagonal, off_diagonal
            estimate = b[:, :j] * self.current[:, 1 : j + 1] + (a[:, :j] - a[:, j, None]) * self.current[:, rows]
            estimate[:, 1:] += b[:, : j - 1] * self.current[:, : j - 1]
            estimate -= b[:, j - 1, None] * self.previous[:, rows]
            estimate += estimate.sign() * 2 * self.eps * norm[:, None]
            following[:, rows] = torch.where(going[:, None], estimate / size[:, None], 0.0)
        following[:, j] = self.fresh
        following[:, j + 1] = 1
        self.previous, self.current = self.current, following
        return bool((following[:, :j].abs() > self.eps**0.5).any())

    def reset(self, j: int) -> None:
        """Row j + 1 has just been orthogonalised."""
        self.current[:, : j + 1] = self.fresh


def three_term_pullback(
    products: Products, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], *, rank: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The derivative of the bare recurrence, with O(n) work a step beside the product.

    Args:
        products: The operator.
        outputs: Vectors ``[..., K, n]``, diagonal, off-diagonal, residual and scale.
        cotangents: One for each of these.
        rank: ``[batch]``, where not all are of rank K.

    Returns:
        The gradient in the start vectors, ``[batch, n]``, and one for each of the operator's tensors.
    """
    depth, n = outputs[0].shape[-2:]
    batch = outputs[4].numel()  # not to be inferred from the off-diagonal, which is empty at depth one
    shapes = [(batch, depth, n), (batch, depth), (batch, depth - 1), (batch, n), (batch,)]
    vectors, a, b, residual, scale = (x.reshape(s) for x, s in zip(outputs, shapes, strict=True))
    given = [or_zeros(c, o) for c, o in zip(cotangents, outputs, strict=True)]
    vectors_, a_, b_, residual_, scale_ = (x.reshape(s) for x, s in zip(given, shapes, strict=True))
    if rank is None:
        rank = torch.full_like(scale, depth, dtype=torch.int64)
    multipliers = torch.zeros_like(vectors)
    following = torch.zeros_like(residual)
    xi = torch.zeros_like(residual)
    for k in reversed(range(depth)):
        x = vectors[:, k]
        inside, end = (rank > k)[:, None], (rank == k + 1)[:, None]
        # the last step is written in r = b_K x_{K+1}, which needs no division by a small b_K
        nu_end = a_[:, k, None] - _inner(x, residual_)
        step, after = residual_ + nu_end * x, nu_end * residual
        if k + 1 < depth:
            upper = vectors[:, k + 1]
            scaled = xi / b[:, k, None]
            mu = b_[:, k, None] - _inner(following, x) + _inner(upper, scaled)
            nu = a_[:, k, None] + _inner(x, scaled)
            step = torch.where(end, step, -scaled + mu * upper + nu * x)
            after = torch.where(end, after, b[:, k, None] * (nu * upper - following))
        step = torch.where(inside, step, 0.0)
        xi = torch.where(inside, a[:, k, None] * step - vectors_[:, k] - products(step) - after, 0.0)
        multipliers[:, k] = following = step
    x = vectors[:, 0]
    # x_1 = c v, and c itself
    gradient = (_inner(xi, x) * x - xi) * scale[:, None] - (scale_ * scale * scale)[:, None] * x
    return gradient, products.parameter_pullback(vectors, multipliers)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return inner(x, y)[:, None]
