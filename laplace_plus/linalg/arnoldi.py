"""Arnoldi's decomposition of a square operator, with its adjoint derivative.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem", Quarterly of
Applied Mathematics 1951; the derivative is that of N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of
functions of large matrices", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.linalg.adjoints import hessenberg_pullback
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.krylov import ArnoldiProcess, krylov_map, stacked, truncated_depth
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


@without_autocast
def arnoldi(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    rmatvec: Matvec | None = None,
    reproject: bool = True,
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
        depth: K ≥ 1; at most n steps are taken.
        rmatvec: Aᵀ, where torch cannot differentiate through ``matvec``.
        reproject: Whether the derivative enforces the constraints of exact arithmetic. This costs two more products
            with Q per step; without it the derivative is wrong for ill-conditioned Krylov spaces.
        parameters: The tensors to differentiate in, where they cannot be found from the operator.
        tolerance: A Krylov space is invariant where ‖w‖ ≤ tolerance · max ‖A q_j‖; ten times machine epsilon by
            default. 0 continues to the last direction of a nearly singular operator, which its derivatives need.
        dtype: Type of the start vectors; that of ``v`` by default. Half precision is used for products only.

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
    start = start_vectors(v, depth, dtype)
    operator = krylov_map(matvec, start, rmatvec=rmatvec, parameters=parameters)
    shape = start.shape[:-1]
    with torch.no_grad():
        found = ArnoldiProcess(operator, stacked(start), tolerance).extend(min(depth, operator.n))
        kept = truncated_depth("Arnoldi's process", found.scale, found.rank, found.hessenberg, found.residual)
        ragged = found.rank if bool((found.rank < kept).any()) else None
        outputs = (
            found.vectors[:, :kept].reshape(*shape, kept, -1),
            found.hessenberg[:, :kept, :kept].reshape(*shape, kept, kept),
            found.residual.reshape(start.shape),
            found.scale.reshape(shape),
        )

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        gradient, gradients = hessenberg_pullback(operator, outputs, cotangents, rank=ragged, reproject=reproject)
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    matvecs = operator.matvecs
    vectors, hessenberg, residual, scale = attach(outputs, [start, *operator.tensors], pullback)
    return ArnoldiDecomposition(
        vectors, hessenberg, residual, scale, found.rank.reshape(shape), matvecs, bool(found.invariant.all())
    )
