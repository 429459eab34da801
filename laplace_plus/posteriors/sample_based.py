"""Gaussian posteriors that are known by samples: what k deviations from the mean give."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.network.network import Network
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.public import full_precision
from laplace_plus.predictive.linearized import pushed


class SampleBased(Posterior):
    """A Gaussian around the trained weights whose covariance is that of k draws, ``1/k Σ z zᵀ``.

    A subclass gives :meth:`_deviations`. Memory is O(k·P), and the relative standard error of a variance ``(2/k)^½``.
    """

    @abstractmethod
    def _deviations(self) -> Tensor:
        """Draws ``z = θ − θ̂`` at the present hyperparameters, ``[k, P]``."""

    @property
    def _center(self) -> Network:
        """The network with the posterior mean as its weights."""
        return self.network

    @property
    def samples(self) -> Tensor:
        """The k independent draws that the posterior holds, ``[k, P]``."""
        return self.mean + self._deviations()

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws from the Gaussian with the samples' covariance: ``θ̂ + k^-½ Σ w_s z_s`` with standard normal w.

        Args:
            n: Number of draws; those beyond k bring nothing new to the covariance.
            generator: Source of randomness; may live on another device.

        Returns:
            ``[n, P]``.
        """
        checks.count("n", n)
        return torch.addmm(self.mean, self._combinations(n, generator), self._deviations())

    def _combinations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Weights ``[n, k]`` with which combinations of samples have their covariance."""
        z = self._deviations()
        weights = draw_probes("gaussian", n, len(z), generator=generator, dtype=z.dtype, device=z.device)
        return weights / len(z) ** 0.5

    @override
    def _pushed(self, x: Any, generator: torch.Generator | None = None, n: int = 0) -> tuple[Tensor, Tensor]:
        """From the k samples that the posterior holds."""
        return pushed(self._center, self._deviations(), self.network.receive(x), n_outputs=self.n_outputs)

    @override
    def _linear_samples(self, x: Any, n: int, generator: torch.Generator | None) -> Tensor:
        mean, deviations = self._pushed(x)  # k products, however many samples are asked for
        combined = self._combinations(n, generator).to(deviations) @ deviations.flatten(1)
        return mean + combined.view(n, *mean.shape)
