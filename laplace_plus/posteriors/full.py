"""The full-covariance Laplace approximation (MacKay, 1992)."""

from __future__ import annotations

from typing_extensions import override

from laplace_plus.curvature import FullStructure
from laplace_plus.posteriors.gaussian import GaussianPosterior


class Full(GaussianPosterior):
    """Laplace with one dense precision over all selected entries.

    The most faithful Gaussian, for small networks, last layers and subnetworks: memory is P² numbers and factorising
    takes P³ operations, so P should stay below some ten thousand. Takes scalar, layer-wise and diagonal priors.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    @property
    @override
    def structure(self) -> FullStructure:
        return FullStructure()
