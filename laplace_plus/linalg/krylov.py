r"""Krylov spaces with full re-orthogonalisation: Arnoldi's and Lanczos' decompositions, and their derivatives.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem", Quarterly of
Applied Mathematics 1951; C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear
differential and integral operators", Journal of Research of the National Bureau of Standards 1950. Two passes of
classical Gram–Schmidt leave a vector orthogonal to the basis to rounding (L. Giraud, J. Langou, M. Rozložník and
J. van den Eshof, "Rounding error analysis of the classical Gram–Schmidt orthogonalization process", Numerische
Mathematik 2005). Unlike in the modified process, each pass is two matrix–vector products. A basis is stored by rows,
``[..., k, n]``.

A decomposition ``A Q = Q H + R Eᵀ`` with orthonormal Q is defined by its equations. Its derivative solves the adjoint
system of these equations (N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of large
matrices", NeurIPS 2024): K transposed products and one vector–Jacobian product in the operator's tensors. With the
start vector as an additional column, ``[x  A Q] = Q H⁺ + …``, where ``H⁺ = [‖x‖ e₁  H]`` is upper trapezoidal. The
multipliers Λ of these columns follow from one recurrence, from the last column to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_plus.checks import count
from laplace_plus.errors import OperatorError
from laplace_plus.kernels import inner_products, orthogonalize, vector_norm
from laplace_plus.linalg.estimates import working_type
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    attach,
    require_adjoint,
    require_finite,
    vectors_of,
    without_autocast,
)


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
        parameters: The tensors to differentiate in.

    Raises:
        ConfigurationError: A bad start vector or depth.
        OperatorError: A start vector of zero, or an operator of another shape or type.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
        >>> result = arnoldi(lambda v: v @ a.T, torch.tensor([1.0, 0.0], dtype=torch.float64), depth=2)
        >>> result.hessenberg.tolist(), result.converged
        ([[0.0, 2.0], [1.0, 0.0]], True)
    """
    start = start_vectors(v, depth)
    space = KrylovSpace(map_of(matvec, start, rmatvec=rmatvec, parameters=parameters), start, depth)
    return ArnoldiDecomposition(*decomposition(space, start))


@without_autocast
def lanczos(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    parameters: Iterable[Tensor] | None = None,
    check_symmetry: bool = True,
) -> LanczosDecomposition:
    """Decompose a symmetric operator on the Krylov space of a vector, with full re-orthogonalisation.

    Costs ``depth`` products (of the whole stack), 2nK² floating-point operations and memory for K vectors. The result
    is differentiable in ``v`` and in the tensors that the operator depends on. The derivative costs K products, one
    vector–Jacobian product of K vectors, and memory for K more vectors; no graph of a product is stored.

    The arguments are those of :func:`arnoldi`; ``check_symmetry`` tells whether to check that A is symmetric, which
    takes no product.

    Raises:
        ConfigurationError: A bad start vector or depth.
        OperatorError: A start vector of zero, or an operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a start vector or a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
        >>> result = lanczos(lambda v: v @ a, torch.ones(3, dtype=torch.float64), depth=3)
        >>> [round(x, 6) for x in torch.linalg.eigvalsh(result.tridiagonal()).tolist()]
        [1.0, 2.0, 4.0]
    """
    start = start_vectors(v, depth)
    operator = map_of(matvec, start, symmetric=True, parameters=parameters)
    space = KrylovSpace(operator, start, depth, check_symmetry=check_symmetry)
    return LanczosDecomposition(*decomposition(space, start))


def start_vectors(v: Tensor, depth: int) -> Tensor:
    """The start vectors of a Krylov space; ConfigurationError for bad arguments."""
    count("depth", depth)
    return vectors_of("v", v)


def map_of(matvec: Matvec, start: Tensor, **options: Any) -> LinearMap:
    """A square operator for start vectors; for one of them, ``[n]``, it gets single vectors."""
    return LinearMap(matvec, start.shape[-1], dtype=start.dtype, single=start.ndim == 1, **options)


class KrylovSpace:
    """The Arnoldi process with full re-orthogonalisation for a stack of start vectors.

    A space is invariant where a new vector w before its normalisation is rounding error: at most ten times machine
    epsilon times ``max_j ‖A q_j‖``. The process waits for the device once, at its end.

    Args:
        operator: A, as :func:`map_of` makes it.
        start: ``[n]`` or ``[..., n]``, not zero.
        depth: Number of steps; at most n are taken.
        check_symmetry: Whether to check a symmetric operator.

    Attributes:
        operator: A on stacks of vectors.
        vectors: Q by rows, ``[batch, K, n]``; zero beyond the rank of a space.
        matrix: ``Q A Qᵀ``, ``[batch, K, K]``; upper Hessenberg, or tridiagonal for a symmetric operator.
        residual: ``[batch, n]``, that of the last step of each space.
        norm: ``[batch]`` norms of the start vectors.
        rank: ``[batch]`` dimensions of the spaces.
        depth: K, the largest rank.
        requested: Number of steps; K is smaller where all spaces are invariant before.
        complete: Whether all spaces are invariant, so that more steps would change nothing.

    Raises:
        OperatorError: A start vector of zero, or an operator that is not symmetric.
        NonFiniteError: NaN or infinity.
    """

    def __init__(self, operator: LinearMap, start: Tensor, depth: int, *, check_symmetry: bool = True):
        rows = start.detach().reshape(-1, start.shape[-1]).to(working_type(start.dtype))
        batch, n, rounding = len(rows), operator.n, 10 * torch.finfo(rows.dtype).eps
        self.operator, self.requested, self.norm = operator, min(depth, n), vector_norm(rows)
        basis = rows.new_empty(batch, self.requested, n)
        hessenberg = rows.new_zeros(batch, self.requested, self.requested)
        self.residual, self.rank = torch.zeros_like(rows), torch.zeros_like(self.norm, dtype=torch.int64)
        active, largest = torch.ones_like(self.norm, dtype=torch.bool), torch.zeros_like(self.norm)
        vector, size = rows / self.norm[:, None], torch.zeros_like(self.norm)
        for k in range(self.requested):
            if k:
                hessenberg[:, k, k - 1] = size
            basis[:, k] = vector
            product = operator(vector)
            largest = torch.maximum(largest, vector_norm(product) if k else product_length(product))
            rest, hessenberg[:, : k + 1, k] = orthogonalize(basis[:, : k + 1], product)
            size = vector_norm(rest)
            self.residual = torch.where(active[:, None], rest, self.residual)
            self.rank = self.rank + active
            small = rounding * largest
            # NaN and overflow do not count as invariant, so that they are reported as such.
            active = active & ~((size <= small) & (small < torch.inf))
            vector = rest * torch.where(active, size.reciprocal(), 0.0)[:, None]
            size = torch.where(active, size, 0.0)
        zero = int(torch.isinf(1 / self.norm).sum())
        if zero:
            got, fix = f"{zero} of norm zero", "Leave zero vectors out: they span no Krylov space."
            raise OperatorError("A start vector is zero.", expected="vectors of positive norm", got=got, fix=fix)
        require_finite("The Krylov process", self.norm, hessenberg, self.residual)
        self.depth = int(self.rank.max())
        self.vectors, self.matrix = basis[:, : self.depth], hessenberg[:, : self.depth, : self.depth]
        if operator.symmetric:
            if check_symmetry:
                scale = hessenberg.abs().amax(dim=(-2, -1), keepdim=True)
                require_adjoint(hessenberg, hessenberg.mT, scale, start.dtype)
            diagonal, off_diagonal = (self.matrix.diagonal(side, dim1=-2, dim2=-1) for side in (0, -1))
            side = torch.diag_embed(off_diagonal, 1)
            self.matrix = torch.diag_embed(diagonal) + side + side.mT
        self.complete = bool((~active | (self.rank == n)).all())


def product_length(product: Tensor) -> Tensor:
    """``‖A q‖``, ``[...]``; NaN where the squares of a product underflow, which must not count as zero."""
    length = vector_norm(product)
    return torch.where((length == 0) & (product != 0).any(-1), torch.nan, length)


def combine(coefficients: Tensor, basis: Tensor) -> Tensor:
    """``Σ_k x_k q_k``: coefficients ``[batch, k]`` and a basis ``[batch, k, n]`` give ``[batch, n]``."""
    return (coefficients[:, None] @ basis)[:, 0]


def _coordinates(basis: Tensor, vectors: Tensor) -> Tensor:
    """Inner products with basis vectors: ``[batch, k, n]`` and ``[batch, n]`` give ``[batch, k]``."""
    return inner_products(vectors[:, None], basis)[:, 0]


def decomposition(space: KrylovSpace, start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, bool]:
    """The fields of an :class:`ArnoldiDecomposition`."""
    operator, rank, matvecs, shape = space.operator, space.rank, space.operator.matvecs, start.shape[:-1]
    outputs = [x.reshape((*shape, *x.shape[1:])) for x in (space.vectors, space.matrix, space.residual, space.norm)]

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        gradient, gradients = _pullback(operator, outputs, cotangents, rank)
        return gradient.reshape(start.shape).to(start.dtype), *gradients

    vectors, matrix, residual, norm = attach(outputs, [start, *operator.tensors], pullback)
    return vectors, matrix, residual, norm.reciprocal(), rank.reshape(shape), matvecs, space.complete


def _pullback(
    operator: LinearMap, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], rank: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Pull cotangents of a Krylov decomposition back to its start vectors ``[batch, n]`` and the operator's tensors.

    The multipliers are re-projected, so that ``Q Λ = H̄``, which the exact adjoint fulfils. Without that, errors grow
    like the condition number of the Krylov matrix.

    Args:
        operator: The operator.
        outputs: Q ``[..., K, n]``, H ``[..., K, K]``, the last column of ``A Q − Q H`` as ``[..., n]``, and the norm of
            the start vector ``[...]``.
        cotangents: One for each of these, or None.
        rank: ``[batch]``, the length of each decomposition.
    """
    depth, n = outputs[0].shape[-2:]
    given = [torch.zeros_like(x) if c is None else c for c, x in zip(cotangents, outputs, strict=True)]
    shapes = [(-1, depth, n), (-1, depth, depth), (-1, n), (-1,)]
    vectors, matrix, residual, norm = (x.reshape(shape) for x, shape in zip(outputs, shapes, strict=True))
    vectors_, matrix_, residual_, norm_ = (x.reshape(shape) for x, shape in zip(given, shapes, strict=True))
    if operator.symmetric:
        matrix_ = ((matrix_ + matrix_.mT) / 2).tril(1)
    extended, extended_ = (
        torch.cat([pad(first[:, None, None], (0, 0, 0, depth - 1)), square], -1)
        for first, square in ((norm, matrix), (norm_, matrix_))
    )
    # entries beyond the rank of a decomposition are constant
    inside = torch.arange(depth, device=vectors.device) < rank[:, None]
    vectors_ = vectors_ * inside[..., None]
    extended_ = extended_.triu() * (inside[..., None] & pad(inside, (1, 0), value=True)[:, None])
    batch, last = len(vectors), rank[:, None, None]  # the column of the last product
    eta = extended_.gather(-1, last.expand(batch, depth, 1))[..., 0] - _coordinates(vectors, residual_)
    multipliers = vectors.new_zeros(batch, 1 + depth, n)
    multipliers.scatter_(1, last.expand(batch, 1, n), (residual_ + combine(eta, vectors))[:, None])
    pi = extended @ extended_.mT - inner_products(vectors_, vectors)
    gamma = torch.zeros_like(pi)  # the multipliers of orthonormality
    for k in reversed(range(depth + 1)):
        known = vectors[:, : k + 1]  # q_iᵀ λ is given for these
        wanted = extended_[:, : k + 1, k] - _coordinates(known, multipliers[:, k])
        multipliers[:, k] += combine(wanted, known)
        if k == 0:
            break
        product, row = operator.transposed(multipliers[:, k]), k - 1
        gamma[:, row, :k] = pi[:, row, :k] - _coordinates(vectors[:, :k], product)
        gamma[:, row, row] /= 2
        stop = min(k + 2, depth + 1) if operator.symmetric else depth + 1
        xi = vectors_[:, row] + eta[:, row, None] * residual + product
        xi = xi + combine(gamma[:, row] + gamma[:, :, row], vectors)
        xi = xi - combine(extended[:, row, k:stop], multipliers[:, k:stop])
        xi = xi / extended[:, row, row, None]
        multipliers[:, row] = torch.where(inside[:, row, None], xi, multipliers[:, row])
    return multipliers[:, 0], operator.parameter_pullback(vectors, multipliers[:, 1:])
