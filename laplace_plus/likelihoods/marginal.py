"""Distributions of targets with the outputs integrated out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily, MultivariateNormal, Normal

from laplace_plus.likelihoods.sampling import cholesky


@dataclass(frozen=True, eq=False)
class Marginal:
    """The distribution of targets with the outputs integrated out, ``p(y) = ∫ p(y|f) N(f|m, V) df``.

    Attributes:
        mean: ``E[y]``, for classes their probabilities.
        variance: ``Var[y]``.
        distribution: Of ``y``: over the classes, or of every entry of ``y`` by itself.
        epistemic: ``Var_f(E[y|f])``, or ``None`` without a closed form.
        aleatoric: ``E_f[Var(y|f)]``, or ``None`` without a closed form.
        together: The joint distribution of the entries of one target, where they are correlated; else ``None``.
        information: The mutual information ``[B, *]`` of ``y`` and ``f`` in nats, or ``None``.
    """

    mean: Tensor
    variance: Tensor
    distribution: Distribution
    epistemic: Tensor | None = None
    aleatoric: Tensor | None = None
    together: Distribution | None = None
    information: Tensor | None = None


def variance_of(mean: Tensor, covariance: Tensor) -> Tensor:
    """The variances ``[..., C]``, clamped at zero against rounding."""
    if covariance.dim() > mean.dim():
        covariance = covariance.diagonal(dim1=-2, dim2=-1)
    return covariance.clamp_min(0.0)


def uniform_mixture(components: Distribution, *, like: Tensor) -> MixtureSameFamily:
    """A mixture with equal weights, of the dtype of ``like``, over the last batch dimension of ``components``."""
    *batch, size = components.batch_shape
    logits = torch.zeros(size, dtype=like.dtype, device=like.device).expand(*batch, size)
    return MixtureSameFamily(Categorical(logits=logits, validate_args=False), components, validate_args=False)


def noisy_normal(mean: Tensor, covariance: Tensor, noise_variance: Tensor) -> Marginal:
    """``N(mean, covariance + diag(noise_variance))`` for ``mean [..., C]`` and variances or a full covariance.

    The mutual information of noisy and noiseless values is ``½ log det(I + D⁻¹ covariance D⁻¹)`` in nats ``[...]``,
    with ``D² = diag(noise_variance)``.
    """
    variance = variance_of(mean, covariance)
    total = variance + noise_variance
    every = mean, total, Normal(mean, total.sqrt(), validate_args=False), variance, noise_variance
    # torch's multivariate normal cannot evaluate an empty batch.
    if mean.shape[-1] == 1 or mean.numel() == 0 or covariance.dim() == mean.dim():
        return Marginal(*every, information=0.5 * torch.log1p(variance / noise_variance).sum(-1))
    deviation = noise_variance.sqrt()
    # In units of the noise the matrix is at least the identity, however small the noise.
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    root = cholesky(identity + covariance / (deviation.unsqueeze(-1) * deviation.unsqueeze(-2)))
    together = MultivariateNormal(mean, scale_tril=deviation.unsqueeze(-1) * root, validate_args=False)
    return Marginal(*every, together, root.diagonal(dim1=-2, dim2=-1).log().sum(-1).clamp_min(0.0))
