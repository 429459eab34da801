"""Arnoldi's decomposition of a square operator and Lanczos' of a symmetric one, with their adjoint derivatives.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem", Quarterly of
Applied Mathematics 1951; C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear
differential and integral operators", Journal of Research of the National Bureau of Standards 1950; the derivatives by
N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of large matrices", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.krylov import KrylovSpace, krylov_pullback
from laplace_plus.linalg.linear_maps import Matvec, attach


@dataclass(frozen=True)
class ArnoldiDecomposition:
    """``A Q = Q H + r e_Kᵀ`` with ``QᵀQ = I``, ``Qᵀr = 0`` and ``q_1 = c v``.

    Where the Krylov space of a start vector ends early (``rank`` < K), its rows and columns beyond its rank are zero,
    and the equations hold with ``e_rank``.

    Attributes:
        vectors: Q by rows, ``[..., K, n]``.
        hessenberg: H, ``[..., K, K]``, upper Hessenberg: ``H[i, j] = q_iᵀ A q_j``.
        residual: r, ``[..., n]``.
        scale: c = 1/‖v‖, ``[...]``.
        rank: ``[...]`` integers, the dimension of each Krylov space found; at most K.
        matvecs: Number of operator–vector products.
        converged: Whether all Krylov spaces are invariant, so that H has eigenvalues of A only.
    """

    vectors: Tensor
    hessenberg: Tensor
    residual: Tensor
    scale: Tensor
    rank: Tensor
    matvecs: int
    converged: bool


class LanczosDecomposition(ArnoldiDecomposition):
    """``A Q = Q T + r e_Kᵀ`` with ``QᵀQ = I``, ``Qᵀr = 0``, ``q_1 = c v`` and a tridiagonal T.

    It has the attributes of an :class:`ArnoldiDecomposition`, whose H is T here, and its diagonals.
    """

    @property
    def diagonal(self) -> Tensor:
        """Diagonal of T, ``[..., K]``."""
        return self.hessenberg.diagonal(dim1=-2, dim2=-1)

    @property
    def off_diagonal(self) -> Tensor:
        """Off-diagonal of T, ``[..., K − 1]``, not negative."""
        return self.hessenberg.diagonal(-1, dim1=-2, dim2=-1)

    def tridiagonal(self) -> Tensor:
        """T as a dense matrix, ``[..., K, K]``."""
        return self.hessenberg


@without_autocast
def arnoldi(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    rmatvec: Matvec | None = None,
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
) -> ArnoldiDecomposition:
    """Decompose an operator on the Krylov space of a vector, by Arnoldi's process with full re-orthogonalisation.

    Costs ``depth`` products (of the whole stack), 4nK² floating-point operations, and memory for K vectors. The result
    is differentiable in ``v`` and in the tensors that the operator depends on. The derivative costs K transposed
    products, one vector–Jacobian product of K vectors, and memory for K more vectors; no graph of a product is stored.

    Args:
        matvec: A, a square operator on row-stacked vectors.
        v: Start vector ``[n]``, or a stack ``[..., n]``, which is multiplied together.
        depth: K; at most n steps are taken.
        rmatvec: Aᵀ, where torch cannot differentiate through ``matvec``.
        tolerance: A Krylov space is invariant where ‖w‖ ≤ tolerance · max ‖A q_j‖; ten times machine epsilon by
            default. 0 continues to the last direction of a nearly singular operator, which its derivatives need.
        parameters: The tensors to differentiate in.
        dtype: Type of the vectors.

    Raises:
        ConfigurationError: A bad start vector, depth or tolerance.
        OperatorError: A start vector of zero, or an operator of another shape or type.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
        >>> result = arnoldi(lambda v: v @ a.T, torch.tensor([1.0, 0.0], dtype=torch.float64), depth=2)
        >>> result.hessenberg.tolist(), result.converged
        ([[0.0, 2.0], [1.0, 0.0]], True)
    """
    start = start_vectors(v, depth, dtype, tolerance)
    space = KrylovSpace(matvec, start, rmatvec=rmatvec, parameters=parameters, tolerance=tolerance)
    return ArnoldiDecomposition(*decomposition(space, start, depth))


@without_autocast
def lanczos(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    check_symmetry: bool = True,
    dtype: torch.dtype | None = None,
) -> LanczosDecomposition:
    """Decompose a symmetric operator on the Krylov space of a vector, with full re-orthogonalisation.

    Costs ``depth`` products (of the whole stack), 2nK² floating-point operations and memory for K vectors. The result
    is differentiable in ``v`` and in the tensors that the operator depends on. The derivative costs K products, one
    vector–Jacobian product of K vectors, and memory for K more vectors; no graph of a product is stored.

    The arguments are those of :func:`arnoldi`; ``check_symmetry`` tells whether to check that A is symmetric, which
    takes no product.

    Raises:
        ConfigurationError: A bad start vector, depth or tolerance.
        OperatorError: A start vector of zero, or an operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
        >>> result = lanczos(lambda v: v @ a, torch.ones(3, dtype=torch.float64), depth=3)
        >>> [round(x, 6) for x in torch.linalg.eigvalsh(result.tridiagonal()).tolist()]
        [1.0, 2.0, 4.0]
    """
    start = start_vectors(v, depth, dtype, tolerance)
    space = KrylovSpace(
        matvec, start, symmetric=True, parameters=parameters, tolerance=tolerance, check_symmetry=check_symmetry
    )
    return LanczosDecomposition(*decomposition(space, start, depth))


def decomposition(
    space: KrylovSpace, start: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, bool]:
    """The fields of an :class:`ArnoldiDecomposition`, after a space was extended."""
    space.extend(depth)
    operator, rank, matvecs, shape = space.operator, space.rank, space.operator.matvecs, start.shape[:-1]
    outputs = [x.reshape((*shape, *x.shape[1:])) for x in (space.vectors, space.matrix, space.residual, space.norm)]

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        gradient, gradients = krylov_pullback(operator, outputs, cotangents, rank)
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    vectors, matrix, residual, norm = attach(outputs, [start, *operator.tensors], pullback)
    return vectors, matrix, residual, norm.reciprocal(), rank.reshape(shape), matvecs, space.complete
