"""Predictive distributions of targets from distributions over a network's outputs."""

from laplace_plus.predictive.from_outputs import from_functional, from_samples
from laplace_plus.predictive.prediction import Prediction

__all__ = ["Prediction", "from_functional", "from_samples"]
