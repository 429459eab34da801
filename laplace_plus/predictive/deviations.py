"""Outputs of the linearised network for sampled parameters, and their moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_plus._memory import budget, slices
from laplace_plus.curvature.linearization import ADModes, Linearization
from laplace_plus.errors import DataError
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.network import Network
from laplace_plus.predictive.linearized import (
    QUICK_BYTES,
    FunctionalPosterior,
    Outputs,
    output_indices,
    require_outputs,
    wants_variances,
)

_LARGE_COVARIANCE = 512 * 2**20
"""Bytes that a covariance of outputs and its factor may take in float64 before outputs are sampled instead."""


def pushed(
    network: Network, deviations: Tensor | Iterable[Tensor], inputs: Any, *, n_outputs: int | None, ad_modes: ADModes
) -> tuple[Tensor, Tensor]:
    """Outputs ``f(θ̂, x)``, ``[B, *, C]``, and ``J(x) v``, ``[k, B, *, C]``, for deviations v, ``[k, P]`` or chunks.

    Each deviation takes one forward-mode derivative, about the cost of a forward pass. With many outputs that is far
    less than their covariance, and takes no ``[C, C]`` matrix (Immer et al., 2021). Raises :class:`DataError` for no
    examples, or another number of outputs than ``n_outputs``.
    """
    linear = Linearization(network, network.vector(), inputs, ad_modes)
    outputs = linear.outputs
    if not outputs.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got="none")
    if n_outputs is not None:
        require_outputs(outputs.shape, n_outputs, inputs)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    parts = []
    for chunk in [deviations] if isinstance(deviations, Tensor) else deviations:
        # Forward mode holds two or three activations of each sample at a time; 64 times the outputs bounds them.
        each = 4 * chunk[0].numel() * chunk.element_size() + 64 * outputs.numel() * outputs.element_size()
        room = max(each, min(QUICK_BYTES, budget(outputs.device) // 2))
        for some in slices(len(chunk), each, room):
            parts.append(linear.push(chunk[some].to(outputs)).to(wide))
    return outputs.to(wide), torch.cat(parts)


def samples_rather(mean_shape: Sequence[int], *, joint: bool = False) -> bool:
    """Whether to sample outputs ``[B, *, C]`` instead of computing their covariance, because it is too large.

    The decision depends on sizes alone, so that the same seed gives the same samples whatever memory is free.
    """
    size = torch.Size(mean_shape).numel()
    return 2 * 8 * size * (size if joint else mean_shape[-1]) > _LARGE_COVARIANCE


def moments(mean: Tensor, deviations: Tensor, *, joint: bool, outputs: Outputs) -> FunctionalPosterior:
    """Mean and covariance ``1/k Σ d dᵀ`` of deviations d ``[k, B, *, C]`` from a known mean ``[B, *, C]``.

    Options and errors as for :func:`~laplace_plus.predictive.linearized.functional_posteriors`.
    """
    variances = wants_variances(outputs, joint)
    if outputs is not None and not isinstance(outputs, str):
        chosen = output_indices(outputs, mean.shape).to(mean.device)
        chosen = chosen.expand(*mean.shape[:-1], chosen.shape[-1])
        mean, deviations = mean.gather(-1, chosen), deviations.gather(-1, chosen.expand(len(deviations), *chosen.shape))
    scaled = deviations / len(deviations) ** 0.5
    if variances and outputs == "independent":
        scaled = scaled - (scaled * centring_weights(mean)).sum(-1, keepdim=True)
        return FunctionalPosterior(mean, independent_variances(mean, scaled.square().sum(0)))
    if variances:
        return FunctionalPosterior(mean, scaled.square().sum(0))
    if joint:
        flat = scaled.flatten(1)
        return FunctionalPosterior(mean, (flat.mT @ flat).view(*mean.shape, *mean.shape))
    return FunctionalPosterior(mean, torch.einsum("s...c,s...d->...cd", scaled, scaled))
