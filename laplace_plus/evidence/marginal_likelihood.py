"""Tuning by the Laplace evidence, the marginal likelihood at the network's own weights."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence.groups import check_structure, grouped_model
from laplace_plus.evidence.normalized_groups import NAME as NORMALISED
from laplace_plus.evidence.objective import Objective, ascend, fixed_point_step
from laplace_plus.evidence.tuning import Tunable, TuningResult, check_choice, check_counts, check_positive
from laplace_plus.priors import Groups


@dataclass(frozen=True)
class EvidenceTuner:
    """What the three tuners by the Laplace evidence share; see :class:`MarginalLikelihood`."""

    structure: str | Groups = "scalar"
    scaling: str | None = None
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)
    tolerance: float = 1e-3
    max_iterations: int = 2000

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_structure(self.structure)
        check_choice("scaling of the prior", self.scaling, (None, "g_prior"))
        check_positive(tolerance=self.tolerance)
        check_counts(max_iterations=self.max_iterations)
        if self.data is not None and self.structure != NORMALISED:
            raise ConfigurationError(
                f"{type(self).__name__} uses data for normalised groups only.",
                expected=f'structure="{NORMALISED}", or lp.Validation(data)',
                got=f"data= with structure={self.structure!r}",
            )

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Maximise the evidence; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            UnsupportedError: A prior that the posterior's structure does not take.
            DataError: Data are needed, and not at hand.

        Warns:
            ConvergenceWarning: The tolerance was not met, or only at the limits of the search.
        """
        model, structure, groups = grouped_model(posterior, self.structure, self.data)
        objective = Objective.create(model, structure, posterior.temperature, self.tune_noise, self.scaling)
        ticks = iter(progress_bar(itertools.count(), enabled=progress, description=f"tuning by {self.name}"))
        if self.name == "marginal_likelihood":
            value, point, evaluations = ascend(objective, objective.start(), self.tolerance, self.max_iterations, ticks)
            _, gradient = objective.value_and_gradient(point)
        else:
            point = objective.start()
            value, gradient = objective.value_and_gradient(point)
            evaluations = 0
            while evaluations < self.max_iterations:
                next(ticks)
                evaluations += 1
                if objective.free_gradient(point, gradient).abs().max() <= self.tolerance / 10:
                    break
                point = fixed_point_step(objective, point, gradient, self.name)
                value, gradient = objective.value_and_gradient(point)
        free = objective.free_gradient(point, gradient)
        norm, pressing = free.abs().max().item(), (gradient - free).abs().max().item()
        settled = norm <= self.tolerance or objective.predicted_gain(point, gradient) <= self.tolerance
        if pressing > self.tolerance:
            warn_of_limits(f"Tuning by {self.name}", pressing)
        elif not settled:
            warnings.warn(
                f"Tuning by {self.name} ended with a derivative of {norm:.2g} nats (tolerance {self.tolerance:.2g}) "
                f"after {evaluations} evaluations; raise max_iterations, or use lp.MarginalLikelihood.",
                ConvergenceWarning,
                stacklevel=5,
            )
        precision, noise = objective.split(point)
        precision, converged = precision.to(model.vector.dtype), settled and pressing <= self.tolerance
        return TuningResult(self.name, precision, noise, value, converged, norm, evaluations, groups=groups)


def warn_of_limits(what: str, pressing: float) -> None:
    """Warn that the evidence still rises at the end of the search; ``pressing`` is in nats for each e-fold."""
    warnings.warn(
        f"{what} ended at the limits of the search, where the evidence still rises by {pressing:.2g} nats for each "
        "e-fold of a hyperparameter: the data do not determine it. Is the fit exact?",
        ConvergenceWarning,
        stacklevel=6,
    )


@dataclass(frozen=True)
class MarginalLikelihood(EvidenceTuner):
    """Maximises the Laplace evidence by line-searched ascent; see :mod:`laplace_plus.evidence.laplace`.

    Args:
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` (one precision for each layer that feeds a
            normalisation, one for the last layer and one for the rest), ``"diagonal"`` where the curvature's structure
            allows one precision for each entry, or :class:`~laplace_plus.Groups`.
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
