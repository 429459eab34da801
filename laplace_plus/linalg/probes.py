"""Random test vectors for estimators, and standard errors."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.linalg.arguments import working_type

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
