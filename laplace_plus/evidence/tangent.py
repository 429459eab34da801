"""The evidence of the tangent linear model at its own optimum, and tuning by it.

The Laplace evidence assumes that the network's weights are an optimum of the penalised loss. Networks that are stopped
early, or trained with normalisation layers, are not at an optimum, and the Laplace evidence can then prefer absurd
priors. The network's tangent ``h(θ, x) = f(θ̃, x) + J(x) (θ − θ̃)`` is a linear model with the same Jacobian. It has an
optimum θ* for every prior. Its evidence (Antorán et al., "Adapting the linearised Laplace model evidence for modern
deep learning", 2022) has θ* in place of the network's weights:

    M(Λ) = log p(D | h(θ*))/T − ½ ‖θ* − μ₀‖²_Λ − ½ log det(I + Λ⁻¹ H/T),
    θ*   = argmin_θ −log p(D | h(θ))/T + ½ ‖θ − μ₀‖²_Λ.

H is the posterior's own curvature at the network's outputs. It is not recomputed at ``h(θ*)``: the simple variant of
that paper, which did better there.

As θ* is a minimiser, ``∂M/∂log λ_g = ½ (γ_g − λ_g ‖θ* − μ₀‖²_g)`` with the effective parameters
``γ_g = tr (H/T + Λ)⁻¹_g H_g/T``. Where it vanishes, MacKay's (1992) fixed point ``λ_g = γ_g / ‖θ* − μ₀‖²_g`` holds.
This joint stationary point of θ and Λ is found by alternation. Each half maximises

    F(θ, Λ) = log p(D | h(θ))/T − ½ ‖θ − μ₀‖²_Λ − ½ log det(I + Λ⁻¹ H/T)

over one argument, in which it is concave (in log Λ; see :mod:`laplace_plus.evidence.objective`), so F never falls.
Anderson's (1965) extrapolation shortens the way, and is undone wherever M falls.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, DataError, UnsupportedError
from laplace_plus.evidence.fitted_data import survey
from laplace_plus.evidence.groups import check_structure, grouped_model
from laplace_plus.evidence.marginal_likelihood import warn_of_limits
from laplace_plus.evidence.objective import SPAN, Objective, ascend, fixed_point_step
from laplace_plus.evidence.tangent_model import TangentModel, TangentOptimum, tangent_optimum
from laplace_plus.evidence.tuning import Tunable, TuningResult, check_choice, check_counts, check_positive
from laplace_plus.priors import LAYERWISE, Groups

_COARSE = 0.1
"""Accuracy of the first optimum, in nats: a first update of the precisions gains far more than this."""

_REACH = 46.0
"""Half-width of the search in log precision around each group's own scale: a factor of 1e20 either way."""

_POLISHING = 50
"""Most fixed-point steps after a line-searched ascent; a few suffice where they converge at all."""

_REMEMBERED = 5
"""Steps used in an extrapolation, the usual depth of Anderson's method."""


@dataclass(frozen=True, kw_only=True)
class TangentResult(TuningResult):
    """What tuning by the tangent model's evidence found, and how.

    Attributes:
        group_precision: ``[G]``, one precision for each group (for a scalar prior ``[1]``), before any scaling.
        effective_parameters: γ, how many parameters of each of these groups the data determine.
        n_iterations: Number of alternations.
        n_steps: Number of steps that the convex optimisation took, over all alternations.
        n_passes: Number of passes over the data, the one that collects the Jacobian included.
        optimum_gradient_norm: Euclidean norm of the penalised loss's gradient at θ*.
        optimum_decrement: About how many nats the penalised loss at θ* lies above its least value.
        pressing: The largest derivative by the logarithm of a hyperparameter at a limit of the search, beyond which
            the evidence still rises.
        trace: The evidence M after each alternation.
        network_value: The evidence of the network's own weights at the same hyperparameters, for comparison.
    """

    group_precision: Tensor
    effective_parameters: Tensor
    n_iterations: int
    n_steps: int
    n_passes: int
    optimum_gradient_norm: float
    optimum_decrement: float
    pressing: float
    trace: tuple[float, ...]
    network_value: float


@dataclass(frozen=True)
class Tangent:
    """Maximises the evidence of the network's linearisation at its own optimum.

    See :mod:`laplace_plus.evidence.tangent`. Choose it for networks that were stopped early, or that have normalisation
    layers, of which ``structure="normalized_groups"`` gives each normalised layer a precision of its own.

    Args:
        structure: As for :class:`~laplace_plus.MarginalLikelihood`.
        scaling: Likewise.
        predictive_mean: ``"network"``, or ``"tangent"`` for linearised predictions around the tangent model's optimum,
            ``f(x) + J(x) (θ* − θ̃)``.
        data: The training data; by default the loaders of the fit.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        method: How precisions are updated for each θ: ``"marginal_likelihood"`` (to their optimum), ``"mackay"`` (one
            step of the fixed point) or ``"em"`` (one step, slower).
        tolerance: Converged when no derivative of the evidence by the logarithm of a hyperparameter exceeds this, in
            nats.
        max_iterations: The number of alternations after which to give up.
        max_steps: The number of steps after which the convex optimisation of one alternation gives up.
        keep_jacobian: Whether to keep the Jacobian of all data; None for where it is small.

    Raises:
        ConfigurationError: An option that is none of these.
    """

    structure: str | Groups = "scalar"
    scaling: str | None = None
    predictive_mean: str = "network"
    data: Iterable[Any] | None = field(default=None, repr=False)
    tune_noise: bool | None = None
    method: str = "marginal_likelihood"
    tolerance: float = 1e-2
    max_iterations: int = 100
    max_steps: int = 1000
    keep_jacobian: bool | None = None

    METHODS: ClassVar = ("marginal_likelihood", "mackay", "em")

    def __post_init__(self) -> None:
        check_structure(self.structure)
        check_choice("scaling of the prior", self.scaling, (None, "g_prior"))
        check_choice("mean of predictions", self.predictive_mean, ("network", "tangent"))
        check_choice('way to tune by the evidence "tangent"', self.method, self.METHODS)
        check_positive(tolerance=self.tolerance)
        check_counts(max_iterations=self.max_iterations, max_steps=self.max_steps)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TangentResult:
        """Find the optimum and the hyperparameters jointly; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            UnsupportedError: A posterior that was fitted by several processes, or a prior that its structure does not
                take.
            DataError: Not the data of the fit, or data that come only once.
            NonFiniteError: The loss of the tangent model is not finite.

        Warns:
            ConvergenceWarning: The tolerance was not met, or only at the limits of the search.
        """
        if posterior.group is not None and posterior.group.size > 1:
            raise UnsupportedError(
                "The tangent model's optimum is sought by one process.",
                expected="a posterior that was fitted by one process",
                got=f"one over {posterior.group.size} ranks",
                fix="Save it, load it in one process, and pass data= with all the data.",
            )
        model, structure, groups = grouped_model(posterior, self.structure, self.data)
        data = posterior.training_data.again(self.data, "The tangent model's optimum passes over the training data.")
        survey(model, posterior.network, data, posterior.n_data, progress=progress)
        objective = Objective.create(model, structure, posterior.temperature, self.tune_noise, self.scaling)
        objective = replace(objective, limits=_limits(objective))
        kept, temperature = self.keep_jacobian, posterior.temperature
        tangent = TangentModel(posterior.network, model.likelihood, data, temperature=temperature, keep_jacobian=kept)
        if tangent.n_data != posterior.n_data:
            raise DataError(
                "The tangent model's optimum is that of the training data.",
                expected=f"the {posterior.n_data} examples that the posterior was fitted to",
                got=f"{tangent.n_data} examples",
                fix="Pass data=train_loader.",
            )
        ticks = iter(progress_bar(itertools.count(1), enabled=progress, description="tangent evidence"))
        found = _Alternation(self, objective, tangent, groups, ticks).run()
        if found.pressing > self.tolerance:
            warn_of_limits("Tuning by the tangent model's evidence", found.pressing)
        elif not found.converged:
            warnings.warn(
                f"Tuning by the tangent model's evidence ended with a derivative of {found.gradient_norm:.2g} nats "
                f"(tolerance {self.tolerance:.2g}) and an optimum within {found.optimum_decrement:.2g} nats after "
                f"{found.n_iterations} alternations and {found.n_steps} steps; raise max_iterations or max_steps, or "
                "the tolerance.",
                ConvergenceWarning,
                stacklevel=5,
            )
        return found


class _Alternation:
    """Maximises F over θ and Λ alternately."""

    def __init__(
        self, options: Tangent, objective: Objective, tangent: TangentModel, groups: Groups, ticks: Iterator[int]
    ):
        self.options, self.objective, self.tangent, self.groups = options, objective, tangent, groups
        self.ticks = ticks
        self.n_steps = self.n_evaluations = 0

    def run(self) -> TangentResult:
        """Alternate until the tolerance is met."""
        point, start = _start(self.objective), None
        tolerance, accuracy, mixer = self.options.tolerance, _COARSE, _Extrapolation()
        trace: list[float] = []
        plain, best = point, -math.inf
        for iteration in range(1, self.options.max_iterations + 1):
            next(self.ticks)
            optimum, objective = self._optimum(point, start, accuracy)
            value, gradient = objective.value_and_gradient(point)
            self.n_evaluations += 1
            if value < best - 2 * accuracy and mixer.used:  # undo the extrapolation
                point, mixer = plain, _Extrapolation()
                continue
            start, best = optimum.vector, max(best, value)
            trace.append(value)
            accepted = objective, point, value, gradient, optimum
            norm = float(objective.free_gradient(point, gradient).abs().max())
            finest = self._finest(objective, point, optimum)
            exact = optimum.converged and accuracy <= finest
            if exact and norm <= tolerance or iteration == self.options.max_iterations:
                break
            if norm <= tolerance:  # only the optimum's accuracy is missing
                accuracy = finest
                continue
            plain = self._update(objective, point, gradient)
            # Compute θ only as accurately as the next update of Λ needs.
            accuracy = max(finest, min(accuracy, 0.01 * norm**2))
            low, high = objective.box
            point = mixer(point, plain).clamp(low, high)
        return self._result(*accepted, iteration, tuple(trace))

    def _optimum(self, point: Tensor, start: Tensor | None, accuracy: float) -> tuple[TangentOptimum, Objective]:
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
        at = replace(model, vector=optimum.vector, statistics=optimum.statistics)
        return optimum, replace(self.objective, model=at)

    def _finest(self, objective: Objective, point: Tensor, optimum: TangentOptimum) -> float:
        """The accuracy of θ, in nats, that limits the error of every derivative to a quarter of the tolerance.

        ``½ λ ‖θ − μ‖²`` changes by at most ``(λ ‖θ−μ‖² · 2ε)^½`` where the penalised loss is ε above its minimum.
        """
        energy = float((point[: objective.n_precisions].exp() * objective.scatter()).sum())
        rounding = (100 * torch.finfo(self.tangent.vector.dtype).eps) ** 2 * max(1.0, abs(optimum.value))
        return max(self.options.tolerance**2 / (32 * max(1.0, energy)), rounding)

    def _update(self, objective: Objective, point: Tensor, gradient: Tensor) -> Tensor:
        """Better hyperparameters for the present θ."""
        if self.options.method != "marginal_likelihood":
            return fixed_point_step(objective, point, gradient, self.options.method)
        _, point, evaluations = ascend(objective, point, self.options.tolerance, 2000, itertools.count())
        self.n_evaluations += evaluations
        _, gradient = objective.value_and_gradient(point)
        norm = objective.free_gradient(point, gradient).abs().max()
        for _ in range(_POLISHING):  # the fixed point is more accurate than a line search
            if norm <= self.options.tolerance / 10:
                break
            candidate = fixed_point_step(objective, point, gradient, "mackay")
            _, new = objective.value_and_gradient(candidate)
            self.n_evaluations += 1
            new_norm = objective.free_gradient(candidate, new).abs().max()
            if not new_norm < norm:
                break
            point, gradient, norm = candidate, new, new_norm
        return point

    def _result(
        self,
        objective: Objective,
        point: Tensor,
        value: float,
        gradient: Tensor,
        optimum: TangentOptimum,
        iterations: int,
        trace: tuple[float, ...],
    ) -> TangentResult:
        norm = float(objective.free_gradient(point, gradient).abs().max())
        pressing = float((gradient - objective.free_gradient(point, gradient)).abs().max())
        settled = norm <= self.options.tolerance or objective.predicted_gain(point, gradient) <= self.options.tolerance
        precision, noise = objective.split(point)
        dtype = self.tangent.vector.dtype
        with torch.no_grad():
            network_value = self.objective.value(point).item()
        return TangentResult(
            method=self.options.method,
            prior_precision=precision.to(dtype),
            noise_std=noise,
            value=value,
            converged=settled and pressing <= self.options.tolerance and optimum.decrement <= self.options.tolerance,
            pressing=pressing,
            gradient_norm=norm,
            n_evaluations=self.n_evaluations,
            groups=self.groups,
            vector=optimum.vector.to(dtype),
            predictive_mean=self.options.predictive_mean,
            group_precision=point[: objective.n_precisions].exp().to(dtype),
            effective_parameters=objective.effective_parameters(point, gradient),
            n_iterations=iterations,
            n_steps=self.n_steps,
            n_passes=self.tangent.n_passes,
            optimum_gradient_norm=optimum.gradient_norm,
            optimum_decrement=optimum.decrement,
            trace=trace,
            network_value=network_value,
        )


def _own_scales(objective: Objective) -> Tensor:
    """Log precisions of the network's own weights, ``d_g / ‖θ̃−μ‖²_g``.

    They follow a rescaling of a group, so that a search that starts from them does not depend on the group's scale.
    """
    squares = objective.scatter() / objective.sizes()
    overall = squares.mean().clamp(1e-16, 1e26)
    return -torch.where(squares > 1e-12 * overall, squares, overall).log()


def _limits(objective: Objective) -> Tensor:
    """The box in which to search."""
    box, n = objective.box, objective.n_precisions
    if objective.structure != LAYERWISE:
        return box
    own = _own_scales(objective)
    return torch.cat([torch.stack([own - _REACH, own + _REACH]).clamp(-SPAN, SPAN), box[:, n:]], 1)


def _start(objective: Objective) -> Tensor:
    """The best point of a coarse grid by the evidence at the network's weights."""
    if objective.structure != LAYERWISE:
        return objective.start()
    own = _own_scales(objective)
    levels = torch.linspace(-10.0, 10.0, 21, dtype=torch.float64, device="cpu")
    points = [torch.cat([own + level, noise]) for level in levels for noise in objective.noise_grid()]
    with torch.no_grad():
        return max(points, key=lambda point: objective.value(point).item())


class _Extrapolation:
    """Anderson's (1965) extrapolation of a fixed-point iteration, from a few of its last steps."""

    def __init__(self) -> None:
        self._points: list[Tensor] = []
        self._residuals: list[Tensor] = []
        self.used = False

    def __call__(self, point: Tensor, image: Tensor) -> Tensor:
        """The next point, after a point and its image under the iteration."""
        self._points = [*self._points, point][-_REMEMBERED:]
        self._residuals = [*self._residuals, image - point][-_REMEMBERED:]
        self.used = len(self._points) > 1
        if not self.used:
            return image
        residual = self._residuals[-1]
        changes = torch.stack([residual - other for other in self._residuals[:-1]], 1)
        moves = torch.stack([point - other for other in self._points[:-1]], 1)
        # Slightly regularised, since the last changes may be nearly parallel.
        gram = changes.T @ changes
        gram += 1e-10 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        if not bool(torch.isfinite(gram).all()) or float(gram.diagonal().min()) <= 0:
            self.used = False
            return image
        weights = torch.linalg.solve(gram, changes.T @ residual)
        step = residual - (moves + changes) @ weights
        # At most a factor of ten beyond the plain step in each hyperparameter.
        return point + step.clamp(residual - math.log(10), residual + math.log(10))
