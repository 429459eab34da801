"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation."""

from laplace_plus.posteriors.sampled.sampled_laplace import CGSolver, SampledLaplace, SGDSolver

__all__ = ["CGSolver", "SGDSolver", "SampledLaplace"]
