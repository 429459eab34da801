"""Which groups of parameters a prior's precisions belong to, and which evidence tunes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.curvature.normalized_groups import NAME as NORMALISED
from laplace_plus.curvature.normalized_groups import normalized_groups
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.evidence import LaplaceModel, TangentResult, TuningResult, tune, tune_tangent
from laplace_plus.evidence.fitted_data import survey
from laplace_plus.evidence.validation import validate
from laplace_plus.posteriors.tuning_options import check_options
from laplace_plus.priors import LAYERWISE, STRUCTURES, Groups
from laplace_plus.structured.blocks import Block, EigenBlock
from laplace_plus.structured.low_rank import LowRankBlock

if TYPE_CHECKING:
    from laplace_plus.posteriors.gaussian import GaussianPosterior

Evidence = Literal["laplace", "tangent"]
PredictiveMean = Literal["network", "tangent"]

_SCALING_FLOOR = 1e-6
"""The least scaling of a g-prior, as a part of its group's mean."""


@dataclass(frozen=True)
class Tuned:
    """What came of a tuning.

    Attributes:
        result: What the tuning found.
        groups: The groups that its precisions belong to; None for the layers.
        tangent_mean: The tangent model's optimum where predictions are to have it as their mean, else None.
    """

    result: TuningResult
    groups: Groups | None
    tangent_mean: Tensor | None


def tune_prior(
    posterior: GaussianPosterior,
    method: str,
    structure: str | Groups,
    *,
    evidence: str,
    scaling: str | None,
    predictive_mean: str,
    data: Iterable[Any] | None,
    tune_noise: bool | None,
    progress: bool,
    **options: Any,
) -> Tuned:
    """Tune a posterior's prior; arguments and errors as for :meth:`GaussianPosterior.fit_prior_precision`."""
    if evidence not in ("laplace", "tangent"):
        raise ConfigurationError("Unknown evidence.", expected='"laplace" or "tangent"', got=repr(evidence))
    if predictive_mean not in ("network", "tangent") or (predictive_mean, evidence) == ("tangent", "laplace"):
        raise ConfigurationError(
            "Unknown mean of predictions.",
            expected='"network", or "tangent" with evidence="tangent"',
            got=f'{predictive_mean!r} with evidence="{evidence}"',
        )
    if scaling not in (None, "g_prior"):
        raise ConfigurationError("Unknown scaling of the prior.", expected='None or "g_prior"', got=repr(scaling))
    groups = posterior._prior_groups
    model = posterior.laplace_model()
    if structure not in ("scalar", "diagonal"):
        groups = chosen_groups(posterior, structure, data, progress=progress)
        index = posterior.network.layer_index() if groups is None else groups.index
        model, structure = replace(model, layer_index=index), LAYERWISE
    assert isinstance(structure, str)
    common: dict[str, Any] = {
        "method": method,
        "structure": structure,
        "scaling": None if scaling is None else g_prior_scaling(model, structure),
        "temperature": posterior.temperature,
        "tune_noise": tune_noise,
        "progress": progress,
        **options,
    }
    if evidence == "laplace":
        initial = posterior.prior_precision
        if method == "validation":
            check_options(options, validate, supplied=(*common.keys() - options.keys(), "initial"))
        return Tuned(tune(model, initial=initial, network=posterior.network, data=data, **common), groups, None)
    if posterior.group is not None and posterior.group.size > 1:
        raise UnsupportedError(
            "The tangent model's optimum is sought by one process.",
            expected="a posterior that was fitted by one process",
            got=f"one over {posterior.group.size} ranks",
            fix="Save it, load it in one process, and pass data= with all the data.",
        )
    why = "The tangent model's optimum passes over the training data."
    check_options(options, tune_tangent, supplied=(*common.keys() - options.keys(), "n_data"))
    again = posterior.training_data.again(data, why)
    survey(model, posterior.network, again, posterior.n_data, progress=progress)
    found = tune_tangent(model, posterior.network, again, n_data=posterior.n_data, **common)
    return Tuned(found, groups, found.vector if predictive_mean == "tangent" else None)


def chosen_mean(value: str, tuning: Any) -> Tensor | None:
    """The tangent model's optimum of the last tuning, or None for the network's own outputs as the predictive mean.

    Raises:
        ConfigurationError: Another value, or no tuning by the tangent model's evidence.
    """
    if value not in ("network", "tangent"):
        raise ConfigurationError("Unknown mean of predictions.", expected='"network" or "tangent"', got=repr(value))
    if value == "network":
        return None
    if not isinstance(tuning, TangentResult):
        raise ConfigurationError(
            "The tangent model's optimum is not known.",
            expected='fit_prior_precision(evidence="tangent") first',
            got="no such tuning since the fit",
        )
    return tuning.vector


def chosen_groups(
    posterior: GaussianPosterior, structure: str | Groups, data: Iterable[Any] | None, *, progress: bool = False
) -> Groups | None:
    """The groups that a structure asks for; None for the layers.

    Raises:
        ConfigurationError: An unknown structure, or groups of other parameters.
        DataError: No data to find normalised groups with.
    """
    if isinstance(structure, Groups):
        structure.check_size(posterior.n_parameters)
        return structure
    if structure == LAYERWISE:
        return None
    if structure != NORMALISED:
        known = ", ".join((*STRUCTURES, NORMALISED))
        raise ConfigurationError("Unknown prior structure.", expected=f"{known}, or lp.Groups", got=repr(structure))
    if posterior._prior_groups is not None and posterior._prior_groups.name == NORMALISED:
        return posterior._prior_groups
    data = posterior.training_data.again(
        data, "Normalised groups are found by running the network on a batch.", part=True
    )
    batch = next(iter(batches.iterate(data, device=posterior.network.device, progress=False)))
    return normalized_groups(posterior.network, batch.inputs)


def g_prior_scaling(model: LaplaceModel, structure: str) -> Tensor:
    """``diag(H)``, by which a g-prior multiplies the precisions, ``[P]`` float64.

    With features scaled by ``s_j = [Σ JᵀΛJ]_jj^-½`` and an isotropic prior on the weights of the scaled features, the
    weights themselves have the prior precisions ``λ s_j⁻² = λ diag(H)_j`` (Zellner, 1986; Antorán et al., 2023).
    Entries that the data do not touch get the floor, a millionth of their group's mean.
    """
    weights = model.weights()
    diagonal = torch.empty(len(model.vector), dtype=torch.float64, device=model.vector.device)
    for layout, block in model.curvature:
        model.parameter_slices[layout.key].scatter_(diagonal, _diagonal(block, weights))
    index = torch.zeros_like(model.layer_index) if structure == "scalar" else model.layer_index
    index = index.to(diagonal.device)
    return floored(diagonal, index)


def floored(diagonal: Tensor, index: Tensor) -> Tensor:
    """A g-prior's scaling with a floor below it, as entries that the data do not touch would have no prior, ``[P]``.

    Args:
        diagonal: Of the curvature, or an estimate, ``[P]`` float64.
        index: The group of each entry, ``[P]``; the floor is a part of the group's mean.
    """
    means = diagonal.new_zeros(int(index.max()) + 1).index_add(0, index, diagonal) / torch.bincount(index)
    floor = _SCALING_FLOOR * torch.where(means > 0, means, 1.0)
    return torch.maximum(diagonal, floor[index])


def _diagonal(block: Block, weights: Tensor) -> Tensor:
    """The diagonal of ``H(w)``, ``[G, o, i]``."""
    if isinstance(block, EigenBlock):
        basis, values = block.eigen(weights)
        return basis.diagonal(values.to(next(iter(block.parts())).dtype))
    if isinstance(block, LowRankBlock):
        return (weights[0] * block.values @ block.vectors.double().square()).view(block.shape)
    return block.dense(weights).diagonal(dim1=-2, dim2=-1).reshape(block.shape)
