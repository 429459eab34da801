"""Uncertainty for networks that are already trained.

posterior = lp.KFAC(model, likelihood="classification").fit(train_loader)
posterior.fit_prior_precision()
prediction = posterior.predictive(x)
"""

from typing import TYPE_CHECKING, Any

import laplace_plus.testing as testing
from laplace_plus import curvature, distributed, errors, geometry, integrations, leave_one_out, linalg, structured
from laplace_plus._version import __version__
from laplace_plus.calibration import CalibratedPosterior, calibrate
from laplace_plus.curvature import Backend, Native
from laplace_plus.evidence.marginal_likelihood import ExpectationMaximisation, MacKay, MarginalLikelihood
from laplace_plus.evidence.tangent import Tangent
from laplace_plus.evidence.tuning import Tuner, TuningResult
from laplace_plus.evidence.validation import Validation
from laplace_plus.geometry import Diffusion
from laplace_plus.leave_one_out import Auto, LeaveOneOut
from laplace_plus.likelihoods import Bernoulli, Categorical, Likelihood, LogDensity, Poisson
from laplace_plus.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from laplace_plus.posteriors import KFAC, Diagonal, Full, GaussianPosterior, LowRank, Posterior
from laplace_plus.posteriors.loading import load
from laplace_plus.posteriors.metric_bnn.latent_model import LatentModel
from laplace_plus.posteriors.metric_bnn.metric_bnn import MetricBNN
from laplace_plus.posteriors.null_space import LineSearch, NullSpace
from laplace_plus.posteriors.registry import get_posterior, register
from laplace_plus.posteriors.riemannian.drawing import ExponentialMap
from laplace_plus.posteriors.riemannian.riemannian import Riemannian
from laplace_plus.posteriors.sampled.sampled_laplace import CGSolver, SampledLaplace, SGDSolver
from laplace_plus.posteriors.sampled.tuning import SampledEvidence
from laplace_plus.posteriors.subnetwork.selectors import LargestMagnitude, LargestVariance, Random
from laplace_plus.posteriors.subnetwork.subnetwork import Subnetwork
from laplace_plus.posteriors.subnetwork.swag import DiagonalSWAG
from laplace_plus.posteriors.viking.scales import ScaleFit
from laplace_plus.posteriors.viking.training import ELBOTraining
from laplace_plus.posteriors.viking.viking import VIKING, VariationalBound
from laplace_plus.predictive import Prediction
from laplace_plus.priors import Groups
from laplace_plus.training import train_marginal_likelihood

if TYPE_CHECKING:
    from laplace_plus.integrations.backpack import BackPack
    from laplace_plus.integrations.curvlinops import Curvlinops

__all__ = [
    "Auto",
    "BackPack",
    "Backend",
    "Bernoulli",
    "CGSolver",
    "CalibratedPosterior",
    "Categorical",
    "Curvlinops",
    "Diagonal",
    "DiagonalSWAG",
    "Diffusion",
    "ELBOTraining",
    "ExpectationMaximisation",
    "ExponentialMap",
    "Full",
    "Gaussian",
    "GaussianPosterior",
    "Groups",
    "HeteroscedasticGaussian",
    "KFAC",
    "LeaveOneOut",
    "Likelihood",
    "LargestMagnitude",
    "LargestVariance",
    "LatentModel",
    "LineSearch",
    "LogDensity",
    "LowRank",
    "MacKay",
    "MarginalLikelihood",
    "MetricBNN",
    "Native",
    "NullSpace",
    "Poisson",
    "Posterior",
    "Prediction",
    "Random",
    "Riemannian",
    "SGDSolver",
    "SampledEvidence",
    "SampledLaplace",
    "ScaleFit",
    "Subnetwork",
    "Tangent",
    "Tuner",
    "TuningResult",
    "VIKING",
    "Validation",
    "VariationalBound",
    "__version__",
    "calibrate",
    "distributed",
    "errors",
    "geometry",
    "get_posterior",
    "integrations",
    "leave_one_out",
    "linalg",
    "load",
    "register",
    "structured",
    "testing",
    "train_marginal_likelihood",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # These backends stand on libraries that take seconds to import.
    if name in ("BackPack", "Curvlinops"):
        return getattr(curvature, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
