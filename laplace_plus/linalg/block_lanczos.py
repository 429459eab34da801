"""Block Lanczos' decomposition of a symmetric operator, with its adjoint derivative.

G. Golub and R. Underwood, "The block Lanczos method for computing eigenvalues", Mathematical Software III, 1977.
Several start vectors share one Krylov space. It finds eigenvalues of a multiplicity up to their number, and the work
consists of matrix products. The derivative is the adjoint of a band decomposition, see
:mod:`~laplace_plus.linalg.krylov`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, OperatorError, UnsupportedError
from laplace_plus.kernels import inner_products
from laplace_plus.linalg.arguments import empty, start_vectors, without_autocast
from laplace_plus.linalg.krylov import breakdown_limit, krylov_pullback, product_length, require_symmetric, stacked
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, require_finite


@dataclass(frozen=True)
class BlockLanczosDecomposition:
    """``A Q = Q T + R Eᵀ`` with ``QᵀQ = I``, ``QᵀR = 0``, ``X = Q_1 S`` and T block tridiagonal (E: the last block).

    Attributes:
        vectors: Q by rows, ``[k, n]``; k is the sum of ``block_sizes``.
        matrix: T, ``[k, k]``; a band matrix unless a block has shrunk.
        residual: R by rows, ``[size of the last block, n]``.
        start: S, ``[size of the first block, p]``, upper triangular if it is p × p.
        block_sizes: Number of vectors in each block. A block shrinks where its vectors become linearly dependent.
        matvecs: Number of operator–vector products.
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
    of each block is read from the device. Unless a block has shrunk, the whole result is differentiable in ``v`` and in
    the tensors that the operator depends on, at the same cost again; no graph of a product is stored. Once a block has
    shrunk, only T has a derivative, in the operator alone and with the vectors held fixed. The derivative of functions
    ``tr Sᵀ f(T)₁₁ S`` is then correct up to the size of the residual.

    The arguments are those of :func:`~laplace_plus.linalg.arnoldi.lanczos`, but ``v`` is X, ``[p, n]``, whose rows need
    not be orthogonal or independent, and ``depth`` the number K of blocks. A direction is dropped where its singular
    value is at most ``tolerance`` times the largest ‖A q‖, for start vectors the largest of their singular values.

    Raises:
        ConfigurationError: Bad start vectors, depth or tolerance.
        OperatorError: All start vectors are zero, or an operator of another shape or type or one that is not symmetric.
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
        what, got = "A block method needs a matrix of start vectors.", str(tuple(start.shape))
        raise ConfigurationError(what, expected="[p, n]", got=got)
    operator = LinearMap(matvec, start.shape[1], symmetric=True, parameters=parameters, dtype=start.dtype)
    found, sizes, converged = _block_process(operator, start, depth, tolerance, check_symmetry)
    width, shrunk, start_is_constant = len(start), min(sizes) < len(start), not start.requires_grad

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if not shrunk:
            gradient, gradients = krylov_pullback(operator, outputs, cotangents, width=width)
            return gradient[0].to(start.dtype), *gradients
        # S depends on the start vectors alone
        if start_is_constant and cotangents[0] is None and cotangents[2] is None:
            vectors, matrix = outputs[:2]
            matrix_ = torch.zeros_like(matrix) if cotangents[1] is None else cotangents[1]
            return None, *operator.parameter_pullback(vectors, (matrix_ + matrix_.T) / 2 @ vectors)
        what, got = "A block has shrunk, and only T has a derivative, in the operator alone.", "one of the others"
        expected = "a function of the matrix T, differentiated in the operator's tensors"
        fix = "Start from linearly independent vectors and take fewer steps, or detach the others."
        raise UnsupportedError(what, expected=expected, got=got, fix=fix)

    matvecs = operator.matvecs
    vectors, matrix, residual, factor = attach(found, [start, *operator.tensors], pullback)
    return BlockLanczosDecomposition(vectors, matrix, residual, factor, sizes, matvecs, converged)


def _block_process(
    operator: LinearMap, start: Tensor, depth: int, tolerance: float | None, check_symmetry: bool
) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    n, outer, start = start.shape[-1], start.dtype, stacked(start)
    limit = breakdown_limit(tolerance, start.dtype)
    require_finite("Block Lanczos' process", start)
    basis = empty(start, min(depth * min(start.shape), n), n)
    block, factor = _orthonormal(basis[:0], start, limit, None)
    if not block.shape[0]:
        raise OperatorError("All start vectors are zero.", expected="a vector of positive norm", got="none")
    first, largest = factor, torch.zeros_like(start[0, 0])
    projected = start.new_zeros(basis.shape[0], basis.shape[0])  # Q A Qᵀ: upper triangular blocks, and those below
    lower = torch.zeros_like(projected)  # the part of T below the diagonal, and half of the diagonal blocks
    sizes: list[int] = []
    done, converged, residual = 0, False, block
    for _ in range(depth):
        size = block.shape[0]
        here, stop = slice(done, done + size), done + size
        basis[here] = block
        sizes.append(size)
        product = operator(block)
        lengths = product_length(product)
        require_finite("Block Lanczos' process", lengths)
        largest = torch.maximum(largest, lengths.max())
        rest, first_pass = _outside(basis[:stop], product)
        residual, second_pass = _outside(basis[:stop], rest)
        projected[:stop, here] = (first_pass + second_pass).T
        lower[here, here] = (projected[here, here] + projected[here, here].T) / 4
        done = stop
        block, factor = _orthonormal(basis[:done], residual, limit, largest)
        if done == n or not block.shape[0]:
            converged = True
            break
        if len(sizes) < depth:
            projected[done : done + block.shape[0], here] = lower[done : done + block.shape[0], here] = factor
    if check_symmetry:
        require_symmetric(projected[:done, :done], outer)
    return (basis[:done], (lower + lower.T)[:done, :done], residual, first), tuple(sizes), converged


def _orthonormal(basis: Tensor, vectors: Tensor, limit: float, size: Tensor | None) -> tuple[Tensor, Tensor]:
    """Orthonormal rows Q orthogonal to a basis, ``[r, n]``, and a factor F, ``[r, p]``, with ``vectors = Fᵀ Q``.

    Singular values up to ``limit`` times ``size`` (by default: times the largest) are dropped.
    """
    q, r = _qr(vectors)
    # small components come from cancellation, and are orthogonal to the basis only after another pass
    q, again = _qr(_outside(basis, q)[0])
    factor = again @ r
    u, singular, vh = torch.linalg.svd(factor.double(), full_matrices=False)
    allowed = min(vectors.shape[-1] - basis.shape[0], vectors.shape[0])
    scale = singular[0] if size is None else size.double()
    rank = min(int((singular > limit * scale).sum()), allowed)
    if rank == vectors.shape[0]:
        return q, factor
    kept = u[:, :rank].T.to(q.dtype) @ q
    kept, change = _qr(_outside(basis, kept)[0])
    return kept, change @ (singular[:rank, None] * vh[:rank]).to(q.dtype)


def _outside(basis: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """One pass of Gram–Schmidt: the components of rows ``[p, n]`` orthogonal to a basis, and their coefficients."""
    coefficients = inner_products(vectors, basis)
    return torch.addmm(vectors, coefficients, basis, alpha=-1), coefficients


def _qr(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """``vectors = Rᵀ Q`` with orthonormal rows Q and a non-negative diagonal of R."""
    q, r = torch.linalg.qr(vectors.T)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
    return (q * signs).T.contiguous(), signs[:, None] * r
