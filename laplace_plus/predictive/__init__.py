"""Predictive distributions of targets from distributions over a network's outputs."""

from __future__ import annotations

from laplace_plus.predictive.linearized import from_functional
from laplace_plus.predictive.prediction import Prediction, from_samples

__all__ = ["Prediction", "from_functional", "from_samples"]
