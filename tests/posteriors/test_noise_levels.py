"""Several outputs of a regression have noise levels of their own, by default."""

from __future__ import annotations

import pytest
import torch
from problems import normal
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError

LEVELS = torch.tensor([0.1, 3.0], dtype=torch.float64)


def problem(outputs=2, n=60):
    x = normal(n, 3)
    y = x @ normal(3, outputs, seed=1) + LEVELS.repeat(outputs)[:outputs] * normal(n, outputs, seed=2)
    net = nn.Linear(3, outputs).double()
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        net.bias.zero_()
    return net, [(x[:25], y[:25]), (x[25:], y[25:])]


@pytest.mark.quick("KFAC")
@pytest.mark.parametrize("make", [lp.Full, lp.KFAC, lp.Diagonal])
def test_a_name_alone_asks_for_one_level_each(make):
    net, data = problem()
    posterior = make(net, "regression").fit(data).fit_prior_precision("marginal_likelihood")
    assert posterior.noise_std.shape == (2,)
    torch.testing.assert_close(posterior.noise_std, LEVELS, rtol=0.2, atol=0)
    explicit = make(net, lp.Gaussian(torch.ones(2))).fit(data).fit_prior_precision("marginal_likelihood")
    torch.testing.assert_close(posterior.noise_std, explicit.noise_std)
    torch.testing.assert_close(posterior.predictive(data[0][0]).variance, explicit.predictive(data[0][0]).variance)


def test_where_one_level_is_asked_for_there_is_one():
    net, data = problem()
    assert lp.KFAC(net, lp.Gaussian()).fit(data).noise_std.shape == ()
    posterior = lp.KFAC(net, "regression")
    posterior.noise_std = 0.5
    assert posterior.fit(data).noise_std.shape == ()
    posterior = lp.KFAC(net, "regression")
    posterior.noise_per_output = False
    assert posterior.fit(data).noise_std.shape == ()


def test_where_several_are_not_affordable_there_is_one():
    net, data = problem()
    assert lp.LowRank(net, "regression", rank=3).fit(data).noise_std.shape == ()
    assert lp.KFAC(net, "regression", backend="backpack").fit(data).noise_std.shape == ()
    assert lp.Diagonal(net, "regression", backend=lp.Native("empirical_fisher")).fit(data).noise_std.shape == ()
    net, data = problem(outputs=17)
    assert lp.Diagonal(net, "regression").fit(data).noise_std.shape == ()
    wide = nn.Sequential(nn.Linear(3, 400), nn.Linear(400, 2)).double()  # 2402 weights
    assert lp.Full(wide, "regression").fit(problem(n=4)[1][:1]).noise_std.shape == ()
    assert lp.KFAC(wide, "regression").fit(problem(n=4)[1][:1]).noise_std.shape == (2,)
    wide = nn.Sequential(nn.Linear(3, 900), nn.Linear(900, 2)).double()
    assert lp.KFAC(wide, "regression").fit(problem(n=4)[1][:1]).noise_std.shape == ()


def test_one_output_has_one_level():
    net, data = problem(outputs=1)
    assert lp.KFAC(net, "regression").fit(data).noise_std.shape == ()
    assert lp.KFAC(net, "regression").fit([(x, y[:, 0]) for x, y in data]).noise_std.shape == ()
    sequences = [(normal(5, 4, 3), normal(5, 4))]  # [B, T] targets of outputs [B, T, 1]
    assert lp.KFAC(net, "regression").fit(sequences).noise_std.shape == ()


def test_a_number_set_afterwards_is_every_level():
    net, data = problem()
    posterior = lp.KFAC(net, "regression").fit(data[:1])
    posterior.noise_std = 0.5
    assert posterior.noise_std.tolist() == [0.5, 0.5]
    posterior.update(data[1:])
    assert posterior.noise_std.tolist() == [0.5, 0.5]
    with pytest.raises(ConfigurationError, match="another number of noise levels"):
        posterior.noise_std = torch.ones(3)


def test_levels_are_saved_and_loaded(tmp_path):
    net, data = problem()
    posterior = lp.KFAC(net, "regression").fit(data).fit_prior_precision("marginal_likelihood")
    posterior.save(tmp_path / "it")
    torch.testing.assert_close(lp.load(tmp_path / "it", net).noise_std, posterior.noise_std)


def test_posteriors_that_hold_another():
    net, data = problem()
    subnetwork = lp.Subnetwork(net, "regression", lp.LargestMagnitude(5)).fit(data)
    assert subnetwork.noise_std.shape == (2,)
    torch.testing.assert_close(subnetwork.predictive(data[0][0]).aleatoric[0], torch.ones(2).double())
    riemannian = lp.Riemannian(net, "regression", n_samples=2).fit(data)
    assert riemannian.noise_std.shape == (2,)
    assert riemannian.predictive(data[0][0]).variance.shape == (25, 2)
