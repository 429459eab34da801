"""The recipe step by step, what it refuses, and what becomes of predictions."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    NotPositiveDefiniteError,
    UnsupportedError,
)

DECAY = 0.01


def data(n=60, flip=0.15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    return x, torch.where(torch.rand(n, generator=generator) < flip, 1 - y, y)


def trained(x, y, *, outputs=2, steps=400, decay=DECAY, width=12):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net


def loss(outputs, y):
    if outputs.shape[-1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], y.double())
    return nn.functional.cross_entropy(outputs, y)


@cache
def overconfident_network(outputs):
    return trained(*data(), outputs=outputs, decay=1e-3)


def overconfident(cls=lp.Full, likelihood="classification", **options):
    x, y = data()
    net = overconfident_network(1 if likelihood == "binary" else 2)
    return cls(net, likelihood, **options).fit([(x[:25], y[:25]), (x[25:], y[25:])]), x, y


@cache
def underconfident_network():
    """Weight decay beyond what the data ask for."""
    return trained(*data(200, flip=0.0), decay=0.03)


def underconfident():
    x, y = data(200, flip=0.0)
    return lp.Full(underconfident_network(), "classification").fit([(x, y)]), x, y


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.slow
def test_an_overconfident_network_gets_a_part_of_the_covariance(likelihood):
    posterior, x, y = overconfident(likelihood=likelihood)
    found = lp.calibrate(posterior, weight_decay=1e-3)
    report = found.report
    assert report.rule == "covariance"
    assert report.fitted_temperature > 1 == found.temperature
    assert 0 < found.covariance_scale <= 1
    # step by step
    posterior.prior_precision = 60 * 1e-3
    left = lp.leave_one_out(posterior, kappa=2.0)
    losses = [float(left.nll(scale=s)) for s in torch.linspace(0, 1, 101).tolist()]
    assert report.calibrated_nll <= min(losses) + 1e-6
    assert report.calibrated_nll == pytest.approx(float(left.nll(scale=found.covariance_scale)), rel=1e-9)
    assert report.leave_one_out_nll == pytest.approx(losses[0], rel=1e-9)
    assert report.calibrated_nll < report.leave_one_out_nll - 0.01
    assert report.training_nll == pytest.approx(float(loss(posterior.network(x), y)), rel=1e-9)
    assert report.largest_leverage == pytest.approx(float(left.leverages.max()))
    temperatures = torch.linspace(0.5, 8, 301).tolist()
    mean, targets, _ = left.likelihood.rows(left.mean, left.targets)
    by_temperature = [-float(left.likelihood.log_density(mean / t, targets).mean()) for t in temperatures]
    best = temperatures[by_temperature.index(min(by_temperature))]
    assert report.fitted_temperature == pytest.approx(best, abs=0.03)
    # predictions
    mean, covariance = posterior.functional_posterior(x)
    expected = lp.predictive.from_functional(posterior.likelihood, mean, found.covariance_scale * covariance)
    assert found.link == posterior.predictive(x).link
    torch.testing.assert_close(found.predictive(x).mean, expected.mean)
    torch.testing.assert_close(found.functional_posterior(x).covariance, found.covariance_scale * covariance)
    sampled = found.predictive(x, link="mc", n_samples=20000, generator=torch.Generator().manual_seed(0))
    drawn = torch.distributions.MultivariateNormal(mean, found.covariance_scale * covariance).sample((20000,))
    exact = drawn.softmax(-1) if likelihood == "classification" else drawn.sigmoid()
    assert float((sampled.mean - exact.mean(0)).abs().max()) < 0.02
    assert found.predictive(x[:5], joint=True).log_prob(y[:5]).ndim == 0


def test_an_underconfident_network_gets_a_temperature():
    posterior, x, y = underconfident()
    found = lp.calibrate(posterior, weight_decay=0.03)
    assert found.report.rule == "temperature"
    assert found.temperature == found.report.fitted_temperature < 0.9
    assert found.covariance_scale == 0.0
    assert found.report.calibrated_nll < found.report.leave_one_out_nll
    expected = (posterior.network(x) / found.temperature).softmax(-1)
    for link in ("probit", "mc", "bridge"):
        torch.testing.assert_close(found.predictive(x, link=link).mean, expected)
    torch.testing.assert_close(found.predictive(x).epistemic, torch.zeros_like(expected))
    joint = found.predictive(x[:5], joint=True).log_prob(y[:5])
    torch.testing.assert_close(joint, expected[:5].log().gather(-1, y[:5, None]).sum(), rtol=1e-6, atol=1e-6)
    # held-out data agree with the direction
    new, labels = data(2000, flip=0.0, seed=1)
    outputs = posterior.network(new).detach()
    assert float(loss(outputs / found.temperature, labels)) < float(loss(outputs, labels))


@pytest.mark.slow
def test_it_helps_on_new_data():
    posterior, _, _ = overconfident()
    x, y = data(4000, seed=1)
    plain = float(loss(posterior.network(x).detach(), y))
    for link in ("probit", "mc"):
        found = lp.calibrate(posterior, weight_decay=1e-3, link=link, generator=torch.Generator().manual_seed(0))
        prediction = found.predictive(x, generator=torch.Generator().manual_seed(1))
        assert prediction.link == link
        assert -float(prediction.log_prob(y).mean()) < plain - 0.1


def test_weight_decay_of_several_binary_outputs():
    """torch's mean loss is then over examples and outputs."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 2, (30, 3))
    net = trained(x, torch.zeros(30, dtype=torch.long), outputs=3, steps=5)
    posterior = lp.Full(net, "binary", temperature=2.0).fit([(x, y)])
    with pytest.warns(ConvergenceWarning, match="8, the end of the range"):  # labels that mean nothing
        found = lp.calibrate(posterior, weight_decay=0.02)
    assert not found.report.converged
    assert float(found.posterior.prior_precision) == pytest.approx(30 * 3 * 0.02 / 2.0)


def test_the_posterior_stays_as_it_is():
    posterior, x, _ = overconfident(prior_precision=3.0)
    before = posterior.predictive(x).mean
    found = lp.calibrate(posterior, weight_decay=1e-3)
    assert float(posterior.prior_precision) == 3.0
    torch.testing.assert_close(posterior.predictive(x).mean, before)
    assert float(found.posterior.prior_precision) == pytest.approx(0.06)
    posterior.prior_precision = 100.0
    assert float(found.posterior.prior_precision) == pytest.approx(0.06)


def test_kfac_takes_displacements_from_the_exact_matrix():
    posterior, x, _ = overconfident(lp.KFAC)
    with pytest.raises(NotPositiveDefiniteError, match='leverages="full"'):
        lp.calibrate(posterior, weight_decay=1e-4)
    found = lp.calibrate(posterior, weight_decay=1e-3, leverages="full")
    exact = lp.calibrate(overconfident()[0], weight_decay=1e-3)
    assert found.report.fitted_temperature == pytest.approx(exact.report.fitted_temperature, rel=1e-6)
    assert found.predictive(x).mean.shape == (60, 2)


# -- where leaving out tells nothing ----------------------------------------------------------------------------------


@cache
def interpolating_network():
    return trained(*data(40), decay=0.0, steps=700, width=40)


def interpolating():
    x, y = data(40)
    return lp.Full(interpolating_network(), "classification").fit([(x, y)]), x, y


def test_an_interpolating_network_is_refused():
    posterior, x, y = interpolating()
    for options in ({"training_prior_precision": 0.5}, {"weight_decay": 0.01}):
        with pytest.raises(UnsupportedError, match='marginal_likelihood".*held-out'):
            lp.calibrate(posterior, **options)
    left = lp.leave_one_out(posterior)  # which is blind there: the reason
    assert float(left.nll(scale=0.0)) < 0.02
    assert float(loss(posterior.network(data(500, seed=1)[0]), data(500, seed=1)[1])) > 0.5


def test_the_marginal_likelihood_instead():
    posterior, x, _ = interpolating()
    found = lp.calibrate(posterior, fallback="marginal_likelihood")
    posterior.fit_prior_precision("marginal_likelihood")
    assert found.report.rule == "marginal_likelihood"
    assert (found.temperature, found.covariance_scale) == (1.0, 1.0)
    torch.testing.assert_close(found.predictive(x).mean, posterior.predictive(x).mean)


# -- what is no use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": -1.0},
        {"weight_decay": math.nan},
        {"weight_decay": 0.01, "training_prior_precision": 1.0},
        {"training_prior_precision": -1.0},
        {"weight_decay": 0.01, "link": "bridge"},
        {"weight_decay": 0.01, "fallback": "none"},
        {"weight_decay": 0.01, "kappa": 0.0},
        {"weight_decay": 0.01, "leverages": "kfac"},
    ],
)
def test_unknown_choices(options):
    posterior, _, _ = overconfident()
    with pytest.raises(ConfigurationError):
        lp.calibrate(posterior, **options)


def test_no_classifier_and_no_gaussian():
    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    net = nn.Linear(4, 2).double()
    regression = lp.Full(net, "regression").fit([(x, x[:, :2])])
    with pytest.raises(UnsupportedError, match="fit_prior_precision"):
        lp.calibrate(regression, weight_decay=0.01)
    with pytest.raises(ConfigurationError, match="Linear"):
        lp.calibrate(net, weight_decay=0.01)


def test_a_temperature_at_the_end_of_its_range():
    x, y = data(60, flip=0.0)
    y = (x[:, 0] > 0).long()
    net = trained(x[(x[:, 0].abs() > 0.3)], y[(x[:, 0].abs() > 0.3)], decay=1.0, steps=20)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net[0].weight[0, 0], net[2].weight[1, 0], net[2].weight[0, 0] = 1.0, 0.05, -0.05
    posterior = lp.Full(net, "classification").fit([(x, y)])
    with pytest.warns(ConvergenceWarning, match="temperature"):
        found = lp.calibrate(posterior, training_prior_precision=1e4)
    assert not found.report.converged
    assert found.temperature == pytest.approx(1 / 8)


@pytest.mark.parametrize("case", ["temperature", "covariance"])
def test_saved_and_loaded(case, tmp_path):
    posterior, x, _ = underconfident() if case == "temperature" else overconfident()
    found = lp.calibrate(posterior, weight_decay=0.03 if case == "temperature" else 1e-3)
    found.save(tmp_path / "calibrated")
    again = lp.load(tmp_path / "calibrated", posterior.network.model)
    assert again.report.rule == found.report.rule and again.report.calibrated_nll == found.report.calibrated_nll
    assert repr(again) == repr(found)
    torch.testing.assert_close(again.predictive(x).mean, found.predictive(x).mean, rtol=0, atol=0)
