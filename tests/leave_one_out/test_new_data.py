"""Both views of new data against explicit refits and formulas, and the scale that they choose together."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import pytest
import torch
from leave_one_out_problems import linear_problem
from problems import generator
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import laplace_plus as lp
from laplace_plus.tuning import new_data
from laplace_plus.tuning.new_data import Rows

pytestmark = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")


def test_left_out_values_are_those_of_refits_without_each_row():
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator())
    y = torch.stack([x[:, 0].sin(), x.prod(1)], 1)
    found = new_data.left_out(x, y, (0.5,), torch.tensor([0.3]))
    squares = torch.cdist(x, x).square()
    kernel = torch.exp(-squares / (2 * 0.5 * squares.median()))
    centred = y - y.mean(0)
    for n in range(12):
        others = torch.arange(12) != n
        ridge = kernel[others][:, others] + 0.3 * torch.eye(11)
        wanted = y.mean(0) + kernel[n, others] @ torch.linalg.solve(ridge, centred[others])
        torch.testing.assert_close(found[n], wanted)
    errors = {r: (new_data.left_out(x, y, (0.5,), torch.tensor([r])) - y).square().mean() for r in (0.01, 0.3, 9.0)}
    chosen = new_data.left_out(x, y, (0.5,), torch.tensor([*errors]))
    assert (chosen - y).square().mean() == min(errors.values())


def test_rate_of_wrong_labels_and_fresh_labels():
    """Of two clusters with one label in ten wrong; and Bayes' rule written out."""
    side = torch.arange(600) % 2
    x = 6.0 * side[:, None] + torch.randn(600, 2, generator=generator(), dtype=torch.float64)
    y = torch.where(torch.arange(600) % 20 < 2, 1 - side, side)
    truth = one_hot(y).double()
    scores = new_data.left_out_labels(x, truth)
    rate = new_data.rate_of_wrong(scores, truth)
    fresh = new_data.fresh_labels(scores, truth, rate)
    assert rate == pytest.approx(0.1, abs=0.04)
    assert torch.equal(fresh.argmax(1), side)  # wrong labels were found
    torch.testing.assert_close(fresh[range(600), side], torch.full((600,), 1 - rate).double(), rtol=0.1, atol=0)
    clean_scores = new_data.left_out_labels(x, one_hot(side).double())
    rate = new_data.rate_of_wrong(clean_scores, one_hot(side))
    clean = new_data.fresh_labels(clean_scores, one_hot(side).double(), rate)
    assert rate < 0.02 and (clean[range(600), side] > 0.98).all()
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]]).double()
    truth = torch.eye(3).double()[[0, 2]]
    rate = new_data.rate_of_wrong(scores, truth)
    fresh = new_data.fresh_labels(scores, truth, rate)
    factors = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
    q = min(((f * scores).softmax(1) for f in factors), key=lambda p: float(-(truth * p.log()).sum())).clamp_min(1e-4)
    q = q / q.sum(1, keepdim=True)
    assert rate == 0.45 or rate == pytest.approx(1.5 / 3)  # at most
    cleared = ((q - rate / 2) / (1 - 1.5 * rate)).clamp_min(1e-3)
    p = cleared / cleared.sum(1, keepdim=True) * torch.where(truth > 0, 1 - rate, rate / 2)
    p = p / p.sum(1, keepdim=True)
    torch.testing.assert_close(fresh, (1 - rate) * p + rate / 2 * (1 - p))


def test_features_are_those_of_shuffled_weights_before_the_last_layer():
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(body=nn.Linear(3, 6), act=nn.Tanh(), head=nn.Linear(6, 2))).double()
    before = copy.deepcopy(net.state_dict())
    network = lp.KFAC(net, "classification").network
    x = torch.randn(9, 3, dtype=torch.float64, generator=generator())
    found = new_data.unlearned_features(network, [x[:5], x[5:]])
    assert found.shape == (9, 2 * new_data.FEATURES)
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    draws = generator()
    body = [
        p.flatten()[torch.randperm(p.numel(), generator=draws)].view_as(p) for p in (net.body.weight, net.body.bias)
    ]
    torch.randperm(12, generator=draws)  # of the head's weight, which is drawn anew
    head = torch.randn((new_data.FEATURES, 6), generator=draws).double()
    wanted = torch.tanh(x @ body[0].T + body[1]) @ head.T
    wanted = (wanted - wanted.mean(0)).detach()
    torch.testing.assert_close(found[:, : new_data.FEATURES], wanted / wanted.square().sum(1).mean().sqrt())
    net.body.requires_grad_(False)  # has not learnt
    again = new_data.unlearned_features(network, [x])
    told = torch.tanh(net.body(x)).detach()
    centred = told - told.mean(0)
    projected = centred @ torch.linalg.pinv(centred) @ again
    torch.testing.assert_close(projected, again)


class Masked(nn.Module):
    """A classifier whose inputs allow some of four classes only."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.mask = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double(), mask

    def forward(self, x):
        logits = self.layers(x)
        return logits.masked_fill((x[:, :1] < 0) & (torch.arange(logits.shape[1]) == 3), self.mask)


def test_masked_logits_tell_nothing_however_large_they_are():
    x = torch.randn(60, 2, dtype=torch.float64, generator=generator())
    y = Masked(-1e4)(x).argmax(1)
    found = [
        lp.Full(Masked(mask), "classification").fit([(x, y)]).fit_prior_precision()
        for mask in (-1e4, -1e9, torch.finfo(torch.float64).min)
    ]
    for posterior in found:
        torch.testing.assert_close(posterior.tuning.losses, found[0].tuning.losses)
        torch.testing.assert_close(posterior.predictive(x).mean, found[0].predictive(x).mean)


def test_a_tied_head_has_features_of_its_own():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).mean(1))

    network = lp.Diagonal(Tied(), "classification").network
    tokens = torch.randint(7, (6, 4), generator=generator())
    assert new_data.unlearned_features(network, [tokens]).isfinite().all()


def test_rows_and_what_lies_around_them():
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10) % 2
    y[3] = -100
    net = nn.Linear(2, 2)
    posterior = lp.Diagonal(net, "classification").fit([(x[:4], y[:4]), (x[4:], y[4:])])
    rows = new_data.rows_of(posterior.network, posterior.likelihood, [(x[:4], y[:4]), (x[4:], y[4:])], 10)
    assert rows.are_points and rows.chosen(100).tolist() == [0, 1, 2, *range(4, 10)]
    parts, place = rows.around(torch.tensor([1, 2, 7]))
    assert torch.equal(torch.cat(parts), x[[1, 2, 7]]) and place.tolist() == [0, 1, 2]
    sequences = new_data.rows_of(posterior.network, posterior.likelihood, [(x.view(2, 5, 2), y.view(2, 5))], 2)
    assert not sequences.are_points and sequences.per_example == 5
    parts, place = sequences.around(sequences.chosen(4))
    assert torch.equal(parts[0], x.view(2, 5, 2)) and place.tolist() == sequences.chosen(4).tolist()
    kept, weights = new_data.distinct(torch.tensor([[2.0], [1.0], [2.0], [3.0], [1.0]]), torch.arange(5.0))
    assert kept.tolist() == [0, 1, 3] and weights.tolist() == [2, 5, 3]


@pytest.mark.parametrize("kind", ["classes", "several labels"])
def test_weights_of_rows_count_as_repeated_rows_in_both_views(kind):
    x = torch.randn(60, 3, dtype=torch.float64, generator=generator())
    y = (x[:, :2] > 0).double() if kind == "several labels" else (x[:, 0] > 0).long()
    likelihood = lp.Bernoulli if kind == "several labels" else lp.Categorical
    times = torch.arange(60) % 3 + 1
    again = torch.arange(60).repeat_interleave(times)
    torch.manual_seed(0)
    net, losses = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), []
    for own, rows in ((likelihood(weighted=True), (x, (y, times.double()))), (likelihood(), (x[again], y[again]))):
        found = lp.KFAC(net, own).fit([rows]).fit_prior_precision(lp.Auto(seen=True)).tuning
        losses.append((found.losses, found.between_losses))
    assert losses[0][0] is not None and losses[0][1] is not None
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)


def test_inputs_may_be_one_number_each():
    x = torch.linspace(-2, 2, 40, dtype=torch.float64).repeat_interleave(2)
    net = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    posterior = lp.KFAC(net, "classification").fit([(x, (x > 0).long())])
    rows = new_data.rows_of(posterior.network, posterior.likelihood, [(x, (x > 0).long())], 80)
    assert rows.weights[::2].tolist() == [2.0] * 40 and not rows.weights[1::2].any()


def test_midpoints_join_near_neighbours():
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator()) + 2.0**20
    weights = torch.ones(40)
    weights[::7] = 0
    rows = Rows([x[:30], x[30:]], torch.zeros(40, 2), torch.zeros(40), weights, 1, 30)
    chosen = rows.chosen(12)
    found = new_data.midpoints(rows, chosen)
    distances = torch.cdist(x, x).fill_diagonal_(math.inf).masked_fill(weights == 0, math.inf)
    for k, (row, point) in enumerate(zip(chosen.tolist(), found, strict=True)):
        other = distances[row].argsort()[k % 5]
        torch.testing.assert_close(point, (x[row] + x[other]) / 2, rtol=1e-12, atol=1e-6)


@pytest.mark.quick("soft", "ignored")
@pytest.mark.parametrize("kind", ["labels", "soft", "binary", "ignored"])
def test_losses_of_both_views_are_those_of_predictions(kind):
    net, x, y = linear_problem(40, classification=True)
    targets, likelihood = y, lp.Categorical()
    if kind == "soft":
        targets = 0.9 * one_hot(y, 2).double() + 0.05
    if kind == "binary":
        net, targets, likelihood = nn.Linear(3, 1).double(), y[:, None].double(), lp.Bernoulli()
    if kind == "ignored":
        x, targets = torch.cat([x, x[:10] + 9.0]), torch.cat([y, torch.full((10,), -100)])
    posterior = lp.Full(net, likelihood).fit([(x, targets)])
    posterior.fit_prior_precision(lp.Auto(link="probit"))
    found, one = posterior.tuning, copy.copy(posterior)
    rows = new_data.rows_of(one.network, likelihood, [(x, targets)], len(x))
    index = rows.chosen(100)
    features = new_data.unlearned_features(one.network, [x[index]])
    outputs = net(x[index]).detach()
    outputs = outputs if kind == "binary" else outputs - outputs.mean(1, keepdim=True)
    told = new_data.left_out_outputs(features, outputs)
    members = targets[index].double() if kind in ("soft", "binary") else one_hot(y, 2).double()
    probabilities = likelihood.class_probabilities
    scores = new_data.left_out_labels(x[index], members)
    sides = (
        [probabilities(one) for one in (scores, members, likelihood.distribution(net(x[index]).detach()).mean)]
        if kind == "binary"
        else [scores, members, outputs.softmax(1)]
    )
    wrong = float((sides[2].argmax(1) != sides[1].argmax(1)).double().mean())
    rate = max(new_data.rate_of_wrong(*sides[:2]) - wrong, 0.0)
    fresh = new_data.fresh_labels(*sides[:2], rate)
    assert found.wrong_labels == rate
    between = new_data.midpoints(rows, index)
    for place, scale in enumerate(found.scales):
        one.covariance_scale = scale
        covariance = one.functional_posterior(x[index]).covariance
        at = lp.predictive.from_functional(likelihood, told, covariance, link="probit")
        assert float(found.losses[place]) == pytest.approx(-float(at.log_prob(targets[index]).mean()), rel=1e-9)
        p = probabilities(one.predictive(between, link="probit").mean)
        assert float(found.between_losses[place]) == pytest.approx(
            float(-(fresh * p.log()).sum() / len(index)), rel=1e-9
        )
    assert len(found.losses) == len(found.scales) + 1 and found.losses[-1] == found.losses[-2]  # probit is asked for
    total = (found.losses + new_data.BETWEEN * found.between_losses) / (1 + new_data.BETWEEN)
    place = found.scales.index(posterior.covariance_scale)
    assert found.expected_gain == pytest.approx(float(total[-1] - total[place]), abs=1e-12)


def test_wide_scales_are_tried_when_asked_for():
    asked = []

    def loss(place):
        asked.append(place)
        return [3.0, 2.0, 0.3, 0.1, 0.12, 0.2][place]

    found = new_data.Losses(loss, 6)
    assert asked == [5, 4, 3, 2] and found.values.isinf().tolist() == [True, True, False, False, False, False]
    assert found[1] == 2.0 and found[1] == found.values[1] and asked == [5, 4, 3, 2, 1]
    assert found.values.argmin() == 3 and not new_data.Losses(loss, 6, math.inf).values.isinf().any()


def test_two_views_choose_a_common_scale():
    scales = (1.0, 0.1, 0.01, 1e-3, 1e-4)

    def losses(place):
        return torch.ones(6).double().index_fill(0, torch.tensor([place]), 0.0)

    def common(at, between):
        return new_data.common_scale([(1.0, losses(at)), (new_data.BETWEEN, losses(between))], scales)

    assert common(2, 2) == 2 and common(5, 5) == 5
    assert common(4, 0) == 1  # 10⁻⁴ counts once, 1 three times
    assert common(5, 1) == common(4, 1) == 2  # the network counts as the last scale
    assert new_data.common_scale([(1.0, losses(5))], scales) == 5 and new_data.common_scale([], scales) == 5


@pytest.mark.slow
def test_wrong_labels_that_were_learnt_by_heart_are_seen():
    """Where one label in seven is wrong, and the network fits them all."""
    x = torch.randn(400, 4, generator=generator())
    clean = (x[:, 0] + x[:, 1] > 0).long()
    y = torch.where(torch.rand(400, generator=generator(1)) < 1 / 7, 1 - clean, clean)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(250):
        optimizer.zero_grad()
        loss = cross_entropy(net(x[:200]), y[:200])
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    posterior = lp.KFAC(net, "classification").fit([(x[:200], y[:200])]).fit_prior_precision()
    found = posterior.tuning
    assert found.wrong_labels == pytest.approx(1 / 7, abs=0.06) and found.expected_gain > 0.5

    def loss_at(scale):
        one = copy.copy(posterior)
        one.covariance_scale, one.link = scale, None
        return float(-one.predictive(x[200:]).log_prob(y[200:]).mean())

    best = min(map(loss_at, found.scales))
    own = float(cross_entropy(net(x[200:]).detach(), y[200:]))
    assert loss_at(posterior.covariance_scale) < best + 0.05 < own - 0.5


def test_trust_is_by_the_whole_rate_of_wrong_labels(monkeypatch):
    """A network that mislabels data like those of wrong labels has not learnt these by heart; others tell no less."""
    side = torch.arange(200) % 2
    x = 6.0 * side[:, None] + torch.randn(200, 2, generator=generator(), dtype=torch.float64)
    y = torch.where(torch.arange(200) % 10 < 4, 1 - side, side)  # two in five
    net = nn.Linear(2, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
        net.bias.copy_(torch.tensor([6.0, -6.0]))
    found = lp.Full(net, "classification").fit([(x, y)]).fit_prior_precision(seen=True).tuning
    assert found.wrong_labels < 0.1 and found.between_losses is not None
    monkeypatch.setattr(new_data, "TOLD_LABELS", 1.2)
    found = lp.Full(net, "classification").fit([(x, y)]).fit_prior_precision(seen=True).tuning
    assert found.between_losses is None


def test_inputs_of_other_forms():
    """Tokens, positions and numbers have no view between, and what a network refuses is said."""
    net, x, y = linear_problem(classification=True)
    embedding = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 2)).double()
    positions = x.view(5, 6, 3), y.view(5, 6)
    found = lp.Diagonal(net, "classification").fit([positions]).fit_prior_precision().tuning
    assert found.between_losses is None and found.losses.isfinite().all()
    with pytest.warns(lp.errors.NoGainWarning, match="training data tell little"):  # each token has its own label
        found = lp.Diagonal(embedding, "classification").fit([(torch.arange(30), y)]).fit_prior_precision().tuning
    assert found.chosen == "network" and found.losses is found.between_losses is None

    class Codes(nn.Linear):
        def forward(self, x):
            if not torch.equal(x, x.round()):
                raise ValueError("codes are whole numbers")
            return super().forward(x)

    posterior = lp.Diagonal(Codes(3, 2).double(), "classification").fit([((4 * x).round(), y)])
    found = posterior.fit_prior_precision().tuning
    assert found.between_losses is None and "Midpoints were not compared: " in found.why
    counts = lp.Diagonal(nn.Linear(3, 1).double(), lp.Poisson()).fit([(x, (x[:, :1] > 0).double())])
    found = counts.fit_prior_precision().tuning
    assert found.between_losses is None and found.losses.isfinite().all() and found.expected_gain >= 0


def test_an_augmented_loader_is_drawn_from_again():
    class Noisy(list):
        def __iter__(self):
            return ((x + 0.1 * torch.randn(x.shape).to(x), y) for x, y in list.__iter__(self))

    net, x, y = linear_problem(classification=True)
    found = lp.KFAC(net, "classification").fit(Noisy([(x, y)])).fit_prior_precision().tuning
    assert found.losses.isfinite().all() and found.between_losses.isfinite().all()
    net, x, y = linear_problem()
    posterior = lp.KFAC(net, "regression").fit(Noisy([(x, y)]))
    with pytest.warns(UserWarning, match="augment"):
        posterior.fit_prior_precision()
    assert posterior.tuning.losses.isfinite().all() and posterior.noise_std > 0
