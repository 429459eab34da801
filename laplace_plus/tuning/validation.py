"""Tuning by the loss on held-out data, on a grid.

The held-out data are passed over once. Each batch's gradients are computed a single time, and their quadratic forms
with the covariances of all points of the grid are taken together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, DataError, NonFiniteError, warn
from laplace_plus.io.passes import Sums, summed
from laplace_plus.network.batches import iterate
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import functional_posteriors, outputs_for
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable, TuningResult
from laplace_plus.tuning.objective import Objective

Loss = Callable[[Prediction, Tensor], Tensor]

FLAT = 1e-4
"""Nats per datum that a grid does not try to gain; less than the standard error on any held-out set of real size."""


@dataclass(frozen=True)
class Validation:
    """Chooses the least loss on held-out data, on a grid of precisions and, in regression, noise levels.

    :class:`~laplace_plus.NullSpace` has its own grid, and :class:`~laplace_plus.MetricBNN` chooses its ``extent``
    in place of a precision; these say which of the options they take.

    Args:
        data: Held-out batches.
        structure: Only ``"scalar"``; a prior precision with several entries is multiplied as a whole.
        grid: Precisions to try, positive; factors where the present precision has several entries. By default 21 from
            1e-4 to 1e6.
        loss: Maps a prediction and targets to losses, one for each datum (or their sum); by default
            ``−log p(y|x, D)``.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.

    Raises:
        ConfigurationError: No data, an unusable grid, or a structure that a grid cannot search.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    structure: str = "scalar"
    grid: Sequence[float] | Tensor | None = None
    loss: Loss | None = None
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None

    def __post_init__(self) -> None:
        if self.data is None:
            raise ConfigurationError("Validation needs held-out data.", expected="data=loader", got="None")
        if self.structure != "scalar":
            fix = "Tune several precisions by marginal_likelihood."
            raise ConfigurationError("A grid of held-out losses searches one precision.", got=self.structure, fix=fix)
        checks.count("n_samples", self.n_samples)
        if not (self.loss is None or callable(self.loss)):
            expected = "loss(prediction, targets) -> losses, or None for the negative log-probability"
            raise ConfigurationError("The loss is no function.", expected=expected, got=repr(self.loss))
        if self.grid is not None:
            checked_grid(self.grid)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Search the grid; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            DataError: All held-out targets are ignored.
            NonFiniteError: The loss is finite nowhere on the grid.

        Warns:
            ConvergenceWarning: The best point lies at the end of the grid, and the loss still falls there.
        """
        model, network = posterior.laplace_model(), posterior.network
        objective = Objective.create(posterior, "scalar", tune_noise=self.tune_noise)
        likelihood, temperature = model.likelihood, objective.temperature
        levels = torch.logspace(-4, 6, 21, device="cpu") if self.grid is None else checked_grid(self.grid)
        initial = posterior.prior_precision.detach()
        base = initial if initial.ndim else torch.ones_like(initial)
        candidates = [likelihood]
        if objective.tune_noise:
            residual, own = objective.residual_noise().exp(), likelihood.noise_std
            noises = [residual * math.exp(s) for s in (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)]
            candidates = [likelihood.with_noise(n[0] if own is not None and own.ndim == 0 else n) for n in noises]
        points = [(base * level, candidate) for level in levels.tolist() for candidate in candidates]
        factor_sets = model.factor_sets([(precision, like.noise_std) for precision, like in points], temperature)
        link = self.link or likelihood.links[0]
        outputs = outputs_for(link, model.n_outputs)
        # A loss of the user's own may look at samples, whatever the link.
        draws = link == "mc" or self.loss is not None
        loss = self.loss or (lambda prediction, targets: -prediction.log_prob(targets))
        totals = torch.zeros(len(points), dtype=torch.float64, device="cpu")
        sums = Sums(totals=totals, count=0, n_targets=0.0)
        source = "cpu" if generator is None else generator.device
        assert self.data is not None
        with torch.no_grad():
            loader = iterate(self.data, device=network.device, progress=progress, description="validation")
            for batch in summed("validation", loader, sums):
                functional = functional_posteriors(
                    network, factor_sets, batch.inputs, outputs=outputs, layouts=model.curvature.layouts
                )
                likelihood.validate(functional[0].mean, batch.target)
                sums.n_targets += likelihood.rows(functional[0].mean, batch.target)[2].sum().item()
                seed = int(torch.randint(2**62, (), generator=generator, device=source)) if draws else 0
                for number, ((_, candidate), (mean, covariance)) in enumerate(zip(points, functional, strict=True)):
                    # The same random numbers for every point, so that they differ by their merits alone.
                    common = torch.Generator(device=mean.device).manual_seed(seed)
                    options: Any = {"link": self.link, "n_samples": self.n_samples, "generator": common}
                    prediction = from_functional(candidate, mean, covariance, **options)
                    sums.totals[number] += loss(prediction, batch.target).double().sum().cpu()
                sums.count += functional[0].mean.shape[0]
        if not sums.n_targets:
            raise DataError("All held-out targets are ignored.", expected="some that count", got="none")
        scores = torch.where(torch.isfinite(sums.totals), sums.totals / sums.count, torch.inf)
        best = int(scores.argmin())
        if not math.isfinite(scores[best].item()):
            fix = "Look at what loss(prediction, targets) gives, and whether the held-out data are finite."
            raise NonFiniteError("The loss on the held-out data is finite nowhere on the grid.", fix=fix)
        precision, candidate = points[best]
        by_level = scores.view(len(levels), -1).amin(1)
        converged = grid_settled(levels, by_level, best // len(candidates), "validation", float(precision.mean()))
        noise = candidate.noise_std if objective.tune_noise else None
        return TuningResult("validation", precision, noise, -scores[best].item(), converged, n_evaluations=len(points))


def checked_grid(grid: Sequence[float] | Tensor) -> Tensor:
    """A grid's positive values, ``[n]`` float64 on the CPU, in the order given; else a ``ConfigurationError``."""
    levels = as_hyperparameter(grid).detach().double().cpu().flatten()
    if not len(levels) or not bool((levels > 0).all() and levels.isfinite().all()):
        raise ConfigurationError("The grid is not usable.", expected="positive numbers", got=str(levels.tolist()))
    return levels


def grid_settled(levels: Tensor, losses: Tensor, best: int, method: str, chosen: float) -> bool:
    """Whether the best point of a grid lies between two finite others, or the loss ``[n]`` is flat where it ends.

    ``best`` is the number of the best point; ``method`` and the ``chosen`` precision are for the warning.
    """
    order = levels.argsort()
    losses, place = losses[order], int((order == best).nonzero())
    inside = [losses[at] for at in (place - 1, place + 1) if 0 <= at < len(losses) and bool(losses[at].isfinite())]
    at_end = len(inside) == 1 and place in (0, len(losses) - 1)
    settled = len(inside) == 2 or at_end and float(inside[0] - losses[place]) < FLAT  # noqa: PLR2004
    if not settled:
        warn(
            f"Tuning by {method} ended at {chosen:.3g}, the last point of the grid that can be used, and the loss may "
            "still fall beyond: the data do not determine the precision, or the grid is too short.",
            ConvergenceWarning,
        )
    return settled
