"""Ensembles against averages of the networks themselves."""

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, InputError


def networks(n_outputs, n=4):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, n_outputs)).double() for _ in range(n)
    ]


def test_probabilities_are_averaged_in_evaluation_mode_and_networks_stay_as_they_are():
    nets, x = networks(3), torch.randn(6, 2, dtype=torch.float64)
    prediction = lp.Ensemble(nets, "classification").predictive(x)
    assert all(net.training for net in nets)
    p = torch.stack([torch.softmax(net.eval()(x), -1) for net in nets]).detach()
    torch.testing.assert_close(prediction.mean, p.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.epistemic, p.var(0, correction=0), rtol=1e-10, atol=1e-14)
    information = -(p.mean(0) * p.mean(0).log()).sum(-1) + (p * p.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.mutual_information(), information, rtol=1e-10, atol=1e-12)


def test_noise_is_the_root_mean_square_of_the_mean_networks_residuals():
    nets, x = networks(2), torch.randn(30, 2, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    ensemble = lp.Ensemble(nets, "regression").fit([(x[:20], y[:20]), (x[20:], y[20:])])
    f = torch.stack([net.eval()(x) for net in nets]).detach()
    noise = (f.mean(0) - y).square().mean(0)
    prediction = ensemble.predictive(x)
    torch.testing.assert_close(prediction.variance, f.var(0, correction=0) + noise, rtol=1e-10, atol=0)
    torch.testing.assert_close(prediction.mean, f.mean(0), rtol=1e-12, atol=0)


def test_errors():
    x = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="number of networks"):
        lp.Ensemble([], "classification")
    with pytest.raises(ConfigurationError, match="another shape"):
        lp.Ensemble([*networks(3, 1), *networks(2, 1)], "classification").predictive(x)
    with pytest.raises(ConfigurationError, match="Gaussian"):
        lp.Ensemble(networks(3), "classification").fit([(x, torch.zeros(2).long())])
    one = networks(1, 1)
    with pytest.raises(ConfigurationError, match="noise must be"):
        lp.Ensemble(one, "regression").fit([(x, one[0].eval()(x).detach())])
    with pytest.raises(InputError):
        lp.Ensemble(networks(3), "classification").predictive(torch.zeros(2, 7, dtype=torch.float64))
