"""Block Lanczos' decomposition of a symmetric operator, with its adjoint derivative.

G. Golub and R. Underwood, "The block Lanczos method for computing eigenvalues", Mathematical Software III, 1977.
Several start vectors share one Krylov space, which sees eigenvalues of a multiplicity up to their number, and the work
is matrix products. The derivative is the adjoint of a band decomposition, see :mod:`~laplace_plus.linalg.adjoints`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, OperatorError, UnsupportedError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.adjoints import krylov_pullback, or_zeros
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.krylov import Products, breakdown_limit, require_symmetric
from laplace_plus.linalg.linear_maps import Matvec, attach, require_finite
from laplace_plus.linalg.orthogonalization import orthogonalize
from laplace_plus.linalg.sketches import require_squares


@dataclass(frozen=True)
class BlockLanczosDecomposition:
    """``A Q = Q T + R Eᵀ`` with ``QᵀQ = I``, ``QᵀR = 0``, ``X = Q_1 S`` and T block tridiagonal (E: the last block).

    Attributes:
        vectors: Q by rows, ``[k, n]``; k is the sum of ``block_sizes``.
        matrix: T, ``[k, k]``, a band matrix as long as no block has shrunk.
        residual: R by rows, ``[size of the last block, n]``.
        start: S, ``[size of the first block, p]``, upper triangular if that is p × p.
        block_sizes: Number of vectors in each block. A block shrinks where its vectors become linearly dependent.
        matvecs: Number of operator-vector products.
        converged: Whether the space is invariant, so that T has eigenvalues of A only.
    """

    vectors: Tensor
    matrix: Tensor
    residual: Tensor
    start: Tensor
    block_sizes: tuple[int, ...]
    matvecs: int
    converged: bool


@without_autocast
def block_lanczos(
    matvec: Matvec,
    v: Tensor,
    depth: int,
    *,
    parameters: Iterable[Tensor] | None = None,
    tolerance: float | None = None,
    check_symmetry: bool = True,
    dtype: torch.dtype | None = None,
) -> BlockLanczosDecomposition:
    """Decompose a symmetric operator on the block Krylov space of several vectors, with full re-orthogonalisation.

    Costs ``depth`` stacked products of p vectors, 4n(pK)² floating-point operations and memory for pK vectors; the size
    of each block is read from the device. As long as no block has shrunk, all of the result can be differentiated in
    ``v`` and in the tensors that the operator depends on (at the cost of the same again, without any stored graph of a
    product). Once a block has shrunk, only T has a derivative, in the operator alone, and with the vectors held fixed:
    that of functions ``tr Sᵀ f(T)₁₁ S`` is then right up to the size of the residual.

    Args:
        matvec: A, a symmetric operator on row-stacked vectors.
        v: X, start vectors ``[p, n]``; they need not be orthogonal, nor linearly independent.
        depth: Number K ≥ 1 of blocks; fewer if the space ends before.
        parameters: The tensors to differentiate in, where they are not to be found from the operator.
        tolerance: A direction is dropped where its singular value is at most ``tolerance`` times the largest ‖A q‖ (for
            start vectors: the largest of their singular values); ten roundings of the type by default.
        check_symmetry: Whether to check, for free, that A is symmetric.
        dtype: Type of the start vectors; that of ``v`` by default. Half precision is for products only.

    Raises:
        ConfigurationError: Start vectors, a depth or a tolerance that make no sense.
        OperatorError: No start vector but zero, or an operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a start vector or a product.
        UnsupportedError: In the backward pass: a derivative that does not exist because a block has shrunk.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64))
        >>> v = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
        >>> result = block_lanczos(lambda x: x @ a, v, depth=3)
        >>> result.block_sizes, [round(x, 6) for x in torch.linalg.eigvalsh(result.matrix).tolist()]
        ((2, 2), [1.0, 1.0, 3.0, 3.0])
    """
    start = start_vectors(v, depth, dtype)
    if start.ndim != 2:
        raise ConfigurationError(
            "These are no start vectors of a block method.", expected="a matrix [p, n]", got=str(tuple(start.shape))
        )
    products = Products(matvec, start, symmetric=True, parameters=parameters)
    with torch.no_grad():
        found, sizes, converged = _block_process(
            products, products.stacked(start), depth, tolerance, check_symmetry=check_symmetry
        )
    p = start.shape[0]
    regular = all(size == p for size in sizes)
    differentiates_start = start.requires_grad

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if not regular:
            return None, *_vectors_fixed(products, outputs, cotangents, differentiates_start)
        gradient, gradients = _pullback(products, outputs, cotangents)
        return gradient.to(start.dtype), *gradients

    matvecs = products.map.matvecs
    vectors, matrix, residual, factor = attach(found, [start, *products.map.tensors], pullback)
    return BlockLanczosDecomposition(vectors, matrix, residual, factor, sizes, matvecs, converged)


def _block_process(
    products: Products, start: Tensor, depth: int, tolerance: float | None, *, check_symmetry: bool
) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    n = start.shape[-1]
    limit = breakdown_limit(tolerance, start.dtype)
    require_finite("Block Lanczos' process", start)
    basis = start.new_empty(min(depth * min(start.shape), n), n)
    block, factor = _orthonormal(basis[:0], start, limit, None)
    if not block.shape[0]:
        raise OperatorError("All start vectors are zero.", expected="a vector of positive norm", got="none")
    first, largest = factor, torch.zeros_like(start[0, 0])
    projected = start.new_zeros(basis.shape[0], basis.shape[0])  # Q A Qᵀ as it is met: upper triangular blocks
    sizes: list[int] = []
    done, converged, residual = 0, False, block
    for _ in range(depth):
        size = block.shape[0]
        here, stop = slice(done, done + size), done + size
        basis[here] = block
        sizes.append(size)
        product = products(block)
        lengths = vector_norm(product)
        require_finite("Block Lanczos' process", lengths)
        if not sizes[1:]:
            require_squares(product, lengths)
        largest = torch.maximum(largest, lengths.max())
        rest, coefficients = orthogonalize(basis[None, :stop], product[None])
        residual, projected[:stop, here] = rest[0], coefficients[0].T
        done = stop
        block, factor = _orthonormal(basis[:done], residual, limit, largest)
        if done == n or not block.shape[0]:
            converged = True
            break
        if len(sizes) < depth:
            projected[done : done + block.shape[0], here] = factor
    projected = projected[:done, :done]
    if check_symmetry:
        require_symmetric(projected, products.outer)
    lower, ends = torch.zeros_like(projected), torch.tensor(sizes).cumsum(0).tolist()
    for size, end in zip(sizes, ends, strict=True):
        own = slice(end - size, end)
        lower[own, own] = (projected[own, own] + projected[own, own].T) / 4
        lower[end:, own] = projected[end:, own]
    return (basis[:done], lower + lower.T, residual, first), tuple(sizes), converged


def _orthonormal(basis: Tensor, vectors: Tensor, limit: float, size: Tensor | None) -> tuple[Tensor, Tensor]:
    """Orthonormal rows Q outside of a basis, ``[r, n]``, and a factor F, ``[r, p]``, with ``vectors = Fᵀ Q``.

    Directions smaller than ``limit · size`` (by default: than the largest) are left out.
    """
    q, r = _qr(vectors)
    # small directions are made of differences, and orthogonal to the basis only after another pass
    q, again = _qr(orthogonalize(basis[None], q[None], passes=1)[0][0])
    factor = again @ r
    u, singular, vh = torch.linalg.svd(factor.double(), full_matrices=False)
    allowed = min(vectors.shape[-1] - basis.shape[0], vectors.shape[0])
    scale = singular[0] if size is None else size.double()
    rank = min(int((singular > limit * scale).sum()), allowed)
    if rank == vectors.shape[0]:
        return q, factor
    kept = u[:, :rank].T.to(q.dtype) @ q
    kept, rotation = _qr(orthogonalize(basis[None], kept[None], passes=1)[0][0])
    return kept, rotation @ (singular[:rank, None] * vh[:rank]).to(q.dtype)


def _qr(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """``vectors = Rᵀ Q`` with orthonormal rows Q and a diagonal of R that is not negative."""
    q, r = torch.linalg.qr(vectors.T)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
    return (q * signs).T.contiguous(), signs[:, None] * r


def _pullback(
    products: Products, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    vectors, matrix, residual, start = outputs
    vectors_, matrix_, residual_, start_ = (or_zeros(c, o) for c, o in zip(cotangents, outputs, strict=True))
    p = start.shape[0]
    band = ((matrix_ + matrix_.T) / 2).tril(p).triu(-p)
    below = matrix.new_zeros(matrix.shape[0] - p, p)
    extended = torch.cat([torch.cat([start, below]), matrix], dim=1)
    extended_ = torch.cat([torch.cat([start_.triu(), below]), band], dim=1)
    gradient, gradients = krylov_pullback(
        products,
        vectors[None],
        extended.triu()[None],
        residual[None],
        vectors_[None],
        extended_.triu()[None],
        residual_[None],
        symmetric=True,
    )
    return gradient[0], gradients


def _vectors_fixed(
    products: Products, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], differentiates_start: bool
) -> tuple[Tensor, ...]:
    vectors, matrix = outputs[:2]
    # S depends on the start vectors alone
    if differentiates_start or cotangents[0] is not None or cotangents[2] is not None:
        raise UnsupportedError(
            "A block has shrunk, and only T has a derivative, in the operator alone.",
            expected="a function of the matrix T, differentiated in the operator's tensors",
            got="one of the start vectors, the residual or the vectors",
            fix="Start from linearly independent vectors and take fewer steps, or detach the others.",
        )
    matrix_ = or_zeros(cotangents[1], matrix)
    return products.parameter_pullback(vectors, (matrix_ + matrix_.T) / 2 @ vectors)
