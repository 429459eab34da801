"""Linear regression on features, in closed form: with known noise, and with a Gamma distribution of its precision.

With features Φ, residuals r of the trained weights w, β = 1/(σ²T) and prior ``N(μ, I/α)``,

    m = w + P⁻¹ (β Φᵀr − α (w − μ)),   P = β ΦᵀΦ + α I,   S = P⁻¹,
    log p(y) = −N/2T log 2πσ² − ½ (β ‖r − Φ(m − w)‖² + α ‖m − μ‖²) − ½ log det(P/α).

At another m, such as w, that is a bound on it, and Laplace's approximation. Where σ⁻² has the prior
``Gamma(a₀, a₀ σ₀²)`` and the weights ``N(μ, σ²/α)``, β = 1/T, and σ⁻² has the posterior ``Gamma(a, b)``:
``a = a₀ + N/2T``, and b is half of what is in brackets above more than ``a₀ σ₀²``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods.gaussian import LOG_2PI
from laplace_plus.persistence import stored
from laplace_plus.posteriors.variational_last_layer.gaussians import Gaussians


class Solution(NamedTuple):
    """The posterior of weights, the evidence, and the Gamma posterior's shape and rate ``[C]`` where there is one."""

    q: Gaussians
    evidence: Tensor
    shape: float = 0.0
    rate: Tensor | None = None


@stored
@dataclass(frozen=True)
class Regression:
    """``ΦᵀΦ [D, D]``, ``Φᵀr [D, C]``, ``Σ r² [C]``, the number of rows, and w, ``[C, D]``; float64."""

    gram: Tensor
    cross: Tensor
    squares: Tensor
    size: Tensor
    weights: Tensor

    @classmethod
    def of(cls, features: Tensor, targets: Tensor, weights: Tensor) -> Regression:
        """Of some rows."""
        residuals = targets - features @ weights.mT
        sums = features.mT @ features, features.mT @ residuals, residuals.square().sum(0)
        return cls(*sums, torch.tensor(len(features)).to(weights), weights)

    def plus(self, other: Regression) -> Regression:
        """With other rows."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("gram", "cross", "squares", "size")}
        return replace(self, **sums)

    def solve(self, alpha: Tensor, noise: Tensor, mean: Tensor, heat: float, shape: float, keeps: bool) -> Solution:
        """The posterior at α, σ (with ``shape`` a₀ > 0: σ₀), ``μ [C, D]`` and T, with ``m = w`` if it ``keeps`` w."""
        values, vectors = torch.linalg.eigh(self.gram)
        values, variance = values.clamp_min(0.0).unsqueeze(1), noise.to(self.squares).square().expand_as(self.squares)
        beta = (torch.ones_like(variance) if shape else 1 / variance) / heat
        away, cross = vectors.mT @ (self.weights - mean).mT, vectors.mT @ self.cross  # [D, C], in the eigenbasis
        total = values * beta + alpha
        step = (beta * cross - alpha * away) / total * (not keeps)
        errors = self.squares + (step * (values * step - 2 * cross)).sum(0)
        fit = beta * errors.clamp_min(0.0) + alpha * (away + step).square().sum(0)
        half, root = self.size / (2 * heat), vectors * total.rsqrt().mT.unsqueeze(1)
        evidence, weights = (alpha / total).log().sum(0) / 2 - half * LOG_2PI, self.weights + (vectors @ step).mT
        if not shape:
            return Solution(Gaussians(weights, root), (evidence - half * variance.log() - fit / 2).sum())
        first, a, rate = shape * variance, float(shape + half), shape * variance + fit / 2
        if not a > 1:
            what = "Student-t noise has no variance after so few data."
            raise ConfigurationError(what, expected="noise_shape + N/2 > 1", got=f"{a:.3g}", fix="Raise noise_shape.")
        gammas = torch.lgamma(torch.tensor([a, shape], dtype=torch.float64)).diff().neg().to(rate)
        q = Gaussians(weights, root * (rate / (a - 1)).sqrt()[:, None, None])
        return Solution(q, (evidence + gammas + shape * first.log() - a * rate.log()).sum(), a, rate)
