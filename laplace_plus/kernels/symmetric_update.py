"""Symmetric rank-k updates ``C += XᵀX``: the sums of outer products that Kronecker factors consist of.

Only the lower triangle of C is needed, which is half of a general product's operations; :func:`symmetrize_` fills the
upper one once, after the last batch.

* CUDA: cuBLAS, or a Triton kernel with the rows split among the multiprocessors, by the rule of
  :mod:`laplace_plus.kernels.selection`.
* CPU: ``syrk`` of SciPy's BLAS, in place, if torch and BLAS both run on one thread and C has at least 128 columns. In
  float32 on one core it takes 1.6 (d = 257), 2.7 (785), 1.9 (1152) and 2.1 times (2304) less time than torch's product;
  below 128 columns nothing. Otherwise torch's product: SciPy's BLAS does not share torch's number of threads.
"""

from __future__ import annotations

import os

import scipy
import torch
from torch import Tensor

from laplace_plus.kernels.selection import INTERPRETED, triton_kernels

_SYRK_FROM = 128
"""Columns from which syrk is faster than torch's product on one thread; see the measurements above."""

_BLOCK = 256
"""Side of the diagonal blocks that are copied out when a matrix is made symmetric: at most 0.5 MiB each."""


def symmetric_update(total: Tensor, rows: Tensor) -> Tensor:
    """``total += Xᵀ X`` in the lower triangle, in place.

    Products are summed in the total's type. The upper triangle is undefined until :func:`symmetrize_`. NaNs and
    infinities in the rows reach the total. CUDA multiplies float32 as ``torch.get_float32_matmul_precision()`` says;
    there, the last bits depend on the implementation, see :mod:`laplace_plus.kernels.selection`.

    Args:
        total: The sum so far, float32 or float64, ``[d, d]``, or ``[G, d, d]`` for G groups.
        rows: X, with any strides: ``[N, d]``, or ``[G, N, d]`` for groups.

    Returns:
        ``total``.

    Example:
        >>> total = symmetric_update(torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> symmetrize_(total)
        tensor([[10., 14.],
                [14., 20.]])
    """
    if total.numel() == 0 or rows.numel() == 0:
        return total
    target, x = total.detach(), rows.detach()
    if total.ndim == 2:
        target, x = target[None], x[None]
    if INTERPRETED or total.device.type != "cpu":
        _on_device(target, x)
    elif total.shape[-1] >= _SYRK_FROM and target[0].is_contiguous() and is_serial():
        syrk = scipy.linalg.blas.ssyrk if total.dtype == torch.float32 else scipy.linalg.blas.dsyrk
        # Row-major matrices are BLAS's transposes, so the lower triangle is its upper one.
        for one, its_rows in zip(target.numpy(), x.to(total.dtype), strict=True):
            by_columns = its_rows.mT.is_contiguous()  # needs no copy
            operand = its_rows.numpy() if by_columns else its_rows.contiguous().numpy().T
            syrk(1.0, operand, beta=1.0, c=one.T, trans=int(by_columns), lower=0, overwrite_c=1)
    else:
        x = x.to(total.dtype)
        target.baddbmm_(x.mT, x)
    return total


def symmetrize_(total: Tensor) -> Tensor:
    """Copy the lower triangle of matrices ``[..., d, d]`` onto the upper one, in place: symmetric to the bit."""
    size = total.shape[-1]
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        total[..., start:stop, stop:] = total[..., stop:, start:stop].mT
        diagonal = total[..., start:stop, start:stop]
        diagonal.copy_(diagonal.tril() + diagonal.tril(-1).mT)
    return total


def all_finite(tensor: Tensor) -> bool:
    """Whether all real entries are finite, from one pass without intermediate results."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # which propagates NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))


def is_serial() -> bool:
    """Whether torch runs on one thread and SciPy's BLAS, too: it must not use more cores than torch was given."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return torch.get_num_threads() == 1 and (os.cpu_count() == 1 or "1" in map(os.environ.get, names))


def _reference(total: Tensor, rows: Tensor) -> None:
    """The plain-torch update of ``[G, d, d]`` by ``[G, N, d]``."""
    if total.is_cuda and rows.dtype != total.dtype == torch.float32 and "dtype" in torch.ops.aten.bmm.overloads():
        total.add_(torch.bmm(rows.mT, rows, out_dtype=total.dtype))  # products in 16 bits, sums in 32
    else:
        rows = rows.to(total.dtype)
        total.baddbmm_(rows.mT, rows)


def _on_device(total: Tensor, rows: Tensor) -> None:
    """Triton's or torch's update of ``[G, d, d]`` by ``[G, N, d]``."""
    supported = total.dtype == torch.float32 and rows.dtype != torch.float64 and total.stride(2) == 1
    kernels = triton_kernels("symmetric_update", total.device) if supported else None
    if kernels is None:
        _reference(total, rows)
        return
    precision = "tf32"  # Triton's name for the precision in which torch multiplies float32
    if torch.get_float32_matmul_precision() == "highest":
        precision = "ieee" if INTERPRETED else "tf32x3"
    tiling = kernels.tilings(rows.dtype, total.shape[-1])[0]
    kernels.update(total, rows, precision=precision, tiling=tiling)
