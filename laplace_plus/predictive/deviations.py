"""Outputs of the linearised network for sampled parameters, and their moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus.likelihoods.base import check_finite, check_outputs
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.network.linearization import linearize
from laplace_plus.network.network import Network
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, pick, require_outputs, wants_variances
from laplace_plus.structured.gradients import MIB, slices

MOST_EXACT = 512
"""Outputs of an example whose covariances are exact unless only the last layer is selected: each of them takes a
backward pass through the network."""

LARGE_COVARIANCE = 512 * MIB
"""Bytes that a covariance of outputs and its factor may take in float64 before outputs are sampled instead."""

LEAST_SAMPLES, MOST_SAMPLES = 5, 100
"""Samples unless a number is given: a variance then has a relative standard error ``(2/S)^½`` of 63 % to 14 %."""

_TOGETHER = 512 * MIB
"""Bytes of the samples and activations of those that are pushed together."""


class EstimatedPosterior(FunctionalPosterior):
    """A functional posterior with estimated variances; :attr:`without_each` gives those without each sample."""

    without_each: Callable[[], Tensor]


def is_sampled(network: Network, x: Any, *, variances: bool = False, joint: bool = False) -> bool:
    """Whether outputs for x are sampled rather than their covariance (or ``variances``) being computed.

    That is where an example has more than :data:`MOST_EXACT` outputs and more than the last layer is selected, or where
    the covariance is larger than :data:`LARGE_COVARIANCE`.
    """
    shape = network.forward(x).shape
    if len(network.layers) > 1 and shape[1:].numel() > MOST_EXACT:
        return True
    return not variances and 16 * shape.numel() * (shape.numel() if joint else shape[-1]) > LARGE_COVARIANCE


def n_samples_for(n_parameters: int) -> int:
    """How many samples estimate variances: as many as hold 2²⁶ numbers, from 5 to 100. Large networks take longer."""
    return max(LEAST_SAMPLES, min(MOST_SAMPLES, 2**26 // n_parameters))


def pushed(
    network: Network, deviations: Tensor | Iterable[Tensor], inputs: Any, *, n_outputs: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs ``f(θ̂, x)``, ``[B, *, C]``, and ``J(x) v``, ``[k, B, *, C]``, for deviations v, ``[k, P]`` or chunks.

    Each deviation takes one forward-mode derivative, about the cost of a forward pass. With many outputs that is far
    less than their covariance, and takes no ``[C, C]`` matrix (Immer et al., 2021). Raises :class:`DataError` for no
    examples, or another number of outputs than ``n_outputs``.
    """
    linear, outputs = linearize(network, network.vector(), inputs), network.forward(inputs).to(network.dtype)
    require_outputs(outputs.shape, n_outputs, inputs)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    parts = []
    for chunk in [deviations] if isinstance(deviations, Tensor) else deviations:
        # Forward mode holds two or three activations of each sample at a time; 64 times the outputs are typical.
        each = 4 * chunk[0].numel() * chunk.element_size() + 64 * outputs.numel() * outputs.element_size()
        for some in slices(len(chunk), each, _TOGETHER):
            parts.append(linear.push(chunk[some].to(outputs)).to(wide))
    return outputs.to(wide), torch.cat(parts)


def moments(mean: Tensor, deviations: Tensor, *, joint: bool, outputs: Outputs) -> FunctionalPosterior:
    """Mean and covariance ``1/k Σ d dᵀ`` of deviations d ``[k, B, *, C]`` from a known mean ``[B, *, C]``.

    Options and errors as for :func:`~laplace_plus.predictive.linearized.functional_posteriors`.
    """
    check_outputs(mean)
    check_finite(deviations, "Samples of the functional posterior")
    variances = wants_variances(outputs, joint)
    deviations = deviations if outputs is None or variances else torch.stack([pick(one, outputs) for one in deviations])
    mean, scaled = pick(mean, outputs), deviations / len(deviations) ** 0.5
    if variances:
        if outputs == "independent":
            scaled = scaled - (scaled * centring_weights(mean)).sum(-1, keepdim=True)
        squares, n = scaled.square(), len(scaled)

        def estimate(sums: Tensor) -> Tensor:
            return independent_variances(mean.expand_as(sums), sums) if outputs == "independent" else sums

        found = EstimatedPosterior(mean, estimate(squares.sum(0)))
        found.without_each = lambda: estimate((squares.sum(0) - squares) * (n / max(1, n - 1)))
        return found
    if joint:
        flat = scaled.flatten(1)
        return FunctionalPosterior(mean, (flat.mT @ flat).view(*mean.shape, *mean.shape))
    return FunctionalPosterior(mean, torch.einsum("s...c,s...d->...cd", scaled, scaled))
