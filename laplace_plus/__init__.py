"""Uncertainty for networks that are already trained.

posterior = lp.KFAC(model, likelihood="classification").fit(train_loader)
posterior.fit_prior_precision()
prediction = posterior.predictive(x)
"""

from typing import TYPE_CHECKING, Any

from laplace_plus import curvature, distributed, errors, linalg, testing
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
    DiagonalSWAG,
    Full,
    GaussianPosterior,
    LargestMagnitude,
    LargestVariance,
    LowRank,
    Posterior,
    Random,
    Subnetwork,
    get_posterior,
    load,
    register,
)
from laplace_plus.predictive import Prediction

if TYPE_CHECKING:
    from laplace_plus.curvature import BackPack, Curvlinops

__all__ = [
    "BackPack",
    "Backend",
    "Bernoulli",
    "Categorical",
    "Curvlinops",
    "Diagonal",
    "DiagonalSWAG",
    "Full",
    "Gaussian",
    "GaussianPosterior",
    "HeteroscedasticGaussian",
    "KFAC",
    "Likelihood",
    "LargestMagnitude",
    "LargestVariance",
    "LogDensity",
    "LowRank",
    "Native",
    "Poisson",
    "Posterior",
    "Prediction",
    "Random",
    "Subnetwork",
    "__version__",
    "distributed",
    "errors",
    "get_posterior",
    "linalg",
    "load",
    "register",
    "testing",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # These backends stand on libraries that take seconds to import.
    if name in ("BackPack", "Curvlinops"):
        return getattr(curvature, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
