"""Variances of many outputs from samples: what they estimate, how well, and when they are taken."""

from __future__ import annotations

import math

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.predictive import from_functional, linearized
from laplace_plus.predictive.linearized import is_sampled, n_samples_for

CLASSES = 70


def problem(n: int = 60):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return net, torch.randn(n, 4, dtype=torch.float64), torch.randint(CLASSES, (n,))


@pytest.fixture(scope="module")
def fitted():
    net, x, y = problem()
    return lp.KFAC(net, "classification", prior_precision=4.0).fit([(x, y)]), x[:3]


@pytest.fixture
def impatient(monkeypatch):
    """Few outputs are many."""
    monkeypatch.setattr(linearized, "MOST_EXACT", CLASSES - 1)


def test_samples_estimate_the_exact_variances(fitted):
    posterior, x = fitted
    n = 1000
    exact = posterior.functional_posterior(x, outputs="diagonal")
    found = posterior.functional_posterior(x, outputs="diagonal", n_samples=n, generator=generator())
    torch.testing.assert_close(found.mean, exact.mean)
    z = (found.covariance / exact.covariance - 1) / (2 / n) ** 0.5
    assert z.abs().max() < 5 and 0.5 < z.square().mean() < 2
    exact = posterior.functional_posterior(x, outputs="independent")
    found = posterior.functional_posterior(x, outputs="independent", n_samples=n, generator=generator())
    assert ((found.covariance - exact.covariance).abs() < 5 * jackknife(found.without_each())).all()
    some = posterior.functional_posterior(x, outputs=[3, 1])
    found = posterior.functional_posterior(x, outputs=[3, 1], n_samples=n, generator=generator())
    assert (found.covariance - some.covariance).abs().max() < 5 * some.covariance.max() * (2 / n) ** 0.5


def jackknife(estimates):
    n = len(estimates)
    return ((n - 1) / n * (estimates - estimates.mean(0)).square().sum(0)).sqrt()


@pytest.mark.parametrize(("link", "seeds"), [("gumbel", 2), ("probit", 25)])
def test_standard_errors_cover(fitted, impatient, link, seeds):
    posterior, x = fitted  # for so few examples draws are too dear
    posterior = lp.Diagonal(posterior.network.model, "classification", prior_precision=4.0).fit([problem()[1:]])
    exact = posterior.predictive(x, method="linearized", link=link).mean
    z = []
    for seed in range(seeds):
        found = posterior.predictive(x, link=link, n_samples=40, generator=generator(seed))
        z.append((found.mean - exact) / found.standard_error)
    z = torch.stack(z)
    assert 0.88 < (z.abs() < 2).double().mean() < 0.99
    assert 0.8 < z.square().mean().sqrt() < 1.3


def test_errors_of_averages_over_samples(fitted):
    posterior, x = fitted
    prediction = posterior.predictive(x, method="sampled", generator=generator())
    torch.testing.assert_close(prediction.standard_error, prediction.samples.std(0) / 10)
    assert not posterior.predictive(x, method="linearized").standard_error.any()


def test_exact_where_it_is_cheap(fitted):
    posterior, x = fitted
    prediction = posterior.predictive(x)
    torch.testing.assert_close(prediction.mean, posterior.predictive(x, method="linearized").mean, rtol=0, atol=0)
    assert prediction.without_each is None


@pytest.mark.parametrize("kind", [lp.KFAC, *[pytest.param(c, marks=pytest.mark.slow) for c in (lp.Diagonal, lp.Full)]])
def test_samples_where_they_are_quicker(impatient, kind):
    net, x, y = problem()
    posterior, x = kind(net, "classification").fit([(x, y)]), x[:4]
    few, exact = posterior.predictive(x), posterior.predictive(x, method="linearized")
    assert few.without_each is not None and exact.without_each is None
    assert len(few.without_each()) == linearized.MOST_SAMPLES
    assert (few.standard_error > 0).all()
    again, other = posterior.predictive(x), posterior.predictive(x, generator=generator(1))
    torch.testing.assert_close(few.mean, again.mean, rtol=0, atol=0)
    assert not torch.equal(few.mean, other.mean)
    torch.testing.assert_close(other.mean, posterior.predictive(x, generator=generator(1)).mean, rtol=0, atol=0)
    fewer = posterior.predictive(x, n_samples=5)
    assert len(fewer.without_each()) == 5
    assert (few.mean - exact.mean).norm() < (fewer.mean - exact.mean).norm()
    assert len(posterior.predictive(x, link="mc", n_samples=20).outputs) == 20
    alone = posterior.predictive(x, n_samples=1)
    assert (alone.standard_error == math.inf).all()


def test_exact_where_samples_would_not_do(fitted, impatient):
    posterior, x = fitted
    given = x.clone().requires_grad_()
    prediction = posterior.predictive(given, differentiable=True)
    assert prediction.without_each is None
    assert torch.autograd.grad(prediction.mean[:, 0].sum(), given)[0].any()
    assert posterior.predictive(x, joint=True).without_each is None
    net, inputs, y = problem()
    last = lp.KFAC(net, "classification", parameters="last_layer").fit([(inputs, y)])
    assert last.predictive(x).without_each is None
    best = net(x).topk(5).indices
    exact = posterior.functional_posterior(x, outputs=best)
    from_functional(posterior.likelihood, *exact)


def test_what_samples_refuse(fitted):
    posterior, x = fitted
    with pytest.raises(UnsupportedError, match="gradients"):
        posterior.functional_posterior(x, differentiable=True, n_samples=4)
    with pytest.raises(ConfigurationError, match="n_samples"):
        posterior.functional_posterior(x, n_samples=0)


def test_what_is_sampled():
    def chosen(n: int, outputs: int, joint: bool = False, hidden: bool = False, **choice: bool) -> bool:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, outputs)) if hidden else nn.Linear(2, outputs)
        return is_sampled(lp.Diagonal(net, "classification").network, torch.zeros(n, 2), joint=joint, **choice)

    assert chosen(64, 1000) and not chosen(64, 300) and not chosen(64, 1000, variances=True)
    assert chosen(64, 300, joint=True) and not chosen(2, 3, joint=True)
    assert not chosen(2, linearized.MOST_EXACT, hidden=True) and chosen(2, linearized.MOST_EXACT + 1, hidden=True)
    assert [n_samples_for(2**power) for power in (10, 21, 30)] == [100, 32, 5]
