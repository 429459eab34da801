"""Geodesics of a loss surface, and its exponential map.

On the graph of L, with the metric ``M = I + ∇L ∇Lᵀ`` of :mod:`laplace_plus.geometry.metric`, the shortest curves obey

    c'' = −∇L(c) ⟨c', ∇²L(c) c'⟩ / (1 + ‖∇L(c)‖²)

whose right-hand side takes one gradient together with one Hessian-vector product, and which keeps the energy
``c'ᵀ M(c) c' = ‖c'‖² + ⟨∇L(c), c'⟩²``. Bergamin, Moreno-Muñoz, Hauberg and Arvanitidis, "Riemannian Laplace
approximations for Bayesian neural networks", 2023.

On the walls of a loss with large curvature λ the surface turns from flat to steep within 1/λ, and a geodesic bounces
between them many times: it takes thousands of evaluations where the posterior is narrow in some directions and wide in
others, and a solver that misses turns gains energy and climbs too high. Keeping the energy exactly, by stretching the
velocity after each step (Hairer, Lubich and Wanner, "Geometric numerical integration", 2006, IV.4), allows for
tolerances at which it would otherwise grow manifold.

At the kinks that ReLUs and max-pooling make the surface has creases, of which ``∇²L`` knows nothing. There the gradient
changes by more than the integral of ``∇²L c'``. Those creases that bend the way noticeably are found, by ever smaller
steps, and crossed as a geodesic crosses them (:meth:`~laplace_plus.geometry.GraphMetric.refracted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry.integration import WORDS, PathStatus, Rates, integrate
from laplace_plus.geometry.landscape import FunctionLandscape, Landscape
from laplace_plus.geometry.metric import GraphMetric
from laplace_plus.geometry.second_order import Derivatives

Surface = Landscape | Callable[[Tensor], Tensor] | Sequence[Landscape]


@dataclass(frozen=True)
class GeodesicResult:
    """Ends of geodesics, and how they were reached.

    Attributes:
        endpoint: ``c(t)`` at the last time, ``[k, P]``; NaN for a geodesic that did not get there.
        velocity: ``c'(t)`` there, ``[k, P]``; NaN likewise.
        energy: ``c'ᵀ M c'`` at the start, ``[k]``; the square of the geodesic's length per unit of time.
        energy_drift: Sum of the relative changes of the energy that were corrected for, ``[k]``.
        reached: Time to which each one got, ``[k]``.
        n_evaluations: Gradients with Hessian-vector products that each one took, ``[k]``.
        statuses: ``[k]`` integers, the :class:`PathStatus` of each one.
        n_creases: Creases of the surface that each one was led across, ``[k]``; smaller ones pass unnoticed.
        path: ``c`` at all times that were asked for, ``[k, T, P]``.
    """

    endpoint: Tensor
    velocity: Tensor
    energy: Tensor
    energy_drift: Tensor
    reached: Tensor
    n_evaluations: Tensor
    statuses: Tensor
    n_creases: Tensor
    path: Tensor

    @property
    def arrived(self) -> Tensor:
        """Which geodesics reached their end, ``[k]`` bool."""
        return self.statuses == PathStatus.ARRIVED


def failures(statuses: Tensor) -> str:
    """In words how paths failed, most frequent first; empty if none did.

    Example:
        >>> failures(torch.tensor([0, 3, 1, 3]))
        '2 met derivatives that are not finite, 1 reached the cap on evaluations'
    """
    counts = {status: int((statuses == status).sum()) for status in PathStatus if status != PathStatus.ARRIVED}
    found = sorted(((count, status) for status, count in counts.items() if count), reverse=True)
    return ", ".join(f"{count} {WORDS[status]}" for count, status in found)


def exponential_map(
    landscape: Surface,
    start: Tensor,
    velocities: Tensor,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-4,
    max_evaluations: int = 10_000,
    max_energy_change: float = 0.1,
) -> GeodesicResult:
    """Where geodesics from ``start`` with given velocities are at time 1.

    All of them advance together, each with its own step size, until it arrives or fails; a failed one is marked, and
    its end is NaN. Costs ``n_evaluations`` gradients with Hessian-vector products for each, and memory for some eighty
    vectors of length P.

    Args:
        landscape: The loss surface, a function of ``[P]``, or one landscape for each geodesic.
        start: ``[P]``, or one for each geodesic, ``[k, P]``.
        velocities: ``[k, P]``.
        rtol: Relative tolerance of a step's error.
        atol: Its absolute tolerance, in units of the parameters.
        max_evaluations: Cap for each geodesic.
        max_energy_change: Relative change of the energy beyond which a step is repeated with a smaller one; what is
            left is corrected for by stretching the velocity. The same holds for a crease by which the velocity would
            change, relative to its length; where the step is tiny, it is refracted. Infinity takes all steps.

    Raises:
        ConfigurationError: Shapes that do not fit, or settings out of range.
        UnsupportedError: A loss that cannot be differentiated twice.

    Example:
        >>> bowl = lambda point: 2 * point.square().sum()
        >>> velocity = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
        >>> result = exponential_map(bowl, torch.zeros(2, dtype=torch.float64), velocity)
        >>> (result.endpoint / velocity).squeeze() < 0.4  # the bowl's walls are steep
        tensor([True, True])
    """
    return geodesic(
        landscape,
        start,
        velocities,
        torch.ones(1, dtype=torch.float64),
        rtol=rtol,
        atol=atol,
        max_evaluations=max_evaluations,
        max_energy_change=max_energy_change,
    )


def geodesic(
    landscape: Surface,
    start: Tensor,
    velocities: Tensor,
    times: Tensor,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-4,
    max_evaluations: int = 10_000,
    max_energy_change: float = 0.1,
) -> GeodesicResult:
    """Points of geodesics at several times; else as :func:`exponential_map`.

    Args:
        landscape: As there.
        start: As there.
        velocities: As there.
        times: Positive and increasing, ``[T]``.
        rtol: As there.
        atol: As there.
        max_evaluations: As there.
        max_energy_change: As there.

    Raises:
        ConfigurationError: Also times that are not positive and increasing.
        UnsupportedError: A loss that cannot be differentiated twice.
    """
    check_settings(rtol, atol, max_evaluations, max_energy_change)
    points = _starts(start, velocities)
    size = velocities.shape[1]
    increasing = times.ndim == 1 and len(times) > 0 and bool((times.diff(prepend=times.new_zeros(1)) > 0).all())
    if not increasing or not bool(torch.isfinite(times).all()):
        raise ConfigurationError(
            "These are no times of a path.", expected="positive and increasing numbers [T]", got=repr(times.tolist())
        )
    derivatives = _derivatives(landscape, len(points))

    def function(which: Tensor, states: Tensor) -> Rates:
        c, u = states.split(size, dim=1)
        gradients, products = derivatives(which, c, u)
        metric = GraphMetric(gradients)
        bend = metric.beta * (u * products).sum(1)
        slope = torch.cat([u, -bend[:, None] * gradients], 1)
        return Rates(slope, metric.squared_norm(u), gradients, products)

    def correct(states: Tensor, rates: Rates, ratio: Tensor) -> tuple[Tensor, Rates]:
        """Velocities stretched to the right energy; accelerations are quadratic in them."""
        stretch = ratio.sqrt()[:, None].to(states)
        (c, u), (_, bend) = states.split(size, dim=1), rates.slope.split(size, dim=1)
        slope = torch.cat([stretch * u, stretch.square() * bend], 1)
        rates = Rates(slope, rates.invariant * ratio, rates.quantity, stretch * rates.change)
        return torch.cat([c, stretch * u], 1), rates

    def bend(states: Tensor, gradients: Tensor, jumps: Tensor) -> tuple[Tensor, Tensor]:
        """Behind a crease, with the velocity that a geodesic has there; in double precision, for gradients are long."""
        c, u = states.split(size, dim=1)
        gradients, jumps, velocities = gradients.double(), jumps.double(), u.double()
        before, behind = GraphMetric(gradients - jumps), GraphMetric(gradients)
        refracted = before.refracted(velocities, behind)
        bent = behind.norm(refracted - velocities) / before.norm(velocities).clamp(min=torch.finfo(u.dtype).tiny)
        return torch.cat([c, refracted.to(u)], 1), bent

    with torch.no_grad():
        found = integrate(
            function,
            torch.cat([points, velocities], 1),
            times,
            rtol=rtol,
            atol=atol,
            max_evaluations=max_evaluations,
            max_change=max_energy_change,
            correct=correct,
            bend=bend,
        )
    path, speeds = found.states.split(size, dim=2)
    return GeodesicResult(
        endpoint=path[:, -1],
        velocity=speeds[:, -1],
        energy=found.initial,
        energy_drift=found.drift,
        reached=found.reached,
        n_evaluations=found.n_evaluations,
        statuses=found.statuses,
        n_creases=found.n_kinks,
        path=path,
    )


def _derivatives(landscape: Surface, k: int) -> Callable[[Tensor, Tensor, Tensor], Derivatives]:
    if not isinstance(landscape, Sequence):
        one = landscape if isinstance(landscape, Landscape) else FunctionLandscape(landscape)
        return lambda which, points, directions: one.derivatives(points, directions)
    several = landscape
    if len(several) != k:
        raise ConfigurationError("Not one landscape for each geodesic.", expected=f"{k} of them", got=f"{len(several)}")

    def each(which: Tensor, points: Tensor, directions: Tensor) -> Derivatives:
        parts = [
            several[number].derivatives(points[row : row + 1], directions[row : row + 1])
            for row, number in enumerate(which.tolist())
        ]
        return Derivatives(torch.cat([part.gradients for part in parts]), torch.cat([part.products for part in parts]))

    return each


def _starts(start: Tensor, velocities: Tensor) -> Tensor:
    shapes_fit = velocities.ndim == 2 and start.shape in (velocities.shape[1:], velocities.shape)
    if not shapes_fit or not len(velocities) or start.dtype != velocities.dtype or not start.is_floating_point():
        raise ConfigurationError(
            "Starts and velocities do not fit together.",
            expected="velocities [k, P] and a start [P] or [k, P], of one floating type",
            got=f"{list(velocities.shape)} of {velocities.dtype} and {list(start.shape)} of {start.dtype}",
        )
    return start.detach().expand_as(velocities)


def check_settings(rtol: float, atol: float, max_evaluations: int, max_energy_change: float) -> None:
    """Raise :class:`ConfigurationError` for settings that no path can be followed with."""
    whole = isinstance(max_evaluations, int) and not isinstance(max_evaluations, bool)
    if not (0 < rtol < 1 and 0 < atol < math.inf and max_energy_change > 0 and whole and max_evaluations >= 1):
        raise ConfigurationError(
            "No path can be followed with these settings.",
            expected="0 < rtol < 1, atol > 0, max_energy_change > 0 and an integer max_evaluations >= 1",
            got=f"rtol={rtol}, atol={atol}, max_energy_change={max_energy_change}, max_evaluations={max_evaluations!r}",
        )
