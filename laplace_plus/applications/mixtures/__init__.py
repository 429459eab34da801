"""Several networks or posteriors behind one predictive."""

from laplace_plus.applications.mixtures.ensemble import Ensemble
from laplace_plus.applications.mixtures.mixture import Mixture, MixturePrediction

__all__ = ["Ensemble", "Mixture", "MixturePrediction"]
