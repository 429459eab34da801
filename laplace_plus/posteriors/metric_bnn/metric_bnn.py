"""MetricBNN: particles explore around the trained weights, and an autoencoder learns to generate such points.

After "Walking on the Fiber" (MetricBNN); see ``exploration`` for the particles and ``latent_model`` for the
autoencoder. With latents ``z_0 = φ(θ̂)`` and ``z_j = φ(θ_{j,T})``
of the trained weights and of the end of trajectory j, a sample is ``θ = ψ(z_0 + ε (z_j − z_0))`` for a random j and ε
uniform in (0, 1).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._memory import budget, in_words
from laplace_plus.curvature import Backend
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NotFittedError, warn
from laplace_plus.geometry import LossLandscape
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network.gradients import loss_gradient
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.configuration import common_arguments, full_precision
from laplace_plus.posteriors.metric_bnn.exploration import (
    ExplorationReport,
    Explored,
    Objective,
    Reduction,
    Walk,
    draw_directions,
    explore,
)
from laplace_plus.posteriors.metric_bnn.latent_model import LatentModel, resolve_latent
from laplace_plus.posteriors.metric_bnn.latent_training import LatentReport, Latents, Training
from laplace_plus.posteriors.resuming import ResumableFit
from laplace_plus.posteriors.sample_based import held_out_scores
from laplace_plus.posteriors.storing import with_prefix
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.predictive import Prediction, from_samples
from laplace_plus.priors import GaussianPrior, as_hyperparameter
from laplace_plus.tuning import Tuner, TuningResult, Validation
from laplace_plus.tuning.base import require_only, tunes_noise

_WHY = "Particles are refined by many passes over the data."

Sampling = Literal["latent", "exploration", "gaussian"]

_GROWTH = 2.0
"""Warn if a refinement more than doubles the gradient's norm: one that converges reduces it."""

_OTHER = 0x5851F42D4C957F2D
"""Flips bits of the seed, so that the autoencoder's random numbers differ from the particles'."""

_VECTORS, _EACH = 15, 8
"""Vectors of the parameters' length that a fit takes, as measured, and those for each particle."""

_EXTENTS = tuple(2 ** (-step / 2) for step in range(11))
"""Extents that are tried on held-out data: 1, 2^-½, …, 1/32."""


@dataclass(frozen=True, kw_only=True)
class ExtentResult(TuningResult):
    """What a tuning of a :class:`MetricBNN` found; its prior precision stays as it is.

    Attributes:
        extent: Part of each trajectory that samples come from.
    """

    extent: float


class MetricBNN(ResumableFit):
    """Samples along the trajectories of particles that drift from the trained weights while the loss pulls them back.

    N particles start at the trained weights, each with its own direction. They take T steps of length α along it, each
    followed by M steps of gradient descent on the training loss; so they travel where the loss is flat. A contrastive
    autoencoder is fitted to their trajectories. Samples are decoded from random points between the latents of the
    trained weights and of a trajectory's end. Choose it where the loss is cheap and flat in many directions; it
    needs no curvature matrix, and its fit takes ``N T M`` gradients, all particles at once.

    Where the loss is flat, ``α T`` and not the data determines how far samples reach, and samples lie near N
    trajectories only. :meth:`fit_extent` shortens the trajectories on held-out data.

    :attr:`exploration` samples the particles' own points, :attr:`gaussian` the Gaussian with their mean and covariance.
    Memory is that of ``N T / store_every`` vectors of the network's size; the autoencoder does not grow with the
    network, unless it encodes all entries (see :class:`LatentModel`). Predictions average over sampled networks. A new
    noise level changes predictions at once, a new prior or temperature only the next fit. :attr:`mean` is the trained
    weights, where trajectories start.

    :meth:`fit` raises ConfigurationError if ``learning_rate · λ_max ≥ 2`` or if the trajectories do not fit into
    memory, and NonFiniteError if the refinement or the autoencoder diverges. It warns (ConvergenceWarning) if
    refinement raised the gradient along a trajectory, or if the autoencoder does not reproduce the explored points.

    Args:
        model, likelihood: As for :class:`Posterior`.
        n_particles: N.
        n_steps: T.
        step_size: α.
        n_refinements: M, at most 1 000 000.
        learning_rate: η of the refinement, on the mean loss. It must be below ``2 / λ_max``, with λ_max the largest
            curvature, which is measured. ``"auto"`` takes ``1 / λ_max``, the largest safe rate, and less where the loss
            is steeper away from the trained weights (:class:`~.exploration.Walk`). The paper's 1e-3 is often so small
            that the loss rises well above that of training; where the loss is steep, it may be too large.
        weight_decay: The weight decay of training, λ in a mean negative log-likelihood plus ``½ λ ‖θ‖²``. If given,
            :meth:`fit` sets the prior precision to ``N_data λ``, which makes the refined loss that of training. (A mean
            squared error is ``2σ²`` times that likelihood; its weight decay has to be divided by ``2σ²`` first.)
        minibatch: Examples in each gradient of the refinement, drawn anew each time; None for all; ``"auto"`` takes all
            of up to 10,000, else 1024.
        reduction: Whether the refined loss is the ``"mean"`` over the data or the ``"sum"``.
        objective: Whether it is that of the ``"posterior"``, with the prior, or of the ``"likelihood"`` alone.
        store_every: One in so many steps is stored, and encoded.
        latent: The autoencoder's options, a :class:`LatentModel` or a dictionary of them.
        sampling: ``"latent"``; or ``"exploration"`` or ``"gaussian"``, for which no autoencoder is trained.
        trajectory: How j is drawn: ``"uniform"``, or in proportion to the latent ``"length"`` ``‖z_j − z_0‖``.
        endpoint: Where trajectory j ends: at its ``"last"`` point, or at that with the ``"farthest"`` latent.
        chunk_size: Number of particles that are pushed through the network at a time.
        parameters, prior_precision, prior_mean, temperature, backend, memory_budget: As for :class:`Posterior`.

    Raises:
        ConfigurationError: A number out of range or an unknown name, besides what :class:`Posterior` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> posterior = lp.MetricBNN(net, "regression", n_steps=20, latent={"epochs": 300}).fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape, posterior.exploration.sample(4).shape
        (torch.Size([3, 1]), torch.Size([4, 25]))
    """

    default_method = "sampled"

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation}

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        n_particles: int = 10,
        n_steps: int = 50,
        step_size: float = 0.1,
        n_refinements: int = 10,
        learning_rate: float | Literal["auto"] = 1e-3,
        weight_decay: float | None = None,
        minibatch: int | Literal["auto"] | None = "auto",
        reduction: Reduction = "mean",
        objective: Objective = "posterior",
        store_every: int = 1,
        latent: LatentModel | dict[str, Any] | None = None,
        sampling: Sampling = "latent",
        trajectory: Literal["uniform", "length"] = "uniform",
        endpoint: Literal["last", "farthest"] = "last",
        chunk_size: int = CHUNK_SIZE,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        self.walk = Walk(
            n_particles, n_steps, step_size, n_refinements, learning_rate, minibatch, reduction, objective, store_every
        )
        if weight_decay is not None:
            checks.positive("weight_decay", weight_decay)
        self.weight_decay = weight_decay
        self.latent = resolve_latent(latent)
        checks.choice("sampling", sampling, ("latent", "exploration", "gaussian"))
        checks.choice("trajectory", trajectory, ("uniform", "length"))
        checks.choice("endpoint", endpoint, ("last", "farthest"))
        checks.count("chunk_size", chunk_size)
        self.sampling: Sampling = sampling
        self.trajectory, self.endpoint, self.chunk_size = trajectory, endpoint, chunk_size
        super().__init__(model, likelihood, **common_arguments(locals()))
        self._extent = 1.0
        self._explored: Explored | None = None
        self._trained: Latents | None = None

    @override
    def options(self) -> dict[str, Any]:
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}  # older checkpoints know none
        return {
            **asdict(self.walk),
            **decay,
            "latent": {**asdict(self.latent), "hidden": list(self.latent.hidden)},
            "sampling": self.sampling,
            "trajectory": self.trajectory,
            "endpoint": self.endpoint,
            "chunk_size": self.chunk_size,
        }

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        decay = self.weight_decay
        own = self._prior_precision if decay is None else as_hyperparameter(decay)  # not what an earlier fit has set
        self.require_vectors(_VECTORS + _EACH * self.walk.n_particles, f"{self.walk.n_particles} particles")
        start = self._start(data, generator, _WHY, prior_precision=own, prior_mean=self._prior_mean)
        precision = own if decay is None else as_hyperparameter(decay * start.n_data)
        prior = precision
        if precision.numel() > 1:
            prior = GaussianPrior.create(precision, self._prior_mean, self._group_index()).vector()
        landscape = LossLandscape(
            self.network,
            self.likelihood,
            data,
            prior_precision=prior,
            prior_mean=self._prior_mean,
            temperature=self._temperature,
            chunk_size=min(self.chunk_size, self.walk.n_particles),
        )
        parts = self.batches(data)
        slopes = (loss_gradient(self.network, self.likelihood, part, landscape.vector) for part in parts)
        if not any(bool(slope.any()) for slope, _ in slopes):
            raise self.zero_curvature()
        n, room = self.walk.n_particles, 4 * budget(self.network.device)
        needed = n * self.walk.n_stored * landscape.vector.nbytes
        if needed > room:
            expected, got = f"n_particles · n_steps / store_every vectors in {in_words(room)}", in_words(needed)
            fix = "Store fewer points with store_every=…, or select fewer parameters with parameters=…."
            raise ConfigurationError("The trajectories do not fit into memory.", expected=expected, got=got, fix=fix)
        directions, folder = draw_directions(n, landscape.vector, start.seed), start.checkpoint
        explored = explore(landscape, directions, self.walk, seed=start.seed, checkpoint=folder, progress=progress)
        trained = None
        if self.sampling == "latent":
            spacing = self.walk.store_every / self.walk.n_steps
            training = Training(explored.deviations, spacing, self.latent, start.seed ^ _OTHER)
            trained = training.run(folder, progress=progress)
        self._explored, self._trained, self._vector = explored, trained, landscape.vector
        self.n_data, self.n_outputs = start.n_data, start.n_outputs
        self._prior_precision, self._extent = precision, 1.0
        self._warn_unless_converged(landscape, explored, None if trained is None else trained.report)

    def _warn_unless_converged(self, landscape: LossLandscape, explored: Explored, latent: LatentReport | None) -> None:
        report = explored.report
        if report.growth is not None and report.growth > _GROWTH:
            weight = 1 / landscape.n_data if self.walk.reduction == "mean" else 1.0
            end = landscape.vector + explored.deviations[report.worst, -1]
            there = landscape.largest_curvature(end) * weight * report.learning_rate
            warn(
                f"Refinement raised the gradient's norm {report.growth:.2g} times along trajectory {report.worst}; "
                f"learning_rate · λ_max is {report.stability:.2g} at the trained weights and {there:.2g} at its end "
                "(2 is where gradient descent diverges). Use a smaller learning_rate or a smaller step_size.",
                ConvergenceWarning,
            )
        if latent is not None and not latent.unexplained <= self.latent.tolerance:
            warn(
                f"The autoencoder has not converged: it leaves {latent.unexplained:.1%} of the explored points' mean "
                f"square unexplained (tolerance {self.latent.tolerance:.1%}). Train it for more epochs, with a larger "
                "learning_rate or less repulsion, or use posterior.exploration, which needs none.",
                ConvergenceWarning,
            )

    def _walked(self) -> Explored:
        self.require_fit()
        assert self._explored is not None
        return self._explored

    def _latent(self) -> Latents:
        self.require_fit()
        if self._trained is None:
            what = "This posterior has no latent model."
            raise NotFittedError(what, expected='a fit with sampling="latent"', got=f"sampling={self.sampling!r}")
        return self._trained

    @property
    def report(self) -> ExplorationReport:
        """How the exploration went."""
        return self._walked().report

    @property
    def latent_report(self) -> LatentReport:
        """How the autoencoder was trained."""
        return self._latent().report

    @property
    def trajectories(self) -> Tensor:
        """The particles' stored points ``θ_{i,t}``, the trained weights first, ``[N, 1 + S, P]``."""
        moved = self._walked().deviations
        return self.mean + torch.cat([torch.zeros_like(moved[:, :1]), moved], dim=1)

    @full_precision
    def encode(self, vectors: Tensor) -> Tensor:
        """Latents φ(θ) of parameter vectors, ``[..., P] -> [..., k]``."""
        return self._latent().encode(vectors - self.mean, self._points())

    @full_precision
    def decode(self, latents: Tensor) -> Tensor:
        """Parameter vectors ψ(z) of latents, ``[..., k] -> [..., P]``."""
        return self.mean + self._latent().decode(latents, self._points())

    def _points(self) -> Tensor:
        return self._walked().deviations.flatten(0, 1)

    @property
    def exploration(self) -> MetricBNN:
        """The posterior whose samples are the particles' own points."""
        return self._seen_as("exploration")

    @property
    def gaussian(self) -> MetricBNN:
        """The Gaussian posterior with the mean and the covariance of the particles' points."""
        return self._seen_as("gaussian")

    def _seen_as(self, sampling: Sampling) -> MetricBNN:
        self.require_fit()
        other = copy.copy(self)
        other.sampling, other._trained = sampling, None
        return other

    @property
    def extent(self) -> float:
        """Fraction of each trajectory, from its start, that is sampled; in (0, 1]."""
        return self._extent

    @extent.setter
    def extent(self, value: float) -> None:
        if not 0 < float(value) <= 1:
            raise ConfigurationError("extent is out of range.", expected="0 < extent <= 1", got=repr(value))
        self._extent = float(value)

    @full_precision
    def fit_extent(
        self,
        data: Iterable[Any],
        *,
        grid: Sequence[float] = _EXTENTS,
        tune_noise: bool = False,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Choose :attr:`extent`, and the noise level if asked, by the log-probability of held-out targets.

        The data of a fit say little about how far particles may go where the loss is flat; held-out data do.

        Args:
            data: Held-out batches.
            grid: Parts to try; by default 1, 2^-½, …, 1/32.
            tune_noise: Whether a Gaussian likelihood's noise level is chosen, too, beside each extent: from half to
                twice the present one, in steps of 2^¼.
            n_samples: Sampled networks in each prediction.
            generator: Source of randomness; each extent sees the same random numbers.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An empty grid, parts out of range, or no noise to tune.
            DataError: Data that can be run over only once.
        """
        tuner = Validation(data, grid=tuple(grid), tune_noise=tune_noise, n_samples=n_samples)
        return self.fit_prior_precision(tuner, generator=generator)

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """Choose :attr:`extent`, which takes the place of a prior precision; see :meth:`fit_extent`."""
        assert isinstance(tuner, Validation) and tuner.data is not None
        require_only(type(self).__name__, tuner, "data", "grid", "n_samples", "tune_noise")
        require_restartable(tuner.data, "Each extent is tried on the data.")
        noise, before = self.noise_std, self._extent
        candidates = [self.likelihood]
        if tunes_noise(self.likelihood, tuner.tune_noise) and noise is not None:
            candidates = [self.likelihood.with_noise(noise * 2 ** (step / 4)) for step in range(-4, 5)]
        values = list(_EXTENTS) if tuner.grid is None else [float(value) for value in tuner.grid]
        seed = draw_seed(generator)
        scores = []
        try:
            for value in values:
                self.extent, source = value, torch.Generator().manual_seed(seed)

                def predictions(x: Any, source: torch.Generator = source) -> list[Prediction]:
                    self.check_samples(tuner.n_samples, x)
                    outputs = torch.stack(list(self.sampled_outputs(x, tuner.n_samples, source)))
                    return [from_samples(likelihood, outputs, generator=source) for likelihood in candidates]

                scores.append(held_out_scores(self, tuner.data, predictions))
        finally:
            self._extent = before
        table = torch.stack(scores).nan_to_num(nan=-torch.inf)  # [extents, candidates]
        best = int(table.argmax())
        return ExtentResult(
            method="validation",
            prior_precision=self._prior_precision,
            noise_std=candidates[best % len(candidates)].noise_std if len(candidates) > 1 else None,
            value=float(table.flatten()[best]),
            converged=True,
            n_evaluations=table.numel(),
            extent=values[best // len(candidates)],
        )

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        assert isinstance(result, ExtentResult)
        super().apply_tuning(result)
        self.extent = result.extent

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.check_draws(n=n)
        self.require_fit()
        device = None if generator is None else generator.device
        if self.sampling == "latent":
            latents = self._latent()
            which = latents.draw(n, self.trajectory, generator)
            uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
            part_of = uniform.to(self.mean) * self._extent
            ends = latents.farthest if self.endpoint == "farthest" else latents.ends
            return self.decode(latents.start + part_of[:, None] * (ends[which] - latents.start))
        moved = self._walked().deviations
        points = moved[:, : max(1, round(self._extent * moved.shape[1]))].flatten(0, 1)
        if self.sampling == "exploration":
            chosen = torch.randint(len(points), (n,), generator=generator, device=device)
            return self.mean + points[chosen.to(points.device)]
        drawn = draw_probes("gaussian", n, len(points), generator=generator, dtype=points.dtype, device=points.device)
        weights = drawn / len(points) ** 0.5
        # Around the points' mean, which has the weight 1/m at each of them.
        return self.mean + (weights + (1 - weights.sum(1, keepdim=True)) / len(points)) @ points

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        explored = self._walked()
        header: dict[str, Any] = {"report": asdict(explored.report), "extent": self._extent}
        tensors = {"vector": self.mean, "deviations": explored.deviations}
        if self._trained is not None:
            latent_header, latent_tensors = self._trained.state()
            header["latent"] = latent_header
            tensors |= {f"latent.{name}": value for name, value in latent_tensors.items()}
        return header, tensors

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._vector, self._extent = tensors["vector"], float(header["extent"])
        self._explored = Explored(tensors["deviations"], ExplorationReport(**header["report"]))
        if "latent" in header:
            self._trained = Latents.read(header["latent"], with_prefix(tensors, "latent."), self.latent)
