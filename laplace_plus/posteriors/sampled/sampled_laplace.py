"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation.

Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato, "Sampling-based inference for large linear models, with
application to linearised Laplace", 2023. See ``systems`` for the linear systems, their solvers, and the estimator
of the effective dimension, and ``tuning`` for prior precisions by samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Native
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.network.network import full_precision
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.predicting import SampleBased
from laplace_plus.posteriors.public import require_influence, require_one_noise
from laplace_plus.posteriors.sampled.systems import SOLVERS, Draws, PriorUnits, SamplingReport, Solved, TangentProblem
from laplace_plus.posteriors.sampled.tuning import SampledEvidence, SampledTuningResult
from laplace_plus.posteriors.state import State, require_restartable, require_same_data
from laplace_plus.posteriors.storing import resolve_option
from laplace_plus.tuning import Tuner, TuningResult, Unseen
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.marginal_likelihood import MarginalLikelihood

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
        "marginal_likelihood": MarginalLikelihood,
        "unseen": Unseen,
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
        return self.solved_state().samples * self.covariance_scale**0.5

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
