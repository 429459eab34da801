"""Tuning by leave-one-out against leave-one-out predictions themselves, point by point."""

from __future__ import annotations

import math
import warnings
from functools import cache

import pytest
import torch
from leave_one_out_problems import LIKELIHOODS, chunks, problem
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from laplace_plus.tuning import LeaveOneOutTuning


@cache
def classifier(n=40):
    torch.manual_seed(0)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = (x[:, 0] + 0.8 * torch.randn(n, dtype=torch.float64) > 0).long()
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return train(net, nn.functional.cross_entropy, x, y, 0.01), x, y


@cache
def regressor(n=40, outputs=2):
    torch.manual_seed(1)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = (x @ torch.randn(3, outputs, dtype=torch.float64)).sin() + 0.3 * torch.randn(n, outputs, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    return train(net, nn.functional.mse_loss, x, y, 0.01), x, y


def train(net, loss, x, y, decay):
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2, weight_decay=decay)
    for _ in range(200):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net


@pytest.mark.quick("mc")
@pytest.mark.parametrize("link", ["probit", "mc"])
def test_every_loss_is_that_of_leaving_out(link):
    net, x, y = classifier()
    posterior = lp.Full(net, "classification", prior_precision=1.0).fit([(x[:15], y[:15]), (x[15:], y[15:])])
    generator = torch.Generator().manual_seed(5)
    options = {"training_prior_precision": 0.4, "kappa": 1.5, "link": link, "n_samples": 50}
    posterior.fit_prior_precision("leave_one_out", generator=generator, **options)
    tuning = posterior.tuning
    assert isinstance(tuning, LeaveOneOutTuning)
    assert tuning.method == "leave_one_out"
    assert tuning.converged
    assert tuning.noise_std is None
    assert len(tuning.precisions) == len(tuning.losses) == tuning.n_evaluations == 41
    assert (tuning.precisions.diff() > 0).all()
    if link == "probit":
        for number in (0, 7, 20, 33, 40):
            asked = lp.Full(net, "classification", prior_precision=float(tuning.precisions[number])).fit([(x, y)])
            left = lp.leave_one_out(asked, prior_precision=0.4, kappa=1.5)
            torch.testing.assert_close(left.nll(link=link), tuning.losses[number], rtol=1e-8, atol=1e-8)
    best = int(tuning.losses.argmin())
    assert float(posterior.prior_precision) == pytest.approx(float(tuning.precisions[best]), rel=1e-12)
    assert tuning.value == -float(tuning.losses[best])


def test_a_finer_grid_gains_next_to_nothing():
    net, x, y = classifier()
    posterior = lp.Full(net, "classification").fit([(x, y)])
    tuning = posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.4).tuning
    best = float(posterior.prior_precision)
    finer = [best * 10 ** (step / 40) for step in range(-10, 11)]
    posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.4, grid=finer)
    assert 0 <= posterior.tuning.value - tuning.value < 1e-3


@pytest.mark.parametrize("before", ["nothing", "leave_one_out", "marginal_likelihood"])
def test_the_training_precision_is_never_guessed(before):
    """Whatever the posterior's own precision is, it need not be that of training."""
    net, x, y = classifier()
    posterior = lp.Full(net, "classification").fit([(x, y)])
    if before != "nothing":
        known = {"training_prior_precision": 0.4} if before == "leave_one_out" else {}
        posterior.fit_prior_precision(before, **known)
    precision = float(posterior.prior_precision)
    for options in ({}, {"weight_decay": 0.0}):
        with pytest.raises(ConfigurationError, match=r"training_prior_precision=, or weight_decay="):
            posterior.fit_prior_precision("leave_one_out", **options)
    assert float(posterior.prior_precision) == precision


@pytest.mark.slow
def test_weight_decay_is_that_of_the_mean_loss():
    """Over examples, times the outputs for several binary ones, at the posterior's temperature."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 2, (30, 3))
    net = nn.Linear(4, 3).double()
    posterior = lp.Full(net, "binary", temperature=2.0).fit([(x[:11], y[:11]), (x[11:], y[11:])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        posterior.fit_prior_precision("leave_one_out", weight_decay=0.02, grid=[1.0, 2.0, 4.0])
    assert float(posterior.tuning.training_prior_precision) == pytest.approx(30 * 3 * 0.02 / 2.0)
    net, x, y = regressor()
    with pytest.raises(UnsupportedError, match="training_prior_precision="):
        lp.Full(net, "regression").fit([(x, y)]).fit_prior_precision("leave_one_out", weight_decay=0.01)


@pytest.mark.quick("noise1-full")
@pytest.mark.parametrize(("noise", "leverages"), [(0.5, "own"), (torch.tensor([0.4, 0.8]), "full")])
def test_leave_one_out_reproduces_the_value_of_the_tuning(noise, leverages):
    """With the precision of training, after that of the posterior was tuned; the noise stays."""
    net, x, y = regressor()
    posterior = lp.Full(net, lp.Gaussian(noise)).fit([(x, y)])
    posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.8, leverages=leverages)
    tuning = posterior.tuning
    left = lp.leave_one_out(posterior, prior_precision=0.8, kappa=2.0, leverages=leverages)
    assert float(left.nll()) == pytest.approx(-tuning.value, rel=1e-8)
    assert tuning.noise_std is None
    torch.testing.assert_close(posterior.noise_std, torch.as_tensor(noise).to(posterior.noise_std))


def test_several_precisions_are_multiplied_together():
    net, x, y = classifier()
    layers = torch.tensor([0.4, 1.2], dtype=torch.float64)
    posterior = lp.Full(net, "classification", prior_precision=layers).fit([(x, y)])
    posterior.fit_prior_precision("leave_one_out", training_prior_precision=layers)
    assert float(posterior.prior_precision[1] / posterior.prior_precision[0]) == pytest.approx(3.0)
    left = lp.leave_one_out(posterior, prior_precision=layers, kappa=2.0)
    assert float(left.nll()) == pytest.approx(-posterior.tuning.value, rel=1e-8)


def test_points_where_the_posterior_is_no_use_are_left_out():
    """KFAC's leverages exceed one at small precisions only; a grid of nothing else is refused."""
    net, x, y = classifier()
    posterior = lp.KFAC(net, "classification", prior_precision=1.0).fit([(x, y)])
    options = {"training_prior_precision": 50.0}
    with pytest.warns(ConvergenceWarning, match="the last point of the grid that can be used"):
        posterior.fit_prior_precision("leave_one_out", grid=[1e-6, 1e-5, 60.0], **options)
    assert posterior.tuning.losses.isinf().tolist() == [True, True, False]
    posterior.prior_precision = 1.0
    with pytest.raises(NotPositiveDefiniteError, match="up to 1e-06"):
        posterior.fit_prior_precision("leave_one_out", grid=[1e-7, 1e-6], **options)
    assert float(posterior.prior_precision) == 1.0


def test_an_end_of_the_grid_where_the_loss_still_falls():
    net, x, y = classifier()
    posterior = lp.Full(net, "classification", prior_precision=0.4).fit([(x, y)])
    posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.4)
    best = float(posterior.prior_precision)
    grid = [best / 1000, best / 100, best / 30]
    with pytest.warns(ConvergenceWarning, match="leave_one_out"):
        posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.4, grid=grid)
    assert not posterior.tuning.converged


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"structure": "layerwise"}, ConfigurationError),
        ({"grid": []}, ConfigurationError),
        ({"grid": [1.0, -1.0]}, ConfigurationError),
        ({"grid": [1.0, math.nan]}, ConfigurationError),
        ({"kappa": 0}, ConfigurationError),
        ({"training_prior_precision": -1.0}, ConfigurationError),
        ({"weight_decay": 0.1}, ConfigurationError),
        ({"weight_decay": -0.1, "training_prior_precision": None}, ConfigurationError),
        ({"tune_noise": True}, ConfigurationError),
        ({"unit": "position"}, ConfigurationError),
        ({"link": "exact"}, ConfigurationError),
        ({"leverages": "all"}, ConfigurationError),
    ],
)
def test_refusals(options, error):
    net, x, y = classifier()
    posterior = lp.Full(net, "classification").fit([(x, y)])
    with pytest.raises(error):
        posterior.fit_prior_precision("leave_one_out", **{"training_prior_precision": 1.0, **options})
    assert float(posterior.prior_precision) == 1.0


def test_predictions_around_the_tangent_optimum_are_refused():
    net, x, y = classifier()
    posterior = lp.Full(net, "classification", prior_precision=0.4).fit([(x, y)])
    posterior.fit_prior_precision(evidence="tangent", predictive_mean="tangent")
    for call in (lambda: lp.leave_one_out(posterior), lambda: posterior.fit_prior_precision("leave_one_out")):
        with pytest.raises(UnsupportedError, match="predictive_mean"):
            call()
    posterior.predictive_mean = "network"
    assert lp.leave_one_out(posterior).mean.shape == (40, 2)


def test_interpolation_is_named():
    """Gradients vanish where the data are fitted all but perfectly, and leaving out is blind."""
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-400.0, 0, 0], [400.0, 0, 0]]))
        net.bias.zero_()
    posterior = lp.Full(net, "classification", prior_precision=0.1).fit([(x, y)])
    with pytest.warns(ConvergenceWarning, match="all but perfectly"):
        posterior.fit_prior_precision("leave_one_out", training_prior_precision=0.1)


# -- other data than those of the fit --------------------------------------------------------------------------------


@pytest.mark.quick("classification-dtype0", "regression-dtype0", "heteroscedastic-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_as_many_other_data_are_told_by_what_they_say(name, dtype):
    """Before leverages are looked at; while other batches of the same data, in another order, are welcome."""
    net, x, y = problem(name)
    x, y = x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    posterior = lp.Full(net.to(dtype), LIKELIHOODS[name], prior_precision=10.0).fit([(x, y)])
    for data in ([(x, y.roll(1, 0))], [(x + 5, y)], [(torch.cat([x[:15], x[:1]]), torch.cat([y[:15], y[:1]]))]):
        with pytest.raises(DataError, match="not the data that the posterior was fitted to.*log-likelihood"):
            lp.leave_one_out(posterior, data)
        for options in ({"method": "leave_one_out", "training_prior_precision": 10.0}, {"evidence": "tangent"}):
            with pytest.raises(DataError, match="not the data that the posterior was fitted to.*log-likelihood"):
                posterior.fit_prior_precision(data=data, **options)
    assert float(posterior.prior_precision) == 10.0
    turned = chunks(x.flip(0), y.flip(0), 1, 5, 10)
    torch.testing.assert_close(lp.leave_one_out(posterior, turned).nll(), lp.leave_one_out(posterior).nll())


@pytest.mark.diagonal
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_data_on_any_scale(dtype, scale):
    """Squared errors have the scale of the targets, and may be all but zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 2)).to(dtype)
    with torch.no_grad():
        net[2].weight *= scale
        net[2].bias *= scale
    x = torch.randn(64, 4, dtype=dtype)
    for error in (0.0, 1e-3, 1.0):
        y = net(x).detach() + error * scale * torch.randn(64, 2, dtype=dtype)
        posterior = lp.Full(net, lp.Gaussian(scale), parameters="last_layer").fit([(x, y)])
        lp.leave_one_out(posterior, chunks(x, y, 1, 30, 33))
        with pytest.raises(DataError, match="not the data"):
            lp.leave_one_out(posterior, [(x, y.roll(1, 0))])


def test_the_data_are_compared_before_leverages():
    """A leverage of one is not what is wrong with data that are not those of the fit."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(3, (30,))
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    posterior = lp.Full(net, "classification", prior_precision=1e-2).fit([(x, y)])
    assert float(lp.leave_one_out(posterior).leverages.max()) < 1
    with pytest.raises(DataError, match="not the data that the posterior was fitted to"):
        lp.leave_one_out(posterior, [(x + 5, y)])
