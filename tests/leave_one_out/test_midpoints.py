"""Losses at midpoints of neighbouring data, and the vote of neighbours, against dense formulas."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from leave_one_out_problems import linear_problem
from torch import nn

import laplace_plus as lp
from laplace_plus.tuning import auto, deletions

pytestmark = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")


@pytest.mark.parametrize("limit", [{}, {"KEPT": 30 * 30 / 2}])
@pytest.mark.parametrize(("cls", "prior"), [(lp.Full, 3.0), (lp.Diagonal, 3.0), (lp.Full, 0.1)])
def test_losses_at_midpoints_are_those_of_dense_formulas(cls, prior, limit, monkeypatch):
    """Of an over-confident network, and with every second example alone where not all are kept.

    Under the narrow prior of training leaving out finds no scale, and midpoints choose alone. Under the wide one it
    does, and they widen it.
    """
    for name, value in limit.items():
        monkeypatch.setattr(deletions, name, value)
    net, x, y = linear_problem(classification=True)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= 10
    data = [(x[:12], y[:12]), (x[12:], y[12:])]
    posterior = cls(net, "classification").fit(data)
    posterior.fit_prior_precision(lp.Auto(link="probit", training_prior_precision=prior))
    found = posterior.tuning
    if limit:
        chosen = torch.cat([torch.linspace(0, 11, 6), 12 + torch.linspace(0, 17, 9)]).round().long()
        x, y = x[chosen], y[chosen]
    ends = [
        (own, other)
        for own in range(len(x))
        for other in sorted(range(len(x)), key=lambda k: float((x[k] - x[own]).norm()))[1:6]
    ]
    between = torch.stack([(x[own] + x[other]) / 2 for own, other in ends])
    labels = torch.stack([y[own] for own, _ in ends])
    votes = torch.stack([y[[other for own, other in ends if own == datum]].mode().values for datum in range(len(x))])
    accuracy = float((votes == y).double().mean())
    assert found.neighbour_accuracy == pytest.approx(accuracy, rel=1e-12)
    losses, sure = [], []
    for scale in found.scales:
        one = copy.copy(posterior)
        one.covariance_scale = scale
        prediction = one.predictive(between, link="probit")
        losses.append(-prediction.log_prob(labels).mean())
        sure.append(prediction.mean.amax(-1).mean())
    torch.testing.assert_close(found.midpoint_losses, torch.stack(losses).detach(), rtol=1e-6, atol=1e-9)
    allowed = [bool(one >= min(accuracy, float(sure[-1]))) for one in sure]
    compared = [(found.losses + found.midpoint_losses)[k] / 2 if allowed[k] else math.inf for k in range(len(allowed))]
    left_out = [float(found.losses[k]) if allowed[k] else math.inf for k in range(len(allowed))]
    assert (left_out[-1] - min(left_out) > auto.NEGLIGIBLE) == (prior == 0.1)
    enough = min(left_out) + auto.SHARE * (left_out[-1] - min(left_out))
    best = compared.index(min(compared))
    assert best < max(k for k in range(len(allowed)) if left_out[k] <= enough)
    assert posterior.covariance_scale == found.scales[best]
    assert found.expected_gain == pytest.approx(float(compared[-1] - compared[best]), rel=1e-9)


@pytest.mark.parametrize("kind", ["labels", "binary", "soft"])
def test_no_scale_is_less_sure_at_midpoints_than_votes_of_neighbours_are_right(kind):
    """Of a network that errs at two of 60 data, in which neighbours agree: wider scales would have less loss."""
    x = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    side = (x[:, 0] > 0).long()
    x[:, 0] += 4 * side
    y = side.clone()
    y[:2] = 1 - y[:2]
    net = nn.Linear(2, 1 if kind == "binary" else 2).double()
    slope = torch.tensor([[4.0, 0.0]]).double()
    with torch.no_grad():
        net.weight.copy_(slope if kind == "binary" else torch.cat([-slope, slope]) / 2)
        net.bias.copy_(torch.tensor([-8.0]) if kind == "binary" else torch.tensor([4.0, -4.0]))
    targets = {"labels": y, "binary": y[:, None], "soft": nn.functional.one_hot(y).double()}[kind]
    posterior = lp.Full(net, "binary" if kind == "binary" else "classification", prior_precision=1e-3)
    posterior.fit([(x, targets)]).fit_prior_precision(lp.Auto(link="probit", training_prior_precision=1.0))
    found = posterior.tuning
    assert found.neighbour_accuracy == pytest.approx(58 / 60)
    both = found.losses + found.midpoint_losses
    place = found.scales.index(float(posterior.covariance_scale))
    assert 0 < place < len(found.scales) - 1 and both[place - 1] < both[place]
    near = torch.cdist(x, x).fill_diagonal_(torch.inf).topk(5, largest=False).indices
    between = ((x[:, None] + x[near]) / 2).flatten(0, 1)
    sure = []
    for scale in found.scales[place - 1 : place + 1]:
        posterior.covariance_scale = scale
        p = posterior.predictive(between, link="probit").mean
        sure.append(float(torch.maximum(p, 1 - p).amax(-1).mean()))
    assert sure[0] < found.neighbour_accuracy <= sure[1]


def test_neighbours_are_the_same_far_from_the_origin():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x - shift)

    x = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    found = []
    for shift in (0.0, 2.0**20):
        torch.manual_seed(0)
        posterior = lp.Full(Shifted(3, 2).double(), "classification").fit([(x + shift, y)])
        found.append(posterior.fit_prior_precision(lp.Auto(training_prior_precision=1.0)).tuning)
    assert found[0].neighbour_accuracy == found[1].neighbour_accuracy
    torch.testing.assert_close(found[0].midpoint_losses, found[1].midpoint_losses, rtol=1e-6, atol=1e-6)


def test_data_without_labels_have_no_say():
    net, x, y = linear_problem(classification=True)
    blank = torch.full((20,), -100)
    found = []
    for data in ([(x, y)], [(torch.cat([x, x[:20] + 0.01]), torch.cat([y, blank]))]):
        posterior = lp.Diagonal(net, lp.Categorical(ignore_index=-100)).fit(data)
        found.append(posterior.fit_prior_precision(lp.Auto(training_prior_precision=1.0)).tuning)
    assert found[0].neighbour_accuracy == found[1].neighbour_accuracy
    torch.testing.assert_close(found[0].midpoint_losses, found[1].midpoint_losses, rtol=1e-6, atol=0)


def test_where_there_are_no_midpoints_leaving_out_decides_alone():
    net, x, y = linear_problem(classification=True)
    tokens = torch.arange(30) % 3
    embedding = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).double()
    positions = x.view(5, 6, 3), y.view(5, 6)
    for network, data in ((embedding, [(tokens, y)]), (net, [positions]), (net, [(x[:5], y[:5])])):
        found = lp.Diagonal(network, "classification").fit(data).fit_prior_precision().tuning
        assert found.midpoint_losses is None and found.losses.isfinite().all()


def test_a_network_may_refuse_midpoints():
    class Codes(nn.Linear):
        def forward(self, x):
            if not torch.equal(x, x.round()):
                raise ValueError("codes are whole numbers")
            return super().forward(x)

    _, x, y = linear_problem(classification=True)
    posterior = lp.Diagonal(Codes(3, 2).double(), "classification").fit([((4 * x).round(), y)])
    found = posterior.fit_prior_precision().tuning
    assert found.midpoint_losses is None and "Midpoints were not compared: " in found.why
