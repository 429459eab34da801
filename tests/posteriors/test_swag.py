"""SWAG against its formulas, a closed form of SGD, and batch normalisation written out; float64."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import generator
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import DataError, LaplacePlusError, NonFiniteError
from laplace_plus.testing import PosteriorConformance

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(24) % 3
DATA = list(zip(X.split(7), Y.split(7), strict=True))


def net(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def walked(model, steps, seed=0, **options):
    """A posterior with snapshots of a random walk, and these, ``[T, P]``."""
    posterior, source, snapshots = lp.SWAG(model, "classification", **options), generator(seed), []
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=source).double())
        assert posterior.collect(model) is posterior
        snapshots.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return posterior, torch.stack(snapshots)


class TestSWAG(PosteriorConformance):
    """With batch normalisation."""

    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.SWAG(model, likelihood, n_snapshots=4, rank=3, n_members=6, **options)


class TestCollected(PosteriorConformance):
    """From snapshots, without batch normalisation: one pass."""

    def network(self, outputs):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, outputs)).double().train()

    def make(self, model, likelihood, **options):
        posterior, other = lp.SWAG(model, likelihood, rank=3, **options), copy.deepcopy(model)
        for number in range(5):
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(0.01 * (number + 1) ** 2 * p.cos())
            posterior.collect(other)
        return posterior


def covariance(posterior):
    path = posterior.state.path.deviations
    low = path.T @ path * posterior.scale / max(1, len(path) - 1)
    return low + torch.diag(posterior.variance() - low.diagonal())


@pytest.mark.diagonal
@pytest.mark.parametrize("rank", [0, 2, 4, 20])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_covariance_is_that_of_the_paper(rank, scale):
    model = net()
    posterior, path = walked(model, 6, rank=rank, scale=scale)
    posterior.fit(DATA)
    running = torch.stack([path[: t + 1].mean(0) for t in range(len(path))])
    deviations = (path - running)[max(0, len(path) - rank) :] if rank else path[:0]
    wanted = torch.diag(path.square().mean(0) - path.mean(0).square())
    if rank:
        wanted = wanted + deviations.T @ deviations / (len(deviations) - 1)
    wanted = wanted * (scale or (0.5 if rank else 1.0))
    assert posterior.state.path.count == 6
    assert_close(posterior.mean, path.mean(0))
    assert_close(covariance(posterior), wanted, rtol=1e-8, atol=1e-12)
    assert_close(posterior.variance(), wanted.diagonal(), rtol=1e-8, atol=1e-12)
    n = 20_000
    draws = posterior.sample(n, generator=generator())
    spread = wanted.diagonal()
    errors = ((spread[:, None] * spread + wanted.square()) / n).sqrt()  # of covariances of normal samples
    assert ((draws.T.cov() - wanted).abs() <= 5.5 * errors).all()
    assert ((draws.mean(0) - path.mean(0)).abs() <= 5 * (spread / n).sqrt()).all()


def test_sgd_on_a_quadratic_has_the_stationary_variance():
    # θ ← θ − η (a θ − ξ) with ξ ~ N(0, c): an autoregression with the variance η c / (a (2 − η a)).
    a, c, rate, steps = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([1.0, 2.0, 0.5]).double(), 0.15, 500

    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(3).double())

        def forward(self, x):
            return x @ self.theta[:, None]

    model, source = Quadratic(), generator()
    posterior = lp.SWAG(model, "regression", rank=0)
    optimizer, noise = torch.optim.SGD(model.parameters(), lr=rate), torch.randn(steps, 3, generator=source).double()
    for step in range(steps):
        optimizer.zero_grad()
        theta = model.theta
        ((a * theta.square()).sum() / 2 - (noise[step] * c.sqrt() * theta).sum()).backward()
        optimizer.step()
        posterior.collect()
    wanted = rate * c / (a * (2 - rate * a))
    found = posterior.fit([(X, X[:, :1])]).variance()
    r = 1 - rate * a  # squares of an autoregression with coefficient r have one of r²
    error = wanted * (2 * (1 + r**2) / (1 - r**2) / steps).sqrt()
    assert ((found - wanted).abs() <= 4 * error + 2 * wanted / (steps * rate * a)).all()


def test_fit_alone_follows_sgd():
    model = net()
    model.eval()
    options = {"learning_rate": 0.1, "n_snapshots": 4, "momentum": 0.5, "weight_decay": 0.01}
    posterior = lp.SWAG(copy.deepcopy(model[:2]), "regression", rank=2, **options)  # no dropout
    targets = X @ torch.randn(3, 4, generator=generator()).double()
    data = [(X[:12], targets[:12]), (X[12:], targets[12:])]
    posterior.fit(data)
    other = copy.deepcopy(model[:2])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    hand = lp.SWAG(other, "regression", rank=2)
    for _ in range(4):
        for x, y in data:
            optimizer.zero_grad()
            ((other(x) - y).square().sum(1) / 2).mean().backward()
            optimizer.step()
        hand.collect(other)
    hand.fit(data)
    assert_close(posterior.mean, hand.mean)
    assert_close(covariance(posterior), covariance(hand))


# -- batch normalisation ---------------------------------------------------------------------------------------------


def test_sampled_networks_have_statistics_of_their_own():
    model = net(norm=True)
    posterior, _ = walked(model, 4, rank=2, n_members=5)
    before = lp.testing.snapshot(model)
    posterior.fit(DATA, generator=generator())
    found = torch.stack(list(posterior.sampled_outputs(X[:4], 5, generator(3))))
    assert len(list(posterior.sampled_outputs(X[:4], 50, None))) == 5
    lp.testing.assert_untouched(model, before)
    wanted = []
    for seed in posterior.state.seeds:
        vector = posterior.sample(1, generator=generator(seed))[0]
        other = copy.deepcopy(model).eval()
        nn.utils.vector_to_parameters(vector, other.parameters())
        inputs = other[0](X).detach()
        other[1].running_mean.copy_(torch.stack([b.mean(0) * len(b) for b in inputs.split(7)]).sum(0) / 24)
        other[1].running_var.copy_(torch.stack([b.var(0) * len(b) for b in inputs.split(7)]).sum(0) / 24)
        wanted.append(other(X[:4]).detach())
    order = torch.randperm(5, generator=generator(3))
    assert_close(found, torch.stack(wanted)[order])
    assert not torch.allclose(found[0], found[1])


def test_single_examples_have_no_statistics():
    model = net(norm=True)
    posterior, _ = walked(model, 3)
    with pytest.raises(DataError, match="two examples"):
        posterior.fit([(X[:1], Y[:1]), (X[1:2], Y[1:2])])
    with pytest.raises(DataError, match="several times"):
        posterior.fit(iter(DATA))
    posterior.fit([(X[:1], Y[:1]), (X[1:], Y[1:])])


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshots_go_on_after_loading(tmp_path):
    model = net(norm=True)
    posterior, _ = walked(model, 4, rank=2, n_members=3)
    posterior.fit(DATA, generator=generator())
    posterior.save(tmp_path / "swag")
    loaded = lp.load(tmp_path / "swag", model)
    draws = [p.predictive(X, generator=generator(1)).mean for p in (posterior, loaded)]
    assert_close(draws[0], draws[1], rtol=1e-12, atol=0)
    for one in (posterior, loaded):
        one.collect().fit(DATA, generator=generator(2))
    assert_close(covariance(loaded), covariance(posterior))
    assert loaded.state.path.count == 5
    trained = lp.SWAG(net(), "classification", n_snapshots=2).fit(DATA)
    trained.save(tmp_path / "trained")
    with pytest.raises(LaplacePlusError, match="number of snapshots"):
        lp.load(tmp_path / "trained", trained.model).collect().fit(DATA)


def test_some_parameters_and_dict_batches():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net(norm=True)

        def forward(self, values):
            return self.inner(values)

    model = Named().train()
    data = [{"values": x, "labels": y} for x, y in DATA]
    posterior = lp.SWAG(model, "classification", parameters=["inner.0", "inner.4.bias"], n_snapshots=3, n_members=4)
    posterior.fit(data, generator=generator())
    assert posterior.parameter_names == ("inner.0.weight", "inner.0.bias", "inner.4.bias")
    assert posterior.predictive(values=X[:5]).mean.shape == (5, 3)
    assert model.training


BAD = {
    "rank": (lambda: lp.SWAG(net(), "classification", rank=-1), "rank"),
    "scale": (lambda: lp.SWAG(net(), "classification", scale=0.0), "scale"),
    "members": (lambda: lp.SWAG(net(), "classification", n_members=0), "n_members"),
    "snapshots": (lambda: lp.SWAG(net(), "classification", n_snapshots=1), "n_snapshots"),
    "rate": (lambda: lp.SWAG(net(), "classification", learning_rate=0.0), "learning_rate"),
    "one snapshot": (lambda: lp.SWAG(net(), "classification").collect().fit(DATA), "number of snapshots"),
    "other network": (lambda: lp.SWAG(net(), "classification").collect(nn.Linear(3, 3)), "belongs to no parameter"),
    "no network": (lambda: lp.SWAG(net(), "classification").collect("net"), "not a module"),
    "ignored": (lambda: lp.SWAG(net(), "classification").fit([(X, torch.full_like(Y, -100))]), "is zero"),
    "update": (lambda: lp.SWAG(net(), "classification", n_snapshots=2).fit(DATA).update(DATA), "cannot be updated"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    call, said = BAD[case]
    with pytest.raises(LaplacePlusError, match=said):
        call()


def test_training_that_diverges_or_cannot_start():
    with pytest.raises(NonFiniteError, match="SWAG diverged"):
        lp.SWAG(nn.Linear(3, 3).double(), "regression", learning_rate=1e9, weight_decay=1.0).fit([(X, X)])

    model = net()
    posterior = lp.SWAG(model, "classification")
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        posterior.collect()
