"""The full-covariance Laplace approximation (MacKay, 1992)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from laplace_plus.curvature import FullStructure
from laplace_plus.errors import ConfigurationError
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

    @override
    def _fit(self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None) -> None:
        needed = 3 * self.n_parameters**2 * torch.finfo(self.network.dtype).bits / 8  # H, its vectors and work space
        available = _memory(self.network.device)
        if needed > available:
            raise ConfigurationError(
                f"A full covariance of {self.n_parameters:,} parameters does not fit into memory.",
                expected=f"at most about {int((available / needed) ** 0.5 * self.n_parameters):,} selected entries",
                got=f"{self.n_parameters:,}, for which {needed / 2**30:,.0f} GiB would be needed",
                fix="Use lp.KFAC or lp.Diagonal, or select fewer parameters, such as parameters='last_layer'.",
            )
        GaussianPosterior._fit(self, data, update=update, progress=progress, generator=generator)


def _memory(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
