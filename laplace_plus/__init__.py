"""Uncertainty for networks that are already trained.

posterior = lp.KFAC(model, likelihood="classification").fit(train_loader)
posterior.fit_prior_precision()
prediction = posterior.predictive(x)
"""

from laplace_plus import errors, linalg, testing
from laplace_plus._version import __version__
from laplace_plus.curvature import Backend, Native
from laplace_plus.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LogDensity,
    Poisson,
)
from laplace_plus.posteriors import (
    KFAC,
    Diagonal,
    Full,
    GaussianPosterior,
    Posterior,
    get_posterior,
    load,
    register,
)
from laplace_plus.predictive import Prediction

__all__ = [
    "Backend",
    "Bernoulli",
    "Categorical",
    "Diagonal",
    "Full",
    "Gaussian",
    "GaussianPosterior",
    "HeteroscedasticGaussian",
    "KFAC",
    "Likelihood",
    "LogDensity",
    "Native",
    "Poisson",
    "Posterior",
    "Prediction",
    "__version__",
    "errors",
    "get_posterior",
    "linalg",
    "load",
    "register",
    "testing",
]
