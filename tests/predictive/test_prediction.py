"""Predictions: the law of total variance, entropies, log-probabilities, reproducibility."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributions as td
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import gaussian, generator, normal

from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LogDensity,
    Poisson,
)
from laplace_plus.predictive import from_functional, from_samples

LIKELIHOODS = [Categorical(), Bernoulli(), Gaussian(0.5), HeteroscedasticGaussian(), Poisson()]
EVERY = [(likelihood, link) for likelihood in LIKELIHOODS for link in likelihood.links]


class Cauchy(Likelihood):
    """Only a log-density."""

    def log_density(self, outputs, targets):
        return td.Cauchy(outputs, 0.5).log_prob(targets).sum(-1)


class Skellam(Likelihood):
    """Only a log-density (a normal one) and moments."""

    def log_density(self, outputs, targets):
        return td.Normal(outputs, 2.0).log_prob(targets).sum(-1)

    def moments(self, outputs):
        return outputs, torch.full_like(outputs, 4.0)


# The law of total variance --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(EVERY), st.integers(0, 1000), st.floats(-6, 3))
def test_variance_is_epistemic_plus_aleatoric(choice, seed, exponent):
    likelihood, link = choice
    scale = min(10.0**exponent, 2.0) if isinstance(likelihood, (Poisson, HeteroscedasticGaussian)) else 10.0**exponent
    mean, covariance = gaussian(3, size=4, seed=seed, scale=scale)
    prediction = from_functional(likelihood, mean, covariance, link=link, n_samples=20, generator=generator(seed))
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.variance, rtol=1e-12, atol=0.0)
    assert (prediction.epistemic >= 0).all() and (prediction.aleatoric >= 0).all()
    if isinstance(likelihood, (Categorical, Bernoulli)):
        p = prediction.mean
        torch.testing.assert_close(prediction.variance, p * (1 - p), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sampled_variance_is_that_of_the_mixture(likelihood):
    outputs = normal(30, 3, 4)
    prediction = from_samples(likelihood, outputs)
    conditional_mean, conditional_variance = likelihood.moments(outputs)
    torch.testing.assert_close(prediction.epistemic, conditional_mean.var(0, correction=0))
    torch.testing.assert_close(prediction.aleatoric, conditional_variance.mean(0))
    if not isinstance(likelihood, Categorical):
        torch.testing.assert_close(prediction.distribution.mean, prediction.mean)
        torch.testing.assert_close(prediction.distribution.variance, prediction.variance)
    else:
        torch.testing.assert_close(prediction.distribution.probs, prediction.mean)


def test_the_split_of_closed_form_links_is_that_of_monte_carlo():
    mean, covariance = gaussian(3, size=3, scale=3.0)
    sampled = from_functional(Categorical(), mean, covariance, link="mc", n_samples=100_000, generator=generator(1))
    for link in ("probit", "bridge"):
        closed = from_functional(Categorical(), mean, covariance, link=link, n_samples=100_000, generator=generator(2))
        share = closed.epistemic / closed.variance
        torch.testing.assert_close(share, sampled.epistemic / sampled.variance, rtol=0.03, atol=0.0)


def test_certainty_has_no_variance_to_split():
    prediction = from_functional(Categorical(), torch.tensor([[500.0, 0.0]]), torch.zeros(1, 2, 2))
    assert prediction.variance.tolist() == prediction.epistemic.tolist() == prediction.aleatoric.tolist() == [[0, 0]]


def test_without_functional_uncertainty_all_is_aleatoric():
    mean = normal(3, 4)
    for likelihood, link in EVERY:
        if link == "bridge":
            continue
        prediction = from_functional(likelihood, mean, torch.zeros(3, 4, 4, dtype=torch.float64), link=link)
        expected_mean, expected_variance = likelihood.moments(mean)
        torch.testing.assert_close(prediction.mean, expected_mean)
        torch.testing.assert_close(prediction.aleatoric, expected_variance)
        torch.testing.assert_close(prediction.epistemic, torch.zeros_like(expected_mean))
        assert (prediction.mutual_information() < 1e-12).all()


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_log_prob_of_classes_is_the_log_of_their_mean(link):
    mean, covariance = gaussian(4, size=3)
    y = torch.tensor([0, 2, 1, 1])
    prediction = from_functional(Categorical(), mean, covariance, link=link, generator=generator())
    expected = prediction.mean.gather(-1, y[:, None]).squeeze(-1).log()
    torch.testing.assert_close(prediction.log_prob(y), expected)
    torch.testing.assert_close(prediction.distribution.log_prob(y), expected)
    torch.testing.assert_close(prediction.distribution.probs, prediction.mean)


def test_log_prob_does_not_floor_small_probabilities():
    mean = torch.tensor([[0.0, 60.0]])
    for link in ("probit", "mc"):
        prediction = from_functional(Categorical(), mean, torch.zeros(1, 2, 2), link=link)
        torch.testing.assert_close(prediction.log_prob(torch.tensor([0])), torch.tensor([-60.0]))
        binary = from_functional(Bernoulli(), mean, torch.zeros(1, 2, 2), link=link)
        torch.testing.assert_close(binary.log_prob(torch.tensor([[1, 0]])), torch.tensor([math.log(0.5) - 60]))
        torch.testing.assert_close(binary.distribution.logits, mean)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_ignored_targets_contribute_nothing(link):
    mean, covariance = gaussian(2, 3, size=3)
    y = torch.tensor([[0, -100, 2], [-100, 1, 1]])
    for joint in (False, True):
        full = covariance
        if joint:
            full = torch.block_diag(*covariance.reshape(-1, 3, 3)).reshape(2, 3, 3, 2, 3, 3)
        prediction = from_functional(Categorical(), mean, full, link=link, generator=generator(), joint=joint)
        value = prediction.log_prob(y)
        if joint:
            kept = y != -100
            per_sample = prediction.samples.gather(-1, y.clamp_min(0)[..., None].expand(100, 2, 3, 1)).squeeze(-1).log()
            torch.testing.assert_close(value, per_sample[:, kept].sum(-1).logsumexp(0) - math.log(100))
        else:
            assert value[0, 1] == 0 and value[1, 0] == 0 and (value[y != -100] < 0).all()


def test_log_prob_of_exact_regression_uses_the_covariance():
    mean, covariance = gaussian(4, size=3)
    y = normal(4, 3, seed=5)
    prediction = from_functional(Gaussian(0.4), mean, covariance)
    reference = td.MultivariateNormal(mean, covariance + 0.16 * torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(prediction.log_prob(y), reference.log_prob(y))
    torch.testing.assert_close(prediction.entropy(), reference.entropy())
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    independent = from_functional(Gaussian(0.4), mean, variance)
    marginal = td.Normal(mean, (variance + 0.16).sqrt())
    torch.testing.assert_close(independent.log_prob(y), marginal.log_prob(y).sum(-1))
    torch.testing.assert_close(independent.entropy(), marginal.entropy().sum(-1))
    torch.testing.assert_close(prediction.distribution.log_prob(y), marginal.log_prob(y))


def test_tiny_noise_in_single_precision():
    covariance = torch.ones(1, 2, 2) * 1e4 + torch.diag(torch.tensor([1.0, 2.0]))
    prediction = from_functional(Gaussian(1e-2), torch.zeros(1, 2), covariance)
    reference = td.MultivariateNormal(torch.zeros(1, 2).double(), covariance.double() + 1e-4 * torch.eye(2))
    y = torch.tensor([[3.0, 2.0]])
    torch.testing.assert_close(prediction.log_prob(y).double(), reference.log_prob(y.double()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_log_prob_of_samples_is_the_mixtures(likelihood):
    outputs = normal(20, 3, 2, 4)
    y = likelihood.sample(outputs[0], generator=generator(1))
    prediction = from_samples(likelihood, outputs)
    log_density = likelihood.distribution(outputs).log_prob(y)
    log_density = log_density if isinstance(likelihood, Categorical) else log_density.sum(-1)
    torch.testing.assert_close(prediction.log_prob(y), log_density.exp().mean(0).log())


def test_a_vector_of_targets_is_understood_for_one_output():
    mean, y = normal(5, 1), normal(5, seed=1)
    for link in ("exact", "mc"):
        prediction = from_functional(Gaussian(0.4), mean, torch.ones_like(mean), link=link, generator=generator())
        assert prediction.log_prob(y).shape == (5,)
        torch.testing.assert_close(prediction.log_prob(y), prediction.log_prob(y[:, None]))
        torch.testing.assert_close(prediction.distribution.log_prob(y[:, None])[:, 0], prediction.log_prob(y))


# Entropies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
@pytest.mark.parametrize("link", ["probit", "mc"])
def test_entropy_and_information_of_classes(likelihood, link):
    mean, covariance = gaussian(4, size=3, scale=4.0)
    prediction = from_functional(likelihood, mean, covariance, link=link, n_samples=500, generator=generator())

    def entropy(p):
        if isinstance(likelihood, Categorical):
            return -(p * p.log()).sum(-1)
        return -(p * p.log() + (1 - p) * (1 - p).log()).sum(-1)

    torch.testing.assert_close(prediction.entropy(), entropy(prediction.mean))
    samples = prediction.samples
    expected = entropy(samples.mean(0)) - entropy(samples).mean(0)
    torch.testing.assert_close(prediction.mutual_information(), expected)
    assert (expected > 0.01).all()


def test_information_of_regression_in_closed_form():
    mean, covariance = gaussian(4, size=3)
    noise = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    prediction = from_functional(Gaussian(noise), mean, covariance)
    identity = torch.eye(3, dtype=torch.float64)
    expected = 0.5 * torch.logdet(identity + covariance / noise[:, None] / noise)
    torch.testing.assert_close(prediction.mutual_information(), expected)
    difference = prediction.entropy() - td.Normal(0.0, noise).entropy().sum()
    torch.testing.assert_close(prediction.mutual_information(), difference)
    single = from_functional(Gaussian(0.5), mean[:, :1], covariance[:, :1, :1])
    torch.testing.assert_close(single.mutual_information(), 0.5 * torch.log1p(covariance[:, 0, 0] / 0.25))


def test_sampled_entropy_of_regression_approaches_the_exact_one():
    mean, covariance = gaussian(40, size=2)
    exact = from_functional(Gaussian(0.7), mean, covariance)
    sampled = from_functional(Gaussian(0.7), mean, covariance, link="mc", n_samples=1000, generator=generator())
    # 128 draws for each of the forty rows.
    assert abs(float((sampled.entropy() - exact.entropy()).mean())) < 0.08
    error = sampled.mutual_information() - exact.mutual_information()
    assert abs(float(error.mean())) < 0.08 and (sampled.mutual_information() >= 0).all()


def test_sampled_entropy_of_counts():
    rate = torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    outputs = rate.log()[None, :, None].expand(100, 3, 1)  # no uncertainty: the entropy is a Poisson's
    counts = torch.arange(200, dtype=torch.float64)
    log_p = td.Poisson(rate[:, None]).log_prob(counts)
    expected = -(log_p.exp() * log_p).sum(-1)
    spread = (log_p.exp() * (log_p + expected[:, None]).square()).sum(-1).sqrt()
    prediction = from_samples(Poisson(), outputs, generator=generator())
    assert ((prediction.entropy() - expected).abs() < 4 * spread / 10).all()
    assert (prediction.mutual_information() < 1e-10).all()


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "link"), EVERY)
def test_the_generator_decides_everything_in_any_order(likelihood, link):
    mean, covariance = gaussian(3, size=4)
    state = torch.random.get_rng_state()
    first, again, other = (
        from_functional(likelihood, mean, covariance, link=link, generator=generator(seed)) for seed in (1, 1, 2)
    )
    names = ["samples", "mean", "epistemic", "entropy", "mutual_information"]

    def ask(prediction, name):
        value = getattr(prediction, name)
        return value() if callable(value) else value

    values = {name: ask(first, name) for name in names}
    for name in reversed(names):
        assert torch.equal(ask(again, name), values[name])
    assert not torch.equal(other.samples, first.samples)
    assert torch.equal(state, torch.random.get_rng_state())


def test_without_a_generator_the_global_seed_decides():
    mean, covariance = gaussian(3, size=4)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(from_functional(Categorical(), mean, covariance, link="mc").mean)
    assert torch.equal(*results)


# A likelihood of one's own --------------------------------------------------------------------------------------------


def test_a_log_density_alone_gives_mean_epistemic_and_log_prob():
    outputs, y = normal(50, 3, 2), normal(3, 2, seed=1)
    for likelihood in (Cauchy(), LogDensity(Cauchy().log_density)):
        prediction = from_samples(likelihood, outputs)
        torch.testing.assert_close(prediction.mean, outputs.mean(0))
        torch.testing.assert_close(prediction.epistemic, outputs.var(0, correction=0))
        expected = td.Cauchy(outputs, 0.5).log_prob(y).sum(-1).exp().mean(0).log()
        torch.testing.assert_close(prediction.log_prob(y), expected)
        for name in ("variance", "aleatoric", "distribution"):
            with pytest.raises(UnsupportedError, match=r"distribution\(outputs\)"):
                getattr(prediction, name)
        for name in ("entropy", "mutual_information"):
            with pytest.raises(UnsupportedError, match=r"distribution\(outputs\)"):
                getattr(prediction, name)()


def test_moments_alone_give_a_variance():
    outputs = normal(50, 3, 2)
    prediction = from_samples(Skellam(), outputs)
    torch.testing.assert_close(prediction.variance, outputs.var(0, correction=0) + 4.0)
    with pytest.raises(UnsupportedError, match=r"distribution\(outputs\)"):
        prediction.entropy()


# As an object ---------------------------------------------------------------------------------------------------------


def test_a_prediction_can_be_copied_and_pickled():
    prediction = from_functional(Categorical(), *gaussian(3, size=4), generator=generator())
    for twin in (copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction))):
        assert torch.equal(twin.epistemic, prediction.epistemic)


def test_a_prediction_cannot_be_changed_and_prints_briefly():
    prediction = from_functional(Gaussian(0.5), torch.zeros(3, 1), torch.ones(3, 1))
    with pytest.raises(AttributeError):
        prediction.link = "mc"
    assert repr(prediction) == "Prediction(Gaussian(noise_std=0.5), outputs=[3, 1], link='exact', joint=False)"
