"""Passes over long vectors: accurate inner products and norms, checksums, and a check for NaN and infinity.

On the CPU, torch and BLAS sum a float32 inner product in a few running totals. With millions of terms of one sign, as
in a norm, each addition rounds in the same way: the norm of 11 million entries comes out 3·10⁻⁴ too small, and the
inner product of the vector with itself 7·10⁻⁴. A Lanczos recurrence then has wrong coefficients. Here segments of
bounded length are summed in float32 and their totals in float64. The error is then 10⁻⁶ (10⁻⁵ where one entry outweighs
all others), at the same cost. GPUs sum in many short totals anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

_SEGMENT = 1 << 16
"""Products in one float32 sum: an error of 10⁻⁶, at a negligible number of calls."""

_ROW = 1 << 12
"""Squares in one float32 sum; all segments take one call."""

_STRIDE = 251
"""Entries that share one weighted sum; a prime, so that it divides no common layer size."""

_SMALL = 2**16
"""Tensors with at most this many entries are summed together: one call for all biases costs less than one for each."""


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


def checksums(tensors: Sequence[Tensor]) -> list[float]:
    """Weighted sums of all entries, which tell permutations apart: one for each large tensor, one for all small ones.

    A NaN or infinity makes its sum non-finite. Sparse tensors count with their stored entries and indices. The sums
    depend on the number of threads and on the device, by rounding.
    """
    large: list[Tensor] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        tensor = tensor.detach()
        for values in [tensor] if tensor.layout == torch.strided else _stored(tensor):
            if values.numel() > _SMALL:
                large.append(values.flatten())
            else:
                small.setdefault(values.device, []).append(values.flatten().double())
    for several in small.values():
        large.append(torch.cat(several))
    sums = []
    for flat in large:
        if not flat.is_floating_point():
            sums.append(float(flat.double().sum()))
            continue
        columns = len(flat) // _STRIDE
        whole = columns * _STRIDE
        ramp = _ramp(0.5, _STRIDE, flat.dtype, flat.device)
        total = (ramp @ flat[:whole].view(_STRIDE, columns)).double() @ _ramp(1.0, columns, torch.float64, flat.device)
        sums.append(float(total + (flat[whole:] * ramp[: len(flat) - whole]).double().sum()))
    return sums


def _stored(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor, which might not fit in memory as a dense one."""
    coalesced = tensor.to_sparse_coo().coalesce()
    return [coalesced.indices().double(), coalesced.values()]


@lru_cache(maxsize=64)
def _ramp(start: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights that rise linearly from ``start`` to ``start + 1``."""
    with torch.inference_mode(False):
        return torch.linspace(start, start + 1, length, dtype=dtype, device=device)
