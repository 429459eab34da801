"""Prior precisions from posterior samples: the fixed points of the evidence's gradient, alternated with sampling.

With the tangent model's optimum θ★ and the effective dimension γ_g of each group of parameters, of size d_g,

    MacKay (1992)                λ_g ← γ_g / ‖θ★_g − μ_g‖²
    expectation maximisation     λ_g ← d_g / (‖θ★_g − μ_g‖² + (d_g − γ_g) / λ_g)
    both                         σ² ← Σ residual² / (N C − T γ)

Both have the same fixed points, where the evidence of the tangent model is stationary. Expectation maximisation never
lowers the evidence, and is slower: where γ_g is far below d_g its steps are short far from any fixed point. How far it
is, for either method, is therefore told by the residual ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, which is MacKay's step
and vanishes with the evidence's derivative by ``log λ_g``, ``½ (γ_g − λ_g ‖θ★_g − μ_g‖²)``; of the noise, by the step
of ``log σ²``. The same draws serve at all precisions, so that the iteration is a deterministic map, and each solution
starts from the one before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence import TuningResult
from laplace_plus.posteriors.sampled.effective_dimension import EffectiveDimension
from laplace_plus.posteriors.sampled.objective import Solved

SampledMethod = Literal["mackay", "em"]
SAMPLED_METHODS: tuple[SampledMethod, ...] = ("mackay", "em")

LARGEST_STEP = math.log(10)
"""A logarithm of a precision changes by at most this in one step."""

_TINY = torch.finfo(torch.float64).tiny

_LEAST = 1e-3
"""Effective parameters that a group keeps, whatever the samples say: of none the logarithm has no limit."""


@dataclass(frozen=True)
class Optimum:
    """The tangent model's optimum at some hyperparameters.

    Attributes:
        vector: θ★, ``[P]``.
        squares: ``‖θ★_g − μ_g‖²``, ``[G]`` float64.
        statistics: The likelihood's statistics of the tangent model's outputs there; None where there is no noise to
            be tuned.
        converged: Whether it was found.
    """

    vector: Tensor
    squares: Tensor
    statistics: Tensor | None
    converged: bool


@dataclass(frozen=True)
class Sampled:
    """Posterior samples at some hyperparameters.

    Attributes:
        z: ``[k, P]``.
        dimension: γ of every group.
        total: γ of all of them together.
        iterations: What the solve took.
        converged: Whether it met its tolerance.
    """

    z: Tensor
    dimension: EffectiveDimension
    total: EffectiveDimension
    iterations: int
    converged: bool


class Model(Protocol):
    """What the iteration alternates between."""

    def optimum(self, precision: Tensor, noise_std: Tensor | None, start: Tensor | None) -> Optimum:
        """θ★ at precisions ``[G]``."""

    def samples(
        self,
        precision: Tensor,
        noise_std: Tensor | None,
        start: Tensor,
        state: Mapping[str, Tensor] | None,
        keep: Callable[[dict[str, Tensor]], None] | None,
    ) -> Sampled:
        """Samples at precisions ``[G]``, from those at others."""


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


def updated_precision(
    method: SampledMethod, precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor
) -> Tensor:
    """One update of the precisions ``[G]``, with a limited step.

    Args:
        method: ``"mackay"`` or ``"em"``.
        precision: λ_g.
        effective: γ_g, between 0 and the size.
        size: d_g.
        squares: ``‖θ★_g − μ_g‖²``.
    """
    if method == "mackay":
        step = mackay_steps(precision, effective, size, squares)
    else:
        effective = effective.clamp_min(_LEAST).minimum(size)
        step = (size / (precision * squares + size - effective).clamp_min(_TINY)).log()
    return precision * step.clamp(-LARGEST_STEP, LARGEST_STEP).exp()


def mackay_steps(precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """``log(γ_g / (λ_g ‖θ★_g − μ_g‖²))``, ``[G]``: zero where the evidence is stationary.

    Arguments as for :func:`updated_precision`.
    """
    return (effective.clamp_min(_LEAST).minimum(size) / (precision * squares).clamp_min(_TINY)).log()


def updated_noise(statistics: Tensor, effective: float, temperature: float) -> Tensor:
    """The noise level ``σ`` at which the evidence is stationary, 0-d float64.

    Args:
        statistics: Sum of squared residuals and number of outputs.
        effective: γ of all parameters.
        temperature: T.
    """
    total, count = statistics.double().cpu()
    return (total / (count - temperature * effective).clamp_min(1e-12)).clamp_min(1e-30).sqrt()


@dataclass
class TuningState:
    """Where the iteration is; all that an interrupted one needs to go on.

    Attributes:
        precision: The current precisions, ``[G]``.
        noise_std: The current noise level.
        z: Samples: at these hyperparameters, or, while they are being solved for, at those before.
        steps: The updates so far.
        optimum: θ★ at the hyperparameters before.
        solver: The state of an unfinished solve.
        pending: The update whose solve is unfinished.
        sound: Whether all solves and optima so far have converged.
    """

    precision: Tensor
    noise_std: Tensor | None
    z: Tensor
    steps: list[TuningStep]
    optimum: Tensor | None = None
    solver: Mapping[str, Tensor] | None = None
    pending: TuningStep | None = None
    sound: bool = True


def tune_by_samples(
    model: Model,
    state: TuningState,
    current: Sampled | None,
    *,
    method: SampledMethod,
    temperature: float,
    tune_noise: bool,
    max_steps: int,
    tolerance: float,
    progress: bool,
    keep: Callable[[TuningState], None] | None,
) -> tuple[Sampled, bool]:
    """Alternate between the optimum, the samples and the update until the evidence is stationary.

    Args:
        model: What gives optimum and samples.
        state: Where to start, or to go on; changed in place.
        current: The samples at the state's hyperparameters; None where a solve is unfinished.
        method: The update.
        temperature: T.
        tune_noise: Whether to update the noise.
        max_steps: Where to give up.
        tolerance: Converged once no residual is greater, with either method.
        progress: Whether to show a progress bar.
        keep: Called with the state where it is worth keeping.

    Returns:
        The samples at the final hyperparameters, and whether the iteration converged.

    Warns:
        ConvergenceWarning: It did not.
    """
    if method not in SAMPLED_METHODS:
        raise ConfigurationError("Unknown method.", expected=", ".join(SAMPLED_METHODS), got=repr(method))
    residual = state.steps[-1].residual if state.steps else math.inf
    for _ in progress_bar(range(len(state.steps), max_steps), enabled=progress, description=f"tuning by {method}"):
        if residual < tolerance:
            break
        if state.pending is None:
            assert current is not None
            state.pending = _update(model, state, current, method, temperature, tune_noise)
        pending = state.pending
        current = model.samples(pending.prior_precision, pending.noise_std, state.z, state.solver, _keeper(state, keep))
        state.sound &= current.converged
        done = TuningStep(**{**vars(pending), "iterations": current.iterations})
        state.steps.append(done)
        state.precision, state.noise_std, state.z = done.prior_precision, done.noise_std, current.z
        state.solver = state.pending = None
        residual = done.residual
        if keep is not None:
            keep(state)
    assert current is not None
    converged = residual < tolerance and state.sound
    if not converged:
        why = (
            f"the last of {len(state.steps)} steps found a residual of {residual:.2g} (tolerance {tolerance:.2g})"
            if residual >= tolerance
            else "a solve or an optimum did not meet its tolerance"
        )
        warnings.warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning, stacklevel=4)
    return current, converged


def _update(
    model: Model, state: TuningState, current: Sampled, method: SampledMethod, temperature: float, tune_noise: bool
) -> TuningStep:
    found = model.optimum(state.precision, state.noise_std, state.optimum)
    state.optimum = found.vector
    state.sound &= found.converged
    dimension = current.dimension
    terms = state.precision, dimension.value.cpu(), dimension.size.cpu(), found.squares.cpu()
    precision = updated_precision(method, *terms)
    residuals = [float(mackay_steps(*terms).abs().max())]
    noise = state.noise_std
    if tune_noise:
        assert found.statistics is not None and noise is not None
        updated = updated_noise(found.statistics, float(current.total.value), temperature).view_as(noise)
        residuals.append(float((updated / noise.double().cpu()).log().abs().max() * 2))
        noise = updated
    return TuningStep(
        precision, noise, dimension.value.cpu(), dimension.sem.cpu(), found.squares.cpu(), max(residuals), 0
    )


def _keeper(
    state: TuningState, keep: Callable[[TuningState], None] | None
) -> Callable[[dict[str, Tensor]], None] | None:
    if keep is None:
        return None

    def kept(solver: dict[str, Tensor]) -> None:
        state.solver = solver
        keep(state)

    return kept
