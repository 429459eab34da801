"""Uncertainty for networks that are already trained.

posterior = lp.KFAC(model, likelihood="classification").fit(train_loader)
posterior.fit_prior_precision()
prediction = posterior.predictive(x)
"""

from typing import TYPE_CHECKING, Any

import laplace_plus.posteriors as posteriors
import laplace_plus.testing as testing
from laplace_plus import (
    curvature,
    distributed,
    errors,
    geometry,
    integrations,
    likelihoods,
    linalg,
    metrics,
    structured,
    tuning,
)
from laplace_plus._version import __version__
from laplace_plus.applications import constraints, plotting, reconstruction, serving, uses
from laplace_plus.applications.abstention import AbstentionRule, abstain
from laplace_plus.applications.calibration import CalibratedPosterior, calibrate
from laplace_plus.applications.conformal import ConformalPosterior, conformalize
from laplace_plus.applications.distances import FeatureDistance
from laplace_plus.applications.distillation import distill
from laplace_plus.applications.evaluation import Report, evaluate
from laplace_plus.applications.fields import SpatialField
from laplace_plus.applications.mixtures import Ensemble, Mixture
from laplace_plus.applications.noise import NoisePosterior, learn_noise
from laplace_plus.applications.serving import freeze
from laplace_plus.applications.through import at_last_token, through
from laplace_plus.applications.training import DataEmphasized, train_data_emphasized, train_marginal_likelihood
from laplace_plus.applications.uses import continue_on, from_variance, penalty
from laplace_plus.curvature import Backend, Native
from laplace_plus.geometry import Diffusion
from laplace_plus.likelihoods import Bernoulli, Categorical, Likelihood, LogDensity, Poisson
from laplace_plus.likelihoods.gaussian import Gaussian, GivenNoise, HeteroscedasticGaussian
from laplace_plus.posteriors import *  # noqa: F403
from laplace_plus.predictive import Prediction
from laplace_plus.priors import Groups
from laplace_plus.tuning import Auto, LeaveOneOut
from laplace_plus.tuning.base import Tuner, TuningResult, VariationalBound
from laplace_plus.tuning.leave_one_out import leave_one_out
from laplace_plus.tuning.marginal_likelihood import ExpectationMaximisation, MacKay, MarginalLikelihood
from laplace_plus.tuning.tangent import Tangent
from laplace_plus.tuning.validation import Validation

if TYPE_CHECKING:
    from laplace_plus.integrations.backpack import BackPack
    from laplace_plus.integrations.curvlinops import Curvlinops

__all__ = [
    "AbstentionRule",
    "Auto",
    "BackPack",
    "Backend",
    "Bernoulli",
    "CalibratedPosterior",
    "Categorical",
    "ConformalPosterior",
    "Curvlinops",
    "DataEmphasized",
    "Diffusion",
    "Ensemble",
    "ExpectationMaximisation",
    "FeatureDistance",
    "Gaussian",
    "GivenNoise",
    "Groups",
    "HeteroscedasticGaussian",
    "LeaveOneOut",
    "Likelihood",
    "LogDensity",
    "MacKay",
    "MarginalLikelihood",
    "Mixture",
    "Native",
    "NoisePosterior",
    "Poisson",
    "Prediction",
    "Report",
    "SpatialField",
    "Tangent",
    "Tuner",
    "TuningResult",
    "Validation",
    "VariationalBound",
    "__version__",
    "abstain",
    "at_last_token",
    "calibrate",
    "conformalize",
    "constraints",
    "continue_on",
    "curvature",
    "distill",
    "distributed",
    "errors",
    "evaluate",
    "freeze",
    "from_variance",
    "geometry",
    "integrations",
    "learn_noise",
    "leave_one_out",
    "likelihoods",
    "linalg",
    "metrics",
    "penalty",
    "plotting",
    "reconstruction",
    "serving",
    "structured",
    "testing",
    "through",
    "train_data_emphasized",
    "train_marginal_likelihood",
    "tuning",
    "uses",
]
__all__ += posteriors.__all__


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # These backends stand on libraries that take seconds to import.
    if name in ("BackPack", "Curvlinops"):
        return getattr(curvature, name)
    hint = f". Write {errors.WORDS[name]}" if name in errors.WORDS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
