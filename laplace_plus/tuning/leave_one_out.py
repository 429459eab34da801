"""Tuning the prior precision by the leave-one-out negative log-likelihood.

The displacement ``f₋ₙ − f`` keeps the prior of training. Only the covariance ``V₋ₙ`` follows the precision that is
searched. The training data are passed over twice: for a coarse grid,
and for a finer one around its best point. In each pass one set of gradients serves all points.

For a Gaussian likelihood the noise is tuned with the precision, in closed form. With the precision times the squared
noise held fixed, the predictive covariance ``V₋ₙ + σ²`` scales as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConvergenceWarning, NotPositiveDefiniteError, UnsupportedError, warn
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable, TuningResult, tunes_noise
from laplace_plus.tuning.deletions import INTERPOLATION, Deletions, Leverages, Unit
from laplace_plus.tuning.fitted_data import (
    check_training_prior,
    precision_of_weight_decay,
    survey,
    unknown_training_prior,
)
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.left_out_losses import Losses, left_out_losses, link_options
from laplace_plus.tuning.left_out_predictions import require_leave_one_out
from laplace_plus.tuning.validation import checked_grid, grid_settled

LEVELS = 31
"""Points of the coarse grid, from 1e-4 to 1e6 times the precision of training: three for each decade."""

FINER = 9
"""Points of the finer grid between the best point's two neighbours: twelve steps for each decade."""


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutTuning(TuningResult):
    """What a tuning by leave-one-out found; ``value`` is minus the mean leave-one-out NLL.

    Attributes:
        training_prior_precision: That of the displacement, before the leverage factor.
        training_noise_std: The noise that belongs to it.
        kappa: The leverage factor.
        largest_leverage: At ``kappa`` times the precision of training.
        precisions: The precisions tried, at the initial noise, in ascending order, ``[G]``; factors where the precision
            has several entries.
        losses: The mean leave-one-out NLL of each, ``[G]``; infinite where leverages reached one.
    """

    training_prior_precision: Tensor
    training_noise_std: Tensor | None
    kappa: float
    largest_leverage: float
    precisions: Tensor
    losses: Tensor


@dataclass(frozen=True)
class LeaveOneOut:
    """Chooses the precision of least leave-one-out negative log-likelihood; see :mod:`laplace_plus.tuning`.

    The precision of *training* is another number, and must be known: pass ``training_prior_precision`` or
    ``weight_decay``. By default it is that of an earlier leave-one-out tuning whose result the posterior still has.

    Args:
        training_prior_precision: That of the displacement, for the loss summed over the data.
        weight_decay: Instead, of a classifier, the ``weight_decay`` of torch's SGD or Adam with the *mean* loss; as for
            :func:`laplace_plus.calibrate`. Takes one more pass, without derivatives.
        training_noise_std: The noise that belongs to it; by default the likelihood's.
        kappa: Factor on the precision of training in leverages and displacements. 1 is the formula. On small ReLU
            networks, whose weights are no exact optimum, 1 overshoots what retraining gives, and 2 comes closer.
        leverages: As for :func:`laplace_plus.leave_one_out`.
        unit: As there.
        grid: Precisions to try instead, positive. Where the posterior's precision has several entries, the search
            multiplies them by these as factors. No finer grid follows.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: The training data; by default the loaders of the fit.

    Raises:
        ConfigurationError: An option that is none of these, or the prior of training twice.
    """

    training_prior_precision: float | Tensor | None = None
    weight_decay: float | None = None
    training_noise_std: float | Tensor | None = None
    kappa: float = 2.0
    leverages: Leverages = "own"
    unit: Unit = "example"
    grid: Sequence[float] | Tensor | None = None
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_training_prior(self.training_prior_precision, self.weight_decay)
        checks.positive("kappa", self.kappa)
        checks.choice("leverages", self.leverages, get_args(Leverages))
        checks.choice("unit", self.unit, get_args(Unit))
        checks.count("n_samples", self.n_samples)
        if self.grid is not None:
            checked_grid(self.grid)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> LeaveOneOutTuning:
        """Search the precision; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            ConfigurationError: Neither a precision nor a weight decay of training is known.
            DataError: Other data than were fitted to.
            NotPositiveDefiniteError: Leverages at or above one.
            UnsupportedError: Noise of another likelihood than the Gaussian, or the weight decay of no classifier.

        Warns:
            ConvergenceWarning: The best point lies at the end of the grid, and the loss still falls there; or a
                classifier fits its training data all but perfectly, so that leaving out tells nothing.
        """
        model = posterior.laplace_model()
        require_leave_one_out(posterior)
        noisy = tunes_noise(model.likelihood, self.tune_noise)
        if noisy and not (model.likelihood.is_gaussian and self.link in (None, "exact")):
            what = "Noise is tuned by leave-one-out in closed form only."
            got = f"{type(model.likelihood).__name__} and link={self.link!r}"
            raise UnsupportedError(what, expected='lp.Gaussian and link="exact"', got=got, fix="Pass tune_noise=False.")
        data = posterior.training_data.again(self.data, "Leave-one-out passes over the training data.")
        initial = posterior.prior_precision.detach()
        training, training_noise = self.of_training(posterior, model, data, progress)
        deletions = Deletions(posterior, data, self.kappa * training, training_noise, self.leverages, self.unit)
        options = {"noisy": noisy, "progress": progress, **link_options(self, model.likelihood, generator)}
        base = initial if initial.ndim else torch.ones((), dtype=torch.float64, device="cpu")
        search: Callable[..., Losses] = partial(left_out_losses, deletions, base, **options)
        if self.grid is None:
            centre = training.double().log10().mean().item() if initial.ndim == 0 else 0.0
            levels = torch.logspace(centre - 4, centre + 6, LEVELS, dtype=torch.float64, device="cpu")
        else:
            levels = checked_grid(self.grid).sort().values
        found = search(levels)
        losses, scales = found.losses, found.factors
        _warn_of_interpolation(model, found.n_observations)
        if self.grid is None and bool(torch.isfinite(losses).any()):
            best = int(losses.argmin())
            ends = levels[max(best - 1, 0)].log10(), levels[min(best + 1, LEVELS - 1)].log10()
            finer = torch.logspace(float(ends[0]), float(ends[1]), FINER, dtype=torch.float64, device="cpu")
            more = search(finer)
            levels, order = torch.cat([levels, finer]).sort()
            losses, scales = torch.cat([losses, more.losses])[order], torch.cat([scales, more.factors])[order]
        best = int(losses.argmin())
        if not math.isfinite(float(losses[best])):
            what = "At every precision some leverage of the posterior reaches one, or its loss is not finite."
            got = f"precisions up to {float(levels[-1]):.3g}"
            fix = 'Pass a grid with larger precisions, or leverages="full", which leaves the posterior\'s covariance.'
            raise NotPositiveDefiniteError(what, got=got, fix=fix)
        own, scale = model.likelihood.noise_std, float(scales[best]) if noisy else 1.0
        return LeaveOneOutTuning(
            method="leave_one_out",
            prior_precision=(base * levels[best] / scale**2).to(model.vector.dtype),
            noise_std=own * scale if noisy and own is not None else None,
            value=-float(losses[best]),
            converged=grid_settled(levels, losses, best, "leave_one_out", float(levels[best])),
            n_evaluations=len(levels),
            training_prior_precision=training,
            training_noise_std=own if training_noise is None else as_hyperparameter(training_noise),
            kappa=float(self.kappa),
            largest_leverage=found.largest_leverage,
            precisions=levels,
            losses=losses,
        )

    def of_training(
        self, posterior: Tunable, model: LaplaceModel, data: Iterable[Any], progress: bool
    ) -> tuple[Tensor, Any]:
        """The prior precision of training, and the noise that belongs to it (None for the likelihood's)."""
        precision, noise, before = self.training_prior_precision, self.training_noise_std, posterior.tuning
        if isinstance(before, LeaveOneOutTuning) and before.prior_precision is posterior.prior_precision:
            # The posterior's own precision is a tuned one, not that of training.
            if precision is None and self.weight_decay is None:
                precision = before.training_prior_precision
            noise = before.training_noise_std if noise is None else noise
        if not check_training_prior(precision, self.weight_decay):
            raise unknown_training_prior()
        if self.weight_decay is not None:
            seen = survey(model, posterior.network, data, posterior.n_data, progress=progress)
            precision = precision_of_weight_decay(self.weight_decay, seen, model, posterior.temperature.detach())
        assert precision is not None
        training = as_hyperparameter(precision).detach()
        model.prior(training)  # raises for an unusable precision
        return training, noise


def _warn_of_interpolation(model: LaplaceModel, n_observations: float) -> None:
    """Warn where a classifier interpolates its training data: gradients vanish there, so leaving out is blind."""
    loss = -float(model.log_likelihood()) / n_observations
    if model.likelihood.is_classifier and loss < INTERPOLATION:
        warn(
            f"The network's training loss is {loss:.2g} nats: leaving out data that are fitted all but perfectly "
            "changes nothing, and tells nothing about new data. Tune by marginal likelihood, or on held-out data.",
            ConvergenceWarning,
        )
