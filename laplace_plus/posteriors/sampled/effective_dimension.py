"""The effective dimension ``γ = tr(H⁻¹ M)`` from posterior samples, and the hyperparameters that it updates.

With samples ``z ~ N(0, H⁻¹)``, ``H = M + A``, three estimators are unbiased or nearly so: ``zᵀ M z`` in function space,
``d − zᵀ A z`` in weight space, and the ratio ``d · zᵀMz / (zᵀMz + zᵀAz)``. With the eigenvalues ``p_i`` of ``H^-½ M
H^-½`` their variances are ``2 Σ p_i²``, ``2 Σ (1 − p_i)²`` and about ``2 Σ (p_i − p̄)²``: the ratio has the smallest of
the three, wherever γ lies between 0 and d, where it always stays. Function- and weight-space estimators are those of
Antorán et al. (2023).

For a group g of parameters the two forms are ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g``. The first can be negative for a
single sample; both are therefore averaged over samples before one is divided by the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laplace_plus.linalg.estimates import jackknife, standard_error
from laplace_plus.persistence import stored
from laplace_plus.tuning.objective import updated_precision

Estimator = Literal["ratio", "function", "weight"]
SampledMethod = Literal["mackay", "em"]

LARGEST_STEP = math.log(10)
"""A logarithm of a precision changes by at most this in one step."""

_TINY = torch.finfo(torch.float64).tiny

_LEAST = 1e-3
"""Effective parameters that a group keeps at least: the logarithm of zero has no limit."""


@dataclass(frozen=True)
class EffectiveDimension:
    """Effective dimensions with their standard errors, 0-d or ``[G]``.

    Attributes:
        value: γ, between 0 and ``size``, the number of parameters.
        sem: Standard error over the samples; infinite for a single sample.
        energy: ``E[zᵀ H z] / d``, which is 1 up to sampling for solved systems, and its standard error.
    """

    value: Tensor
    sem: Tensor
    size: Tensor
    energy: tuple[float, float]


def group_sums(left: Tensor, right: Tensor, index: Tensor, n_groups: int) -> Tensor:
    """``Σ_{p in g} left_p right_p`` for ``[k, P]``, as ``[k, G]`` float64."""
    totals = torch.zeros(len(left), n_groups, dtype=torch.float64, device=left.device)
    parts = [index.to(left.device).split(2**20), left.split(2**20, 1), right.split(2**20, 1)]  # few as float64
    for where, a, b in zip(*parts, strict=True):
        totals.index_add_(1, where, a.double() * b.double())
    return totals


def effective_dimension(
    function_space: Tensor, weight_space: Tensor, size: Tensor, estimator: Estimator = "ratio"
) -> EffectiveDimension:
    """γ of every group ``[G]`` from ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g`` of k samples, ``[k, G]``, and sizes ``[G]``.

    The estimator is ``"ratio"``, ``"function"`` or ``"weight"``; see the module.
    """
    size, k = size.to(function_space), len(function_space)
    if estimator == "ratio":
        value = _ratio(function_space.mean(0), weight_space.mean(0), size)
        sem = torch.full_like(value, torch.inf)
        if k > 1:
            a, b = ((total.sum(0) - total) / (k - 1) for total in (function_space, weight_space))
            sem = jackknife(_ratio(a, b, size))
    else:
        values = function_space if estimator == "function" else size - weight_space
        value, sem = values.mean(0).clamp_min(0.0).minimum(size), standard_error(values)
    energy = (function_space + weight_space).sum(1) / size.sum()
    return EffectiveDimension(value, sem, size, (float(energy.mean()), float(standard_error(energy))))


def total_dimension(
    function_space: Tensor, weight_space: Tensor, size: Tensor, estimator: Estimator = "ratio"
) -> EffectiveDimension:
    """γ of all groups together, 0-d; arguments as for :func:`effective_dimension`."""
    a, b = function_space.sum(1, keepdim=True), weight_space.sum(1, keepdim=True)
    found = effective_dimension(a, b, size.sum().reshape(1), estimator)
    return EffectiveDimension(found.value[0], found.sem[0], found.size[0], found.energy)


def _ratio(function_space: Tensor, weight_space: Tensor, size: Tensor) -> Tensor:
    """``d a / (a + b)`` within [0, d]; a may be negative, b is not."""
    a = function_space.clamp_min(0.0)
    total = a + weight_space
    return torch.where(total > 0, size * a / torch.where(total > 0, total, 1.0), 0.0).minimum(size)


def limited_precision(
    method: SampledMethod, precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor
) -> Tensor:
    """One update of the precisions ``[G]``, with a limited step."""
    effective = effective.clamp_min(_LEAST).minimum(size)
    new = updated_precision(method, precision, effective, size, squares.clamp_min(_TINY / precision))
    return precision * (new / precision).log().clamp(-LARGEST_STEP, LARGEST_STEP).exp()


def mackay_steps(precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """``log(γ_g / (λ_g ‖θ★_g − μ_g‖²))``, ``[G]``: zero where the evidence is stationary."""
    return (effective.clamp_min(_LEAST).minimum(size) / (precision * squares).clamp_min(_TINY)).log()


@stored
@dataclass(frozen=True)
class SamplingReport:
    """How accurate the samples are, and the effective dimensions that they give.

    Attributes:
        residual: ``‖∇L′‖`` of each sample relative to that at zero, in units of the prior's standard deviation, [k].
        iterations: Passes over the data that the solve took.
        converged: Whether no residual exceeds the solver's tolerance.
        function_space, weight_space: ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g`` of every layer, ``[k, L]``.
        size: Number of parameters of every layer, ``[L]``.
    """

    residual: Tensor
    iterations: int
    converged: bool
    function_space: Tensor
    weight_space: Tensor
    size: Tensor

    @property
    def effective_dimension(self) -> EffectiveDimension:
        """γ of all parameters."""
        return total_dimension(self.function_space, self.weight_space, self.size)

    @property
    def by_layer(self) -> EffectiveDimension:
        """γ of every layer."""
        return effective_dimension(self.function_space, self.weight_space, self.size)

    @property
    def energy(self) -> tuple[float, float]:
        """``E[zᵀ H z] / P``, which is 1 up to sampling for solved systems, and its standard error."""
        return self.effective_dimension.energy
