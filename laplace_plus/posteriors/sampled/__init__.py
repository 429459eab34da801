"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation."""

from laplace_plus.posteriors.sampled.sampled_laplace import SampledLaplace
from laplace_plus.posteriors.sampled.solvers import CGSolver, SGDSolver

__all__ = ["CGSolver", "SGDSolver", "SampledLaplace"]
