"""The prior precision that the training of a classifier acted with, read from where it ended.

Under weight decay training ends near ``g = −δ θ``, g the gradient of the summed loss. Its noise hides that from the
norm ``‖g + δ θ‖``, not from sums over many weights: for each tensor k, ``−⟨gₖ, θₖ⟩ = δ ‖θₖ‖²``. Where the two sides are
parallel over tensors and over rows, ``δ̂ = −⟨g, θ⟩/‖θ‖²`` is the weight decay within a few percent. On tables trained
by Adam their cosine was at least .988 over tensors with weight decay, and at most .89 without. Displacements at
4 δ̂ are those that new data ask for, or less.

Without weight decay, training that ends early acts as a prior. Under gradient flow on a network of homogeneous layers
``‖θ‖²`` grows with the time t at a rate of the order of the loss S summed over the data. So ``1/t``, the ridge that
ending at t amounts to, is of the order ``S/‖θ‖²``: an interpolating network has trained for long, and gives way to
each datum. On the development cells of benchmarks/defaults, 16 times that displaces outputs as far as new data ask for,
within a factor of 4 (one standard deviation) over four decades; the evidence's precision is off by up to thirty. A gain
that does not come is worse than one that is missed, so more is taken, and of exact steps never less than 4 δ̂.

Weights that are far from where their gradient g would lead have trained less still. The Newton decrement
``gᵀ (H + δ)⁻¹ g`` is γ, the effective number of parameters, for weights drawn from the posterior, and 0 at its mode.
Where it exceeds γ, their ratio is a factor on the precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature import FullStructure, KroneckerStructure, Native, Structure
from laplace_plus.errors import UnsupportedError
from laplace_plus.network.batches import iterate
from laplace_plus.network.linearization import linearize
from laplace_plus.network.network import Network
from laplace_plus.network.selection import trained
from laplace_plus.tuning.deletions import Covariances, factor_covariances, thinned
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.normalized_groups import REST, normalized_groups

LOSS_RATIO, BLOCKS_RATIO = 35.0, 45.0
"""The least precision of training in units of ``S/‖θ‖²``, chosen together with the default tuning's ``SHARE``; and the
most under Kronecker blocks: first-order steps fall short where no loss is left, and 4 δ̂ is then 60 to 90 units."""

DECAY_RATIO = 4.0
"""Precision for displacements in units of the weight decay, which overshoot what retraining gives: new data asked for
2 to 4 where weight decay was found, for more elsewhere."""

FEW, MANY, DETERMINED, OPERATIONS = 2000, 5000, 4.0, 2e10
"""Weights up to which displacements are exact Newton steps: always; where there are up to four for each output of each
example; and operations for their matrix. Data that determine their weights have leverages near one: first order saw .2
nats left out where new data cost 1.4, exact steps 1 to 4. Of five and more weights for each output they overshot."""

LEAST_LOSS = 1e-6
"""Nats for each example below which a loss is rounding."""

STATIONARY, STATIONARY_ROWS = 0.98, 0.5
"""Cosines over tensors, and over their rows, from which weights count as stationary under a weight decay. A tensor that
holds most of the norm decides the first alone."""


@dataclass(frozen=True)
class TrainingEnd:
    """Where training ended, over all trainable weights.

    Attributes:
        precision: The prior precision for displacements: that which training acted with, or some times as much.
        stationary: Whether a weight decay is known, or was found in weights that are stationary under it.
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
    model: LaplaceModel,
    network: Network,
    data: Iterable[Any],
    n_data: int,
    share: float,
    temperature: Tensor,
    decay: Tensor | None = None,
    rank: int | None = None,
) -> TrainingEnd:
    """Look at a share of each batch, scaled to all N data, in one pass; ``decay`` is a known δ, ``rank`` a factor's.

    UnsupportedError: torch has no derivatives in all weights, or not the memory.
    """
    whole, likelihood, backend = network.selecting(trained), model.likelihood, Native()
    vector, curvature = whole.vector(), None
    gradient, n_examples = torch.zeros_like(vector), 0
    n_numbers = share * n_data * model.n_outputs
    exact = len(vector) <= max(FEW, min(MANY, DETERMINED * n_numbers)) and n_numbers * len(vector) ** 2 <= OPERATIONS
    for batch in thinned(iterate(data, device=network.device), share):
        if curvature is None:
            exact = exact and not _is_normalised(whole, batch.inputs)
        structure: Structure = FullStructure() if exact else KroneckerStructure(factor_rank=rank)
        try:
            curvature, outputs = backend.accumulate(curvature, whole, likelihood, batch, structure)
            flat, targets, weight = likelihood.rows(outputs.double(), batch.target)
            n_examples += len(outputs)
            slope = (likelihood.gradient(flat, targets) * weight[:, None]).view_as(outputs)
            gradient += linearize(whole, vector, batch.inputs).pull.one(slope.to(outputs))
        except RuntimeError as failure:  # torch has one type for a missing derivative and whatever else goes wrong
            raise UnsupportedError(str(failure)) from failure
    assert curvature is not None
    mean = model.prior_mean if model.prior_mean.ndim == 0 else 0.0  # a tensor's is known for the selected weights alone
    away, scale = vector - mean, temperature.to(vector) * n_examples / n_data
    gradient, square = gradient / scale, away.square().sum().clamp_min(torch.finfo(vector.dtype).tiny)
    loss = (-model.log_likelihood().to(vector)).clamp_min(LEAST_LOSS * n_data) / temperature.to(vector)
    whole_model = replace(
        model,
        curvature=curvature,
        backend=backend,
        vector=vector,
        layer_index=torch.zeros((), dtype=torch.long).expand(len(vector)),
        prior_mean=torch.zeros_like(square),
    )
    stationary = decay is not None or _is_stationary(whole, gradient, away)
    decay = -(gradient @ away) / square if decay is None else decay.to(vector)
    precision = DECAY_RATIO * decay
    if not stationary:
        unit = loss / square
        precision = precision.clamp(LOSS_RATIO * unit, (math.inf if exact else BLOCKS_RATIO) * unit)
    factors = whole_model.factors(precision, scale)
    spent = (len(vector) - precision * whole_model.variances(factors).sum()).clamp_min(1.0)
    decrement = gradient @ whole_model.solve(factors, gradient) / spent
    if not stationary:
        precision = precision * decrement.clamp_min(1.0)
        factors = whole_model.factors(precision, scale)
    covariances = factor_covariances(whole, [factors], "position", model.n_outputs)
    return TrainingEnd(float(precision), stationary, float(decrement), covariances, exact)


def _is_normalised(network: Network, inputs: Any) -> bool:
    """Whether a normalisation takes the scale of weights away: ``‖θ‖`` then says little, and exact steps overshot."""
    return len({*normalized_groups(network, inputs).names} - {REST}) > 1


def _is_stationary(network: Network, gradient: Tensor, away: Tensor) -> bool:
    """Whether ``−⟨gₖ, θₖ⟩`` is parallel to ``‖θₖ‖²``, over tensors k and over their rows."""
    sizes, products = [item.size for item in network.selected], []
    for part in (gradient, -away):
        parts = zip(network.selected, part.split(sizes), away.split(sizes), strict=True)
        products.append([-(own * a).view(item.shape[0] if item.shape else 1, -1).sum(1) for item, own, a in parts])
    tensors = [torch.stack([rows.sum() for rows in own]) for own in products]
    pairs = tensors, [torch.cat(own) for own in products]
    cosines = [torch.cosine_similarity(along, square, dim=0) for along, square in pairs]
    return bool(cosines[0] >= STATIONARY and cosines[1] >= (STATIONARY if len(sizes) < 3 else STATIONARY_ROWS))


def trained_size(network: Network) -> int:
    """The number of the model's trainable weights, selected or not."""
    return sum(parameter.numel() for parameter in network.model.parameters() if parameter.requires_grad)
