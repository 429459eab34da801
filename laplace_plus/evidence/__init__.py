"""The evidence, and tuning hyperparameters by it or by held-out data."""

from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.marginal_likelihood import ExpectationMaximisation, MacKay, MarginalLikelihood
from laplace_plus.evidence.noise import NoiseEstimate, noise_from_residuals
from laplace_plus.evidence.tangent import Tangent, TangentResult
from laplace_plus.evidence.tangent_model import TangentModel, TangentOptimum, tangent_optimum
from laplace_plus.evidence.tuning import GAUSSIAN_TUNERS, Tuner, TuningResult
from laplace_plus.evidence.validation import Validation

GAUSSIAN_TUNERS.update(
    marginal_likelihood=MarginalLikelihood,
    mackay=MacKay,
    em=ExpectationMaximisation,
    tangent=Tangent,
    validation=Validation,
)

__all__ = [
    "ExpectationMaximisation",
    "GAUSSIAN_TUNERS",
    "LaplaceModel",
    "MacKay",
    "MarginalLikelihood",
    "NoiseEstimate",
    "Tangent",
    "TangentModel",
    "TangentOptimum",
    "TangentResult",
    "Tuner",
    "TuningResult",
    "Validation",
    "noise_from_residuals",
    "tangent_optimum",
]
