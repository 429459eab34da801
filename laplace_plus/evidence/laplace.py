"""The Laplace evidence and its parts.

With curvature H of the negative log-likelihood, posterior precision ``Λ = H/T + P₀`` and prior ``N(μ₀, P₀⁻¹)``,

    log Z = log p(D|θ̂)/T − ½ (θ̂−μ₀)ᵀ P₀ (θ̂−μ₀) − ½ log det Λ + ½ log det P₀        (MacKay, 1992)

All constants of the likelihood are included. H is diagonalised once; each evaluation after that costs one pass over its
eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.structures import Curvature
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import Factor
from laplace_plus.priors import GaussianPrior, as_hyperparameter


@dataclass(frozen=True)
class LaplaceModel:
    """Everything that the evidence is a function of, apart from the hyperparameters.

    Attributes:
        curvature: H at unit noise, in components.
        vector: θ̂, ``[P]``.
        prior_mean: μ₀, 0-d or ``[P]``.
        layer_index: ``[P]`` integers: the layer of each entry.
        likelihood: Gives ``log p(D|θ̂)`` from ``statistics`` at any noise level.
        statistics: The likelihood's additive statistics of the data.
        backend: Knows how H's components scale with the noise.
    """

    curvature: Curvature
    vector: Tensor
    prior_mean: Tensor
    layer_index: Tensor
    likelihood: Likelihood
    statistics: Tensor
    backend: Backend

    def prior(self, precision: Any) -> GaussianPrior:
        """The prior at a precision (0-d, ``[L]`` or ``[P]``)."""
        return GaussianPrior.create(as_hyperparameter(precision), self.prior_mean, self.layer_index)

    def weights(self, noise_std: Any = None) -> Tensor:
        """The curvature's component weights ``[K]`` at a noise level, float64."""
        return self.backend.component_weights(self.likelihood, noise_std).to(self.vector.device, torch.float64)

    def factors(self, precision: Any, temperature: Any = 1.0, noise_std: Any = None) -> dict[str, Factor]:
        """The posterior precision's blocks, ready to be inverted, by layout key.

        Raises:
            UnsupportedError: The structure does not take this prior.
            NotPositiveDefiniteError: The precision is not positive definite.
        """
        prior = self.prior(precision)
        weights = (self.weights(noise_std) / as_hyperparameter(temperature).to(self.vector.device)).to(self.vector)
        return {
            layout.key: block.factor(weights, prior.on(layout.index).to(self.vector))
            for layout, block in self.curvature
        }

    def log_likelihood(self, noise_std: Any = None) -> Tensor:
        """``log p(D|θ̂)``, 0-d float64."""
        return self.likelihood.log_likelihood(self.statistics, noise_std)

    def log_marginal_likelihood(self, precision: Any, temperature: Any = 1.0, noise_std: Any = None) -> Tensor:
        """The evidence, 0-d float64; differentiable in all three arguments.

        Raises:
            UnsupportedError: The structure does not take this prior.
            NotPositiveDefiniteError: The posterior precision is not positive definite.
        """
        prior = self.prior(precision)
        temperature = as_hyperparameter(temperature).to(self.vector.device, torch.float64)
        weights = self.weights(noise_std) / temperature
        deviation = prior.deviation(self.vector).double()
        scatter = (prior.vector().to(deviation) * deviation.square()).sum()
        log_determinant = torch.zeros((), dtype=torch.float64, device=self.vector.device)
        for layout, block in self.curvature:
            diagonal = prior.on(layout.index).to(weights)
            log_determinant = log_determinant + block.log_determinant(weights, diagonal).double()
        fit = self.log_likelihood(noise_std).to(deviation.device) / temperature
        return fit - (scatter + log_determinant - prior.log_determinant().to(deviation)) / 2

    def variances(self, factors: dict[str, Factor]) -> Tensor:
        """Posterior variance of each entry, ``[P]``."""
        result = torch.zeros_like(self.vector)
        for layout, _ in self.curvature:
            layout.scatter_(result, factors[layout.key].variances())
        return result
