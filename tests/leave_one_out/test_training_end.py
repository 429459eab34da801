"""Where training ended: against dense formulas, and what it says where weights have no derivatives."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from leave_one_out_problems import Dense, linear_problem
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import NoGainWarning
from laplace_plus.network.batches import Batch
from laplace_plus.tuning import auto as end_module
from laplace_plus.tuning.auto import BLOCKS_RATIO, DECAY_RATIO, LOSS_RATIO, training_end
from laplace_plus.tuning.deletions import thinned


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("exact", [True, False])
def test_where_training_ended(share, exact, monkeypatch):
    """Of a network that is trained to its end, of one that is not, and with half of the data standing for all."""
    monkeypatch.setattr(end_module, "FEW", 8 if exact else 7)
    monkeypatch.setattr(end_module, "MANY", 8 if exact else 7)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
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
