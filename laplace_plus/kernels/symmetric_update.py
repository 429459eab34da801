"""Symmetric rank-k updates ``C += α XᵀX``, the sums that Kronecker factors are made of.

Only the lower triangle of C is computed, in half of a general product's operations; :func:`symmetrize_` fills the
upper one in, once, after the last batch. In passing, positions (pixels, tokens) are averaged or summed and the bias's
column of ones is appended.

* CUDA: a Triton kernel with the rows split among the multiprocessors, or cuBLAS, whichever is measured to be faster.
* CPU: ``syrk`` of SciPy's BLAS, in place and without copies, where torch and BLAS both run on one thread and the factor
  has at least 128 columns (64 in float64). On one core of an EPYC (Zen 4) it takes 1.1 (d = 128), 1.3 (256), 1.5 (512),
  1.7 (768) and 1.9 (2304) times less time than torch's product in float32, and 1.5 to 2.1 times less in float64
  (``benchmarks/kernels_cpu.py``). On several threads, whose number SciPy's BLAS does not share with torch, the triangle
  is cut into products of blocks recursively, which takes 1.2 (d = 256), 1.3 (1024) and 1.6 (2304) times less time than
  the whole product in float32 on two threads; in float64 it gains from d = 1536 on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from scipy.linalg import blas
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels.selection import REFERENCE, Key, choose, interpreting, size_class, triton_kernels

Positions = Literal["each", "mean", "sum"]
Precision = Literal["float32", "tf32"]

_ROW_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def symmetric_update(
    total: Tensor,
    rows: Tensor,
    *,
    alpha: float = 1.0,
    bias: bool = False,
    positions: Positions = "each",
    precision: Precision | None = None,
) -> Tensor:
    """``total += alpha · Xᵀ X`` in the lower triangle, in place.

    Products are summed in the total's type, whatever the type of the rows. What the upper triangle holds afterwards is
    left open until :func:`symmetrize_`. NaNs and infinities in the rows end up in the total. On a GPU, the last bits
    depend on the implementation chosen; see :mod:`laplace_plus.kernels.selection`.

    Args:
        total: The sum so far, float32 or float64 of shape ``[d, d]``, or ``[G, d, d]`` for G groups or heads.
        rows: X, with any strides: ``[N, d]``, or ``[N, S, d]`` with S positions; one axis G more in front for groups.
        alpha: Factor of the product, such as 1/(N·S).
        bias: Append a column of ones to X; ``rows`` then have d − 1 columns.
        positions: What X makes of the positions: rows of their own (``"each"``, KFAC-expand), or their mean (inputs) or
            sum (output gradients) within each of the N examples (KFAC-reduce; Eschenhagen et al. 2023). The bias's
            column is of ones in each case.
        precision: How float32 rows are multiplied on CUDA: ``"tf32"`` (relative error 3·10⁻⁵ in Frobenius norm) or
            ``"float32"``; by default as ``torch.get_float32_matmul_precision()`` says.

    Returns:
        ``total``.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> total = torch.zeros(3, 3)
        >>> _ = symmetric_update(total, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), bias=True)
        >>> symmetrize_(total)
        tensor([[10., 14.,  4.],
                [14., 20.,  6.],
                [ 4.,  6.,  2.]])
    """
    total3, rows4 = _checked(total, rows, bias, positions)
    if total.numel() == 0 or rows.numel() == 0 and (not bias or rows4.shape[1] * rows4.shape[2] == 0):
        return total
    precision = precision or current_precision()
    kernels = None
    if total.dtype == torch.float32 and rows.dtype != torch.float64 and total3.stride(2) == 1:
        kernels = triton_kernels("symmetric_update", total.device)
    if kernels is None:
        _reference(total3, rows4, alpha, bias, positions, precision)
        return total

    inputs = rows4.dtype if positions == "each" or rows4.shape[2] == 1 else torch.float32
    exact = "tf32x3" if total.is_cuda and not interpreting() else "ieee"
    dot = "tf32" if precision == "tf32" else exact
    tilings = {f"triton {tiling}": tiling for tiling in kernels.tilings(inputs, total.shape[-1])}

    def run(target: Tensor, name: str) -> None:
        if name == REFERENCE:
            _reference(target, rows4, alpha, bias, positions, precision)
        else:
            _by_triton(kernels, target, rows4, alpha, bias, positions, dot, tilings[name])

    groups, examples, n_positions, width = rows4.shape
    multiplied = examples * (n_positions if positions == "each" else 1)
    key: Key = ("symmetric_update", total.device, rows.dtype, precision, positions, bias)
    key += size_class(groups, multiplied, n_positions, width)
    scratch: list[Tensor] = []

    def trial(name: str) -> None:
        if not scratch:
            scratch.append(torch.zeros_like(total3))
        run(scratch[0], name)

    work = 2.0 * groups * multiplied * width**2
    candidates = {name: partial(trial, name) for name in [REFERENCE, *tilings]}
    run(total3, choose(key, total.device, work, candidates))
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
        raise ConfigurationError("Only square matrices have two triangles.", expected="[..., d, d]", got=_shape(total))
    size = total.shape[-1]
    block = 256  # of the diagonal: those on it are copied out, which bounds the extra memory
    for start in range(0, size, block):
        stop = min(start + block, size)
        if stop < size:
            total[..., start:stop, stop:] = total[..., stop:, start:stop].mT
        diagonal = total[..., start:stop, start:stop]
        diagonal.copy_(diagonal.tril() + diagonal.tril(-1).mT)
    return total


def _checked(total: Tensor, rows: Tensor, bias: bool, positions: str) -> tuple[Tensor, Tensor]:
    """The total as ``[G, d, d]`` and the rows as ``[G, N, S, d]``, both views."""
    if positions not in get_args(Positions):
        raise ConfigurationError(
            "There is no such treatment of positions.",
            expected=" or ".join(map(repr, get_args(Positions))),
            got=repr(positions),
        )
    if total.dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            "Sums of products are kept in float32 or float64.", expected="float32 or float64", got=str(total.dtype)
        )
    if rows.dtype not in _ROW_TYPES:
        raise ConfigurationError(
            "The rows are of a type that cannot be multiplied.", expected="floating point", got=str(rows.dtype)
        )
    if rows.device != total.device:
        raise ConfigurationError(
            "Rows and total are on different devices.", expected=str(total.device), got=str(rows.device)
        )
    if total.ndim not in (2, 3) or total.shape[-1] != total.shape[-2]:
        raise ConfigurationError("The total is not square.", expected="[d, d] or [G, d, d]", got=_shape(total))
    width = total.shape[-1] - bias
    if rows.ndim not in (total.ndim, total.ndim + 1) or rows.shape[-1] != width:
        raise ConfigurationError(
            "The rows do not fit the total.",
            expected=f"{'[G, ' if total.ndim == 3 else '['}N, {width}] or one axis of positions more",
            got=_shape(rows),
            fix="With bias=True, the rows have one column less than the total." if bias else None,
        )
    if total.ndim == 2:
        total, rows = total[None], rows[None]
    if rows.ndim == 3:
        rows = rows.unsqueeze(2)
    if rows.shape[0] != total.shape[0]:
        raise ConfigurationError(
            "Rows and total have different numbers of groups.", expected=str(total.shape[0]), got=str(rows.shape[0])
        )
    if positions != "each" and rows.shape[2] == 0:
        raise ConfigurationError("There is no mean of no positions.", expected="S ≥ 1", got=_shape(rows))
    return total.detach(), rows.detach()


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def current_precision() -> Precision:
    """The precision that torch multiplies float32 in."""
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@contextmanager
def multiplying_in(precision: str, tensor: Tensor) -> Iterator[None]:
    """Let torch multiply float32 in a precision on CUDA, and restore the caller's setting."""
    before = torch.get_float32_matmul_precision()
    wanted = "highest" if precision == "float32" else "high"
    if not tensor.is_cuda or before == wanted:
        yield
        return
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _reference(total: Tensor, rows: Tensor, alpha: float, bias: bool, positions: str, precision: str) -> None:
    """The plain-torch update of ``[G, d, d]`` by ``[G, N, S, d]``."""
    if positions == "mean":
        rows = rows.mean(2, dtype=total.dtype)
    elif positions == "sum":
        rows = rows.sum(2, dtype=total.dtype)
    else:
        rows = rows.flatten(1, 2)
    if total.device.type == "cpu":
        rows = rows.to(total.dtype)
        if _prefers_blas(total):
            _blas_update(total, F.pad(rows, (0, 1), value=1.0) if bias else rows, alpha)
            return
    if bias:
        total = _add_ones(total, rows, alpha)
    if total.numel() == 0:
        return
    if total.device.type == "cpu":
        if len(total) > 1 and total.shape[-1] < 2 * _leaf(total):
            total.baddbmm_(rows.mT, rows, alpha=alpha)
        else:
            for one, its_rows in zip(total, rows, strict=True):
                _blocked_update(one, its_rows, alpha)
        return
    with multiplying_in(precision, total):
        if rows.dtype != total.dtype and total.dtype == torch.float32 and "dtype" in torch.ops.aten.bmm.overloads():
            total.add_(torch.bmm(rows.mT, rows, out_dtype=total.dtype), alpha=alpha)  # products in 16 bits, sums in 32
        else:
            rows = rows.to(total.dtype)
            total.baddbmm_(rows.mT, rows, alpha=alpha)


def _add_ones(total: Tensor, rows: Tensor, alpha: float) -> Tensor:
    """Add the bias's row of the product, the column sums of ``[G, N, d − 1]``; returns the view of the others."""
    width = rows.shape[-1]
    total[:, width, :width] += alpha * rows.sum(1, dtype=total.dtype)
    total[:, width, width] += alpha * rows.shape[1]
    return total[:, :width, :width]


def _by_triton(
    kernels: Any, total: Tensor, rows: Tensor, alpha: float, bias: bool, positions: str, dot: str, tiling: Any
) -> None:
    """The Triton update of ``[G, d, d]`` by ``[G, N, S, d]``.

    Positions and bias are fused as long as each tile of the triangle reads all columns anyway. Beyond that, the average
    would be taken anew for each tile, and a column more would often cost a row of tiles more: one pass each is cheaper.
    """
    if rows.shape[-1] > _FUSED_UP_TO:
        if positions != "each" and rows.shape[2] > 1:
            rows = getattr(rows, positions)(2, keepdim=True, dtype=total.dtype)
        if bias:
            total, bias = _add_ones(total, rows.flatten(1, 2), alpha), False
    kernels.update(total, rows, alpha=alpha, bias=bias, positions=positions, precision=dot, tiling=tiling)


_FUSED_UP_TO = 64


def _leaf(total: Tensor) -> int:
    """Side of the blocks below which halving the triangle gains nothing: see the measurements above."""
    return 128 if total.dtype == torch.float32 else 768


def _blocked_update(total: Tensor, rows: Tensor, alpha: float) -> None:
    """Halve the triangle: its lower left quarter is one product, the two triangles on the diagonal are halved again."""
    width = rows.shape[1]
    if width < 2 * _leaf(total):
        total.addmm_(rows.T, rows, alpha=alpha)
        return
    half = -(-width // 32) * 16
    left, right = rows[:, :half], rows[:, half:]
    total[half:, :half].addmm_(right.T, left, alpha=alpha)
    _blocked_update(total[:half, :half], left, alpha)
    _blocked_update(total[half:, half:], right, alpha)


def _prefers_blas(total: Tensor) -> bool:
    """Whether SciPy's syrk is chosen on the CPU: see the measurements above."""
    least = 128 if total.dtype == torch.float32 else 64
    return total.shape[-1] >= least and total[0].is_contiguous() and torch.get_num_threads() == 1 and blas_is_serial()


def blas_is_serial() -> bool:
    """Whether SciPy's BLAS runs on one thread, like torch: it must not take more cores than torch was given."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return any(os.environ.get(name) == "1" for name in names) or os.cpu_count() == 1


def _blas_update(total: Tensor, rows: Tensor, alpha: float) -> None:
    """SciPy's ``syrk`` on each group; row-major matrices are BLAS's transposes, so the lower triangle is its upper."""
    syrk = blas.ssyrk if total.dtype == torch.float32 else blas.dsyrk
    for one, its_rows in zip(total.numpy(), rows, strict=True):
        columns_first = its_rows.mT.is_contiguous()  # as unfolded patches are: taken as they are
        operand = its_rows.numpy() if columns_first else its_rows.contiguous().numpy().T
        syrk(alpha, operand, beta=1.0, c=one.T, trans=int(columns_first), lower=0, overwrite_c=1)
