"""Outputs of the linearised network for sampled parameters, and their moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus._memory import budget, slices
from laplace_plus.errors import DataError
from laplace_plus.likelihoods.base import check_finite, check_outputs
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.network.batches import batch_size
from laplace_plus.network.gradients import forward_parts
from laplace_plus.network.linearization import ADModes, linearize
from laplace_plus.network.network import Network
from laplace_plus.predictive.linearized import (
    QUICK_BYTES,
    FunctionalPosterior,
    Outputs,
    output_indices,
    require_outputs,
    wants_variances,
)

LARGE_COVARIANCE = 512 * 2**20
"""Bytes that a covariance of outputs and its factor may take in float64 before outputs are sampled instead."""

CHEAP_OPERATIONS = 2**32
"""So many for each example, about .1 s on one core, are always spent: on exact covariances, or else on samples."""

LEAST_SAMPLES, MOST_SAMPLES = 5, 100
"""Samples unless a number is given: a variance then has a relative standard error ``(2/S)^½`` of 63 % to 14 %."""


class EstimatedPosterior(FunctionalPosterior):
    """A functional posterior with estimated variances; :attr:`without_each` gives those without each sample."""

    without_each: Callable[[], Tensor]


def pushed(
    network: Network, deviations: Tensor | Iterable[Tensor], inputs: Any, *, n_outputs: int | None, ad_modes: ADModes
) -> tuple[Tensor, Tensor]:
    """Outputs ``f(θ̂, x)``, ``[B, *, C]``, and ``J(x) v``, ``[k, B, *, C]``, for deviations v, ``[k, P]`` or chunks.

    Each deviation takes one forward-mode derivative, about the cost of a forward pass. With many outputs that is far
    less than their covariance, and takes no ``[C, C]`` matrix (Immer et al., 2021). Raises :class:`DataError` for no
    examples, or another number of outputs than ``n_outputs``.
    """
    linear = linearize(network, network.vector(), inputs, ad_modes)
    known = any(map(ad_modes.right.get, ("mapped forward", "forward")))  # which then need no graph to be compared with
    outputs = network.forward(inputs).to(network.dtype) if known else linear.outputs
    if not outputs.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got="none")
    if n_outputs is not None:
        require_outputs(outputs.shape, n_outputs, inputs)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    parts = []
    for chunk in [deviations] if isinstance(deviations, Tensor) else deviations:
        # Forward mode holds two or three activations of each sample at a time; 64 times the outputs are typical.
        each = 4 * chunk[0].numel() * chunk.element_size() + 64 * outputs.numel() * outputs.element_size()
        needed = each + batch_size(linear.inputs) * network.bytes_forward
        room = max(each, min(4 * QUICK_BYTES, budget(outputs.device) // 2 * each // needed))
        for some in slices(len(chunk), each, room):
            parts.append(linear.push(chunk[some].to(outputs)).to(wide))
    return outputs.to(wide), torch.cat(parts)


def samples_rather(
    network: Network, x: Any, n: int | None, *, variances: bool = False, joint: bool = False, draw: int = 0
) -> int:
    """How many samples of the outputs for x to take instead of computing their covariance; 0 for the covariance.

    It is sampled where it is larger than :data:`LARGE_COVARIANCE`, or takes more operations than the samples and than
    :data:`CHEAP_OPERATIONS`, on which the number depends unless n is given. For each output of an example there is a
    backward pass, for each sample a ``draw`` of so many operations (0: not counted) and a forward derivative; both take
    about three forward passes, whose operations torch counts. The last layer alone needs no backward passes.

    Sizes alone decide, so that the same seed gives the same samples whatever memory is free.
    """
    draw = 0 if len(network.layers) == 1 else draw
    if variances and not draw:
        return 0
    forward_parts(network, x)
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  -- it imports Triton

    with FlopCounterMode(display=False) as counter:
        shape = network.forward(x).shape
    passes, cheap = 3 * counter.get_total_flops(), shape[0] * CHEAP_OPERATIONS
    count = n or max(LEAST_SAMPLES, min(MOST_SAMPLES, cheap // max(1, passes + draw)))
    is_large = not variances and 16 * shape.numel() * (shape.numel() if joint else shape[-1]) > LARGE_COVARIANCE
    is_slow = draw > 0 and passes * shape[1:].numel() > max(cheap, count * (passes + draw))
    return count if is_large or is_slow else 0


def moments(mean: Tensor, deviations: Tensor, *, joint: bool, outputs: Outputs) -> FunctionalPosterior:
    """Mean and covariance ``1/k Σ d dᵀ`` of deviations d ``[k, B, *, C]`` from a known mean ``[B, *, C]``.

    Options and errors as for :func:`~laplace_plus.predictive.linearized.functional_posteriors`.
    """
    check_outputs(mean)
    check_finite(deviations, "Samples of the functional posterior")
    variances = wants_variances(outputs, joint)
    if outputs is not None and not isinstance(outputs, str):
        chosen = output_indices(outputs, mean.shape).to(mean.device)
        chosen = chosen.expand(*mean.shape[:-1], chosen.shape[-1])
        mean, deviations = mean.gather(-1, chosen), deviations.gather(-1, chosen.expand(len(deviations), *chosen.shape))
    scaled = deviations / len(deviations) ** 0.5
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
