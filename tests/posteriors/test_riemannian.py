"""The Riemannian posterior: what it shares with its tangent, its samples, their failures and their storage."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from problems import FittedOnce, generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    SamplingError,
    SmoothnessWarning,
)
from laplace_plus.geometry import PathStatus
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.linearization import jvp

DTYPE = torch.float64
ROUGH = {"rtol": 0.1, "atol": 0.1, "max_energy_change": 1.0}
"""For what does not depend on where geodesics end."""
STEP = lp.Diffusion(n_steps=1)
"""For what does not depend on how samples are drawn."""


class TestExponentialMap(FittedOnce):
    one_pass = False

    def make(self, model, likelihood, **options):
        method = lp.ExponentialMap(**ROUGH)
        return lp.Riemannian(model, likelihood, method=method, n_samples=3, prior_precision=100.0, **options)


@pytest.mark.slow
class TestDiffusion(FittedOnce):
    one_pass = False

    def make(self, model, likelihood, **options):
        method = lp.Diffusion(n_steps=2)
        return lp.Riemannian(model, likelihood, tangent=lp.Diagonal, method=method, n_samples=3, **options)


def problem(activation=nn.Tanh):
    """A network of one's own, and its training data."""
    return copy.deepcopy(trained(activation))


@cache
def trained(activation):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), activation(), nn.Linear(4, 2)).double()
    x = torch.randn(30, 2, generator=generator(1), dtype=DTYPE)
    y = (x.prod(1) > 0).long()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
        loss = loss + sum(p.square().sum() for p in net.parameters()) / 2
        loss.backward()
        optimiser.step()
    net.zero_grad()
    return net, [(x[:20], y[:20]), (x[20:], y[20:])]


def training_loss(posterior, points, data):
    network = posterior.network
    return torch.stack(
        [
            sum(nn.functional.cross_entropy(network(x, network.substitute(point)), y, reduction="sum") for x, y in data)
            for point in points
        ]
    )


# -- samples ----------------------------------------------------------------------------------------------------------


def test_samples_keep_the_loss_low():
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", n_samples=3).fit(data, generator=generator())
    assert posterior.report.n_failed == 0 and len(posterior.samples) == 3
    assert posterior.report.n_evaluations.min() > 7
    bent = training_loss(posterior, posterior.samples, data).mean()
    flat = training_loss(posterior, posterior.tangent.sample(3, generator=generator()), data).mean()
    assert bent < flat - 5


def test_linearized_on_a_linear_model_is_the_same():
    torch.manual_seed(0)
    net = nn.Linear(2, 2).double()
    _, data = problem()
    samples = []
    for linearized in (False, True):
        method = lp.ExponentialMap(rtol=1e-7, atol=1e-7, linearized=linearized)
        posterior = lp.Riemannian(net, "classification", method=method, n_samples=1)
        samples.append(posterior.fit(data, generator=generator()).samples)
    torch.testing.assert_close(*samples, rtol=0, atol=1e-5)


def test_linearized_predicts_with_the_tangent():
    net, data = problem()
    method = lp.ExponentialMap(linearized=True, **ROUGH)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=4).fit(data)
    x = data[0][0][:3]
    shifts = torch.stack([jvp(posterior.network, x, point - posterior.mean) for point in posterior.samples])
    expected = (posterior.network.forward(x) + shifts).softmax(-1).mean(0)
    torch.testing.assert_close(posterior.predictive(x).mean, expected)


def test_predictions_average_over_each_sample_once():
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", method=STEP, n_samples=4).fit(data)
    x, network = data[0][0][:3], posterior.network
    outputs = torch.stack([network(x, network.substitute(point)) for point in posterior.samples])
    prediction = posterior.predictive(x)
    assert len(prediction.samples) == 4
    torch.testing.assert_close(prediction.mean, outputs.softmax(-1).mean(0))
    assert len(posterior.predictive(x, n_samples=3).samples) == 3
    order = posterior.sample(6, generator=generator())
    assert len(order[:4].unique(dim=0)) == 4 and len(order[4:].unique(dim=0)) == 2


@pytest.mark.slow
def test_the_surface_may_keep_the_prior_of_training():
    """Geodesics are those of a landscape with that precision; the tangent keeps its own."""
    net, data = problem()
    method = lp.ExponentialMap(training_prior_precision=0.7)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=2).fit(data, generator=generator())
    same = posterior.samples
    posterior.prior_precision = 40.0
    posterior.draw(generator=torch.Generator().manual_seed(3))
    landscape = lp.geometry.LossLandscape(posterior.network, posterior.likelihood, data, prior_precision=0.7)
    gradient = landscape.gradient(posterior.mean[None])
    slopes = (posterior.tangent.sample(4000, generator=generator()) - posterior.mean) @ gradient[0]
    expected = float(slopes.square().mean()) / 2
    assert posterior.report.decrement == pytest.approx(expected, rel=5 * (2 / 16) ** 0.5)
    assert (posterior.samples - posterior.mean).norm(dim=1).max() < (same - posterior.mean).norm(dim=1).min()

    own = lp.Riemannian(net, "classification", n_samples=2, prior_precision=0.7).fit(data, generator=generator())
    posterior.prior_precision = 0.7
    posterior.fit(data, generator=generator())
    torch.testing.assert_close(posterior.samples, own.samples)


@pytest.mark.quick("True")
@pytest.mark.parametrize("linearized", [False, True])
def test_without_weight_decay_geodesics_follow_the_plain_loss(linearized):
    net, data = problem()
    method = lp.ExponentialMap(training_prior_precision=0.0, linearized=linearized, **ROUGH)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=3, prior_precision=2.0)
    posterior.fit(data).draw(generator=generator(3))
    landscape = lp.geometry.LossLandscape(
        posterior.network, posterior.likelihood, data, prior_precision=0.0, linearized=linearized
    )
    plain = landscape.gradient(posterior.mean[None])
    vector = nn.utils.parameters_to_vector(
        torch.autograd.grad(
            sum(nn.functional.cross_entropy(net(x), y, reduction="sum") for x, y in data), list(net.parameters())
        )
    )
    torch.testing.assert_close(plain[0], vector)
    velocities = posterior.tangent.sample(3, generator=draws(draw_seed(generator(3)))) - posterior.mean
    tolerances = {name: getattr(method, name) for name in ("rtol", "atol", "max_energy_change")}
    found = lp.geometry.geodesic(landscape, posterior.mean, velocities, **tolerances)
    torch.testing.assert_close(posterior.samples, found.endpoint)


def draws(seed):
    """The generator of a draw's velocities, which come after a seed for each of three samples."""
    source = generator(seed)
    torch.randint(2**62, (3,), generator=source)
    return source


@pytest.mark.slow
def test_minibatches_differ_between_samples():
    net, data = problem()
    method = lp.ExponentialMap(minibatch=5)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=3).fit(data, generator=generator())
    whole = lp.Riemannian(net, "classification", n_samples=3).fit(data, generator=generator())
    assert (posterior.samples - whole.samples).abs().amax(1).min() > 1e-3
    assert torch.equal(posterior.samples, posterior.draw().samples)
    whole_again = lp.Riemannian(net, "classification", method=lp.ExponentialMap(minibatch=30), n_samples=3)
    torch.testing.assert_close(whole_again.fit(data, generator=generator()).samples, whole.samples, rtol=0, atol=1e-6)


@pytest.mark.quick("options0")
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "kernel", "scheme": "heun"},
        {"kind": "full"},
        pytest.param({"backend": "lanczos"}, marks=pytest.mark.slow),  # its steps: tests/geometry/test_diffusion.py
    ],
)
def test_diffusions(options):
    net, data = problem()
    method = lp.Diffusion(n_steps=2, **options)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=2).fit(data, generator=generator())
    assert posterior.report.n_failed == 0
    assert (posterior.samples - posterior.mean).norm(dim=1).min() > 0.1
    assert posterior.report.n_evaluations.tolist() == [4 if options.get("scheme") == "heun" else 2] * 2
    assert torch.equal(posterior.samples, posterior.draw().samples)
    assert not torch.equal(posterior.samples, posterior.draw(generator=generator(5)).samples)


def test_one_full_step_is_sampled_laplace_in_distribution():
    net, data = problem()
    method = lp.Diffusion(kind="full", n_steps=1)
    posterior = lp.Riemannian(net, "classification", method=method, n_samples=40).fit(data, generator=generator())
    covariance = lp.Full(net, "classification").fit(data).covariance_matrix()
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (posterior.samples - posterior.mean).T, upper=False
    )
    size = whitened.numel()
    assert abs(whitened.square().mean() - 1) < 4 * (2 / size) ** 0.5
    assert abs(whitened.mean()) < 4 * size**-0.5


# -- the tangent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"tangent": "KFAC"},
        {"tangent": "LowRank"},
        {"parameters": "last_layer"},
        {"tangent": lp.Subnetwork, "tangent_options": {"selector": lp.LargestMagnitude(6)}},
    ],
)
def test_any_gaussian_is_a_tangent(options, tmp_path):
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", method=STEP, n_samples=2, **options).fit(data)
    assert posterior.sample(2).shape == (2, posterior.n_parameters)
    assert posterior.n_parameters == posterior.tangent.n_parameters
    x = data[0][0]
    mean = posterior.predictive(x, generator=generator()).mean
    posterior.save(tmp_path / "saved")
    loaded = lp.load(tmp_path / "saved", net)
    assert type(loaded.tangent) is type(posterior.tangent)
    assert torch.equal(loaded.predictive(x, generator=generator()).mean, mean)


def test_a_fitted_tangent_is_taken_as_it_is():
    net, data = problem()
    tangent = lp.KFAC(net, "classification", prior_precision=3.0).fit(data)
    posterior = lp.Riemannian(net, "classification", tangent=tangent, n_samples=2).fit(data)
    assert posterior.prior_precision == 3.0 and posterior.n_data == 30
    assert torch.equal(posterior.tangent.covariance_matrix(), tangent.covariance_matrix())
    posterior.prior_precision = 5.0
    assert tangent.prior_precision == 3.0  # the posterior has a copy of its own
    other, _ = problem()
    with pytest.raises(ConfigurationError, match="fitted to this network"):
        lp.Riemannian(other, "classification", tangent=tangent)
    with pytest.raises(ConfigurationError, match="fitted to this network"):
        lp.Riemannian(net, "classification", tangent=lp.KFAC(net, "classification"))
    with pytest.raises(ConfigurationError, match="with this likelihood"):
        lp.Riemannian(net, "regression", tangent=tangent)
    with pytest.raises(ConfigurationError, match="own settings"):
        lp.Riemannian(net, "classification", tangent=tangent, prior_precision=2.0)
    (x, y), rest = data
    for others in (data[:1], [(x, 1 - y), rest], [(x + 1, y), rest]):
        with pytest.raises(DataError, match="not the data"):
            lp.Riemannian(net, "classification", tangent=tangent).fit(others)
    lp.Riemannian(net, "classification", tangent=tangent).fit(data[::-1])


def test_a_sampled_tangent_knows_its_data():
    net, data = problem()
    tangent = lp.SampledLaplace(net, "classification", n_samples=3)
    tangent.fit(data, generator=generator())
    (x, y), rest = data
    with pytest.raises(DataError, match="30 others"):
        lp.Riemannian(net, "classification", tangent=tangent).fit([(x, 1 - y), rest])
    posterior = lp.Riemannian(net, "classification", tangent=tangent, method=STEP, n_samples=2).fit(data[::-1])
    assert len(posterior.samples) == 2


@pytest.mark.parametrize("tangent", [lp.Riemannian, nn.Linear, 3])
def test_other_tangents_are_refused(tangent):
    net, _ = problem()
    with pytest.raises(ConfigurationError, match="tangent is a Gaussian"):
        lp.Riemannian(net, "classification", tangent=tangent)


@pytest.mark.slow
def test_hyperparameters_are_shared():
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", n_samples=3).fit(data)
    before = posterior.samples
    assert posterior.samples is before
    posterior.fit_prior_precision("marginal_likelihood")
    assert posterior.prior_precision == posterior.tangent.prior_precision != 1.0
    assert posterior.prior().precision == posterior.tangent.prior_precision
    tuned = posterior.samples
    assert not torch.equal(tuned, before)
    posterior.prior_precision = 1.0
    assert posterior.tangent.prior_precision == 1.0
    assert torch.equal(posterior.samples, before)
    posterior.temperature = 0.5
    assert posterior.tangent.temperature == 0.5 and not torch.equal(posterior.samples, before)
    assert posterior.log_marginal_likelihood() == posterior.tangent.log_marginal_likelihood()
    assert posterior.fit_prior_precision(structure="layerwise").prior_precision.shape == (2,)
    assert len(posterior.prior_groups.names) == 2


def test_noise_is_shared():
    net, data = problem()
    regression = [(x, torch.stack([y, 1 - y], 1).double()) for x, y in data]
    posterior = lp.Riemannian(net, "regression", method=STEP, n_samples=3).fit(regression)
    before = posterior.samples
    posterior.noise_std = 0.3
    assert posterior.tangent.noise_std.tolist() == [0.3, 0.3] and not torch.equal(posterior.samples, before)
    assert posterior.predictive(data[0][0]).aleatoric.max() == pytest.approx(0.09)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failed_samples_are_left_out_and_named():
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", n_samples=12).fit(data, generator=generator())
    counts = posterior.report.n_evaluations.sort().values
    cap = int(counts[4])
    posterior.method = lp.ExponentialMap(max_evaluations=cap)
    with pytest.warns(ConvergenceWarning, match=r"of 12 samples failed and are left out: \d+ too many evaluations"):
        posterior.draw()
    report = posterior.report
    assert 0 < report.n_failed < 12 and len(posterior.samples) == 12 - report.n_failed
    assert (report.statuses == PathStatus.TOO_MANY_EVALUATIONS).sum() == report.n_failed
    assert torch.isfinite(posterior.samples).all()
    kept = posterior.samples
    posterior.method = lp.ExponentialMap(max_evaluations=8)
    with pytest.raises(SamplingError, match="12 too many evaluations"):
        posterior.draw()
    assert torch.equal(posterior.samples, kept)


def test_kinks_are_warned_about():
    net, data = problem(nn.ReLU)
    for method in ("exponential", "diffusion"):
        with pytest.warns(SmoothnessWarning, match="The network's relu"):
            lp.Riemannian(net, "classification", method=method).fit(data)
    lp.Riemannian(net, "classification", method=lp.ExponentialMap(linearized=True)).fit(data)


def test_stationarity_is_reported():
    net, data = problem()
    options = {"method": STEP, "n_samples": 2}
    near = lp.Riemannian(net, "classification", **options).fit(data).report
    far = lp.Riemannian(net, "classification", prior_precision=20.0, **options).fit(data).report
    assert far.decrement > 2 * near.decrement


# -- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_statuses_and_lost_data(tmp_path):
    net, data = problem()
    posterior = lp.Riemannian(net, "classification", n_samples=2).fit(data)
    posterior.save(tmp_path / "saved")
    loaded = lp.load(tmp_path / "saved", net)
    assert torch.equal(loaded.samples, posterior.samples)
    assert torch.equal(loaded.report.statuses, posterior.report.statuses)
    assert loaded.report.decrement == posterior.report.decrement
    loaded.prior_precision = 2.0
    with pytest.raises(DataError, match="data=train_loader"):
        loaded.predictive(data[0][0])
    posterior.prior_precision = 2.0
    assert torch.equal(loaded.draw(data=data).samples, posterior.samples)
    (x, y), rest = data
    for others in (data[:1], [(x, 1 - y), rest], [(x + 1, y), rest]):
        for known in (posterior, loaded):
            with pytest.raises(DataError, match="not the data"):
                known.draw(data=others)
