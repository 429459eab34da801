"""Tuning of hyperparameters: by the evidence, by held-out data, and by leave-one-out predictions without refitting."""

from laplace_plus.tuning.auto import Auto, AutoTuning
from laplace_plus.tuning.base import Tuner, TuningResult
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.leave_one_out import LeaveOneOut, LeaveOneOutPredictions, LeaveOneOutTuning
from laplace_plus.tuning.marginal_likelihood import ExpectationMaximisation, MacKay, MarginalLikelihood
from laplace_plus.tuning.noise import NoiseEstimate, noise_from_residuals
from laplace_plus.tuning.tangent import Tangent, TangentResult
from laplace_plus.tuning.tangent_model import TangentModel, TangentOptimum, tangent_optimum
from laplace_plus.tuning.unseen import Unseen, UnseenTuning
from laplace_plus.tuning.validation import Validation

GAUSSIAN_TUNERS: dict[str, type] = {
    "marginal_likelihood": MarginalLikelihood,
    "mackay": MacKay,
    "em": ExpectationMaximisation,
    "tangent": Tangent,
    "validation": Validation,
    "leave_one_out": LeaveOneOut,
    "auto": Auto,
    "unseen": Unseen,
}
"""The tuners of Gaussian posteriors, by shorthand; tuners of your own may be added."""

__all__ = [
    "Auto",
    "AutoTuning",
    "ExpectationMaximisation",
    "GAUSSIAN_TUNERS",
    "LaplaceModel",
    "LeaveOneOut",
    "LeaveOneOutPredictions",
    "LeaveOneOutTuning",
    "MacKay",
    "MarginalLikelihood",
    "NoiseEstimate",
    "Tangent",
    "TangentModel",
    "TangentOptimum",
    "TangentResult",
    "Tuner",
    "TuningResult",
    "Unseen",
    "UnseenTuning",
    "Validation",
    "noise_from_residuals",
    "tangent_optimum",
]
