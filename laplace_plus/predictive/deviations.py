"""The Gaussian over outputs that a few samples of the parameters induce in the linearised network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace_plus._memory import budget
from laplace_plus.curvature.linearization import Linearization, Ways
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.network import Network
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, output_indices, require_outputs
from laplace_plus.structured.chunks import slices


def pushed(network: Network, deviations: Tensor, inputs: Any, *, n_outputs: int, ways: Ways) -> tuple[Tensor, Tensor]:
    """Outputs ``f(θ̂, x)``, ``[B, *, C]``, and ``J(x) v`` for deviations v ``[k, P]``, ``[k, B, *, C]``.

    Args:
        network: The network.
        deviations: ``[k, P]``.
        inputs: A batch's inputs, on the network's device.
        n_outputs: C.
        ways: What is known so far about the network's derivatives.

    Raises:
        DataError: No examples, or another number of outputs.
    """
    linear = Linearization(network, network.vector(), inputs, ways)
    outputs = linear.outputs
    if not outputs.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got="none")
    require_outputs(outputs.shape, n_outputs, inputs)
    # Forward mode holds two or three activations of each sample at a time; outputs say how large those may be.
    each = 4 * deviations[0].numel() * deviations.element_size() + 64 * outputs.numel() * outputs.element_size()
    room = max(each, budget(outputs.device) // 2)
    parts = [linear.push(deviations[some].to(outputs)) for some in slices(len(deviations), each, room)]
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.to(wide), torch.cat(parts).to(wide)


def moments(mean: Tensor, deviations: Tensor, *, joint: bool, outputs: Outputs) -> FunctionalPosterior:
    """Mean and covariance ``1/k Σ d dᵀ`` of deviations d from a known mean.

    Args:
        mean: ``[B, *, C]``.
        deviations: ``[k, B, *, C]``.
        joint: As for :func:`~laplace_plus.predictive.linearized.functional_posteriors`.
        outputs: As there.

    Raises:
        ConfigurationError: Outputs that there are not.
    """
    if isinstance(outputs, str) and (outputs != "diagonal" or joint):
        raise ConfigurationError(
            "Unknown choice of outputs.",
            expected='None, "diagonal" (not with joint=True) or indices',
            got=f"{outputs!r} with joint={joint}",
        )
    if outputs is not None and not isinstance(outputs, str):
        chosen = output_indices(outputs, mean.shape).to(mean.device)
        chosen = chosen.expand(*mean.shape[:-1], chosen.shape[-1])
        mean, deviations = mean.gather(-1, chosen), deviations.gather(-1, chosen.expand(len(deviations), *chosen.shape))
    scaled = deviations / len(deviations) ** 0.5
    if isinstance(outputs, str):
        return FunctionalPosterior(mean, scaled.square().sum(0))
    if joint:
        flat = scaled.flatten(1)
        return FunctionalPosterior(mean, (flat.mT @ flat).view(*mean.shape, *mean.shape))
    return FunctionalPosterior(mean, torch.einsum("s...c,s...d->...cd", scaled, scaled))
