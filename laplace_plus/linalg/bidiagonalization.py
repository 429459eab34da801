"""Golub and Kahan's bidiagonalisation of a rectangular operator, with its adjoint derivative.

G. Golub and W. Kahan, "Calculating the singular values and pseudo-inverse of a matrix", SIAM Journal on Numerical
Analysis 1965. It is Lanczos' process for ``[[0, A], [Aᵀ, 0]]`` from ``(0, v)``, whose vectors are ``(0, v_1), (u_1, 0),
(0, v_2), …``, and so is its derivative; the condition number is not squared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from laplace_plus.linalg.krylov import KrylovSpace, LanczosDecomposition, decomposition, map_of, start_vectors
from laplace_plus.linalg.linear_maps import NOT_TRANSPOSED, LinearMap, Matvec, without_autocast
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
) -> Bidiagonalization:
    """Decompose an m × n operator from a start vector of length n, with full re-orthogonalisation of both sides.

    Costs ``depth`` products with A and as many with Aᵀ (of the whole stack), ``8(m + n)K²`` floating-point operations,
    and memory for 2K vectors of length m + n. The result is differentiable in ``v`` and in the tensors that the
    operator depends on, at the same cost again; no graph of a product is stored.

    The arguments are those of :func:`~laplace_plus.linalg.arnoldi`. At most min(m, n) steps are taken, where m is the
    length of A's output vectors: by default the operator's, or n for a plain callable.

    Raises:
        ConfigurationError: A bad start vector or depth.
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
    start = start_vectors(v, depth)
    n = start.shape[-1]
    if m is None:
        m = matvec.shape[0] if isinstance(matvec, Operator) else n
    A = map_of(matvec, start, m=m, rmatvec=rmatvec, parameters=parameters)
    start = pad(start, (m, 0))
    space = KrylovSpace(_Augmented(A), start, 2 * min(depth, m, n))
    found = LanczosDecomposition(*decomposition(space, start))
    # Where A v lies in the span of the left vectors, the right vector v is dropped and stays in the residual.
    rank, steps = found.rank // 2, found.vectors.shape[-2]
    size = max(int(rank.max()), 1)
    missing = max(2 * size - steps, 0)
    vectors, beside = pad(found.vectors, (0, 0, 0, missing)), pad(found.off_diagonal, (0, missing))
    inside = torch.arange(size, device=rank.device) < rank[..., None]
    pairs = vectors[..., : 2 * size, :].unflatten(-2, (size, 2)) * inside[..., None, None]
    diagonal, above = beside[..., : 2 * size : 2] * inside, beside[..., 1 : 2 * size - 1 : 2] * inside[..., 1:]
    last = (found.rank - 1)[..., None]
    dropped = vectors.gather(-2, last[..., None].expand(*last.shape, m + n))[..., 0, :]
    dropped = beside.gather(-1, (last - 1).clamp(min=0)) * dropped * (last > 0)
    residual = torch.where(found.rank[..., None] % 2 == 1, dropped, found.residual)[..., m:]
    converged = found.converged or bool((rank == n).all())
    left, right = pairs[..., 1, :m], pairs[..., 0, m:]
    return Bidiagonalization(left, right, diagonal, above, residual, found.scale, rank, found.matvecs, converged)


class _Augmented(LinearMap):
    """``[[0, A], [Aᵀ, 0]]``, for vectors of which one half is zero."""

    symmetric = True
    complaint = NOT_TRANSPOSED

    def __init__(self, A: LinearMap):
        self._own, self.n, self.m = A, A.m + A.n, A.m + A.n

    @property
    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return self._own.tensors

    @property
    def matvecs(self) -> int:  # type: ignore[override]
        """Products with A and with its transpose."""
        return self._own.matvecs

    @override
    def __call__(self, vectors: Tensor) -> Tensor:
        A, (left, right) = self._own, vectors.split([self._own.m, self._own.n], -1)
        products = torch.zeros_like(vectors)
        if bool(right.any()):
            products[..., : A.m] = A(right.contiguous())
        if bool(left.any()):
            products[..., A.m :] = A.transposed(left.contiguous())
        return products

    @override
    def parameter_pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        # the cotangents φ of A v_k and ψ of Aᵀ u_k, in turn, and ⟨ψ, Aᵀ u⟩ = ⟨u, A ψ⟩
        m, v, u = self._own.m, vectors[..., ::2, :], vectors[..., 1::2, :]
        phi, psi = cotangents[..., ::2, :], cotangents[..., 1::2, :]
        inputs, outputs = torch.cat([v, psi], -2)[..., m:], torch.cat([phi, u], -2)[..., :m]
        return self._own.parameter_pullback(inputs, outputs)
