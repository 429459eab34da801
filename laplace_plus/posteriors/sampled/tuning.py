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
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

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
from laplace_plus.posteriors.resuming import Checkpoint, with_prefix
from laplace_plus.posteriors.sampled.effective_dimension import (
    EffectiveDimension,
    SampledMethod,
    effective_dimension,
    group_sums,
    mackay_steps,
    total_dimension,
    updated_noise,
    updated_precision,
)
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.problem import TangentProblem
from laplace_plus.priors import GaussianPrior, Groups

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
        check_counts(max_steps=self.max_steps)
        check_positive(tolerance=self.tolerance, optimum_tolerance=self.optimum_tolerance)
        check_choice("method", self.method, ("mackay", "em"))
        check_choice("scaling of the prior", self.scaling, (None, "g_prior"))
        check_choice("mean of predictions", self.predictive_mean, ("network", "tangent"))

    def tune(
        self, posterior: SampledPosterior, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SampledTuningResult:
        """Alternate until the evidence is stationary; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.

        Warns:
            ConvergenceWarning: The last residual is above the tolerance, or a solve missed its own.
        """
        return posterior.tune_by_samples(self, progress=progress)

    def identity(self, *, tune_noise: bool) -> dict[str, Any]:
        """Identifies an interrupted tuning: all options but the data and where it gives up."""
        groups = self.structure
        structure = [groups.name, digest(groups.index)] if isinstance(groups, Groups) else groups
        options = {name: value for name, value in vars(self).items() if name not in ("data", "checkpoint")}
        return {**options, "evidence": "tangent", "structure": structure, "tune_noise": tune_noise, "max_steps": None}


class SampledPosterior(HasPriorGroups, Protocol):
    """What :class:`SampledEvidence` needs of a posterior."""

    likelihood: Likelihood
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

    def tune_by_samples(self, options: SampledEvidence, *, progress: bool) -> SampledTuningResult:
        """Tune by samples."""


# -- the iteration -----------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """All that an interrupted iteration needs to go on.

    ``z`` are the samples at the hyperparameters or, while a ``pending`` update is solved for, those before it;
    ``sound`` as long as everything has converged.
    """

    precision: Tensor
    noise_std: Tensor | None
    z: Tensor
    steps: list[TuningStep]
    optimum: Tensor | None = None
    solver: Mapping[str, Tensor] | None = None
    pending: TuningStep | None = None
    sound: bool = True


@dataclass(frozen=True)
class _Samples:
    """Solved samples, and the effective dimension of every group and of all of them together."""

    z: Tensor
    solved: Solved
    dimension: EffectiveDimension
    total: EffectiveDimension


class _Alternation:
    """Optimum and samples of one tangent model at any precisions ``[G]`` and noise."""

    def __init__(
        self,
        posterior: SampledPosterior,
        problem: TangentProblem,
        draws: Draws,
        groups: Groups,
        options: SampledEvidence,
        *,
        tune_noise: bool,
        progress: bool,
    ):
        self._problem, self._draws, self._groups, self._options = problem, draws, groups, options
        self._tune_noise, self._progress = tune_noise, progress
        self._likelihood, self._prior_mean = posterior.likelihood, posterior.prior().mean.detach()
        self._temperature = float(posterior.temperature.detach())
        self._tangent = TangentModel(
            posterior.network,
            posterior.likelihood,
            problem.data,
            temperature=self._temperature,
            chunk_size=posterior.chunk_size,
        )
        self.scaling: Tensor | None = None
        """What multiplies the precision of each entry, ``[P]`` float64: ``diag(H)`` at the present noise, estimated."""
        if options.scaling is not None:
            # The noise of the estimate has a fixed seed; it is not that of the samples.
            diagonal = problem.curvature.estimated_diagonal(_SCALING_DRAWS, torch.Generator().manual_seed(0))
            weight = float(posterior.likelihood.curvature_weights().detach()[0])
            self.scaling = with_floor(diagonal.double().cpu(), groups.index) * weight

    def entries(self, precision: Tensor) -> Tensor:
        """The precision of each entry, ``[P]``."""
        entries = precision[self._groups.index.to(precision.device)]
        return entries if self.scaling is None else entries * self.scaling.to(entries)

    def _likelihood_at(self, noise_std: Tensor | None) -> Likelihood:
        return self._likelihood if noise_std is None else self._likelihood.with_noise(noise_std)

    def _system(self, precision: Tensor, noise_std: Tensor | None) -> PriorUnits:
        weight = float(self._likelihood_at(noise_std).curvature_weights().detach()[0]) / self._temperature
        return PriorUnits(self._problem.curvature, self.entries(precision), weight)

    def optimum(self, state: _State) -> tuple[TangentOptimum, Tensor]:
        """θ★ at a state, searched for with the preconditioner of the samples, and ``‖θ★_g − μ_g‖² [G]`` float64."""
        index = self._groups.index
        prior = GaussianPrior.create(self.entries(state.precision), self._prior_mean, index)
        system = self._system(state.precision, state.noise_std)
        whitened = self._problem.preconditioner(system)

        def precondition(vector: Tensor) -> Tensor:
            assert whitened is not None
            return (whitened((vector.to(system.root) / system.root)[None])[0] / system.root).to(vector)

        found = tangent_optimum(
            self._tangent.with_likelihood(self._likelihood_at(state.noise_std)),
            prior,
            state.optimum,
            precondition=None if whitened is None else precondition,
            tolerance=self._options.optimum_tolerance,
        )
        away = prior.deviation(found.vector).double().square()
        if self.scaling is not None:
            away *= self.scaling.to(away)
        squares = away.new_zeros(len(self._groups.names)).index_add_(0, index.to(away.device), away)
        return found, squares

    def samples(
        self,
        precision: Tensor,
        noise_std: Tensor | None,
        start: Tensor,
        state: Mapping[str, Tensor] | None = None,
        keep: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> _Samples:
        """Samples at precisions ``[G]``, from those at others, or from where an interrupted solve stopped."""
        system = self._system(precision, noise_std)
        solved = self._problem.solve(system, self._draws, start, state=state, keep=keep, progress=self._progress)
        return self._described(system, solved)

    def measured(self, state: _State) -> _Samples:
        """What samples that were solved for at a state's hyperparameters say; takes one pass."""
        system = self._system(state.precision, state.noise_std)
        largest = self._problem.solver.largest_residual
        return self._described(system, system.check(state.z * system.root, self._draws, largest, 0))

    def _described(self, system: PriorUnits, solved: Solved) -> _Samples:
        index, sizes = self._groups.index, self._groups.sizes()
        a, b = (group_sums(solved.u, other, index, len(sizes)) for other in (solved.image, solved.u))
        return _Samples(solved.u / system.root, solved, effective_dimension(a, b, sizes), total_dimension(a, b, sizes))

    def step(self, state: _State, current: _Samples) -> TuningStep:
        """The update at a state, of which the samples are still to be solved for."""
        found, squares = self.optimum(state)
        state.optimum = found.vector
        state.sound &= found.converged
        dimension, squares = current.dimension, squares.cpu()
        terms = state.precision, dimension.value.cpu(), dimension.size.cpu(), squares
        precision = updated_precision(self._options.method, *terms)
        residual = float(mackay_steps(*terms).abs().max())
        noise = state.noise_std
        if self._tune_noise:
            assert found.statistics is not None and noise is not None
            updated = updated_noise(found.statistics, float(current.total.value), self._temperature).view_as(noise)
            residual = max(residual, float((updated / noise.double().cpu()).log().abs().max() * 2))
            noise = updated
        return TuningStep(precision, noise, dimension.value.cpu(), dimension.sem.cpu(), squares, residual, 0)

    def run(
        self, state: _State, current: _Samples | None, keep: Callable[[_State], None] | None
    ) -> tuple[_Samples, bool]:
        """Alternate from a state, changed in place, until the evidence is stationary; the samples, and whether it is.

        ``current`` are the samples at the state's hyperparameters; None where a solve is unfinished.
        """
        options = self._options
        residual = state.steps[-1].residual if state.steps else math.inf

        def kept(solver: dict[str, Tensor]) -> None:
            assert keep is not None
            state.solver = solver
            keep(state)

        remaining = range(len(state.steps), options.max_steps)
        for _ in progress_bar(remaining, enabled=self._progress, description=f"tuning by {options.method}"):
            if residual < options.tolerance:
                break
            if state.pending is None:
                assert current is not None
                state.pending = self.step(state, current)
            precision, noise = state.pending.prior_precision, state.pending.noise_std
            current = self.samples(precision, noise, state.z, state.solver, None if keep is None else kept)
            state.sound &= current.solved.converged
            state.steps.append(replace(state.pending, iterations=current.solved.iterations))
            state.precision, state.noise_std, state.z = precision, noise, current.z
            state.solver = state.pending = None
            residual = state.steps[-1].residual
            if keep is not None:
                keep(state)
        assert current is not None
        converged = residual < options.tolerance and state.sound
        if not converged:
            why = (
                f"the last of {len(state.steps)} steps found a residual of {residual:.2g} "
                f"(tolerance {options.tolerance:.2g})"
                if residual >= options.tolerance
                else "a solve or an optimum did not meet its tolerance"
            )
            warnings.warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning, stacklevel=4)
        return current, converged


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
    """Tune a sampled posterior's prior, or go on with it; the posterior stays as it is."""
    if options.structure == "scalar":
        groups, own = Groups("scalar", ("all",), torch.zeros(posterior.network.n_parameters, dtype=torch.long)), None
    else:
        groups = own = chosen_groups(posterior, options.structure, problem.data)
    model = _Alternation(posterior, problem, draws, groups, options, tune_noise=tune_noise, progress=progress)
    state = None if checkpoint is None else _read_state(checkpoint, posterior.network.device)
    current: _Samples | None = None
    if state is None:
        present = posterior.prior().vector().detach().double().cpu()
        unscaled = present if model.scaling is None else present / model.scaling.cpu()
        start = groups.geometric_means(unscaled)
        noise = posterior.noise_std
        state = _State(start, None if noise is None else noise.detach(), z, [])
        if not torch.allclose(model.entries(start), present, rtol=1e-12, atol=0.0):
            current = model.samples(start, state.noise_std, z)
            state.z = current.z
    if current is None and state.pending is None:
        current = model.measured(state)
    keep = None if checkpoint is None else lambda state: _write_state(checkpoint, state)
    final, converged = model.run(state, current, keep)
    precision = state.precision[0] if options.structure == "scalar" else state.precision
    around_tangent = options.predictive_mean == "tangent"
    return SampledTuningResult(
        method=options.method,
        structure=groups.name,
        prior_precision=precision if model.scaling is None else model.entries(state.precision),
        group_precision=precision,
        groups=own,
        noise_std=state.noise_std,
        value=math.nan,
        converged=converged,
        residual=state.steps[-1].residual if state.steps else 0.0,
        steps=tuple(state.steps),
        n_evaluations=len(state.steps),
        vector=model.optimum(state)[0].vector.to(posterior.mean) if around_tangent else None,
        predictive_mean=options.predictive_mean,
        samples=final.z,
        solved=final.solved,
    )


_STEP = tuple(item.name for item in fields(TuningStep))


def _write_state(checkpoint: Checkpoint, state: _State) -> None:
    tensors: dict[str, Tensor | None] = {
        "precision": state.precision,
        "z": state.z,
        "noise_std": state.noise_std,
        "optimum": state.optimum,
    }
    tensors |= {f"solver.{name}": value for name, value in (state.solver or {}).items()}
    steps = [*state.steps, *([] if state.pending is None else [state.pending])]
    for number, step in enumerate(steps):
        for name in _STEP:
            value = getattr(step, name)
            tensors[f"step.{number}.{name}"] = None if value is None else torch.as_tensor(value, dtype=torch.float64)
    header = {"steps": len(steps), "pending": state.pending is not None, "sound": state.sound}
    checkpoint.write("tuning", header, {name: value for name, value in tensors.items() if value is not None})


def _read_state(checkpoint: Checkpoint, device: torch.device) -> _State | None:
    found = checkpoint.read("tuning", device)
    if found is None:
        return None
    header, tensors = found
    steps = []
    for number in range(header["steps"]):
        own = {name: value.cpu() for name, value in with_prefix(tensors, f"step.{number}.").items()}
        values: dict[str, Any] = {"noise_std": None, **own}
        values |= {"residual": float(values["residual"]), "iterations": int(values["iterations"])}
        steps.append(TuningStep(**values))
    pending = steps.pop() if header["pending"] else None
    noise = tensors.get("noise_std")
    return _State(
        precision=tensors["precision"].cpu(),
        noise_std=None if noise is None else noise.cpu(),
        z=tensors["z"],
        steps=steps,
        optimum=tensors.get("optimum"),
        solver=with_prefix(tensors, "solver.") or None,
        pending=pending,
        sound=header["sound"],
    )
