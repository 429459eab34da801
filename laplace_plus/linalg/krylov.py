"""The Arnoldi process, and what the Krylov decompositions share: Gram–Schmidt, and checks of what was computed.

Two passes of classical Gram–Schmidt leave a vector orthogonal to the basis to rounding (L. Giraud, J. Langou,
M. Rozložník and J. van den Eshof, "Rounding error analysis of the classical Gram–Schmidt orthogonalization process",
Numerische Mathematik 2005). Unlike in the modified process, each pass is two matrix–vector products. A basis is stored
by rows, ``[..., k, n]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.errors import OperatorError
from laplace_plus.kernels import inner_products, three_term_update, vector_norm
from laplace_plus.linalg.arguments import require_tolerance, working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, require_finite


def orthogonalize(basis: Tensor, vectors: Tensor, *, passes: int = 2) -> tuple[Tensor, Tensor]:
    """The component of vectors orthogonal to an orthonormal basis, ``w − Qᵀ(Q w)``.

    Args:
        basis: Q, ``[batch, k, n]``, orthonormal rows (rows of zeros are ignored).
        vectors: w, ``[batch, n]``, or ``[batch, p, n]`` for several vectors per basis.
        passes: Number of passes. One is enough for vectors that are almost orthogonal to the basis.

    Returns:
        The component, of the shape of ``vectors``, and the coefficients Q w, ``[batch, k]`` or ``[batch, p, k]``,
        summed over the passes.
    """
    if vectors.ndim == 2:
        return kernels.orthogonalize(basis, vectors, passes=passes)
    coefficients = vectors.new_zeros(*vectors.shape[:2], basis.shape[1])
    for _ in range(passes):
        new = inner_products(vectors, basis)
        vectors = vectors.baddbmm(new, basis, alpha=-1)
        coefficients = coefficients + new
    return vectors, coefficients


def combine(coefficients: Tensor, basis: Tensor) -> Tensor:
    """``Σ_k x_k q_k``: coefficients ``[batch, k]`` and a basis ``[batch, k, n]`` give ``[batch, n]``."""
    if basis.shape[0] == 1:
        return (coefficients[0] @ basis[0])[None]
    return (coefficients[:, None] @ basis)[:, 0]


def coordinates(basis: Tensor, vectors: Tensor) -> Tensor:
    """Inner products with basis vectors: ``[batch, k, n]`` and ``[batch, n]`` give ``[batch, k]``."""
    if basis.shape[0] == 1:
        return inner_products(basis[0], vectors[0])[None]
    return inner_products(vectors[:, None], basis)[:, 0]


def krylov_map(
    matvec: Matvec,
    start: Tensor,
    *,
    m: int | None = None,
    rmatvec: Matvec | None = None,
    symmetric: bool = False,
    parameters: Iterable[Tensor] | None = None,
) -> LinearMap:
    """The operator on stacks ``[batch, n]``; for one start vector ``[n]`` it gets single vectors."""
    return LinearMap(
        matvec,
        start.shape[-1],
        m=m,
        rmatvec=rmatvec,
        symmetric=symmetric,
        parameters=parameters,
        dtype=start.dtype,
        single=start.ndim == 1,
    )


def stacked(start: Tensor) -> Tensor:
    """Start vectors ``[..., n]`` as ``[batch, n]`` in the working type, without a graph."""
    return start.detach().reshape(-1, start.shape[-1]).to(working_type(start.dtype))


@dataclass(frozen=True)
class Krylov:
    """The result of a Krylov process for ``[batch, n]`` start vectors."""

    vectors: Tensor  # [batch, K, n], zero beyond the rank
    hessenberg: Tensor  # [batch, K, K]
    residual: Tensor  # [batch, n]
    scale: Tensor  # [batch], 1/‖v‖
    rank: Tensor  # [batch]
    invariant: Tensor  # [batch], whether the Krylov space is invariant


class ArnoldiProcess:
    """The Arnoldi process with full re-orthogonalisation, which can be continued.

    Gram–Schmidt runs twice. For a symmetric operator one pass is enough after the three-term recurrence, unless the
    new vector is of the size of rounding errors. That test reads a number from the device; it is made on the CPU only,
    where it costs nothing and one pass saves half of the work.

    Args:
        operator: The operator.
        start: ``[batch, n]``.
        tolerance: The Krylov space is invariant where ``‖w‖ ≤ tolerance · max_j ‖A q_j‖``; ten times machine epsilon by
            default. It is also where ``‖w‖`` is below ten times machine epsilon times its own ``‖A q_k‖``.

    Attributes:
        reorthogonalizations: Number of steps with Gram–Schmidt against all previous vectors.
    """

    def __init__(self, operator: LinearMap, start: Tensor, tolerance: float | None = None):
        batch, self._n = start.shape
        self._operator = operator
        self._limit, self._rounding = (breakdown_limit(t, start.dtype) for t in (tolerance, None))
        norm = vector_norm(start)
        self._scale = norm.reciprocal()
        self._basis, self._hessenberg = start.new_empty(batch, 0, self._n), start.new_zeros(batch, 0, 0)
        self._residual, self._largest = torch.zeros_like(start), torch.zeros_like(norm)
        self._active = torch.ones_like(norm, dtype=torch.bool)
        self._rank = torch.zeros_like(norm, dtype=torch.int64)
        self._next, self._size = start * self._scale[:, None], torch.zeros_like(norm)
        self.reorthogonalizations = 0

    def extend(self, depth: int) -> Krylov:
        """The decomposition after ``depth`` steps in total, at most n and no fewer than before."""
        done = self._basis.shape[1]
        basis = self._basis.new_empty(len(self._basis), depth, self._n)
        hessenberg = self._hessenberg.new_zeros(len(basis), depth, depth)
        basis[:, :done], hessenberg[:, :done, :done] = self._basis, self._hessenberg
        self._basis, self._hessenberg = basis, hessenberg
        for k in range(done, depth):
            if k:
                hessenberg[:, k, k - 1] = self._size
            basis[:, k] = self._next
            product = self._operator(self._next)
            length = vector_norm(product) if k else product_length(product)
            self._largest = torch.maximum(self._largest, length)
            rest, hessenberg[:, : k + 1, k] = self._outside(product, k)
            size = vector_norm(rest)
            # torch.where copies, which costs a fifth of a step with a cheap operator; on the CPU the test is free
            ended = rest.device.type != "cpu" or not bool(self._active.all())
            self._residual = torch.where(self._active[:, None], rest, self._residual) if ended else rest
            self._rank = self._rank + self._active
            small = torch.maximum(self._limit * self._largest, self._rounding * length)
            self._active = self._active & ~invariant(size, small)
            self._size = torch.where(self._active, size, 0.0)
            if k + 1 < self._n:
                self._next = rest * torch.where(self._active, size.reciprocal(), 0.0)[:, None]
        complete = ~self._active | (self._rank == self._n)
        return Krylov(basis, hessenberg, self._residual, self._scale, self._rank, complete)

    def _outside(self, product: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The component of ``A q_k`` orthogonal to the basis, and its coefficients in the basis."""
        self.reorthogonalizations += 1
        if not self._operator.symmetric or product.device.type != "cpu":
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
    """The relative size below which a new vector is rounding error: ten times machine epsilon by default.

    Raises:
        ConfigurationError: A negative or infinite tolerance.
    """
    require_tolerance(tolerance=tolerance)
    return 10 * torch.finfo(dtype).eps if tolerance is None else tolerance


def truncated_depth(name: str, scale: Tensor, rank: Tensor, *results: Tensor) -> int:
    """The largest rank of a batch, after checks of the results; this is the only synchronisation with the device.

    Raises:
        OperatorError: A start vector of zero.
        NonFiniteError: NaN or infinity in a start vector or in a product.
    """
    if bool(torch.isinf(scale).any()):
        raise OperatorError(
            "A start vector is zero.",
            expected="vectors of positive norm",
            got=f"{int(torch.isinf(scale).sum())} of {scale.numel()} of norm zero",
            fix="Leave zero vectors out: they span no Krylov space.",
        )
    require_finite(name, scale, *results)
    return int(rank.max())


def require_symmetric(matrix: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check that ``Q A Qᵀ`` is symmetric, which needs no product with A.

    Args:
        matrix: ``[..., K, K]``.
        dtype: Type in which the products were computed; that of the matrix by default.

    Raises:
        OperatorError: ``max |H − Hᵀ| > √eps · max |H|``.
    """
    asymmetry, size = (matrix - matrix.mT).abs().amax(dim=(-2, -1)), matrix.abs().amax(dim=(-2, -1))
    limit = torch.finfo(dtype or matrix.dtype).eps ** 0.5
    if bool((asymmetry > limit * size).any()):
        relative = float((asymmetry / size).max())
        raise OperatorError(
            "The operator is not symmetric.",
            expected=f"uᵀAv = vᵀAu to a relative {limit:.0e}",
            got=f"a relative difference of {relative:.1e} on its Krylov space",
            fix="Symmetrise it, use arnoldi, or pass check_symmetry=False if this is rounding in the operator.",
        )
