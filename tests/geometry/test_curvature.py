"""Scalar curvature against spheres, principal curvatures, and its estimate against both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.geometry import (
    FunctionLandscape,
    LossLandscape,
    estimate_scalar_curvature,
    scalar_curvature,
)

DTYPE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def wavy(point):
    weights = torch.arange(1, len(point) + 1, dtype=DTYPE)
    return (weights * point).sin().sum() + (point.sum()) ** 2 + 3 * point[0] * point[-1]


def derivatives(function, point):
    return torch.func.grad(function)(point), torch.func.jacrev(torch.func.grad(function))(point)


@pytest.mark.parametrize("n", [2, 5])
def test_hemisphere_is_round(n):
    rho = 1.7
    for seed in range(3):
        point = random(n, seed=seed)
        point = point / point.norm() * 0.4 * (seed + 1)
        curvature = scalar_curvature(lambda p: -(rho**2 - p.square().sum()).sqrt(), point)
        assert float(curvature) == pytest.approx(n * (n - 1) / rho**2, rel=1e-10)


def test_bowl_and_planes():
    zero = torch.zeros(4, dtype=DTYPE)
    assert float(scalar_curvature(lambda p: 1.5 * p.square().sum() / 2, zero)) == pytest.approx(1.5**2 * 12, rel=1e-12)
    assert float(scalar_curvature(lambda p: (3 * p).sum() + 1, random(4))) == 0
    assert float(scalar_curvature(lambda p: p.sin().sum(), random(1))) == pytest.approx(0, abs=1e-14)
    valley = scalar_curvature(lambda p: 50 * p.sum() ** 2, zero)  # a Hessian of rank one, however sharp
    assert float(valley) == pytest.approx(0, abs=1e-9)


def test_a_saddle_is_negative():
    assert scalar_curvature(lambda p: p[0] ** 2 - p[1] ** 2, torch.zeros(2, dtype=DTYPE)) < 0


def test_two_dimensions_are_gauss():
    point = random(2)
    g, h = derivatives(wavy, point)
    expected = 2 * torch.linalg.det(h) / (1 + g.square().sum()) ** 2
    torch.testing.assert_close(scalar_curvature(wavy, point), expected)


def test_principal_curvatures():
    point = random(5)
    g, h = derivatives(wavy, point)
    metric = torch.eye(5, dtype=DTYPE) + torch.outer(g, g)
    kappa = torch.linalg.eigvals(torch.linalg.solve(metric, h)).real / (1 + g.square().sum()).sqrt()
    expected = kappa.sum() ** 2 - kappa.square().sum()
    torch.testing.assert_close(scalar_curvature(wavy, point), expected)


def test_rotations_change_nothing():
    point = random(5)
    turn, _ = torch.linalg.qr(random(5, 5, seed=3))
    turned = scalar_curvature(lambda p: wavy(turn.T @ p), turn @ point)
    torch.testing.assert_close(turned, scalar_curvature(wavy, point))


@pytest.mark.quick("4-2", "5-0")
@pytest.mark.parametrize(("probes", "deflate"), [(2, 0), (5, 0), (4, 2), (8, 1)])
def test_estimate_is_unbiased(probes, deflate):
    point, generator = random(6), torch.Generator().manual_seed(0)
    exact, surface = scalar_curvature(wavy, point), FunctionLandscape(wavy)
    estimates = [
        estimate_scalar_curvature(surface, point, probes=probes, deflate=deflate, generator=generator)
        for _ in range(40)
    ]
    values = torch.stack([estimate.value for estimate in estimates])
    assert values.std() > 0
    assert abs(values.mean() - exact) < 4 * values.std() / 40**0.5
    if probes > 2:
        errors = torch.stack([estimate.sem for estimate in estimates])
        assert 0.5 < float(errors.square().mean().sqrt() / values.std()) < 2
    else:
        assert all(torch.isinf(estimate.sem) for estimate in estimates)


def test_deflation_takes_the_noise_out():
    def sharp(p):
        return wavy(p) + 200 * (p @ torch.ones(6, dtype=DTYPE)) ** 2

    point, options = random(6), {"probes": 50}
    plain = estimate_scalar_curvature(sharp, point, generator=torch.Generator().manual_seed(0), **options)
    deflated = estimate_scalar_curvature(sharp, point, deflate=2, generator=torch.Generator().manual_seed(0), **options)
    assert deflated.sem < plain.sem / 3
    assert abs(deflated.value - scalar_curvature(sharp, point)) < 4 * deflated.sem
    whole = estimate_scalar_curvature(sharp, point, deflate=6, generator=torch.Generator().manual_seed(0), **options)
    torch.testing.assert_close(whole.value, scalar_curvature(sharp, point), rtol=1e-9, atol=1e-9)


def test_of_a_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = random(10, 2)
    landscape = LossLandscape(net, "regression", [(x, x.prod(1, keepdim=True))])
    point = landscape.vector
    names, shapes = zip(*((name, p.shape) for name, p in net.named_parameters()), strict=True)

    def loss(p):
        parts = p.split([shape.numel() for shape in shapes])
        own = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        residual = torch.func.functional_call(net, own, (x,)) - x.prod(1, keepdim=True)
        return residual.square().sum() / 2 + p.square().sum() / 2

    g, h = derivatives(loss, point)
    beta = 1 / (1 + g @ g)
    expected = beta * (h.trace() ** 2 - (h @ h).trace())
    expected = expected - 2 * beta**2 * (h.trace() * (g @ h @ g) - (h @ g).square().sum())
    torch.testing.assert_close(scalar_curvature(landscape, point), expected)
    estimate = estimate_scalar_curvature(landscape, point, probes=50, generator=torch.Generator().manual_seed(1))
    assert abs(estimate.value - expected) < 4 * estimate.sem
    assert estimate.matvecs == 51


def test_bad_arguments_are_refused():
    point = random(3)
    for options in ({"probes": 1}, {"deflate": -1}, {"probes": 2.5}):
        with pytest.raises(ConfigurationError, match="out of range"):
            estimate_scalar_curvature(wavy, point, **options)
    with pytest.raises(ConfigurationError, match="another shape"):
        scalar_curvature(wavy, point[None])
    with pytest.raises(NonFiniteError):
        scalar_curvature(lambda p: p.sqrt().sum(), -point.abs())
