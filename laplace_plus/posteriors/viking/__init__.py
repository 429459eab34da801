"""Variational inference with a covariance split into the range and the null space of the training rows."""

from laplace_plus.posteriors.viking.training import ELBOTraining
from laplace_plus.posteriors.viking.viking import VIKING

__all__ = ["ELBOTraining", "VIKING"]
