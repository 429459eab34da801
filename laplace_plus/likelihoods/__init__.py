"""How targets are distributed given a network's outputs, and everything that follows from it."""

from laplace_plus.likelihoods.base import Likelihood
from laplace_plus.likelihoods.categorical import Categorical
from laplace_plus.likelihoods.elementwise import Bernoulli, Poisson
from laplace_plus.likelihoods.gaussian import Gaussian, GivenNoise, HeteroscedasticGaussian
from laplace_plus.likelihoods.marginal import Marginal
from laplace_plus.likelihoods.resolve import LogDensity, likelihood_from_config, register_likelihood, resolve_likelihood

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "GivenNoise",
    "HeteroscedasticGaussian",
    "Likelihood",
    "LogDensity",
    "Marginal",
    "Poisson",
    "likelihood_from_config",
    "register_likelihood",
    "resolve_likelihood",
]
