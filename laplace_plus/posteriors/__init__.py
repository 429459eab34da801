"""The posteriors, one method in one file."""

from laplace_plus.posteriors.base import Posterior, Summary
from laplace_plus.posteriors.diagonal import Diagonal
from laplace_plus.posteriors.full import Full
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.posteriors.kfac import KFAC
from laplace_plus.posteriors.loading import load
from laplace_plus.posteriors.registry import get_posterior, register

register("Full", Full)
register("KFAC", KFAC)
register("Diagonal", Diagonal)

__all__ = ["Diagonal", "Full", "GaussianPosterior", "KFAC", "Posterior", "Summary", "get_posterior", "load", "register"]
