"""The vector work of Lanczos and Arnoldi: Gram–Schmidt against a basis, and the three-term recurrence.

Two runs of classical Gram–Schmidt are orthogonal to rounding (Giraud, Langou and Rozložník 2005: "twice is enough").
They consist of matrix–vector products with the basis, while the modified process consists of single inner products.
With ``mv`` and ``addmv`` on contiguous rows they run at the speed of memory and read the basis of K rows four times. A
broadcast product followed by a sum takes three to four times as long, and memory for K more vectors.

No number is read back from the device, so a CUDA graph can capture a whole Lanczos recurrence. Probes are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels.reductions import inner, inner_products, vector_norm
from laplace_plus.kernels.selection import REFERENCE, choose, size_class, triton_kernels

_TYPES = (torch.float32, torch.float64)


def orthogonalize(basis: Tensor, vector: Tensor, *, passes: int = 2) -> tuple[Tensor, Tensor]:
    """Subtract from a vector its projection on the rows of a basis, by classical Gram–Schmidt.

    ``h = Q w; w ← w − Qᵀ h``, and once more: ``h' = Q w; w ← w − Qᵀ h'; h ← h + h'``.

    Args:
        basis: Q, orthonormal rows ``[K, n]``, or ``[m, K, n]`` for m probes; best with contiguous rows.
        vector: w, ``[n]`` or ``[m, n]``, of the same type: float32 or float64. It does not change.
        passes: 2, or 1 for the first half only, if the vector is already almost orthogonal to the rows.

    Returns:
        The new vector, and the coefficients h: ``[K]`` or ``[m, K]``.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> orthogonalize(torch.eye(3)[:2], torch.tensor([3.0, 4.0, 5.0]))
        (tensor([0., 0., 5.]), tensor([3., 4.]))
    """
    if passes not in (1, 2):
        raise ConfigurationError("Gram–Schmidt is run once or twice.", expected="passes=1 or 2", got=str(passes))
    _check(vector, basis=(basis, torch.Size([*vector.shape[:-1], *basis.shape[-2:-1], vector.shape[-1]])))
    if vector.ndim == 1:
        output, coefficients = orthogonalize(basis[None], vector[None], passes=passes)
        return output[0], coefficients[0]
    q, w = basis.detach(), vector.detach()
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        REFERENCE: lambda: reference_orthogonalize(q, w, passes)
    }
    kernels = _kernels(q, w)
    if kernels is not None:
        candidates["triton"] = lambda: kernels.orthogonalize(q, w, passes)
    key = ("orthogonalize", w.device, w.dtype, passes, *size_class(*q.shape))
    moved = 2.0 * passes * q.numel() * q.element_size()
    return candidates[choose(key, w.device, 10 * moved, candidates)]()


def three_term_update(
    vector: Tensor, current: Tensor, previous: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Lanczos without its product: ``w ← w − α q − β p`` with ``α = ⟨w, q⟩``, and the norm of the result.

    Args:
        vector: w, ``[n]`` or ``[m, n]`` for m probes, float32 or float64. It does not change.
        current: q, of the same shape and type.
        previous: p, likewise; None in the first step.
        beta: β, ``[]`` or ``[m]``; None in the first step.

    Returns:
        The new vector, α, and the norm of the vector, each ``[]`` or ``[m]``.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> w, q = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
        >>> three_term_update(w, q, None, None)
        (tensor([0., 3.]), tensor(2.), tensor(3.))
    """
    if previous is None or beta is None:
        if previous is not None or beta is not None:
            raise ConfigurationError(
                "The previous vector and its coefficient belong together.",
                expected="both, or None for both in the first step",
                got="one of them",
            )
        previous, beta = current, vector.new_zeros(vector.shape[:-1])
    shape = vector.shape
    _check(vector, current=(current, shape), previous=(previous, shape), beta=(beta, shape[:-1]))
    if vector.ndim == 1:
        output, alpha, norm = three_term_update(vector[None], current[None], previous[None], beta[None])
        return output[0], alpha[0], norm[0]
    w, q, p, b = vector.detach(), current.detach(), previous.detach(), beta.detach().contiguous()
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
        REFERENCE: lambda: reference_three_term_update(w, q, p, b)
    }
    kernels = _kernels(w, q, p)
    if kernels is not None:
        candidates["triton"] = lambda: kernels.three_term_update(w, q, p, b)
    key = ("three_term_update", w.device, w.dtype, *size_class(*w.shape))
    return candidates[choose(key, w.device, 60.0 * w.numel() * w.element_size(), candidates)]()


def _check(vector: Tensor, **others: tuple[Tensor, torch.Size]) -> None:
    if vector.dtype not in _TYPES or vector.ndim not in (1, 2):
        raise ConfigurationError(
            "Recurrences run on vectors [n] or [m, n] of float32 or float64.",
            expected="float32 or float64",
            got=f"{vector.dtype} of shape {list(vector.shape)}",
            fix="Convert 16-bit vectors to float32: their inner products would lose orthogonality.",
        )
    for name, (other, shape) in others.items():
        if other.dtype != vector.dtype or other.device != vector.device or other.shape != shape:
            raise ConfigurationError(
                f"{name} does not fit the vector.",
                expected=f"{list(shape)} of {vector.dtype} on {vector.device}",
                got=f"{list(other.shape)} of {other.dtype} on {other.device}",
            )


def _kernels(*tensors: Tensor) -> Any:
    """The Triton kernels, if all tensors have contiguous rows and entries."""
    usable = all(x.numel() > 0 and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in tensors)
    return triton_kernels("gram_schmidt", tensors[0].device) if usable else None


def reference_orthogonalize(basis: Tensor, vector: Tensor, passes: int = 2) -> tuple[Tensor, Tensor]:
    """Torch's own, of ``[m, n]`` against ``[m, k, n]``.

    The CPU takes one probe after another, because batched matrix–vector products are slower there.
    """
    if basis.device.type == "cpu":
        output, coefficients = torch.empty_like(vector), vector.new_zeros(basis.shape[:-1])
        for rows, given, result, h in zip(basis, vector, output, coefficients, strict=True):
            for number in range(passes):
                source = result if number else given
                products = inner_products(rows, source)
                torch.addmv(source, rows.T, products, alpha=-1, out=result)
                h += products
        return output, coefficients
    output = vector.unsqueeze(1)
    total = torch.zeros((), dtype=vector.dtype, device=vector.device)
    for _ in range(passes):
        products = torch.bmm(output, basis.mT)
        output = torch.baddbmm(output, products, basis, alpha=-1)
        total = total + products
    return output.squeeze(1), total.squeeze(1)


def reference_three_term_update(
    vector: Tensor, current: Tensor, previous: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own, for ``[m, n]`` and β ``[m]``."""
    alpha = inner(vector, current)
    output = torch.addcmul(vector, alpha[:, None], current, value=-1)
    output.addcmul_(beta[:, None], previous, value=-1)
    return output, alpha, vector_norm(output)
