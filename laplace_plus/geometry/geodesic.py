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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry.integration import GeodesicResult, integrate
from laplace_plus.geometry.landscape import Derivatives, FunctionLandscape, Landscape

Surface = Landscape | Callable[[Tensor], Tensor] | Sequence[Landscape]


def exponential_map(
    landscape: Surface,
    start: Tensor,
    velocities: Tensor,
    *,
    rtol: float = 3e-7,
    atol: float = 3e-7,
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
        rtol: Relative tolerance of a step's error. By default posterior draws of small smooth networks end within 1e-3
            of a tighter solve; with 1e-5 they end within .02, for two thirds of the evaluations. With ReLUs, whose
            kinks shorten steps, 1e-3 takes a tenth.
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
    time = torch.ones(1, dtype=torch.float64)
    return geodesic(landscape, start, velocities, time, max_evaluations=max_evaluations, **settings)


def geodesic(
    landscape: Surface,
    start: Tensor,
    velocities: Tensor,
    times: Tensor,
    *,
    rtol: float = 3e-7,
    atol: float = 3e-7,
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
        expected = "velocities [k, P] and a start [P] or [k, P], of one floating type"
        got = f"{list(velocities.shape)} of {velocities.dtype} and {list(start.shape)} of {start.dtype}"
        raise ConfigurationError("Starts and velocities do not fit together.", expected=expected, got=got)
    increasing = times.ndim == 1 and len(times) > 0 and bool((times.diff(prepend=times.new_zeros(1)) > 0).all())
    if not increasing or not bool(torch.isfinite(times).all()):
        raise ConfigurationError(
            "Bad times of a path.", expected="positive and increasing numbers [T]", got=repr(times.tolist())
        )
    points = start.detach().expand_as(velocities)
    settings = {"rtol": rtol, "atol": atol, "max_energy_change": max_energy_change}
    with torch.no_grad():
        field = _derivatives(landscape, len(points))
        return integrate(field, points, velocities, times, max_evaluations=max_evaluations, **settings)


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
    if not max_energy_change > 0:  # infinity takes all steps
        what = "max_energy_change is out of range."
        raise ConfigurationError(what, expected="a number > 0", got=repr(max_energy_change))
