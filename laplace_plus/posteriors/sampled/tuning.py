"""The tuning of sample-then-optimise Laplace by samples: a fixed point of the evidence's gradient.

Prior precisions alternate with sampling. With the tangent model's optimum θ★ and the effective dimension γ_g of each
group of parameters (MacKay, 1992),

    λ_g ← γ_g / ‖θ★_g − μ_g‖²,        σ² ← Σ residual² / (N C − T γ).

At its fixed points the evidence of the tangent model is stationary. Convergence is measured by the residual
``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, the step, which vanishes with the evidence's derivative by ``log λ_g``,
``½ (γ_g − λ_g ‖θ★_g − μ_g‖²)``; that of the noise is the step of ``log σ²``. The same draws serve at all precisions, so
that the iteration is a deterministic map, and each solution starts from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.estimates import standard_error
from laplace_plus.posteriors.sampled.systems import PriorUnits, Solved, effective_dimension, group_sums
from laplace_plus.priors import GaussianPrior, Groups
from laplace_plus.tuning import TuningResult
from laplace_plus.tuning.base import tunes_noise
from laplace_plus.tuning.groups import chosen_groups
from laplace_plus.tuning.marginal_likelihood import knows_precisions, updated_noise
from laplace_plus.tuning.tangent_model import TangentModel, TangentOptimum, tangent_optimum

_SCALING_DRAWS = 4
"""Random vectors for each batch that estimate the diagonal of a g-prior; their mean's relative error is at most
``(1 / (2 batches))^½``."""

LARGEST_STEP = math.log(10)
"""A logarithm of a precision changes by at most this in one step."""

_LEAST = 1e-3
"""Effective parameters that a group keeps at least: the logarithm of zero has no limit."""


@dataclass(frozen=True)
class TuningStep:
    """One update.

    Attributes:
        prior_precision: After it, ``[G]``.
        noise_std: After it; None where there is none.
        effective_dimension: γ of every group at the precisions before, ``[G]``.
        sem: Its standard error over the samples, ``[G]``.
        residual: How far the hyperparameters before were from a fixed point: the largest
            ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, or change of the logarithm of the noise variance.
    """

    prior_precision: Tensor
    noise_std: Tensor | None
    effective_dimension: Tensor
    sem: Tensor
    residual: float


@dataclass(frozen=True, kw_only=True)
class SampledTuningResult(TuningResult):
    """What tuning by samples found, and how it ended; its ``value`` is the tangent model's evidence.

    Attributes:
        residual: That of the last step. Converged means that all further steps together would stay below the tolerance,
            as far as the last two tell, that all solves and optima met theirs, and that the samples tell all precisions
            to 0.01.
        steps: All updates.
        solved: The samples at these hyperparameters, and how their solve ended.
    """

    residual: float
    steps: tuple[TuningStep, ...]
    solved: Solved = field(repr=False)


@dataclass(frozen=True)
class SampledEvidence:
    """Maximises the tangent model's evidence by samples, for :class:`~laplace_plus.SampledLaplace`.

    The tangent model's optimum, the samples and the precisions are updated in turn, each from where it was; the
    effective dimensions come from the samples by the ratio estimator.

    Args:
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` or :class:`~laplace_plus.Groups`.
        scaling: ``"g_prior"`` multiplies each entry's precision by its diagonal entry of the curvature, which is
            estimated in one more pass, so that one precision suits layers of all scales.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: The training data; by default the loaders of the fit.
        max_steps: Where to give up.
        tolerance: Converged once every log precision, and the logarithm of the noise variance, would change by less
            in all further steps together.
        optimum_tolerance: ε, nats from the tangent model's optimum at which the search for it stops; it changes
            ``λ ‖θ★ − μ‖²`` by a part of at most ``(8 ε / γ)^½``.
    """

    structure: str | Groups = "scalar"
    scaling: str | None = None
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)
    max_steps: int = 50
    tolerance: float = 0.01
    optimum_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Groups):
            checks.choice("structure", self.structure, ("scalar", "layerwise", "normalized_groups"))
        checks.count("max_steps", self.max_steps)
        checks.positive("tolerance", self.tolerance)
        checks.positive("optimum_tolerance", self.optimum_tolerance)
        checks.choice("scaling of the prior", self.scaling, (None, "g_prior"))

    def tune(
        self, posterior: Any, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SampledTuningResult:
        """Alternate until the evidence is stationary; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            DataError: The training data are not known any more, or not those of the fit.

        Warns:
            ConvergenceWarning: The last residual is above the tolerance, a solve missed its own, or the samples tell a
                precision worse than to 0.01 (standard error).
        """
        return Alternation(posterior, self).run(progress=progress)


def mackay_step(precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """``log(γ_g / (λ_g ‖θ★_g − μ_g‖²))``, ``[G]``: the step of ``log λ_g``, zero where the evidence is stationary."""
    least = torch.finfo(torch.float64).tiny
    return (effective.clamp_min(_LEAST).minimum(size) / (precision * squares).clamp_min(least)).log()


def with_floor(diagonal: Tensor, index: Tensor) -> Tensor:
    """A g-prior's scaling ``[P]`` float64, at least a millionth of its group's mean; ``index [P]`` gives the groups.

    Entries that the data do not touch need some prior.
    """
    means = diagonal.new_zeros(int(index.max()) + 1).index_add(0, index, diagonal) / torch.bincount(index)
    return torch.maximum(diagonal, 1e-6 * torch.where(means > 0, means, 1.0)[index])


class Alternation:
    """Optimum and samples of one tangent model, alternated with its precisions ``[G]`` and noise."""

    def __init__(self, posterior: Any, options: SampledEvidence):
        self._posterior, self._options = posterior, options
        self._tune_noise = tunes_noise(posterior.likelihood, options.tune_noise)
        self._start = posterior.solved_state()
        self._draws, self._problem = self._start.draws, posterior.problem(options.data)
        self._groups = Groups("scalar", ("all",), torch.zeros(posterior.n_parameters, dtype=torch.long))
        if options.structure != "scalar":
            self._groups = chosen_groups(posterior, options.structure, self._problem.data)
        self._temperature = float(posterior.temperature.detach())
        own = posterior.network, posterior.likelihood, self._problem.data
        self._tangent = TangentModel(*own, temperature=self._temperature, chunk_size=posterior.chunk_size)
        # What multiplies the precision of each entry, ``[P]`` float64: ``diag(H)`` at the present noise, estimated.
        self._scaling = torch.ones((), dtype=torch.float64)
        if options.scaling is not None:
            # The noise of the estimate has a fixed seed; it is not that of the samples.
            diagonal = self._problem.curvature.estimated_diagonal(_SCALING_DRAWS, torch.Generator().manual_seed(0))
            weight = float(posterior.likelihood.curvature_weights().detach()[0])
            self._scaling = with_floor(diagonal.double().cpu(), self._groups.index) * weight

    def run(self, *, progress: bool) -> SampledTuningResult:
        """Alternate until the evidence is stationary, from the posterior's samples and hyperparameters."""
        posterior, options = self._posterior, self._options
        present, noise = posterior.prior().vector().detach().double().cpu(), posterior.noise_std
        precision = self._groups.geometric_means(present / self._scaling)
        noise = None if noise is None else noise.detach()
        system = self._system(precision, noise)
        if torch.allclose(self._entries(precision), present, rtol=1e-12, atol=0.0):
            current = system.check(self._start.samples * system.root, self._draws, self._problem.largest_residual, 0)
        else:  # other precisions within a group
            current = self._problem.solve(system, self._draws, self._start.samples)
        steps: list[TuningStep] = []
        optimum: Tensor | None = None
        sound, slow = True, 1.0
        for _ in progress_bar(range(options.max_steps), enabled=progress, description="tuning by samples"):
            found, squares = self._optimum(precision, noise, optimum)
            step = self._step(precision, noise, current, found, squares)
            precision, noise, optimum = step.prior_precision, step.noise_std, found.vector
            current = self._problem.solve(self._system(precision, noise), self._draws, current.z)
            sound = sound and found.converged and current.report.converged
            if steps:  # steps that shrink by ρ each time sum to 1/(1 − ρ) times the last one
                slow = 1 / (1 - min(step.residual / max(steps[-1].residual, 1e-30), 0.99))
            steps.append(step)
            if step.residual * slow < options.tolerance:
                break
        settled = step.residual * slow < options.tolerance
        if not (converged := settled and sound):
            why = f"a residual of {step.residual:.2g} in step {len(steps)}, and further ones may add up to"
            why = f"{why} {step.residual * slow:.2g} (tolerance {options.tolerance:.2g})"
            why = "a solve or an optimum did not meet its tolerance" if settled else why
            warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning)
        precision_sem = slow * float((step.sem / step.effective_dimension.clamp_min(_LEAST)).max())
        converged = knows_precisions("Tuning by samples", precision_sem) and converged
        value, sem = self._evidence(precision, noise, found)
        one, scaled = options.structure == "scalar", options.scaling is not None
        return SampledTuningResult(
            method="mackay",
            prior_precision=self._entries(precision) if scaled else precision[0] if one else precision,
            groups=None if one else self._groups,
            noise_std=noise,
            value=value,
            sem=sem,
            precision_sem=precision_sem,
            converged=converged,
            residual=step.residual,
            steps=tuple(steps),
            n_evaluations=len(steps),
            solved=current,
        )

    def _evidence(self, precision: Tensor, noise: Tensor | None, found: TangentOptimum) -> tuple[float, float]:
        """The evidence of the tangent model, and its standard error."""
        model, vector = self._posterior.laplace_model(self._problem), found.vector.to(self._posterior.mean)
        model = replace(model, vector=vector, statistics=found.statistics, layer_index=self._groups.index)
        prior = precision if self._options.scaling is None else self._entries(precision)
        own = prior, self._temperature, noise
        value, forms = float(model.log_marginal_likelihood(*own)), model.forms(*own)
        return value, 0.0 if forms is None else float(standard_error(forms)) / 2

    def _step(
        self, precision: Tensor, noise: Tensor | None, at: Solved, found: TangentOptimum, squares: Tensor
    ) -> TuningStep:
        """The update of the hyperparameters, of which the samples are still to be solved for."""
        sizes = self._groups.sizes().cpu()
        index = self._groups.index
        data, prior = group_sums(at.u, at.image, index).cpu(), group_sums(at.u, at.u, index).cpu()
        effective, sem = effective_dimension(data, prior, sizes)
        step = mackay_step(precision, effective, sizes, squares)
        residual = float(step.abs().max())
        if self._tune_noise:
            assert noise is not None
            total, _ = effective_dimension(data.sum(1, keepdim=True), prior.sum(1, keepdim=True), sizes.sum()[None])
            updated = updated_noise(found.statistics, float(total), self._temperature).view_as(noise)
            residual = max(residual, float((updated / noise.double().cpu()).log().abs().max() * 2))
            noise = updated
        new = precision * step.clamp(-LARGEST_STEP, LARGEST_STEP).exp()
        return TuningStep(new, noise, effective, sem, residual)

    def _optimum(self, precision: Tensor, noise: Tensor | None, start: Tensor | None) -> tuple[TangentOptimum, Tensor]:
        """θ★, searched for with the preconditioner of the samples, and ``‖θ★_g − μ_g‖² [G]`` float64."""
        prior = GaussianPrior.create(self._entries(precision), self._posterior.prior_mean.detach(), self._groups.index)
        system = self._system(precision, noise)
        whitened = self._problem.preconditioner(system)

        def precondition(vector: Tensor) -> Tensor:
            assert whitened is not None
            return (whitened((vector.to(system.root) / system.root)[None])[0] / system.root).to(vector)

        tangent, options = self._tangent.with_likelihood(self._likelihood(noise)), self._options
        by = None if whitened is None else precondition
        found = tangent_optimum(tangent, prior, start, precondition=by, tolerance=options.optimum_tolerance)
        away = prior.deviation(found.vector)[None].double()
        squares = group_sums(away, away * self._scaling.to(away), self._groups.index)[0]
        return found, squares.cpu()

    def _system(self, precision: Tensor, noise: Tensor | None) -> PriorUnits:
        weight = float(self._likelihood(noise).curvature_weights().detach()[0]) / self._temperature
        return PriorUnits(self._problem.curvature, self._entries(precision), weight)

    def _likelihood(self, noise: Tensor | None) -> Likelihood:
        likelihood: Likelihood = self._posterior.likelihood
        return likelihood if noise is None else likelihood.with_noise(noise)

    def _entries(self, precision: Tensor) -> Tensor:
        """The precision of each entry, ``[P]``."""
        entries = precision[self._groups.index.to(precision.device)]
        return entries * self._scaling.to(entries)
