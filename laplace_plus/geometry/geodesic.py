"""Geodesics of a loss surface ``θ ↦ (θ, L(θ))``, its metric and its exponential map.

The surface inherits the metric ``M = I + g gᵀ``, ``g = ∇L``, from the space around it. Its shortest curves obey

    c'' = −∇L(c) ⟨c', ∇²L(c) c'⟩ / (1 + ‖∇L(c)‖²)

whose right-hand side takes one gradient together with one Hessian-vector product, and which keeps the energy
``c'ᵀ M(c) c' = ‖c'‖² + ⟨∇L(c), c'⟩²``. Bergamin, Moreno-Muñoz, Hauberg and Arvanitidis, "Riemannian Laplace
approximations for Bayesian neural networks", 2023.

On the walls of a loss with large curvature λ the surface turns from flat to steep within 1/λ. A geodesic bounces
between them many times: thousands of evaluations where the posterior is narrow in some directions and wide in others. A
solver that misses turns gains energy and climbs too high. The energy is therefore kept exactly, by stretching the
velocity after each step (Hairer, Lubich and Wanner, "Geometric numerical integration", 2006, IV.4). That allows for
tolerances at which it would otherwise grow manifold.

At the kinks that ReLUs and max-pooling make, the surface has creases, which ``∇²L`` does not see. There the gradient
changes by more than the integral of ``∇²L c'``. Creases that bend the path noticeably are located by ever smaller
steps, and crossed as a geodesic crosses them (:meth:`GraphMetric.refracted`).

The solver is Dormand and Prince's pair of orders 5 and 4 (1980), with the step size control of Hairer, Nørsett and
Wanner, "Solving ordinary differential equations I", 1993. Each geodesic has a step size and an end of its own, and the
right-hand sides of all that are under way are evaluated together, since they take most of the time. No maintained
library offers that: torchdiffeq has one step size, and one failure, for the whole batch; torchode depends on
torchtyping, which is retired; SciPy's steppers, the tests' reference, evaluate one sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.geometry.landscape import Derivatives, FunctionLandscape, Landscape

Surface = Landscape | Callable[[Tensor], Tensor] | Sequence[Landscape]

_A: tuple[tuple[float, ...], ...] = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_WEIGHTS = (*_A[-1], 0.0)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Difference of the solutions of order 5 and 4; the last stage of a step is the first one of the next."""

_SAFETY, _LEAST, _MOST = 0.9, 0.2, 10.0
"""Safety factor, and least and largest factor between steps, as is usual for this pair (SciPy's, too)."""
_TOWARDS_CREASES = 0.25
"""Factor of a step's length where a crease rejects it; the size of a jump does not tell where in the step it is."""
_TINY = 1e-6
"""Fraction of the path below which a step that still sees a jump is taken to be at a crease; also 100 roundings."""


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

    def _slope(self, vectors: Tensor) -> Tensor:
        return (self.gradient * vectors).sum(-1)


class PathStatus(IntEnum):
    """How a sample's path ended."""

    ARRIVED = 0
    """It reached its end."""
    TOO_MANY_EVALUATIONS = 1
    """The cap on evaluations of the right-hand side came first."""
    STEP_TOO_SMALL = 2
    """The tolerances ask for steps below rounding: the path diverges, or they are too tight for the type."""
    NOT_FINITE = 3
    """A gradient or a Hessian-vector product along it was NaN or infinite."""


def failures(statuses: Tensor) -> str:
    """In words how paths failed, most frequent first; empty if none did.

    Example:
        >>> failures(torch.tensor([0, 3, 1, 3]))
        '2 not finite, 1 too many evaluations'
    """
    counts = [(int((statuses == status).sum()), status.name.replace("_", " ").lower()) for status in PathStatus][1:]
    return ", ".join(f"{count} {words}" for count, words in sorted(counts, reverse=True) if count)


@dataclass(frozen=True)
class GeodesicResult:
    """Ends of geodesics, and how they were reached.

    Attributes:
        endpoint: ``c(t)`` at the last time, ``[k, P]``; NaN for a geodesic that did not get there.
        velocity: ``c'(t)`` there, ``[k, P]``; NaN likewise.
        energy: ``c'ᵀ M c'`` at the start, ``[k]``; the square of the geodesic's length per unit of time.
        n_evaluations: Gradients with Hessian-vector products that each one took, ``[k]``.
        statuses: ``[k]`` integers, the :class:`PathStatus` of each one.
        n_creases: Creases of the surface that each one was led across, ``[k]``; smaller ones pass unnoticed.
        path: ``c`` at all times that were asked for, ``[k, T, P]``.
    """

    endpoint: Tensor
    velocity: Tensor
    energy: Tensor
    n_evaluations: Tensor
    statuses: Tensor
    n_creases: Tensor
    path: Tensor


def geodesic(
    landscape: Surface,
    start: Tensor,
    velocities: Tensor,
    times: Tensor | None = None,
    *,
    rtol: float = 3e-7,
    atol: float = 3e-7,
    max_evaluations: int = 10_000,
    max_energy_change: float = 0.1,
) -> GeodesicResult:
    """Where geodesics from ``start`` with given velocities are: at time 1, which is the exponential map, or others.

    All of them advance together, each with its own step size, until it arrives or fails; a failed one is marked, and
    its end is NaN. Costs ``n_evaluations`` gradients with Hessian-vector products for each, and memory for some eighty
    vectors of length P.

    Args:
        landscape: The loss surface, a function of ``[P]``, or one landscape for each geodesic.
        start: ``[P]``, or one for each geodesic, ``[k, P]``.
        velocities: ``[k, P]``.
        times: Positive and increasing, ``[T]``; 1 by default.
        rtol: Relative tolerance of a step's error. By default posterior draws of small smooth networks end within 1e-3
            of a tighter solve; with 1e-5 they end within .02, for two thirds of the evaluations. With ReLUs, whose
            kinks shorten steps, 1e-3 takes a tenth.
        atol: Its absolute tolerance, in units of the parameters.
        max_evaluations: Cap for each geodesic.
        max_energy_change: Relative change of the energy beyond which a step is repeated with a smaller one; what is
            left is corrected for by stretching the velocity. The same holds for a crease by which the velocity would
            change, relative to its length; where the step is tiny, it is refracted. Infinity takes all steps.

    Raises:
        ConfigurationError: Shapes or times that do not fit, or settings out of range.
        UnsupportedError: A loss that cannot be differentiated twice.

    Example:
        >>> bowl = lambda point: 2 * point.square().sum()
        >>> velocity = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
        >>> result = geodesic(bowl, torch.zeros(2, dtype=torch.float64), velocity)
        >>> (result.endpoint / velocity).squeeze() < 0.4  # the bowl's walls are steep
        tensor([True, True])
    """
    check_settings(rtol, atol, max_evaluations, max_energy_change)
    checks.shape("velocities", velocities, [None, None])
    checks.count("The number of velocities", len(velocities))
    checks.shape("start", start, velocities.shape[start.ndim == 1 :])
    times = checks.shape("times", torch.ones(1, dtype=torch.float64) if times is None else times, [None])
    checks.count("The number of times", len(times))
    checks.positive("The least step from time to time", float(times.diff(prepend=times.new_zeros(1)).min()))
    points = start.detach().to(velocities).expand_as(velocities)
    settings = {"rtol": rtol, "atol": atol, "max_energy_change": max_energy_change}
    with torch.no_grad():
        field = _derivatives(landscape, len(points))
        return _integrate(field, points, velocities, times, max_evaluations=max_evaluations, **settings)


def _derivatives(landscape: Surface, k: int) -> Callable[[Tensor, Tensor, Tensor], Derivatives]:
    """Derivatives at states of given geodesics, from one landscape for all or one for each."""
    if not isinstance(landscape, Sequence):
        one = landscape if isinstance(landscape, Landscape) else FunctionLandscape(landscape)
        return lambda which, points, directions: one.derivatives(points, directions)
    several = landscape

    def each(which: Tensor, points: Tensor, directions: Tensor) -> Derivatives:
        rows = zip(which.tolist(), points.split(1), directions.split(1), strict=True)
        found = [several[number].derivatives(point, direction) for number, point, direction in rows]
        return Derivatives(*(torch.cat(part) for part in zip(*found, strict=True)))

    return each


def check_settings(rtol: float, atol: float, max_evaluations: int, max_energy_change: float) -> None:
    """Raise :class:`ConfigurationError` for settings out of range."""
    checks.number("rtol", rtol, above=0.0, most=1.0)
    checks.positive("atol", atol)
    checks.count("max_evaluations", max_evaluations)
    checks.positive("max_energy_change", min(max_energy_change, 1.0))  # infinity takes all steps


def _integrate(
    derivatives: Callable[[Tensor, Tensor, Tensor], Derivatives],
    start: Tensor,
    velocities: Tensor,
    times: Tensor,
    *,
    rtol: float,
    atol: float,
    max_evaluations: int,
    max_energy_change: float,
) -> GeodesicResult:
    """Follow geodesics from ``start [k, P]`` at time 0 to ``times [T]``; ``derivatives`` also gets their numbers.

    In units of ``atol + rtol max(|y|, |y_next|)``, the error of a step has a root mean square over a state ``(c, c')``
    of at most one. The relative change of the energy is at most ``max_energy_change``. After each step the velocity is
    stretched to the energy that it had at the start.

    At a crease the gradient changes by more than the integral of ``∇²L c'``. Steps in which this jump, or the energy,
    would bend the path by more than ``max_energy_change`` are repeated with smaller ones. A jump that is left in a tiny
    step is a crease, behind which the velocity is refracted.
    """

    def rates(which: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The derivative of the states, the gradient and its derivative along the path, and the energy."""
        c, u = states.chunk(2, 1)
        gradient, product = derivatives(which, c, u)
        metric = GraphMetric(gradient)
        bend = -(metric.beta * (u * product).sum(1))[:, None] * gradient
        return torch.cat([u, bend], 1), gradient, product, metric.squared_norm(u)

    def combined(weights: tuple[float, ...], stages: list[Tensor]) -> Tensor:
        return sum(w * stage for w, stage in zip(weights, stages, strict=True) if w)  # type: ignore[return-value]

    k, device = len(start), start.device
    goals = times.to(device=device, dtype=torch.float64)
    samples = torch.arange(k, device=device)
    y = torch.cat([start, velocities], 1)
    slope, gradient, product, initial = (part.clone() for part in rates(samples, y))
    count = torch.ones(k, dtype=torch.long, device=device)
    states = y.new_full((k, len(goals), y.shape[1]), float("nan"))
    goal, n_creases = torch.zeros(2, k, dtype=torch.long, device=device)
    fine = torch.isfinite(slope).all(1) & torch.isfinite(initial)
    statuses, active = torch.where(fine, 0, int(PathStatus.NOT_FINITE)), samples[fine]
    # Hairer, Nørsett and Wanner's first step where the second derivative is small; elsewhere it is rejected.
    scale = atol + rtol * y.abs()
    rate = _size(slope / scale).clamp(min=1e-30).double()
    h = torch.minimum(_size(y / scale).clamp(min=1) / rate, (0.01 / rate) ** 0.2)
    t = torch.zeros_like(h)
    smallest, least = 10 * torch.finfo(y.dtype).eps, torch.finfo(y.dtype).tiny
    tiny = max(_TINY, 10 * smallest) * goals[-1]
    most = torch.full_like(h, _MOST)
    while len(active):
        left = goals[goal[active]] - t[active]
        landing = h[active] >= left * (1 - 1e-9)
        step = torch.where(landing, left, h[active])
        short = step.to(y.dtype)[:, None]
        stages, integral = [slope[active]], _WEIGHTS[0] * product[active]
        for weights, weight in zip(_A, _WEIGHTS[1:], strict=True):
            state = y[active] + short * combined(weights, stages)
            end_slope, end_gradient, end_product, energy = rates(active, state)
            stages.append(end_slope)
            integral += weight * end_product
        count[active] += len(_A)
        scale = atol + rtol * torch.maximum(y[active].abs(), state.abs())
        norm = _size(short * combined(_ERROR, stages) / scale).to(h)
        finite = torch.isfinite(norm) & torch.isfinite(end_slope).all(1) & torch.isfinite(energy)
        base = initial[active]
        change = torch.where(base > 0, (energy / base.clamp(min=least) - 1).abs(), 0.0).to(h)
        # In double precision, since squares of long gradients cancel.
        u = state.chunk(2, 1)[1].double()
        behind, jump = GraphMetric(end_gradient.double()), end_gradient - gradient[active] - short * integral
        before = GraphMetric(behind.gradient - jump.double())
        refracted = before.refracted(u, behind)
        bent = behind.norm(refracted - u) / before.norm(u).clamp(min=least)
        straight = torch.maximum(change, bent.to(h)) <= max_energy_change
        crossed = finite & (norm <= 1) & ~straight & (step < tiny)
        if crossed.any():
            state[crossed] = torch.cat([state.chunk(2, 1)[0], refracted.to(state)], 1)[crossed]
            there = rates(active[crossed], state[crossed])
            for values, new in zip((end_slope, end_gradient, end_product, energy), there, strict=True):
                values[crossed] = new
            finite &= torch.isfinite(end_slope).all(1) & torch.isfinite(energy)
            count[active[crossed]] += 1
            n_creases[active[crossed & finite]] += 1
        accepted = finite & (norm <= 1) & (straight | crossed)
        largest = torch.where(crossed, _MOST, most[active])
        factor = torch.minimum(_SAFETY * norm.clamp(min=1e-10) ** -0.2, largest).clamp(min=_LEAST)
        factor = torch.where(straight | crossed, factor, factor.clamp(max=_TOWARDS_CREASES))
        factor = torch.where(accepted, factor, torch.where(finite, factor.clamp(max=1.0), _LEAST))
        most[active] = torch.where(accepted, _MOST, 1.0).to(most)  # after a rejection no larger step

        # Accelerations are quadratic in the velocity.
        moved, ratio = active[accepted], torch.where(base > 0, base / energy, 1.0)[accepted, None]
        c, u = state[accepted].chunk(2, 1)
        bend = end_slope[accepted].chunk(2, 1)[1]
        y[moved] = torch.cat([c, ratio.sqrt() * u], 1)
        slope[moved] = torch.cat([ratio.sqrt() * u, ratio * bend], 1)
        gradient[moved], product[moved] = end_gradient[accepted], ratio.sqrt() * end_product[accepted]
        t[moved] = torch.where(landing, goals[goal[active]], t[active] + step)[accepted]
        # A step cut short to land on a time does not rule out the longer one that was planned.
        h[active] = torch.where(accepted & landing, torch.maximum(h[active], step * factor), step * factor)
        landed = active[accepted & landing]
        states[landed, goal[landed]] = y[landed]
        goal[landed] += 1

        ended = goal[active] == len(goals)
        statuses[active[~ended & (h[active] < smallest * left)]] = PathStatus.STEP_TOO_SMALL
        over = count[active] + len(_A) >= max_evaluations  # a step may take one more, behind a crease
        statuses[active[~ended & over]] = PathStatus.TOO_MANY_EVALUATIONS
        failed = ~ended & (statuses[active] != PathStatus.ARRIVED)
        statuses[active[failed & ~finite]] = PathStatus.NOT_FINITE
        active = active[~ended & ~failed]
    path, speeds = states.chunk(2, 2)
    return GeodesicResult(path[:, -1], speeds[:, -1], initial, count, statuses, n_creases, path)


def _size(vectors: Tensor) -> Tensor:
    return vectors.square().mean(1).sqrt()
