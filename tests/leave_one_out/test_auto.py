"""The default tuning and the end of training against dense formulas, and what it says where it cannot compare."""

from __future__ import annotations

import copy

import pytest
import torch
from leave_one_out_problems import Dense, linear_problem
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, NoGainWarning
from laplace_plus.network.batches import Batch
from laplace_plus.tuning import auto, noise_from_residuals
from laplace_plus.tuning.auto import BLOCKS_RATIO, DECAY_RATIO, LOSS_RATIO, training_end
from laplace_plus.tuning.deletions import Deletions, thinned

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


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_losses_of_classes_are_those_of_dense_formulas(known, exact, monkeypatch):
    monkeypatch.setattr(auto, "FEW", 8 if exact else 7)
    monkeypatch.setattr(auto, "MANY", 8 if exact else 7)
    net, x, y = linear_problem(classification=True)
    posterior = lp.Full(net, "classification").fit([(x, y)])
    tuner = lp.Auto(link="probit", training_prior_precision=3.0 if known else None)
    posterior.fit_prior_precision(tuner)
    found, dense = posterior.tuning, Dense(net, x, y)
    # What is not known is read from the weights: training went to its end, under a prior precision of 1.
    precision = DECAY_RATIO * (3.0 if known else 1.0)
    assert found.training_prior_precision == pytest.approx(precision, rel=1e-3)
    moved = dense.covariances(dense.curvature if exact else dense.blocks, precision)
    if exact:
        moved = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - moved @ dense.hessians, moved)
    left_out = net(x).detach() + (moved @ dense.gradients[..., None])[..., 0]
    wanted = []
    own = dense.covariances(dense.curvature, found.evidence.prior_precision)
    own = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - own @ dense.hessians, own)
    for scale in found.scales:
        variances = scale * own.diagonal(dim1=1, dim2=2)
        wanted.append(nn.functional.cross_entropy(left_out / (1 + torch.pi / 8 * variances).sqrt(), y))
    torch.testing.assert_close(found.losses, torch.stack(wanted), rtol=1e-5, atol=1e-8)
    assert found.expected_gain == pytest.approx(float(wanted[-1] - min(wanted)), abs=1e-7)


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
def test_where_no_posterior_gains_the_network_predicts(likelihood, monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "NEGLIGIBLE", 10.0)
    net, x, y = linear_problem(200, classification=True)
    if likelihood == "binary":
        net, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), y[:, None].double()
    posterior = lp.KFAC(net, likelihood).fit([(x, y)])
    with pytest.warns(NoGainWarning, match="No posterior has a clearly smaller"):
        posterior.fit_prior_precision()
    found = posterior.tuning
    assert (found.chosen, found.expected_gain, posterior.link) == ("network", 0.0, "network")
    assert found.value == -float(found.losses[-1]) and found.prior_precision == found.evidence.prior_precision
    assert found.midpoint_losses is not None
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


def test_interpolation_is_named():
    net, x, y = linear_problem(classification=True)
    y = net(x).argmax(-1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= 1000
    posterior = lp.Full(net, "classification").fit([(x, y)])
    with pytest.warns(NoGainWarning, match="interpolates"):
        posterior.fit_prior_precision()


def test_the_prior_of_training_is_given_once():
    with pytest.raises(ConfigurationError, match="both"):
        lp.Auto(weight_decay=0.1, training_prior_precision=1.0)
    net, x, y = linear_problem(classification=True)
    posterior = lp.Full(net, "classification").fit([(x, y)])
    one = copy.copy(posterior).fit_prior_precision(weight_decay=0.1).tuning
    other = copy.copy(posterior).fit_prior_precision(training_prior_precision=3.0).tuning
    torch.testing.assert_close(one.losses, other.losses)  # N = 30 terms in the mean


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank])
def test_the_scale_of_the_covariance(cls, tmp_path):
    net, x, y = linear_problem(classification=True)
    posterior = cls(net, "classification", prior_precision=2.0).fit([(x, y)])
    covariance, evidence = posterior.covariance_matrix(), posterior.log_marginal_likelihood()
    outputs, left = posterior.functional_posterior(x).covariance, lp.leave_one_out(posterior, leverages="first_order")
    scaled = copy.copy(posterior)
    scaled.covariance_scale = 0.1
    scaled.save(tmp_path / "scaled")
    for one in (scaled, copy.copy(scaled), lp.load(tmp_path / "scaled", net)):
        torch.testing.assert_close(one.covariance_matrix(), 0.1 * covariance)
        torch.testing.assert_close(one.variance(), 0.1 * covariance.diagonal())
        torch.testing.assert_close(one.precision_matrix() @ one.covariance_matrix(), torch.eye(8).double())
        torch.testing.assert_close(one.functional_posterior(x).covariance, 0.1 * outputs)
        found = lp.leave_one_out(one, [(x, y)], leverages="first_order")
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


def test_some_positions_of_each_example_are_left_out(monkeypatch):
    monkeypatch.setattr(auto, "ENOUGH", 20)
    net, x, y = linear_problem(30, classification=True)
    x, y = x.view(5, 6, 3), y.view(5, 6)
    posterior = lp.Full(net, "classification").fit([(x, y)])
    posterior.fit_prior_precision(training_prior_precision=3.0)
    training = lp.Full(net, "classification", prior_precision=3.0 * DECAY_RATIO).fit([(x, y)])
    mean, covariance = training.functional_posterior(x)
    probabilities = mean.softmax(-1)
    hessian = probabilities.diag_embed() - probabilities[..., None] * probabilities[..., None, :]
    moved = torch.linalg.solve(torch.eye(2).double() - covariance @ hessian, covariance)
    left = (mean + (moved @ (probabilities - nn.functional.one_hot(y, 2))[..., None])[..., 0]).flatten(0, 1)
    chosen = torch.linspace(0, 29, 20).round().long()
    wanted = nn.functional.cross_entropy(left[chosen], y.flatten()[chosen])
    assert float(posterior.tuning.losses[-1]) == pytest.approx(float(wanted), abs=1e-5)


def test_a_datum_that_determines_a_weight_is_displaced_in_first_order(monkeypatch):
    seen, check = [], Deletions.check

    def refusing(self, largest):
        seen.append(self.leverages)
        check(self, [torch.ones(1)] if self.leverages == "full" else largest)

    monkeypatch.setattr(Deletions, "check", refusing)
    net, x, y = linear_problem(classification=True)
    found = lp.KFAC(net, "classification").fit([(x, y)]).fit_prior_precision().tuning
    assert seen == ["full", "first_order", "first_order"] and found.losses.isfinite().all()


# -- where training ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("exact", [True, False])
def test_where_training_ended(share, exact, monkeypatch):
    """Of a network that is trained to its end, of one that is not, and with half of the data standing for all."""
    monkeypatch.setattr(auto, "FEW", 8 if exact else 7)
    monkeypatch.setattr(auto, "MANY", 8 if exact else 7)
    net, x, y = linear_problem(40, classification=True)
    data = [(x[:20], y[:20]), (x[20:], y[20:])]

    def end_of(net, share):
        posterior = lp.Diagonal(net, "classification", parameters="last_layer").fit(data)
        return training_end(posterior.laplace_model(), posterior.network, data, 40, share, torch.ones(()))

    done = end_of(net, 1.0)
    assert done.stationary and done.precision == pytest.approx(DECAY_RATIO, rel=1e-3)
    with torch.no_grad():
        net.weight += 3.0 * torch.randn(net.weight.shape, generator=torch.Generator().manual_seed(0))
    half = torch.linspace(0, 19, 10).round().long()
    chosen = torch.arange(40) if share == 1 else torch.cat([half, half + 20])
    found, all_data, dense = end_of(net, share), Dense(net, x, y), Dense(net, x[chosen], y[chosen])
    curvature = dense.curvature if exact else dense.blocks
    assert found.exact == exact and not found.stationary
    gradient, square = dense.gradient / share, dense.weights.square().sum()
    decay, loss = -DECAY_RATIO * gradient @ dense.weights, all_data.loss
    precision = decay.clamp(LOSS_RATIO * loss, torch.inf if exact else BLOCKS_RATIO * loss) / square
    inverse = dense.inverse(curvature / share, precision)
    decrement = gradient @ inverse @ gradient / (8 - precision * inverse.trace()).clamp_min(1.0)
    assert found.decrement == pytest.approx(float(decrement), rel=1e-5) and found.decrement > 1
    assert found.precision == pytest.approx(float(precision * decrement), rel=1e-5)
    (covariances,) = found.covariances(x, net(x).detach())
    wanted = all_data.jacobians @ dense.inverse(curvature / share, found.precision) @ all_data.jacobians.mT
    torch.testing.assert_close(covariances, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_weight_decay_is_found_where_adam_trained_with_it(decay):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 4, generator=generator) + 0.8 * y[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=decay / 200)
    for step in range(600):
        optimizer.zero_grad()
        batch = slice(50 * (step % 4), 50 * (step % 4 + 1))
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    found = training_end(posterior.laplace_model(), posterior.network, [(x, y)], 200, 1.0, torch.ones(()))
    assert found.stationary == bool(decay) and found.exact
    assert not decay or found.precision == pytest.approx(DECAY_RATIO * decay, rel=0.25)


def test_normalised_networks_are_displaced_in_first_order():
    _, x, y = linear_problem(classification=True)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    assert not training_end(posterior.laplace_model(), posterior.network, [(x, y)], 30, 1.0, torch.ones(())).exact


def test_weights_without_derivatives_are_not_displaced():
    """A last layer behind a function that has no backward pass."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round(decimals=2)

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("rounding has no derivative")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(Rounded.apply(torch.tanh(self.body(x))))

    _, x, y = linear_problem(classification=True)
    posterior = lp.KFAC(Net().double(), "classification", parameters="last_layer").fit([(x, y)])
    posterior.fit_prior_precision()
    assert "Only selected weights were displaced: rounding has no derivative" in posterior.tuning.why


def test_an_error_of_the_loader_is_not_taken_for_a_missing_derivative():
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
