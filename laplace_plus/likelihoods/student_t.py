"""Real numbers with Gaussian noise whose precision has a Gamma distribution: Student-t predictions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributions import Distribution, StudentT

from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods.base import Likelihood, Marginal, variance_of
from laplace_plus.likelihoods.gaussian import RealTargets
from laplace_plus.likelihoods.normal import independent_information


class StudentTNoise(RealTargets):
    """Predictions under noise precisions ``Gamma(shape, rate [C])``: Student-t with ``2 shape`` degrees of freedom.

    The variance of y given its output is ``rate/(shape − 1)``; that of the output has the same factor, and adds to it.
    """

    couples_outputs = False
    sample = Likelihood.sample

    def __init__(self, shape: float, rate: Tensor, output_axis: int = -1):
        self.shape, self.rate, self.output_axis = shape, rate, output_axis

    def distribution(self, outputs: Tensor, epistemic: float | Tensor = 0.0) -> Distribution:  # type: ignore[override]
        """Student-t distributions with batch shape ``[..., C]``, of outputs with a variance of their own."""
        scale = ((epistemic + (self.rate / (self.shape - 1)).to(outputs)) * (1 - 1 / self.shape)).sqrt()
        return StudentT(
            torch.full_like(outputs, 2 * self.shape), outputs, scale.expand_as(outputs), validate_args=False
        )

    def root_diagonal(self, outputs: Tensor) -> Tensor:
        """Ones (unit noise)."""
        return torch.ones_like(outputs)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: weights and noise are integrated out together."""
        epistemic, noise = variance_of(mean, covariance), (self.rate / (self.shape - 1)).to(mean).expand_as(mean)
        law = partial(self.distribution, mean, epistemic)
        information = partial(independent_information, epistemic, noise)
        return Marginal(mean, epistemic + noise, law, epistemic, noise, information=information)

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution:
        """UnsupportedError: torch has no multivariate Student-t distribution."""
        raise UnsupportedError("Student-t noise has no joint density here.", expected="joint=False", got="joint=True")
