"""Tuning by the Laplace evidence, the marginal likelihood at the network's own weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, warn
from laplace_plus.priors import Groups
from laplace_plus.tuning.base import Tunable, TuningResult
from laplace_plus.tuning.groups import check_structure
from laplace_plus.tuning.normalized_groups import NAME as NORMALISED
from laplace_plus.tuning.objective import EvidencePoint, Objective

RUNAWAY = 2.0
"""Ratio of a tuned noise to the training residuals from which tuning warns: then γ is more than ¾ of R."""


@dataclass(frozen=True)
class EvidenceTuner:
    """Options of the tuners by an evidence, and tuning by the Laplace evidence; see :class:`MarginalLikelihood`."""

    structure: str | Groups = "scalar"
    scaling: str | None = None
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)
    tolerance: float = 1e-3
    max_iterations: int = 2000

    name: ClassVar[str]
    passes_over_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_structure(self.structure)
        checks.choice("scaling of the prior", self.scaling, (None, "g_prior"))
        checks.positive("tolerance", self.tolerance)
        checks.count("max_iterations", self.max_iterations)
        if self.data is not None and self.structure != NORMALISED and not self.passes_over_data:
            what = f"{type(self).__name__} uses data for normalised groups only."
            expected = f'structure="{NORMALISED}", or lp.Validation(data)'
            raise ConfigurationError(what, expected=expected, got=f"data= with structure={self.structure!r}")

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Maximise the evidence; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            UnsupportedError: A prior that the posterior's structure does not take.
            DataError: Data are needed, and not at hand.

        Warns:
            ConvergenceWarning: The tolerance was not met, or only at the limits of the search; or the tuned noise is
                more than twice the training residuals, as γ takes more than three quarters of the data.
        """
        objective = Objective.create(posterior, self.structure, self.data, self.tune_noise, self.scaling)
        ticks = iter(progress_bar(itertools.count(1), enabled=progress, description=f"tuning by {self.name}"))
        now, count = objective.at(objective.start()), 0
        if self.name == "marginal_likelihood":
            now, count = now.ascend(self.tolerance, self.max_iterations, ticks)
        else:
            while count < self.max_iterations and now.norm > self.tolerance / 10:
                count, now = next(ticks), objective.at(now.fixed_point_step(self.name))
        advice = f"after {count} evaluations; raise max_iterations, or use lp.MarginalLikelihood"
        converged = now.has_converged(self.tolerance, f"Tuning by {self.name}", advice)
        precision, noise = objective.split(now.logarithms)
        if now.pressing <= self.tolerance:  # of which there was a warning
            warn_of_noise(now)
        precision, groups = precision.to(objective.model.vector.dtype), objective.groups
        return TuningResult(self.name, precision, noise, now.value, converged, now.norm, count, groups=groups)


@dataclass(frozen=True)
class MarginalLikelihood(EvidenceTuner):
    """Maximises the Laplace evidence by line-searched ascent; see :mod:`laplace_plus.tuning.laplace`.

    Args:
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` (one precision for each layer that feeds a
            normalisation, one for the last layer and one for the rest), ``"diagonal"`` where the curvature's structure
            allows one precision for each entry (in closed form where it is diagonal), or :class:`~laplace_plus.Groups`.
        scaling: ``"g_prior"`` multiplies each entry's precision by its diagonal entry of the curvature, so that one
            precision suits layers of all scales; where the curvature's structure allows one for each entry.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: Training data, for ``"normalized_groups"`` alone; by default the loaders of the fit.
        tolerance: In nats. Converged when no derivative of the evidence by a log hyperparameter exceeds this, or the
            best step along the gradient would gain less.
        max_iterations: Largest number of iterations.

    Raises:
        ConfigurationError: An option that is none of these.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.KFAC(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x + 0.1 * x.sin())])
        >>> posterior.fit_prior_precision(lp.MarginalLikelihood(structure="layerwise")).tuning.converged
        True
    """

    name: ClassVar[str] = "marginal_likelihood"


@dataclass(frozen=True)
class MacKay(EvidenceTuner):
    """Maximises the Laplace evidence by MacKay's (1992) fixed point; arguments as for :class:`MarginalLikelihood`."""

    name: ClassVar[str] = "mackay"


@dataclass(frozen=True)
class ExpectationMaximisation(EvidenceTuner):
    """Maximises the Laplace evidence by steps that never lower it; arguments as for :class:`MarginalLikelihood`."""

    name: ClassVar[str] = "em"


def warn_of_noise(now: EvidencePoint) -> None:
    """Warn where a noise that maximises an evidence is far above the residuals: γ takes most of the data."""
    objective = now.objective
    if not objective.tune_noise:
        return
    n, (errors, counts) = objective.n_precisions, objective.model.statistics.double().chunk(2)
    residual, noise = (errors / counts).sqrt(), now.logarithms[n:].exp()
    worst = int((noise / residual.clamp_min(1e-30)).argmax())
    own, left = float(noise[worst]), float(residual[worst])
    if own <= RUNAWAY * left:
        return
    spent = float(counts[worst] / objective.temperature.double().cpu()) * (1 - (left / own) ** 2)
    warn(
        f"The tuned noise of {own:.3g} is {own / max(left, 1e-30):.3g} times the training residuals ({left:.3g}): the "
        f"curvature counts {spent:.4g} of {int(counts[worst])} targets as spent, or the network interpolates. "
        "Use lp.tuning.noise_from_residuals(posterior), or tune on held-out data.",
        ConvergenceWarning,
    )
