"""The prior precision of a sampled posterior: its samples and the tangent model's optimum, alternated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.evidence.groups import check_structure, chosen_groups, with_floor
from laplace_plus.evidence.tangent_model import TangentModel, tangent_optimum
from laplace_plus.evidence.tuning import HasPriorGroups, check_choice, check_counts, check_positive
from laplace_plus.io import digest
from laplace_plus.likelihoods import Likelihood
from laplace_plus.posteriors.resuming import Checkpoint
from laplace_plus.posteriors.sampled.effective_dimension import effective_dimension, group_sums, total_dimension
from laplace_plus.posteriors.sampled.expectation_maximisation import (
    SAMPLED_METHODS,
    Optimum,
    Sampled,
    SampledMethod,
    SampledTuningResult,
    TuningState,
    TuningStep,
    tune_by_samples,
)
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.preconditioners import TangentProblem
from laplace_plus.posteriors.sampled.solvers import Solver, solve
from laplace_plus.priors import GaussianPrior, Groups

_SCALING_DRAWS = 4
"""Random vectors for each batch that estimate the diagonal of a g-prior."""


class Alternation:
    """Gives optimum and samples at any hyperparameters; see ``expectation_maximisation``.

    Args:
        problem: The data's curvature.
        draws: The noise.
        solver: How samples are solved for.
        tangent: The tangent model.
        likelihood: At the noise that stays, or starts.
        index: ``[P]`` integers, the group of each entry.
        scaling: What multiplies the precision of each entry, ``[P]``; None for nothing.
        prior_mean: 0-d or ``[P]``.
        temperature: T.
        optimum_tolerance: Nats from the optimum at which its search stops.
        progress: Whether to show a progress bar for each solve.

    Attributes:
        last: The solution that the latest samples are.
    """

    def __init__(
        self,
        *,
        problem: TangentProblem,
        draws: Draws,
        solver: Solver,
        tangent: TangentModel,
        likelihood: Likelihood,
        index: Tensor,
        scaling: Tensor | None,
        prior_mean: Tensor,
        temperature: float,
        optimum_tolerance: float,
        progress: bool,
    ):
        self._problem, self._draws, self._solver, self._tangent = problem, draws, solver, tangent
        self._likelihood, self._index, self._scaling = likelihood, index, scaling
        self._prior_mean, self._temperature = prior_mean, temperature
        self._optimum_tolerance, self._progress = optimum_tolerance, progress
        self._sizes = torch.bincount(index)
        self.last: Solved | None = None

    def system(self, precision: Tensor, noise_std: Tensor | None) -> PriorUnits:
        """The linear system at precisions ``[G]``."""
        weight = float(self._at(noise_std).curvature_weights().detach()[0]) / self._temperature
        return PriorUnits(self._problem.curvature, self.entries(precision), weight)

    def entries(self, precision: Tensor) -> Tensor:
        """The precision of each entry, ``[P]``."""
        entries = precision[self._index.to(precision.device)]
        return entries if self._scaling is None else entries * self._scaling.to(entries)

    def _at(self, noise_std: Tensor | None) -> Likelihood:
        return self._likelihood if noise_std is None else self._likelihood.with_noise(noise_std)

    def optimum(self, precision: Tensor, noise_std: Tensor | None, start: Tensor | None) -> Optimum:
        """θ★ at precisions ``[G]``, searched for with the preconditioner of the samples."""
        prior = GaussianPrior.create(self.entries(precision), self._prior_mean, self._index)
        system = self.system(precision, noise_std)
        whitened = self._problem.preconditioner(system)

        def precondition(vector: Tensor) -> Tensor:
            assert whitened is not None
            return (whitened((vector.to(system.root) / system.root)[None])[0] / system.root).to(vector)

        found = tangent_optimum(
            self._tangent.with_likelihood(self._at(noise_std)),
            prior,
            start,
            precondition=None if whitened is None else precondition,
            tolerance=self._optimum_tolerance,
        )
        squares = torch.zeros(len(self._sizes), dtype=torch.float64, device=found.vector.device)
        away = prior.deviation(found.vector).double().square()
        if self._scaling is not None:
            away *= self._scaling.to(away)
        squares.index_add_(0, self._index.to(squares.device), away)
        return Optimum(found.vector, squares, found.statistics, found.converged)

    def samples(
        self,
        precision: Tensor,
        noise_std: Tensor | None,
        start: Tensor,
        state: Mapping[str, Tensor] | None,
        keep: Callable[[dict[str, Tensor]], None] | None,
    ) -> Sampled:
        """Samples at precisions ``[G]``, from those at others, or from where an interrupted solve stopped."""
        system = self.system(precision, noise_std)
        solved = solve(
            system,
            self._draws,
            self._solver,
            start=start * system.root,
            precondition=self._problem.preconditioner(system),
            state=state,
            keep=keep,
            progress=self._progress,
        )
        return self._described(system, solved)

    def measured(self, precision: Tensor, noise_std: Tensor | None, z: Tensor) -> Sampled:
        """What samples that were solved for at these hyperparameters say; takes one pass."""
        system = self.system(precision, noise_std)
        return self._described(system, system.check(z * system.root, self._draws, self._solver.largest_residual, 0))

    def _described(self, system: PriorUnits, solved: Solved) -> Sampled:
        self.last = solved
        a, b = (group_sums(solved.u, other, self._index, len(self._sizes)) for other in (solved.image, solved.u))
        return Sampled(
            solved.u / system.root,
            effective_dimension(a, b, self._sizes),
            total_dimension(a, b, self._sizes),
            solved.iterations,
            solved.converged,
        )


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
        check_choice("method", self.method, SAMPLED_METHODS)
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
    """Tune a sampled posterior's prior, or go on with it; the posterior stays as it is.

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
    if options.structure == "scalar":
        groups, own = Groups("scalar", ("all",), torch.zeros(posterior.network.n_parameters, dtype=torch.long)), None
    else:
        groups = own = chosen_groups(posterior, options.structure, problem.data)
    temperature = float(posterior.temperature.detach())
    scaling = None if options.scaling is None else _g_prior_scaling(problem, groups, posterior.likelihood)
    model = Alternation(
        problem=problem,
        draws=draws,
        solver=posterior.solver,
        tangent=TangentModel(
            posterior.network,
            posterior.likelihood,
            problem.data,
            temperature=temperature,
            chunk_size=posterior.chunk_size,
        ),
        likelihood=posterior.likelihood,
        index=groups.index,
        scaling=scaling,
        prior_mean=posterior.prior().mean.detach(),
        temperature=temperature,
        optimum_tolerance=options.optimum_tolerance,
        progress=progress,
    )
    state = None if checkpoint is None else read_state(checkpoint, posterior.network.device)
    current: Sampled | None = None
    if state is None:
        present = posterior.prior().vector().detach().double().cpu()
        start = _means(present if scaling is None else present / scaling.cpu(), groups)
        noise = posterior.noise_std
        state = TuningState(start, None if noise is None else noise.detach(), z, [])
        if not torch.allclose(model.entries(start), present, rtol=1e-12, atol=0.0):
            current = model.samples(start, state.noise_std, z, None, None)
            state.z = current.z
    if current is None and state.pending is None:
        current = model.measured(state.precision, state.noise_std, state.z)
    final, converged = tune_by_samples(
        model,
        state,
        current,
        method=options.method,
        temperature=temperature,
        tune_noise=tune_noise,
        max_steps=options.max_steps,
        tolerance=options.tolerance,
        progress=progress,
        keep=None if checkpoint is None else partial(write_state, checkpoint),
    )
    assert model.last is not None
    around_tangent = options.predictive_mean == "tangent"
    precision = state.precision[0] if options.structure == "scalar" else state.precision
    mean = model.optimum(state.precision, state.noise_std, state.optimum).vector if around_tangent else None
    return SampledTuningResult(
        method=options.method,
        structure=groups.name,
        prior_precision=precision if scaling is None else model.entries(state.precision),
        group_precision=precision,
        groups=own,
        noise_std=state.noise_std,
        value=math.nan,
        converged=converged,
        residual=state.steps[-1].residual if state.steps else 0.0,
        steps=tuple(state.steps),
        n_evaluations=len(state.steps),
        vector=None if mean is None else mean.to(posterior.mean),
        predictive_mean=options.predictive_mean,
        samples=final.z,
        solved=model.last,
    )


def _means(entries: Tensor, groups: Groups) -> Tensor:
    """Geometric means over groups, ``[G]`` float64."""
    sums = torch.zeros(len(groups.names), dtype=torch.float64).index_add_(0, groups.index, entries.log())
    return (sums / groups.sizes()).exp()


def _g_prior_scaling(problem: TangentProblem, groups: Groups, likelihood: Likelihood) -> Tensor:
    """``diag(H)`` at the present noise, estimated, by which a g-prior multiplies the precisions, ``[P]`` float64."""
    # Where the noise of the estimate starts from is not worth an argument; it is not that of the samples.
    diagonal = problem.curvature.estimated_diagonal(_SCALING_DRAWS, torch.Generator().manual_seed(0)).double().cpu()
    return with_floor(diagonal, groups.index) * float(likelihood.curvature_weights().detach()[0])


_STEP = tuple(field.name for field in fields(TuningStep))


def write_state(checkpoint: Checkpoint, state: TuningState) -> None:
    """Write where a tuning is."""
    tensors: dict[str, Tensor] = {"precision": state.precision, "z": state.z}
    if state.noise_std is not None:
        tensors["noise_std"] = state.noise_std
    if state.optimum is not None:
        tensors["optimum"] = state.optimum
    for name, value in (state.solver or {}).items():
        tensors[f"solver.{name}"] = value
    steps = [*state.steps, *([] if state.pending is None else [state.pending])]
    for number, step in enumerate(steps):
        for name in _STEP:
            value = getattr(step, name)
            if value is not None:
                tensors[f"step.{number}.{name}"] = torch.as_tensor(value, dtype=torch.float64)
    header: dict[str, Any] = {"steps": len(steps), "pending": state.pending is not None, "sound": state.sound}
    checkpoint.write("tuning", header, tensors)


def read_state(checkpoint: Checkpoint, device: torch.device) -> TuningState | None:
    """Where a tuning was; None if nothing was written."""
    found = checkpoint.read("tuning", device)
    if found is None:
        return None
    header, tensors = found
    steps = []
    for number in range(header["steps"]):
        values: dict[str, Any] = {name: tensors.get(f"step.{number}.{name}") for name in _STEP}
        values = {name: None if value is None else value.cpu() for name, value in values.items()}
        values |= {"residual": float(values["residual"]), "iterations": int(values["iterations"])}
        steps.append(TuningStep(**values))
    pending = steps.pop() if header["pending"] else None
    solver = {name.removeprefix("solver."): value for name, value in tensors.items() if name.startswith("solver.")}
    noise = tensors.get("noise_std")
    return TuningState(
        precision=tensors["precision"].cpu(),
        noise_std=None if noise is None else noise.cpu(),
        z=tensors["z"],
        steps=steps,
        optimum=tensors.get("optimum"),
        solver=solver or None,
        pending=pending,
        sound=header["sound"],
    )
