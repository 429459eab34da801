"""Which entries of the parameter vector share a prior precision, and in which proportions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.network import batches
from laplace_plus.priors import LAYERWISE, STRUCTURES, Groups, PriorStructure
from laplace_plus.structured import EigenBlock
from laplace_plus.structured.low_rank import LowRankBlock
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.normalized_groups import NAME as NORMALISED
from laplace_plus.tuning.normalized_groups import normalized_groups

_SCALING_FLOOR = 1e-6
"""Least scaling of a g-prior, as a part of its group's mean: entries that the data do not touch need some prior."""


def check_structure(structure: Any) -> None:
    """Raise :class:`ConfigurationError` unless a value is the name of a prior structure, or :class:`Groups`."""
    if not isinstance(structure, Groups):
        checks.choice("prior structure, other than lp.Groups", structure, (*STRUCTURES, NORMALISED))


def chosen_groups(posterior: Any, structure: str | Groups, data: Iterable[Any] | None = None) -> Groups:
    """The groups of ``"layerwise"``, ``"normalized_groups"`` or given groups, for a posterior's network.

    One batch of ``data``, by default of the fit's, finds normalised groups; :class:`DataError` if there are none.
    """
    check_structure(structure)
    network = posterior.network
    if isinstance(structure, Groups):
        structure.check_size(network.n_parameters)
        return structure
    if structure == LAYERWISE:
        return Groups(LAYERWISE, network.layers, network.layer_index())
    if posterior.prior_groups.name == NORMALISED:
        return posterior.prior_groups
    why = "Normalised groups are found by running the network on a batch."
    data = posterior.training_data.again(data, why, part=True)
    batch = next(iter(batches.iterate(data, device=network.device, progress=False)))
    return normalized_groups(network, batch.inputs)


def g_prior_scaling(model: LaplaceModel, structure: PriorStructure) -> Tensor:
    """``diag(H)``, by which a g-prior multiplies the precisions, ``[P]`` float64.

    With features scaled by ``s_j = [Σ JᵀΛJ]_jj^-½`` and an isotropic prior on the weights of the scaled features, the
    weights themselves have the prior precisions ``λ s_j⁻² = λ diag(H)_j`` (Zellner, 1986; Antorán et al., 2023).
    """
    diagonal = curvature_diagonal(model, model.weights())
    index = torch.zeros_like(model.layer_index) if structure == "scalar" else model.layer_index
    return with_floor(diagonal, index.to(diagonal.device))


def curvature_diagonal(model: LaplaceModel, weights: Tensor) -> Tensor:
    """``diag(H)`` at component weights ``[K]``, ``[P]`` float64."""
    diagonal = torch.empty(len(model.vector), dtype=torch.float64, device=model.vector.device)
    for layout, block in model.curvature:
        if isinstance(block, EigenBlock):
            basis, values = block.eigen(weights)
            own = basis.diagonal(values.to(next(iter(block.parts())).dtype))
        elif isinstance(block, LowRankBlock):
            own = (weights[0] * block.values @ block.vectors.double().square()).view(block.shape)
        else:
            own = block.dense(weights).diagonal(dim1=-2, dim2=-1).reshape(block.shape)
        model.parameter_slices[layout.key].scatter_(diagonal, own)
    return diagonal


def with_floor(diagonal: Tensor, index: Tensor) -> Tensor:
    """A g-prior's scaling ``[P]`` float64, at least a millionth of its group's mean; ``index [P]`` gives the groups."""
    means = diagonal.new_zeros(int(index.max()) + 1).index_add(0, index, diagonal) / torch.bincount(index)
    return torch.maximum(diagonal, _SCALING_FLOOR * torch.where(means > 0, means, 1.0)[index])
