"""MetricBNN: particles explore around the trained weights, and an autoencoder learns to generate such points.

After "Walking on the Fiber" (MetricBNN); see ``latents`` for the autoencoder. Particle i has a unit direction d_i. A
step adds ``α d_i`` and then takes M steps of gradient descent; T steps make a trajectory. On a quadratic loss with
eigenvalue λ along d, a trajectory ends at ``α ρ (1 − ρᵀ) / (1 − ρ)`` with ``ρ = (1 − ηλ)^M``, and at ``αT`` where
λ = 0: particles travel where the loss is flat.

With latents ``z_0 = φ(θ̂)`` and ``z_j = φ(θ_{j,T})`` of the trained weights and of the end of trajectory j, a sample is
``θ = ψ(z_0 + ε (z_j − z_0))`` for a random j and ε uniform in (0, 1).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks, kernels
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, warn
from laplace_plus.geometry import LossLandscape
from laplace_plus.likelihoods.sampling import draw_seed, stage_generator, standard_normal
from laplace_plus.network.gradients import loss_gradient
from laplace_plus.network.network import full_precision
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.metric_bnn.latents import LatentModel, LatentReport, Latents, train
from laplace_plus.posteriors.public import require_influence
from laplace_plus.posteriors.state import State, of_state, survey
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning import Auto, Tuner, Validation

# -- exploration -------------------------------------------------------------------------------------------------------


_MANY = 10_000
"""With more examples, minibatches are the default: a gradient of all would take most of the time of an exploration."""

_MINIBATCH = 1024
"""Examples in such a minibatch."""

_RISE = 1.1
"""Growth of a gradient in one refinement that shows that the rate is too large; rounding stays far below."""


@dataclass(frozen=True)
class Walk:
    """How particles move; the fields are the arguments of that name of :class:`~laplace_plus.MetricBNN`.

    With ``learning_rate="auto"`` and without minibatches, a particle whose gradient grows takes its step back and
    continues at a quarter of the rate; with each step of drift the rate is doubled, up to its first value.
    """

    n_particles: int = 10
    n_steps: int = 50
    step_size: float = 0.1
    n_refinements: int = 10
    learning_rate: float | Literal["auto"] = 1e-3
    minibatch: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        checks.count("n_particles", self.n_particles)
        checks.count("n_steps", self.n_steps)
        checks.count("minibatch", 1 if self.minibatch in ("auto", None) else self.minibatch)
        checks.count("n_refinements", self.n_refinements, 0)
        checks.positive("step_size", self.step_size)
        checks.positive("learning_rate", 1 if self.learning_rate in ("auto", 0) else self.learning_rate)

    def examples(self, n_data: int) -> int | None:
        """Examples in each gradient; None for all."""
        if self.minibatch == "auto":
            return _MINIBATCH if n_data > _MANY else None
        return None if self.minibatch is None or self.minibatch >= n_data else self.minibatch


@stored
@dataclass(frozen=True)
class ExplorationReport:
    """How an exploration went.

    Attributes:
        learning_rate: η.
        curvature: λ_max, the largest eigenvalue of the refined loss's generalised Gauss-Newton matrix at the trained
            weights; gradient descent diverges along its eigenvector for ``η λ_max > 2``.
        gradient_norm: ``‖∇L‖`` of the refined loss at the trained weights. Where ``M η ‖∇L‖`` is not small beside α,
            particles also move along it: the prior may not be the weight decay of training.
        growth: The largest ratio of gradient norms after and before one step's refinements; None for minibatches and
            for fewer than two refinements.
        slowest: The smallest rate of a particle; η where none was slowed down.
    """

    learning_rate: float
    curvature: float
    gradient_norm: float
    growth: float | None
    slowest: float

    @property
    def stability(self) -> float:
        """``η λ_max``, below 2 for a refinement that converges."""
        return self.learning_rate * self.curvature


def draw_directions(n: int, like: Tensor, seed: int) -> Tensor:
    """Uniformly distributed unit vectors ``[n, P]`` for a vector ``[P]`` of the same kind."""
    drawn = standard_normal((n, len(like)), like=like, generator=stage_generator(seed, 0))
    return drawn / kernels.vector_norm(drawn)[:, None]


def explore(
    landscape: LossLandscape, directions: Tensor, walk: Walk, *, seed: int = 0, progress: bool = False
) -> tuple[Tensor, ExplorationReport]:
    """Let particles drift from the landscape's ``vector``, on its loss divided by the number of examples.

    Takes ``T M`` gradients at N points. Gives the deviations after each step, ``[N, T, P]``, and how it went.
    """
    start, refinement = landscape.vector, _Refinement(landscape, walk, seed)
    curvature, slope = refinement.measure()
    landscape.first_order.expect(walk.n_steps * walk.n_refinements)  # not before: one point's gradient is needed once
    rate = slowest = _learning_rate(walk, curvature)
    position, rates = torch.zeros_like(directions), start.new_full((len(directions),), rate)
    deviations = start.new_empty(len(directions), walk.n_steps, len(start))
    growth = torch.full((len(directions),), float("nan"), dtype=torch.float64)
    for step in progress_bar(range(walk.n_steps), enabled=progress, description="MetricBNN: exploration"):
        position, rates, ratio = refinement.refine(position + walk.step_size * directions, rates, rate, step)
        growth, slowest = torch.fmax(growth, ratio), min(slowest, float(rates.min()))
        deviations[:, step] = position
    largest = float(growth.nan_to_num(nan=-1.0).max())
    return deviations, ExplorationReport(rate, curvature, slope, largest if largest >= 0 else None, slowest)


def _learning_rate(walk: Walk, curvature: float) -> float:
    """η for the largest curvature; ConfigurationError where the refinement would diverge."""
    if walk.learning_rate == "auto":
        return 1 / curvature if curvature > 0 else 0.0
    rate = float(walk.learning_rate)
    if walk.n_refinements and rate * curvature >= 2:  # noqa: PLR2004
        raise ConfigurationError(
            "The refinement would diverge: its learning rate times the loss's largest curvature, which was "
            f"measured at the trained weights, is {rate * curvature:.3g}.",
            expected=f"learning_rate < 2/λ_max = {2 / curvature:.3g}",
            got=f"{rate:.3g}",
            fix=f'Use learning_rate={1 / curvature:.1g} or "auto". Little observation noise needs a small one.',
        )
    return rate


class _Refinement:
    """The gradient steps of an exploration."""

    def __init__(self, landscape: LossLandscape, walk: Walk, seed: int):
        self._landscape, self._walk, self._seed = landscape, walk, seed
        self._examples = walk.examples(landscape.n_data)
        self._slows_down = walk.learning_rate == "auto" and self._examples is None

    def measure(self) -> tuple[float, float]:
        """``λ_max`` and ``‖∇L‖`` at the trained weights."""
        surface, start = self._surfaces(-1, 1)[0], self._landscape.vector
        slope = kernels.vector_norm(self._gradient(surface, start[None]))[0]
        return surface.largest_curvature(start) * (1 / self._landscape.n_data), float(slope)

    def refine(self, position: Tensor, rates: Tensor, rate: float, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """M gradient steps from ``[N, P]``: deviations, rates, and ratios of last to first gradient norms ``[N]``."""
        norms: list[Tensor] = []
        rates = (2 * rates).clamp(max=rate) if self._slows_down else rates
        before = position, torch.zeros_like(position)
        for number, surface in enumerate(surfaces := self._surfaces(step, self._walk.n_refinements)):
            gradient = self._gradient(surface, self._landscape.vector + position)
            norm = kernels.vector_norm(gradient)
            if self._slows_down and norms:
                # A step of at most 1/λ does not make the gradient of a convex loss any longer. Where the loss is
                # steeper than at its minimum, the step is taken back, and a shorter one is tried.
                failed = ~(norm <= _RISE * norms[-1])
                rates = torch.where(failed, rates / 4, rates)
                position = torch.where(failed[:, None], before[0], position)
                # Without a further refinement, nothing would check the shorter step.
                shorter = before[1] if number + 1 < len(surfaces) else torch.zeros_like(gradient)
                gradient = torch.where(failed[:, None], shorter, gradient)
                norm = torch.where(failed, norms[-1], norm)
            before = position, gradient
            position = position - rates[:, None] * gradient
            norms.append(norm)
        fix = f"Use a smaller learning_rate (now {rate:.2g}) or step_size (now {self._walk.step_size:.2g})."
        checks.finite(f"A particle after step {step + 1} of {self._walk.n_steps}", position, fix)
        if self._examples is not None or len(norms) < 2:  # noqa: PLR2004
            return position, rates, torch.full((len(position),), float("nan"), dtype=torch.float64)
        return position, rates, (norms[-1].double() / norms[0].double().clamp(min=1e-300)).cpu()

    def _gradient(self, surface: LossLandscape, points: Tensor) -> Tensor:
        return surface.gradient(points) * (1 / self._landscape.n_data)

    def _surfaces(self, step: int, count: int) -> list[LossLandscape]:
        """The loss of each of a step's gradients: all data, or minibatches."""
        if self._examples is None:
            return [self._landscape] * count
        source = stage_generator(self._seed, step + 2)
        orders = [torch.randperm(self._landscape.n_data, generator=source)[: self._examples] for _ in range(count)]
        return self._landscape.subsets(orders)


# -- the posterior -----------------------------------------------------------------------------------------------------


Sampling = Literal["latent", "exploration", "gaussian"]

_GROWTH = 2.0
"""Warn if a refinement more than doubles the gradient's norm: one that converges reduces it."""

_OTHER = 0x5851F42D4C957F2D
"""Flips bits of the seed, so that the autoencoder's random numbers differ from the particles'."""

_EXTENTS = tuple(2 ** (-step / 2) for step in range(11))
"""Extents that are tried on held-out data: 1, 2^-½, …, 1/32."""


@stored
@dataclass(frozen=True)
class Exploration(State):
    """What a fit found: the particles' points as deviations from the mean ``[N, T, P]``, and the autoencoder."""

    deviations: Tensor
    report: ExplorationReport
    latents: Latents | None
    extent: float = 1.0

    @property
    def points(self) -> Tensor:
        """All deviations, ``[N T, P]``."""
        return self.deviations.flatten(0, 1)


class MetricBNN(Posterior):
    """Samples along the trajectories of particles that drift from the trained weights while the loss pulls them back.

    N particles start at the trained weights, each with its own direction. They take T steps of length α along it, each
    followed by M steps of gradient descent on the training loss; so they travel where the loss is flat. A contrastive
    autoencoder is fitted to their trajectories. Samples are decoded from random points between the latents of the
    trained weights and of a trajectory's end. Choose it where the loss is cheap and flat in many directions; it
    needs no curvature matrix, and its fit takes ``N T M`` gradients, all particles at once.

    Where the loss is flat, ``α T`` and not the data determines how far samples reach, and samples lie near N
    trajectories only. ``fit_prior_precision(data=held_out)`` shortens the trajectories: see :attr:`extent`.

    :attr:`exploration` samples the particles' own points, :attr:`gaussian` the Gaussian with their mean and covariance.
    Memory is that of ``N T`` vectors of the network's size; of more than 256 entries, the autoencoder sees coordinates
    along the points' principal directions, and does not grow with the network. Predictions average over sampled
    networks. A new noise level changes predictions at once, a new prior or temperature only the next fit. :attr:`mean`
    is the trained weights, where trajectories start.

    :meth:`fit` raises ConfigurationError if ``learning_rate · λ_max ≥ 2``, and NonFiniteError if the refinement or the
    autoencoder diverges. It warns (ConvergenceWarning) if refinement raised the gradient along a trajectory, or if the
    autoencoder does not reproduce the explored points.

    Args:
        model, likelihood: As for :class:`Posterior`.
        n_particles: N.
        n_steps: T.
        step_size: α.
        n_refinements: M.
        learning_rate: η of the refinement, on the mean loss. It must be below ``2 / λ_max``, with λ_max the largest
            curvature, which is measured. ``"auto"`` takes ``1 / λ_max``, the largest safe rate, and less where the loss
            is steeper away from the trained weights (:class:`~.metric_bnn.Walk`). The paper's 1e-3 is often so small
            that the loss rises well above that of training; where the loss is steep, it may be too large.
        weight_decay: The weight decay of training, λ in a mean negative log-likelihood plus ``½ λ ‖θ‖²``. If given,
            :meth:`fit` sets the prior precision to ``N_data λ``, which makes the refined loss that of training. (A mean
            squared error is ``2σ²`` times that likelihood; its weight decay has to be divided by ``2σ²`` first.)
        minibatch: Examples in each gradient of the refinement, drawn anew each time; None for all; ``"auto"`` takes all
            of up to 10,000, else 1024.
        latent: The autoencoder's options, a :class:`LatentModel` or a dictionary of them.
        sampling: ``"latent"``; or ``"exploration"`` or ``"gaussian"``, for which no autoencoder is trained.
        **common: As for :class:`Posterior`.

    Raises:
        ConfigurationError: A number out of range or an unknown name, besides what :class:`Posterior` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> posterior = lp.MetricBNN(net, "regression", n_steps=10, latent={"epochs": 200}).fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape, posterior.exploration.sample(4).shape
        (torch.Size([3, 1]), torch.Size([4, 25]))
    """

    default_method = "sampled"
    report = of_state("report", "How the exploration went, an :class:`ExplorationReport`.")
    latents = of_state("latents", "The autoencoder, :class:`Latents`; None where samples are not made by one.")
    latent_report = of_state("latents.report", "How the autoencoder was trained, a :class:`LatentReport`.")
    extent = of_state(
        "extent",
        "Fraction of each trajectory, from its start, that is sampled; in (0, 1], and 1 after a fit.",
        partial(checks.number, "extent", above=0.0, most=1.0),
    )
    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation, "auto": Auto}

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
        latent: LatentModel | dict[str, Any] | None = None,
        sampling: Sampling = "latent",
        **common: Any,
    ):
        self.walk = Walk(n_particles, n_steps, step_size, n_refinements, learning_rate, minibatch)
        if weight_decay is not None:
            checks.positive("weight_decay", weight_decay)
        self.weight_decay = weight_decay
        self.latent = latent if isinstance(latent, LatentModel) else LatentModel(**(latent or {}))
        self.sampling: Sampling = checks.choice("sampling", sampling, ("latent", "exploration", "gaussian"))
        super().__init__(model, likelihood, **common)

    # -- the fit -------------------------------------------------------------------------------------------------------

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> Exploration:
        n_data, n_outputs, _ = survey(self, data, "Particles are refined by many passes over the data.")
        seed, walk, vector = draw_seed(generator), self.walk, self.network.vector()
        slopes = (loss_gradient(self.network, self.likelihood, batch, vector)[0] for batch in self.batches(data))
        require_influence(self, any(bool(slope.any()) for slope in slopes))
        if self.weight_decay is not None:
            self._prior_precision = as_hyperparameter(self.weight_decay * n_data)
        prior = self._prior_precision
        landscape = LossLandscape(
            self.network,
            self.likelihood,
            data,
            prior_precision=prior if prior.numel() == 1 else self.prior().vector(),
            prior_mean=self._prior_mean,
            temperature=self._temperature,
        )
        directions = draw_directions(walk.n_particles, vector, seed)
        deviations, report = explore(landscape, directions, walk, seed=seed, progress=progress)
        latents = None
        if self.sampling == "latent":
            latents = train(deviations, self.latent, seed ^ _OTHER, progress=progress)
        self._warn_unless_converged(report, None if latents is None else latents.report)
        return Exploration(vector, n_data, n_outputs, deviations, report, latents)

    def _warn_unless_converged(self, report: ExplorationReport, latent: LatentReport | None) -> None:
        if report.growth is not None and report.growth > _GROWTH:
            warn(
                f"Refinement raised the gradient's norm {report.growth:.2g} times. At the trained weights, "
                f"learning_rate · λ_max is {report.stability:.2g}, and 2 is where gradient descent diverges; away from "
                "them the loss is steeper. Use a smaller learning_rate or a smaller step_size.",
                ConvergenceWarning,
            )
        if latent is not None and not latent.unexplained <= self.latent.tolerance:
            warn(
                f"The autoencoder has not converged: it leaves {latent.unexplained:.1%} of the explored points' mean "
                f"square unexplained (tolerance {self.latent.tolerance:.1%}). Train it for more epochs or with a "
                "larger learning_rate, or use posterior.exploration, which needs none.",
                ConvergenceWarning,
            )

    # -- what it found -------------------------------------------------------------------------------------------------

    @property
    def trajectories(self) -> Tensor:
        """The particles' points ``θ_{i,t}``, the trained weights first, ``[N, 1 + T, P]``."""
        self.require_fit()
        moved = self.state.deviations
        return self.mean + torch.cat([torch.zeros_like(moved[:, :1]), moved], dim=1)

    @full_precision
    def encode(self, vectors: Tensor) -> Tensor:
        """Latents φ(θ) of parameter vectors, ``[..., P] -> [..., k]``."""
        return self.latents.encode(vectors - self.mean, self.state.points)

    @full_precision
    def decode(self, latents: Tensor) -> Tensor:
        """Parameter vectors ψ(z) of latents, ``[..., k] -> [..., P]``."""
        return self.mean + self.latents.decode(latents, self.state.points)

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
        other.sampling, other.options = sampling, {**self.options, "sampling": sampling}
        return other

    def tunables(self) -> dict[str, Sequence[float]]:
        """The extent takes the place of a prior precision."""
        return {"extent": _EXTENTS}

    # -- samples -------------------------------------------------------------------------------------------------------

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        checks.count("n", n)
        self.require_fit()
        device = None if generator is None else generator.device
        if self.sampling == "latent":
            latents = self.latents
            which = torch.randint(len(latents.ends), (n,), generator=generator, device=device)
            uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
            part_of = uniform.to(self.mean) * self.extent
            ends = latents.ends[which.to(latents.ends.device)]
            return self.decode(latents.start + part_of[:, None] * (ends - latents.start))
        moved = self.state.deviations
        points = moved[:, : max(1, round(self.extent * moved.shape[1]))].flatten(0, 1)
        if self.sampling == "exploration":
            chosen = torch.randint(len(points), (n,), generator=generator, device=device)
            return self.mean + points[chosen.to(points.device)]
        weights = standard_normal((n, len(points)), like=points, generator=generator) / len(points) ** 0.5
        # Around the points' mean, which has the weight 1/m at each of them.
        return self.mean + (weights + (1 - weights.sum(1, keepdim=True)) / len(points)) @ points
