"""The full-covariance Laplace approximation (MacKay, 1992)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from laplace_plus.curvature import FullStructure
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.structured.softmax_output.block import require_dense


class Full(GaussianPosterior):
    """Laplace with one dense precision over all selected entries.

    The most faithful Gaussian, for small networks, last layers and subnetworks: memory is P² numbers and factorising
    takes P³ operations, so P should stay below some ten thousand. Takes scalar, layer-wise and diagonal priors.

    A last layer of C outputs and d features, fitted to fewer than ``P = C·d`` rows of data, is kept as those rows. This
    holds for classes or binary outputs and the exact Gauss-Newton curvature. The posterior is the same, and P may be
    large: N rows take ``N·(C + d) + N²`` numbers, and inverting takes ``C·N³`` operations
    (``softmax_output.precision``). The first predictions prepare up to ``1.6·C·N²`` numbers, if the memory budget holds
    them, with which variances take ``C·N²/2`` operations for each input (``softmax_output.variances``).

    Raises:
        ConfigurationError: By :meth:`fit`, if the covariance does not fit into memory in either form.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    structure = FullStructure()

    @override
    def fit_batches(
        self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None
    ) -> None:
        # Whether one layer is a linear head is only known once a batch has gone through the network.
        may_be_head = len(self.network.layers) == 1 and (self.backend.name, self.backend.kind) == ("native", "ggn")
        if not may_be_head:
            require_dense(self.n_parameters, self.network.dtype, self.network.device)
        GaussianPosterior.fit_batches(self, data, update=update, progress=progress, generator=generator)
