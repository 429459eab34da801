"""Bayesian normalisation layers (Franchi et al., 2024)."""

from laplace_plus.posteriors.abnn.abnn import ABNN, FineTuning

__all__ = ["ABNN", "FineTuning"]
