"""A network with rows that it was not trained on, the ways to be unsure of its predictions, and their scores.

Of each half some rows are fitted and others tested. ``last layer`` and ``KFAC`` are two lines: ``fit(rows)`` and
``fit_prior_precision()``, the default or ``"unseen"``; ``noise head`` is ``lp.learn_noise`` behind ``"unseen"``.
``feature distance`` is a temperature or a constant noise, and doubts by ``lp.FeatureDistance`` to the fitted rows.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp

BATCH = 100
DISTANCE = "feature distance"
BASELINES = {
    "classification": ("network", "temperature", DISTANCE),
    "regression": ("constant noise", "noise by group", DISTANCE),
}
TUNERS = {"default": "auto", "unseen": "unseen", "noise head": "unseen"}


@dataclass
class Problem:
    """A network and rows, of which some are of kinds that it was never trained on (``known`` is false).

    Args:
        likelihood: ``"classification"`` or ``"regression"``.
        network: What KFAC takes, a module of one batch of inputs.
        inputs: Its inputs, each ``[N, ...]``.
        head: A linear last layer, at the end of the network.
        features: What enters the head, ``[N, D]``; made once, which counts as one pass.
        targets: Class numbers ``[N]``, or values ``[N, 1]``.
        groups: An obvious group of each row, ``[N]``.
        known: Which rows are of a kind that the network knows, ``[N]``.
        forward_seconds: Of the whole network, for a row.
        n_fit, n_test: Rows of a half that are fitted and tested.
        from_features: Whether the network's inputs are themselves of one pass over the rows.
    """

    likelihood: str
    network: nn.Module
    inputs: tuple[Tensor, ...]
    head: nn.Module
    features: Tensor
    targets: Tensor
    groups: Tensor
    known: Tensor
    forward_seconds: float
    n_fit: int = 1000
    n_test: int = 1500
    from_features: bool = False

    @property
    def methods(self) -> list[str]:
        """Labels of rows of the table."""
        tuners = list(TUNERS)[: 3 if self.likelihood == "regression" else 2]
        own = [f"{name}, {tuner}" for name in ("last layer", "KFAC") for tuner in tuners]
        return [*BASELINES[self.likelihood], *own]


@dataclass
class Half:
    """A random split of the rows; fits are kept between methods."""

    problem: Problem
    seed: int
    fits: dict[str, tuple[Any, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own, source = self.problem, torch.Generator().manual_seed(self.seed)
        rows = own.known.nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=source)]
        self.fitted, self.tested = rows[: own.n_fit], rows[own.n_fit :][: own.n_test]
        strange = (~own.known).nonzero()[:, 0]
        self.strange = strange[torch.randperm(len(strange), generator=source)][:300]

    def row(self, method: str) -> dict[str, Any]:
        """Scores of a method, and its seconds in forwards of the whole network over the rows it was given."""
        torch.manual_seed(self.seed)
        if method in BASELINES[self.problem.likelihood]:
            predict, seconds, passes, chosen = self.baseline(method), 0.0, 1.0, ""
        else:
            predict, seconds, chosen = self.posterior(*method.split(", "))
            passes = float(method.startswith("last layer") or self.problem.from_features)
        started = time.process_time()
        found, strange = predict(self.tested), predict(self.strange) if len(self.strange) else None
        seconds += time.process_time() - started
        rows = len(self.fitted) + len(self.tested) + len(self.strange)
        score = class_scores if self.problem.likelihood == "classification" else value_scores
        scores = score(*found, self.problem.targets[self.tested], None if strange is None else strange[2])
        return scores | {"forwards": seconds / (rows * self.problem.forward_seconds) + passes, "chosen": chosen}

    def baseline(self, method: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Predictions, their variances in regression, and doubts without a posterior."""
        own, rows = self.problem, self.fitted
        with torch.no_grad():
            outputs = own.head(own.features)
        far = None
        if method == DISTANCE:
            head = lp.Diagonal(own.head, own.likelihood)
            far = lp.FeatureDistance(head, [(own.features[rows], own.targets[rows])])(own.features)
        if own.likelihood == "classification":
            heat = 1.0 if method == "network" else temperature(outputs[rows], own.targets[rows])
            probabilities = (outputs / heat).softmax(-1)
            doubt = entropy(probabilities) if far is None else far
            return lambda chosen: (probabilities[chosen], doubt[chosen], doubt[chosen])
        squares = (outputs - own.targets).square()
        variance = squares[rows].mean().expand(len(outputs), 1).clone()
        if method == "noise by group":
            for group in own.groups[rows].unique():
                same = rows[own.groups[rows] == group]
                if len(same) > 5:  # noqa: PLR2004
                    variance[own.groups == group] = squares[same].mean()
        doubt = variance if far is None else far[:, None]
        return lambda chosen: (outputs[chosen], variance[chosen], doubt[chosen])

    def posterior(
        self, structure: str, tuner: str
    ) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], float, str]:
        """Predictions of the two lines, seconds of fit and tuning, and what tuning chose."""
        own, last = self.problem, structure == "last layer"
        inputs: tuple[Tensor, ...] = (own.features,) if last else own.inputs

        def batch(rows: Tensor) -> Any:
            taken = tuple(column[rows] for column in inputs)
            return taken if len(taken) > 1 else taken[0]

        data = [(batch(rows), own.targets[rows]) for rows in self.fitted.split(BATCH)]
        if structure not in self.fits:
            started = time.process_time()
            fit = lp.KFAC(own.head if last else own.network, own.likelihood).fit(data)
            self.fits[structure] = fit, time.process_time() - started
        fit, seconds = self.fits[structure]
        started = time.process_time()
        posterior = copy.copy(fit).fit_prior_precision(TUNERS[tuner])
        chosen = str(getattr(posterior.tuning, "chosen", ""))
        if tuner == "noise head":
            posterior = lp.learn_noise(posterior, data)
            chosen = posterior.report.chosen
        seconds += time.process_time() - started
        return partial(predicted, posterior, batch), seconds, chosen


def predicted(posterior: Any, batch: Callable[[Tensor], Any], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the predictive, and twice its entropies of classes or variances."""
    found = [posterior.predictive(batch(some)) for some in rows.split(BATCH)]
    means = torch.cat([one.mean for one in found])
    doubt = entropy(means) if means.shape[-1] > 1 else torch.cat([one.variance for one in found])
    return means.detach(), doubt.detach(), doubt.detach()


def temperature(logits: Tensor, labels: Tensor) -> float:
    """That of least loss."""
    heats = torch.linspace(-1.0, 2.0, 121).exp()
    losses = torch.stack([nn.functional.cross_entropy(logits / heat, labels) for heat in heats])
    return float(heats[losses.argmin()])


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, ``[n]``."""
    return torch.special.entr(probabilities).sum(-1)


def auroc(doubt: Tensor, bad: Tensor) -> float:
    """The probability that a bad row is more doubtful than another one; ties count half."""
    ranks = doubt.double().unique(return_inverse=True, return_counts=True)
    middle = ranks[2].cumsum(0) - (ranks[2] - 1) / 2
    n_bad = int(bad.sum())
    return float((middle[ranks[1]][bad].sum() - n_bad * (n_bad + 1) / 2) / (n_bad * (len(bad) - n_bad)))


def shared_scores(errors: Tensor, bad: Tensor, doubt: Tensor, strange: Tensor | None) -> dict[str, Any]:
    """How doubt ranks errors, and rows of kinds that the network does not know."""
    order = (doubt + 1e-9 * doubt.mean() * torch.rand(len(doubt))).argsort()  # ties in random order
    kinds = None
    if strange is not None:
        kinds = auroc(torch.cat([doubt, strange]), torch.arange(len(doubt) + len(strange)) >= len(doubt))
    return {"auroc": auroc(doubt, bad), "surest": float(errors[order[: len(order) * 4 // 5]].mean()), "kinds": kinds}


def class_scores(mean: Tensor, _: Tensor, doubt: Tensor, labels: Tensor, strange: Tensor | None) -> dict[str, Any]:
    """NLL, ECE of 15 bins, and ranking; the worst tenth are those of greatest loss, errors are wrong classes."""
    losses = -mean.gather(1, labels[:, None]).clamp_min(1e-12).log()[:, 0]
    sure, chosen = mean.max(-1)
    right = (chosen == labels).float()
    bins = (sure * 15).long().clamp(max=14)
    gaps = [(sure - right)[bins == number].sum().abs() for number in range(15)]
    scores = {"nll": float(losses.mean()), "calibration": float(sum(gaps)) / len(labels)}
    return scores | shared_scores(1 - right, losses > losses.quantile(0.9), doubt, strange)


def value_scores(
    mean: Tensor, variance: Tensor, doubt: Tensor, targets: Tensor, strange: Tensor | None
) -> dict[str, Any]:
    """NLL, coverage of 90 % intervals, and ranking; the worst tenth have the greatest absolute errors."""
    errors, variance = (mean - targets).abs()[:, 0], variance[:, 0]
    nll = (0.5 * (2 * math.pi * variance).log() + 0.5 * errors.square() / variance).mean()
    scores = {"nll": float(nll), "calibration": float((errors < 1.6449 * variance.sqrt()).float().mean())}
    doubts = None if strange is None else strange[:, 0]
    return scores | shared_scores(errors, errors > errors.quantile(0.9), doubt[:, 0], doubts)


def features_of(network: nn.Module, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """What enters the head for each row, and the seconds of a row in the network."""
    found: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0].detach()))
    started = time.process_time()
    with torch.no_grad():
        for rows in torch.arange(len(inputs[0])).split(BATCH):
            network(*(column[rows] for column in inputs))
    hook.remove()
    return torch.cat(found), (time.process_time() - started) / len(inputs[0])
