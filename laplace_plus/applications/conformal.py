"""Conformal prediction: sets of classes and intervals that hold a new target with a chosen probability.

With scores ``s_1 … s_n`` of held-out data, the threshold q is the ``⌈(n + 1) level⌉``-th smallest, or ∞ beyond n. If
those data and a new one are exchangeable, the new score is at most q with a probability of at least ``level``, whatever
the posterior; without ties it is ``⌈(n + 1) level⌉ / (n + 1)`` (Vovk et al., 2005). A better posterior makes sets
smaller. The probability is over all inputs, not at each, and nothing is promised for inputs of another distribution.

Scores of a class k with probability ``p_k`` and rank ``r_k`` (1 for the most probable), with u uniform in [0, 1):

* ``"threshold"``: ``1 − p_k`` (Sadinle et al., 2019);
* ``"adaptive"``: ``Σ_{p_j > p_k} p_j + u p_k`` (Romano et al., 2020);
* ``"regularized"``: that plus ``.01 max(0, r_k − 5)`` (Angelopoulos et al., 2021).

Scores of a number y with predictive mean m, deviation s and central interval ``[a, b]`` at the level:

* ``"scaled"``: ``|y − m| / s``; ``"residual"``: ``|y − m|``;
* ``"quantile"``: ``max(a − y, y − b)`` (Romano et al., 2019).

**Streams that drift.** :meth:`ConformalPosterior.adapt` moves the level ``l`` that thresholds are taken at, as targets
come in, by ``l ← l + rate Σ (missed − (1 − level))`` (Gibbs and Candès, 2021). Whatever the stream, the share of misses
among T targets in batches of B then differs from ``1 − level`` by ``(1 + rate B) / (rate T)`` at most.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.mixtures import predictor
from laplace_plus.applications.serving import freeze
from laplace_plus.checks import describe
from laplace_plus.errors import DataError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import batch_size, iterate, to_device
from laplace_plus.persistence import stored
from laplace_plus.posteriors import Posterior
from laplace_plus.posteriors.storing import save
from laplace_plus.predictive import Prediction

CLASS_SCORES = ("threshold", "adaptive", "regularized")
NUMBER_SCORES = ("scaled", "residual", "quantile")

Grouping = Callable[[Any], Tensor]
"""From a batch's inputs to the group of each example, integers ``[B]``."""


@stored
@dataclass(frozen=True, eq=False, repr=False)
class ConformalPosterior:
    """A posterior with thresholds for sets or intervals; see :func:`conformalize`. Predictions stay as they are.

    Attributes:
        posterior: A copy of the posterior, of that moment; it must not be tuned or fitted again.
        score: The name of the score.
        level: The probability with which a new target is to be held.
        thresholds: By group q ``[G]``, for numbers ``[G, C]``, float64 on the CPU; one group without ``by``.
        by: None, ``"class"`` or a function of the inputs.
        scores: The latest scores ``[n]``, for numbers ``[n, C]``, NaN where nothing was observed; None with ``by``.
        current: The level of :meth:`adapt`, 0-d or ``[C]``; None before.
    """

    posterior: Any
    score: str
    level: float
    thresholds: Tensor
    by: str | Grouping | None
    scores: Tensor | None = None
    current: Tensor | None = None

    def __repr__(self) -> str:
        return f"ConformalPosterior({self.posterior!r}, score={self.score!r}, level={self.level})"

    @property
    def likelihood(self) -> Likelihood:
        """That of the posterior."""
        return self.posterior.likelihood

    def predictive(self, x: Any, **options: Any) -> Prediction:
        """That of the posterior."""
        return self.posterior.predictive(x, **options)

    def predict_set(self, x: Any, *, generator: torch.Generator | None = None) -> Tensor:
        """Which classes each input's set holds, boolean ``[B, *, C]``; a set may be empty.

        ``generator`` is the source of randomness, of u too.

        Raises:
            UnsupportedError: The posterior is no classifier.
        """
        prediction = self._predict(x, CLASS_SCORES, generator)
        scores = _class_scores(prediction, self.score, generator)
        limits = self.thresholds if self.by == "class" else self._limits(x, len(scores))[:, None]
        return (scores <= limits.to(scores)).view(*prediction.mean.shape[:-1], -1)

    def interval(self, x: Any, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Both ends of each target's interval, ``[B, *, C]``; errors as of :meth:`predict_set`, for classes."""
        prediction = self._predict(x, NUMBER_SCORES, generator)
        mean = prediction.mean
        limit = self._limits(x, mean[..., 0].numel()).to(mean).view(mean.shape)
        if self.score == "quantile":
            low, high = prediction.interval(self.level)
            return low - limit, high + limit
        limit = limit * prediction.std if self.score == "scaled" else limit
        return mean - limit, mean + limit

    def adapt(self, x: Any, y: Any, *, rate: float = 0.02, generator: Any = None) -> ConformalPosterior:
        """One with thresholds for what comes after a batch, from as many latest scores; UnsupportedError with ``by``.

        Args:
            x: The inputs, which sets or intervals were given for.
            y: Their targets, now known, as of a loader; each counts once.
            rate: How far a target moves the level: larger rates follow a drift sooner, less steadily.
            generator: Source of randomness.
        """
        checks.positive("rate", rate)
        if self.scores is None:
            raise UnsupportedError("Thresholds by groups do not adapt.", expected="by=None", got=f"by={self.by!r}")
        prediction = self.posterior.predictive(x, generator=generator)
        each, share, _ = _scores(prediction, self.posterior.likelihood, y, self.score, self.level, generator)
        each = each.where(share > 0, math.nan)
        missed = (each > self.thresholds[0]).double().sum(0) - (1 - self.level) * (share > 0).sum(0)
        current = (self.level if self.current is None else self.current) + rate * missed
        scores = torch.cat([self.scores, each])[-len(self.scores) :]
        limits = threshold(scores, current, (~scores.isnan()).double()).where(current > 0, -math.inf)
        return replace(self, thresholds=limits[None], scores=scores, current=current)

    def freeze(self, x: Any = None, link: str | None = None) -> FrozenConformal:
        """A module for serving; as :func:`laplace_plus.freeze`, and not with random scores or ``by`` a function."""
        if not isinstance(self.posterior, Posterior) or callable(self.by) or self.score in CLASS_SCORES[1:]:
            expected = "a posterior itself, by=None or 'class', and a score without random numbers"
            got = f"{type(self.posterior).__name__}, by={self.by!r}, score={self.score!r}"
            raise UnsupportedError("These sets or intervals cannot be frozen.", expected=expected, got=got)
        return FrozenConformal(freeze(self.posterior, x, link), self)

    def save(self, path: str | Path) -> None:
        """Write the posterior with its thresholds, which :func:`laplace_plus.load` reads; errors as of its ``save``.

        Thresholds by a function cannot be stored.
        """
        save(self, path)

    def _predict(self, x: Any, scores: tuple[str, ...], generator: torch.Generator | None) -> Prediction:
        if self.score not in scores:
            method = "predict_set" if self.score in CLASS_SCORES else "interval"
            raise UnsupportedError(f"The score {self.score!r} has none.", fix=f"Call {method}(x).")
        return self.posterior.predictive(x, generator=generator)

    def _limits(self, x: Any, n_rows: int) -> Tensor:
        """The threshold of each row; ∞ for groups that were not seen."""
        known = torch.cat([self.thresholds, torch.full_like(self.thresholds[:1], math.inf)])
        return known[_groups_of(x, self.by, n_rows).clamp_max(len(self.thresholds))]


class FrozenConformal(nn.Module):
    """A frozen posterior with sets or intervals, called as the network is; see :meth:`ConformalPosterior.freeze`."""

    def __init__(self, frozen: nn.Module, conformal: ConformalPosterior):
        super().__init__()
        self.frozen, self.score, self.likelihood = frozen, conformal.score, conformal.posterior.likelihood
        self.register_buffer("thresholds", conformal.thresholds.squeeze(0).to(conformal.posterior.network.device))
        self.half_width = float(scipy.special.ndtri((1 + conformal.level) / 2))

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Any, ...]:
        """The :class:`FrozenPrediction` of a batch's inputs and their sets, or it and both ends of their intervals."""
        found: Any = self.frozen(*inputs, **keywords)
        limit: Any = self.thresholds
        if self.score == "threshold":
            p = self.likelihood.class_probabilities(found.mean).double()
            return found, (1 - p <= limit).view(*found.mean.shape[:-1], -1)
        limit, std = limit.to(found.mean), found.variance.sqrt()
        limit = {"scaled": limit * std, "residual": limit}.get(self.score, self.half_width * std + limit)
        return found, found.mean - limit, found.mean + limit


def conformalize(
    posterior: Any,
    data: Iterable[Any],
    *,
    level: float = 0.9,
    score: str | None = None,
    by: str | Grouping | None = None,
    likelihood: Any = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> ConformalPosterior:
    """Sets or intervals with a guaranteed coverage, from held-out data; see :mod:`laplace_plus.applications.conformal`.

    Args:
        posterior: A fitted and tuned posterior, a calibrated one, one with a learnt noise, or an ensemble, of which the
            result keeps a copy; or a bare network, with ``likelihood``.
        data: Held-out batches, which neither training nor tuning has seen.
        level: The probability with which sets are to hold a new target, strictly between 0 and 1.
        score: ``"threshold"`` (the default of classes), ``"adaptive"``, ``"regularized"``; ``"scaled"`` (of numbers),
            ``"residual"``, ``"quantile"``.
        by: Thresholds for groups, within each of which the level then holds (Mondrian): ``"class"``, or a function from
            inputs to integers ``[B]`` from 0 on.
        likelihood: That of a bare network, as for :class:`Posterior`; of ``"regression"`` the noise is fitted to data.
        progress: Whether to show a progress bar.
        generator: Source of randomness.

    Raises:
        NotFittedError: Before ``fit``.
        ConfigurationError: Another score or level, no target that counts, or groups that are none.
        UnsupportedError: Several binary outputs.
        DataError: Soft labels.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> low, high = lp.conformalize(posterior, [(x, 2 * x)], level=0.8).interval(x)
        >>> float(((low <= 2 * x) & (2 * x <= high)).float().mean()) >= 0.8
        True
    """
    posterior = predictor(posterior, likelihood, data)
    likelihood = posterior.likelihood
    known = CLASS_SCORES if likelihood.is_classifier else NUMBER_SCORES
    score = known[0] if score is None else score
    checks.choice("score", score, known)
    checks.number("level", level, above=0.0, most=1.0 - 2**-53)
    if by is not None and not callable(by):
        checks.choice("grouping", by, ("class",) if likelihood.is_classifier else ())
    found = []
    for batch in iterate(data, device="cpu", progress=progress, description="conformal scores"):
        prediction = posterior.predictive(batch.inputs, generator=generator)
        each, share, targets = _scores(prediction, likelihood, batch.target, score, level, generator)
        group = targets.nan_to_num(0).long().cpu() if by == "class" else _groups_of(batch.inputs, by, len(each))
        kept = share.reshape(len(each), -1).any(1)
        found.append((each[kept], share[kept], group[kept.cpu()]))
    scores, share, group = map(torch.cat, zip(*found, strict=True))
    checks.count("The number of targets that count", len(scores))
    n_groups = likelihood.class_probabilities(prediction.mean).shape[1] if by == "class" else 1 + int(group.max())
    thresholds = scores.new_full((n_groups, *scores.shape[1:]), math.inf)
    for one in group.unique().tolist():
        thresholds[one] = threshold(scores[group == one], level, share[group == one])
    latest = scores.where(share > 0, math.nan)[-10_000:].clone() if by is None else None  # for streams
    return ConformalPosterior(copy.copy(posterior), score, float(level), thresholds, by, latest)


def threshold(scores: Tensor, level: float | Tensor, share: Tensor) -> Tensor:
    """The ``⌈(n + 1) level⌉``-th smallest of scores ``[n, *]``, along their first axis; ∞ beyond n.

    Each is there as often as its ``share [n, *]`` says; those of share 0, NaN among them, are not.
    """
    scores = scores.where(share > 0, math.inf)
    order = scores.argsort(0)
    reached = share.gather(0, order).cumsum(0)
    enough = reached >= (reached[-1] + 1) * level - 1e-9  # which rounding would lift
    return scores.gather(0, order).where(enough, math.inf).amin(0)


def _groups_of(x: Any, by: Any, n_rows: int) -> Tensor:
    if not callable(by):
        return torch.zeros(n_rows, dtype=torch.long)
    groups = checks.shape("The groups of a batch", by(x), [batch_size(x)]).long().cpu()
    checks.count("The least number of a group", int(groups.min()), 0)
    return groups.repeat_interleave(n_rows // len(groups))


def observed(
    prediction: Prediction, likelihood: Likelihood, target: Any, *, several: bool = False
) -> tuple[Tensor, Tensor]:
    """Labels ``[N]`` or numbers ``[N, C]`` of a batch's targets, and how often each counts; DataError for others.

    No numbers, ``[N, 0]``, of ``several`` targets, where these are allowed; else UnsupportedError.
    """
    outputs = prediction.functional_mean
    target = to_device(target, outputs.device)
    likelihood.validate(outputs, target)
    _, targets, share = likelihood.rows(outputs, target)
    if likelihood.is_classifier:
        if targets.numel() != len(likelihood.class_probabilities(prediction.mean)):
            raise DataError("Soft labels have no score.", expected="class indices", got="probabilities")
        return targets.flatten(), (share[:, None] * ~targets.reshape(len(share), -1).isnan()).flatten()
    if not isinstance(targets, Tensor):
        if several:
            return share.new_empty(len(share), 0), share[:, None]
        expected, fix = "one tensor as a target", "Take predictive(x).log_prob(y), or lp.evaluate."
        likelihood.lacks("gives several targets no common score", expected=expected, got=describe(target), fix=fix)
    values = (targets[..., 0] if targets.dim() > 2 else targets).reshape(len(share), -1)  # noqa: PLR2004 - given noise
    return values, share[:, None] * ~values.isnan()


def _scores(
    prediction: Prediction, likelihood: Likelihood, target: Any, score: str, level: float, generator: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of targets ``[N]`` or ``[N, C]`` and how often each counts, float64 on the CPU; and the targets."""
    targets, share = observed(prediction, likelihood, target)
    if likelihood.is_classifier:
        labels = targets.nan_to_num(0).long()[:, None]
        each = _class_scores(prediction, score, generator).gather(1, labels)[:, 0]
    else:
        values = targets.view(prediction.mean.shape)
        if score == "quantile":
            low, high = prediction.interval(level)
            each = torch.maximum(low - values, values - high)
        else:
            each = (values - prediction.mean).abs() / (prediction.std if score == "scaled" else 1.0)
        each = each.flatten(0, -2)
    return each.double().cpu(), share.double().cpu(), targets


def _class_scores(prediction: Prediction, score: str, generator: torch.Generator | None) -> Tensor:
    """The score of each class, ``[N, C]``."""
    p = prediction.likelihood.class_probabilities(prediction.mean).double()
    if len(p) != prediction.mean[..., 0].numel():
        raise UnsupportedError("Several binary outputs have no set.", expected="one label for each observation")
    if score == "threshold":
        return 1 - p
    ordered = p.sort(descending=True).values
    first = torch.searchsorted(-ordered, -p.contiguous())  # how many are more probable: equal ones share a rank
    above = torch.nn.functional.pad(ordered.cumsum(1), (1, 0)).gather(1, first)
    device = p.device if generator is None else generator.device
    u = torch.rand(len(p), 1, generator=generator, device=device, dtype=p.dtype).to(p.device)
    penalty = 0.01 * (first - 4).clamp_min(0) if score == "regularized" else 0.0
    return above + u * p + penalty
