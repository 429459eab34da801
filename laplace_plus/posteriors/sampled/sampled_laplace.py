"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation.

Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato, "Sampling-based inference for large linear models, with
application to linearised Laplace", 2023. See ``objective`` for the linear systems and
``effective_dimension`` for the estimator behind the prior precision's updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Backend, Native
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network.linearization import ADModes
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.configuration import common_arguments, full_precision, option_config, resolve_option
from laplace_plus.posteriors.sample_based import SampleBased
from laplace_plus.posteriors.sampled.effective_dimension import (
    EffectiveDimension,
    Estimator,
    SamplingReport,
    total_dimension,
)
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.solvers import SOLVERS, CGSolver, SGDSolver, TangentProblem
from laplace_plus.posteriors.sampled.tuning import SampledEvidence, SampledTuningResult
from laplace_plus.posteriors.training_data import require_restartable, require_same_data
from laplace_plus.predictive.deviations import pushed
from laplace_plus.tuning import Tuner, TuningResult

__all__ = ["CGSolver", "SGDSolver", "SampledLaplace", "SamplingReport"]

WHY = "Samples of the posterior come from many passes over the data."


@dataclass(frozen=True)
class SampledState:
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


class SampledLaplace(SampleBased):
    """Laplace from samples that optimisation finds: for networks on which nothing can be factorised.

    ``n_samples`` draws from ``N(0, (GGN/T + P₀)⁻¹)``, with all correlations between parameters, are the solutions of as
    many linear systems. Conjugate gradients or stochastic gradient descent find them together, from products with the
    curvature. Memory is that of a few ``n_samples`` vectors of the network's size, and time that of the passes over the
    data. The predictive is that of the linearised network; its covariance is the samples' own, ``1/k Σ (J z)(J z)ᵀ``,
    whose rank is at most k and whose relative standard error is ``(2/k)^½``.

    Whatever asks for samples at other hyperparameters than those they were solved for solves again, starting from the
    present samples, if the data of :meth:`fit` are still known; :meth:`solve` does so with data of the caller's.

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
        ConfigurationError: An unknown solver or number of samples, besides what :class:`Posterior` raises.
        UnsupportedError: A backend other than the native one with the generalised Gauss-Newton matrix.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.SampledLaplace(net, "regression", n_samples=4).fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = dict.fromkeys(("mackay", "em", "tangent"), SampledEvidence)

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        n_samples: int = 6,
        solver: Any = "cg",
        chunk_size: int = CHUNK_SIZE,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        self.n_samples, self.chunk_size = checks.count("n_samples", n_samples), checks.count("chunk_size", chunk_size)
        self.solver = resolve_option("solver", solver, SOLVERS)
        super().__init__(model, likelihood, **common_arguments(locals()))
        if not isinstance(self.backend, Native) or self.backend.kind != "ggn":
            got = f"{type(self.backend).__name__} with the curvature {self.backend.kind!r}"
            raise UnsupportedError("SampledLaplace needs the native GGN.", expected='backend="native"', got=got)
        self._state: SampledState | None = None
        self._ad_modes = ADModes()

    @override
    def options(self) -> dict[str, Any]:
        solver = option_config(self.solver, SOLVERS)
        return {"n_samples": self.n_samples, "solver": solver, "chunk_size": self.chunk_size}

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        require_restartable(data, WHY)
        if self.likelihood.n_noise > 1:
            fix = "Use lp.Gaussian() with a single noise_std."
            raise UnsupportedError("Samples for several noise levels hold for those levels only.", fix=fix)
        next(self.batches(data))  # which looks whether the outputs are random
        problem = TangentProblem(self.network, self.likelihood, data, self.solver, chunk_size=self.chunk_size)
        own, k = problem.curvature, self.n_samples
        prior = draw_probes("gaussian", k, own.shape[1], generator=generator, dtype=own.dtype, device=own.device)
        draws = Draws(prior, own.pulled_noise(k, generator))
        checks.finite("The sum of the data's gradients", draws.data, "Look for NaN and infinities in the data.")
        if not bool(draws.data.any()):
            raise self.zero_curvature()
        self._vector, self.tangent_mean, self._ad_modes = self.network.vector(), None, ADModes()
        self.n_data, self.n_outputs = own.n_data, own.n_classes
        self._state = self._solved(problem, draws, None, progress=progress)

    def _solved(
        self, problem: TangentProblem, draws: Draws, start: Tensor | None, *, progress: bool = False
    ) -> SampledState:
        """The draws' samples at the present hyperparameters."""
        system = PriorUnits(problem.curvature, self.prior().vector().detach(), self._weight())
        description = f"{type(self).__name__}: samples"
        solved = problem.solve(system, draws, start, progress=progress, description=description)
        return self._with_samples(draws, solved, problem.curvature.data_sum)

    def _with_samples(self, draws: Draws, solved: Solved, data_sum: float) -> SampledState:
        if not solved.converged:
            what = (
                f"The samples' residuals are up to {float(solved.residual.max()):.2g} after {solved.iterations} passes "
                f"over the data (tolerance {self.solver.tolerance:.2g}). Allow for more of them, use a preconditioner, "
                "or raise the tolerance."
            )
            warn(what, ConvergenceWarning)
        size = torch.bincount(self.network.layer_index(), minlength=len(self.network.layers))
        forms = solved.forms(self.network.layer_index(), len(size))
        report = SamplingReport(solved.residual, solved.iterations, solved.converged, *forms, size)
        return SampledState(draws, data_sum, solved.z, self.prior().vector().detach().clone(), self._weight(), report)

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
        assert self._state is not None
        self._state = self._solved(self.problem(data), self._state.draws, self._state.samples, progress=progress)
        return self

    def problem(self, data: Iterable[Any] | None) -> TangentProblem:
        """The linear systems of the training data, by default those that :meth:`fit` saw; DataError for others."""
        data = self.training_data.again(data, WHY)
        found = TangentProblem(self.network, self.likelihood, data, self.solver, chunk_size=self.chunk_size)
        assert self._state is not None
        now = found.curvature.n_data, found.curvature.data_sum
        require_same_data("the fit", (self.n_data, self._state.data_sum), now)
        return found

    def solved_state(self) -> SampledState:
        """The state with samples at the present hyperparameters, which are solved for where these have changed."""
        self.require_fit()
        assert self._state is not None
        precision = self.prior().vector().detach()
        if self._state.weight != self._weight() or not torch.equal(self._state.precision.to(precision), precision):
            self.solve()
        return self._state

    @override
    def _deviations(self) -> Tensor:
        return self.solved_state().samples

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        assert isinstance(result, SampledTuningResult) and self._state is not None
        super().apply_tuning(result)
        self._state = self._with_samples(self._state.draws, result.solved, self._state.data_sum)

    @property
    def report(self) -> SamplingReport:
        """How the solve at the present hyperparameters ended."""
        return self.solved_state().report

    @full_precision
    def effective_dimension(self, estimator: Estimator = "ratio") -> EffectiveDimension:
        """``γ = tr(H⁻¹ M)``, the number of parameters that the data determine, with its standard error over samples.

        Args:
            estimator: ``"ratio"``, ``"function"`` or ``"weight"``; see the module of that name.
        """
        checks.choice("estimator", estimator, ("ratio", "function", "weight"))
        report = self.solved_state().report
        return total_dimension(report.function_space, report.weight_space, report.size, estimator)

    @override
    def _pushed(self, x: Any, generator: torch.Generator | None = None, n: int = 0) -> tuple[Tensor, Tensor]:
        z = self._deviations()
        if self.tangent_mean is not None:
            z = torch.cat([z, (self.tangent_mean - self.mean).to(z)[None]])
        mean, deviations = pushed(
            self.network, z, self.network.receive(x), n_outputs=self.n_outputs, ad_modes=self._ad_modes
        )
        return (mean, deviations) if self.tangent_mean is None else (mean + deviations[-1], deviations[:-1])

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state = self.solved_state()
        both = vars(state) | vars(state.report) | {"draws." + name: value for name, value in vars(state.draws).items()}
        numbers = {name: value for name, value in both.items() if isinstance(value, bool | int | float)}
        tensors = {name: value for name, value in both.items() if isinstance(value, Tensor)} | {"vector": self.mean}
        return numbers, tensors if self.tangent_mean is None else {**tensors, "tangent_mean": self.tangent_mean}

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._vector, self.tangent_mean = tensors["vector"], tensors.get("tangent_mean")
        own: dict[str, Any] = {**header, **tensors, "draws": Draws(tensors["draws.prior"], tensors["draws.data"])}
        own["report"] = SamplingReport(**{one.name: own[one.name] for one in fields(SamplingReport)})
        self._state = SampledState(**{one.name: own[one.name] for one in fields(SampledState)})
