"""Noise from leave-one-out residuals, against refits, and the warnings of noise that runs away."""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import generator, normal
from scipy.optimize import minimize_scalar
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConvergenceWarning, DataError, UnsupportedError
from laplace_plus.tuning import noise, noise_from_residuals


def linear(n, size, outputs=1, noise=0.3, seed=0):
    """A linear network at a rough fit, and its data."""
    x = normal(n, size, seed=seed)
    y = x @ normal(size, outputs, seed=seed + 1) / size**0.5 + noise * normal(n, outputs, seed=seed + 2)
    net = nn.Linear(size, outputs, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.linalg.solve(x.T @ x + torch.eye(size), x.T @ y).T)
    return net, x, y


def refitted(x, y, ridge):
    """Residuals of each datum under the ridge regression on the others, ``[n, C]``."""
    left = []
    for n in range(len(x)):
        kept = torch.arange(len(x)) != n
        a, b = x[kept], y[kept]
        weights = torch.linalg.solve(a.T @ a + ridge * torch.eye(x.shape[1]), a.T @ b)
        left.append(y[n] - x[n] @ weights)
    return torch.stack(left)


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "size"), [(15, 6), (9, 14)], ids=["more data", "more weights"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_ridge_regression_left_out_exactly(n, size, outputs):
    net, x, y = linear(n, size, outputs)
    estimate = noise_from_residuals(lp.Diagonal(net, lp.Gaussian(1.0)).fit([(x[:4], y[:4]), (x[4:], y[4:])]))
    found = minimize_scalar(
        lambda level: float(refitted(x, y, 10**level).square().mean()), bounds=(-8, 4), method="bounded"
    )
    assert n < size or estimate.problem == ""
    assert found.fun <= float(estimate.noise_std.square()) * (1 + 1e-6) <= 1.05 * found.fun  # two ridges a decade
    torch.testing.assert_close(estimate.residual_std, (net(x) - y).detach().square().mean().sqrt())
    torch.testing.assert_close(estimate.target_std, y.var(0).mean().sqrt())


def test_marks_of_training_are_those_of_theeigenvectors():
    """Of least squares nothing is left in the span of the inputs; of other residuals what is not each row's own."""
    net, x, y = linear(40, 6)
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    assert noise_from_residuals(lp.Full(net, "regression").fit([(x, y)])).marks[0] == pytest.approx(-1, abs=1e-9)
    residual = normal(40, 1, seed=5)
    parts = torch.linalg.svd(x, full_matrices=False)[0] * residual
    sums = (parts.sum(0).square() - parts.square().sum(0)).cumsum(0) / parts.square().sum()
    found = noise_from_residuals(lp.Full(net, "regression").fit([(x, net(x).detach() + residual)])).marks
    assert found == pytest.approx((float(sums.min()), float(sums.max())), abs=1e-9)


def test_one_level_for_each_output():
    net, x, y = linear(12, 4, 2)
    y = y.clone()
    y[:, 1] += 3 * normal(12, seed=9)
    posterior = lp.Full(net, lp.Gaussian(torch.ones(2))).fit([(x, y)])
    estimate = noise_from_residuals(posterior)
    alone = [refitted(x, y[:, [c]], ridge).square().mean().sqrt() for c in (0, 1) for ridge in (1e-3, 1e3)]
    assert estimate.noise_std.shape == (2,) and 3 * estimate.noise_std[0] < estimate.noise_std[1]
    assert estimate.noise_std[0] < 1.2 * min(alone[:2]) and estimate.noise_std[1] < 1.2 * max(alone[2:])
    posterior.noise_std = estimate.noise_std


def trained(n=100, noise=0.2, hidden=40, steps=400):
    source = generator(3)
    x = torch.rand(n + 500, 2, generator=source) * 4 - 2
    y = torch.sin(2 * x[:, :1]) + x[:, 1:] + noise * torch.randn(n + 500, 1, generator=source)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[:n]), y[:n]).backward()
        optimizer.step()
    held_out = float((net(x[n:]) - y[n:]).detach().square().mean().sqrt())
    return net, x[:n], y[:n], held_out


def test_noise_that_runs_away_is_named_and_replaced():
    net, x, y, held_out = trained()
    for make in (lp.KFAC, lp.Diagonal):
        posterior = make(net, "regression").fit([(x, y)])
        with pytest.warns(ConvergenceWarning, match="times the training residuals"):
            posterior.fit_prior_precision("marginal_likelihood")
        assert posterior.noise_std > 2 * held_out
        estimate = noise_from_residuals(posterior)
        assert held_out / 1.5 < float(estimate.noise_std) < 1.5 * held_out
        posterior.noise_std = estimate.noise_std
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            posterior.fit_prior_precision("marginal_likelihood", tune_noise=False)


@pytest.mark.quick("1")
@pytest.mark.parametrize("outputs", [1, 2])
def test_few_gradients_and_few_rows_give_the_error_of_all(monkeypatch, outputs):
    net, x, y, _ = trained(n=400, hidden=20, steps=150)
    if outputs == 2:
        y = torch.cat([y, 2 * y - x[:, 1:] + 0.5 * normal(400, 1).float()], 1)
        net[-1] = nn.Linear(20, 2)
        with torch.no_grad():
            features = torch.cat([net[:-1](x), torch.ones(400, 1)], 1).double()
            ridge = features.T @ features + 1e-3 * torch.eye(21).double()
            weights = torch.linalg.solve(ridge, features.T @ y.double()).float()
            net[-1].weight.copy_(weights[:-1].T), net[-1].bias.copy_(weights[-1])
    for likelihood in (lp.Gaussian(1.0), lp.Gaussian(torch.ones(outputs))):
        posterior = lp.Diagonal(net, likelihood).fit(list(zip(x.split(150), y.split(150), strict=True)))
        with monkeypatch.context() as patched:
            patched.setattr(noise, "_PART", 800)
            dense = noise_from_residuals(posterior)
            patched.setattr(noise, "_PART", 200)
            by_part = noise_from_residuals(posterior)
            assert dense.marks is not None and by_part.marks is None
            torch.testing.assert_close(by_part.noise_std, dense.noise_std, rtol=0.01, atol=0)
            patched.setattr(noise, "_WHOLE", 300)
            patched.setattr(noise, "_GRADIENTS", 240)
            few = noise_from_residuals(posterior)
            assert not torch.equal(few.noise_std, by_part.noise_std)
            torch.testing.assert_close(few.noise_std, dense.noise_std, rtol=0.02, atol=0)
            patched.setattr(noise, "_NUMBERS", 200 * outputs)
            torch.testing.assert_close(noise_from_residuals(posterior).noise_std, dense.noise_std, rtol=0.15, atol=0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_one_ridge_as_byeigenvectors(outputs):
    features, targets = normal(24, 7), normal(24 // outputs, outputs, seed=1)
    share = (torch.arange(24, dtype=torch.float64) % 4).view(-1, outputs)
    features *= share.sqrt().view(-1, 1)
    basis, values = noise.eigenvectors(features.T @ features, features)
    left, ridge = noise.left_out_at_best(basis, values, targets, share, several=False)
    kernel = noise.left_out_at(ridge, features @ features.T, None, targets, share)
    torch.testing.assert_close(kernel, left)
    torch.testing.assert_close(noise.left_out_at(ridge, features.T @ features, features, targets, share), left)


def test_scales_of_layers_that_others_undo_do_not_matter():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double(), normal(30, 3)
    y = net(x).detach() + 0.3 * normal(30, 1, seed=1)
    net[2].bias.requires_grad_(False)  # which would be in one block with weights of another scale
    before = noise_from_residuals(lp.Diagonal(net, "regression").fit([(x, y)]))
    with torch.no_grad():
        net[0].weight.mul_(10), net[0].bias.mul_(10), net[2].weight.div_(10)
    after = noise_from_residuals(lp.Diagonal(net, "regression").fit([(x, y)]))
    torch.testing.assert_close(after.noise_std, before.noise_std)
    assert before.residual_std < before.noise_std < before.target_std


def test_rows_count_as_often_as_they_were_observed():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double(), normal(24, 3)
    net[2].weight.data.mul_(10)
    y = net(x).detach() + 0.3 * normal(24, 1, seed=1)
    weight = torch.arange(24, dtype=torch.float64) % 3
    once, repeated = weight > 0, torch.arange(24).repeat_interleave(weight.long())
    pairs = [
        (lp.Gaussian(), (x, y.where(once[:, None], torch.nan)), (x[once], y[once])),
        (lp.Gaussian(weighted=True), (x, (y, weight)), (x[repeated], y[repeated])),
    ]
    for likelihood, batch, plain in pairs:
        found = noise_from_residuals(lp.Diagonal(net, likelihood).fit([batch])).noise_std
        wanted = noise_from_residuals(lp.Diagonal(net, lp.Gaussian()).fit([plain])).noise_std
        torch.testing.assert_close(found, wanted)


def test_interpolation_is_named():
    net, x, y = linear(8, 20)
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y, driver="gelsd").solution.T)
    posterior = lp.Full(net, "regression", parameters="all").fit([(x, y)])
    estimate = noise_from_residuals(posterior)
    assert "interpolates" in estimate.problem
    assert estimate.residual_std < 1e-6 < 0.1 < estimate.noise_std <= estimate.target_std
    with pytest.warns(ConvergenceWarning):
        posterior.fit_prior_precision("marginal_likelihood")
    with torch.no_grad():
        net.weight.copy_((x.T @ torch.linalg.solve(x @ x.T + 0.5 * torch.eye(8), y)).T)
    estimate = noise_from_residuals(lp.Full(net, "regression", parameters="all").fit([(x, y)]))
    assert "nearly interpolates" in estimate.problem
    assert estimate.residual_std > noise.INTERPOLATED * estimate.target_std


def test_a_network_that_learned_nothing_is_named():
    net, x, _ = linear(12, 5)
    y = normal(12, 1, seed=20)
    estimate = noise_from_residuals(lp.Full(net, "regression").fit([(x, y)]))
    assert "no better than their mean" in estimate.problem


def test_other_data_and_other_likelihoods_are_refused():
    net, x, y = linear(12, 4)
    posterior = lp.Full(net, "regression").fit([(x, y)])
    with pytest.raises(DataError, match="not the data"):
        noise_from_residuals(posterior, [(x, y + 1)])
    labels = torch.zeros(12, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="no noise"):
        noise_from_residuals(lp.Full(nn.Linear(4, 2).double(), "classification").fit([(x, labels)]))
