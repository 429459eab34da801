"""A noise that depends on the input, beside closed forms and noise that is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.applications import noise

pytestmark = pytest.mark.usefixtures("double")


def line(n_inputs=2, n_outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_inputs, 6), nn.Tanh(), nn.Linear(6, n_outputs))


def data(model, deviation, n=250, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator) * 2 - 1
    mean = model(x).detach()
    return x, mean + deviation(x) * torch.randn(mean.shape, generator=generator)


def growing(x):
    """A deviation from .14 to 1, linear in log."""
    return (x[:, :1] - 1).exp()


def fitted(cls, model, rows, **options):
    return cls(model, "regression", prior_precision=10.0, **options).fit([rows])


@pytest.mark.quick("KFAC")
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Full, lp.LowRank])
def test_known_noise_is_found_and_beats_a_constant(cls):
    model = line()
    train, held, new = (data(model, growing, seed=seed) for seed in (1, 2, 3))
    posterior = fitted(cls, model, train, parameters="last_layer" if cls is lp.Full else "all")
    noisy = lp.learn_noise(posterior, [(held[0][:100], held[1][:100]), (held[0][100:], held[1][100:])])
    assert noisy.report.chosen in ("features", "both")
    assert noisy.report.nll + 3 * noisy.report.standard_error < noisy.report.constant_nll
    found = noisy.predictive(new[0]).std.log() - growing(new[0]).log()
    assert found.abs().mean() < 0.2  # of a constant .5; the ridge takes some
    constant = math.log(float(held[1].sub(model(held[0]).detach()).std()))
    assert noisy.predictive(new[0]).log_prob(new[1]).mean() > -constant - 0.5 - math.log(2 * math.pi) / 2 + 0.05


def test_prediction_is_the_posterior_with_another_noise():
    model = line(n_outputs=2)
    train, new = data(model, growing, n=80), data(model, growing, n=7, seed=3)
    posterior = fitted(lp.KFAC, model, train)
    noisy = lp.learn_noise(posterior, [train])
    prediction, own = noisy.predictive(new[0]), posterior.predictive(new[0])
    assert_close(prediction.mean, own.mean)
    assert_close(prediction.epistemic, own.epistemic)
    assert_close(prediction.variance, own.epistemic + prediction.aleatoric)
    low, high = prediction.interval(0.9)
    width = 2 * 1.6448536269514722 * prediction.std
    assert_close(high - low, width)
    covariance = own.functional_covariance + torch.diag_embed(prediction.aleatoric)
    expected = torch.distributions.MultivariateNormal(own.mean, covariance).log_prob(new[1])
    assert_close(prediction.log_prob(new[1]), expected)
    assert noisy.predictive(new[0], joint=True).log_prob(new[1]).isfinite()
    assert_close(noisy.predictive(new[0], joint=True).variance, prediction.variance)


def test_a_constant_is_the_noise_of_greatest_likelihood():
    """Without a hidden layer's help: σ² = mean r² − v where v is the same for all rows."""
    model = nn.Linear(1, 1)
    x = torch.ones(200, 1)
    y = model(x).detach() + 0.5 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    posterior = lp.Full(model, "regression", prior_precision=3.0).fit([(x, y)])
    noisy = lp.learn_noise(posterior, [(x, y)])
    assert noisy.report.chosen == "constant"
    expected = (y - model(x)).square().mean() - posterior.functional_posterior(x[:1]).covariance.flatten()[0]
    assert_close(
        noisy.predictive(x[:1]).aleatoric.flatten()[0], expected.detach(), rtol=1e-4, atol=0
    )  # a search ends at gains of 1e-9


def test_constant_noise_stays_constant():
    model = line()
    rows = data(model, lambda x: torch.full_like(x[:, :1], 0.3))
    noisy = lp.learn_noise(fitted(lp.KFAC, model, rows), [rows])
    assert noisy.report.nll < noisy.report.constant_nll + 0.01
    assert (noisy.predictive(rows[0]).aleatoric.sqrt() - 0.3).abs().max() < 0.1


def test_rows_count_by_what_was_observed_and_by_their_weights(monkeypatch):
    for name, value in (("RIDGES", (0.1,)), ("FOLDS", 2), ("STEPS", 10)):
        monkeypatch.setattr(noise, name, value)
    model, times = line(n_outputs=2), torch.arange(40) % 3 + 1
    x, y = data(model, lambda x: growing(x) ** 2, n=40)
    posterior = fitted(lp.KFAC, model, (x, y))
    y[:10, 1] = math.nan
    plain = lp.learn_noise(posterior, [(x, y)])
    assert plain.report.n_data == 70 and plain.report.chosen in ("features", "both")
    missing = torch.cat([y, torch.full((15, 2), math.nan)])
    assert lp.learn_noise(posterior, [(torch.cat([x, x[:15]]), missing)]).report == plain.report
    weighted = lp.KFAC(model, lp.Gaussian(weighted=True), prior_precision=10.0).fit([(x, (y, torch.ones(40)))])
    weighted.set_state(posterior.state)
    small, whole = (lp.learn_noise(weighted, [(x, (y, w))]) for w in (torch.full((40,), 1e-4), times))
    assert_close(small.coefficients, plain.coefficients, rtol=1e-4, atol=1e-4)
    again = lp.learn_noise(posterior, [(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))])
    assert_close((whole.centre, whole.scale), (again.centre, again.scale))


def test_noise_outside_of_the_data_stays_within_theirs():
    model = line()
    rows = data(model, growing, n=100)
    noisy = lp.learn_noise(fitted(lp.KFAC, model, rows), [rows])
    inside, far = (noisy.predictive(x).aleatoric for x in (rows[0], 1e3 * rows[0]))
    assert inside.min() <= far.min() and far.max() <= inside.max()


def test_training_data_with_weights_are_left_out():
    model = line()
    x, y = data(model, growing, n=40)
    plain = lp.learn_noise(lp.Full(model, lp.Gaussian()).fit([(x[:30], y[:30]), (x[30:], y[30:])]))
    own = [(x[:30], (y[:30], torch.ones(30))), (x[30:], (y[30:], torch.ones(10)))]
    assert lp.learn_noise(lp.Full(model, lp.Gaussian(weighted=True)).fit(own)).report == plain.report


def test_training_data_are_left_out():
    model = line()
    rows = data(model, growing, n=100)
    posterior = fitted(lp.Full, model, rows)
    left = lp.leave_one_out(posterior)
    noisy = lp.learn_noise(posterior)
    normal = Normal(left.mean, (left.covariance[..., 0] + left.targets.var()).sqrt())
    assert noisy.report.nll < -normal.log_prob(left.targets).mean() - 0.1
    assert noisy.report.chosen != "constant"


def test_saved_and_conformal(tmp_path):
    model = line()
    train, held, new = (data(model, growing, seed=seed) for seed in (1, 2, 3))
    noisy = lp.learn_noise(fitted(lp.KFAC, model, train), [held])
    noisy.save(tmp_path / "noisy")
    loaded = lp.load(tmp_path / "noisy", model)
    assert_close(loaded.predictive(new[0]).variance, noisy.predictive(new[0]).variance, rtol=0, atol=0)
    sets = lp.conformalize(noisy, [held], level=0.8)
    low, high = sets.interval(new[0])
    covered = ((low <= new[1]) & (new[1] <= high)).double()
    assert abs(float(covered.mean()) - 0.8) < 4 * math.sqrt(2 * 0.16 / 250)
    narrow = new[0][:, 0] < 0
    assert abs(float(covered[narrow].mean()) - 0.8) < 0.12


def test_networks_without_a_linear_last_layer_have_the_variance_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1), nn.Softplus())
    rows = data(model, lambda x: 0.1 + x[:, :1].square(), n=200)
    noisy = lp.learn_noise(fitted(lp.KFAC, model, rows), [rows])
    assert noisy.coefficients.shape == (1, 2)
    assert noisy.predictive(rows[0]).variance.isfinite().all()


def test_refusals():
    model = line()
    rows = data(model, growing, n=30)
    classifier = lp.KFAC(line(n_outputs=2), "classification")
    with pytest.raises(lp.errors.UnsupportedError, match="beside real outputs"):
        lp.learn_noise(classifier, [rows])
    with pytest.raises(lp.errors.NotFittedError):
        lp.learn_noise(lp.KFAC(model, "regression"), [rows])
    few = [(rows[0][:5], rows[1][:5])]
    with pytest.raises(lp.errors.ConfigurationError, match="number of rows"):
        lp.learn_noise(fitted(lp.KFAC, model, rows), few)
