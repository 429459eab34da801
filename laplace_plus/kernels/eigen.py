"""Symmetric eigendecompositions of factors: batched for equal sizes, on the card or by LAPACK.

On CUDA, ``torch.linalg.eigh`` takes about 1 ms for each matrix of a batch, however small (torch 2.11: pytorch#183806,
pytorch#174674), as LAPACK does at n = 100: up to 64 rows, matrices are decomposed on the CPU. The CPU uses LAPACK, on
one thread SciPy's and otherwise torch's. On one core of an EPYC (Zen 4), SciPy's divide and conquer takes 1.4 times
less time than torch's at n = 1025, and slower QR iterations take over where it does not converge.

Sums of outer products are often rank-deficient, with rows of exact zeros (padding, dead units). Their small eigenvalues
are rounding errors of the largest one, so all is computed in float64. Rows and columns that are exactly zero are
removed first, because their unit vectors are eigenvectors.
"""

from __future__ import annotations

import numpy as np
import scipy
import torch
from torch import Tensor

from laplace_plus.errors import NonFiniteError
from laplace_plus.kernels.symmetric_update import all_finite, is_serial

Eigen = tuple[Tensor, Tensor]

_SCIPY_FROM = 64
"""Size from which SciPy's solver repays its overhead for each call."""

_CPU_UP_TO = 64
"""Size up to which matrices on a card are decomposed by LAPACK."""


def symmetric_eigen(matrix: Tensor, driver: str = "evd") -> Eigen:
    """Eigenvalues and eigenvectors of symmetric matrices, ``A = V diag(λ) Vᵀ``, computed in float64.

    Args:
        matrix: A, ``[..., n, n]``; only the lower triangles are read.
        driver: SciPy's, where that is the solver: ``"evd"``, or ``"ev"``, which takes over where that fails.

    Returns:
        λ, ``[..., n]``: first a zero for each row of zeros, then the others in ascending order; and V with eigenvectors
        as columns, ``[..., n, n]``. They have the matrix's type, at least float32.

    Raises:
        NonFiniteError: The matrix has NaN or infinite entries.
    """
    n, dtype = matrix.shape[-1], torch.promote_types(matrix.dtype, torch.float32)
    if matrix.numel() == 0:
        return matrix.new_empty(matrix.shape[:-1], dtype=dtype), matrix.new_empty(matrix.shape, dtype=dtype)
    lower = matrix.detach().to(torch.float64, copy=True).reshape(-1, n, n).tril_()
    require_finite(lower)
    used = (lower != 0).any(0)
    alive = used.any(0) | used.any(1)
    keep, zeros = alive.nonzero()[:, 0], (~alive).nonzero()[:, 0]
    if part := 0 < len(zeros) < n:
        lower = lower[:, keep[:, None], keep]
    try:
        values, vectors = _decompose(lower, driver)
    except np.linalg.LinAlgError:  # after it has overwritten the matrices
        if driver == "ev":
            raise
        return symmetric_eigen(matrix, "ev")
    if part:
        found, batch = (values, vectors), len(lower)
        values, vectors = lower.new_zeros(batch, n), lower.new_zeros(batch, n, n)
        vectors[:, zeros, torch.arange(len(zeros), device=zeros.device)] = 1
        values[:, len(zeros) :], vectors[:, keep, len(zeros) :] = found
    # Row by row, as a checkpoint holds them: products of a loaded posterior are rounded alike.
    rows = vectors.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return values.to(dtype).reshape(matrix.shape[:-1]), rows.reshape(matrix.shape)


def require_finite(matrix: Tensor) -> None:
    """Raise :class:`NonFiniteError` for NaNs and infinities."""
    if not all_finite(matrix):
        what, got = "A curvature factor is not finite.", f"NaN or Inf in a factor of shape {tuple(matrix.shape)}"
        fix = "Look for NaNs in the data, or run the network in float32 if it overflows in half precision."
        raise NonFiniteError(what, expected="finite activations and output gradients", got=got, fix=fix)


def _decompose(matrices: Tensor, driver: str) -> Eigen:
    """Decompose finite ``[B, n, n]`` of float64, which may be overwritten."""
    n = matrices.shape[-1]
    if matrices.device.type == "cpu":
        return _by_scipy(matrices, driver) if n >= _SCIPY_FROM and is_serial() else _by_torch(matrices)
    values, vectors = _by_torch(matrices.cpu() if n <= _CPU_UP_TO else matrices)
    return values.to(matrices.device), vectors.to(matrices.device)


def _by_torch(matrices: Tensor) -> Eigen:
    """The batched solver, or QR iterations where it does not converge."""
    try:
        return torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        return _by_scipy(matrices.cpu(), "ev")


def _by_scipy(matrices: Tensor, driver: str) -> Eigen:
    """LAPACK's divide and conquer (``"evd"``) or QR iterations (``"ev"``), one after the other and in place."""
    values = []
    for matrix in matrices.numpy():
        own, vectors = scipy.linalg.eigh(matrix.T, lower=False, driver=driver, check_finite=False, overwrite_a=True)
        np.copyto(matrix.T, vectors)  # where they lie already
        values.append(torch.from_numpy(own))
    return torch.stack(values), matrices.mT
