"""Particles that drift away from trained weights and are pulled back by the loss.

Particle i has a unit direction d_i. A step adds ``α d_i`` and then takes M steps of gradient descent; T steps make a
trajectory. On a quadratic loss with eigenvalue λ along d, a trajectory ends at ``α ρ (1 − ρᵀ) / (1 − ρ)`` with
``ρ = (1 − ηλ)^M``, and at ``αT`` where λ = 0: particles travel where the loss is flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laplace_plus import checks, kernels
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry import LossLandscape
from laplace_plus.likelihoods.sampling import stage_generator
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.persistence import stored

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
    source = stage_generator(seed, 0)
    drawn = draw_probes("gaussian", n, len(like), generator=source, dtype=like.dtype, device=like.device)
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
