"""Random test vectors, and the estimates from them with their standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from laplace_plus import checks


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error.

    Attributes:
        value: The estimate; differentiable where the function says so.
        sem: Standard error of ``value`` over the random probes, of the same shape; zero where the result is exact. It
            does not include the bias of a small Krylov depth, which ``converged`` tests.
        matvecs: Number of operator–vector products.
        converged: Whether the requested tolerances are met, or the result is exact.
        probes: Number of independent probes behind ``sem``.
        depth: Largest Krylov depth; 0 for methods without one.
    """

    value: Tensor
    sem: Tensor
    matvecs: int
    converged: bool
    probes: int = 0
    depth: int = 0


def standard_error(samples: Tensor) -> Tensor:
    """The standard error of the mean of ``samples [k, ...]`` over the first dimension; infinite for one sample."""
    if len(samples) == 1:
        return torch.full_like(samples[0], torch.inf)
    return cast(Tensor, samples.std(0) / samples.shape[0] ** 0.5)


def jackknife(estimates: Tensor) -> Tensor:
    """The jackknife standard error, from the estimates ``[m, ...]`` without each of the m probes.

    In expectation it is at least the error of an estimate with one probe less (B. Efron and C. Stein, "The Jackknife
    Estimate of Variance", 1981).
    """
    m = len(estimates)
    return ((m - 1) / m * (estimates - estimates.mean(0)).square().sum(0)).sqrt()


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which recurrences run: that of the vectors, but at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


Probes = Literal["signs", "sphere", "gaussian"]
"""Distributions of test vectors ω with E[ω ωᵀ] = I: random signs, uniform on the sphere of radius √n, normal."""


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
        count: Number of vectors.
        n: Their length.
        generator: Source of the randomness, torch's global generator by default; may be on another device.
        dtype: Type of the result; torch's default type by default.
        device: Device of the result; torch's default device by default.

    Returns:
        ``[count, n]``.

    Raises:
        ConfigurationError: Another kind, or a count that is none.
    """
    checks.choice("probes", kind, get_args(Probes))
    checks.count("count", count, 0)
    checks.generator(generator)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    source = device if generator is None else generator.device
    wide = working_type(dtype)
    if kind == "signs":
        signs = torch.randint(0, 2, (count, n), generator=generator, device=source)
        return signs.mul_(2).sub_(1).to(device=device, dtype=dtype)
    vectors = torch.randn(count, n, generator=generator, device=source, dtype=wide)
    if kind == "sphere":
        vectors *= n**0.5 / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors.to(device=device, dtype=dtype)
