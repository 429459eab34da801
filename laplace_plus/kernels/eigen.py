"""Symmetric eigendecompositions of factors: batched for equal sizes, and by the fastest solver on a GPU.

On CUDA, the time of ``torch.linalg.eigh`` varies by a factor of a hundred with the size, the batch and the solver's
version: a batch of 500 matrices of 100 × 100 has been reported to take 914 ms instead of 8 ms (pytorch#174674), with a
step between n = 32 and 33 (pytorch#175585). Therefore the batched call, one call for each matrix and LAPACK on the CPU
are timed once for each size. The CPU uses LAPACK: on one thread SciPy's, whose divide and conquer takes 1.2 (float32)
and 1.4 (float64) times less time than torch's at n = 1025 on one core of an EPYC (Zen 4), otherwise torch's. Divide and
conquer sometimes fails to converge in float32 on matrices of low rank; slower QR iterations then take over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels.reductions import all_finite
from laplace_plus.kernels.selection import REFERENCE, choose, size_class
from laplace_plus.kernels.symmetric_update import blas_is_serial

Eigen = tuple[Tensor, Tensor]

_SCIPY_FROM = 64
"""Size from which SciPy's solver repays its overhead for each call."""


def symmetric_eigen(matrix: Tensor, *, dtype: torch.dtype = torch.float64) -> Eigen:
    """Eigenvalues and eigenvectors of symmetric matrices, ``A = V diag(λ) Vᵀ``.

    Args:
        matrix: A, ``[..., n, n]``; only the lower triangles are read.
        dtype: The type to compute in, float64 or float32.

    Returns:
        λ in ascending order, ``[..., n]``, and V with eigenvectors as columns, ``[..., n, n]``, of the matrix's type,
        at least float32. A matrix with NaNs or infinities has NaNs for results, the others in its batch keep theirs.

    Raises:
        ConfigurationError: Not square matrices, or types that do not fit.

    Example:
        >>> values, vectors = symmetric_eigen(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> values
        tensor([1., 3.])
    """
    square = matrix.ndim >= 2 and matrix.shape[-1] == matrix.shape[-2]
    if not square or not matrix.is_floating_point() or dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            "symmetric_eigen decomposes square matrices of a floating type in float32 or float64.",
            expected="[..., n, n], floating point; dtype float32 or float64",
            got=f"{list(matrix.shape)} of {matrix.dtype}; dtype {dtype}",
        )
    result_type = torch.promote_types(matrix.dtype, torch.float32)
    n = matrix.shape[-1]
    if matrix.numel() == 0:
        return matrix.new_empty(matrix.shape[:-1], dtype=result_type), matrix.new_empty(matrix.shape, dtype=result_type)
    given = matrix.detach().to(dtype).reshape(-1, n, n)
    if all_finite(given):
        values, vectors = _decompose(given)
    else:
        finite = torch.isfinite(given.tril()).flatten(1).all(1)
        values, vectors = _decompose(torch.where(finite[:, None, None], given, torch.eye(n).to(given)))
        values[~finite] = vectors[~finite] = float("nan")
    return values.to(result_type).reshape(matrix.shape[:-1]), vectors.to(result_type).reshape(matrix.shape)


def _decompose(matrices: Tensor) -> Eigen:
    """Decompose finite ``[B, n, n]`` of float32 or float64."""
    batch, n, _ = matrices.shape
    if not matrices.is_cuda:
        serial = n >= _SCIPY_FROM and torch.get_num_threads() == 1 and blas_is_serial()
        return _by_scipy(matrices, "evd") if serial else _by_torch(matrices)
    candidates: dict[str, Callable[[], Eigen]] = {
        REFERENCE: lambda: _by_torch(matrices),
        "torch, one by one": lambda: _stack(torch.linalg.eigh(matrix) for matrix in matrices),
        "LAPACK on the CPU": lambda: _by_torch(matrices.cpu()),
    }
    if batch == 1:
        del candidates["torch, one by one"]
    key = ("symmetric_eigen", matrices.device, matrices.dtype, n, *size_class(batch))
    # A thousand times the operations: rotations are sequential, and a bad choice costs milliseconds at any size.
    values, vectors = candidates[choose(key, matrices.device, 1e3 * batch * n**3, candidates)]()
    return values.to(matrices.device), vectors.to(matrices.device)


def _by_torch(matrices: Tensor) -> Eigen:
    """The batched solver, or QR iterations where it does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        values, vectors = _by_scipy(matrices.cpu(), "ev")
    return values.to(matrices.device), vectors.to(matrices.device)


def _by_scipy(matrices: Tensor, driver: str) -> Eigen:
    """LAPACK's divide and conquer (``"evd"``) or, where that fails, QR iterations (``"ev"``), one after the other."""
    pairs = []
    for matrix in matrices.numpy():
        try:
            pair = scipy.linalg.eigh(matrix.T, lower=False, driver=driver, check_finite=False)
        except np.linalg.LinAlgError:
            pair = scipy.linalg.eigh(matrix.T, lower=False, driver="ev", check_finite=False)
        pairs.append((torch.from_numpy(pair[0]), torch.from_numpy(pair[1])))
    return _stack(pairs)


def _stack(pairs: Iterable[Eigen]) -> Eigen:
    values, vectors = zip(*pairs, strict=True)
    if len(values) == 1:
        return values[0][None], vectors[0][None]
    return torch.stack(values), torch.stack(vectors)
