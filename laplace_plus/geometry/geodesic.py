"""Geodesics of a loss surface ``θ ↦ (θ, L(θ))``, its metric and its exponential map.

The surface inherits the metric ``M = I + g gᵀ``, ``g = ∇L``, from the space around it. Its shortest curves obey

    c'' = −∇L(c) ⟨c', ∇²L(c) c'⟩ / (1 + ‖∇L(c)‖²)

whose right-hand side takes one gradient together with one Hessian-vector product, and which keeps the energy
``c'ᵀ M(c) c' = ‖c'‖² + ⟨∇L(c), c'⟩²``. Bergamin, Moreno-Muñoz, Hauberg and Arvanitidis, "Riemannian Laplace
approximations for Bayesian neural networks", 2023.

On the walls of a loss with large curvature λ the surface turns from flat to steep within 1/λ, and a geodesic bounces
between them many times: it takes thousands of evaluations where the posterior is narrow in some directions and wide in
others, and a solver that misses turns gains energy and climbs too high. The energy is therefore kept exactly, by
stretching the velocity after each step (Hairer, Lubich and Wanner, "Geometric numerical integration", 2006, IV.4). That
allows for tolerances at which it would otherwise grow manifold.

At the kinks that ReLUs and max-pooling make, the surface has creases, which ``∇²L`` does not see. There the gradient
changes by more than the integral of ``∇²L c'``. Creases that bend the path noticeably are located by ever smaller
steps, and crossed as a geodesic crosses them (:meth:`GraphMetric.refracted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry.integration import PathStatus, Rates, integrate
from laplace_plus.geometry.landscape import Derivatives, FunctionLandscape, Landscape

Surface = Landscape | Callable[[Tensor], Tensor] | Sequence[Landscape]


@dataclass(frozen=True)
class GraphMetric:
    """``M = I + g gᵀ`` at one point, or at several.

    Attributes:
        gradient: g, ``[..., P]``.

    Example:
        >>> metric = GraphMetric(torch.tensor([3.0, 0.0]))
        >>> metric.apply(torch.tensor([1.0, 1.0])), metric.inverse(torch.tensor([10.0, 1.0]))
        (tensor([10.,  1.]), tensor([1., 1.]))
    """

    gradient: Tensor

    @property
    def beta(self) -> Tensor:
        """``1/(1 + ‖g‖²)``, ``[...]``: one over the determinant."""
        return 1 / (1 + self.gradient.square().sum(-1))

    def apply(self, vectors: Tensor) -> Tensor:
        """``M v``, ``[..., P]``."""
        return vectors + self.gradient * self._slope(vectors)[..., None]

    def inverse(self, vectors: Tensor) -> Tensor:
        """``M⁻¹ v = v − g (gᵀ v)/(1 + ‖g‖²)``, ``[..., P]``."""
        return vectors - self.gradient * (self.beta * self._slope(vectors))[..., None]

    def inverse_squared_norm(self, vectors: Tensor) -> Tensor:
        """``vᵀ M⁻¹ v``, ``[...]``, with the part along the gradient computed apart, since it would cancel."""
        length = self.gradient.norm(dim=-1)
        unit = self.gradient / length.clamp(min=torch.finfo(length.dtype).tiny)[..., None]
        along = (unit * vectors).sum(-1)
        return (vectors - unit * along[..., None]).square().sum(-1) + self.beta * along.square()

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``uᵀ M v``, ``[...]``."""
        return (left * right).sum(-1) + self._slope(left) * self._slope(right)

    def squared_norm(self, vectors: Tensor) -> Tensor:
        """``vᵀ M v``, ``[...]``: for a curve's velocity its energy, which geodesics keep."""
        return self.inner(vectors, vectors)

    def norm(self, vectors: Tensor) -> Tensor:
        """``(vᵀ M v)^½``, ``[...]``: for a curve's velocity its speed along the surface."""
        return self.squared_norm(vectors).sqrt()

    def refracted(self, vectors: Tensor, beyond: GraphMetric) -> Tensor:
        """Velocities of geodesics beyond a crease of the surface, where this metric becomes another, ``[..., P]``.

        At a kink of L its gradient jumps from g to ``g + d``, across a hypersurface with the normal d. Laid out flat,
        the two sides of the surface are one plane, in which a geodesic goes straight on. So its momentum ``M u``
        changes along d only, and the part of its energy that goes across, ``(dᵀu)²/(dᵀM⁻¹d)``, is the same on both
        sides. This is the limit of geodesics over ever sharper bends.
        """
        jump = beyond.gradient - self.gradient
        across, momentum = (jump * vectors).sum(-1), self.apply(vectors)
        normal, wide, narrow = beyond.inverse(jump), beyond.inverse_squared_norm(jump), self.inverse_squared_norm(jump)
        smallest = torch.finfo(jump.dtype).tiny
        push = across * (wide / narrow.clamp(min=smallest)).sqrt() - (normal * momentum).sum(-1)
        return beyond.inverse(momentum) + (push / wide.clamp(min=smallest))[..., None] * normal

    def log_determinant(self) -> Tensor:
        """``log det M = log(1 + ‖g‖²)``, ``[...]``."""
        return torch.log1p(self.gradient.square().sum(-1))

    def dense(self) -> Tensor:
        """M written out, ``[..., P, P]``."""
        g = self.gradient
        return torch.eye(g.shape[-1], dtype=g.dtype, device=g.device) + g[..., :, None] * g[..., None, :]

    def _slope(self, vectors: Tensor) -> Tensor:
        return (self.gradient * vectors).sum(-1)


@dataclass(frozen=True)
class GeodesicResult:
    """Ends of geodesics, and how they were reached.

    Attributes:
        endpoint: ``c(t)`` at the last time, ``[k, P]``; NaN for a geodesic that did not get there.
        velocity: ``c'(t)`` there, ``[k, P]``; NaN likewise.
        energy: ``c'ᵀ M c'`` at the start, ``[k]``; the square of the geodesic's length per unit of time.
        energy_drift: Sum of the relative changes of the energy that were corrected for, ``[k]``.
        reached: Time that each one reached, ``[k]``.
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
    settings = {"rtol": rtol, "atol": atol, "max_energy_change": max_energy_change}
    return geodesic(
        landscape, start, velocities, torch.ones(1, dtype=torch.float64), max_evaluations=max_evaluations, **settings
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
    """Points of geodesics at several ``times``, positive and increasing, ``[T]``; all else as :func:`exponential_map`.

    Raises:
        ConfigurationError: Also times that are not positive and increasing.
        UnsupportedError: A loss that cannot be differentiated twice.
    """
    check_settings(rtol, atol, max_evaluations, max_energy_change)
    fits = velocities.ndim == 2 and start.shape in (velocities.shape[1:], velocities.shape)
    if not fits or not len(velocities) or start.dtype != velocities.dtype or not start.is_floating_point():
        raise ConfigurationError(
            "Starts and velocities do not fit together.",
            expected="velocities [k, P] and a start [P] or [k, P], of one floating type",
            got=f"{list(velocities.shape)} of {velocities.dtype} and {list(start.shape)} of {start.dtype}",
        )
    increasing = times.ndim == 1 and len(times) > 0 and bool((times.diff(prepend=times.new_zeros(1)) > 0).all())
    if not increasing or not bool(torch.isfinite(times).all()):
        raise ConfigurationError(
            "Bad times of a path.", expected="positive and increasing numbers [T]", got=repr(times.tolist())
        )
    points, size = start.detach().expand_as(velocities), velocities.shape[1]
    derivatives = _derivatives(landscape, len(points))

    def function(which: Tensor, states: Tensor) -> Rates:
        c, u = states.split(size, dim=1)
        gradients, products = derivatives(which, c, u)
        metric = GraphMetric(gradients)
        bend = metric.beta * (u * products).sum(1)
        slope = torch.cat([u, -bend[:, None] * gradients], 1)
        return Rates(slope, metric.squared_norm(u), gradients, products)

    def correct(states: Tensor, rates: Rates, ratio: Tensor) -> tuple[Tensor, Rates]:
        """Stretch velocities to the right energy; accelerations are quadratic in them."""
        stretch = ratio.sqrt()[:, None].to(states)
        (c, u), (_, bend) = states.split(size, dim=1), rates.slope.split(size, dim=1)
        slope = torch.cat([stretch * u, stretch.square() * bend], 1)
        rates = Rates(slope, rates.invariant * ratio, rates.quantity, stretch * rates.change)
        return torch.cat([c, stretch * u], 1), rates

    def bend(states: Tensor, gradients: Tensor, jumps: Tensor) -> tuple[Tensor, Tensor]:
        """States behind a crease; in double precision, since squares of long gradients cancel."""
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
    """Derivatives at states of given geodesics, from one landscape for all or one for each."""
    if not isinstance(landscape, Sequence):
        one = landscape if isinstance(landscape, Landscape) else FunctionLandscape(landscape)
        return lambda which, points, directions: one.derivatives(points, directions)
    several = landscape
    if len(several) != k:
        raise ConfigurationError("Not one landscape for each geodesic.", expected=f"{k} of them", got=f"{len(several)}")

    def each(which: Tensor, points: Tensor, directions: Tensor) -> Derivatives:
        rows = zip(which.tolist(), points.split(1), directions.split(1), strict=True)
        found = [several[number].derivatives(point, direction) for number, point, direction in rows]
        return Derivatives(*(torch.cat(part) for part in zip(*found, strict=True)))

    return each


def check_settings(rtol: float, atol: float, max_evaluations: int, max_energy_change: float) -> None:
    """Raise :class:`ConfigurationError` for settings out of range."""
    whole = isinstance(max_evaluations, int) and not isinstance(max_evaluations, bool)
    if not (0 < rtol < 1 and 0 < atol < math.inf and max_energy_change > 0 and whole and max_evaluations >= 1):
        raise ConfigurationError(
            "Bad settings of a geodesic's solver.",
            expected="0 < rtol < 1, atol > 0, max_energy_change > 0 and an integer max_evaluations >= 1",
            got=f"rtol={rtol}, atol={atol}, max_energy_change={max_energy_change}, max_evaluations={max_evaluations!r}",
        )
