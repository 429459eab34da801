"""The evidence of the tangent linear model at its own optimum, and tuning by it.

The Laplace evidence assumes that the network's weights are an optimum of the penalised loss. Networks that are stopped
early, or trained with normalisation layers, are not at an optimum, and the Laplace evidence can then prefer absurd
priors. The network's tangent ``h(θ, x) = f(θ̃, x) + J(x) (θ − θ̃)`` is a linear model with the same Jacobian. It has an
optimum θ* for every prior. Its evidence (Antorán et al., "Adapting the linearised Laplace model evidence for modern
deep learning", 2022) has θ* in place of the network's weights:

    M(Λ) = log p(D | h(θ*))/T − ½ ‖θ* − μ₀‖²_Λ − ½ log det(I + Λ⁻¹ H/T),
    θ*   = argmin_θ −log p(D | h(θ))/T + ½ ‖θ − μ₀‖²_Λ.

H is the posterior's own curvature at the network's outputs: the simple variant of that paper, which did better there.

As θ* is a minimiser, ``∂M/∂log λ_g = ½ (γ_g − λ_g ‖θ* − μ₀‖²_g)`` with the effective parameters
``γ_g = tr (H/T + Λ)⁻¹_g H_g/T``. Where it vanishes, MacKay's (1992) fixed point ``λ_g = γ_g / ‖θ* − μ₀‖²_g`` holds.
This joint stationary point of θ and Λ is found by alternation. Each half maximises

    F(θ, Λ) = log p(D | h(θ))/T − ½ ‖θ − μ₀‖²_Λ − ½ log det(I + Λ⁻¹ H/T)

over one argument, in which it is concave (in log Λ; see :mod:`laplace_plus.tuning.marginal_likelihood`), so F never
falls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.tuning.base import Tunable, TuningResult
from laplace_plus.tuning.laplace import survey
from laplace_plus.tuning.marginal_likelihood import EvidencePoint, EvidenceTuner, Objective, knows_precisions
from laplace_plus.tuning.tangent_model import TangentModel, TangentOptimum, tangent_optimum

_COARSE = 0.1
"""Accuracy of the first optimum, in nats: a first update of the precisions gains far more than this."""

_REFINED = 1e-2
"""Least ratio of the accuracies of two optima that follow each other: where θ stays as it is, derivatives vanish by
chance, and a far more accurate θ for precisions that still change would be lost work."""

_NEAR = 1e-4
"""Derivatives up to which fixed-point steps replace line searches, which compare values and so resolve the root of
their rounding error alone."""


@dataclass(frozen=True, kw_only=True)
class TangentResult(TuningResult):
    """What tuning by the tangent model's evidence found, and how.

    Attributes:
        effective_parameters: γ, how many parameters of each group the data determine, ``[G]``; for a scalar prior [1].
        n_iterations: Number of alternations.
        n_steps: Number of steps that the convex optimisation took, over all alternations.
        trace: The evidence M after each alternation.
        network_value: The evidence of the network's own weights at the same hyperparameters, for comparison.
    """

    effective_parameters: Tensor
    n_iterations: int
    n_steps: int
    trace: tuple[float, ...]
    network_value: float


@dataclass(frozen=True)
class Tangent(EvidenceTuner):
    """Maximises the evidence of the network's linearisation at its own optimum.

    See :mod:`laplace_plus.tuning.tangent`. Choose it for networks that were stopped early, or that have normalisation
    layers, of which ``structure="normalized_groups"`` gives each normalised layer a precision of its own.

    Args:
        structure: As for :class:`~laplace_plus.MarginalLikelihood`.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: The training data; by default the loaders of the fit.
        tolerance: Converged when no derivative of the evidence by the logarithm of a hyperparameter exceeds this, in
            nats.
        max_iterations: The number of alternations after which to give up.
        predictive_mean: ``"network"``, or ``"tangent"`` for linearised predictions around the tangent model's optimum,
            ``f(x) + J(x) (θ* − θ̃)``.
        max_steps: The number of steps after which the convex optimisation of one alternation gives up.

    Raises:
        ConfigurationError: An option that is none of these.
    """

    tolerance: float = 1e-2
    max_iterations: int = 100
    predictive_mean: str = "network"
    max_steps: int = 1000

    passes_over_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("mean of predictions", self.predictive_mean, ("network", "tangent"))
        checks.count("max_steps", self.max_steps)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TangentResult:
        """Find the optimum and the hyperparameters jointly; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            UnsupportedError: A prior that the posterior's structure does not take.
            DataError: Not the data of the fit, or data that come only once.
            NonFiniteError: The loss of the tangent model is not finite.

        Warns:
            ConvergenceWarning: The tolerance was not met, or only at the limits of the search.
        """
        data = posterior.training_data.again(self.data, "The tangent model's optimum passes over the training data.")
        objective = Objective.create(posterior, self.structure, self.data, self.tune_noise)
        objective, model = replace(objective, limits=objective.box), objective.model
        survey(model, posterior.network, data, posterior.n_data, progress=progress)
        tangent = TangentModel(posterior.network, model.likelihood, data, temperature=posterior.temperature)
        ticks = iter(progress_bar(itertools.count(1), enabled=progress, description="tangent evidence"))
        search = _Alternation(self, objective, tangent)
        now, optimum, trace = search.run(ticks)
        advice = (
            f"and an optimum within {optimum.decrement:.2g} nats after {search.n_iterations} alternations and "
            f"{search.n_steps} steps; raise max_iterations or max_steps, or the tolerance"
        )
        what = "Tuning by the tangent model's evidence"
        accurate = max(optimum.decrement, now.norm) <= self.tolerance  # a step moves θ*, too, and leads farther
        converged = now.has_converged(self.tolerance, what, advice, accurate=accurate)
        sem, precision_sem = now.sampling_errors()  # at this optimum
        converged = knows_precisions(what, precision_sem) and converged
        precision, noise = objective.split(now.logarithms)
        dtype = tangent.vector.dtype
        return TangentResult(
            method="tangent",
            prior_precision=precision.to(dtype),
            noise_std=noise,
            value=now.value,
            converged=converged,
            gradient_norm=now.norm,
            n_evaluations=search.n_evaluations,
            groups=objective.groups,
            vector=optimum.vector.to(dtype),
            sem=sem,
            precision_sem=precision_sem,
            predictive_mean=self.predictive_mean,
            effective_parameters=now.effective_parameters(),
            n_iterations=search.n_iterations,
            n_steps=search.n_steps,
            trace=tuple(trace),
            network_value=float(objective.value(now.logarithms)),
        )


class _Alternation:
    """Maximises F over θ and Λ alternately."""

    def __init__(self, options: Tangent, objective: Objective, tangent: TangentModel):
        self.options, self.objective, self.tangent = options, objective, tangent
        self.n_steps = self.n_evaluations = self.n_iterations = 0

    def run(self, ticks: Iterator[int]) -> tuple[EvidencePoint, TangentOptimum, list[float]]:
        """Alternate until the tolerance is met: the last point, θ* there, and all values."""
        tolerance, accuracy = self.options.tolerance, _COARSE
        point, start, trace = self.objective.start(), None, []
        for _ in itertools.islice(ticks, self.options.max_iterations):
            self.n_iterations += 1
            optimum, now = self._optimum(point, start, accuracy)
            start = optimum.vector
            trace.append(now.value)
            finest = self._finest(now, optimum)
            if now.norm <= tolerance:
                if optimum.converged and accuracy <= finest:
                    break
                accuracy = max(finest, _REFINED * accuracy)  # only the optimum's accuracy is missing
                continue
            if now.norm <= _NEAR:
                point = now.fixed_point_step("mackay")
            else:
                best, evaluations = now.ascend(self.options.tolerance, 2000, itertools.count())
                self.n_evaluations += evaluations
                point = best.logarithms
            # Compute θ only as accurately as the next update of Λ needs.
            accuracy = max(finest, min(accuracy, max(0.01 * now.norm**2, _REFINED * accuracy)))
        return now, optimum, trace

    def _optimum(self, point: Tensor, start: Tensor | None, accuracy: float) -> tuple[TangentOptimum, EvidencePoint]:
        """θ* at some hyperparameters, and the evidence with θ* in place of θ̃."""
        model = self.objective.model
        precision, noise = self.objective.split(point)
        prior = model.prior(precision)
        factors = model.factors(prior.precision, self.objective.temperature, noise)
        likelihood = model.likelihood if noise is None else model.likelihood.with_noise(noise)
        optimum = tangent_optimum(
            self.tangent.with_likelihood(likelihood),
            prior,
            start,
            precondition=lambda gradient: model.solve(factors, gradient),
            tolerance=accuracy,
            max_iterations=self.options.max_steps,
        )
        self.n_steps += optimum.n_iterations
        self.n_evaluations += 1
        at = replace(model, vector=optimum.vector, statistics=optimum.statistics)
        return optimum, replace(self.objective, model=at).at(point)

    def _finest(self, now: EvidencePoint, optimum: TangentOptimum) -> float:
        """The accuracy of θ, in nats, that limits the error of every derivative to a quarter of the tolerance.

        ``½ λ ‖θ − μ‖²`` changes by at most ``(λ ‖θ−μ‖² · 2ε)^½`` where the penalised loss is ε above its minimum.
        """
        objective = now.objective
        energy = float((now.logarithms[: objective.n_precisions].exp() * objective.scatter()).sum())
        rounding = (100 * torch.finfo(self.tangent.vector.dtype).eps) ** 2 * max(1.0, abs(optimum.value))
        return max(self.options.tolerance**2 / (32 * max(1.0, energy)), rounding)
