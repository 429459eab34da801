"""Tuning by the loss on held-out data.

The held-out data are passed over once: each batch's gradients are computed a single time and weighted for every point
of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.batches import iterate
from laplace_plus.errors import ConfigurationError, DataError, NonFiniteError
from laplace_plus.evidence.search import Objective
from laplace_plus.network import Network
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import MANY_OUTPUTS, Outputs, functional_posteriors
from laplace_plus.priors import as_hyperparameter

Loss = Callable[[Prediction, Tensor], Tensor]

FLAT = 1e-4
"""Nats per datum that the search does not try to gain."""


@dataclass(frozen=True)
class Found:
    """The best point of a grid; ``value`` is minus the mean loss, ``converged`` as :func:`settled` says."""

    precision: Tensor
    noise_std: Tensor | None
    value: float
    converged: bool
    n_evaluations: int


def negative_log_likelihood(prediction: Prediction, targets: Tensor) -> Tensor:
    """``−log p(y|x, D)`` of each datum, in nats."""
    return -prediction.log_prob(targets)


def validate(
    objective: Objective,
    network: Network,
    data: Iterable[Any] | None,
    *,
    initial: Tensor,
    loss: Loss = negative_log_likelihood,
    grid: Sequence[float] | Tensor | None = None,
    link: str | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Found:
    """Search a grid of prior precisions (and noise levels) for the least held-out loss.

    Args:
        objective: Which hyperparameters.
        network: The network.
        data: Held-out batches.
        initial: Where the precision has several entries, the grid multiplies it as a whole.
        loss: Maps a prediction and targets to losses, one for each datum (or their sum).
        grid: Factors to try; by default 21 from 1e-4 to 1e6 (absolute for a scalar precision).
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        generator: Source of randomness.
        progress: Whether to show a progress bar.

    Raises:
        ConfigurationError: No data, an empty grid, or a structure that a grid cannot search.
        DataError: All held-out targets are ignored.
        NonFiniteError: The loss is finite nowhere on the grid.
    """
    if data is None:
        raise ConfigurationError("Validation needs held-out data.", expected="data=loader", got="None")
    if objective.structure != "scalar":
        raise ConfigurationError(
            "A grid of held-out losses searches one precision.",
            expected='structure="scalar"',
            got=repr(objective.structure),
            fix='Tune several precisions by method="marginal_likelihood".',
        )
    levels = (
        torch.logspace(-4, 6, 21, device="cpu").tolist() if grid is None else as_hyperparameter(grid).double().tolist()
    )
    if not levels or min(levels) <= 0:
        raise ConfigurationError("The grid is not usable.", expected="positive factors", got=str(levels))
    model, likelihood = objective.model, objective.model.likelihood
    base = initial.detach() if initial.ndim else torch.ones_like(initial)
    if objective.tune_noise:
        residual = objective.residual_noise().exp()
        own = likelihood.noise_std
        noises = [residual * math.exp(s) for s in (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)]
        candidates = [likelihood.with_noise(n[0] if own is not None and own.ndim == 0 else n) for n in noises]
    else:
        candidates = [likelihood]
    points = [(base * level, candidate) for level in levels for candidate in candidates]
    factor_sets = model.factor_sets([(precision, like.noise_std) for precision, like in points], objective.temperature)
    # The probit link only looks at variances, and with many outputs covariances cost many times as much.
    many = model.n_outputs > MANY_OUTPUTS and (link or likelihood.links[0]) == "probit"
    outputs: Outputs = "diagonal" if many else None
    # A loss of the user's own may look at samples, whatever the link.
    draws = (link or likelihood.links[0]) == "mc" or loss is not negative_log_likelihood
    totals, count, n_targets = torch.zeros(len(points), dtype=torch.float64, device="cpu"), 0, 0.0
    source = "cpu" if generator is None else generator.device
    with torch.no_grad():
        for batch in iterate(data, device=network.device, progress=progress, description="validation"):
            functional = functional_posteriors(network, factor_sets, batch.inputs, outputs=outputs)
            likelihood.validate(functional[0].mean, batch.target)
            n_targets += likelihood.rows(functional[0].mean, batch.target)[2].sum().item()
            seed = int(torch.randint(2**62, (), generator=generator, device=source)) if draws else 0
            for number, ((_, candidate), (mean, covariance)) in enumerate(zip(points, functional, strict=True)):
                # The same random numbers for every point, so that they differ by their merits alone.
                common = torch.Generator(device=mean.device).manual_seed(seed)
                prediction = from_functional(
                    candidate, mean, covariance, link=link, n_samples=n_samples, generator=common
                )
                totals[number] += loss(prediction, batch.target).double().sum().cpu()
            count += functional[0].mean.shape[0]
    if not n_targets:
        raise DataError("All held-out targets are ignored.", expected="some that count", got="none")
    scores = torch.where(torch.isfinite(totals), totals / count, torch.inf)
    best = int(scores.argmin())
    if not math.isfinite(scores[best].item()):
        raise NonFiniteError(
            "The loss on the held-out data is finite nowhere on the grid.",
            expected="a finite loss for some of the points",
            got=f"NaN or Inf for all {len(points)}",
            fix="Look at what loss(prediction, targets) gives, and whether the held-out data are finite.",
        )
    precision, candidate = points[best]
    noise = candidate.noise_std if objective.tune_noise else None
    order = sorted(range(len(levels)), key=levels.__getitem__)
    least = scores.view(len(levels), -1).amin(1)[order]
    converged = settled(least, order.index(best // len(candidates)))
    return Found(precision, noise, -scores[best].item(), converged, len(points))


def settled(losses: Tensor, best: int) -> bool:
    """Whether the best point of an ascending grid lies between two others, or the loss is flat where the grid ends."""
    finite = losses.isfinite().tolist()
    inside = [at for at in (best - 1, best + 1) if 0 <= at < len(losses) and finite[at]]
    if len(inside) == 2:
        return True
    at_end = best in (0, len(losses) - 1)
    return at_end and len(inside) == 1 and float(losses[inside[0]] - losses[best]) < FLAT
