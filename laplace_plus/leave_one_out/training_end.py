"""The prior precision that the training of a classifier acted with, read from where it ended.

Without weight decay, training that ends early acts as a prior. Under gradient flow on a network of homogeneous layers
``‖θ‖²`` grows with the time t at a rate of the order of the loss S summed over the data. So ``1/t``, the ridge that
ending at t amounts to, is of the order ``S/‖θ‖²``: an interpolating network has trained for long, and gives way to
each datum. On the development cells of benchmarks/defaults, 16 times that displaces outputs as far as new data ask for,
within a factor of 4 (one standard deviation) over four decades; the evidence's precision is off by up to thirty. A gain
that does not come is worse than one that is missed, so three times as much is taken.

Weights that are far from where their gradient g would lead have trained less still. The Newton decrement
``gᵀ (H + δ)⁻¹ g`` is γ, the effective number of parameters, for weights drawn from the posterior, and 0 at its mode.
Where it exceeds γ, their ratio is a factor on the precision. Weights that are stationary, ``g = −δ̂ θ``, tell the
precision itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.batches import iterate, thinned
from laplace_plus.curvature import FullStructure, KroneckerStructure, Native, Structure
from laplace_plus.curvature.linearization import ADModes, Linearization
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.leave_one_out.leverages import Covariances, factor_covariances
from laplace_plus.network import Network

LOSS_RATIO = 45.0
"""Precision of training in units of ``S/‖θ‖²``; chosen together with the default tuning's ``SHARE``."""

FEW, OPERATIONS = 2000, 2e10
"""Weights up to which displacements are exact Newton steps, and operations for their matrix. Data that determine their
weights have leverages near one: first order saw .19 nats left out where new data cost 1.54. Of networks with nine times
more weights than data, exact steps overshot."""

LEAST_LOSS = 1e-6
"""Nats for each example below which a loss is rounding."""

STATIONARY = 0.1
"""Residual ``‖g + δ̂ θ‖/‖g‖`` up to which weights count as stationary under a weight decay δ̂."""


@dataclass(frozen=True)
class TrainingEnd:
    """Where training ended, over all trainable weights.

    Attributes:
        precision: The prior precision that training acted with.
        stationary: Whether it was read from weights that are stationary.
        decrement: ``gᵀ (H + δ)⁻¹ g / γ``.
        covariances: V of all weights at that precision.
        exact: Whether under their exact matrix, whose leverages count, in place of Kronecker blocks.
    """

    precision: float
    stationary: bool
    decrement: float
    covariances: Covariances
    exact: bool


def training_end(
    model: LaplaceModel, network: Network, data: Iterable[Any], n_data: int, share: float, temperature: Tensor
) -> TrainingEnd:
    """Look at a share of each batch, scaled to all N data; one pass with derivatives."""
    whole, likelihood, backend = network.selecting("all"), model.likelihood, Native()
    vector, modes, curvature = whole.vector(), ADModes(), None
    gradient, n_examples = torch.zeros_like(vector), 0
    operations = share * n_data * model.n_outputs * len(vector) ** 2
    exact = len(vector) <= FEW and operations <= OPERATIONS
    structure: Structure = FullStructure() if exact else KroneckerStructure()
    for entire in iterate(data, device=network.device):
        batch = thinned(entire, share)
        curvature, outputs = backend.accumulate(curvature, whole, likelihood, batch, structure)
        flat, targets, weight = likelihood.rows(outputs.double(), batch.target)
        n_examples += len(outputs)
        slope = (likelihood.gradient(flat, targets) * weight[:, None]).view_as(outputs)
        gradient += Linearization(whole, vector, batch.inputs, modes).pull.one(slope.to(outputs))
    assert curvature is not None
    mean = model.prior_mean if model.prior_mean.ndim == 0 else 0.0  # a tensor's is known for the selected weights alone
    away, scale = vector - mean, temperature.to(vector) * n_examples / n_data
    gradient, square = gradient / scale, away.square().sum().clamp_min(torch.finfo(vector.dtype).tiny)
    loss = (-model.log_likelihood().to(vector)).clamp_min(LEAST_LOSS * n_data) / temperature.to(vector)
    blocks = replace(
        model,
        curvature=curvature,
        backend=backend,
        vector=vector,
        layer_index=whole.layer_index(),
        prior_mean=torch.zeros_like(square),
    )
    decay = -(gradient @ away) / square
    residual = (gradient + decay * away).norm() / gradient.norm()  # NaN for no gradient at all
    stationary = n_examples == n_data and bool((residual <= STATIONARY) & (decay > 0))
    precision = LOSS_RATIO * loss / square
    factors = blocks.factors(precision, scale)
    spent = (len(vector) - precision * blocks.variances(factors).sum()).clamp_min(1.0)
    decrement = gradient @ blocks.solve(factors, gradient) / spent
    precision = decay if stationary else precision * decrement.clamp_min(1.0)
    factors = blocks.factors(precision, scale)
    covariances = factor_covariances(whole, [factors], "position", model.n_outputs)
    return TrainingEnd(float(precision), stationary, float(decrement), covariances, exact)
