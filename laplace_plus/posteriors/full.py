"""The full-covariance Laplace approximation (MacKay, 1992)."""

from laplace_plus.curvature import FullStructure
from laplace_plus.posteriors.gaussian import GaussianPosterior


class Full(GaussianPosterior):
    """Laplace with one dense precision over all selected entries.

    The most faithful Gaussian, for small networks, last layers and subnetworks: memory is P² numbers and factorising
    takes P³ operations, so P should stay below some ten thousand. Takes scalar, layer-wise and diagonal priors.

    A last layer of C outputs and d features, fitted to few rows of data, is kept as those rows: up to ``C^⅔·d/4``. This
    holds for classes or binary outputs and the exact Gauss-Newton curvature. The posterior is the same, and P may be
    large: N rows take ``N·(C + d) + N²`` numbers, and inverting takes ``C·N³`` operations
    (``softmax_output``). The first predictions prepare up to ``1.6·C·N²`` numbers, if these take at most
    1 GiB, with which variances take ``C·N²/2`` operations for each input (``softmax_output.variances``).

    Example:
        >>> import torch
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    structure = FullStructure()
