"""The projected Laplace posterior (Miani, Roy and Hauberg, 2025, *Bayes without underfitting*).

``N(θ̂, α⁻¹ P)`` with P the projector onto the null space of the training data's Jacobian: there the linearised network
can move without changing a prediction on the training data. With r the rank of the Jacobian the evidence of such a
model is, up to a constant, ``½ (r log α − α ‖θ̂ − μ‖²)``, so that ``α = r / ‖θ̂ − μ‖²`` maximises it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.curvature import Backend
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence import TuningResult
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.null_space import ProjectionMethod
from laplace_plus.posteriors.configuration import check_count, full_precision
from laplace_plus.posteriors.projection.noise import (
    NoiseReport,
    ProjectedNoise,
    ProjectedNoisePosterior,
    check_single,
    projector_config,
)
from laplace_plus.posteriors.projection.rows import Rows, check_rows
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.selection import Selection

_WHY = "The projection passes over the data again and again."


class NullSpace(ProjectedNoisePosterior):
    """The Gaussian ``N(θ̂, α⁻¹ P)`` on the null space of the training Jacobian: no uncertainty where there were data.

    Choose it for overparametrised networks, where samples of other Laplace approximations underfit. The linearised
    network's predictions on the training data are exactly the trained network's, and only others get error bars. It
    does not tell how uncertain predictions are near the training data (:class:`VIKING` does). The null space must not
    be zero: there have to be fewer independent rows than parameters.

    Memory is that of ``n_samples`` vectors of the network's size and a few for the projection. Time is that of passes
    over the data: one Jacobian product and one transposed product for each iteration, a few samples at once. The number
    of iterations grows with the rows' condition number: tens on images with ``rows="loss"``, more than thousands for
    many points of a curve, where ``projector="svd"`` is better. Samples that did not converge still leave predictions
    on the training data nearly as they are (``report.residual``), but are too large elsewhere.

    The prior precision α scales all samples alike. :meth:`fit_prior_precision` sets it to its optimum
    ``rank / ‖θ̂ − μ‖²``, by a line search on the training loss, or by held-out data. The optimum often leaves the range
    in which the linearisation holds; predictions are therefore those of the linearised network by default.

    :meth:`fit` draws normal vectors and projects them. It warns (ConvergenceWarning) of projections that did not meet
    their tolerance, and raises UnsupportedError if there are as many independent rows as parameters.

    Args:
        model, likelihood: As for :class:`Posterior`.
        rows: What must not change on the training data: ``"logit"``, all outputs; ``"ggn"``, what the curvature sees of
            them (for classes, all but a common shift); ``"loss"``, the loss of each example to first order, which takes
            one row for each example rather than C and leaves a larger null space. Examples that are fitted exactly have
            no such row; the report counts them.
        projector: ``"lsmr"``, ``"svd"`` (exact, for small problems), ``"alternating"`` (the paper's sweeps), or
            ``lp.linalg.LSMRProjection``, ``SVDProjection`` or ``AlternatingProjection`` with options.
        n_samples: Number k of samples.
        chunk_size: Number of vectors that are pushed through the network at a time.
        parameters, prior_precision, prior_mean, temperature, backend, memory_budget: As for :class:`Posterior`.

    Raises:
        ConfigurationError: An unknown kind of rows, projector or number.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.NullSpace(net, "regression", n_samples=5).fit([(x, 2 * x)])
        >>> bool(posterior.functional_posterior(x).covariance.max() < 1e-4)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        rows: Rows = "logit",
        projector: str | ProjectionMethod | dict[str, Any] = "lsmr",
        n_samples: int = 30,
        chunk_size: int = 16,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        check_rows(rows)
        self.rows = rows
        self._take_options(projector, n_samples, chunk_size)
        super().__init__(
            model,
            likelihood,
            parameters=parameters,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
            backend=backend,
            memory_budget=memory_budget,
        )
        check_single(self._prior_precision)

    @override
    def options(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "projector": projector_config(self.projector),
            "n_samples": self.n_samples,
            "chunk_size": self.chunk_size,
        }

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        start = self._start(data, generator, _WHY)
        noise = self._project(self.network, data, start, keep_range=False, progress=progress)
        self._take_noise(noise, self.network.vector(), start)
        noise.report.warn_unless_converged(5)

    @property
    def null_space_dimension(self) -> Estimate:
        """``P − rank``, with the error of the rank."""
        rank = self.report.rank
        return Estimate(self.n_parameters - rank.value, rank.sem, 0, rank.converged, rank.probes)

    @full_precision
    def relative_log_evidence(self, prior_precision: float | Tensor | None = None) -> Tensor:
        """``½ (r log α − α ‖θ̂ − μ‖²)``, the log evidence up to a term without α; 0-d float64, differentiable."""
        alpha = torch.as_tensor(self._prior_precision if prior_precision is None else prior_precision).double()
        return (self.report.rank.value * alpha.log() - alpha * self._scatter()) / 2

    def _scatter(self) -> Tensor:
        return (self.mean - self._prior_mean.to(self.mean)).double().square().sum()

    @full_precision
    def fit_prior_precision(
        self,
        method: Literal["optimal", "line_search", "validation"] = "optimal",
        *,
        data: Iterable[Any] | None = None,
        allowance: float = 0.01,
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Choose α.

        Args:
            method: ``"optimal"``, ``rank / ‖θ̂ − μ‖²``; ``"line_search"``, the smallest α for which the mean training
                loss of *sampled networks* (which are not linear in the samples) is at most ``allowance`` above the
                trained network's; ``"validation"``, the least negative log-likelihood of the predictive on held-out
                ``data``, on a grid of half decades around the optimum.
            data: Held-out batches for ``"validation"``; training batches for ``"line_search"``, by default those of
                :meth:`fit`.
            allowance: Of ``"line_search"``, in nats for each target.
            n_samples: Sampled networks of ``"line_search"``.
            generator: Source of randomness of predictions that draw samples.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An unknown method, or no held-out data.
            DataError: Training data that are not known any more.
        """
        self.require_fit()
        scatter = self._scatter()
        if not scatter > 0:
            raise ConfigurationError("The weights equal the prior mean.", expected="other weights", got="‖θ̂ − μ‖ = 0")
        optimum = float(self.report.rank.value / scatter)
        if method == "optimal":
            chosen, value, count = optimum, float(self.relative_log_evidence(optimum)), 1
        elif method == "line_search":
            chosen, value, count = self._line_search(
                self.training_data.again(data, _WHY), allowance, n_samples, optimum
            )
        elif method == "validation":
            if data is None:
                raise ConfigurationError("Validation needs held-out data.", expected="data=…", got="none")
            require_restartable(data, "Each precision is tried on the data.")
            grid = [optimum * 10.0 ** (step / 2) for step in range(-8, 17)]
            values = [self._held_out(data, alpha, generator) for alpha in grid]
            best = max(range(len(grid)), key=lambda number: values[number])
            chosen, value, count = grid[best], values[best], len(grid)
            if best in (0, len(grid) - 1):
                warnings.warn(
                    f"The best precision, {chosen:.2g}, is at the end of the grid; the held-out data ask for "
                    f"{'more' if best == 0 else 'less'} uncertainty than it holds.",
                    ConvergenceWarning,
                    stacklevel=3,
                )
        else:
            raise ConfigurationError(
                "Unknown method.", expected='"optimal", "line_search" or "validation"', got=repr(method)
            )
        self._prior_precision = torch.tensor(chosen, dtype=self.mean.dtype)
        self.tuning = TuningResult(method, self._prior_precision, None, value, True, float("nan"), count)
        return self

    def _held_out(self, data: Iterable[Any], alpha: float, generator: torch.Generator | None) -> float:
        """The mean log-probability of held-out targets at another precision."""
        before, state = self._prior_precision, None if generator is None else generator.get_state()
        total, count = 0.0, 0.0
        try:
            self._prior_precision = torch.tensor(alpha, dtype=self.mean.dtype)
            for batch in self.batches(data, progress=False, description=""):
                log_prob = self.predictive(batch.inputs, generator=generator).log_prob(batch.target)
                total += float(log_prob.double().sum())
                count += self._n_rows(self.network.forward(batch.inputs), batch.target)
        finally:
            self._prior_precision = before
            if generator is not None and state is not None:
                generator.set_state(state)  # every precision sees the same random numbers
        return total / max(1.0, count)

    def _line_search(
        self, data: Iterable[Any], allowance: float, n_samples: int, optimum: float
    ) -> tuple[float, float, int]:
        """Bisect the logarithm of α, to a twentieth of a decade: its value, minus the loss there, and evaluations."""
        assert self._noise is not None
        check_count(n_samples, "n_samples")
        if not allowance > 0:
            raise ConfigurationError("allowance must be positive.", expected="allowance > 0", got=repr(allowance))
        samples = self._noise.null_space[:n_samples]
        base = self._training_loss(data, self.mean[None])
        low, high, count = -12.0, 12.0, 1  # decades of α around the optimum

        def excess(decade: float) -> float:
            nonlocal count
            count += 1
            scale = (optimum * 10.0**decade) ** -0.5
            return self._training_loss(data, self.mean + scale * samples) - base

        while high - low > 0.05:  # noqa: PLR2004
            middle = (low + high) / 2
            if excess(middle) <= allowance:
                high = middle
            else:
                low = middle
        return optimum * 10.0**high, -(base + excess(high)), count

    def _training_loss(self, data: Iterable[Any], vectors: Tensor) -> float:
        """The mean negative log-likelihood over targets and networks."""
        total, count = 0.0, 0.0
        for batch in self.batches(data, progress=False, description=""):
            for vector in vectors:
                with torch.no_grad():
                    outputs = self.network(batch.inputs, self.network.substitute(vector))
                if not bool(torch.isfinite(outputs).all()):
                    return float("inf")
                statistics = self.likelihood.statistics(outputs, batch.target)
                total -= float(self.likelihood.log_likelihood(statistics))
                count += self._n_rows(outputs, batch.target)
        return total / max(1.0, count)

    def _n_rows(self, outputs: Tensor, target: Any) -> float:
        """Number of targets that are not ignored."""
        return float(self.likelihood.rows(outputs, target)[2].sum())

    @override
    def _deviations(self) -> Tensor:
        self.require_fit()
        assert self._noise is not None
        samples = self._noise.null_space
        return samples * self._prior_precision.to(samples).rsqrt()

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self._noise is not None
        tensors = {"vector": self.mean, "directions": self._noise.null_space, **self.report.tensors()}
        return {"ignored_rows": self.report.ignored_rows}, tensors

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        samples = tensors["directions"]
        self._noise = ProjectedNoise(samples, samples[:0], NoiseReport.read(tensors, header))
        self._vector = tensors["vector"]
