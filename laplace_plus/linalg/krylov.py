r"""Krylov spaces with full re-orthogonalisation, and the derivative of Krylov decompositions.

Two passes of classical Gram–Schmidt leave a vector orthogonal to the basis to rounding (L. Giraud, J. Langou,
M. Rozložník and J. van den Eshof, "Rounding error analysis of the classical Gram–Schmidt orthogonalization process",
Numerische Mathematik 2005). Unlike in the modified process, each pass is two matrix–vector products. A basis is stored
by rows, ``[..., k, n]``.

A decomposition ``A Q = Q H + R Eᵀ`` with orthonormal Q is defined by its equations. Its derivative solves the adjoint
system of these equations (N. Krämer, P. Moreno-Muñoz, H. Roy and S. Hauberg, "Gradients of functions of large
matrices", NeurIPS 2024): K transposed products and one vector–Jacobian product in the operator's tensors.

With the start vector as an additional column, ``[x  A Q] = Q H⁺ + …``, where ``H⁺ = [‖x‖ e₁  H]`` is upper trapezoidal.
The multipliers Λ of these columns follow from one recurrence, from the last column to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_plus.errors import OperatorError
from laplace_plus.kernels import inner_products, orthogonalize, three_term_update, vector_norm
from laplace_plus.linalg.arguments import working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, require_finite
from laplace_plus.linalg.results import agreement


def combine(coefficients: Tensor, basis: Tensor) -> Tensor:
    """``Σ_k x_k q_k``: coefficients ``[batch, k]`` and a basis ``[batch, k, n]`` give ``[batch, n]``."""
    return (coefficients[:, None] @ basis)[:, 0]


def coordinates(basis: Tensor, vectors: Tensor) -> Tensor:
    """Inner products with basis vectors: ``[batch, k, n]`` and ``[batch, n]`` give ``[batch, k]``."""
    return inner_products(vectors[:, None], basis)[:, 0]


def stacked(start: Tensor) -> Tensor:
    """Start vectors ``[..., n]`` as ``[batch, n]`` in the working type, without a graph."""
    return start.detach().reshape(-1, start.shape[-1]).to(working_type(start.dtype))


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """The symmetric matrix ``[..., K, K]`` of a diagonal ``[..., K]`` and an off-diagonal ``[..., K − 1]``."""
    side = torch.diag_embed(off_diagonal, 1)
    return torch.diag_embed(diagonal) + side + side.mT


class KrylovSpace:
    """The Arnoldi process with full re-orthogonalisation for a stack of start vectors, which can be continued.

    Gram–Schmidt runs twice. For a symmetric operator one pass is enough after the three-term recurrence, unless the
    new vector is of the size of rounding errors. That test reads a number from the device; it is made on the CPU only,
    where it costs nothing and one pass saves half of the work.

    Args:
        matvec: A; for one start vector ``[n]`` it gets single vectors. Further arguments as for :class:`LinearMap`.
        start: ``[n]`` or ``[..., n]``, not zero.
        tolerance: The Krylov space is invariant where ``‖w‖ ≤ tolerance · max_j ‖A q_j‖``; ten times machine epsilon by
            default. It is also where ``‖w‖`` is below ten times machine epsilon times its own ``‖A q_k‖``.
        check_symmetry: Whether to check a symmetric operator.

    Attributes:
        operator: A on stacks of vectors.
        vectors: Q by rows, ``[batch, K, n]``; zero beyond the rank of a space.
        matrix: ``Q A Qᵀ``, ``[batch, K, K]``; upper Hessenberg, or tridiagonal for a symmetric operator.
        residual: ``[batch, n]``, that of the last step of each space.
        norm: ``[batch]`` norms of the start vectors.
        rank: ``[batch]`` dimensions of the spaces.
        requested: Depth that was requested; K is smaller where all spaces are invariant before.
        complete: Whether all spaces are invariant, so that more steps would change nothing.
    """

    def __init__(
        self,
        matvec: Matvec | LinearMap,
        start: Tensor,
        *,
        rmatvec: Matvec | None = None,
        symmetric: bool = False,
        parameters: Iterable[Tensor] | None = None,
        tolerance: float | None = None,
        check_symmetry: bool = True,
    ):
        options: dict[str, Any] = {"rmatvec": rmatvec, "symmetric": symmetric, "parameters": parameters}
        options |= {"dtype": start.dtype, "single": start.ndim == 1}
        self.operator: LinearMap
        self.operator = matvec if isinstance(matvec, LinearMap) else LinearMap(matvec, start.shape[-1], **options)
        rows = stacked(start)
        self._outer, self._check = start.dtype, check_symmetry
        self._limit, self._rounding = (breakdown_limit(t, rows.dtype) for t in (tolerance, None))
        self.norm = vector_norm(rows)
        self._basis = self.vectors = rows.new_empty(len(rows), 0, rows.shape[1])
        self._hessenberg = self.matrix = rows.new_zeros(len(rows), 0, 0)
        self.residual, self._largest = torch.zeros_like(rows), torch.zeros_like(self.norm)
        self._active = torch.ones_like(self.norm, dtype=torch.bool)
        self.rank = torch.zeros_like(self.norm, dtype=torch.int64)
        self._next, self._size = rows / self.norm[:, None], torch.zeros_like(self.norm)
        self.requested, self.complete = 0, False

    @property
    def depth(self) -> int:
        """K, the largest rank."""
        return self.vectors.shape[1]

    def extend(self, depth: int) -> None:
        """Continue to the given depth, at most n, with one synchronisation with the device at the end.

        OperatorError for a start vector of zero, or an operator that is not symmetric; NonFiniteError for NaN or
        infinity.
        """
        self.requested = depth = min(depth, self.operator.n)
        if self.complete or depth <= self.depth:
            return
        done = self._basis.shape[1]
        basis = self._basis.new_empty(len(self._basis), depth, self.operator.n)
        basis[:, :done], self._basis = self._basis, basis
        self._hessenberg = hessenberg = pad(self._hessenberg, (0, depth - done, 0, depth - done))
        for k in range(done, depth):
            if k:
                hessenberg[:, k, k - 1] = self._size
            basis[:, k] = self._next
            product = self.operator(self._next)
            length = vector_norm(product) if k else product_length(product)
            self._largest = torch.maximum(self._largest, length)
            rest, hessenberg[:, : k + 1, k] = self._outside(product, k)
            size = vector_norm(rest)
            self.residual = torch.where(self._active[:, None], rest, self.residual)
            self.rank = self.rank + self._active
            small = torch.maximum(self._limit * self._largest, self._rounding * length)
            self._active = self._active & ~invariant(size, small)
            self._size = torch.where(self._active, size, 0.0)
            self._next = rest * torch.where(self._active, size.reciprocal(), 0.0)[:, None]
        kept = truncated_depth(self.norm, self.rank, hessenberg, self.residual)
        self.vectors, self.matrix = basis[:, :kept], hessenberg[:, :kept, :kept]
        if self.operator.symmetric:
            if self._check:
                require_symmetric(hessenberg, self._outer, self.operator.asymmetry)
            diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
            self.matrix = tridiagonal(diagonal, self.matrix.diagonal(-1, dim1=-2, dim2=-1))
        self.complete = bool((~self._active | (self.rank == self.operator.n)).all())

    def _outside(self, product: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The component of ``A q_k`` orthogonal to the basis, and its coefficients in the basis."""
        if not self.operator.symmetric or product.device.type != "cpu":
            return orthogonalize(self._basis[:, : k + 1], product)
        previous = (self._basis[:, k - 1], self._size) if k else (None, None)
        rest, alpha, size = three_term_update(product, self._next, *previous)
        tiny = bool((size < torch.finfo(size.dtype).eps ** 0.5 * self._largest).any())
        rest, coefficients = orthogonalize(self._basis[:, : k + 1], rest, passes=2 if tiny else 1)
        coefficients[:, k] += alpha
        if k:
            coefficients[:, k - 1] += self._size
        return rest, coefficients


def product_length(product: Tensor) -> Tensor:
    """``‖A q‖``, ``[...]``; NaN where the squares of a product underflow, which must not count as zero."""
    length = vector_norm(product)
    return torch.where((length == 0) & (product != 0).any(-1), torch.nan, length)


def invariant(size: Tensor, small: Tensor) -> Tensor:
    """Where a Krylov space is invariant; NaN and overflow do not count, so that they are reported as such."""
    return (size <= small) & (small < torch.inf)


def breakdown_limit(tolerance: float | None, dtype: torch.dtype) -> float:
    """The relative size below which a new vector is rounding error: ten times machine epsilon by default."""
    return 10 * torch.finfo(dtype).eps if tolerance is None else tolerance


def truncated_depth(norm: Tensor, rank: Tensor, *results: Tensor) -> int:
    """The largest rank of a batch, after the checks of :meth:`KrylovSpace.extend`; the only wait for the device."""
    zero = torch.isinf(1 / norm)
    if bool(zero.any()):
        got = f"{int(zero.sum())} of {norm.numel()} of norm zero"
        fix = "Leave zero vectors out: they span no Krylov space."
        raise OperatorError("A start vector is zero.", expected="vectors of positive norm", got=got, fix=fix)
    require_finite("The Krylov process", norm, *results)
    return int(rank.max())


def require_symmetric(matrix: Tensor, dtype: torch.dtype, what: str = LinearMap.asymmetry) -> None:
    """Raise OperatorError unless ``H = Q A Qᵀ [..., K, K]`` is symmetric to √ε of the type of the products."""
    asymmetry, size = (matrix - matrix.mT).abs().amax(dim=(-2, -1)), matrix.abs().amax(dim=(-2, -1))
    limit = agreement(dtype)
    if bool((asymmetry > limit * size).any()):
        relative = float((asymmetry / size).max())
        got = f"a relative difference of {relative:.1e} on its Krylov space"
        fix = "Symmetrise it, use arnoldi or arnoldi_function, or give lanczos check_symmetry=False if it is rounding."
        raise OperatorError(what, expected=f"uᵀAv = vᵀAu to a relative {limit:.0e}", got=got, fix=fix)


def krylov_pullback(
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
    eta = extended_.gather(-1, last.expand(batch, depth, 1))[..., 0] - coordinates(vectors, residual_)
    multipliers = vectors.new_zeros(batch, 1 + depth, n)
    multipliers.scatter_(1, last.expand(batch, 1, n), (residual_ + combine(eta, vectors))[:, None])
    pi = extended @ extended_.mT - inner_products(vectors_, vectors)
    gamma = torch.zeros_like(pi)  # the multipliers of orthonormality
    for k in reversed(range(depth + 1)):
        known = vectors[:, : k + 1]  # q_iᵀ λ is given for these
        wanted = extended_[:, : k + 1, k] - coordinates(known, multipliers[:, k])
        multipliers[:, k] += combine(wanted, known)
        if k == 0:
            break
        product, row = operator.transposed(multipliers[:, k]), k - 1
        gamma[:, row, :k] = pi[:, row, :k] - coordinates(vectors[:, :k], product)
        gamma[:, row, row] /= 2
        stop = min(k + 2, depth + 1) if operator.symmetric else depth + 1
        xi = vectors_[:, row] + eta[:, row, None] * residual + product
        xi = xi + combine(gamma[:, row] + gamma[:, :, row], vectors)
        xi = xi - combine(extended[:, row, k:stop], multipliers[:, k:stop])
        xi = xi / extended[:, row, row, None]
        multipliers[:, row] = torch.where(inside[:, row, None], xi, multipliers[:, row])
    return multipliers[:, 0], operator.parameter_pullback(vectors, multipliers[:, 1:])
