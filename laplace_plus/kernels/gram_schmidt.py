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


def orthogonalize(
    basis: Tensor, vector: Tensor, k: int | Tensor | None = None, *, passes: int = 2
) -> tuple[Tensor, Tensor]:
    """Subtract from a vector its projection on the first k rows of a basis, by classical Gram–Schmidt.

    ``h = Q w; w ← w − Qᵀ h``, and once more: ``h' = Q w; w ← w − Qᵀ h'; h ← h + h'``.

    Args:
        basis: Q, orthonormal rows ``[K, n]``, or ``[m, K, n]`` for m probes; best with contiguous rows.
        vector: w, ``[n]`` or ``[m, n]``, of the same type: float32 or float64. It is not changed.
        k: How many of the rows to use; all by default. An integer on the device (a 0-d tensor) instead masks the rows
            from k on, which must be finite: all K rows are read, but shapes stay the same in every step.
        passes: 2, or 1 where the vector is almost orthogonal to the rows already; then only the first half is done.

    Returns:
        The new vector, and the coefficients h: ``[k]`` or ``[m, k]``; with a tensor k, K of them, zero from k on.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> basis = torch.eye(3)
        >>> orthogonalize(basis, torch.tensor([3.0, 4.0, 5.0]), k=2)
        (tensor([0., 0., 5.]), tensor([3., 4.]))
    """
    _check(vector, basis=basis)
    if passes not in (1, 2):
        raise ConfigurationError("Gram–Schmidt is run once or twice.", expected="passes=1 or 2", got=str(passes))
    if basis.ndim != vector.ndim + 1 or basis.shape[:-2] != vector.shape[:-1] or basis.shape[-1] != vector.shape[-1]:
        raise ConfigurationError(
            "The vector does not fit the basis.",
            expected="basis [K, n] and vector [n], or [m, K, n] and [m, n]",
            got=f"{list(basis.shape)} and {list(vector.shape)}",
        )
    mask = None
    if isinstance(k, Tensor):
        mask = (torch.arange(basis.shape[-2], device=basis.device) < k.to(basis.device)).to(basis.dtype)
    else:
        k = basis.shape[-2] if k is None else k
        if not 0 <= k <= basis.shape[-2]:
            raise ConfigurationError("The basis has fewer rows.", expected=f"k ≤ {basis.shape[-2]}", got=str(k))
        basis = basis[..., :k, :]
    if vector.ndim == 1:
        output, coefficients = _orthogonalize(basis.detach()[None], vector.detach()[None], mask, passes)
        return output[0], coefficients[0]
    return _orthogonalize(basis.detach(), vector.detach(), mask, passes)


def three_term_update(
    vector: Tensor, current: Tensor, previous: Tensor | None, beta: Tensor | None, *, alpha: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Lanczos without re-orthogonalisation: ``w − α q_k − β q_{k−1}`` with ``α = ⟨w, q_k⟩``, and its norm.

    Args:
        vector: w = A q_k, ``[n]``, or ``[m, n]`` for m probes, of float32 or float64. It is not changed.
        current: q_k, of the same shape.
        previous: q_{k−1}, of the same shape; None in the first step.
        beta: β, ``[]`` or ``[m]``; None in the first step.
        alpha: α, if it is known already, ``[]`` or ``[m]``.

    Returns:
        The new vector, α, and the norm of the vector, each ``[]`` or ``[m]``.

    Raises:
        ConfigurationError: Shapes, types or devices that do not fit.

    Example:
        >>> w, q = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
        >>> three_term_update(w, q, None, None)
        (tensor([0., 3.]), tensor(2.), tensor(3.))
    """
    if (previous is None) != (beta is None):
        raise ConfigurationError(
            "The previous vector and its coefficient belong together.",
            expected="both, or None for both in the first step",
            got="one of them",
        )
    _check(vector, current=current, previous=previous, beta=beta, alpha=alpha)
    given: tuple[tuple[str, Tensor | None, torch.Size], ...] = (
        ("current", current, vector.shape),
        ("previous", previous, vector.shape),
        ("beta", beta, vector.shape[:-1]),
        ("alpha", alpha, vector.shape[:-1]),
    )
    for name, tensor, shape in given:
        if tensor is not None and tensor.shape != shape:
            raise ConfigurationError(
                f"{name} does not fit the vector.", expected=str(list(shape)), got=str(list(tensor.shape))
            )
    if previous is None or beta is None:
        previous, beta = current, vector.new_zeros(vector.shape[:-1])
    vector, current, previous, beta = (x.detach() for x in (vector, current, previous, beta))
    alpha = None if alpha is None else alpha.detach()
    if vector.ndim == 2:
        return _three_term_update(vector, current, previous, beta, alpha)
    output, alpha, norm = _three_term_update(
        vector[None], current[None], previous[None], beta[None], None if alpha is None else alpha[None]
    )
    return output[0], alpha[0], norm[0]


def _check(vector: Tensor, **others: Tensor | None) -> None:
    if vector.dtype not in _TYPES or vector.ndim not in (1, 2):
        raise ConfigurationError(
            "Recurrences run on vectors [n] or [m, n] of float32 or float64.",
            expected="float32 or float64",
            got=f"{vector.dtype} of shape {list(vector.shape)}",
            fix="Convert 16-bit vectors to float32: their inner products would lose orthogonality.",
        )
    for name, other in others.items():
        if other is not None and (other.dtype != vector.dtype or other.device != vector.device):
            raise ConfigurationError(
                f"{name} is of another type or device than the vector.",
                expected=f"{vector.dtype} on {vector.device}",
                got=f"{other.dtype} on {other.device}",
            )


def _kernels(name: str, *tensors: Tensor) -> Any:
    """The Triton kernels, if all tensors have contiguous rows and entries."""
    usable = all(x.numel() > 0 and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in tensors)
    return triton_kernels(name, tensors[0].device) if usable else None


def _orthogonalize(basis: Tensor, vector: Tensor, mask: Tensor | None, passes: int) -> tuple[Tensor, Tensor]:
    """Orthogonalise ``[m, n]`` against ``[m, k, n]``."""
    kernels = _kernels("gram_schmidt", basis, vector)
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        REFERENCE: lambda: _reference_orthogonalize(basis, vector, mask, passes)
    }
    if kernels is not None:
        candidates["triton"] = lambda: kernels.orthogonalize(basis, vector, mask, passes)
    key = ("orthogonalize", vector.device, vector.dtype, mask is None, passes, *size_class(*basis.shape))
    moved = 2.0 * passes * basis.numel() * basis.element_size()
    return candidates[choose(key, vector.device, 10 * moved, candidates)]()


def _reference_orthogonalize(
    basis: Tensor, vector: Tensor, mask: Tensor | None, passes: int = 2
) -> tuple[Tensor, Tensor]:
    """Torch's own; on the CPU one probe after another, because batched matrix–vector products are slower there."""
    if basis.device.type == "cpu":
        output, coefficients = torch.empty_like(vector), vector.new_zeros(basis.shape[:-1])
        for rows, given, result, h in zip(basis, vector, output, coefficients, strict=True):
            for turn in range(passes):
                source = result if turn else given
                products = inner_products(rows, source)
                products = products if mask is None else products.mul_(mask)
                torch.addmv(source, rows.T, products, alpha=-1, out=result)
                h += products
        return output, coefficients
    output = vector.unsqueeze(1)
    total = torch.zeros((), dtype=vector.dtype, device=vector.device)
    for _ in range(passes):
        products = torch.bmm(output, basis.mT)
        products = products if mask is None else products * mask
        output = torch.baddbmm(output, products, basis, alpha=-1)
        total = total + products
    return output.squeeze(1), total.squeeze(1)


def _three_term_update(
    vector: Tensor, current: Tensor, previous: Tensor, beta: Tensor, alpha: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels("gram_schmidt", vector, current, previous)
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
        REFERENCE: lambda: _reference_three_term_update(vector, current, previous, beta, alpha)
    }
    if kernels is not None:
        beta = beta.contiguous()
        alpha = alpha if alpha is None else alpha.contiguous()
        candidates["triton"] = lambda: kernels.three_term_update(vector, current, previous, beta, alpha)
    key = ("three_term_update", vector.device, vector.dtype, alpha is None, *size_class(*vector.shape))
    moved = 6.0 * vector.numel() * vector.element_size()
    return candidates[choose(key, vector.device, 10 * moved, candidates)]()


def _reference_three_term_update(
    vector: Tensor, current: Tensor, previous: Tensor, beta: Tensor, alpha: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if alpha is None:
        alpha = inner(vector, current)
    output = torch.addcmul(vector, alpha[:, None], current, value=-1)
    output.addcmul_(beta[:, None], previous, value=-1)
    return output, alpha, vector_norm(output)
