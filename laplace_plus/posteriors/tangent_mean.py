"""Linearised predictions around the optimum of the tangent model in place of the network's own outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.network import Network
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, output_indices


def shifted(
    functional: FunctionalPosterior, network: Network, inputs: Any, deviation: Tensor, *, outputs: Outputs
) -> FunctionalPosterior:
    """A functional posterior with ``J(x) (θ* − θ̃)`` added to its mean.

    Args:
        functional: What it is added to.
        network: The network.
        inputs: A batch's inputs, on the network's device.
        deviation: ``θ* − θ̃``, ``[P]``.
        outputs: Which of the outputs ``functional`` holds.
    """
    shift = network.tangent(inputs, deviation)
    if outputs is not None and not isinstance(outputs, str):
        chosen = output_indices(outputs, shift.shape).to(shift.device)
        shift = shift.gather(-1, chosen) if chosen.ndim > 1 else shift[..., chosen]
    return FunctionalPosterior(functional.mean + shift.to(functional.mean), functional.covariance)


def refuse_gradients() -> UnsupportedError:
    """The error for gradients of the mean: third derivatives of torch's fused normalisations are wrong."""
    return UnsupportedError(
        "Predictions around the tangent model's optimum pass no gradients to x.",
        expected='posterior.predictive_mean = "network" with differentiable=True',
        got='"tangent"',
    )
