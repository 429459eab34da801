"""Tuning by the evidence lower bound, for variational posteriors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from laplace_plus.tuning.base import TuningResult


@dataclass(frozen=True)
class VariationalBound:
    """Maximises the evidence lower bound of a variational posterior over its hyperparameters, from where they are.

    Of :class:`VIKING` these are α and σ_im; its mean stays. That is what its ``fit`` ends with, and of use after other
    hyperparameters have changed. Of :class:`VariationalLastLayer` they are α, noise and the Gaussians.

    Args:
        data: The training data; by default the loaders of the fit.
        tune_noise: Whether to tune Gaussian noise, which only the last layer does; None for whenever it can.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    tune_noise: bool | None = None

    def tune(self, posterior: Any, *, progress: bool = False, generator: torch.Generator | None = None) -> TuningResult:
        """Maximise the bound; arguments as for :class:`~laplace_plus.Tuner`.

        Raises DataError for other data than those of the fit, or none; warns (ConvergenceWarning) as the fit does.
        """
        return posterior.run_tuner(self, progress=progress, generator=generator)
