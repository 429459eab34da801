"""Random test vectors for estimators, and what the estimators have in common."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg.arguments import require_choice, working_type
from laplace_plus.linalg.linear_maps import LinearMap

Probes = Literal["signs", "sphere", "gaussian"]
"""Distributions of test vectors ω with E[ω ωᵀ] = I: random signs, the sphere of radius √n, the standard normal."""


def draw_probes(
    kind: Probes,
    count: int,
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Independent random vectors ω with ``E[ω ωᵀ] = I``.

    Args:
        kind: ``"signs"``, ``"sphere"`` (uniform on the sphere of radius √n) or ``"gaussian"``.
        count: How many.
        n: Their length.
        generator: Where the randomness comes from, torch's global generator by default; may live on another device.
        dtype: Type of the result; torch's default type by default.
        device: Device of the result; torch's default device by default.

    Returns:
        ``[count, n]``.

    Raises:
        ConfigurationError: Another kind, or a type that is not of real floating-point numbers.
    """
    require_choice("probes", kind, Probes)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ConfigurationError("Probes are real floating-point vectors.", expected="such a dtype", got=str(dtype))
    source = device if generator is None else generator.device
    wide = working_type(dtype)
    if kind == "signs":
        signs = torch.randint(0, 2, (count, n), generator=generator, device=source)
        return signs.mul_(2).sub_(1).to(device=device, dtype=dtype)
    vectors = torch.randn(count, n, generator=generator, device=source, dtype=wide)
    if kind == "sphere":
        vectors *= n**0.5 / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors.to(device=device, dtype=dtype)


def multiply(operator: LinearMap, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """``A v`` for ``[k, n]``, multiplied in the operator's type ``dtype`` and returned in the type of ``vectors``."""
    return operator(vectors.to(dtype)).to(vectors.dtype)


def parameter_gradients(
    operator: LinearMap, vectors: Tensor, cotangents: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The derivative of ``Σ ⟨u, A v⟩`` in the operator's tensors, in its type ``dtype``."""
    return operator.parameter_pullback(vectors.to(dtype), cotangents.to(dtype))


def dense(operator: LinearMap, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The identity and the matrix's transpose ``[n, n]``, whose rows are ``A eᵢ``: n products in one stack."""
    identity = torch.eye(operator.n, dtype=dtype, device=device)
    return identity, operator(identity)


def exact_is_due(spent: int, batch: int, n: int, cap: int) -> bool:
    """Whether n products with the unit vectors are to follow instead of another batch of random ones.

    So it is as soon as they are no more than what would have been spent, and before the cap forbids them.
    """
    left = cap - spent
    return n <= left and (spent + batch >= n or left < n + batch)


def standard_error(samples: Tensor) -> Tensor:
    """The standard error of the mean of ``samples [k, ...]`` over the first dimension; infinite for one sample."""
    if len(samples) == 1:
        return torch.full_like(samples[0], torch.inf)
    return cast(Tensor, samples.std(0) / samples.shape[0] ** 0.5)


def jackknife(estimates: Tensor) -> Tensor:
    """The standard error of an estimate from what it would be without each of its m probes, ``[m, ...]``.

    On average it is not below the error with one probe less (B. Efron and C. Stein, "The Jackknife Estimate of
    Variance", 1981).
    """
    m = len(estimates)
    return ((m - 1) / m * (estimates - estimates.mean(0)).square().sum(0)).sqrt()
