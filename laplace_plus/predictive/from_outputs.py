"""Predictions from Gaussians over a network's outputs, and from samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import DataError, NotPositiveDefiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import widen
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
        NonFiniteError: If the mean or the covariance holds NaN or infinity, or is so large that the prediction does.
        NotPositiveDefiniteError: If a variance is negative by more than rounding.

    Example:
        >>> from laplace_plus.likelihoods import Bernoulli
        >>> from_functional(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[8.0]]])).mean
        tensor([[0.7277]])
    """
    likelihood = likelihood.of_new_targets
    link = likelihood.links[0] if link is None else link
    if link not in likelihood.links:
        checks.options(type(likelihood).__name__, [link], likelihood.links, "link")
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    covariance = covariance.to(torch.promote_types(covariance.dtype, torch.float32))
    checks.finite("The network's output", mean)
    checks.finite("The functional covariance", covariance)
    given = covariance
    if joint:
        fix, (size, n) = "Ask for functional_posterior(x, joint=True).", (mean.shape[-1], mean[..., 0].numel())
        checks.shape("The covariance across inputs", covariance, (*mean.shape, *mean.shape), fix)
        blocks = covariance.reshape(n, size, n, size).diagonal(dim1=0, dim2=2)  # [C, C, N]
        covariance = blocks.movedim(-1, 0).reshape(*mean.shape, size)
    needs_all = link == "bridge" or link == "mc" and likelihood.couples_outputs and mean.shape[-1] > 1
    full = covariance.dim() > mean.dim() or needs_all
    wanted = (*mean.shape, mean.shape[-1]) if full else mean.shape
    if covariance.shape != wanted:
        fix = f"Give covariances, or variances where the link {link!r} needs no more; across inputs pass joint=True."
        checks.shape("The covariance", covariance, wanted, fix)
    variance = covariance.detach()
    variance = variance.diagonal(dim1=-2, dim2=-1) if full else variance
    if variance.numel():
        lowest, highest = map(float, variance.aminmax())
        if lowest < -(torch.finfo(variance.dtype).eps ** 0.5) * max(highest, -lowest):  # beyond rounding
            fix = "Use a larger prior precision, a positive semi-definite curvature (GGN) or float64."
            raise NotPositiveDefiniteError("A functional variance is negative.", got=f"{lowest:.3g}", fix=fix)
    marginal = None if link == "mc" else likelihood.predict(mean, covariance, link=link)
    if marginal is not None:  # variances whose squares overflow
        checks.finite("A predictive mean", marginal.mean)
    return Prediction(
        likelihood=likelihood,
        functional_mean=mean,
        functional_covariance=given,
        link=link,
        joint=joint,
        marginal=marginal,
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
    fix = "Stack the networks' outputs along a new first axis, [S, B, *, C]."
    checks.count("The number of axes of samples of network outputs", outputs.dim(), 3, fix)
    checks.count("The number of samples of network outputs", len(outputs))
    outputs = widen(outputs)
    checks.finite("The network's output", outputs)
    return Prediction(
        likelihood=likelihood.of_new_targets,
        functional_mean=outputs.mean(0),
        functional_covariance=None,
        link="sampled",
        joint=joint,
        n_samples=len(outputs),
        source=RandomSource.of(generator),
        outputs=outputs,
    )


def stacked(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction for the inputs of several, whose randomness is that of the first; none may be joint.

    Raises:
        DataError: Their outputs differ in shape.
    """
    first, shapes = predictions[0], {one.functional_mean.shape[1:] for one in predictions}
    if len(shapes) > 1:
        what, got = "Batches with outputs of different shapes make no one prediction.", ", ".join(map(str, shapes))
        raise DataError(what, expected="one shape", got=got, fix="Call predictive on each batch.")
    if any(one.outputs is not None for one in predictions):
        outputs = torch.cat([one.functional_samples for one in predictions], 1)
        return replace(from_samples(first.likelihood, outputs), source=first.source)
    mean = torch.cat([one.functional_mean for one in predictions])
    covariance = torch.cat([cast(Tensor, one.functional_covariance) for one in predictions])
    found = from_functional(first.likelihood, mean, covariance, link=first.link, n_samples=first.n_samples)
    found = replace(found, source=first.source)
    if any(one.without_each is not None for one in predictions):  # from numbers of samples that may differ
        vars(found)["standard_error"] = torch.cat([one.standard_error for one in predictions])
    return found
