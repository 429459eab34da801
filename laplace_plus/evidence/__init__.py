"""The evidence, and tuning hyperparameters by it or by held-out data."""

from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.tangent import TangentResult, tune_tangent
from laplace_plus.evidence.tangent_model import TangentModel, TangentOptimum, tangent_optimum
from laplace_plus.evidence.tuning import TuningResult, tune

__all__ = [
    "LaplaceModel",
    "TangentModel",
    "TangentOptimum",
    "TangentResult",
    "TuningResult",
    "tangent_optimum",
    "tune",
    "tune_tangent",
]
