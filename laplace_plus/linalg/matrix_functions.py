"""Functions of an operator times a vector: by Lanczos' method where it is symmetric, else by Arnoldi's.

``f(A) v ≈ ‖v‖ Q f(T) e₁`` on the Krylov space of v (V. Druskin and L. Knizhnerman, "Two polynomial methods of
calculating functions of symmetric matrices", 1989; Y. Saad, "Analysis of some Krylov subspace approximations to the
matrix exponential operator", 1992). For symmetric operators the derivative is that of f(A) itself, by the
Daleckii–Krein formula on the Krylov spaces. For others it is that of the computed value: the adjoint of the
decomposition (:mod:`laplace_plus.linalg.krylov`) after torch's of the small matrix function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_plus.checks import count
from laplace_plus.errors import OperatorError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.krylov import ArnoldiDecomposition, KrylovSpace, decomposition, map_of, start_vectors
from laplace_plus.linalg.linear_maps import Matvec, attach_one, without_autocast
from laplace_plus.linalg.quadrature import SpectralFunction, SpectralSpace, divided_differences

MatrixFunction = Callable[[Tensor], Tensor]
"""A function of a square matrix ``[K, K]``, of torch operations, such as ``torch.linalg.matrix_exp``."""


@dataclass(frozen=True)
class FunctionValue:
    """A function of an operator, evaluated on a Krylov space.

    Attributes:
        value: The result; differentiable.
        error: ``[...]`` for each start vector, the norm of the change of the value over the last quarter of the steps.
            It bounds the remaining error if convergence is geometric and halves the error in that many steps; zero if
            the space is invariant.
        matvecs: Number of operator–vector products.
        converged: Whether every error is below the value's norm times the square root of machine epsilon.
        depth: Number of steps.
    """

    value: Tensor
    error: Tensor
    matvecs: int
    converged: bool
    depth: int


@without_autocast
def matrix_function(
    matvec: Matvec,
    f: SpectralFunction,
    v: Tensor,
    *,
    depth: int = 30,
    parameters: Iterable[Tensor] | None = None,
) -> FunctionValue:
    """``f(A) v`` for a symmetric operator.

    Costs one product (of the stack) per step and memory for K vectors each. Exact once K reaches the number of distinct
    eigenvalues, and for polynomials of degree below K. Otherwise the error is at most 2‖v‖ times that of the best
    polynomial of degree K − 1 on the spectrum; of ``vᵀ f(A) v = (value * v).sum(-1)``, Gauss quadrature, that of degree
    2K − 1. Other operators: :func:`~laplace_plus.linalg.arnoldi_function`.

    The value is differentiable in v, in the tensors that A depends on, and in those that f depends on. For a cotangent
    u, ``f(A) u`` on the Krylov space of u is the gradient in v, and the Daleckii–Krein formula between both spaces that
    in A. It takes K more products and one vector–Jacobian product batched over K vectors, and is about as accurate as
    the value.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: Elementwise function of eigenvalues, of torch operations, e.g. ``torch.exp``.
        v: ``[n]``, or a stack ``[..., n]``.
        depth: K, at most n steps are taken.
        parameters: The tensors to differentiate in.

    Returns:
        ``value [..., n]`` (float32 for half precision), ``error [...]``.

    Raises:
        ConfigurationError: Bad arguments, or an f that is not elementwise.
        OperatorError: A vector of zero, or an operator that is not symmetric or of another shape.
        NonFiniteError: NaN in a product, or an f that is not finite on the spectrum.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
        >>> matrix_function(lambda v: v @ matrix, torch.sqrt, torch.ones(3)).value.round(decimals=4)
        tensor([1., 2., 3.])
    """
    start = start_vectors(v, depth)
    space = SpectralSpace(map_of(matvec, start, symmetric=True, parameters=parameters), start, depth)
    coordinates, error = space.evaluated(partial(space.coordinates, f))
    now = coordinates.detach()
    converged, matvecs, shape = _has_converged(space, error, now), space.operator.matvecs, start.shape

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        to_start, gradients = _two_sided(matvec, f, space, start, cotangent.reshape(-1, shape[-1]))
        return to_start.reshape(shape).to(start.dtype), *gradients

    value = attach_one(space.combine(now).reshape(shape), [start, *space.operator.tensors], pullback)
    if coordinates.requires_grad:  # f depends on tensors of its own
        value = value + space.combine(coordinates - now).reshape(shape)
    return FunctionValue(value, error.reshape(shape[:-1]).to(value.dtype), matvecs, converged, space.depth)


def _has_converged(space: KrylovSpace, error: Tensor, value: Tensor) -> bool:
    return bool((error <= torch.finfo(space.vectors.dtype).eps ** 0.5 * value.norm(dim=-1)).all())


def _two_sided(
    matvec: Matvec, f: SpectralFunction, space: SpectralSpace, start: Tensor, cotangents: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The derivative of ``Σ uᵀ f(A) v`` in v and A, from the Krylov spaces of the v and of the u.

    ``A ≈ P R Pᵀ`` on the space of u and ``A ≈ Q T Qᵀ`` on that of v. The derivative ``uᵀ L_f(A, E) v`` is a sum over
    the eigenvectors of R and T, weighted by the divided differences of f between their eigenvalues.
    """
    alive = (vector_norm(cotangents) > 0)[:, None]
    unit = torch.where(alive, cotangents, space.vectors[:, 0])
    # As many steps were asked for; where the space of v ended early, that of u may be larger.
    other_start = (unit[0] if start.ndim == 1 else unit).to(start.dtype)
    other = SpectralSpace(map_of(matvec, other_start, symmetric=True, parameters=()), other_start, space.requested)
    mu, left = other.spectrum()
    lam, right = space.spectrum()
    to_start = other.combine(alive * other.coordinates(f).detach())
    inner = divided_differences(f, mu, lam) * left[:, 0, :, None] * right[:, 0, None, :]
    sizes = alive * (other.norm.double() * space.norm.double())[:, None]
    matrix = sizes[..., None] * (left @ inner @ right.mT)  # [batch, K of u, K of v]
    return to_start, space.operator.parameter_pullback(space.vectors, matrix.to(unit.dtype).mT @ other.vectors)


@without_autocast
def arnoldi_function(
    matvec: Matvec,
    f: MatrixFunction,
    v: Tensor,
    *,
    depth: int = 30,
    rmatvec: Matvec | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> FunctionValue:
    """``f(A) v`` for a square operator; for symmetric ones :func:`~laplace_plus.linalg.matrix_function` is cheaper.

    Costs one product (of the stack) per step, 4nK² operations and memory for K vectors each. Exact once the Krylov
    space is invariant, and for polynomials of degree below K. The gradient in v, in the tensors that A depends on and
    in those of f is that of the computed value. It takes K transposed products and memory for K more vectors. In single
    entries of a discretised A it converges many steps after the value: compare it with that of a larger depth.

    The arguments are those of :func:`matrix_function`, but for f, a function of small square matrices in float64
    (``torch.linalg.matrix_exp``, :func:`phi`, :func:`of_eigenvalues`, or one of your own), and ``rmatvec``, Aᵀ, where
    torch cannot differentiate through ``matvec``.

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
    start = start_vectors(v, depth)
    space = KrylovSpace(map_of(matvec, start, rmatvec=rmatvec, parameters=parameters), start, depth)
    found = ArnoldiDecomposition(*decomposition(space, start))
    coordinates, error = _coordinates(found, f)
    value = (coordinates[..., None, :] @ found.vectors)[..., 0, :] / found.scale[..., None]
    error = error.to(value.dtype) / found.scale.detach()
    return FunctionValue(value, error, found.matvecs, _has_converged(space, error, value.detach()), space.depth)


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
