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
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.calibration import CalibratedPosterior
from laplace_plus.applications.noise import NoisePosterior
from laplace_plus.errors import DataError, UnsupportedError
from laplace_plus.likelihoods.base import refuse_several_targets
from laplace_plus.network.batches import batch_size, iterate
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
    """

    posterior: Posterior | CalibratedPosterior | NoisePosterior
    score: str
    level: float
    thresholds: Tensor
    by: str | Grouping | None

    def __repr__(self) -> str:
        return f"ConformalPosterior({self.posterior!r}, score={self.score!r}, level={self.level})"

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


def conformalize(
    posterior: Posterior | CalibratedPosterior | NoisePosterior,
    data: Iterable[Any],
    *,
    level: float = 0.9,
    score: str | None = None,
    by: str | Grouping | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> ConformalPosterior:
    """Sets or intervals with a guaranteed coverage, from held-out data; see :mod:`laplace_plus.applications.conformal`.

    Args:
        posterior: A fitted and tuned posterior, a calibrated one, or one with a learnt noise; the result keeps a copy.
        data: Held-out batches, which neither training nor tuning has seen.
        level: The probability with which sets are to hold a new target, strictly between 0 and 1.
        score: ``"threshold"`` (the default of classes), ``"adaptive"``, ``"regularized"``; ``"scaled"`` (of numbers),
            ``"residual"``, ``"quantile"``.
        by: Thresholds for groups, within each of which the level then holds (Mondrian): ``"class"``, or a function from
            inputs to integers ``[B]`` from 0 on.
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
    inner = posterior.posterior if isinstance(posterior, (CalibratedPosterior, NoisePosterior)) else posterior
    likelihood = posterior.likelihood if isinstance(posterior, NoisePosterior) else inner.likelihood
    known = CLASS_SCORES if likelihood.is_classifier else NUMBER_SCORES
    score = known[0] if score is None else score
    checks.choice("score", score, known)
    checks.number("level", level, above=0.0, most=1.0 - 2**-53)
    if by is not None and not callable(by):
        checks.choice("grouping", by, ("class",) if likelihood.is_classifier else ())
    found, n_classes = [], 1
    for batch in iterate(data, device=inner.network.device, progress=progress, description="conformal scores"):
        prediction = posterior.predictive(batch.inputs, generator=generator)
        likelihood.validate(prediction.functional_mean, batch.target)
        _, targets, share = likelihood.rows(prediction.functional_mean, batch.target)
        if likelihood.is_classifier:
            each = _class_scores(prediction, score, generator)
            if targets.numel() != len(each):
                raise DataError("Soft labels have no score.", expected="class indices", got="probabilities")
            labels, n_classes = targets.reshape(-1).nan_to_num(0).long(), each.shape[1]
            each = each.gather(1, labels[:, None])[:, 0]
        else:
            if not isinstance(targets, Tensor):
                refuse_several_targets(likelihood, targets)
            values = targets[..., 0] if targets.dim() > 2 else targets  # noqa: PLR2004 - given noise
            each = _number_scores(prediction, values, score, level)
            share = share[:, None] * ~each.isnan()
        group = labels.cpu() if by == "class" else _groups_of(batch.inputs, by, len(each))
        kept = share.reshape(len(each), -1).any(1)
        found.append((each[kept].double().cpu(), share[kept].double().cpu(), group[kept.cpu()]))
    scores, share, group = map(torch.cat, zip(*found, strict=True))
    checks.count("The number of targets that count", len(scores))
    n_groups = n_classes if by == "class" else 1 + int(group.max())
    thresholds = scores.new_full((n_groups, *scores.shape[1:]), math.inf)
    for one in group.unique().tolist():
        thresholds[one] = threshold(scores[group == one], level, share[group == one])
    return ConformalPosterior(copy.copy(posterior), score, float(level), thresholds, by)


def threshold(scores: Tensor, level: float, share: Tensor) -> Tensor:
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


def _number_scores(prediction: Prediction, values: Tensor, score: str, level: float) -> Tensor:
    """The score of each number, ``[N, C]``."""
    values = values.view(prediction.mean.shape)
    if score == "quantile":
        low, high = prediction.interval(level)
        found = torch.maximum(low - values, values - high)
    else:
        found = (values - prediction.mean).abs() / (prediction.std if score == "scaled" else 1.0)
    return found.flatten(0, -2)
