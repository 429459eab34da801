"""Predictions from sampled parameters, a few parameter vectors at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_plus._memory import budget
from laplace_plus.errors import ConfigurationError
from laplace_plus.predictive.linearized import FunctionalPosterior, functional_samples, require_outputs, samples_rather

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior

N_TANGENTS = 100
"""Number of samples that a functional posterior by Monte Carlo is made of."""


def functional_posterior(
    posterior: Posterior, x: Any, *, joint: bool, generator: torch.Generator | None
) -> FunctionalPosterior:
    """Mean and covariance of the linearised outputs, from samples that are pushed through the network's tangent."""
    network = posterior.network
    x = network.receive(x)
    mean = network.forward(x)
    check_outputs(posterior, mean, x)
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    deviations = posterior.sample(N_TANGENTS, generator=generator) - posterior.mean
    tangents = torch.stack([network.tangent(x, deviation) for deviation in deviations]).to(mean.dtype)
    if joint:
        flat = tangents.flatten(1)
        return FunctionalPosterior(mean, (flat.T @ flat / N_TANGENTS).view(*mean.shape, *mean.shape))
    return FunctionalPosterior(mean, torch.einsum("s...c,s...d->...cd", tangents, tangents) / N_TANGENTS)


def linearised_outputs(
    posterior: Posterior, x: Any, n: int, *, joint: bool, generator: torch.Generator | None
) -> Tensor | None:
    """Samples ``[S, B, *, C]`` of the linearised outputs, where their covariance would be too large; else None."""
    x = posterior.network.receive(x)
    if not samples_rather(posterior.network.forward(x).shape, joint=joint):
        return None
    with torch.no_grad():
        chunks = (posterior.sample(count, generator=generator) - posterior.mean for count in _counts(posterior, n))
        return functional_samples(posterior.network, chunks, x)[1]


def network_outputs(posterior: Posterior, x: Any, n: int, *, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Outputs ``[B, *, C]`` of the network with each of n sampled parameter vectors in place of its own."""
    x = posterior.network.receive(x)
    for count in _counts(posterior, n):
        for vector in posterior.sample(count, generator=generator):
            yield posterior.network(x, posterior.network.substitute(vector))


def check_sampled(posterior: Posterior, link: str | None, *, differentiable: bool) -> None:
    """Refuse what predictions by sampled networks do not know.

    Raises:
        ConfigurationError: The tangent model's optimum as the mean, a link, or gradients.
    """
    if posterior._tangent_mean is not None:
        raise ConfigurationError(
            "Sampled networks have the network's weights as their mean, not the tangent model's optimum.",
            expected='method="linearized", or posterior.predictive_mean = "network"',
            got='method="sampled"',
        )
    if link not in (None, "mc") or differentiable:
        raise ConfigurationError(
            "Sampled networks need no link and pass no gradients to x.",
            expected='link=None and differentiable=False with method="sampled"',
            got=f"link={link!r}, differentiable={differentiable}",
        )


def check_outputs(posterior: Posterior, outputs: Tensor, x: Any) -> None:
    """Refuse outputs ``[..., C]`` of another number than while fitting; a method may leave that number unset.

    Raises:
        DataError: Another C.
    """
    if posterior.n_outputs:
        require_outputs(outputs.shape, posterior.n_outputs, x)


def _counts(posterior: Posterior, n: int) -> list[int]:
    """How many of n parameter vectors are drawn at a time: all of them may be many times the network's size."""
    network = posterior.network
    each = network.n_parameters * network.dtype.itemsize
    step = max(1, min(n, min(2**28, budget(network.device) // 4) // max(1, each)))
    return [min(step, n - start) for start in range(0, n, step)]
