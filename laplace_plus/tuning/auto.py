"""The default tuning: the marginal likelihood's precision, and a scale of the covariance that new data would choose.

The evidence of a network that fits its data well, or whose curvature is cut into blocks, may ask for more variance than
helps predictions. The default therefore scales the covariance, on training data alone:

1. The evidence gives a precision δ, at the noise of the residuals where there is noise.
2. Of the covariance's scales from 1 (10 for a part of the weights) to 10⁻⁴, each of two views of
   :mod:`laplace_plus.tuning.new_data` has one of least loss: one between neighbouring data, under the labels that new
   data would have there, and one at the data, under their own labels, with outputs that are told by other data.
3. The first, which sees labels that were learnt by heart, counts three times in the mean of their logarithms. The
   second holds it back where neighbours tell less than the network knows, which counts as the last scale. Where little
   is to be gained the next narrower scale is taken. Where both find the network's own probabilities best, the link
   ``"network"`` leaves these, and the posterior at scale 1 still says how unsure they are. A scale leaves the order of
   inputs by their uncertainty.

In regression residuals grow to what :func:`~laplace_plus.tuning.noise_from_residuals` finds for new data. The noise
then has the closed form of :class:`~laplace_plus.LeaveOneOut`, which neither vanishes with residuals nor runs away. The
largest scale within .005 nats of the best is taken, since wide posteriors serve in gaps between the data. A matrix over
all weights fits single data, so that V is small at them alone: there the covariance without the datum is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import DataError, NoGainWarning, UnseenRowsWarning, warn
from laplace_plus.network.batches import iterate
from laplace_plus.tuning import new_data
from laplace_plus.tuning.base import Tunable, TuningResult, tunes_noise
from laplace_plus.tuning.deletions import at_best_noise, leave_out, link_options, noise_terms, own_terms
from laplace_plus.tuning.marginal_likelihood import MarginalLikelihood
from laplace_plus.tuning.new_data import ENOUGH, TOLERANCE, Rows, Views, evenly, room, thinned
from laplace_plus.tuning.noise import NoiseEstimate, noise_from_residuals
from laplace_plus.tuning.settings import by_settings
from laplace_plus.tuning.unseen import Unseen, UnseenTuning
from laplace_plus.tuning.validation import Validation

SCALES = tuple(10 ** (-k / 4) for k in range(-4, 17))
"""Factors on the covariance; at the last one the variance of outputs is all but gone. Those above one are for a part
of the weights, which lacks the variance of the others."""

SURPRISED, FARTHER = 3.0, 1.1
"""Rows look unseen from so many standard errors of :func:`~laplace_plus.tuning.new_data.surprise`; in regression where
residuals are so many times the targets' own deviation: then their mean would predict better than the network."""


@dataclass(frozen=True, kw_only=True)
class AutoTuning(TuningResult):
    """What the default tuning chose; ``value`` is minus the mean loss that is expected of new data, or held out.

    Attributes:
        chosen: ``"marginal_likelihood"``, ``"new_data"`` (another scale or setting), ``"network"`` (predictions are the
            network's own, or all but them), ``"validation"``, or ``"fit"`` where settings stay.
        why: A sentence.
        expected_gain: Over the network's own predictions (in regression, over those at the last scale, with the noise
            that is best there), in nats for each observation; NaN where it is not known.
        evidence: The tuning by the marginal likelihood; None for ``"validation"``.
        scales: Factors on the covariance that were compared, or variances of outputs of settings, G of them.
        losses: The mean loss of each at the data, ``[G]``; of classes also that of the network, ``[G + 1]``, and ∞ for
            scales that are far wider than the best.
        between_losses: The mean loss of each and of the network between data, ``[G + 1]``; None without.
        wrong_labels: The rate of wrong labels that was found; None without a view between data.
    """

    chosen: str
    why: str
    expected_gain: float = math.nan
    evidence: TuningResult | None = None
    scales: tuple[float, ...] = ()
    losses: Tensor | None = None
    between_losses: Tensor | None = None
    wrong_labels: float | None = None


@dataclass(frozen=True)
class Auto:
    """The default: at least as good as the network by what training data tell of new data; see the module's text.

    With held-out ``data`` it is :class:`~laplace_plus.Validation`. The training data are drawn once more from the
    loader of the fit, so that random augmentation is as good. If these look unseen, it is :class:`~.Unseen`.

    Args:
        data: Held-out batches; None for training data alone.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        seen: Whether the rows of the fit are known to be training data, so that their losses are not asked.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None
    seen: bool = False

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> AutoTuning | UnseenTuning:
        """Choose by what new data would lose; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            DataError: Regression, and other data than were fitted to.

        Warns:
            NoGainWarning: Training data are not at hand, or the network's own predictions are the best.
            UnseenRowsWarning: The rows of the fit look unseen.
            ConvergenceWarning: The evidence's tuning did not converge.
        """
        if self.data is not None:
            tuner = Validation(self.data, link=self.link, n_samples=self.n_samples, tune_noise=self.tune_noise)
            found = tuner.tune(posterior, progress=progress, generator=generator)
            return AutoTuning(**{**vars(found), "method": "auto"}, chosen="validation", why="Held-out data were given.")
        if hasattr(posterior, "tunables"):
            own_way = by_settings(self, posterior, progress=progress, generator=generator)
            if own_way["chosen"] != "new_data":
                warn(f"{own_way['why']} Held-out data= would tell more.", NoGainWarning)
            return AutoTuning(**own_way)
        model = posterior.laplace_model()
        own = copy.copy(posterior)  # which shares what the model computes
        noisy = tunes_noise(model.likelihood, self.tune_noise) and model.likelihood.is_gaussian
        if noisy:
            residual = model.residual_noise().exp().to(model.vector)
            own.noise_std = residual if own.noise_std.ndim else residual.mean()
        evidence = MarginalLikelihood(tune_noise=False if noisy else self.tune_noise).tune(own, progress=progress)
        own.apply_tuning(evidence)
        missing = "The rows of a batch depend on each other" if model.likelihood.couples_rows else ""
        try:
            data = posterior.training_data.again(None, "The default tuning passes over the training data.")
        except DataError:
            missing = "The training data are not at hand"
        if missing:
            why = f"{missing}, so that nothing was compared with the network."
            warn(f"{why} Held-out data= would tell.", NoGainWarning)
            alone = vars(MarginalLikelihood(tune_noise=self.tune_noise).tune(posterior, progress=progress))
            return AutoTuning(**{**alone, "method": "auto"}, chosen="marginal_likelihood", why=why, evidence=evidence)
        trained = sum(one.numel() for one in own.network.model.parameters() if one.requires_grad)
        scales = SCALES if own.network.n_parameters < trained else SCALES[SCALES.index(1.0) :]
        options = link_options(self, model.likelihood, generator)
        if noisy:
            estimate = noise_from_residuals(own)
            choose = partial(_of_regression, own, data, estimate, scales, progress)
            ratio = max(0.0, *(estimate.residual_std / estimate.target_std).nan_to_num(0.0, 0.0).flatten().tolist())
            far = ratio > FARTHER and own.n_data >= new_data.FEWEST
            doubt = f"its residuals are {ratio:.3g} times the deviation of the targets" if far else ""
            if estimate.is_honest and own.n_data >= new_data.FEWEST:
                doubt = "its residuals are far below left-out errors, and training has left no marks in them"
        else:
            rows = new_data.rows_of(own.network, own.likelihood, data, own.n_data, progress=progress)
            choose = partial(_of_views, Views(own, scales, options), rows)
            z = 0.0 if rows is None else new_data.surprise(own.likelihood, rows)
            doubt = f"their loss is {z:.3g} standard errors above what it expects" if z > SURPRISED else ""
        if doubt and not self.seen and (by_folds := self._by_folds(posterior, doubt, progress, generator)):
            return by_folds
        chosen: dict[str, Any] = {"noise_std": evidence.noise_std, **choose()}
        if chosen["chosen"] == "network":
            warn(f"{chosen['why']} Held-out data= would tell more.", NoGainWarning)
        return AutoTuning(
            method="auto",
            converged=evidence.converged,
            n_evaluations=evidence.n_evaluations + len(scales),
            groups=evidence.groups,
            evidence=evidence,
            scales=scales,
            **chosen,
        )

    def _by_folds(
        self, posterior: Tunable, doubt: str, progress: bool, generator: torch.Generator | None
    ) -> UnseenTuning | None:
        """The tuning of rows that look unseen, with a warning; None where none of them can be left out."""
        tuner = Unseen(link=self.link, n_samples=self.n_samples, tune_noise=self.tune_noise)
        try:
            found = tuner.tune(posterior, progress=progress, generator=generator)
            done = 'Tuned as by "unseen"; if they are training data, pass seen=True.'
        except DataError as failure:
            found, done = None, f'"unseen" could not tune, and the default took them for training data: {failure}'
        warn(f"The network does not seem to have seen these rows: {doubt}. {done}", UnseenRowsWarning)
        return found


_WHY = {
    "unknown": "The training data tell little of what new data would lose, so that the network predicts.",
    "marginal_likelihood": "No other scale of the covariance is expected to lose less on new data.",
    "new_data": "{:.3g} times the evidence's covariance is expected to lose least on new data.",
    "network": "No posterior is expected to lose less on new data than the network, which predicts.",
    "regression": "{:.3g} times the evidence's covariance is the widest of which new data lose all but least.",
}


def _of_views(views: Views, rows: Rows | None) -> dict[str, Any]:
    """The scale that both views choose together, and what they found, as fields of the result."""
    place, known, notes, fields = views.choose(rows)
    network = place == len(views.scales)
    is_own = network and views.has_network
    scale = 1.0 if is_own or not known else views.scales[min(place, len(views.scales) - 1)]
    chosen = "network" if network else "marginal_likelihood" if scale == 1 else "new_data"
    return {
        **fields,
        "prior_precision": views.own.prior_precision.detach(),
        "link": "network" if is_own else None,
        "covariance_scale": scale,
        "chosen": chosen,
        "why": _WHY[chosen if known else "unknown"].format(scale) + notes,
    }


def _of_regression(
    own: Tunable, data: Iterable[Any], estimate: NoiseEstimate, scales: tuple[float, ...], progress: bool
) -> dict[str, Any]:
    """The widest scale that loses all but least, with the noise that belongs to it, as fields of the result."""
    likelihood, size, n_data = own.likelihood, own.n_outputs, own.n_data
    first = next(iter(iterate(data, device=own.network.device)))
    rows = n_data * own.network.forward(first.inputs)[0, ..., 0].numel()  # examples times positions
    share = min(1.0, ENOUGH / n_data, room(own) / rows)
    most = max(1, int(ENOUGH / (share * n_data)))  # positions of each example
    parts: list[tuple[Tensor, ...]] = []
    generator = torch.Generator().manual_seed(0)  # for covariances that are estimated
    for batch in thinned(iterate(data, device=own.network.device, progress=progress, description="new data"), share):
        found = own.functional_posterior(batch.inputs, generator=generator)
        likelihood.validate(found.mean, batch.target)
        mean, targets, weight = likelihood.rows(found.mean.double(), batch.target)
        kept = weight.nonzero()[:, 0]
        kept = kept[evenly(len(kept), most * len(found.mean), kept.device)]
        mean, targets, weight = mean[kept], targets[kept], weight[kept]
        covariance = found.covariance.reshape(-1, size, size)[kept].double()
        if own.structure.name == "full":
            covariance = _without_own(own, mean, targets, weight, covariance)
        parts.append(
            (targets, (estimate.noise_std / estimate.residual_std).to(mean) * (targets - mean), weight, covariance)
        )
    targets, residuals, weight, covariance = (torch.cat(column) for column in zip(*parts, strict=True))
    terms = torch.stack([noise_terms(likelihood, residuals, weight, scale * covariance) for scale in scales])
    losses, factors = at_best_noise(terms, float((weight[:, None] * likelihood.observed(targets)).sum()))
    losses = losses / float(weight.sum())
    best = int((losses <= losses.min() + TOLERANCE).nonzero()[0])
    value, last, scale, noise = float(losses[best]), float(losses[-1]), scales[best], float(factors[best])
    chosen = "network" if scale < 1 and last <= value else "marginal_likelihood" if scale == 1 else "new_data"
    return {
        "prior_precision": own.prior_precision.detach() / noise**2,
        "noise_std": own.noise_std * noise,
        "value": -value,
        "covariance_scale": scale,
        "chosen": chosen,
        "why": _WHY["regression"].format(scale)
        + (" Without any covariance it is no larger." if chosen == "network" else "")
        + (f" {estimate.problem}" if estimate.problem else ""),
        "expected_gain": last - value,
        "losses": losses,
    }


def _without_own(own: Tunable, mean: Tensor, targets: Tensor, weight: Tensor, covariance: Tensor) -> Tensor:
    """Covariances ``[n, C, C]`` by a matrix over all weights, without each row's own term where leverages allow."""
    terms = own_terms(own.likelihood, own.temperature, mean, targets, weight)
    leverages, _, left = leave_out(covariance, *terms)
    below = (leverages < 1 - 16 * torch.finfo(own.network.dtype).eps).all(-1)
    return torch.where(below[:, None, None], left, covariance)
