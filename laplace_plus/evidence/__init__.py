"""The evidence, and tuning hyperparameters by it or by held-out data."""

from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.tuning import TuningResult, tune

__all__ = ["LaplaceModel", "TuningResult", "tune"]
