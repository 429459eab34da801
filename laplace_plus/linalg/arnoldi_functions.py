"""Functions of a square operator that need not be symmetric, times a vector, by Arnoldi's method.

``f(A) v ≈ ‖v‖ Qᵀ f(H) e₁`` on the Krylov space of v (Y. Saad, "Analysis of some Krylov subspace approximations to the
matrix exponential operator", 1992), with the derivative of the computed value: the adjoint of the decomposition
(Krämer et al., 2024, see :mod:`laplace_plus.linalg.arnoldi`) after torch's of the small matrix function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_plus.checks import count
from laplace_plus.errors import OperatorError
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.arnoldi import ArnoldiDecomposition, decomposition
from laplace_plus.linalg.krylov import KrylovSpace
from laplace_plus.linalg.linear_maps import Matvec
from laplace_plus.linalg.matrix_functions import FunctionValue

MatrixFunction = Callable[[Tensor], Tensor]
"""A function of a square matrix ``[K, K]``, of torch operations, such as ``torch.linalg.matrix_exp``."""


@without_autocast
def arnoldi_function(
    matvec: Matvec,
    f: MatrixFunction,
    v: Tensor,
    *,
    depth: int = 30,
    tolerance: float | None = None,
    cap: int = 100,
    rmatvec: Matvec | None = None,
    dtype: torch.dtype | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> FunctionValue:
    """``f(A) v`` for a square operator; for symmetric ones :func:`~laplace_plus.linalg.matrix_function` is cheaper.

    Costs one product (of the stack) per step, 4nK² operations and memory for K vectors each. Exact once the Krylov
    space is invariant, and for polynomials of degree below K. The gradient in v, in the tensors that A depends on and
    in those of f is that of the computed value. It takes K transposed products and memory for K more vectors. In single
    entries of a discretised A it converges many steps after the value: compare it with that of a larger depth.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: A function of small square matrices in float64: ``torch.linalg.matrix_exp``, :func:`phi`,
            :func:`of_eigenvalues`, or one of your own.
        v: ``[n]``, or a stack ``[..., n]``.
        depth: K, at most n steps are taken.
        tolerance: Add steps until the error is below this fraction of the value's norm, for each vector. None takes
            ``depth`` steps, and ``converged`` then compares with the square root of machine epsilon.
        cap: Limit on the number of steps with a tolerance.
        rmatvec: Aᵀ, where torch cannot differentiate through ``matvec``.
        dtype: Type of the vectors.
        parameters: The tensors to differentiate in.

    Returns:
        ``value [..., n]``, ``error [...]``.

    Raises:
        ConfigurationError: Bad arguments.
        OperatorError: A vector of zero, an operator of another shape, or one that f does not take.
        NonFiniteError: NaN in a product.

    Example:
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> found = arnoldi_function(lambda v: v @ turn.T, torch.linalg.matrix_exp, torch.tensor([1.0, 0.0]))
        >>> found.value.round(decimals=4), found.converged  # cos 1 and sin 1
        (tensor([0.5403, 0.8415]), True)
    """
    start = start_vectors(v, depth, dtype, tolerance)
    cap = min(depth if tolerance is None else cap, start.shape[-1])
    space, depth = KrylovSpace(matvec, start, rmatvec=rmatvec, parameters=parameters), min(depth, cap)
    while True:
        now = ArnoldiDecomposition(*decomposition(space, start, depth))
        coordinates, error = _coordinates(now, f)
        value = (coordinates[..., None, :] @ now.vectors)[..., 0, :] / now.scale[..., None]
        error = error.to(value.dtype) / now.scale.detach()
        limit = torch.finfo(value.dtype).eps ** 0.5 if tolerance is None else tolerance
        converged = bool((error <= limit * value.detach().norm(dim=-1)).all())
        if converged or depth >= cap:
            return FunctionValue(value, error, now.matvecs, converged, now.vectors.shape[-2])
        depth = min(cap, depth + max(4, depth // 4))


def _coordinates(space: ArnoldiDecomposition, f: MatrixFunction) -> tuple[Tensor, Tensor]:
    """``f(H) e₁``, ``[..., K]``, and its change by the last quarter of the steps, as of a symmetric operator."""
    matrices, found, changes = space.hessenberg.flatten(0, -3) if space.rank.ndim else space.hessenberg[None], [], []
    for matrix, rank in zip(matrices, space.rank.flatten().tolist(), strict=True):
        steps = rank - max(1, rank // 4)
        columns = (f(matrix[:k, :k].double())[:, :1].flatten() for k in (rank, max(1, steps)))
        now, earlier = (pad(column, (0, len(matrix) - len(column))) for column in columns)
        found.append(now)
        known = rank < len(matrix) or space.converged
        changes.append(now.new_zeros(()) if known else (now - earlier if steps else now).detach().norm())
    shape = space.rank.shape
    return torch.stack(found).view(*shape, -1).to(space.vectors.dtype), torch.stack(changes).view(shape)


def phi(order: int) -> MatrixFunction:
    """``φ_k(z) = Σ_j zʲ/(j + k)!`` of a matrix, for exponential integrators; φ₀ is the exponential.

    It is a block of the exponential of an augmented matrix (A. H. Al-Mohy and N. J. Higham, 2011).
    """
    count("order", order, 0)

    def evaluate(matrix: Tensor) -> Tensor:
        n = len(matrix)
        links = torch.diag(matrix.new_ones(order * n), n) if order else 0.0
        augmented = torch.block_diag(matrix, matrix.new_zeros(order * n, order * n)) + links
        return torch.linalg.matrix_exp(augmented)[:n, order * n :]

    return evaluate


def of_eigenvalues(f: Callable[[Tensor], Tensor]) -> MatrixFunction:
    """The matrix function of a real analytic function such as ``torch.sqrt``, which gets complex eigenvalues.

    :class:`OperatorError` where eigenvectors are nearly dependent, or the result is not real: f then has a cut there.
    """

    def evaluate(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eig(matrix)
        condition = float(torch.linalg.cond(vectors.detach()))
        if not condition < 1e8:  # half of float64's digits are lost  # noqa: PLR2004
            what, fix = "The eigenvectors are nearly dependent.", "Write f as a function of the matrix."
            raise OperatorError(what, expected="a condition below 1e8", got=f"{condition:.2g}", fix=fix)
        result = torch.linalg.solve(vectors, vectors * f(values), left=False)
        if not bool(result.detach().imag.norm() <= condition * 1e-12 * result.detach().norm()):
            what, expected = "The function is not real on this operator.", "f(z̄) the conjugate of f(z) at eigenvalues"
            raise OperatorError(what, expected=expected, got=f"eigenvalues such as {complex(values[0]):.3g}")
        return result.real

    return evaluate
