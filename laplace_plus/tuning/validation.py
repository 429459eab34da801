"""Tuning by the loss on held-out data, on a grid.

The held-out data are passed over once, and each batch is predicted at every point of the grid. Of a Gaussian posterior
the points are precisions: a batch's gradients are computed a single time, and their quadratic forms with the
covariances of all points are taken together. Any other posterior names in ``tunables()`` what stands in for a
precision, and its own ``predictive`` is scored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NonFiniteError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import spread
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import functional_posteriors, outputs_for
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable, TuningResult, tunes_noise

Loss = Callable[[Prediction, Tensor], Tensor]

FLAT = 1e-4
"""Nats per datum that a grid does not try to gain; less than the standard error on any held-out set of real size."""


@dataclass(frozen=True)
class Validation:
    """Chooses the least loss on held-out data, on a grid of precisions and, in regression, noise levels.

    A posterior with a method ``tunables() -> dict[str, Sequence]`` is tuned by other attributes than the precision of a
    Gaussian: copies of the posterior have each attribute at each value of its grid, in all combinations, and their
    ``predictive`` is scored with the same random numbers; noise levels share a prediction's samples. The result's
    ``settings`` are the chosen ones, which ``fit_prior_precision`` sets on the posterior.

    Args:
        data: Held-out batches.
        grid: Precisions to try, positive; factors where the present precision has several entries. By default 21 from
            1e-4 to 1e6. Of a posterior with ``tunables()``, values of the last of these.
        loss: Maps a prediction and targets to losses, one for each datum (or, without weights, their sum); by default
            ``−log p(y|x, D)``.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.

    Raises:
        ConfigurationError: No data, or an unusable grid.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    grid: Sequence[float] | Tensor | None = None
    loss: Loss | None = None
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None

    def __post_init__(self) -> None:
        if self.data is None:
            raise ConfigurationError("Validation needs held-out data.", expected="data=loader", got="None")
        checks.count("n_samples", self.n_samples)
        if self.grid is not None:
            checked_grid(self.grid, zero=True)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Search the grid; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            NonFiniteError: The loss is finite nowhere on the grid, or all held-out targets are ignored.

        Warns:
            ConvergenceWarning: The best point lies at the end of the grid, and the loss still falls there.
        """
        own = hasattr(posterior, "tunables")
        candidates = Settings(self, posterior) if own else _Precisions(self, posterior)
        losses = self.losses(candidates, posterior, progress, generator)
        best = int(losses.argmin())
        if not math.isfinite(losses[best].item()):
            fix = "Look at what loss(prediction, targets) gives, and whether any held-out target is finite and counts."
            raise NonFiniteError("The loss on the held-out data is finite nowhere on the grid.", fix=fix)
        values, likelihood = candidates.points[best]
        settings = dict(zip(candidates.names, values, strict=True))
        precision = settings.pop("prior_precision", posterior.prior_precision.detach())
        levels, place = candidates.levels, best // len(candidates.likelihoods) % len(candidates.levels)
        by_level = losses.view(-1, len(levels), len(candidates.likelihoods)).amin((0, 2))
        method = "validation" if candidates.names == ("prior_precision",) else ""
        chosen = float(torch.as_tensor(values[-1]).mean())
        converged = chosen == 0 or grid_settled(levels, by_level, place, method, chosen)
        return TuningResult(
            method="validation",
            prior_precision=precision,
            noise_std=likelihood.noise_std if len(candidates.likelihoods) > 1 else None,
            value=-losses[best].item(),
            converged=converged,
            n_evaluations=len(candidates.points),
            settings=settings,
        )

    def losses(
        self,
        candidates: _Precisions | Settings,
        posterior: Tunable,
        progress: bool,
        generator: torch.Generator | None,
    ) -> Tensor:
        """The mean held-out loss at each point, float64, infinite where it is not finite."""
        loss = self.loss or (lambda prediction, targets: -prediction.log_prob(targets))
        totals, count = torch.zeros(len(candidates.points), dtype=torch.float64, device="cpu"), 0.0
        assert self.data is not None
        with torch.no_grad():
            loader = iterate(self.data, device=posterior.network.device, progress=progress, description="validation")
            for batch in loader:
                seed = draw_seed(generator)
                for number, prediction in enumerate(candidates.predictions(batch.inputs, seed)):
                    if number == 0:
                        outputs = prediction.functional_mean
                        posterior.likelihood.validate(outputs, batch.target)
                        count += float(posterior.likelihood.rows(outputs, batch.target)[2].sum())
                        target, weight = posterior.likelihood.separate(batch.target)
                    totals[number] += weighted_sum(loss(prediction, target), weight)
        losses = totals / count  # NaN where all targets are ignored
        return torch.where(torch.isfinite(losses), losses, torch.inf)


def weighted_sum(values: Tensor, weight: Tensor | None) -> Tensor:
    """``Σ w v`` of values ``[B, *]``, float64 on the CPU; weights ``[B]`` or ``[B, *]``, None for ones."""
    if weight is not None:
        lead = values.shape[: weight.dim()]
        checks.shape("The weights of the losses", weight, lead, "Let the loss return one number for each datum.")
        values = values * spread(weight, values.shape).to(values)
    return values.double().sum().cpu()


class _Precisions:
    """A Gaussian posterior's precisions and noise levels, whose predictions share a batch's gradients.

    ``points`` are pairs of the values of the attributes ``names`` and of a likelihood; likelihoods vary first.
    """

    names = ("prior_precision",)

    def __init__(self, tuner: Validation, posterior: Tunable):
        self._tuner, self._network, model = tuner, posterior.network, posterior.laplace_model()
        self._n_outputs, self._layouts = model.n_outputs, model.curvature.layouts
        likelihood, initial = model.likelihood, posterior.prior_precision.detach()
        self.levels = torch.logspace(-4, 6, 21, device="cpu") if tuner.grid is None else checked_grid(tuner.grid)
        base = initial if initial.ndim else torch.ones_like(initial)
        self.likelihoods = [likelihood]
        if tunes_noise(likelihood, tuner.tune_noise):
            self.likelihoods = _at_noises(likelihood, model.residual_noise(), (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0))
        self.points = [((base * level,), one) for level in self.levels.tolist() for one in self.likelihoods]
        pairs = [(precision, one.noise_std) for (precision,), one in self.points]
        self._factor_sets = model.factor_sets(pairs, posterior.temperature.detach())
        self._link = tuner.link or likelihood.links[0]

    def predictions(self, inputs: Any, seed: int) -> Iterator[Prediction]:
        """The prediction at each point, with the same random numbers: they differ by their merits alone."""
        outputs = outputs_for(self._link, self._n_outputs)
        joint = self.likelihoods[0].couples_rows
        chosen: Any = {"outputs": None if joint else outputs, "joint": joint, "layouts": self._layouts}
        found = functional_posteriors(self._network, self._factor_sets, inputs, **chosen)
        for (_, likelihood), (mean, covariance) in zip(self.points, found, strict=True):
            common = torch.Generator(device=mean.device).manual_seed(seed)
            options: Any = {"link": self._tuner.link, "n_samples": self._tuner.n_samples, "joint": joint}
            yield from_functional(likelihood, mean, covariance, generator=common, **options)


class Settings:
    """All combinations of what a posterior names in ``tunables()``; attributes as of :class:`_Precisions`."""

    def __init__(self, tuner: Validation, posterior: Any):
        self._posterior, grids = posterior, dict(posterior.tunables())
        self._options = {"n_samples": tuner.n_samples, "joint": posterior.likelihood.couples_rows}
        self._options |= {} if tuner.link is None else {"link": tuner.link}
        self.names = tuple(grids)
        if tuner.grid is not None:
            grids[self.names[-1]] = checked_grid(tuner.grid, zero=True).tolist()
        if "prior_precision" in grids:
            initial = posterior.prior_precision
            grids["prior_precision"] = [torch.as_tensor(value).to(initial) for value in grids["prior_precision"]]
        self.levels = torch.tensor([float(value) for value in grids[self.names[-1]]], dtype=torch.float64)
        self.likelihoods = [posterior.likelihood]
        if tunes_noise(posterior.likelihood, tuner.tune_noise):
            quarters = [step * math.log(2) / 4 for step in range(-4, 5)]
            self.likelihoods = _at_noises(posterior.likelihood, posterior.noise_std.log(), quarters)
        self.values = list(product(*grids.values()))
        self.points = [(values, one) for values in self.values for one in self.likelihoods]
        self.candidates = [copy.copy(posterior) for _ in self.values]
        for candidate, values in zip(self.candidates, self.values, strict=True):
            for name, value in zip(self.names, values, strict=True):
                setattr(candidate, name, value)

    def predictions(self, inputs: Any, seed: int) -> Iterator[Prediction]:
        """As of :class:`_Precisions`; noise levels share the samples of a prediction."""
        for candidate in self.candidates:
            found = candidate.predictive(inputs, generator=torch.Generator().manual_seed(seed), **self._options)
            for likelihood in self.likelihoods:
                same = likelihood is self._posterior.likelihood
                yield found if same else replace(found, likelihood=likelihood.of_new_targets)


def _at_noises(likelihood: Likelihood, log_noise: Tensor, shifts: Sequence[float]) -> list[Likelihood]:
    """The likelihood at noise levels around one, given by its logarithm, one for all outputs or ``[n_noise]``."""
    single = likelihood.noise_std is not None and likelihood.noise_std.ndim == 0
    noises = [(log_noise + shift).exp() for shift in shifts]
    return [likelihood.with_noise(noise.flatten()[0] if single else noise) for noise in noises]


def checked_grid(grid: Sequence[float] | Tensor, *, zero: bool = False) -> Tensor:
    """A grid's positive values, ``[n]`` float64 on the CPU, in the order given; else a ``ConfigurationError``."""
    levels = as_hyperparameter(grid).detach().double().cpu().flatten()
    usable = levels.isfinite() & ((levels >= 0) if zero else (levels > 0))
    if not len(levels) or not bool(usable.all()):
        raise ConfigurationError("The grid is not usable.", expected="positive numbers", got=str(levels.tolist()))
    return levels


def grid_settled(levels: Tensor, losses: Tensor, best: int, method: str, chosen: float) -> bool:
    """Whether the best point of a grid lies between two finite others, or the loss ``[n]`` is flat where it ends.

    ``best`` is the number of the best point; ``method`` and the ``chosen`` precision are for the warning, if any.
    """
    order = levels.argsort()
    losses, place = losses[order], int((order == best).nonzero())
    inside = [losses[at] for at in (place - 1, place + 1) if 0 <= at < len(losses) and bool(losses[at].isfinite())]
    at_end = len(inside) == 1 and place in (0, len(losses) - 1)
    settled = len(inside) == 2 or at_end and float(inside[0] - losses[place]) < FLAT  # noqa: PLR2004
    if method and not settled:
        warn(
            f"Tuning by {method} ended at {chosen:.3g}, the last point of the grid that can be used, and the loss may "
            "still fall beyond: the data do not determine the precision, or the grid is too short.",
            ConvergenceWarning,
        )
    return settled
