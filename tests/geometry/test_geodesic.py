"""Geodesics of loss surfaces against closed forms, invariants and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad, solve_ivp
from scipy.optimize import minimize
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry import (
    FunctionLandscape,
    GraphMetric,
    LossLandscape,
    PathStatus,
    geodesic,
)

DTYPE = torch.float64
TIGHT = {"rtol": 1e-8, "atol": 1e-8}


def vectors(k, n, seed=0, scale=1.0):
    return scale * torch.randn(k, n, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def wavy(point):
    return (point * torch.arange(1, len(point) + 1)).sin().sum() + 0.5 * point.square().sum() + point[0] * point[1]


def classes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = vectors(12, 2, seed=1), torch.arange(12) % 2
    return net, "classification", [(x[:7], y[:7]), (x[7:], y[7:])]


def network_landscape(**options):
    return LossLandscape(*classes(), **options)


# -- the metric -------------------------------------------------------------------------------------------------------


def test_metric_is_that_of_the_graph():
    g, u, v = vectors(4, 5), vectors(4, 5, 1), vectors(4, 5, 2)
    metric = GraphMetric(g)
    dense = torch.eye(5, dtype=DTYPE) + g[:, :, None] * g[:, None, :]
    torch.testing.assert_close(metric.apply(u), (dense @ u[..., None]).squeeze(-1))
    torch.testing.assert_close(metric.inverse(u), torch.linalg.solve(dense, u))
    torch.testing.assert_close(metric.inner(u, v), torch.einsum("ki,kij,kj->k", u, dense, v))
    torch.testing.assert_close(metric.norm(u).square(), metric.squared_norm(u))
    torch.testing.assert_close(metric.beta, 1 / torch.linalg.det(dense))
    torch.testing.assert_close(metric.inverse_squared_norm(u), (u * torch.linalg.solve(dense, u)).sum(1))


def test_refraction_keeps_what_goes_along_a_crease():
    g, d, u = vectors(4, 5), vectors(4, 5, 1), vectors(4, 5, 2)
    here, there = GraphMetric(g), GraphMetric(g + d)
    bent = here.refracted(u, there)
    torch.testing.assert_close(there.squared_norm(bent), here.squared_norm(u))
    along = vectors(4, 5, 3)
    along = along - d * ((along * d).sum(1) / d.square().sum(1))[:, None]
    torch.testing.assert_close(there.inner(bent, along), here.inner(u, along))
    assert ((bent * d).sum(1) * (u * d).sum(1) > 0).all()  # across, and not back
    torch.testing.assert_close(here.refracted(u, here), u)


# -- invariants -------------------------------------------------------------------------------------------------------


def test_energy_is_kept():
    landscape = network_landscape()
    result = geodesic(landscape, landscape.vector, vectors(1, 17, scale=0.4), **TIGHT)
    assert not result.statuses.any()
    metric = GraphMetric(landscape.gradient(result.endpoint))
    torch.testing.assert_close(metric.squared_norm(result.velocity), result.energy, rtol=1e-6, atol=0)
    start = GraphMetric(landscape.gradient(landscape.vector[None]))
    torch.testing.assert_close(start.squared_norm(vectors(1, 17, scale=0.4)), result.energy)


def test_going_back_leads_to_the_start():
    start, v = vectors(1, 4)[0], vectors(2, 4, 1, scale=0.4)
    there = geodesic(wavy, start, v, **TIGHT)
    back = geodesic(wavy, there.endpoint, -there.velocity, **TIGHT)
    torch.testing.assert_close(back.endpoint, start.expand(2, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(back.velocity, -v, rtol=0, atol=1e-6)


def test_velocities_scale_time():
    start, v = vectors(1, 4)[0], vectors(2, 4, 1, scale=0.4)
    times = torch.tensor([0.25, 0.6, 1.0], dtype=DTYPE)
    path = geodesic(wavy, start, v, times, **TIGHT).path
    for number, time in enumerate(times):
        scaled = geodesic(wavy, start, time * v, **TIGHT).endpoint
        torch.testing.assert_close(path[:, number], scaled, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stationary", "order"), [(False, 2), (True, 3)])
def test_small_steps_are_straight(stationary, order):
    start = torch.zeros(4, dtype=DTYPE)
    slope = 0.0 if stationary else 1.0

    def loss(p):
        return slope * p[0] + 0.7 * p.square().sum() + p[0] * p[1] + p[2] ** 3

    v = vectors(1, 4, 3)
    errors = []
    for size in (0.02, 0.01):
        end = geodesic(loss, start, size * v, rtol=1e-12, atol=1e-14).endpoint
        errors.append(float((end - start - size * v).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.15)


def test_no_velocity_stays():
    start = vectors(1, 4)[0]
    assert torch.equal(geodesic(wavy, start, torch.zeros(2, 4, dtype=DTYPE)).endpoint, start.expand(2, -1))


@pytest.mark.parametrize(
    ("loss", "velocity"),
    [
        (lambda p: 3 * p[0] - 2 * p[1] + 1, [1.3, -0.4]),  # a plane
        (lambda p: p[0] * p[1] + p[1] ** 2, [2.0, 0.0]),  # vᵀ H v = 0 all along
    ],
)
def test_straight_lines(loss, velocity):
    start, v = torch.zeros(2, dtype=DTYPE), torch.tensor([velocity], dtype=DTYPE)
    result = geodesic(loss, start, v)
    torch.testing.assert_close(result.endpoint, v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("a", [0.5, 3.0])
def test_bowl_is_radial(a):
    v = vectors(4, 5)
    result = geodesic(lambda p: a * p.square().sum() / 2, torch.zeros(5, dtype=DTYPE), v, **TIGHT)
    rho = result.endpoint.norm(dim=1)
    length = (rho * (1 + a**2 * rho**2).sqrt() + torch.asinh(a * rho) / a) / 2
    torch.testing.assert_close(length, v.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.endpoint / rho[:, None], v / v.norm(dim=1, keepdim=True), rtol=0, atol=1e-7)


def test_one_dimension_is_arc_length():
    def slope(x):
        return 3 * math.cos(3 * x) + 2 * x

    start, velocities = 0.2, [1.7, -0.9]
    ends = geodesic(
        lambda p: (3 * p).sin().sum() + p.square().sum(),
        torch.tensor([start], dtype=DTYPE),
        torch.tensor(velocities, dtype=DTYPE)[:, None],
        **TIGHT,
    ).endpoint
    for velocity, end in zip(velocities, ends.flatten().tolist(), strict=True):
        length, _ = quad(lambda x: math.sqrt(1 + slope(x) ** 2), start, end, epsabs=1e-12)
        assert abs(length) == pytest.approx(abs(velocity) * math.sqrt(1 + slope(start) ** 2), rel=1e-6)


def test_equivariance():
    turn, _ = torch.linalg.qr(vectors(4, 4, 5))
    shift, start, v = vectors(1, 4, 6)[0], vectors(1, 4)[0], vectors(2, 4, 1, scale=0.4)
    plain = geodesic(wavy, start, v, **TIGHT).endpoint
    moved = geodesic(lambda p: wavy(turn.T @ (p - shift)), turn @ start + shift, v @ turn.T, **TIGHT).endpoint
    torch.testing.assert_close(moved, plain @ turn.T + shift, rtol=0, atol=1e-6)


def test_linearized_is_the_same_on_a_linear_model():
    x, y = vectors(9, 3), torch.arange(9) % 3
    net = nn.Linear(3, 3).double()
    v = vectors(3, 12, 4, scale=0.5)
    ends = []
    for linearized in (False, True):
        landscape = LossLandscape(net, "classification", [(x, y)], linearized=linearized)
        ends.append(geodesic(landscape, landscape.vector, v, **TIGHT).endpoint)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)


# -- the integrator ---------------------------------------------------------------------------------------------------


def test_agrees_with_scipy():
    start, v = vectors(1, 4)[0], vectors(2, 4, 1, scale=0.4)
    ours = geodesic(wavy, start, v, **TIGHT)
    surface = FunctionLandscape(wavy)

    def function(t, state):
        c, u = torch.from_numpy(state).view(2, 1, 4)
        g, hu = surface.derivatives(c, u)
        return torch.cat([u, -g * (u * hu).sum() / (1 + g.square().sum())]).flatten().numpy()

    for row, velocity in enumerate(v):
        found = solve_ivp(function, (0, 1), np.concatenate([start, velocity]), method="DOP853", rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.endpoint[row], torch.from_numpy(found.y[:4, -1]), rtol=0, atol=1e-6)


def test_tolerances_are_met():
    start, v = vectors(1, 4)[0], vectors(2, 4, 1, scale=0.5)
    exact = geodesic(wavy, start, v, **TIGHT).endpoint
    errors, costs = [], []
    for tolerance in (1e-3, 1e-5):
        found = geodesic(wavy, start, v, rtol=tolerance, atol=tolerance)
        errors.append(float((found.endpoint - exact).abs().max()))
        costs.append(int(found.n_evaluations.sum()))
    assert errors[0] < 5e-2 and errors[1] < 1e-3
    assert costs[0] < costs[1]


def regression():
    """Steep walls along a curve."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.linspace(-2, 2, 12, dtype=DTYPE)[:, None]
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (net(x) - x.mul(2).sin()).square().sum() / 0.18 + sum(p.square().sum() for p in net.parameters()) / 2
        value.backward()
        return value

    optimizer.step(loss)
    return net, lp.Gaussian(0.3), [(x, x.mul(2).sin())]


@pytest.mark.quick("bowl")
@pytest.mark.parametrize(
    "surface", ["bowl", "waves", *[pytest.param(one, marks=pytest.mark.slow) for one in (classes, regression)]]
)
def test_defaults_end_within_a_thousandth_of_a_tight_solve(surface):
    landscape, start, v = lambda p: 2 * p.square().sum(), torch.zeros(4, dtype=DTYPE), vectors(2, 4, 1)
    if surface == "waves":
        landscape, start = wavy, vectors(1, 4)[0]
    elif callable(surface):  # at the scale of the posterior, where 1e-5 ends .0013 away
        net, *given = surface()
        landscape = LossLandscape(net, *given, prior_precision=1.0)
        tangent = lp.Full(net, given[0], prior_precision=1.0).fit(given[1])
        start, v = landscape.vector, tangent.sample(2, generator=torch.Generator().manual_seed(1)) - tangent.mean
    exact = geodesic(landscape, start, v, **TIGHT)
    sampling = {name: getattr(lp.ExponentialMap(), name) for name in ("rtol", "atol", "max_energy_change")}
    for options in ({}, sampling):
        found = geodesic(landscape, start, v, **options)
        assert not exact.statuses.any() and found.n_evaluations.sum() < exact.n_evaluations.sum()
        assert (found.endpoint - exact.endpoint).norm(dim=1).max() < 1e-3


def test_each_sample_has_its_own_steps():
    start, v = vectors(1, 4)[0], torch.cat([vectors(1, 4, 1, scale=0.01), vectors(1, 4, 2, scale=1.0)])
    together = geodesic(wavy, start, v, rtol=1e-3, atol=1e-3)
    assert together.n_evaluations[0] < together.n_evaluations[1]
    for row in range(2):
        alone = geodesic(wavy, start, v[row : row + 1], rtol=1e-3, atol=1e-3)
        assert alone.n_evaluations[0] == together.n_evaluations[row]
        torch.testing.assert_close(alone.endpoint[0], together.endpoint[row], rtol=0, atol=1e-12)


def test_single_precision():
    landscape = network_landscape()
    v = vectors(1, 17, scale=0.5)
    exact = geodesic(landscape, landscape.vector, v, rtol=1e-5, atol=1e-5).endpoint
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = vectors(12, 2, seed=1).float(), torch.arange(12) % 2
    single = LossLandscape(net, "classification", [(x, y)])
    found = geodesic(single, landscape.vector.float(), v.float())
    assert found.endpoint.dtype == torch.float32 and not found.statuses.any()
    torch.testing.assert_close(found.endpoint.double(), exact, rtol=0, atol=2e-3)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_caps_mark_the_sample_alone():
    start, v = torch.zeros(4, dtype=DTYPE), torch.cat([vectors(1, 4, 1, scale=0.01), vectors(1, 4, 2, scale=5.0)])
    result = geodesic(wavy, start, v, max_evaluations=40)
    assert result.statuses.tolist() == [PathStatus.ARRIVED, PathStatus.TOO_MANY_EVALUATIONS]
    assert result.n_evaluations.max() <= 40
    assert torch.isfinite(result.endpoint[0]).all() and torch.isnan(result.endpoint[1]).all()
    assert torch.isnan(result.velocity[1]).all()


def test_a_great_circle_and_its_end():
    start = torch.zeros(2, dtype=DTYPE)
    v = torch.tensor([[0.3, 0.4], [3.0, 0.0]], dtype=DTYPE)  # the second one meets the equator, where the graph ends

    def hemisphere(p):
        return -(1 - p.square().sum()).sqrt()

    result = geodesic(hemisphere, start, v, max_evaluations=300)
    torch.testing.assert_close(result.endpoint[0], v[0] / 0.5 * math.sin(0.5), rtol=0, atol=1e-4)
    assert result.statuses[1] != PathStatus.ARRIVED and torch.isnan(result.endpoint[1]).all()


def test_leaving_the_domain_is_marked():
    v = torch.tensor([[0.5], [3.0]], dtype=DTYPE)
    result = geodesic(lambda p: ((1 - p) ** 2.5).sum(), torch.zeros(1, dtype=DTYPE), v)
    assert result.statuses.tolist() == [PathStatus.ARRIVED, PathStatus.NOT_FINITE]
    assert torch.isnan(result.endpoint[1]).all()


def test_not_finite_at_the_start_is_marked():
    result = geodesic(lambda p: p.log().sum(), torch.tensor([[1.0], [0.0]]), torch.ones(2, 1))
    assert result.statuses.tolist() == [PathStatus.ARRIVED, PathStatus.NOT_FINITE]


def folded(slope, normal, lift, offset):
    """Two planes that meet in a crease, as a loss."""
    return lambda p: p @ slope + lift * (p @ normal - offset).relu()


@pytest.mark.quick("3.0")
@pytest.mark.parametrize("lift", [3.0, -3.0, 40.0])
def test_creases_are_crossed_by_the_shortest_way(lift):
    slope, normal, offset = torch.tensor([0.7, -0.2, 0.4]), torch.tensor([1.0, 0.5, -0.3]), 0.25
    loss = folded(slope.double(), normal.double(), lift, offset)
    start, v = torch.zeros(3, dtype=DTYPE), torch.tensor([[0.9, 0.8, 0.6], [-0.9, 0.1, 0.2]], dtype=DTYPE)
    result = geodesic(loss, start, v)
    assert not result.statuses.any() and result.n_creases.tolist() == [1, 0]
    torch.testing.assert_close(result.endpoint[1], v[1])  # that plane has no end on this side

    def above(point):
        return np.append(point, float(loss(torch.as_tensor(point))))

    def on_crease(coordinates):
        n = normal.double().numpy()
        across = np.linalg.svd(n[None])[2][1:]
        return n * offset / (n @ n) + coordinates @ across

    end = result.endpoint[0].numpy()
    assert end @ normal.double().numpy() > offset

    def length(coordinates):
        turn = above(on_crease(coordinates))
        return np.linalg.norm(turn - above(start.numpy())) + np.linalg.norm(above(end) - turn)

    shortest = minimize(length, np.zeros(2), options={"gtol": 1e-10})
    # The crease is found to within a millionth of the way, on which the loss climbs by up to 40 millionths.
    assert shortest.fun == pytest.approx(result.energy[0].sqrt().item(), rel=2e-5)
    # No path is shorter, and this one is as long as the geodesic: it is the geodesic, if its first part is.
    first = on_crease(shortest.x)
    torch.testing.assert_close(torch.as_tensor(first / np.linalg.norm(first)), v[0] / v[0].norm(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_creases_over_which_the_energy_would_not_jump_are_crossed_the_same_way():
    # Straight on, the slope along the way goes from −2 to 2.
    slope, normal = torch.tensor([-2.0, 0.0], dtype=DTYPE), torch.tensor([2.0, 2.0], dtype=DTYPE)
    start, v = torch.zeros(2, dtype=DTYPE), torch.ones(1, 2, dtype=DTYPE)
    result = geodesic(folded(slope, normal, 1.0, 0.5), start, v)
    assert result.n_creases.item() == 1
    torch.testing.assert_close(result.endpoint[0], torch.tensor([13 / 6, -1 / 6], dtype=DTYPE), rtol=0, atol=1e-4)

    def bend(p):
        return p @ slope + nn.functional.softplus(1000 * (p @ normal - 0.5)) / 1000

    smooth = geodesic(bend, start, v)  # so sharp that ordinary steps would not see it
    torch.testing.assert_close(smooth.endpoint, result.endpoint, rtol=0, atol=5e-3)


@pytest.mark.slow
def test_creases_are_limits_of_sharp_bends():
    slope, normal = torch.tensor([0.7, -0.2], dtype=DTYPE), torch.tensor([1.0, 0.5], dtype=DTYPE)
    start, v = torch.zeros(2, dtype=DTYPE), torch.tensor([[0.9, 0.2]], dtype=DTYPE)
    crease = geodesic(folded(slope, normal, 2.0, 0.25), start, v, **TIGHT)
    misses = []
    for sharpness in (30.0, 300.0):
        bend = geodesic(
            lambda p, k=sharpness: p @ slope + 2.0 * nn.functional.softplus(k * (p @ normal - 0.25)) / k,
            start,
            v,
            **TIGHT,
        )
        misses.append((bend.endpoint - crease.endpoint).norm().item())
    assert misses[0] / misses[1] == pytest.approx(10, rel=0.2) and misses[1] < 5e-3, misses


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(DTYPE, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_geodesics_of_rectified_networks_arrive(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)
    x, y = vectors(8, 2, seed=1), torch.arange(8) % 2
    landscape = LossLandscape(net, "classification", [(4 * x.to(dtype), y)], prior_precision=0.1)
    start = landscape.vector
    result = geodesic(landscape, start, vectors(5, len(start), seed=2, scale=0.5).to(dtype))
    assert not result.statuses.any() and (result.n_creases > 0).any()
    metric = GraphMetric(landscape.derivatives(result.endpoint, result.velocity).gradients)
    torch.testing.assert_close(metric.squared_norm(result.velocity), result.energy, rtol=1e-3, atol=0)


def test_any_change_of_energy_may_be_allowed():
    v, start = torch.tensor([[2.0]], dtype=DTYPE), torch.tensor([-0.5], dtype=DTYPE)
    for allowed in (0.1, math.inf):
        result = geodesic(lambda p: (3 * p).relu().sum(), start, v, max_energy_change=allowed)
        torch.testing.assert_close(result.velocity, v / 10**0.5)  # the speed along the graph is the same beyond it
        assert result.n_creases.item() == (allowed < 1)


FITTING = {"start": torch.zeros(4), "velocities": torch.zeros(1, 4), "times": torch.ones(1)}


@pytest.mark.parametrize(
    "bad",
    [
        {"start": torch.zeros(3)},
        {"velocities": torch.zeros(4)},
        {"velocities": torch.zeros(0, 4)},
        *({name: value} for name, value in (("rtol", 0.0), ("atol", -1.0))),
        *({name: 0} for name in ("max_evaluations", "max_energy_change")),
        *({"times": torch.tensor(times)} for times in ([], [0.0, 1.0], [1.0, 0.5], [float("nan")])),
    ],
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ConfigurationError, match="Expected"):
        geodesic(wavy, **FITTING | bad)


def test_one_landscape_for_each_geodesic():
    surfaces = [FunctionLandscape(lambda p, a=a: a * p.square().sum()) for a in (0.1, 2.0)]
    start, v = torch.zeros(2, dtype=DTYPE), vectors(2, 2)
    both = geodesic(surfaces, start, v).endpoint
    for row, surface in enumerate(surfaces):
        torch.testing.assert_close(both[row], geodesic(surface, start, v[row : row + 1]).endpoint[0])
