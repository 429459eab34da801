"""Leave-one-out predictions of a Gaussian posterior, and tuning the prior precision by their log-likelihood.

The formulas are those of :mod:`laplace_plus.tuning.deletions`. In tuning, the displacement ``f₋ₙ − f`` keeps the prior
of training. Only the covariance ``V₋ₙ`` follows the precision that is searched, on a grid: in one pass over the
training data one set of gradients serves all its points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConvergenceWarning, DataError, NotPositiveDefiniteError, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import joined
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable, TuningResult
from laplace_plus.tuning.deletions import INTERPOLATION, Deletions, Leverages, link_options
from laplace_plus.tuning.laplace import (
    check_training_prior,
    precision_of_weight_decay,
    survey,
    unknown_training_prior,
)
from laplace_plus.tuning.validation import checked_grid, grid_settled, weighted_sum

LEVELS = 41
"""Points of the grid, from 1e-4 to 1e6 times the precision of training: four steps for each decade."""


@dataclass(frozen=True, eq=False)
class LeaveOneOutPredictions:
    """What the posterior says about each example without having seen it; in the order of the data, and in float64.

    Attributes:
        mean: ``f₋ₙ``, ``[N, *, C]``.
        covariance: ``V₋ₙ``, ``[N, *, C, C]``, at the posterior's own prior; the posterior's ``V`` itself where the
            leverages are those of another curvature.
        outputs: ``f``, the network's outputs, shaped like ``mean``.
        targets: As the loader gave them.
        leverages: Largest eigenvalue of each example's ``V Λ`` at the displacement's prior, ``[N]``, all below 1.
        likelihood: The distribution of targets given the outputs.
    """

    mean: Tensor
    covariance: Tensor
    outputs: Tensor
    targets: Tensor
    leverages: Tensor
    likelihood: Likelihood

    def __repr__(self) -> str:
        return f"LeaveOneOutPredictions({len(self.mean)} data, leverages up to {float(self.leverages.max()):.3g})"

    def predictive(
        self,
        *,
        link: str | None = None,
        scale: float = 1.0,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The leave-one-out predictive, of the Gaussian ``N(f₋ₙ, s V₋ₙ)`` over each datum's outputs.

        ``scale`` is ``s ≥ 0``; the others are as for ``posterior.predictive``. ConfigurationError for an unknown link
        or a negative scale.
        """
        checks.number("scale", scale, least=0.0)
        options: Any = {"link": link, "n_samples": n_samples, "generator": generator}
        return from_functional(self.likelihood, self.mean, self.covariance * scale, **options)

    def log_prob(self, **options: Any) -> Tensor:
        """``log p(yₙ | D₋ₙ)`` in nats, ``[N, *]``, 0 for ignored targets; options as for :meth:`predictive`."""
        return self.predictive(**options).log_prob(self.likelihood.separate(self.targets)[0])

    def nll(self, **options: Any) -> Tensor:
        """Minus the mean of :meth:`log_prob` over targets that are not ignored, by weights, 0-d float64, in nats."""
        return -weighted_sum(self.log_prob(**options), self.likelihood.separate(self.targets)[1]) / self.n_rows

    @property
    def n_rows(self) -> float:
        """Number of flattened observations (examples, or positions) whose targets are not ignored."""
        return float(self.likelihood.rows(self.outputs, self.targets)[2].sum())


def leave_one_out(
    posterior: Tunable,
    data: Iterable[Any] | None = None,
    *,
    prior_precision: float | Tensor | None = None,
    kappa: float = 1.0,
    leverages: Leverages = "own",
    progress: bool = False,
) -> LeaveOneOutPredictions:
    """What a posterior says about each example without having seen it; see :mod:`laplace_plus.tuning`.

    Exact, in mean and covariance, for linear models with Gaussian noise; otherwise one Newton step. The mean depends on
    the prior of training, the covariance on the posterior's own. Takes one pass over the data, and one more for the
    leverages of another curvature.

    Args:
        posterior: A fitted Gaussian posterior that :class:`~laplace_plus.LeaveOneOut` can tune.
        data: The data that the posterior was fitted to; by default the loaders that its ``fit`` saw.
        prior_precision: That of training, for the displacement, at the posterior's noise; by default the posterior's.
        kappa: Factor on it; 1 is the formula.
        leverages: ``"own"``, of this posterior's curvature; or ``"full"``, of the exact Gauss-Newton matrix ``[P, P]``,
            with this posterior's ``V``.
        progress: Whether to show a progress bar.

    Raises:
        NotFittedError: Before ``fit``.
        UnsupportedError: A class without leave-one-out predictions.
        ConfigurationError: Unknown choices.
        DataError: Other data than were fitted to, or none; or examples of different lengths.
        NotPositiveDefiniteError: Leverages at or above one, which a curvature that is not the exact one may have.
    """
    require_leave_one_out(posterior)
    likelihood = posterior.laplace_model().likelihood
    checks.positive("kappa", kappa)
    precision = posterior.prior_precision.detach()
    training = kappa * (precision if prior_precision is None else as_hyperparameter(prior_precision).detach())
    data = posterior.training_data.again(data, "Leave-one-out passes over the training data.")
    parts, largest = [], []
    with exact_arithmetic(posterior.network):
        deletions = Deletions(posterior, data, training, leverages)
        for batch in deletions.batches([precision], progress=progress):
            largest.append(torch.stack([batch.leverages, *batch.own_leverages]).amax(0))
            covariance = batch.covariances[0] * posterior.covariance_scale
            parts.append((batch.mean, covariance, batch.outputs, batch.targets, batch.leverages))
    deletions.check(largest)
    shapes = sorted({tuple(part[2].shape[1:]) for part in parts})
    if len(shapes) > 1:
        what, fix = "The batches' outputs are of different shapes.", "Pad examples to one length, with ignored targets."
        raise DataError(what, expected="as many positions in every batch", got=str(shapes), fix=fix)
    mean, covariance, outputs, targets, top = joined(parts)
    return LeaveOneOutPredictions(mean, covariance, outputs, targets, top, likelihood)


def require_leave_one_out(posterior: Any) -> None:
    """Raise :class:`UnsupportedError` where leave-one-out has no meaning for a posterior."""
    if "leave_one_out" not in posterior.tuners:
        what, fix = f"{type(posterior).__name__} has no leave-one-out predictions.", "Compare held-out predictions."
        raise UnsupportedError(what, expected="a Gaussian posterior that lp.LeaveOneOut can tune", fix=fix)
    if posterior.predictive_mean != "network":
        what = "Leave-one-out displaces the network's own outputs."
        raise UnsupportedError(what, got=posterior.predictive_mean, fix='Set predictive_mean = "network".')


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutTuning(TuningResult):
    """What a tuning by leave-one-out found; ``value`` is minus the mean leave-one-out NLL.

    Attributes:
        training_prior_precision: That of the displacement, before the leverage factor.
        precisions: The precisions tried, in ascending order, ``[G]``; factors where the precision has several entries.
        losses: The mean leave-one-out NLL of each, ``[G]``; infinite where leverages reached one.
    """

    training_prior_precision: Tensor
    precisions: Tensor
    losses: Tensor


@dataclass(frozen=True)
class LeaveOneOut:
    """Chooses the precision of least leave-one-out negative log-likelihood; see :mod:`laplace_plus.tuning`.

    The precision of *training* is another number, and must be known: pass ``training_prior_precision`` or
    ``weight_decay``. Gaussian noise stays as it is: set it before, as to that of
    :func:`~laplace_plus.tuning.noise_from_residuals`, or tune both by the default.

    Args:
        training_prior_precision: That of the displacement, for the loss summed over the data at the posterior's noise.
        weight_decay: Instead, of a classifier, the ``weight_decay`` of torch's SGD or Adam with the *mean* loss; as for
            :func:`laplace_plus.calibrate`. Takes one more pass, without derivatives.
        kappa: Factor on the precision of training in leverages and displacements. 1 is the formula. On small ReLU
            networks, whose weights are no exact optimum, 1 overshoots what retraining gives, and 2 comes closer.
        leverages: As for :func:`laplace_plus.leave_one_out`.
        grid: Precisions to try instead, positive. Where the posterior's precision has several entries, the search
            multiplies them by these as factors.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        data: The training data; by default the loaders of the fit.

    Raises:
        ConfigurationError: An option that is none of these, or the prior of training twice.
    """

    training_prior_precision: float | Tensor | None = None
    weight_decay: float | None = None
    kappa: float = 2.0
    leverages: Leverages = "own"
    grid: Sequence[float] | Tensor | None = None
    link: str | None = None
    n_samples: int = 100
    data: Iterable[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_training_prior(self.training_prior_precision, self.weight_decay)
        checks.positive("kappa", self.kappa)
        checks.choice("leverages", self.leverages, get_args(Leverages))
        checks.count("n_samples", self.n_samples)
        if self.grid is not None:
            checked_grid(self.grid)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> LeaveOneOutTuning:
        """Search the precision; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            ConfigurationError: Neither a precision nor a weight decay of training is given.
            DataError: Other data than were fitted to.
            NotPositiveDefiniteError: Leverages at or above one.
            UnsupportedError: The weight decay of no classifier.

        Warns:
            ConvergenceWarning: The best point lies at the end of the grid, and the loss still falls there; or a
                classifier fits its training data all but perfectly, so that leaving out tells nothing.
        """
        model = posterior.laplace_model()
        require_leave_one_out(posterior)
        data = posterior.training_data.again(self.data, "Leave-one-out passes over the training data.")
        precision = self.training_prior_precision
        if not check_training_prior(precision, self.weight_decay):
            raise unknown_training_prior()
        if self.weight_decay is not None:
            seen = survey(model, posterior.network, data, posterior.n_data, progress=progress)
            precision = precision_of_weight_decay(self.weight_decay, seen, model, posterior.temperature.detach())
        assert precision is not None
        training = as_hyperparameter(precision).detach()
        model.prior(training)  # raises for an unusable precision
        initial = posterior.prior_precision.detach()
        base = initial if initial.ndim else torch.ones((), dtype=torch.float64, device="cpu")
        if self.grid is None:
            centre = training.double().log10().mean().item() if initial.ndim == 0 else 0.0
            levels = torch.logspace(centre - 4, centre + 6, LEVELS, dtype=torch.float64, device="cpu")
        else:
            levels = checked_grid(self.grid).sort().values
        deletions = Deletions(posterior, data, self.kappa * training, self.leverages)
        options = {"progress": progress, **link_options(self, model.likelihood, generator)}
        losses = left_out_losses(deletions, [base * level for level in levels], **options)
        fit = -float(model.log_likelihood()) / deletions.n_rows
        if model.likelihood.is_classifier and fit < INTERPOLATION:
            warn(
                f"The network's training loss is {fit:.2g} nats: leaving out data that are fitted all but perfectly "
                "changes nothing, and tells nothing about new data. Tune by marginal likelihood, or on held-out data.",
                ConvergenceWarning,
            )
        best = int(losses.argmin())
        if not math.isfinite(float(losses[best])):
            what = "At every precision some leverage of the posterior reaches one, or its loss is not finite."
            got = f"precisions up to {float(levels[-1]):.3g}"
            fix = 'Pass a grid with larger precisions, or leverages="full", which leaves the posterior\'s covariance.'
            raise NotPositiveDefiniteError(what, got=got, fix=fix)
        return LeaveOneOutTuning(
            method="leave_one_out",
            prior_precision=(base * levels[best]).to(model.vector.dtype),
            noise_std=None,
            value=-float(losses[best]),
            converged=grid_settled(levels, losses, best, "leave_one_out", float(levels[best])),
            n_evaluations=len(levels),
            training_prior_precision=training,
            precisions=levels,
            losses=losses,
        )


def left_out_losses(
    deletions: Deletions, precisions: Sequence[Tensor], *, progress: bool, seed: int | None, **options: Any
) -> Tensor:
    """The mean loss at each of G precisions, ``[G]`` float64, infinite where leverages reach one, in one pass.

    Options are those of the link, with the ``seed`` of its random numbers.
    """
    likelihood, largest = deletions.model.likelihood, []
    totals = torch.zeros(len(precisions), dtype=torch.float64, device="cpu")
    for batch in deletions.batches(precisions, progress=progress):
        largest.append(batch.leverages)
        if bool((batch.leverages >= deletions.limit).any()):
            continue  # they are refused, once all are counted
        for number, leverages in enumerate(batch.own_leverages):
            if bool((leverages >= deletions.limit).any()):
                totals[number] = torch.inf
        targets, weight = likelihood.separate(batch.targets)
        for number in totals.isfinite().nonzero().flatten().tolist():
            covariance = batch.covariances[number]
            generator = None if seed is None else torch.Generator(device=covariance.device).manual_seed(seed)
            found = from_functional(likelihood, batch.mean, covariance, generator=generator, **options)
            totals[number] -= weighted_sum(found.log_prob(targets), weight)
    deletions.check(largest)
    return torch.where(totals.isfinite(), totals / deletions.n_rows, torch.inf)
