"""How well samples of a posterior were solved for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConvergenceWarning
from laplace_plus.network import Network
from laplace_plus.posteriors.sampled.effective_dimension import EffectiveDimension, effective_dimension, total_dimension


@dataclass(frozen=True)
class SamplingReport:
    """How well the samples were solved for, and what they say of the effective dimension.

    Attributes:
        residual: ``‖∇L′‖`` of each sample, relative to that at zero, in units of the prior's standard deviation, [k].
        energy: ``E[zᵀ H z] / P``, which is 1 but for sampling where the solves have converged, and its standard error.
        effective_dimension: γ of all parameters.
        by_layer: γ of every layer.
        iterations: Passes over the data that the solve took.
        converged: Whether no residual exceeds the solver's tolerance.
    """

    residual: Tensor
    energy: tuple[float, float]
    effective_dimension: EffectiveDimension
    by_layer: EffectiveDimension
    iterations: int
    converged: bool


def reported(
    parts: Sequence[Tensor], network: Network, residual: Tensor, iterations: int, converged: bool
) -> SamplingReport:
    """A report.

    Args:
        parts: ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g`` of every layer, ``[k, L]``.
        network: The network.
        residual: ``[k]``.
        iterations: Passes over the data.
        converged: Whether the tolerance was met.
    """
    sizes = torch.bincount(network.layer_index(), minlength=len(network.layers))
    function_space, weight_space = parts
    by_layer = effective_dimension(function_space, weight_space, sizes)
    total = total_dimension(function_space, weight_space, sizes)
    return SamplingReport(residual, total.energy, total, by_layer, iterations, converged)


def warn_unless_converged(report: SamplingReport, tolerance: float) -> None:
    """Warn of samples that missed a solver's tolerance."""
    if report.converged:
        return
    warnings.warn(
        f"The samples' residuals are up to {float(report.residual.max()):.2g} after {report.iterations} passes over "
        f"the data (tolerance {tolerance:.2g}). Allow for more of them, use a preconditioner, or raise the tolerance.",
        ConvergenceWarning,
        stacklevel=6,
    )
