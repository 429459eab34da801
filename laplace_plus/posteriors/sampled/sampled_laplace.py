"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation, and its tuning.

Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato, "Sampling-based inference for large linear models, with
application to linearised Laplace", 2023. See ``systems`` for the linear systems, their solvers, and the estimator
of the effective dimension.

Prior precisions are fixed points of the evidence's gradient, alternated with sampling. With the tangent model's optimum
θ★ and the effective dimension γ_g of each group of parameters (MacKay, 1992),

    λ_g ← γ_g / ‖θ★_g − μ_g‖²,        σ² ← Σ residual² / (N C − T γ).

At its fixed points the evidence of the tangent model is stationary. Convergence is measured by the residual
``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, the step, which vanishes with the evidence's derivative by ``log λ_g``,
``½ (γ_g − λ_g ‖θ★_g − μ_g‖²)``; that of the noise is the step of ``log σ²``. The same draws serve at all precisions, so
that the iteration is a deterministic map, and each solution starts from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.curvature import Native
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.estimates import draw_probes, standard_error
from laplace_plus.network.network import full_precision
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.predicting import SampleBased
from laplace_plus.posteriors.public import require_influence, require_one_noise
from laplace_plus.posteriors.sampled.systems import (
    SOLVERS,
    Draws,
    PriorUnits,
    SamplingReport,
    Solved,
    TangentProblem,
    effective_dimension,
    group_sums,
)
from laplace_plus.posteriors.state import State, require_restartable, require_same_data
from laplace_plus.posteriors.storing import resolve_option
from laplace_plus.priors import GaussianPrior, Groups
from laplace_plus.tuning import Tuner, TuningResult
from laplace_plus.tuning.base import tunes_noise
from laplace_plus.tuning.groups import chosen_groups, with_floor
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.marginal_likelihood import MarginalLikelihood, knows_precisions, updated_noise
from laplace_plus.tuning.tangent_model import TangentModel, TangentOptimum, tangent_optimum

# -- tuning ------------------------------------------------------------------------------------------------------------


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
            steps.append(self._step(precision, noise, current, found, squares))
            precision, noise, optimum = steps[-1].prior_precision, steps[-1].noise_std, found.vector
            current = self._problem.solve(self._system(precision, noise), self._draws, current.z)
            sound = sound and found.converged and current.report.converged
            if len(steps) > 1:  # steps that shrink by ρ each time sum to 1/(1 − ρ) times the last one
                slow = 1 / (1 - min(steps[-1].residual / max(steps[-2].residual, 1e-30), 0.99))
            if steps[-1].residual * slow < options.tolerance:
                break
        residual, tolerance = steps[-1].residual, options.tolerance
        if not (converged := residual * slow < tolerance and sound):
            why = "a solve or an optimum did not meet its tolerance"
            if residual * slow >= tolerance:
                why = (
                    f"the last of {len(steps)} steps found a residual of {residual:.2g}, and further ones may add up to"
                )
                why = f"{why} {residual * slow:.2g} (tolerance {tolerance:.2g})"
            warn(f"Tuning by samples has not converged: {why}.", ConvergenceWarning)
        precision_sem = slow * float((steps[-1].sem / steps[-1].effective_dimension.clamp_min(_LEAST)).max())
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
            residual=residual,
            steps=tuple(steps),
            n_evaluations=len(steps),
            solved=current,
        )

    def _evidence(self, precision: Tensor, noise: Tensor | None, found: TangentOptimum) -> tuple[float, float]:
        """The evidence of the tangent model, and its standard error."""
        model = self._posterior.laplace_model(self._problem)
        model = replace(
            model, vector=found.vector.to(model.vector), statistics=found.statistics, layer_index=self._groups.index
        )
        prior = precision if self._options.scaling is None else self._entries(precision)
        own = prior, self._temperature, noise
        value, forms = float(model.log_marginal_likelihood(*own)), model.forms(*own)
        return value, 0.0 if forms is None else float(standard_error(forms)) / 2

    def _step(
        self, precision: Tensor, noise: Tensor | None, at: Solved, found: TangentOptimum, squares: Tensor
    ) -> TuningStep:
        """The update of the hyperparameters, of which the samples are still to be solved for."""
        sizes = self._groups.sizes().cpu()
        data, prior = (own.cpu() for own in at.forms(self._groups.index))
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

        found = tangent_optimum(
            self._tangent.with_likelihood(self._likelihood(noise)),
            prior,
            start,
            precondition=None if whitened is None else precondition,
            tolerance=self._options.optimum_tolerance,
        )
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


# -- the posterior -----------------------------------------------------------------------------------------------------


WHY = "Samples of the posterior come from many passes over the data."


@stored
@dataclass(frozen=True)
class SampledState(State):
    """What a fit keeps: its draws, and the samples at some hyperparameters.

    Attributes:
        data_sum: A number by which the training data are recognised.
        samples: ``z [k, P]``.
        precision, weight: The prior precision ``[P]`` and the weight of ``M₁`` that they were solved for.
        report: How the solve ended.
    """

    draws: Draws
    data_sum: float
    samples: Tensor
    precision: Tensor
    weight: float
    report: SamplingReport


class SampledLaplace(SampleBased, Posterior):
    """Laplace from samples that optimisation finds: for networks on which nothing can be factorised.

    ``n_samples`` draws from ``N(0, (GGN/T + P₀)⁻¹)``, with all correlations between parameters, are the solutions of as
    many linear systems. Conjugate gradients or stochastic gradient descent find them together, from products with the
    curvature. Memory is that of a few ``n_samples`` vectors of the network's size, and time that of the passes over the
    data. The predictive is that of the linearised network; its covariance is the samples' own, ``1/k Σ (J z)(J z)ᵀ``,
    whose rank is at most k and whose relative standard error is ``(2/k)^½``.

    Whatever asks for samples at other hyperparameters than those they were solved for solves again, starting from the
    present samples, if the data of :meth:`fit` are still known; :meth:`solve` does so with data of the caller's.

    Beside the published fixed point of samples, the default, ``fit_prior_precision("marginal_likelihood")`` climbs the
    evidence at the network's own weights; its result says how accurately.

    :meth:`fit` may shuffle the data. It warns (ConvergenceWarning) if a residual exceeds the solver's tolerance.

    :meth:`sample` draws from the Gaussian with the samples' covariance, ``θ̂ + k^-½ Σ w_s z_s`` with standard normal
    ``w``, however many are asked for; :attr:`samples` are the k exact draws themselves. The class cannot be updated.

    Args:
        model, likelihood: As for :class:`Posterior`.
        n_samples: k.
        solver: ``"cg"``, ``"sgd"``, or :class:`CGSolver`/:class:`SGDSolver` with options. Where observation noise is
            small, systems are ill-conditioned: ``{"name": "cg", "preconditioner": "nystrom", "rank": 400}`` fitted and
            tuned small regression networks thirty times as fast as the default, which did not arrive.
        chunk_size: Number of vectors that are pushed through the network at a time.
        parameters, prior_precision, prior_mean, temperature, backend: As for :class:`Posterior`.

    Raises:
        UnsupportedError: A backend other than the native one with the generalised Gauss-Newton matrix.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.SampledLaplace(net, "regression", n_samples=4).fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = dict.fromkeys(("mackay", "tangent"), SampledEvidence) | {
        "marginal_likelihood": MarginalLikelihood
    }

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        n_samples: int = 6,
        solver: Any = "cg",
        chunk_size: int = CHUNK_SIZE,
        **common: Any,
    ):
        self.n_samples, self.chunk_size = checks.count("n_samples", n_samples), checks.count("chunk_size", chunk_size)
        self.solver = resolve_option("solver", solver, SOLVERS)
        super().__init__(model, likelihood, **common)
        if not isinstance(self.backend, Native) or self.backend.kind != "ggn":
            got = f"{type(self.backend).__name__} with the curvature {self.backend.kind!r}"
            raise UnsupportedError("SampledLaplace needs the native GGN.", expected='backend="native"', got=got)

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SampledState:
        require_restartable(data, WHY)
        require_one_noise(self)
        problem = TangentProblem(self.network, self.likelihood, data, self.solver, chunk_size=self.chunk_size)
        own, k = problem.curvature, self.n_samples
        prior = draw_probes("gaussian", k, own.shape[1], generator=generator, dtype=own.dtype, device=own.device)
        draws = Draws(prior, own.pulled_noise(k, generator))
        checks.finite("The sum of the data's gradients", draws.data, "Look for NaN and infinities in the data.")
        require_influence(self, draws.data.any())
        solution = self._solution(self._solved(problem, draws, None, progress=progress))
        return SampledState(self.network.vector(), own.n_data, own.n_classes, draws, own.data_sum, **solution)

    def _solved(self, problem: TangentProblem, draws: Draws, start: Tensor | None, *, progress: bool) -> Solved:
        """The draws' samples at the present hyperparameters."""
        system = PriorUnits(problem.curvature, self.prior().vector().detach(), self._weight())
        return problem.solve(system, draws, start, progress=progress)

    def _solution(self, solved: Solved) -> dict[str, Any]:
        """What a solve at the present hyperparameters changes in the state."""
        report = solved.report
        if not report.converged:
            what = (
                f"The samples' residuals are up to {float(report.residual.max()):.2g} after {report.iterations} passes"
            )
            what += f" over the data (tolerance {self.solver.tolerance:.2g}). Allow for more of them, use a"
            warn(f"{what} preconditioner, or raise the tolerance.", ConvergenceWarning)
        precision = self.prior().vector().detach().clone()
        return {"samples": solved.z, "precision": precision, "weight": self._weight(), "report": report}

    def _weight(self) -> float:
        return float(self.likelihood.curvature_weights().detach()[0] / self._temperature.detach())

    @full_precision
    def solve(self, data: Iterable[Any] | None = None, *, progress: bool = False) -> Self:
        """Solve for the samples at the present hyperparameters, with the draws of :meth:`fit` and from its samples.

        Args:
            data: The training data; by default those of :meth:`fit`.
            progress: Whether to show a progress bar.

        Raises:
            DataError: The data are not known any more, or not those of the fit.

        Warns:
            ConvergenceWarning: A residual exceeds the tolerance.
        """
        self.require_fit()
        solved = self._solved(self.problem(data), self.state.draws, self.state.samples, progress=progress)
        self._found = replace(self.state, **self._solution(solved))
        return self

    def problem(self, data: Iterable[Any] | None) -> TangentProblem:
        """The linear systems of the training data, by default those that :meth:`fit` saw; DataError for others."""
        data = self.training_data.again(data, WHY)
        found = TangentProblem(self.network, self.likelihood, data, self.solver, chunk_size=self.chunk_size)
        now = found.curvature.n_data, found.curvature.data_sum
        require_same_data("the fit", (self.n_data, self.state.data_sum), now)
        return found

    def laplace_model(self, problem: TangentProblem | None = None) -> LaplaceModel:
        """What the evidence at the network's weights is a function of, from passes over the training data.

        See :meth:`TangentCurvature.evidence_curvature`, also for costs; DataError where the data are not known.
        """
        self.require_fit()
        own = (self.problem(None) if problem is None else problem).curvature
        given: Any = {"likelihood": self.likelihood, "statistics": own.statistics, "backend": self.backend}
        index = self._group_index()
        return LaplaceModel(
            own.evidence_curvature(), self.mean, self._prior_mean, index, n_outputs=self.n_outputs, **given
        )

    def solved_state(self) -> SampledState:
        """The state with samples at the present hyperparameters, which are solved for where these have changed."""
        self.require_fit()
        precision = self.prior().vector().detach()
        if self.state.weight != self._weight() or not torch.equal(self.state.precision.to(precision), precision):
            self.solve()
        return self.state

    @override
    def _deviations(self) -> Tensor:
        return self.solved_state().samples

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        super().apply_tuning(result)
        if isinstance(result, SampledTuningResult):  # else samples are solved for when they are asked for
            self._found = replace(self.state, **self._solution(result.solved))

    @property
    def report(self) -> SamplingReport:
        """How the solve at the present hyperparameters ended."""
        return self.solved_state().report

    @full_precision
    def effective_dimension(self) -> Estimate:
        """``γ = tr(H⁻¹ M)``, the number of parameters that the data determine, with its standard error over samples."""
        return self.solved_state().report.effective_dimension

    @override
    def save(self, path: str | PathLike[str]) -> None:
        self.solved_state()  # the file cannot solve for other samples, as it is without the data
        super().save(path)
