"""The Gaussian over weights: variances, matrices, densities and the number of parameters that the data determine."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods.base import describe
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.configuration import full_precision
from laplace_plus.structured import Factor
from laplace_plus.tuning.laplace import LaplaceModel


class Moments(Posterior):
    """What follows from a Gaussian's precision ``(H/T + P₀) / s``."""

    @abstractmethod
    def laplace_model(self, *, moved: bool = False) -> LaplaceModel:
        """What the evidence is a function of, apart from the hyperparameters; ``moved`` networks are not refused."""

    @abstractmethod
    def factors(self) -> dict[str, Factor]:
        """The factorised posterior precision of each block."""

    @full_precision
    def log_prob(self, theta: Tensor) -> Tensor:
        """Log-density of weights under the posterior, ``log N(θ; θ̂, Σ)``, in nats; differentiable in θ.

        Args:
            theta: ``[P]`` or ``[n, P]``, in ``parameter_names`` order, as :meth:`sample` gives them.

        Returns:
            0-d or ``[n]``, float64; NaN for weights that are not finite.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: Vectors of another length.
        """
        model = self.laplace_model()
        vectors = theta if isinstance(theta, Tensor) and theta.ndim == 2 else [theta]  # noqa: PLR2004
        if any(not isinstance(one, Tensor) or one.shape != self.mean.shape for one in vectors):
            expected, got = f"[{self.n_parameters}] or [n, {self.n_parameters}]", describe(theta)
            raise ConfigurationError("These are no vectors of parameters.", expected=expected, got=got)
        squares = model.squared_distance(theta.view(-1, self.n_parameters), self._prior_precision, self._temperature)
        determinant = sum(factor.log_determinant() for factor in self.factors().values())
        found = (determinant - self.n_parameters * math.log(2 * math.pi) - squares / self.covariance_scale) / 2
        return found if theta.ndim == 2 else found[0]  # noqa: PLR2004

    @full_precision
    def effective_dimension(self) -> Tensor:
        """The number of parameters that the data determine, ``γ = Σ λ/(λ + α)``, between 0 and P (MacKay, 1992).

        λ are the eigenvalues of ``H/T``; in general ``γ = P − tr((H/T + P₀)⁻¹ P₀)``. At the evidence's optimum in one
        α, ``α ‖θ̂ − μ₀‖² = γ``.

        Returns:
            0-d float64, for which the covariance's scale does not count.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        return self.laplace_model().effective_dimension(self._prior_precision, self._temperature)

    @full_precision
    def variance(self) -> Tensor:
        """Posterior variance of each parameter entry, ``[P]``."""
        return self.laplace_model().variances(self.factors())

    @full_precision
    def precision_matrix(self) -> Tensor:
        """The posterior precision ``(H/T + P₀) / s`` written out, ``[P, P]``; only for small P."""
        model = self.laplace_model()
        weights = (model.weights() / self._temperature.to(model.vector.device)).to(model.vector)
        precision = model.curvature.dense(weights) + torch.diag(self.prior().vector().to(model.vector))
        return precision / self.covariance_scale

    @full_precision
    def covariance_matrix(self) -> Tensor:
        """The posterior covariance written out, ``[P, P]``; only for small P."""
        total = torch.zeros(self.n_parameters, self.n_parameters, dtype=self.mean.dtype, device=self.mean.device)
        factors = self.factors()
        for layout, _ in self.laplace_model().curvature:
            for group, matrix in enumerate(factors[layout.key].covariance()):
                place = layout.index[group].flatten().to(total.device)
                total[place[:, None], place] = matrix
        return total
