"""Lanczos' decomposition of a symmetric operator, with its adjoint derivative.

C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
operators", Journal of Research of the National Bureau of Standards 1950; selective re-orthogonalisation by H. D. Simon,
"The Lanczos algorithm with partial reorthogonalization", Mathematics of Computation 1984; the derivatives by N. Krämer,
P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of large matrices", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.kernels import inner, three_term_update, vector_norm
from laplace_plus.linalg.adjoints import hessenberg_pullback, or_zeros
from laplace_plus.linalg.arguments import require_choice, start_vectors, without_autocast
from laplace_plus.linalg.krylov import (
    ArnoldiProcess,
    krylov_map,
    orthogonalize,
    require_symmetric,
    stacked,
    truncated_depth,
)
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach

Reorthogonalization = Literal["full", "selective", "none"]
Adjoint = Literal["reprojected", "three_term"]


@dataclass(frozen=True)
class LanczosDecomposition:
    """``A Q = Q T + r e_Kᵀ`` with ``QᵀQ = I``, ``Qᵀr = 0``, ``q_1 = c v`` and a tridiagonal T.

    Where the Krylov space of a start vector ends early (``rank`` < K), its rows of Q and T beyond its rank are zero,
    and the equations hold with ``e_rank``.

    Attributes:
        vectors: Q by rows, ``[..., K, n]``.
        diagonal: Diagonal of T, ``[..., K]``.
        off_diagonal: Off-diagonal of T, ``[..., K − 1]``, not negative.
        residual: r, ``[..., n]``.
        scale: c = 1/‖v‖, ``[...]``.
        rank: ``[...]`` integers, the dimension of each Krylov space found; at most K.
        matvecs: Number of operator–vector products.
        converged: Whether all Krylov spaces are invariant, so that T has eigenvalues of A only.
        reorthogonalizations: Number of steps in which the new vectors were orthogonalised against all previous ones.
    """

    vectors: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    residual: Tensor
    scale: Tensor
    rank: Tensor
    matvecs: int
    converged: bool
    reorthogonalizations: int

    def tridiagonal(self) -> Tensor:
        """T as a dense matrix, ``[..., K, K]``."""
        return tridiagonal(self.diagonal, self.off_diagonal)


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """The symmetric matrix ``[..., K, K]`` of a diagonal ``[..., K]`` and an off-diagonal ``[..., K − 1]``."""
    side = torch.diag_embed(off_diagonal, 1)
    return torch.diag_embed(diagonal) + side + side.mT


@without_autocast
def lanczos(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    reorthogonalize: Reorthogonalization = "full",
    adjoint: Adjoint = "reprojected",
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    check_symmetry: bool = True,
    dtype: torch.dtype | None = None,
) -> LanczosDecomposition:
    """Decompose a symmetric operator on the Krylov space of a vector.

    Costs ``depth`` products (of the whole stack) and memory for K vectors. Full re-orthogonalisation costs 2nK²
    floating-point operations, selective re-orthogonalisation a fraction of that. The result is differentiable in ``v``
    and in the tensors that the operator depends on. The derivative costs K products, one vector–Jacobian product of K
    vectors, and memory for K more vectors; no graph of a product is stored.

    Args:
        matvec: A, a symmetric operator on row-stacked vectors.
        v: Start vector ``[n]``, or a stack ``[..., n]``, which is multiplied together.
        depth: K ≥ 1; at most n steps are taken.
        reorthogonalize: ``"full"``: every new vector against all previous ones. ``"selective"``: only where Simon's
            recurrence estimates that orthogonality has fallen to the square root of machine epsilon; reads one flag
            from the device in each step. ``"none"``: the three-term recurrence alone, which loses orthogonality as soon
            as an eigenvalue converges; for a few steps only.
        adjoint: ``"reprojected"``: the derivative that enforces its constraints; it needs orthogonal vectors, i.e. not
            ``"none"``. ``"three_term"``: the derivative of the three-term recurrence, with O(n) work per step beside
            the product; wrong (up to NaN) where the recurrence would lose orthogonality.
        parameters: The tensors to differentiate in, where they cannot be found from the operator.
        tolerance: A Krylov space is invariant where ‖w‖ ≤ tolerance · max ‖A q_j‖; ten times machine epsilon by
            default. 0 continues to the last direction of a nearly singular operator, which its derivatives need.
        check_symmetry: Whether to check that A is symmetric; free with full re-orthogonalisation, not done without.
        dtype: Type of the start vectors; that of ``v`` by default. Half precision is used for products only.

    Raises:
        ConfigurationError: A bad start vector, depth, tolerance or option.
        OperatorError: A start vector of zero, or an operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
        >>> result = lanczos(lambda v: v @ a, torch.ones(3, dtype=torch.float64), depth=3)
        >>> [round(x, 6) for x in torch.linalg.eigvalsh(result.tridiagonal()).tolist()]
        [1.0, 2.0, 4.0]
    """
    require_choice("reorthogonalize", reorthogonalize, Reorthogonalization)
    require_choice("adjoint", adjoint, Adjoint)
    start = start_vectors(v, depth, dtype)
    operator = krylov_map(matvec, start, symmetric=True, parameters=parameters)
    steps, shape = min(depth, operator.n), start.shape[:-1]
    full = reorthogonalize == "full"
    with torch.no_grad():
        process = ArnoldiProcess(operator, stacked(start), tolerance)
        if not full:
            process = _ThreeTerm(operator, stacked(start), steps, tolerance, reorthogonalize)
        found = process.extend(steps)
        kept = truncated_depth("Lanczos' process", found.scale, found.rank, found.hessenberg, found.residual)
        if full and check_symmetry:
            require_symmetric(found.hessenberg, start.dtype)
        ragged = found.rank if bool((found.rank < kept).any()) else None
        small = found.hessenberg[:, :kept, :kept]
        outputs = (
            found.vectors[:, :kept].reshape(*shape, kept, -1),
            small.diagonal(dim1=-2, dim2=-1).reshape(*shape, kept),
            small.diagonal(-1, dim1=-2, dim2=-1).reshape(*shape, kept - 1),
            found.residual.reshape(start.shape),
            found.scale.reshape(shape),
        )

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        vectors, diagonal, off_diagonal, residual, scale = outputs
        vectors_, diagonal_, off_diagonal_, residual_, scale_ = cotangents
        if adjoint == "three_term":
            gradient, gradients = _three_term_pullback(operator, outputs, cotangents, rank=ragged)
        else:
            matrix = tridiagonal(diagonal, off_diagonal)
            matrix_ = tridiagonal(or_zeros(diagonal_, diagonal), or_zeros(off_diagonal_, off_diagonal) / 2)
            gradient, gradients = hessenberg_pullback(
                operator,
                (vectors, matrix, residual, scale),
                (vectors_, matrix_, residual_, scale_),
                rank=ragged,
                symmetric=True,
            )
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    matvecs = operator.matvecs
    vectors, diagonal, off_diagonal, residual, scale = attach(outputs, [start, *operator.tensors], pullback)
    return LanczosDecomposition(
        vectors,
        diagonal,
        off_diagonal,
        residual,
        scale,
        found.rank.reshape(shape),
        matvecs,
        bool(found.invariant.all()),
        process.reorthogonalizations,
    )


class _ThreeTerm(ArnoldiProcess):
    """The recurrence ``b_k q_{k+1} = A q_k − a_k q_k − b_{k−1} q_{k−1}``, with selective re-orthogonalisation or none.

    Simon's recurrence estimates ``ω_jk ≈ q_jᵀ q_k``, one row at a time. Where an estimate exceeds the square root of
    machine epsilon, this and the next vector are orthogonalised against all previous ones.
    """

    def __init__(self, operator: LinearMap, start: Tensor, depth: int, tolerance: float | None, mode: str):
        super().__init__(operator, start, tolerance)
        self._selective = mode == "selective"
        self._eps = torch.finfo(start.dtype).eps
        self._fresh = self._eps * start.shape[1] ** 0.5  # ω of vectors that were just orthogonalised
        self._omega_before = start.new_zeros(len(start), depth + 1)
        self._omega = start.new_zeros(len(start), depth + 1)
        self._omega[:, 0] = 1
        self._again = False

    @override
    def _outside(self, product: Tensor, k: int) -> tuple[Tensor, Tensor]:
        previous = (self._basis[:, k - 1], self._size) if k else (None, None)
        rest, alpha, _ = three_term_update(product, self._next, *previous)
        # a second pass against the last two vectors is cheap and keeps them orthogonal to rounding
        first = max(k - 1, 0)
        rest, correction = orthogonalize(self._basis[:, first : k + 1], rest, passes=1)
        coefficients = torch.nn.functional.pad(correction, (first, 0))
        coefficients[:, k] += alpha
        if k:
            coefficients[:, k - 1] += self._size
        if self._selective:
            lost = self._estimate(k, coefficients[:, k], vector_norm(rest))
            if lost or self._again:
                rest, _ = orthogonalize(self._basis[:, : k + 1], rest)
                self._omega[:, : k + 1] = self._fresh
                self._again = lost and not self._again
                self.reorthogonalizations += 1
        return rest, coefficients

    def _estimate(self, k: int, alpha: Tensor, size: Tensor) -> bool:
        """Row k + 1 of ω; whether an entry exceeds the square root of machine epsilon."""
        following = torch.zeros_like(self._omega)
        if k > 0:
            a = self._hessenberg.diagonal(dim1=1, dim2=2)
            b = self._hessenberg.diagonal(-1, dim1=1, dim2=2)
            estimate = b[:, :k] * self._omega[:, 1 : k + 1] + (a[:, :k] - alpha[:, None]) * self._omega[:, :k]
            estimate[:, 1:] += b[:, : k - 1] * self._omega[:, : k - 1]
            estimate -= b[:, k - 1, None] * self._omega_before[:, :k]
            estimate += estimate.sign() * 2 * self._eps * self._largest[:, None]
            growing = self._active & (size > self._limit * self._largest)
            following[:, :k] = torch.where(growing[:, None], estimate / size[:, None], 0.0)
        following[:, k] = self._fresh
        following[:, k + 1] = 1
        self._omega_before, self._omega = self._omega, following
        return bool((following[:, :k].abs() > self._eps**0.5).any())


def _three_term_pullback(
    operator: LinearMap, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], *, rank: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The derivative of the three-term recurrence in the start vectors ``[batch, n]`` and in the operator's tensors."""
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

    def dot(x: Tensor, y: Tensor) -> Tensor:
        return inner(x, y)[:, None]

    for k in reversed(range(depth)):
        x = vectors[:, k]
        inside, end = (rank > k)[:, None], (rank == k + 1)[:, None]
        # the last step is written in r = b_K x_{K+1}, which avoids a division by a small b_K
        nu_end = a_[:, k, None] - dot(x, residual_)
        step, after = residual_ + nu_end * x, nu_end * residual
        if k + 1 < depth:
            upper = vectors[:, k + 1]
            scaled = xi / b[:, k, None]
            mu = b_[:, k, None] - dot(following, x) + dot(upper, scaled)
            nu = a_[:, k, None] + dot(x, scaled)
            step = torch.where(end, step, -scaled + mu * upper + nu * x)
            after = torch.where(end, after, b[:, k, None] * (nu * upper - following))
        step = torch.where(inside, step, 0.0)
        xi = torch.where(inside, a[:, k, None] * step - vectors_[:, k] - operator(step) - after, 0.0)
        multipliers[:, k] = following = step
    x = vectors[:, 0]
    # x_1 = c v, and c itself
    gradient = (dot(xi, x) * x - xi) * scale[:, None] - (scale_ * scale * scale)[:, None] * x
    return gradient, operator.parameter_pullback(vectors, multipliers)
