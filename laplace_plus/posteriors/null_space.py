"""The projected Laplace posterior (Miani, Roy and Hauberg, 2025, *Bayes without underfitting*).

``N(θ̂, α⁻¹ P)`` with P the projector onto the kernel of the training data's Jacobian: the directions in which the
linearised network can move without any prediction on the training data changing. With r the rank of the Jacobian the
evidence of such a model is, up to a constant, ``½ (r log α − α ‖θ̂ − μ‖²)``, so that ``α = r / ‖θ̂ − μ‖²`` maximises it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature.kernel_rows import KINDS, KernelRows, Rows
from laplace_plus.curvature.linearization import Ways
from laplace_plus.distributed import Distributed
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence import TuningResult
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.kernel_projectors import ProjectionMethod
from laplace_plus.posteriors.methods import check_count, exactly
from laplace_plus.posteriors.null_space_noise import (
    NoiseReport,
    check_single,
    draw_kernel_noise,
    noise_seed,
    projector_config,
    resolve_projector,
    survey,
    warn_unless_projected,
)
from laplace_plus.posteriors.resuming import Checkpoint, identity
from laplace_plus.posteriors.sample_based import KernelBased
from laplace_plus.posteriors.training_data import require_restartable

_WHY = "The projection passes over the data again and again."


class NullSpace(KernelBased):
    """The Gaussian ``N(θ̂, α⁻¹ P)`` on the kernel of the training Jacobian: uncertain only where the data say nothing.

    Choose it for overparametrised networks, where samples of other Laplace approximations underfit: the linearised
    network's predictions on the training data are exactly the trained network's, and only others get error bars. It
    does not say how sure one can be near the training data (:class:`VIKING` does), and there has to be a kernel: fewer
    independent rows than parameters.

    Memory is that of ``n_samples`` vectors of the network's size and a few for the projection; time is that of passes
    over the data, one Jacobian product in each direction for each iteration, a few samples at once. The number of
    iterations grows with the rows' condition number: tens on images with ``rows="loss"``, more than thousands for many
    points of a curve, where ``projector="svd"`` is the way. Samples that did not converge still leave predictions on
    the training data nearly as they are (``report.residual``), but are too large elsewhere.

    α, the prior precision, scales all samples alike; :meth:`fit_prior_precision` sets it to its optimum
    ``rank / ‖θ̂ − μ‖²``, by a line search on the training loss, or by held-out data. The optimum often leaves the range
    in which the linearisation holds; predictions are therefore those of the linearised network by default.

    Args:
        rows: What must not change on the training data: ``"logit"``, all outputs; ``"ggn"``, what the curvature sees of
            them (for classes, all but a common shift); ``"loss"``, the loss of each example to first order, which takes
            one row for each example rather than C and leaves a larger kernel. Examples that are fitted exactly have no
            such row; they are counted in the report.
        projector: ``"lsmr"``, ``"svd"`` (for small problems: exact), ``"alternating"`` (the paper's sweeps), or
            ``lp.linalg.LSMRProjection``, ``SVDProjection`` or ``AlternatingProjection`` with options.
        n_samples: Number k of samples that are projected.
        chunk_size: Number of vectors that are pushed through the network at a time.
        *args: As for :class:`Posterior`.
        **kwargs: As for :class:`Posterior`.

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
        *args: Any,
        rows: Rows = "logit",
        projector: str | ProjectionMethod | dict[str, Any] = "lsmr",
        n_samples: int = 30,
        chunk_size: int = 16,
        **kwargs: Any,
    ):
        if rows not in KINDS:
            raise ConfigurationError("Unknown rows.", expected=", ".join(KINDS), got=repr(rows))
        check_count(n_samples, "n_samples")
        check_count(chunk_size, "chunk_size")
        self.rows, self.projector = rows, resolve_projector(projector)
        self.n_samples, self.chunk_size = n_samples, chunk_size
        super().__init__(*args, **kwargs)
        check_single(self._prior_precision)
        self._directions: Tensor | None = None
        self._report: NoiseReport | None = None
        self._checkpoint_folder: str | PathLike[str] | None = None
        self._ways = Ways()

    @override
    def options(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "projector": projector_config(self.projector),
            "n_samples": self.n_samples,
            "chunk_size": self.chunk_size,
        }

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def fit(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
        checkpoint: str | PathLike[str] | None = None,
    ) -> Self:
        """Draw normal vectors and project them.

        Args:
            data: An iterable of the same batches, in the same order, each time.
            progress: Whether to show progress bars.
            generator: Source of the noise.
            distributed: As for :class:`Posterior`; this class is fitted by one process.
            checkpoint: A folder to which samples are written as they are finished. A fit that finds some there goes on
                from them, to the samples that an uninterrupted one would have given.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.
            DataError: Data that can be run over only once, besides what :class:`Posterior` raises.
            UnsupportedError: The Jacobian has no kernel: there are as many independent rows as parameters.

        Warns:
            ConvergenceWarning: A projection did not meet its tolerance.
        """
        self._checkpoint_folder = checkpoint
        try:
            return super().fit(data, progress=progress, generator=generator, distributed=distributed)
        finally:
            self._checkpoint_folder = None

    @override
    def _fit(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        require_restartable(data, _WHY)
        n_data, n_outputs, data_summary = survey(self, data)
        checkpoint = None
        if self._checkpoint_folder is not None:
            checkpoint = Checkpoint(self._checkpoint_folder, identity(self, n_data) | {"data": data_summary})
        seed = noise_seed(checkpoint, generator)
        rows = KernelRows(self.network, self.likelihood, data, self.rows, chunk_size=self.chunk_size)
        noise = draw_kernel_noise(
            rows, self.projector, self.n_samples, seed, checkpoint, keep_image=False, progress=progress
        )
        self._directions, self._report, self._vector = noise.kernel, noise.report, self.network.vector()
        self.n_data, self.n_outputs, self._ways = n_data, n_outputs, Ways()
        warn_unless_projected(noise.report, 5)

    # -- the precision -------------------------------------------------------------------------------------------------

    @property
    def report(self) -> NoiseReport:
        """How the projections ended.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self._require_fit()
        assert self._report is not None
        return self._report

    @property
    def kernel_dimension(self) -> Estimate:
        """``P − rank``, with the error of the rank."""
        rank = self.report.rank
        return Estimate(self.n_parameters - rank.value, rank.sem, 0, rank.converged, rank.probes)

    @exactly
    def relative_log_evidence(self, prior_precision: float | Tensor | None = None) -> Tensor:
        """``½ (r log α − α ‖θ̂ − μ‖²)``, the log evidence up to a term without α; 0-d float64, differentiable."""
        alpha = torch.as_tensor(self._prior_precision if prior_precision is None else prior_precision).double()
        return (self.report.rank.value * alpha.log() - alpha * self._scatter()) / 2

    def _scatter(self) -> Tensor:
        return (self.mean - self._prior_mean.to(self.mean)).double().square().sum()

    @exactly
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
        self._require_fit()
        scatter = self._scatter()
        if not scatter > 0:
            raise ConfigurationError("The weights are all at the prior mean.", expected="others", got="‖θ̂ − μ‖ = 0")
        optimum = float(self.report.rank.value / scatter)
        if method == "optimal":
            chosen, value, count = optimum, float(self.relative_log_evidence(optimum)), 1
        elif method == "line_search":
            chosen, value, count = self._line_search(self._data.again(data, _WHY), allowance, n_samples, optimum)
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
        """The mean log-probability of held-out targets at a precision, which stays what it was."""
        before, state = self._prior_precision, None if generator is None else generator.get_state()
        total, count = 0.0, 0.0
        try:
            self._prior_precision = torch.tensor(alpha, dtype=self.mean.dtype)
            for batch in self._batches(data, progress=False, description=""):
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
        """Halve the step, in logarithms, until it is known to a twentieth of a decade."""
        assert self._directions is not None
        check_count(n_samples, "n_samples")
        if not allowance > 0:
            raise ConfigurationError("There is no such allowance.", expected="allowance > 0", got=repr(allowance))
        base = self._training_loss(data, self.mean[None])
        low, high, count = -12.0, 12.0, 1  # decades of α around the optimum

        def excess(decade: float) -> float:
            nonlocal count
            count += 1
            scale = (optimum * 10.0**decade) ** -0.5
            assert self._directions is not None
            return self._training_loss(data, self.mean + scale * self._directions[:n_samples]) - base

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
        for batch in self._batches(data, progress=False, description=""):
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

    # -- what it gives -------------------------------------------------------------------------------------------------

    @override
    def _deviations(self) -> Tensor:
        self._require_fit()
        assert self._directions is not None
        return self._directions * self._prior_precision.to(self._directions).rsqrt()

    # -- storage -------------------------------------------------------------------------------------------------------

    @override
    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self._directions is not None
        tensors = {"vector": self.mean, "directions": self._directions, **self.report.tensors()}
        return {"ignored_rows": self.report.ignored_rows}, tensors

    @override
    def _restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._report = NoiseReport.read(tensors, header)
        self._directions, self._vector = tensors["directions"], tensors["vector"]
