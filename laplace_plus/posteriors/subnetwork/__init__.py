"""Subnetwork inference: a posterior over chosen weights, all others fixed."""

from laplace_plus.posteriors.subnetwork.selectors import LargestMagnitude, LargestVariance, Random, Selector
from laplace_plus.posteriors.subnetwork.subnetwork import Subnetwork
from laplace_plus.posteriors.swag import DiagonalSWAG

__all__ = ["DiagonalSWAG", "LargestMagnitude", "LargestVariance", "Random", "Selector", "Subnetwork"]
