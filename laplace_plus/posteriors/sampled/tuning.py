"""Prior precisions from posterior samples: the fixed points of the evidence's gradient, alternated with sampling.

With the tangent model's optimum θ★ and the effective dimension γ_g of each group of parameters, of size d_g,

    MacKay (1992)                λ_g ← γ_g / ‖θ★_g − μ_g‖²
    expectation maximisation     λ_g ← d_g / (‖θ★_g − μ_g‖² + (d_g − γ_g) / λ_g)
    both                         σ² ← Σ residual² / (N C − T γ)

Both have the same fixed points, where the evidence of the tangent model is stationary. Expectation maximisation never
lowers the evidence, but its steps are short where γ_g is far below d_g. Convergence of either method is therefore
measured by the residual ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, which is MacKay's step and vanishes with the evidence's
derivative by ``log λ_g``, ``½ (γ_g − λ_g ‖θ★_g − μ_g‖²)``; that of the noise is the step of ``log σ²``. The same draws
serve at all precisions, so that the iteration is a deterministic map, and each solution starts from the one before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, warn
from laplace_plus.io import digest
from laplace_plus.io.checkpoints import Checkpoint, packed, unpacked
from laplace_plus.likelihoods import Likelihood
from laplace_plus.posteriors.sampled.effective_dimension import (
    EffectiveDimension,
    SampledMethod,
    effective_dimension,
    group_sums,
    limited_precision,
    mackay_steps,
    total_dimension,
)
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.solvers import TangentProblem
from laplace_plus.priors import GaussianPrior, Groups
from laplace_plus.tuning import TuningResult
from laplace_plus.tuning.groups import check_structure, chosen_groups, with_floor
from laplace_plus.tuning.objective import updated_noise
from laplace_plus.tuning.tangent_model import TangentModel, TangentOptimum, tangent_optimum

_SCALING_DRAWS = 4
"""Random vectors for each batch that estimate the diagonal of a g-prior; their mean's relative error is at most
``(1 / (2 batches))^½``."""


@dataclass(frozen=True)
class TuningStep:
    """One update.

    Attributes:
        prior_precision: After it, ``[G]``.
        noise_std: After it; None where there is none.
        effective_dimension: γ of every group at the precisions before, ``[G]``.
        sem: Its standard error over the samples, ``[G]``.
        squared_norm: ``‖θ★_g − μ_g‖²`` at the precisions before, ``[G]``.
        residual: How far the hyperparameters before were from a fixed point: the largest
            ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, or change of the logarithm of the noise variance.
        iterations: Solver iterations at the precisions after.
    """

    prior_precision: Tensor
    noise_std: Tensor | None
    effective_dimension: Tensor
    sem: Tensor
    squared_norm: Tensor
    residual: float
    iterations: int


@dataclass(frozen=True, kw_only=True)
class SampledTuningResult(TuningResult):
    """What tuning by samples found, and how it ended; its ``value`` is NaN, as samples do not tell the evidence.

    Attributes:
        structure: Which entries share a precision.
        group_precision: 0-d or ``[G]``, before any scaling.
        residual: That of the last step. Converged means that it was below the tolerance, and that all solves and optima
            met theirs.
        steps: All updates.
        samples: ``z [k, P]`` at these hyperparameters.
        solved: How their solve ended.
    """

    structure: str
    group_precision: Tensor
    residual: float
    steps: tuple[TuningStep, ...]
    samples: Tensor = field(repr=False)
    solved: Solved = field(repr=False)


@dataclass(frozen=True)
class SampledEvidence:
    """Maximises the tangent model's evidence by samples, for :class:`~laplace_plus.SampledLaplace`.

    The tangent model's optimum, the samples and the precisions are updated in turn, each from where it was; the
    effective dimensions come from the samples by the ratio estimator.

    Args:
        method: ``"mackay"``, or ``"em"``, of which no step lowers the evidence; where the data determine few of a
            group's parameters, hundreds of them may be needed.
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` or :class:`~laplace_plus.Groups`.
        scaling: ``"g_prior"`` multiplies each entry's precision by its diagonal entry of the curvature, which is
            estimated in one more pass, so that one precision suits layers of all scales.
        predictive_mean: ``"network"``, or ``"tangent"`` for linearised predictions around the tangent model's optimum.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: The training data; by default the loaders of the fit.
        max_steps: Where to give up.
        tolerance: Converged once ``|log(γ / (λ ‖θ★ − μ‖²))|`` is below it for every group, with either method, and
            the change of the logarithm of the noise variance.
        optimum_tolerance: Nats from the tangent model's optimum at which the search for it stops.
        checkpoint: A folder to which every step, and the solver's state within it, is written. A tuning that finds it
            there goes on from it, to the same result.

    Raises:
        ConfigurationError: An option that is none of these.
    """

    method: SampledMethod = "mackay"
    structure: str | Groups = "scalar"
    scaling: str | None = None
    predictive_mean: str = "network"
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)
    max_steps: int = 10
    tolerance: float = 0.05
    optimum_tolerance: float = 1e-3
    checkpoint: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_structure(self.structure)
        if self.structure == "diagonal":
            raise ConfigurationError(
                "Samples tell precisions of groups alone.", expected='"scalar", "layerwise" or groups', got='"diagonal"'
            )
        checks.count("max_steps", self.max_steps)
        checks.positive("tolerance", self.tolerance)
        checks.positive("optimum_tolerance", self.optimum_tolerance)
        checks.choice("method", self.method, ("mackay", "em"))
        checks.choice("scaling of the prior", self.scaling, (None, "g_prior"))
        checks.choice("mean of predictions", self.predictive_mean, ("network", "tangent"))

    def tune(
        self, posterior: Any, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SampledTuningResult:
        """Alternate until the evidence is stationary; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.

        Warns:
            ConvergenceWarning: The last residual is above the tolerance, or a solve missed its own.
        """
        result: SampledTuningResult = posterior.tune_by_samples(self, progress=progress)
        return result

    def identity(self, *, tune_noise: bool) -> dict[str, Any]:
        """Identifies an interrupted tuning: all options but the data and where it gives up."""
        groups = self.structure
        structure = [groups.name, digest(groups.index)] if isinstance(groups, Groups) else groups
        options = {name: value for name, value in vars(self).items() if name not in ("data", "checkpoint")}
        return {**options, "evidence": "tangent", "structure": structure, "tune_noise": tune_noise, "max_steps": None}


@dataclass
class _State:
    """All that an interrupted iteration needs to go on; ``sound`` as long as everything has converged.

    ``z`` are the samples at the hyperparameters, or those before a ``pending`` update that is solved for.
    """

    precision: Tensor
    noise_std: Tensor | None
    z: Tensor
    steps: list[TuningStep]
    optimum: Tensor | None = None
    solver: Mapping[str, Tensor] | None = None
    pending: TuningStep | None = None
    sound: bool = True

    @property
    def residual(self) -> float:
        """That of the last step."""
        return self.steps[-1].residual if self.steps else math.inf


@dataclass(frozen=True)
class _Samples:
    """Solved samples, and the effective dimension of every group and of all of them together."""

    solved: Solved
    dimension: EffectiveDimension
    total: EffectiveDimension


class Alternation:
    """Optimum and samples of one tangent model, alternated with its precisions ``[G]`` and noise."""

    def __init__(
        self,
        posterior: Any,
        problem: TangentProblem,
        draws: Draws,
        options: SampledEvidence,
        *,
        tune_noise: bool,
        progress: bool,
    ):
        self._posterior, self._problem, self._draws, self._options = posterior, problem, draws, options
        self._tune_noise, self._progress = tune_noise, progress
        network, likelihood = posterior.network, posterior.likelihood
        self._groups = Groups("scalar", ("all",), torch.zeros(network.n_parameters, dtype=torch.long))
        if options.structure != "scalar":
            self._groups = chosen_groups(posterior, options.structure, problem.data)
        self._temperature = float(posterior.temperature.detach())
        self._tangent = TangentModel(
            network, likelihood, problem.data, temperature=self._temperature, chunk_size=posterior.chunk_size
        )
        # What multiplies the precision of each entry, ``[P]`` float64: ``diag(H)`` at the present noise, estimated.
        self._scaling: Tensor | None = None
        if options.scaling is not None:
            # The noise of the estimate has a fixed seed; it is not that of the samples.
            diagonal = problem.curvature.estimated_diagonal(_SCALING_DRAWS, torch.Generator().manual_seed(0))
            weight = float(likelihood.curvature_weights().detach()[0])
            self._scaling = with_floor(diagonal.double().cpu(), self._groups.index) * weight

    def run(self, z: Tensor, checkpoint: Checkpoint) -> SampledTuningResult:
        """Alternate until the evidence is stationary, from samples ``z [k, P]`` or from a checkpoint."""
        options, current = self._options, None
        found = checkpoint.read("tuning", self._posterior.network.device)
        state: _State | None = None if found is None else unpacked(found, _State, TuningStep)
        if state is None:
            present, noise = self._posterior.prior().vector().detach().double().cpu(), self._posterior.noise_std
            start = self._groups.geometric_means(present if self._scaling is None else present / self._scaling)
            state = _State(start, None if noise is None else noise.detach(), z, [])
            if not torch.allclose(self._entries(start), present, rtol=1e-12, atol=0.0):
                current = self._samples(state, start, state.noise_std, None)
                state.z = current.solved.z
        if current is None and state.pending is None:
            _, system = self._at(state.precision, state.noise_std)
            largest = self._problem.solver.largest_residual
            current = self._described(system.check(state.z * system.root, self._draws, largest, 0))
        remaining = range(len(state.steps), options.max_steps)
        for _ in progress_bar(remaining, enabled=self._progress, description=f"tuning by {options.method}"):
            if state.residual < options.tolerance:
                break
            if state.pending is None:
                assert current is not None
                state.pending = self._step(state, current)
            precision, noise = state.pending.prior_precision, state.pending.noise_std
            current = self._samples(state, precision, noise, checkpoint)
            state.sound &= current.solved.converged
            state.steps.append(replace(state.pending, iterations=current.solved.iterations))
            state.precision, state.noise_std, state.z = precision, noise, current.solved.z
            state.solver = state.pending = None
            checkpoint.write("tuning", *packed(state))
        assert current is not None
        return self._result(state, current)

    def _result(self, state: _State, current: _Samples) -> SampledTuningResult:
        options, scalar = self._options, self._options.structure == "scalar"
        converged = state.residual < options.tolerance and state.sound
        if not converged:
            why = "a solve or an optimum did not meet its tolerance"
            if state.residual >= options.tolerance:
                why = f"the last of {len(state.steps)} steps found a residual of {state.residual:.2g} "
                why += f"(tolerance {options.tolerance:.2g})"
            warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning)
        precision = state.precision[0] if scalar else state.precision
        around_tangent = options.predictive_mean == "tangent"
        return SampledTuningResult(
            method=options.method,
            structure=self._groups.name,
            prior_precision=precision if self._scaling is None else self._entries(state.precision),
            group_precision=precision,
            groups=None if scalar else self._groups,
            noise_std=state.noise_std,
            value=math.nan,
            converged=converged,
            residual=state.residual if state.steps else 0.0,
            steps=tuple(state.steps),
            n_evaluations=len(state.steps),
            vector=self._optimum(state)[0].vector.to(self._posterior.mean) if around_tangent else None,
            predictive_mean=options.predictive_mean,
            samples=current.solved.z,
            solved=current.solved,
        )

    def _entries(self, precision: Tensor) -> Tensor:
        """The precision of each entry, ``[P]``."""
        entries = precision[self._groups.index.to(precision.device)]
        return entries if self._scaling is None else entries * self._scaling.to(entries)

    def _at(self, precision: Tensor, noise_std: Tensor | None) -> tuple[Likelihood, PriorUnits]:
        """The likelihood and the linear system at some hyperparameters."""
        likelihood: Likelihood = self._posterior.likelihood
        likelihood = likelihood if noise_std is None else likelihood.with_noise(noise_std)
        weight = float(likelihood.curvature_weights().detach()[0]) / self._temperature
        return likelihood, PriorUnits(self._problem.curvature, self._entries(precision), weight)

    def _optimum(self, state: _State) -> tuple[TangentOptimum, Tensor]:
        """θ★ at a state, searched for with the preconditioner of the samples, and ``‖θ★_g − μ_g‖² [G]`` float64."""
        index, mean = self._groups.index, self._posterior.prior().mean.detach()
        prior = GaussianPrior.create(self._entries(state.precision), mean, index)
        likelihood, system = self._at(state.precision, state.noise_std)
        whitened = self._problem.preconditioner(system)

        def precondition(vector: Tensor) -> Tensor:
            assert whitened is not None
            return (whitened((vector.to(system.root) / system.root)[None])[0] / system.root).to(vector)

        found = tangent_optimum(
            self._tangent.with_likelihood(likelihood),
            prior,
            state.optimum,
            precondition=None if whitened is None else precondition,
            tolerance=self._options.optimum_tolerance,
        )
        away = prior.deviation(found.vector)[None].double()
        scaled = away if self._scaling is None else away * self._scaling.to(away)
        return found, group_sums(away, scaled, index, len(self._groups.names))[0]

    def _samples(
        self, state: _State, precision: Tensor, noise_std: Tensor | None, checkpoint: Checkpoint | None
    ) -> _Samples:
        """Samples at precisions ``[G]``, from those of a state, or from where an interrupted solve stopped."""
        _, system = self._at(precision, noise_std)

        def keep(solver: dict[str, Tensor]) -> None:
            if checkpoint is not None:
                state.solver = solver
                checkpoint.write("tuning", *packed(state))

        options: Any = {"state": state.solver, "keep": keep, "progress": self._progress}
        return self._described(self._problem.solve(system, self._draws, state.z, **options))

    def _described(self, solved: Solved) -> _Samples:
        index, sizes = self._groups.index, self._groups.sizes()
        a, b = (group_sums(solved.u, other, index, len(sizes)) for other in (solved.image, solved.u))
        return _Samples(solved, effective_dimension(a, b, sizes), total_dimension(a, b, sizes))

    def _step(self, state: _State, current: _Samples) -> TuningStep:
        """The update at a state, of which the samples are still to be solved for."""
        found, squares = self._optimum(state)
        state.optimum = found.vector
        state.sound &= found.converged
        dimension, squares = current.dimension, squares.cpu()
        terms = state.precision, dimension.value.cpu(), dimension.size.cpu(), squares
        residual, noise = float(mackay_steps(*terms).abs().max()), state.noise_std
        if self._tune_noise:
            assert found.statistics is not None and noise is not None
            updated = updated_noise(found.statistics, float(current.total.value), self._temperature).view_as(noise)
            residual = max(residual, float((updated / noise.double().cpu()).log().abs().max() * 2))
            noise = updated
        precision = limited_precision(self._options.method, *terms)
        return TuningStep(precision, noise, dimension.value.cpu(), dimension.sem.cpu(), squares, residual, 0)
