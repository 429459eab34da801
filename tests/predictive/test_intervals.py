"""Quantiles and intervals of predictions of numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as td
from problems import generator, normal
from torch.autograd import gradcheck

from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from laplace_plus.predictive import from_functional, from_samples

LEVELS = torch.tensor([0.01, 0.3, 0.5, 0.9], dtype=torch.float64)


def functional(*lead, size=2, seed=0):
    root = normal(*lead, size, size, seed=seed + 1)
    return normal(*lead, size, seed=seed), root @ root.mT


def exact(joint=False):
    mean, covariance = functional(3)
    if joint:
        root = normal(6, 6, seed=2)
        covariance = (root @ root.mT).reshape(3, 2, 3, 2)
    return from_functional(Gaussian(torch.tensor([0.5, 2.0])), mean, covariance, joint=joint)


@pytest.mark.parametrize("joint", [False, True])
def test_quantiles_of_exact_regression_are_those_of_the_normal(joint):
    prediction = exact(joint)
    expected = td.Normal(prediction.mean, prediction.variance.sqrt()).icdf(LEVELS[:, None, None])
    torch.testing.assert_close(prediction.quantile(LEVELS), expected)
    torch.testing.assert_close(prediction.quantile(0.3), expected[1])
    torch.testing.assert_close(prediction.std, prediction.variance.sqrt())


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), HeteroscedasticGaussian()], ids=["one noise", "noise predicted"])
@pytest.mark.parametrize("lead", [(4,), (2, 3)])
def test_quantiles_of_samples_invert_the_mixture(likelihood, lead):
    outputs = normal(7, *lead, 2)
    prediction = from_samples(likelihood, outputs)
    found = prediction.quantile(LEVELS)
    size = likelihood.n_targets(2)
    assert found.shape == (4, *lead, size)
    components = likelihood.distribution(outputs)
    reached = components.cdf(found[:, None]).mean(1)
    torch.testing.assert_close(reached, LEVELS.reshape(4, *[1] * (len(lead) + 1)).expand_as(reached))


def test_monte_carlo_approaches_the_exact_quantiles():
    mean, covariance = functional(2)
    options = {"n_samples": 20_000, "generator": generator()}
    sampled = from_functional(Gaussian(0.5), mean, covariance, link="mc", **options)
    exactly = from_functional(Gaussian(0.5), mean, covariance)
    density = exactly.distribution.log_prob(exactly.quantile(LEVELS)).exp()
    error = (LEVELS * (1 - LEVELS) / 20_000).sqrt()[:, None, None] / density  # of an empirical quantile, an upper bound
    assert ((sampled.quantile(LEVELS) - exactly.quantile(LEVELS)).abs() < 4 * error).all()


def test_intervals_have_equal_tails_and_cover_their_level():
    prediction = exact()
    low, high = prediction.interval(0.8)
    torch.testing.assert_close((low + high) / 2, prediction.mean)
    drawn = prediction.distribution.sample((20_000,))
    covered = ((drawn > low) & (drawn < high)).double().mean(0)
    assert ((covered - 0.8).abs() < 4 * (0.16 / 20_000) ** 0.5).all()
    several = prediction.interval(torch.tensor([0.5, 0.8]))
    torch.testing.assert_close(several[0][1], low)
    assert (several[1][0] < high).all()


def test_far_apart_modes():
    """Between two narrow modes the bisection ends at the right one."""
    outputs = torch.tensor([[[-1e3]], [[-1e3]], [[1e3]]])
    found = from_samples(Gaussian(1e-2), outputs).quantile(torch.tensor([1 / 3, 0.6, 0.7, 5 / 6]))
    torch.testing.assert_close(found.flatten()[1:], torch.tensor([-1e3, 1e3, 1e3]), atol=0.1, rtol=0)
    assert found.dtype == torch.float32


def test_tails_in_single_precision():
    prediction = from_functional(Gaussian(1.0), torch.zeros(1, 1), torch.zeros(1, 1, 1))
    assert prediction.quantile(1e-9).item() == pytest.approx(-5.9978, abs=1e-3)
    assert prediction.quantile(1 - 1e-9).item() == pytest.approx(5.9978, abs=1e-3)


def test_quantiles_are_differentiable():
    mean, covariance = functional(2)

    def closed(mean, root):
        return from_functional(Gaussian(0.5), mean, root @ root.mT + torch.eye(2).double()).quantile(0.9)

    assert gradcheck(closed, (mean.requires_grad_(), covariance.requires_grad_()))
    outputs = normal(5, 2, 2).requires_grad_()
    assert gradcheck(lambda f: from_samples(Gaussian(0.5), f).quantile(LEVELS), (outputs,))
    assert gradcheck(lambda f: from_samples(HeteroscedasticGaussian(), f).interval(0.9), (outputs,))


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, float("nan"), True, torch.ones(2, 2) / 2, torch.zeros(0)])
def test_wrong_levels_are_refused(level):
    for ask in (exact().quantile, exact().interval):
        with pytest.raises(ConfigurationError, match="out of range|shape"):
            ask(level)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_classes_have_none_and_the_error_says_what_there_is(likelihood):
    prediction = from_functional(likelihood, *functional(3))
    for ask in (lambda: prediction.std, lambda: prediction.quantile(0.5), prediction.interval):
        with pytest.raises(UnsupportedError, match=r"prediction.epistemic.sqrt\(\)"):
            ask()
    assert prediction.epistemic.sqrt().shape == prediction.samples.quantile(0.5, dim=0).shape


@pytest.mark.parametrize("link", Poisson.links)
def test_counts_have_a_deviation_but_no_quantile_function(link):
    prediction = from_functional(Poisson(), *functional(3), link=link, generator=generator())
    torch.testing.assert_close(prediction.std, prediction.variance.sqrt())
    with pytest.raises(UnsupportedError, match=r"sample\(\(1000,\)\).quantile\(q, dim=0\)"):
        prediction.quantile(0.5)
    assert prediction.distribution.sample((1000,)).quantile(0.5, dim=0).shape == (3, 2)
