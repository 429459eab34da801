"""Tuning the posterior's prior precision by what each datum's leave-one-out prediction says about it.

The displacement ``f₋ₙ − f`` stays that of the prior of training, and only the covariance ``V₋ₙ`` follows the precision
that is searched; see :mod:`laplace_plus.leave_one_out.predictions`. The training data are passed over twice, once for a
coarse grid and once for a finer one around its best point; in every pass one set of gradients serves all points.

Of a Gaussian likelihood the noise is tuned with the precision, in closed form: with the precision times the squared
noise held fixed, the predictive covariance ``V₋ₙ + σ²`` scales as a whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NotPositiveDefiniteError, UnsupportedError
from laplace_plus.evidence.fitted_data import (
    check_training_prior,
    precision_of_weight_decay,
    survey,
    unknown_training_prior,
)
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.tuning import Tunable, TuningResult, check_counts, tunes_noise
from laplace_plus.evidence.validation import checked_grid, grid_settled
from laplace_plus.leave_one_out.covariances import Unit
from laplace_plus.leave_one_out.predictions import (
    INTERPOLATION,
    LeavingOut,
    Leverages,
    Piece,
    ceiling,
    check_choices,
    check_leverages,
    checked_factor,
    leave_one_out,
    leave_out,
    require_network_mean,
)
from laplace_plus.predictive import from_functional
from laplace_plus.priors import as_hyperparameter

LEVELS = 31
"""Points of the coarse grid, from 1e-4 to 1e6 times the precision of training: three for each decade."""

FINER = 9
"""Points of the finer grid, between the two neighbours of the best point: steps of a sixth of a decade's third."""


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutTuning(TuningResult):
    """What a tuning by leave-one-out found; ``value`` is minus the mean leave-one-out NLL.

    Attributes:
        training_prior_precision: That of the displacement, before the leverage factor.
        training_noise_std: The noise that belongs to it.
        kappa: The leverage factor.
        largest_leverage: At ``kappa`` times the precision of training.
        precisions: All that were tried, at the noise of the start, in ascending order, ``[G]``; factors where the
            precision has several entries.
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
    """Chooses the precision of least leave-one-out negative log-likelihood; see :mod:`laplace_plus.leave_one_out`.

    The precision of *training* is another number and has to be known: ``training_prior_precision`` or ``weight_decay``,
    or that of an earlier tuning by leave-one-out whose result the posterior still has.

    Args:
        training_prior_precision: That of the displacement, for the loss summed over the data.
        weight_decay: Instead, of a classifier, the ``weight_decay`` of torch's SGD or Adam with the *mean* loss; as for
            :func:`laplace_plus.calibrate`. Takes one more pass, without derivatives.
        training_noise_std: The noise that belongs to it; by default the likelihood's.
        kappa: Factor on the precision of training in leverages and displacements. 1 is the formula; on small ReLU
            networks, whose weights are no exact optimum, it overshoots what retraining gives, and 2 comes closer.
        leverages: As for ``posterior.leave_one_out``.
        unit: As there.
        grid: Precisions to try instead, positive; factors where the posterior's present precision has several entries,
            which the search multiplies as a whole. No finer grid follows.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        structure: Only ``"scalar"``: one number is searched.
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
    structure: str = "scalar"
    data: Iterable[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.structure != "scalar":
            raise ConfigurationError(
                "The leave-one-out loss is searched along one number.",
                expected='structure="scalar"',
                got=repr(self.structure),
                fix="Set prior_precision to the proportions that you want; the search multiplies them as a whole.",
            )
        check_training_prior(self.training_prior_precision, self.weight_decay)
        checked_factor(self.kappa)
        check_choices(self.leverages, self.unit)
        check_counts(n_samples=self.n_samples)
        if self.grid is not None:
            checked_grid(self.grid)

    predictions = staticmethod(leave_one_out)
    """The leave-one-out predictions themselves; see :meth:`laplace_plus.GaussianPosterior.leave_one_out`."""

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
        require_network_mean(posterior)
        noisy = self._tunes_noise(model)
        data = posterior.training_data.again(self.data, "Leave-one-out passes over the training data.")
        initial, temperature = posterior.prior_precision.detach(), posterior.temperature.detach()
        training, training_noise = self._training(posterior, model, data, progress)
        leaving = LeavingOut.create(
            model,
            posterior.network,
            data,
            n_data=posterior.n_data,
            precision=self.kappa * training,
            noise_std=training_noise,
            temperature=temperature,
            route=self.leverages,
            unit=self.unit,
        )
        seed = None
        if (self.link or model.likelihood.links[0]) == "mc":
            source = "cpu" if generator is None else generator.device
            seed = int(torch.randint(2**62, (), generator=generator, device=source))
        base = initial if initial.ndim else torch.ones((), dtype=torch.float64, device="cpu")
        search = _Search(leaving, data, base, self.link, self.n_samples, seed, noisy, progress)
        if self.grid is None:
            centre = training.double().log10().mean().item() if initial.ndim == 0 else 0.0
            levels = torch.logspace(centre - 4, centre + 6, LEVELS, dtype=torch.float64, device="cpu")
        else:
            levels = checked_grid(self.grid).sort().values
        losses, scales, largest, n_rows = search.losses(levels)
        _warn_of_interpolation(model, n_rows)
        if self.grid is None and bool(torch.isfinite(losses).any()):
            best = int(losses.argmin())
            ends = levels[max(best - 1, 0)].log10(), levels[min(best + 1, LEVELS - 1)].log10()
            finer = torch.logspace(float(ends[0]), float(ends[1]), FINER, dtype=torch.float64, device="cpu")
            more, more_scales, _, _ = search.losses(finer)
            levels, order = torch.cat([levels, finer]).sort()
            losses, scales = torch.cat([losses, more])[order], torch.cat([scales, more_scales])[order]
        best = int(losses.argmin())
        if not math.isfinite(float(losses[best])):
            raise NotPositiveDefiniteError(
                "At every precision of the grid some leverage of the posterior reaches one, or its loss is not finite.",
                expected="a grid with larger precisions",
                got=f"precisions up to {float(levels[-1]):.3g}",
                fix='Pass a larger grid, or leverages="full", which leaves the posterior\'s covariance as it is.',
            )
        own, scale = model.likelihood.noise_std, float(scales[best])
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
            largest_leverage=largest,
            precisions=levels,
            losses=losses,
        )

    def _training(
        self, posterior: Tunable, model: LaplaceModel, data: Iterable[Any], progress: bool
    ) -> tuple[Tensor, Any]:
        """The prior precision of training, and the noise that belongs to it (None for the likelihood's)."""
        precision, noise, before = self.training_prior_precision, self.training_noise_std, posterior.tuning
        if isinstance(before, LeaveOneOutTuning) and before.prior_precision is posterior.prior_precision:
            # What was tuned since is not the precision of training.
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
        model.prior(training)  # refuses what is no precision
        return training, noise

    def _tunes_noise(self, model: LaplaceModel) -> bool:
        wanted = tunes_noise(model.likelihood, self.tune_noise)
        if wanted and not (model.likelihood.is_gaussian and self.link in (None, "exact")):
            raise UnsupportedError(
                "Noise is tuned by leave-one-out in closed form only.",
                expected='lp.Gaussian and link="exact"',
                got=f"{type(model.likelihood).__name__} and link={self.link!r}",
                fix="Pass tune_noise=False.",
            )
        return wanted


@dataclass(frozen=True)
class _Search:
    """The loss at many points in one pass."""

    leaving: LeavingOut
    data: Iterable[Any]
    base: Tensor
    link: str | None
    n_samples: int
    seed: int | None
    noisy: bool
    progress: bool

    def losses(self, levels: Tensor) -> tuple[Tensor, Tensor, float, float]:
        """Losses and factors on the noise ``[G]``, the displacements' largest leverage, and how many rows count.

        Raises:
            DataError: Other data than were fitted to.
            NotPositiveDefiniteError: Displacements with leverages at or above one.
        """
        leaving, limit = self.leaving, ceiling(self.leaving.network.dtype)
        totals = torch.zeros(len(levels), 2, dtype=torch.float64, device="cpu")
        valid = torch.ones(len(levels), dtype=torch.bool, device="cpu")
        entries = rows = 0.0
        values = []
        points = [(self.base * level, None) for level in levels]
        for piece in leaving.pieces(self.data, points, progress=self.progress):
            values.append(piece.left.values[piece.kept])
            if bool((values[-1] >= limit).any()):
                continue  # refused below, once they are all counted
            for number, covariance in enumerate(piece.covariances):
                if leaving.exact is None and valid[number]:
                    left = leave_out(covariance, *piece.terms.at())
                    valid[number] = valid[number] and bool((left.values < limit).all())
                    covariance = left.covariance
                if valid[number]:
                    totals[number] += self._terms(piece, piece.each(covariance))
            weight = leaving.model.likelihood.rows(piece.outputs, piece.targets)[2]
            rows += float(weight.sum())
            entries += float(weight.sum()) * piece.outputs.shape[-1]
        check_leverages(values, leaving.route, leaving.network.dtype)
        largest = float(torch.cat([part.amax(-1) for part in values]).max())
        if not self.noisy:
            losses, scales = totals[:, 0] / rows, torch.ones(len(levels), dtype=torch.float64, device="cpu")
        else:
            scales = (totals[:, 1] / entries).sqrt()
            # ½ Σ (Q/m² + log det + C log m²) at m² = Q / entries, besides constants
            losses = (totals[:, 0] + entries * (1 + scales.square().log() + math.log(2 * math.pi)) / 2) / rows
        return torch.where(valid & losses.isfinite(), losses, torch.inf), scales, largest, rows

    def _terms(self, piece: Piece, covariance: Tensor) -> Tensor:
        """What adds up: the loss, or with free noise half the log-determinants and the squared distances."""
        likelihood = self.leaving.model.likelihood
        if not self.noisy:
            generator = None
            if self.seed is not None:
                generator = torch.Generator(device=covariance.device).manual_seed(self.seed)
            prediction = from_functional(
                likelihood, piece.mean, covariance, link=self.link, n_samples=self.n_samples, generator=generator
            )
            loss = -prediction.log_prob(piece.targets).sum().double().cpu()
            return torch.stack([loss, torch.zeros_like(loss)])
        assert likelihood.noise_std is not None
        rows, targets, _ = likelihood.rows(piece.mean, piece.targets)
        noise = likelihood.noise_std.to(rows).square().expand(rows.shape[-1])
        lower = torch.linalg.cholesky(covariance.reshape(len(rows), *covariance.shape[-2:]) + torch.diag(noise))
        distance = torch.linalg.solve_triangular(lower, (targets - rows)[..., None], upper=False)
        determinants = lower.diagonal(dim1=-2, dim2=-1).log().sum()
        return torch.stack([determinants, distance.square().sum()]).double().cpu()


def _warn_of_interpolation(model: LaplaceModel, n_rows: float) -> None:
    """Classifiers that fit their data all but perfectly have no gradients left there."""
    if not model.likelihood.is_classifier:
        return
    loss = -float(model.log_likelihood()) / n_rows
    if loss < INTERPOLATION:
        warnings.warn(
            f"The network's training loss is {loss:.2g} nats: leaving out data that are fitted all but perfectly "
            "changes nothing, and says nothing about new data. Tune by marginal likelihood, or on held-out data.",
            ConvergenceWarning,
            stacklevel=4,
        )
