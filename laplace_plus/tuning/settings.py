"""The default tuning of posteriors that name in ``tunables()`` what stands in for a prior precision.

Candidates, one for each setting and ordered by the mean variance of their outputs, are compared on the training data as
:mod:`laplace_plus.tuning.auto` compares scales, by samples of their own predictions: in the two views of
:mod:`laplace_plus.tuning.new_data`, or in regression at targets ``f + r (y − f)`` and each at its best noise, with r by
how much residuals grow for new data by :func:`~laplace_plus.tuning.noise_from_residuals`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import DataError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import can_be_cut, cut, iterate
from laplace_plus.predictive.from_outputs import from_samples
from laplace_plus.tuning import new_data
from laplace_plus.tuning.base import Tunable, tunes_noise
from laplace_plus.tuning.new_data import TOLERANCE, Losses, Score, Views, thinned
from laplace_plus.tuning.noise import noise_from_residuals
from laplace_plus.tuning.validation import Settings, Validation

DRAWS, FEW = 20, 100
"""Samples of each candidate, the same ones for all, and examples at which their variances are taken."""


@dataclass(frozen=True)
class SettingViews(Views):
    """The views of candidates, whose ``scales`` are the mean variances of their outputs."""

    candidates: tuple[Any, ...]
    seed: int
    most = new_data.POINTS

    @override
    def losses_at(self, parts: list[Any], place: Tensor | None, outputs: Tensor | None, score: Score) -> Losses:
        network = torch.cat([self.own.network.forward(x).flatten(0, -2) for x in parts])
        drawn = [torch.cat([_drawn(one, x, self.seed).flatten(1, -2) for x in parts], 1) for one in self.candidates]
        drawn.append(network[None])
        if place is not None and outputs is not None:  # what others tell of the network moves its samples
            drawn = [one[:, place] + (outputs - network[place]).to(one) for one in drawn]
        likelihood = self.own.likelihood
        return Losses(lambda one: float(score(from_samples(likelihood, drawn[one]))), len(drawn), worse=math.inf)


def _drawn(candidate: Any, x: Any, seed: int) -> Tensor:
    """Samples of a candidate's outputs, ``[S, B, *, C]``."""
    return candidate.predictive(x, n_samples=DRAWS, generator=torch.Generator().manual_seed(seed)).functional_samples


def by_settings(tuner: Any, posterior: Tunable, *, progress: bool, generator: torch.Generator | None) -> dict[str, Any]:
    """The settings of least loss on new data, as fields of :class:`~.AutoTuning`; ``tuner`` is an ``Auto``."""
    own, likelihood, seed = copy.copy(posterior), posterior.likelihood, draw_seed(generator)
    fields: dict[str, Any] = {"method": "auto", "prior_precision": own.prior_precision.detach(), "noise_std": None}
    fields |= {"value": float("nan"), "converged": True, "chosen": "fit"}
    missing = "The rows of a batch depend on each other" if likelihood.couples_rows else ""
    try:
        data = posterior.training_data.again(None, "The default tuning passes over the training data.")
    except DataError:
        missing = "The training data are not at hand"
    if missing:
        return fields | {"why": f"{missing}, so that all stays as it is."}
    first = next(iter(iterate(data, device=own.network.device))).inputs
    few = cut(first, slice(FEW)) if can_be_cut(first, len(own.network.forward(first))) else first
    with torch.no_grad():
        noisy = tunes_noise(likelihood, tuner.tune_noise) and likelihood.is_gaussian
        validation = Validation(_stand_ins(own, data) if noisy else data, n_samples=DRAWS, tune_noise=noisy)
        settings = Settings(validation, own)
        widths = torch.stack([_drawn(one, few, seed).var(0, correction=0).mean() for one in settings.candidates])
        order = widths.double().argsort(descending=True, stable=True).tolist()
        network, notes = order[-1], ""  # or what is nearest to it
        if noisy:
            losses = validation.losses(settings, own, progress, generator).view(len(order), -1)
            least = losses.amin(1)
            place = next(number for number in order if least[number] <= least.min() + TOLERANCE)
            fields |= {"value": -float(least[place]), "expected_gain": float(least[network] - least[place])}
            fields |= {"losses": least[order], "noise_std": settings.likelihoods[int(losses[place].argmin())].noise_std}
        else:
            moving = [number for number in order if widths[number] > 0]
            rows = new_data.rows_of(own.network, likelihood, data, own.n_data, progress=progress)
            scales, candidates = tuple(widths[moving].tolist()), tuple(settings.candidates[number] for number in moving)
            views = SettingViews(own, scales, {"link": None}, candidates, seed)
            at, known, notes, found = views.choose(rows)
            place, fields = [*moving, network][at], fields | found
            if not known:
                return fields | {"why": f"The training data tell little of new data, so that all stays.{notes}"}
    values = dict(zip(settings.names, settings.values[place], strict=True))
    text = ", ".join(f"{name} = {value:.3g}" for name, value in values.items())
    fields |= {"settings": values, "scales": tuple(widths[order].tolist()), "n_evaluations": len(settings.points)}
    if place == network:
        why = f"No setting is expected to lose less on new data than the network: {text}.{notes}"
        return fields | {"chosen": "network", "why": why}
    fields["converged"] = place != order[0]  # wider ones may lose less
    return fields | {"chosen": "new_data", "why": f"With {text} new data are expected to lose least.{notes}"}


def _stand_ins(own: Any, data: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Training data with residuals as large as those of new data; the noise of ``own`` becomes that of these."""
    network, likelihood = own.network, own.likelihood
    found, made = noise_from_residuals(own), []
    own.noise_std = found.noise_std
    ratio = found.noise_std / found.residual_std.clamp_min(torch.finfo(found.residual_std.dtype).eps)
    for batch in thinned(iterate(data, device=network.device), min(1.0, new_data.ROWS / own.n_data)):
        outputs, weight = network.forward(batch.inputs), likelihood.separate(batch.target)[1]
        flat, targets, _ = likelihood.rows(outputs, batch.target)
        moved = (flat + ratio.to(flat) * (targets - flat)).view(outputs.shape)
        made.append((batch.inputs, moved if weight is None else (moved, weight)))
    return made
