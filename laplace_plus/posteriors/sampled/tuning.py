"""The prior precision of a sampled posterior: the tangent model's optimum and samples, alternated with updates.

With either method of :mod:`laplace_plus.posteriors.sampled.updates` the distance from a fixed point is measured by the
residual ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, MacKay's step, which vanishes with the evidence's derivative by
``log λ_g``, ``½ (γ_g − λ_g ‖θ★_g − μ_g‖²)``; for the noise, by the step of ``log σ²``. The same draws serve at all
precisions, so that the iteration is a deterministic map, and each solution starts from the one before.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence import TuningResult
from laplace_plus.evidence.groups import check_structure, chosen_groups, with_floor
from laplace_plus.evidence.tangent_model import TangentModel, TangentOptimum, tangent_optimum
from laplace_plus.evidence.tuning import HasPriorGroups, check_choice, check_counts, check_positive
from laplace_plus.io import digest
from laplace_plus.likelihoods import Likelihood
from laplace_plus.posteriors.resuming import Checkpoint
from laplace_plus.posteriors.sampled.effective_dimension import effective_dimension, group_sums, total_dimension
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.preconditioners import TangentProblem
from laplace_plus.posteriors.sampled.solvers import Solver, solve
from laplace_plus.posteriors.sampled.updates import (
    SampledMethod,
    TuningState,
    TuningStep,
    mackay_steps,
    updated_noise,
    updated_precision,
)
from laplace_plus.priors import GaussianPrior, Groups

_SCALING_DRAWS = 4
"""Random vectors for each batch that estimate a g-prior's diagonal: a relative error of 7 % for a hundred batches."""


@dataclass(frozen=True, kw_only=True)
class SampledTuningResult(TuningResult):
    """What tuning by samples found, and how it ended; its ``value`` is NaN, as samples do not give the evidence.

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


# -- the tuner ---------------------------------------------------------------------------------------------------------


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
            there continues from it, to the same result.

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
                "Samples give precisions of groups only.", expected='"scalar", "layerwise" or groups', got='"diagonal"'
            )
        check_counts(max_steps=self.max_steps)
        check_positive(tolerance=self.tolerance, optimum_tolerance=self.optimum_tolerance)
        check_choice("method", self.method, get_args(SampledMethod))
        check_choice("scaling of the prior", self.scaling, (None, "g_prior"))
        check_choice("mean of predictions", self.predictive_mean, ("network", "tangent"))

    def tune(
        self, posterior: TunedBySamples, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SampledTuningResult:
        """Alternate until the evidence is stationary; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.

        Warns:
            ConvergenceWarning: The last residual is above the tolerance, or a solve missed its own.
        """
        return posterior.tune_by_samples(self, progress=progress)

    def identity(self, *, tune_noise: bool) -> dict[str, Any]:
        """By which an interrupted tuning is recognised: all but the data and where it gives up."""
        groups = self.structure
        structure = [groups.name, digest(groups.index)] if isinstance(groups, Groups) else groups
        options = {name: value for name, value in vars(self).items() if name not in ("data", "checkpoint")}
        return {**options, "evidence": "tangent", "structure": structure, "tune_noise": tune_noise, "max_steps": None}


class TunedBySamples(Protocol):
    """What :class:`SampledEvidence` needs of a posterior."""

    def tune_by_samples(self, options: SampledEvidence, *, progress: bool) -> SampledTuningResult:
        """Tune by samples."""


class SampledPosterior(HasPriorGroups, Protocol):
    """What :func:`tune_prior` needs of a posterior."""

    likelihood: Likelihood
    solver: Solver
    chunk_size: int

    def prior(self) -> GaussianPrior:
        """The prior at the present precision."""

    @property
    def noise_std(self) -> Tensor | None:
        """The noise level."""

    @property
    def temperature(self) -> Tensor:
        """Divides the log-likelihood."""

    @property
    def mean(self) -> Tensor:
        """The network's weights, ``[P]``."""


def tune_prior(
    posterior: SampledPosterior,
    problem: TangentProblem,
    draws: Draws,
    z: Tensor,
    options: SampledEvidence,
    checkpoint: Checkpoint | None,
    *,
    tune_noise: bool,
    progress: bool,
) -> SampledTuningResult:
    """Tune a sampled posterior's prior, or continue to; the posterior stays as it is.

    Args:
        posterior: The posterior.
        problem: The data's curvature.
        draws: The noise.
        z: The samples at the posterior's hyperparameters.
        options: What was asked for.
        checkpoint: Where an interrupted tuning may lie, and where this one is written to.
        tune_noise: Whether to tune the noise.
        progress: Whether to show progress bars.
    """
    scalar = options.structure == "scalar"
    everything = Groups("scalar", ("all",), torch.zeros(posterior.network.n_parameters, dtype=torch.long))
    groups = everything if scalar else chosen_groups(posterior, options.structure, problem.data)
    model = _Alternation(posterior, problem, draws, options, groups, tune_noise=tune_noise, progress=progress)
    state = None if checkpoint is None else TuningState.read(checkpoint, posterior.network.device)
    solved: Solved | None = None
    if state is None:
        present = posterior.prior().vector().detach().double().cpu()
        logs = (present if model.scaling is None else present / model.scaling.cpu()).log()
        means = torch.zeros(len(groups.names), dtype=torch.float64).index_add_(0, groups.index, logs) / groups.sizes()
        noise = posterior.noise_std
        state = TuningState(means.exp(), None if noise is None else noise.detach(), z, [])
        if not torch.allclose(model.entries(state.precision), present, rtol=1e-12, atol=0.0):
            solved = model.solve(state.precision, state.noise_std, z)
            state.z = model.samples(state, solved)
    if solved is None and state.pending is None:
        system = model.system(state.precision, state.noise_std)
        solved = system.check(state.z * system.root, draws, posterior.solver.largest_residual, 0)
    solved = model.run(state, solved, checkpoint)
    residual = state.steps[-1].residual if state.steps else 0.0
    precision = state.precision[0] if scalar else state.precision
    vector = None
    if options.predictive_mean == "tangent":
        vector = model.optimum(state.precision, state.noise_std, state.optimum)[0].vector.to(posterior.mean)
    return SampledTuningResult(
        method=options.method,
        structure=groups.name,
        prior_precision=precision if model.scaling is None else model.entries(state.precision),
        group_precision=precision,
        groups=None if scalar else groups,
        noise_std=state.noise_std,
        value=math.nan,
        converged=bool(state.steps) and residual < options.tolerance and state.sound,
        residual=residual,
        steps=tuple(state.steps),
        n_evaluations=len(state.steps),
        vector=vector,
        predictive_mean=options.predictive_mean,
        samples=state.z,
        solved=solved,
    )


class _Alternation:
    """Optimum, samples and updates of a posterior's hyperparameters; arguments as for :func:`tune_prior`.

    Attributes:
        scaling: What multiplies the precision of each entry, ``[P]`` float64; None for nothing.
    """

    def __init__(
        self,
        posterior: SampledPosterior,
        problem: TangentProblem,
        draws: Draws,
        options: SampledEvidence,
        groups: Groups,
        *,
        tune_noise: bool,
        progress: bool,
    ):
        self._posterior, self._problem, self._draws, self._options = posterior, problem, draws, options
        self._index, self._tune_noise, self._progress = groups.index, tune_noise, progress
        self._sizes = torch.bincount(groups.index)
        self._temperature = float(posterior.temperature.detach())
        self._prior_mean = posterior.prior().mean.detach()
        self._tangent = TangentModel(
            posterior.network,
            posterior.likelihood,
            problem.data,
            temperature=self._temperature,
            chunk_size=posterior.chunk_size,
        )
        self.scaling: Tensor | None = None
        if options.scaling is not None:  # diag(H) at the present noise
            source = torch.Generator().manual_seed(0)  # other noise than that of the samples
            diagonal = problem.curvature.estimated_diagonal(_SCALING_DRAWS, source).double().cpu()
            weight = float(posterior.likelihood.curvature_weights().detach()[0])
            self.scaling = with_floor(diagonal, groups.index) * weight

    def entries(self, precision: Tensor) -> Tensor:
        """The precision of each entry, ``[P]``."""
        entries = precision[self._index.to(precision.device)]
        return entries if self.scaling is None else entries * self.scaling.to(entries)

    def system(self, precision: Tensor, noise_std: Tensor | None) -> PriorUnits:
        """The linear system at precisions ``[G]``."""
        weight = float(self._likelihood(noise_std).curvature_weights().detach()[0]) / self._temperature
        return PriorUnits(self._problem.curvature, self.entries(precision), weight)

    def _likelihood(self, noise_std: Tensor | None) -> Likelihood:
        likelihood = self._posterior.likelihood
        return likelihood if noise_std is None else likelihood.with_noise(noise_std)

    def optimum(
        self, precision: Tensor, noise_std: Tensor | None, start: Tensor | None
    ) -> tuple[TangentOptimum, Tensor]:
        """θ★ at precisions ``[G]``, searched for with the samples' preconditioner, and ``‖θ★_g − μ_g‖²``, ``[G]``."""
        prior = GaussianPrior.create(self.entries(precision), self._prior_mean, self._index)
        system = self.system(precision, noise_std)
        whitened = self._problem.preconditioner(system)

        def precondition(vector: Tensor) -> Tensor:
            assert whitened is not None
            return (whitened((vector.to(system.root) / system.root)[None])[0] / system.root).to(vector)

        found = tangent_optimum(
            self._tangent.with_likelihood(self._likelihood(noise_std)),
            prior,
            start,
            precondition=None if whitened is None else precondition,
            tolerance=self._options.optimum_tolerance,
        )
        squares = prior.deviation(found.vector).double().square()
        if self.scaling is not None:
            squares *= self.scaling.to(squares)
        sums = squares.new_zeros(len(self._sizes)).index_add_(0, self._index.to(squares.device), squares)
        return found, sums.cpu()

    def solve(self, precision: Tensor, noise_std: Tensor | None, z: Tensor, **options: Any) -> Solved:
        """Samples at precisions ``[G]`` from others, or from where an interrupted solve stopped."""
        system = self.system(precision, noise_std)
        return solve(
            system,
            self._draws,
            self._posterior.solver,
            start=z * system.root,
            precondition=self._problem.preconditioner(system),
            progress=self._progress,
            **options,
        )

    def samples(self, state: TuningState, solved: Solved) -> Tensor:
        """``z [k, P]`` of a solution at the state's hyperparameters."""
        return solved.u / self.system(state.precision, state.noise_std).root

    def _update(self, state: TuningState, solved: Solved) -> TuningStep:
        """The next hyperparameters, from the optimum and the samples at the present ones."""
        found, squares = self.optimum(state.precision, state.noise_std, state.optimum)
        state.optimum, state.sound = found.vector, state.sound and found.converged
        a, b = (group_sums(solved.u, other, self._index, len(self._sizes)) for other in (solved.image, solved.u))
        dimension = effective_dimension(a, b, self._sizes)
        terms = state.precision, dimension.value.cpu(), dimension.size.cpu(), squares
        residual, noise = float(mackay_steps(*terms).abs().max()), state.noise_std
        if self._tune_noise and noise is not None:
            effective = float(total_dimension(a, b, self._sizes).value)
            updated = updated_noise(found.statistics, effective, self._temperature).view_as(noise)
            residual = max(residual, float((updated / noise.double().cpu()).log().abs().max() * 2))
            noise = updated
        precision = updated_precision(self._options.method, *terms)
        return TuningStep(precision, noise, dimension.value.cpu(), dimension.sem.cpu(), squares, residual, 0)

    def run(self, state: TuningState, solved: Solved | None, checkpoint: Checkpoint | None) -> Solved:
        """Update until the residual is below the tolerance.

        Args:
            state: Where to start, or to continue; changed in place.
            solved: The solution at the state's hyperparameters; None where a solve is unfinished.
            checkpoint: Where to write the state.

        Returns:
            The solution at the final hyperparameters.

        Warns:
            ConvergenceWarning: The tolerance was not met.
        """

        def keep(solver: dict[str, Tensor]) -> None:
            assert checkpoint is not None
            state.solver = solver
            state.write(checkpoint)

        options, tolerance = self._options, self._options.tolerance
        residual = state.steps[-1].residual if state.steps else math.inf
        steps = range(len(state.steps), options.max_steps)
        for _ in progress_bar(steps, enabled=self._progress, description=f"tuning by {options.method}"):
            if residual < tolerance:
                break
            if state.pending is None:
                assert solved is not None
                state.pending = self._update(state, solved)
            precision, noise = state.pending.prior_precision, state.pending.noise_std
            own_keep: Callable[[dict[str, Tensor]], None] | None = None if checkpoint is None else keep
            solved = self.solve(precision, noise, state.z, state=state.solver, keep=own_keep)
            state.steps.append(replace(state.pending, iterations=solved.iterations))
            state.precision, state.noise_std, state.sound = precision, noise, state.sound and solved.converged
            state.z = self.samples(state, solved)
            state.solver = state.pending = None
            residual = state.steps[-1].residual
            if checkpoint is not None:
                state.write(checkpoint)
        assert solved is not None
        if residual >= tolerance or not state.sound:
            why = "a solve or an optimum did not meet its tolerance"
            if residual >= tolerance:
                why = f"the last of {len(state.steps)} steps found a residual of {residual:.2g}"
                why += f" (tolerance {tolerance:.2g})"
            warnings.warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning, stacklevel=4)
        return solved
