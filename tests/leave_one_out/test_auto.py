"""The default tuning against dense formulas, and what it says where it cannot compare."""

from __future__ import annotations

import copy

import pytest
import torch
from leave_one_out_problems import linear_problem
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, NoGainWarning
from laplace_plus.network.batches import Batch
from laplace_plus.tuning import auto, new_data, noise_from_residuals
from laplace_plus.tuning.new_data import thinned

pytestmark = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")


def test_losses_of_regression_are_those_of_dense_formulas():
    net, x, y = linear_problem()
    posterior = lp.Full(net, "regression").fit([(x, y)]).fit_prior_precision()
    found = posterior.tuning
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    residuals = (y - net(x)).detach()[:, 0]
    noise = residuals.square().mean().sqrt()

    precision = found.evidence.prior_precision
    covariance = torch.linalg.inv(rows.T @ rows / noise**2 + precision * torch.eye(4, dtype=torch.float64))
    own = ((rows @ covariance) * rows).sum(1)
    own = own / (1 - own / noise**2)  # a dense matrix fits each datum, which is taken out again

    estimate = noise_from_residuals(posterior)
    left_out = residuals * (estimate.noise_std / estimate.residual_std).to(residuals)
    wanted = []
    for scale in found.scales:
        total = scale * own + noise**2
        factor = (left_out.square() / total).mean()
        wanted.append(-torch.distributions.Normal(0.0, (factor * total).sqrt()).log_prob(left_out).mean())
    torch.testing.assert_close(found.losses, torch.stack(wanted), rtol=1e-6, atol=1e-8)
    best = int((found.losses <= found.losses.min() + auto.TOLERANCE).nonzero()[0])  # the widest that is good enough
    assert found.value == -float(found.losses[best])
    factor = (left_out.square() / (found.scales[best] * own + noise**2)).mean().sqrt()
    assert posterior.covariance_scale == found.scales[best]
    assert float(posterior.noise_std) == pytest.approx(float(noise * factor), rel=1e-6)
    assert float(posterior.prior_precision) == pytest.approx(float(precision / factor**2), rel=1e-6)


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
def test_where_no_posterior_gains_the_network_predicts(likelihood, monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "SCALES", (100.0, 10.0, 1.0))
    net, x, y = linear_problem(60, classification=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() if likelihood == "binary" else net
    with torch.no_grad():  # the most probable class is right, and under-estimated
        y = net(x).argmax(-1) if likelihood == "classification" else (net(x) > 0).double()
        for parameter in net.parameters():
            parameter *= 0.3
    posterior = lp.KFAC(net, likelihood).fit([(x, y)])
    with pytest.warns(NoGainWarning, match="No posterior is expected to lose less"):
        posterior.fit_prior_precision()
    found = posterior.tuning
    assert (found.chosen, found.expected_gain, posterior.link) == ("network", 0.0, "network")
    total = (found.losses + new_data.BETWEEN * found.between_losses) / (1 + new_data.BETWEEN)
    assert found.value == pytest.approx(-float(total[-1])) and found.prior_precision == found.evidence.prior_precision
    probabilities = net(x).softmax(-1) if likelihood == "classification" else net(x).sigmoid()
    posterior.save(tmp_path / "saved")
    for one in (posterior, lp.load(tmp_path / "saved", net), copy.copy(posterior)):
        prediction = one.predictive(x)
        torch.testing.assert_close(prediction.mean, probabilities.detach(), rtol=1e-12, atol=0)
        assert (prediction.epistemic > 0).all() and (prediction.mutual_information() > 0).all()  # which order inputs
        assert not torch.allclose(one.predictive(x, link="probit").mean, probabilities, rtol=1e-4)
    posterior.prior_precision = 1.0
    assert posterior.link is None
    posterior.link = "probit"
    torch.testing.assert_close(posterior.predictive(x).mean, posterior.predictive(x, link="probit").mean)
    assert posterior.fit([(x, y)]).link is None


def test_what_belongs_to_the_marginal_likelihood_asks_for_it():
    net, x, y = linear_problem()
    posterior = lp.Full(net, "regression").fit([(x, y)])
    assert posterior.fit_prior_precision(structure="layerwise").tuning.method == "marginal_likelihood"
    assert posterior.fit_prior_precision().tuning.method == "auto"


def test_without_training_data_the_evidence_stands_alone():
    net, x, y = linear_problem(classification=True)
    posterior = lp.Full(net, "classification").fit(iter([(x, y)]))
    with pytest.warns(NoGainWarning, match="not at hand"):
        posterior.fit_prior_precision()
    found = posterior.tuning
    assert found.chosen == "marginal_likelihood" and found.expected_gain != found.expected_gain
    assert found.value == posterior.fit_prior_precision("marginal_likelihood").tuning.value
    net, x, y = linear_problem()
    posterior = lp.Full(net, "regression").fit(iter([(x, y)]))
    with pytest.warns(NoGainWarning, match="not at hand"):
        posterior.fit_prior_precision()
    noise = float(posterior.noise_std)
    assert noise == pytest.approx(float(posterior.fit_prior_precision("marginal_likelihood").noise_std), rel=1e-3)


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank])
def test_the_scale_of_the_covariance(cls, tmp_path):
    net, x, y = linear_problem(classification=True)
    posterior = cls(net, "classification", prior_precision=2.0).fit([(x, y)])
    covariance, evidence = posterior.covariance_matrix(), posterior.log_marginal_likelihood()
    outputs, left = posterior.functional_posterior(x).covariance, lp.leave_one_out(posterior, leverages="full")
    scaled = copy.copy(posterior)
    scaled.covariance_scale = 0.1
    scaled.save(tmp_path / "scaled")
    for one in (scaled, copy.copy(scaled), lp.load(tmp_path / "scaled", net)):
        torch.testing.assert_close(one.covariance_matrix(), 0.1 * covariance)
        torch.testing.assert_close(one.variance(), 0.1 * covariance.diagonal())
        torch.testing.assert_close(one.precision_matrix() @ one.covariance_matrix(), torch.eye(8).double())
        torch.testing.assert_close(one.functional_posterior(x).covariance, 0.1 * outputs)
        found = lp.leave_one_out(one, [(x, y)], leverages="full")
        torch.testing.assert_close(found.covariance, 0.1 * left.covariance)
        torch.testing.assert_close(found.mean, left.mean)  # what training did is another matter
        draws = [p.sample(3, generator=torch.Generator().manual_seed(0)) - p.mean for p in (one, posterior)]
        torch.testing.assert_close(draws[0], 0.1**0.5 * draws[1])
        assert one.log_marginal_likelihood() == evidence
    torch.testing.assert_close(posterior.covariance_matrix(), covariance)
    scaled.prior_precision = 2.0
    assert scaled.covariance_scale == 1 and torch.equal(scaled.covariance_matrix(), covariance)
    scaled.covariance_scale = 0.0
    with pytest.raises(ConfigurationError, match="covariance_scale is out of range"):
        scaled.predictive(x)
    assert scaled.fit([(x, y)]).covariance_scale == 1


def test_an_error_of_the_loader_comes_out_and_changes_nothing():
    class Failing(list):
        at, count = 0, 0

        def __iter__(self):
            for batch in list.__iter__(self):
                self.count += 1
                if self.count == self.at:
                    raise RuntimeError("disk gone")
                yield batch

    net, x, y = linear_problem(classification=True)
    data = Failing(zip(x.split(15), y.split(15), strict=True))
    posterior = lp.KFAC(net, "classification").fit(data)
    data.count = 0
    copy.copy(posterior).fit_prior_precision()
    for at in range(1, data.count + 1):
        data.at, data.count = at, 0
        with pytest.raises(RuntimeError, match="disk gone"):
            posterior.fit_prior_precision()
    assert posterior.tuning is None


THINNED = [([1] * 100, 0.05, 6), ([3, 2] * 20, 0.1, 11), ([40, 60], 0.1, 10)]


@pytest.mark.parametrize(("sizes", "share", "counts"), THINNED)
def test_small_batches_are_thinned_to_a_share_of_all(sizes, share, counts):
    numbers = torch.arange(sum(sizes))
    found = list(thinned((Batch(part, part) for part in numbers.split(sizes)), share))
    assert len(found[0].target) > 0
    assert sum(len(part.target) for part in found) == counts
    kept = torch.cat([part.target for part in found])
    assert float(kept.double().mean()) == pytest.approx(sum(sizes) / 2, rel=0.1)  # evenly spread


def test_regression_takes_missing_targets():
    """Losses and noise are those of the data without what is missing."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    y = torch.stack([x.sum(1), x[:, 0]], 1) + 0.3 * torch.randn(40, 2, dtype=torch.float64)
    net = nn.Linear(3, 2).double()
    more = torch.cat([x, torch.randn(5, 3, dtype=torch.float64)]), torch.cat([y, torch.full((5, 2), torch.nan)])
    one, two = (lp.Full(net, "regression").fit(data).fit_prior_precision() for data in ([(x, y)], [more]))
    torch.testing.assert_close(two.noise_std, one.noise_std)
    torch.testing.assert_close(two.tuning.losses, one.tuning.losses)
