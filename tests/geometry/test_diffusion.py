"""Diffusions under the Gauss-Newton pseudo-metric against what is known of them exactly."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry import Diffusion, LossLandscape, NoiseField, PathStatus, diffuse

DTYPE = torch.float64
BACKENDS = ["svd", "lanczos"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def linear(**options):
    """A linear model with two outputs, so that all eigenvalues are double, and a kernel."""
    torch.manual_seed(0)
    x, y = random(6, 4), random(6, 2, seed=1)
    x[:, 3] = x[:, 0]
    landscape = LossLandscape(nn.Linear(4, 2).double(), "regression", [(x[:4], y[:4]), (x[4:], y[4:])], **options)
    return landscape, dense_ggn(landscape, landscape.vector, x)


def curved(likelihood="regression", outputs=2):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    x = random(4, 2)
    y = random(4, outputs, seed=1) if likelihood == "regression" else torch.arange(4) % outputs
    return LossLandscape(net, likelihood, [(x[:3], y[:3]), (x[3:], y[3:])], prior_precision=2.0), x


def jacobian(landscape, point, x):
    network = landscape.network
    return torch.func.jacrev(lambda p: network(x, network.substitute(p)))(point).flatten(0, 1)


def dense_ggn(landscape, point, x):
    rows = jacobian(landscape, point, x)
    return rows.T @ rows


def parts(ggn, precision):
    """Covariances of the image, kernel and full steps."""
    unit = torch.diag(precision.rsqrt())
    values, vectors = torch.linalg.eigh(unit @ ggn @ unit)
    image = vectors[:, values > 1e-9 * values.max()]
    kernel = unit @ (torch.eye(len(ggn), dtype=DTYPE) - image @ image.T) @ unit
    full = torch.linalg.inv(ggn + torch.diag(precision))
    return {"image": full - kernel, "kernel": kernel, "full": full}


@pytest.mark.quick("image-svd", "kernel-svd", "full-svd")
@pytest.mark.parametrize(
    ("kind", "backend"), [("image", "svd"), ("kernel", "svd"), ("full", "svd"), ("image", "lanczos")]
)
def test_linear_model_ends_at_its_laplace_approximation(kind, backend):
    precision = random(10, seed=4).exp()
    landscape, ggn = linear(prior_precision=precision)
    field = NoiseField(landscape, Diffusion(kind=kind, backend=backend))
    root = field.displacement(landscape.vector, torch.eye(10, dtype=DTYPE))
    torch.testing.assert_close(root.T @ root, parts(ggn, precision)[kind], rtol=0, atol=1e-8)
    noise = random(1, 2, 10, seed=5)
    for scheme in ("euler_ito", "heun"):  # any number of steps adds up to N(θ̂, root rootᵀ)
        end = diffuse(field, landscape.vector, noise, scheme=scheme).endpoint
        expected = landscape.vector + noise[0].sum(0) @ root / 2**0.5
        torch.testing.assert_close(end[0], expected, rtol=0, atol=1e-8)


def test_temperature_and_noise_count():
    landscape, ggn = linear(temperature=4.0)
    root = NoiseField(landscape, Diffusion(kind="full")).displacement(landscape.vector, torch.eye(10, dtype=DTYPE))
    torch.testing.assert_close(root.T @ root, torch.linalg.inv(ggn / 4 + torch.eye(10, dtype=DTYPE)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_full_step_is_the_laplace_approximation(backend):
    landscape, x = curved()
    field = NoiseField(landscape, Diffusion(kind="full", n_steps=1, backend=backend))
    unit = torch.eye(len(landscape.vector), dtype=DTYPE)
    root = field.displacement(landscape.vector, unit)
    covariance = torch.linalg.inv(dense_ggn(landscape, landscape.vector, x) + 2 * unit)
    torch.testing.assert_close(root.T @ root, covariance, rtol=0, atol=1e-8)
    noise = random(2, 1, len(unit), seed=2)
    steps = diffuse(field, landscape.vector, noise).endpoint - landscape.vector
    torch.testing.assert_close(steps, noise[:, 0] @ root, rtol=0, atol=1e-8)


@pytest.mark.quick("svd")
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_stay_in_their_spaces(backend):
    landscape, x = curved()
    start, noise = landscape.vector, random(1, 2, len(landscape.vector), seed=2)
    paths = {}
    for kind in ("image", "kernel", "full"):
        field = NoiseField(landscape, Diffusion(kind=kind, backend=backend))
        path = diffuse(field, start, noise).path
        paths[kind] = torch.cat([start[None], path[0]])
        for before, after in pairwise(paths[kind]):
            rows = jacobian(landscape, before, x)
            kernel = torch.eye(len(start), dtype=DTYPE) - torch.linalg.pinv(rows) @ rows
            step = after - before
            if kind == "kernel":
                assert (rows @ step).norm() < 1e-8 * step.norm() * rows.norm()
            if kind == "image":
                assert (kernel @ step).norm() < 1e-7 * step.norm()
    first = {kind: path[1] - start for kind, path in paths.items()}
    torch.testing.assert_close(first["image"] + first["kernel"], first["full"], rtol=0, atol=1e-8)


def test_lanczos_resolves_multiple_eigenvalues():
    landscape, ggn = linear()
    field = NoiseField(landscape, Diffusion(backend="lanczos"), generator=torch.Generator().manual_seed(0))
    values, vectors = field.spectrum(landscape.vector)
    assert len(values) == torch.linalg.matrix_rank(ggn)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(values), dtype=DTYPE), rtol=0, atol=1e-6)
    torch.testing.assert_close((vectors.T * values) @ vectors, ggn, rtol=0, atol=1e-8)


def test_the_rank_bounds_the_directions():
    landscape, _ = linear()
    field = NoiseField(landscape, Diffusion(backend="lanczos", rank=2), generator=torch.Generator().manual_seed(0))
    assert len(field.spectrum(landscape.vector)[0]) == 2


class Paraboloid(nn.Module):
    """``f(θ) = ½ ‖θ‖²``, whose parameters with the same output are spheres."""

    def __init__(self, n):
        super().__init__()
        self.point = nn.Parameter(torch.ones(n, dtype=DTYPE) / n**0.5)

    def forward(self, x):
        return self.point.square().sum() / 2 * torch.ones_like(x)


def test_ito_leaves_the_fiber_by_the_known_amount():
    n, alpha, steps = 6, 2.0, 5
    data = [(torch.ones(1, 1, dtype=DTYPE), torch.zeros(1, 1, dtype=DTYPE))]
    landscape = LossLandscape(Paraboloid(n), "regression", data, prior_precision=alpha)
    field = NoiseField(landscape, Diffusion(kind="kernel"))
    # At any point, the expected change over all directions of noise: E f(θ + Δ) − f(θ) = ½ E‖Δ‖² = (n − 1)/(2αT).
    for point in (landscape.vector, landscape.vector + random(n)):
        moved = point + field.displacement(point, torch.eye(n, dtype=DTYPE)) / steps**0.5
        change = (moved.square().sum(1) / 2 - point.square().sum() / 2).sum()
        torch.testing.assert_close(change, torch.tensor((n - 1) / (2 * alpha * steps), dtype=DTYPE))


def test_projections_are_kernel_steps():
    landscape, _ = curved("classification", 3)
    noise = random(3, len(landscape.vector), seed=3)
    point = landscape.vector + 0.1
    found = NoiseField(landscape, Diffusion(kind="kernel", backend="lsmr")).displacement(point, noise)
    expected = NoiseField(landscape, Diffusion(kind="kernel", backend="svd")).displacement(point, noise)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Sphere:
    """The same kernel, written out."""

    def displacement(self, point, noise):
        return noise - point * (point @ noise) / (point @ point)


def test_schemes_differ_by_the_drift():
    n, samples = 6, 150
    start = torch.ones(n, dtype=DTYPE) / n**0.5

    def shift(scheme, steps):
        ends = diffuse(Sphere(), start, random(samples, steps, n, seed=1), scheme=scheme).endpoint
        change = ends.square().sum(1) / 2 - 0.5
        return float(change.mean()), float(change.std() / samples**0.5)

    for steps in (4, 16):
        mean, error = shift("euler_ito", steps)
        assert abs(mean - (n - 1) / 2) < 4 * error
    coarse, _ = shift("heun", 4)
    fine, _ = shift("heun", 32)
    assert 0 < fine < coarse / 3 and fine < 0.25


def rescaled(net, factors):
    """The same function: what goes into each hidden unit divided by a factor, and what comes out multiplied by it."""
    first, _, last = twin = copy.deepcopy(net)
    with torch.no_grad():
        first.weight.div_(factors[:, None])
        first.bias.div_(factors)
        last.weight.mul_(factors)
    return twin


def test_rescaling_hidden_units_changes_nothing_that_it_should_not():
    """What is exact of the invariance, without a prior: the kernel's directions, its dimension, training covariances.

    Variances elsewhere, and with a prior, do change.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x, y, elsewhere = random(3, 2), random(3, 2, seed=1), 3 * random(5, 2, seed=2)
    covariances, ranks = [], []
    for twin in (net, rescaled(net, random(4, seed=3).exp())):
        landscape = LossLandscape(twin, "regression", [(x, y)], prior_precision=1e-8)
        torch.testing.assert_close(twin(elsewhere), net(elsewhere))
        theta, network = landscape.vector, landscape.network
        fields = {kind: NoiseField(landscape, Diffusion(kind=kind, backend="svd")) for kind in ("image", "kernel")}
        for unit in range(4):
            parts = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
            parts["0.weight"][unit], parts["0.bias"][unit] = -twin[0].weight[unit], -twin[0].bias[unit]
            parts["2.weight"][:, unit] = twin[2].weight[:, unit]
            generator = torch.cat([parts[name].detach().flatten() for name in network.parameter_names])
            for inputs in (x, elsewhere):
                rows = jacobian(landscape, theta, inputs)
                assert (rows @ generator).norm() < 1e-12 * rows.norm() * generator.norm()
            kept = fields["kernel"].displacement(theta, generator) * 1e-4  # in units of the prior's deviation
            torch.testing.assert_close(kept, generator, rtol=0, atol=1e-9)
            assert fields["image"].displacement(theta, generator).norm() < 1e-6 * generator.norm()
        root = fields["image"].displacement(theta, torch.eye(len(theta), dtype=DTYPE))
        outputs = jacobian(landscape, theta, x) @ root.T
        covariances.append(outputs @ outputs.T)
        ranks.append(len(NoiseField(landscape, Diffusion(backend="svd")).spectrum(theta)[0]))
    assert ranks[0] == ranks[1] < len(theta)
    torch.testing.assert_close(*covariances, rtol=0, atol=1e-6)


def test_not_finite_is_marked():
    class Breaking(Sphere):
        def displacement(self, point, noise):
            step = super().displacement(point, noise)
            return step * float("nan") if noise[0] > 0 else step

    noise = random(2, 3, 4).abs()
    noise[0] *= -1
    found = diffuse(Breaking(), torch.ones(4, dtype=DTYPE), noise)
    assert found.statuses.tolist() == [PathStatus.ARRIVED, PathStatus.NOT_FINITE]
    assert torch.isfinite(found.endpoint[0]).all() and torch.isnan(found.endpoint[1]).all()


def test_overflowing_networks_are_marked():
    class Explosive(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=DTYPE))

        def forward(self, x):
            return x * (100 * self.weight).exp().sum()

    x = torch.full((2, 1), 1e-45, dtype=DTYPE)
    landscape = LossLandscape(Explosive(), "regression", [(x, x)], prior_precision=1e-4)
    noise = torch.tensor([1.0, -2.0, 3.0], dtype=DTYPE).expand(1, 2, 3)
    found = diffuse(NoiseField(landscape, Diffusion(kind="full")), landscape.vector, noise)
    assert found.statuses.tolist() == [PathStatus.NOT_FINITE]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "both"},
        {"scheme": "milstein"},
        {"n_steps": 0},
        {"kind": "image", "backend": "lsmr"},
        {"rank": 1.5},
        {"backend": "qr"},
        {"rtol": 1.5},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigurationError):
        Diffusion(**options)


def test_flat_priors_are_refused():
    with pytest.raises(ConfigurationError, match="prior precision"):
        NoiseField(linear(prior_precision=torch.tensor(0.0))[0], Diffusion())
