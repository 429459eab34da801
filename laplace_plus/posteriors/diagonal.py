"""The diagonal Laplace approximation (LeCun et al., 1990)."""

from laplace_plus.curvature import DiagonalStructure
from laplace_plus.posteriors.gaussian import GaussianPosterior


class Diagonal(GaussianPosterior):
    """Laplace with a diagonal precision, exact on the diagonal.

    The cheapest in memory (P numbers), works on every network and takes every prior; it ignores all correlations, and
    so usually overestimates the certainty in directions of correlated weights.

    Example:
        >>> import torch
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Diagonal(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> posterior.sample(5).shape
        torch.Size([5, 2])
    """

    structure = DiagonalStructure()
