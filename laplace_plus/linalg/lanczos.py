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

from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg.adjoints import or_zeros
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.arnoldi import hessenberg_pullback
from laplace_plus.linalg.krylov import ArnoldiProcess, Products, require_symmetric, truncated_depth
from laplace_plus.linalg.linear_maps import Matvec, attach
from laplace_plus.linalg.three_term import three_term, three_term_pullback


@dataclass(frozen=True)
class LanczosDecomposition:
    """``A Q = Q T + r e_Kᵀ`` with ``QᵀQ = I``, ``Qᵀr = 0``, ``q_1 = c v`` and a tridiagonal T.

    Where the Krylov space of a start vector ends early (``rank`` < K), its rows beyond its rank are zero, and so is
    what belongs to them in T; the equations hold with ``e_rank``.

    Attributes:
        vectors: Q by rows, ``[..., K, n]``.
        diagonal: Of T, ``[..., K]``.
        off_diagonal: Of T, ``[..., K − 1]``, not negative.
        residual: r, ``[..., n]``.
        scale: c = 1/‖v‖, ``[...]``.
        rank: ``[...]`` integers, the dimension of each Krylov space found; at most K.
        matvecs: Number of operator-vector products.
        converged: Whether all Krylov spaces are invariant, so that T has eigenvalues of A only.
        reorthogonalizations: Number of steps at which the new vectors were orthogonalised against all previous ones.
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
    reorthogonalize: Literal["full", "selective", "none"] = "full",
    adjoint: Literal["reprojected", "three_term"] = "reprojected",
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    check_symmetry: bool = True,
    dtype: torch.dtype | None = None,
) -> LanczosDecomposition:
    """Decompose a symmetric operator on the Krylov space of a vector.

    Costs ``depth`` products (of the whole stack) and memory for K vectors; full re-orthogonalisation 2nK²
    floating-point operations, selective one a part of that. The result can be differentiated in ``v`` and in the
    tensors that the operator depends on; that costs K products, one vector–Jacobian product of K vectors, and memory
    for K more vectors, and keeps no graph of a product.

    Args:
        matvec: A, a symmetric operator on row-stacked vectors.
        v: Start vector ``[n]``, or a stack ``[..., n]`` of them, which are multiplied together.
        depth: K ≥ 1; at most n steps are taken.
        reorthogonalize: ``"full"``: every new vector against all previous ones. ``"selective"``: only when
            Simon's recurrence estimates that orthogonality has fallen to the square root of the rounding; reads one
            flag from the device in each step. ``"none"``: the bare three-term recurrence, which loses orthogonality as
            soon as an eigenvalue converges; for a few steps only.
        adjoint: ``"reprojected"``: the derivative that enforces its constraints; needs orthogonal vectors, i.e. not
            ``"none"``. ``"three_term"``: the derivative of the bare recurrence, with O(n) work a step beside the
            product; useless (up to NaN) once orthogonality would be lost.
        parameters: The tensors to differentiate in, where they are not to be found from the operator.
        tolerance: A Krylov space has ended where ‖w‖ ≤ tolerance · max ‖A q_j‖; ten roundings of the type by default.
            0 goes on to the last direction of a nearly singular operator, whose derivatives would miss it.
        check_symmetry: Whether to check that A is symmetric, which is free with full re-orthogonalisation and not done
            without.
        dtype: Type of the start vectors; that of ``v`` by default. Half precision is for products only.

    Raises:
        ConfigurationError: A start vector, depth, tolerance or option that makes no sense.
        OperatorError: A start vector of zero, or an operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
        >>> result = lanczos(lambda v: v @ a, torch.ones(3, dtype=torch.float64), depth=3)
        >>> [round(x, 6) for x in torch.linalg.eigvalsh(result.tridiagonal()).tolist()]
        [1.0, 2.0, 4.0]
    """
    if reorthogonalize not in ("full", "selective", "none") or adjoint not in ("reprojected", "three_term"):
        raise ConfigurationError(
            "There is no such option.",
            expected='reorthogonalize="full", "selective" or "none", and adjoint="reprojected" or "three_term"',
            got=f"{reorthogonalize!r} and {adjoint!r}",
        )
    start = start_vectors(v, depth, dtype)
    products = Products(matvec, start, symmetric=True, parameters=parameters)
    steps = min(depth, start.shape[-1])
    with torch.no_grad():
        if reorthogonalize == "full":
            found = ArnoldiProcess(products, products.stacked(start), tolerance).extend(steps)
            reorthogonalizations = steps
        else:
            found, reorthogonalizations = three_term(
                products, products.stacked(start), steps, tolerance, selective=reorthogonalize == "selective"
            )
        kept = truncated_depth("Lanczos' process", found.scale, found.rank, found.hessenberg, found.residual)
        if reorthogonalize == "full" and check_symmetry:
            require_symmetric(found.hessenberg, products.outer)
        shape = products.batch
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
            gradient, gradients = three_term_pullback(products, outputs, cotangents, rank=ragged)
        else:
            matrix = tridiagonal(diagonal, off_diagonal)
            matrix_ = tridiagonal(or_zeros(diagonal_, diagonal), or_zeros(off_diagonal_, off_diagonal) / 2)
            gradient, gradients = hessenberg_pullback(
                products,
                (vectors, matrix, residual, scale),
                (vectors_, matrix_, residual_, scale_),
                rank=ragged,
                symmetric=True,
            )
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    matvecs = products.map.matvecs
    vectors, diagonal, off_diagonal, residual, scale = attach(outputs, [start, *products.map.tensors], pullback)
    return LanczosDecomposition(
        vectors,
        diagonal,
        off_diagonal,
        residual,
        scale,
        found.rank.reshape(shape),
        matvecs,
        bool(found.invariant.all()),
        reorthogonalizations,
    )
