"""Symmetric rank-k updates ``C += XᵀX``: the sums of outer products that Kronecker factors consist of.

Only the lower triangle of C is needed, which is half of a general product's operations; :func:`symmetrize_` fills the
upper one once, after the last batch.

* CUDA: a Triton kernel with the rows split among the multiprocessors, or cuBLAS, whichever is measured to be faster.
* CPU: ``syrk`` of SciPy's BLAS, in place, if torch and BLAS both run on one thread and C has at least 128 columns. In
  float32 on one core it takes 1.6 (d = 257), 2.7 (785), 1.9 (1152) and 2.1 times (2304) less time than torch's product;
  below 128 columns nothing. Otherwise torch's product: SciPy's BLAS does not share torch's number of threads.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from scipy.linalg import blas
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels.selection import INTERPRETED, REFERENCE, Key, add_fastest, size_class, triton_kernels

_SYRK_FROM = 128
"""Columns from which syrk is faster than torch's product on one thread; see the measurements above."""


def symmetric_update(total: Tensor, rows: Tensor) -> Tensor:
    """``total += Xᵀ X`` in the lower triangle, in place.

    Products are summed in the total's type. The upper triangle is undefined until :func:`symmetrize_`. NaNs and
    infinities in the rows reach the total. CUDA multiplies float32 as ``torch.get_float32_matmul_precision()`` says;
    there, the last bits depend on the implementation chosen, see :mod:`laplace_plus.kernels.selection`.

    Args:
        total: The sum so far, float32 or float64, ``[d, d]``, or ``[G, d, d]`` for G groups.
        rows: X, with any strides: ``[N, d]``, or ``[G, N, d]`` for groups.

    Returns:
        ``total``.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> total = symmetric_update(torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> symmetrize_(total)
        tensor([[10., 14.],
                [14., 20.]])
    """
    wide = total.dtype in (torch.float32, torch.float64)
    if not wide or not rows.is_floating_point() or rows.device != total.device:
        raise ConfigurationError(
            "The rows do not fit the total.",
            expected="a total of float32 or float64, and rows of a floating type on its device",
            got=f"{total.dtype} on {total.device} and {rows.dtype} on {rows.device}",
        )
    if total.ndim not in (2, 3) or rows.shape[:-2] != total.shape[:-2] or total.shape[-2:] != rows.shape[-1:] * 2:
        raise ConfigurationError(
            "The rows do not fit the total.",
            expected="total [d, d] and rows [N, d], or [G, d, d] and [G, N, d]",
            got=f"{list(total.shape)} and {list(rows.shape)}",
        )
    if total.numel() == 0 or rows.numel() == 0:
        return total
    target, x = total.detach(), rows.detach()
    if total.ndim == 2:
        target, x = target[None], x[None]
    if INTERPRETED or total.device.type != "cpu":
        _on_device(target, x)
    elif (
        total.shape[-1] >= _SYRK_FROM
        and target[0].is_contiguous()
        and torch.get_num_threads() == 1
        and blas_is_serial()
    ):
        syrk = blas.ssyrk if total.dtype == torch.float32 else blas.dsyrk
        # Row-major matrices are BLAS's transposes, so the lower triangle is its upper one.
        for one, its_rows in zip(target.numpy(), x.to(total.dtype), strict=True):
            by_columns = its_rows.mT.is_contiguous()  # needs no copy
            operand = its_rows.numpy() if by_columns else its_rows.contiguous().numpy().T
            syrk(1.0, operand, beta=1.0, c=one.T, trans=int(by_columns), lower=0, overwrite_c=1)
    else:
        _reference(target, x)
    return total


def symmetrize_(total: Tensor) -> Tensor:
    """Copy the lower triangle onto the upper one, in place.

    Args:
        total: Matrices ``[..., d, d]``.

    Returns:
        ``total``, symmetric to the bit.

    Raises:
        ConfigurationError: Not square matrices.
    """
    if total.ndim < 2 or total.shape[-1] != total.shape[-2]:
        raise ConfigurationError(
            "Only square matrices have two triangles.", expected="[..., d, d]", got=str(list(total.shape))
        )
    size = total.shape[-1]
    block = 256  # diagonal blocks are copied out; this bounds the extra memory
    for start in range(0, size, block):
        stop = min(start + block, size)
        if stop < size:
            total[..., start:stop, stop:] = total[..., stop:, start:stop].mT
        diagonal = total[..., start:stop, start:stop]
        diagonal.copy_(diagonal.tril() + diagonal.tril(-1).mT)
    return total


def blas_is_serial() -> bool:
    """Whether SciPy's BLAS runs on one thread: it must not use more cores than torch was given."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(name) == "1":
            return True
    return os.cpu_count() == 1


def dot_precision() -> str:
    """Triton's name for the precision in which torch multiplies float32 on CUDA."""
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee" if INTERPRETED else "tf32x3"


def _reference(total: Tensor, rows: Tensor) -> None:
    """The plain-torch update of ``[G, d, d]`` by ``[G, N, d]``."""
    if total.is_cuda and rows.dtype != total.dtype == torch.float32 and "dtype" in torch.ops.aten.bmm.overloads():
        total.add_(torch.bmm(rows.mT, rows, out_dtype=total.dtype))  # products in 16 bits, sums in 32
    else:
        rows = rows.to(total.dtype)
        total.baddbmm_(rows.mT, rows)


def _on_device(total: Tensor, rows: Tensor) -> None:
    """The faster one of Triton's and torch's updates of ``[G, d, d]`` by ``[G, N, d]``."""
    kernels: Any = None
    if total.dtype == torch.float32 and rows.dtype != torch.float64 and total.stride(2) == 1:
        kernels = triton_kernels("symmetric_update", total.device)
    if kernels is None:
        _reference(total, rows)
        return
    tilings = {f"triton {tiling}": tiling for tiling in kernels.tilings(rows.dtype, total.shape[-1])}
    precision = dot_precision()

    def add(name: str, target: Tensor) -> None:
        if name == REFERENCE:
            _reference(target, rows)
        else:
            kernels.update(target, rows, precision=precision, tiling=tilings[name])

    groups, n_rows, width = rows.shape
    key: Key = ("symmetric_update", total.device, rows.dtype, precision, *size_class(groups, n_rows, width))
    add_fastest(key, total, 2.0 * groups * n_rows * width**2, [REFERENCE, *tilings], add)
