"""Passes over long vectors: accurate inner products and norms; a check for NaN and infinity.

On the CPU, torch and BLAS sum a float32 inner product in a few running totals. With millions of terms of one sign, as
in a norm, each addition rounds in the same way: the norm of 11 million entries comes out 3·10⁻⁴ too small, and the
inner product of the vector with itself 7·10⁻⁴. A Lanczos recurrence then has wrong coefficients. Here segments of
bounded length are summed in float32 and their totals in float64. The error is then 10⁻⁶ (10⁻⁵ where one entry outweighs
all others), at the same cost. GPUs sum in many short totals anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SEGMENT = 1 << 16
"""Products in one float32 sum: an error of 10⁻⁶, at a negligible number of calls."""

_ROW = 1 << 12
"""Squares in one float32 sum; all segments take one call."""


def vector_norm(vectors: Tensor) -> Tensor:
    """Euclidean norms along the last axis, ``[..., n] -> [...]``."""
    if not _is_long(vectors):
        return torch.linalg.vector_norm(vectors, dim=-1)
    whole = vectors.shape[-1] // _ROW * _ROW
    parts = torch.linalg.vector_norm(vectors[..., :whole].unflatten(-1, (-1, _ROW)), dim=-1)
    rest = torch.linalg.vector_norm(vectors[..., whole:], dim=-1, dtype=torch.float64)
    return torch.hypot(torch.linalg.vector_norm(parts, dim=-1, dtype=torch.float64), rest).to(vectors.dtype)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products along the last axis, ``[..., n]`` and ``[..., n]`` give ``[...]``."""
    return _product(torch.dot if left.ndim == right.ndim == 1 else torch.linalg.vecdot, left, right)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """All inner products of rows, ``L Rᵀ``: ``[..., k, n]`` and ``[..., p, n]`` give ``[..., k, p]``.

    ``right`` may also be one vector ``[n]``, which gives ``[k]`` for ``[k, n]``.
    """
    return _product(lambda a, b: a @ (b if b.ndim == 1 else b.mT), left, right)


def _product(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """A product that sums over the last axis, for long vectors in segments."""
    if not _is_long(left):
        return product(left, right)
    total: Tensor | None = None
    for start in range(0, left.shape[-1], _SEGMENT):
        stop = start + _SEGMENT
        part = product(left[..., start:stop], right[..., start:stop]).double()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(left.dtype)


def all_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite, from one pass without intermediate results."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.dtype.itemsize == 1:  # eight-bit floats cannot be compared
        tensor = tensor.float()
    # aminmax propagates NaN.
    low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _is_long(vectors: Tensor) -> bool:
    narrow = torch.finfo(vectors.dtype).eps > torch.finfo(torch.float64).eps
    return narrow and vectors.device.type == "cpu" and vectors.shape[-1] > 2 * _SEGMENT
