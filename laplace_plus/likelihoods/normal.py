"""Multivariate normals as likelihoods and predictive distributions use them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_plus.errors import ConfigurationError, NotPositiveDefiniteError
from laplace_plus.likelihoods.base import Marginal, variance_of
from laplace_plus.likelihoods.sampling import standard_normal


def is_full(mean: Tensor, covariance: Tensor) -> bool:
    """Whether a covariance is ``[..., C, C]``, not variances ``[..., C]``; ``ConfigurationError`` if neither."""
    if covariance.shape in ((*mean.shape, mean.shape[-1]), mean.shape):
        return covariance.dim() > mean.dim()
    expected = f"{[*mean.shape, mean.shape[-1]]} or {list(mean.shape)}, or joint=True across inputs"
    raise ConfigurationError(
        "The covariance does not fit the mean.", expected=expected, got=str(list(covariance.shape))
    )


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
    if is_full(mean, covariance):
        size, flat = mean.shape[-1], mean.reshape(-1, mean.shape[-1])
        # One product for each matrix: broadcast over the samples, it would be copied for each of them.
        moved = noise.view(n, -1, size).transpose(0, 1) @ cholesky(covariance.reshape(-1, size, size)).mT
        return (flat + moved.transpose(0, 1)).view_as(noise)
    positive = covariance > 0  # the square root has no derivative at zero
    return mean + torch.where(positive, torch.where(positive, covariance, 1.0).sqrt(), 0.0) * noise


def noisy_normal(mean: Tensor, covariance: Tensor, noise_variance: Tensor) -> Marginal:
    """``N(mean, covariance + diag(noise_variance))`` for ``mean [..., C]`` and variances or a full covariance.

    The mutual information of noisy and noiseless values is ``½ log det(I + D⁻¹ covariance D⁻¹)`` in nats ``[...]``,
    with ``D² = diag(noise_variance)``.
    """
    variance = variance_of(mean, covariance)
    total = variance + noise_variance
    every = mean, total, Normal(mean, total.sqrt(), validate_args=False), variance, noise_variance
    # torch's multivariate normal cannot evaluate an empty batch.
    if mean.shape[-1] == 1 or mean.numel() == 0 or not is_full(mean, covariance):
        return Marginal(*every, information=independent_information(variance, noise_variance))
    deviation = noise_variance.sqrt()
    # In units of the noise the matrix is at least the identity, however small the noise.
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    root = cholesky(identity + covariance / (deviation.unsqueeze(-1) * deviation.unsqueeze(-2)))
    together = MultivariateNormal(mean, scale_tril=deviation.unsqueeze(-1) * root, validate_args=False)
    return Marginal(*every, together, root.diagonal(dim1=-2, dim2=-1).log().sum(-1).clamp_min(0.0))


def independent_information(variance: Tensor, noise_variance: Tensor) -> Tensor:
    """Mutual information ``[...]`` of noisy and noiseless values ``[..., C]`` that are independent, in nats."""
    return 0.5 * torch.log1p(variance / noise_variance).sum(-1)
