"""Predictions from a Gaussian over a network's outputs, or from samples of them.

The closed forms belong to the likelihoods (:meth:`~laplace_plus.likelihoods.Likelihood.predict`). This module adds what
all likelihoods share: Monte Carlo, joint predictions, and argument checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NotPositiveDefiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import is_full, unknown_link
from laplace_plus.likelihoods.checks import check_finite, check_outputs, shape_text, widen
from laplace_plus.predictive.prediction import Prediction, RandomSource


def from_functional(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    *,
    link: str | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    joint: bool = False,
) -> Prediction:
    """The prediction of a Gaussian over the network's outputs.

    Args:
        likelihood: How targets are distributed given the outputs.
        mean: ``[B, *, C]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]``, where the link and the likelihood need no more; or across
            inputs, ``[B, *, C, B, *, C]``, with ``joint``.
        link: One of ``likelihood.links``; ``None`` for the first.
        n_samples: Number of samples for ``"mc"``, and for quantities without a closed form.
        generator: Source of randomness. It advances by one number here, which determines everything random about the
            prediction, in any order of access. Without one the global generator is used at the first access.
        joint: Whether the covariance is across inputs. The link then still gives the mean and variance of each input;
            samples and log-probability are joint over all inputs.

    Raises:
        ConfigurationError: If there is no such link, or the shapes do not fit.
        NonFiniteError: If the mean or the covariance holds NaN or infinity.
        NotPositiveDefiniteError: If a variance is negative by more than rounding.

    Example:
        >>> from laplace_plus.likelihoods import Bernoulli
        >>> from_functional(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[8.0]]])).mean
        tensor([[0.7277]])
    """
    link = likelihood.links[0] if link is None else link
    if link not in likelihood.links:
        raise unknown_link(likelihood, link)
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise ConfigurationError(
            "n_samples must be a positive integer.", expected="an integer >= 1", got=repr(n_samples)
        )
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    covariance = covariance.to(torch.promote_types(covariance.dtype, torch.float32))
    if mean.dim() < 2 or not bool(torch.isfinite(mean).all() & torch.isfinite(covariance).all()):
        check_outputs(mean)
        check_finite(covariance, "The functional covariance")
    given = covariance
    if joint:
        covariance = _blocks(mean, covariance)
    full = covariance.dim() > mean.dim()
    if covariance.shape != ((*mean.shape, mean.shape[-1]) if full else mean.shape):
        is_full(mean, covariance)  # raises
    if link == "mc" and likelihood.couples_outputs and not full and mean.shape[-1] > 1:
        raise ConfigurationError(
            f"Monte Carlo for {type(likelihood).__name__} needs the covariances of the outputs.",
            expected=shape_text((*mean.shape, mean.shape[-1])),
            got=f"variances only, {shape_text(covariance.shape)}",
            fix="Ask for the full functional covariance, or for another link",
        )
    variance = covariance.detach()
    variance = variance.diagonal(dim1=-2, dim2=-1) if full else variance
    if variance.numel():
        lowest, largest = variance.min(), variance.abs().max()
        if bool(lowest < -(torch.finfo(variance.dtype).eps ** 0.5) * largest):  # beyond rounding
            raise NotPositiveDefiniteError(
                "A functional variance is negative.",
                expected="variances >= 0",
                got=f"{float(lowest):.3g}",
                fix="Use a larger prior precision, a positive semi-definite curvature (GGN) or float64",
            )
    return Prediction(
        likelihood=likelihood,
        functional_mean=mean,
        functional_covariance=given,
        link=link,
        joint=joint,
        marginal=None if link == "mc" else likelihood.predict(mean, covariance, link=link),
        n_samples=n_samples,
        source=RandomSource() if generator is None else RandomSource.of(generator),
    )


def from_samples(
    likelihood: Likelihood, outputs: Tensor, *, generator: torch.Generator | None = None, joint: bool = False
) -> Prediction:
    """The prediction of samples of the network's outputs, e.g. of networks whose parameters were sampled.

    Args:
        likelihood: How targets are distributed given the outputs.
        outputs: Arranged, ``[S, B, *, C]``; sample ``s`` is of one network for all inputs.
        generator: Source of randomness for entropies that have no closed form; see :func:`from_functional`.
        joint: Whether :meth:`Prediction.log_prob` is of all inputs together.

    Raises:
        ConfigurationError: If ``outputs`` has fewer than three dimensions or no samples.
        NonFiniteError: If it holds NaN or infinity.

    Example:
        >>> from laplace_plus.likelihoods import Gaussian
        >>> from_samples(Gaussian(0.5), torch.tensor([[[1.0]], [[3.0]]])).variance
        tensor([[1.2500]])
    """
    if outputs.dim() < 3 or len(outputs) == 0:
        raise ConfigurationError(
            "outputs must be samples of network outputs.",
            expected="[S, B, *, C] with S >= 1",
            got=shape_text(outputs.shape),
            fix="Stack the outputs of the sampled networks along a new first axis",
        )
    outputs = widen(outputs)
    check_outputs(outputs)
    return Prediction(
        likelihood=likelihood,
        functional_mean=outputs.mean(0),
        functional_covariance=None,
        link="sampled",
        joint=joint,
        marginal=None,
        n_samples=len(outputs),
        source=RandomSource.of(generator),
        outputs=outputs,
    )


def _blocks(mean: Tensor, covariance: Tensor) -> Tensor:
    """The covariance of each input, ``[B, *, C, C]``, from that across inputs."""
    if covariance.shape != (*mean.shape, *mean.shape):
        raise ConfigurationError(
            "The covariance must be across inputs.",
            expected=shape_text((*mean.shape, *mean.shape)),
            got=shape_text(covariance.shape),
            fix="Ask for functional_posterior(x, joint=True), or leave joint out",
        )
    size = mean.shape[-1]
    n = mean[..., 0].numel()
    blocks = covariance.reshape(n, size, n, size).diagonal(dim1=0, dim2=2)  # [C, C, N]
    return blocks.movedim(-1, 0).reshape(*mean.shape, size)
