"""Several networks or posteriors behind one predictive."""

from laplace_plus.mixtures.ensemble import Ensemble
from laplace_plus.mixtures.mixture import Mixture, MixturePrediction

__all__ = ["Ensemble", "Mixture", "MixturePrediction"]
