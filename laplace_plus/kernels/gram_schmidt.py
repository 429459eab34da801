"""The vector work of Krylov methods: inner products, and Gram–Schmidt against a basis.

Two runs of classical Gram–Schmidt are orthogonal to rounding (Giraud, Langou and Rozložník 2005: "twice is enough").
They consist of matrix–vector products with the basis, while the modified process consists of single inner products.
With ``mv`` and ``addmv`` on contiguous rows they run at the speed of memory and read the basis of K rows four times. A
broadcast product followed by a sum takes three to four times as long, and memory for K more vectors.

On the CPU, torch and BLAS sum a float32 inner product in a few running totals. With millions of terms of one sign, as
in a norm, each addition rounds in the same way: the norm of 11 million entries comes out 3·10⁻⁴ too small, and the
inner product of the vector with itself 7·10⁻⁴. A Lanczos recurrence then has wrong coefficients. Here segments of
bounded length are summed in float32 and their totals in float64. The error is then 10⁻⁶ (10⁻⁵ where one entry outweighs
all others), at the same cost. GPUs sum in many short totals anyway.

No number is read back from the device, so a CUDA graph can capture a whole Lanczos recurrence. Probes are batched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace_plus.kernels.selection import triton_kernels

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
    return _by_segments(torch.dot if left.ndim == right.ndim == 1 else torch.linalg.vecdot, left, right)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """All inner products of rows, ``L Rᵀ``: ``[..., k, n]`` and ``[..., p, n]`` give ``[..., k, p]``.

    ``right`` may also be one vector ``[n]``, which gives ``[k]`` for ``[k, n]``.
    """
    return _by_segments(lambda a, b: a @ (b if b.ndim == 1 else b.mT), left, right)


def _by_segments(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """A product that sums over the last axis, for long vectors in segments."""
    if not _is_long(left):
        return product(left, right)
    pairs = zip(left.split(_SEGMENT, -1), right.split(_SEGMENT, -1), strict=True)
    return torch.stack([product(a, b) for a, b in pairs]).sum(0, dtype=torch.float64).to(left.dtype)


def _is_long(vectors: Tensor) -> bool:
    return vectors.device.type == "cpu" and vectors.dtype != torch.float64 and vectors.shape[-1] > 2 * _SEGMENT


def orthogonalize(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract from a vector its projection on the rows of a basis, by classical Gram–Schmidt, twice.

    ``h = Q w; w ← w − Qᵀ h``, and once more: ``h' = Q w; w ← w − Qᵀ h'; h ← h + h'``. In torch, or by the Triton kernel
    where :mod:`~laplace_plus.kernels.selection` says so and all tensors have contiguous rows.

    Args:
        basis: Q, orthonormal rows ``[K, n]``, or ``[m, K, n]`` for m probes; best with contiguous rows.
        vector: w, ``[n]`` or ``[m, n]``, of the same type: float32 or float64. It does not change.

    Returns:
        The new vector, and the coefficients h: ``[K]`` or ``[m, K]``.

    Example:
        >>> orthogonalize(torch.eye(3)[:2], torch.tensor([3.0, 4.0, 5.0]))
        (tensor([0., 0., 5.]), tensor([3., 4.]))
    """
    if vector.ndim == 1:
        output, coefficients = orthogonalize(basis[None], vector[None])
        return output[0], coefficients[0]
    basis, vector = basis.detach(), vector.detach()
    usable = all(x.numel() > 0 and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in (basis, vector))
    kernels = triton_kernels("gram_schmidt", basis.device) if usable else None
    return (kernels.orthogonalize if kernels else reference_orthogonalize)(basis, vector)


def reference_orthogonalize(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's own, of ``[m, n]`` against ``[m, k, n]``.

    The CPU takes one probe after another, because batched matrix–vector products are slower there.
    """
    if basis.device.type == "cpu":
        output, coefficients = torch.empty_like(vector), vector.new_zeros(basis.shape[:-1])
        for rows, given, result, h in zip(basis, vector, output, coefficients, strict=True):
            for source in (given, result):
                products = inner_products(rows, source)
                torch.addmv(source, rows.T, products, alpha=-1, out=result)
                h += products
        return output, coefficients
    output, total = vector.unsqueeze(1), vector.new_zeros(())
    for _ in range(2):
        products = torch.bmm(output, basis.mT)
        output = torch.baddbmm(output, products, basis, alpha=-1)
        total = total + products
    return output.squeeze(1), total.squeeze(1)
