"""Random draws from a given generator, on any device, also of multivariate normals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laplace_plus.errors import NotPositiveDefiniteError


def standard_normal(shape: Sequence[int], *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers with the dtype and device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=like.dtype).to(like.device)


def draw_by(sampler: Callable[..., Tensor], parameters: Tensor, generator: torch.Generator | None) -> Tensor:
    """Samples of ``torch.bernoulli``, ``torch.poisson`` or the like, drawn on the generator's device."""
    device = parameters.device if generator is None else generator.device
    return sampler(parameters.to(device), generator=generator).to(parameters.device)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for another generator; advances the given one, or torch's own, by one draw."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=device, dtype=torch.int64))


def stage_generator(seed: int, stage: int) -> torch.Generator:
    """The random numbers of one stage, which do not depend on how many the stages before have drawn.

    Consecutive seeds differ by 2⁶⁴ divided by the golden ratio, which spreads them over all 64 bits.
    """
    return torch.Generator().manual_seed((seed + stage * 0x9E3779B97F4A7C15) % 2**63)


@contextmanager
def global_randomness(device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
    """Seed the global generators of the CPU and of ``device`` from ``generator``, and restore them afterwards."""
    if generator is None:
        yield
        return
    seed = draw_seed(generator)
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would also reseed the devices that are not forked.
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def cholesky(matrix: Tensor) -> Tensor:
    """A lower-triangular ``L`` with ``L Lᵀ = matrix`` for positive *semi*-definite matrices ``[..., n, n]``.

    A multiple of the identity is added: ``n ε`` times the largest diagonal entry at first, then ten times as much until
    the factorisation succeeds, for each matrix of the batch by itself. Unlike an eigendecomposition, Cholesky has a
    derivative when eigenvalues coincide. Matrices of zeros, or of numbers times ε that vanish, have the root zero.
    NotPositiveDefiniteError if one is indefinite by more than rounding.
    """
    size, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    scale = matrix.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    positive = scale > torch.finfo(matrix.dtype).tiny / eps  # a shift of smaller ones would underflow
    symmetric = torch.where(positive, (matrix + matrix.mT) / 2, identity)
    scale = torch.where(positive, scale, 1.0)
    level = torch.full_like(scale, size * eps)
    while True:
        factor, info = torch.linalg.cholesky_ex(symmetric + level * scale * identity)
        failed = (info > 0)[..., None, None]
        if not bool(failed.any()):
            return torch.where(positive, factor, 0.0)
        level = torch.where(failed, 10 * level, level)
        if bool((level > max(eps**0.5, 10 * size * eps)).any()):
            what = "A covariance is indefinite."
            got = f"an eigenvalue of {float(torch.linalg.eigvalsh(symmetric.detach()).min()):.3g}"
            fix = "Use a larger prior precision, a positive semi-definite curvature (GGN) or float64"
            raise NotPositiveDefiniteError(what, expected="a positive semi-definite matrix", got=got, fix=fix)


def draw(mean: Tensor, covariance: Tensor, n: int, *, generator: torch.Generator | None) -> Tensor:
    """Samples ``[n, ..., C]`` of ``N(mean, covariance)``, with a full covariance or variances."""
    noise = standard_normal((n, *mean.shape), like=mean, generator=generator)
    if covariance.dim() > mean.dim():
        size, flat = mean.shape[-1], mean.reshape(-1, mean.shape[-1])
        # One product for each matrix: broadcast over the samples, it would be copied for each of them.
        moved = noise.view(n, -1, size).transpose(0, 1) @ cholesky(covariance.reshape(-1, size, size)).mT
        return (flat + moved.transpose(0, 1)).view_as(noise)
    positive = covariance > 0  # the square root has no derivative at zero
    return mean + torch.where(positive, torch.where(positive, covariance, 1.0).sqrt(), 0.0) * noise
