"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation.

Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato, "Sampling-based inference for large linear models, with
application to linearised Laplace", 2023. See ``objective`` for the linear systems and
``effective_dimension`` for the estimator behind the prior precision's updates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Backend, Native
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConvergenceWarning, DataError, NonFiniteError, UnsupportedError, warn
from laplace_plus.io import digest
from laplace_plus.io.checkpoints import Checkpoint, identity
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network.batches import same_sum
from laplace_plus.network.gradients import forward_parts
from laplace_plus.network.linearization import ADModes
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.configuration import common_arguments, full_precision, option_config, resolve_option
from laplace_plus.posteriors.resuming import ResumableFit
from laplace_plus.posteriors.sample_based import SampleBased
from laplace_plus.posteriors.sampled.effective_dimension import (
    EffectiveDimension,
    Estimator,
    SamplingReport,
    group_sums,
    total_dimension,
)
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Solved
from laplace_plus.posteriors.sampled.solvers import SOLVERS, CGSolver, SGDSolver, TangentProblem
from laplace_plus.posteriors.sampled.tuning import Alternation, SampledEvidence, SampledTuningResult
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.predictive.deviations import pushed
from laplace_plus.tuning import Tuner, TuningResult
from laplace_plus.tuning.base import tunes_noise

__all__ = ["CGSolver", "SGDSolver", "SampledLaplace", "SamplingReport"]

WHY = "Samples of the posterior come from many passes over the data."

_VECTORS = 9
"""Vectors of the parameters' length that the solution for one sample takes, as measured."""

Path = str | os.PathLike[str]


class SampledLaplace(SampleBased, ResumableFit):
    """Laplace from samples that optimisation finds: for networks on which nothing can be factorised.

    ``n_samples`` draws from ``N(0, (GGN/T + P₀)⁻¹)``, with all correlations between parameters, are the solutions of as
    many linear systems. Conjugate gradients or stochastic gradient descent find them together, from products with the
    curvature. Memory is that of a few ``n_samples`` vectors of the network's size, and time that of the passes over the
    data. The predictive is that of the linearised network; its covariance is the samples' own, ``1/k Σ (J z)(J z)ᵀ``,
    whose rank is at most k and whose relative standard error is ``(2/k)^½``.

    Whatever asks for samples at other hyperparameters than those they were solved for solves again, starting from the
    present samples, if the data of :meth:`fit` are still known; :meth:`solve` does so with data of the caller's.

    :meth:`fit` may shuffle the data. It warns (ConvergenceWarning) if a residual exceeds the solver's tolerance; with
    ``checkpoint=`` it continues from a folder's draws and the state of its solver, to the same samples.

    :meth:`sample` draws from the Gaussian with the samples' covariance, ``θ̂ + k^-½ Σ w_s z_s`` with standard normal
    ``w``, however many are asked for; :attr:`samples` are the k exact draws themselves. The class cannot be updated.

    Args:
        model, likelihood: As for :class:`Posterior`.
        n_samples: k.
        solver: ``"cg"``, ``"sgd"``, or :class:`CGSolver`/:class:`SGDSolver` with options. Where observation noise is
            small, systems are ill-conditioned: ``{"name": "cg", "preconditioner": "nystrom", "rank": 400}`` fitted and
            tuned small regression networks thirty times as fast as the default, which did not arrive.
        chunk_size: Number of vectors that are pushed through the network at a time.
        parameters, prior_precision, prior_mean, temperature, backend, memory_budget: As for :class:`Posterior`.

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

    data_attributes = ("_problem",)

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
        checks.count("n_samples", n_samples)
        checks.count("chunk_size", chunk_size)
        self.n_samples, self.solver, self.chunk_size = n_samples, resolve_option("solver", solver, SOLVERS), chunk_size
        super().__init__(model, likelihood, **common_arguments(locals()))
        self.check_draws(n_samples=n_samples)
        if not isinstance(self.backend, Native) or self.backend.kind != "ggn":
            got = f"{type(self.backend).__name__} with the curvature {self.backend.kind!r}"
            raise UnsupportedError("SampledLaplace needs the native GGN.", expected='backend="native"', got=got)
        self._draws: Draws | None = None
        self._z: Tensor | None = None
        self._solved_at: tuple[Tensor, ...] = ()
        self.data_sum: float | None = None
        self._report: SamplingReport | None = None
        self._problem: TangentProblem | None = None
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
        self.require_vectors(_VECTORS * self.n_samples, f"the solution for {self.n_samples} samples")
        first = self.batches(data)  # which looks whether the outputs are random
        self.network.forward(forward_parts(self.network, next(first).inputs)[0])
        next(first, None)
        problem = self._problem_of(data)
        self.prior()  # refuses a prior of another shape: the selection is final by now
        checkpoint = self._checkpoint(self._checkpoint_folder, problem)
        draws = self._drawn(problem, checkpoint, generator)
        if not bool(torch.isfinite(draws.data.sum())):
            what, fix = "The gradients of the data are not finite.", "Look for NaN and infinities in the data."
            raise NonFiniteError(what, expected="finite activations and gradients", got="NaN or Inf", fix=fix)
        if not bool(draws.data.any()):
            raise self.zero_curvature()
        vector = self.network.vector()
        solved = self._solve(problem, draws, None, checkpoint, progress=progress)
        self._draws, self._problem, self._vector, self.tangent_mean = draws, problem, vector, None
        self.n_data, self.n_outputs = problem.curvature.n_data, problem.curvature.n_classes
        self.data_sum = problem.curvature.data_sum
        self._ad_modes = ADModes()
        self._take(solved)

    def _drawn(self, problem: TangentProblem, checkpoint: Checkpoint, generator: torch.Generator | None) -> Draws:
        saved = checkpoint.read("draws", self.network.device)
        if saved is not None:
            return Draws(saved[1]["prior"], saved[1]["data"])
        own, k = problem.curvature, self.n_samples
        prior = draw_probes("gaussian", k, own.shape[1], generator=generator, dtype=own.dtype, device=own.device)
        draws = Draws(prior, own.pulled_noise(k, generator))
        checkpoint.write("draws", {}, vars(draws))
        return draws

    def _solve(
        self, problem: TangentProblem, draws: Draws, start: Tensor | None, checkpoint: Checkpoint, *, progress: bool
    ) -> Solved:
        """Samples at the present hyperparameters."""
        saved = checkpoint.read("fit", self.network.device)
        system = PriorUnits(problem.curvature, self.prior().vector().detach(), self._weight())
        options = {"state": None if saved is None else saved[1], "description": f"{type(self).__name__}: samples"}
        keep = partial(checkpoint.write, "fit", {})
        return problem.solve(system, draws, start, keep=keep, progress=progress, **options)

    def _weight(self) -> float:
        return float(self.likelihood.curvature_weights().detach()[0] / self._temperature.detach())

    def _take(self, solved: Solved) -> None:
        """Store samples and the report of their solve."""
        index, n_layers = self.network.layer_index(), len(self.network.layers)
        self._parts = [group_sums(solved.u, other, index, n_layers) for other in (solved.image, solved.u)]
        self._z, self._solved_at = solved.z, self._hyperparameters()
        self._report = SamplingReport.create(
            self._parts, self.network, solved.residual, solved.iterations, solved.converged
        )
        if not solved.converged:
            what = (
                f"The samples' residuals are up to {float(solved.residual.max()):.2g} after {solved.iterations} passes "
                f"over the data (tolerance {self.solver.tolerance:.2g}). Allow for more of them, use a preconditioner, "
                "or raise the tolerance."
            )
            warn(what, ConvergenceWarning)

    def _hyperparameters(self) -> tuple[Tensor, ...]:
        precision = self._prior_precision.detach().clone()
        groups = self._group_index() if precision.numel() > 1 else torch.zeros(0, dtype=torch.long)
        return precision, groups, torch.tensor(self._weight(), dtype=torch.float64)

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
        assert self._draws is not None
        problem = self._known_problem(data)
        solved = self._solve(problem, self._draws, self._z, Checkpoint(None, {}), progress=progress)
        self._problem = problem
        self._take(solved)
        return self

    def _problem_of(self, data: Iterable[Any]) -> TangentProblem:
        """One pass over the data, which are checked."""
        return TangentProblem(self.network, self.likelihood, data, self.solver, chunk_size=self.chunk_size)

    def _known_problem(self, data: Iterable[Any] | None) -> TangentProblem:
        if data is None and self._problem is not None:
            return self._problem
        problem = self._problem_of(self.training_data.again(data, WHY))
        n_data, known = problem.curvature.n_data, self.data_sum
        if n_data != self.n_data or (known is not None and not same_sum(known, problem.curvature.data_sum)):
            what = "These are not the data that the noise was drawn for."
            raise DataError(what, expected=f"the {self.n_data} examples of fit(), in any order", got=f"{n_data} others")
        return problem

    @override
    def _deviations(self) -> Tensor:
        self.require_fit()
        now = self._hyperparameters()
        if any(a.shape != b.shape or not torch.equal(a, b.to(a)) for a, b in zip(self._solved_at, now, strict=True)):
            self.solve()
        assert self._z is not None
        return self._z

    def _checkpoint(self, folder: Path | None, problem: TangentProblem, **more: Any) -> Checkpoint:
        curvature, options = problem.curvature, self.options()
        if isinstance(self.solver, CGSolver):  # which does the same whatever its budget, and may be given a greater one
            options["solver"] = {**options["solver"], "max_iterations": None}
        numbers = {"number of batches": curvature.n_batches, "data": f"{curvature.data_sum:.6e}", "options": options}
        return Checkpoint(folder, identity(self, curvature.n_data) | numbers | more)

    @full_precision
    def tune_by_samples(self, options: SampledEvidence, *, progress: bool = False) -> SampledTuningResult:
        """What :class:`SampledEvidence` finds; see there."""
        self.require_vectors(60 + 5 * self.n_samples, "the tangent model's optimum")  # most of them float64
        z, noise = self._deviations(), tunes_noise(self.likelihood, options.tune_noise)
        assert self._draws is not None
        problem = self._problem = self._known_problem(options.data)
        settings, draws = options.identity(tune_noise=noise), digest(self._draws.data)
        checkpoint = self._checkpoint(options.checkpoint, problem, tuning=settings, draws=draws)
        return Alternation(self, problem, self._draws, options, tune_noise=noise, progress=progress).run(z, checkpoint)

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        assert isinstance(result, SampledTuningResult)
        super().apply_tuning(result)
        self._take(result.solved)

    @property
    def report(self) -> SamplingReport:
        """How the solve at the present hyperparameters ended."""
        self._deviations()
        assert self._report is not None
        return self._report

    @full_precision
    def effective_dimension(self, estimator: Estimator = "ratio") -> EffectiveDimension:
        """``γ = tr(H⁻¹ M)``, the number of parameters that the data determine, with its standard error over samples.

        Args:
            estimator: ``"ratio"``, ``"function"`` or ``"weight"``; see the module of that name.
        """
        self._deviations()
        function_space, weight_space = self._parts
        return total_dimension(function_space, weight_space, torch.tensor(self.n_parameters), estimator)

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
        z = self._deviations()
        draws, report = self._draws, self._report
        assert draws is not None and report is not None
        header = {"iterations": report.iterations, "converged": report.converged, "data_sum": self.data_sum}
        tensors = {
            "vector": self.mean,
            "samples": z,
            "draws.prior": draws.prior,
            "draws.data": draws.data,
            "report.residual": report.residual,
            "report.function_space": self._parts[0],
            "report.weight_space": self._parts[1],
        }
        if self.tangent_mean is not None:
            tensors["tangent_mean"] = self.tangent_mean
        return header, tensors

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._vector, self._z, self.tangent_mean = tensors["vector"], tensors["samples"], tensors.get("tangent_mean")
        self._draws = Draws(tensors["draws.prior"], tensors["draws.data"])
        self._parts = [tensors["report.function_space"], tensors["report.weight_space"]]
        self._solved_at, self.data_sum = self._hyperparameters(), header.get("data_sum")
        residual, iterations, converged = tensors["report.residual"], header["iterations"], header["converged"]
        self._report = SamplingReport.create(self._parts, self.network, residual, iterations, converged)
