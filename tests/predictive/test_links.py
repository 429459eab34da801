"""Links against quadrature, large samples and formulas written out again, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributions as td
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import gaussian, generator, normal

from laplace_plus.errors import ConfigurationError, NonFiniteError, NotPositiveDefiniteError
from laplace_plus.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogDensity,
    Poisson,
)
from laplace_plus.predictive import from_functional, from_samples

LIKELIHOODS = [Categorical(), Bernoulli(), Gaussian(0.5), HeteroscedasticGaussian(), Poisson()]
CLOSED = [(likelihood, link) for likelihood in LIKELIHOODS for link in likelihood.links if link != "mc"]


def expectation(function, mean, variance):
    """``E[function(f)]`` under ``N(mean, variance)`` by quadrature on a fine grid, elementwise."""
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    return (function(mean[..., None] + variance[..., None].sqrt() * grid) * weight).sum(-1)


# Values ---------------------------------------------------------------------------------------------------------------


def test_probit_formula():
    mean, covariance = gaussian(5, size=3, scale=4.0)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    scaled = mean / torch.sqrt(1 + math.pi * variance / 8)
    torch.testing.assert_close(from_functional(Categorical(), mean, covariance, link="probit").mean, scaled.softmax(-1))
    torch.testing.assert_close(from_functional(Bernoulli(), mean, covariance, link="probit").mean, scaled.sigmoid())


def test_binary_probit_is_near_the_integral():
    mean = torch.linspace(-6, 6, 25, dtype=torch.float64)[:, None]
    for variance in (0.1, 1.0, 10.0):
        spread = torch.full_like(mean, variance)
        truth = expectation(torch.sigmoid, mean, spread)
        assert (from_functional(Bernoulli(), mean, spread, link="probit").mean - truth).abs().max() < 0.02


def laplace_of_dirichlet(alpha):
    """MacKay (1998): the Laplace approximation of ``Dirichlet(alpha)`` in the softmax basis."""
    n, inverse = len(alpha), 1 / alpha
    covariance = torch.diag(inverse) - (inverse[:, None] + inverse[None]) / n + inverse.sum() / n**2
    return (alpha.log() - alpha.log().mean())[None], covariance[None]


def test_bridge_is_near_the_integral_of_a_dirichlets_gaussian():
    alpha = torch.tensor([30.0, 200.0, 50.0, 120.0], dtype=torch.float64)
    mean, covariance = laplace_of_dirichlet(alpha)
    truth = from_functional(Categorical(), mean, covariance, link="mc", n_samples=50_000, generator=generator()).mean
    assert (from_functional(Categorical(), mean, covariance, link="bridge").mean - truth).abs().max() < 0.004


@pytest.mark.parametrize("size", [2, 3, 7])
def test_bridge_formula(size):
    mean, covariance = gaussian(5, size=size, scale=2.0)
    ones = torch.ones(size, dtype=torch.float64)
    alphas = []
    for m, v in zip(mean, covariance, strict=True):
        total = ones @ v @ ones
        centred = m - v @ ones * (m.sum() / total)
        projected = v - torch.outer(v @ ones, v @ ones) / total
        assert abs(float(centred.sum())) < 1e-12 and float((projected @ ones).abs().max()) < 1e-12
        tail = torch.exp(-centred).sum()
        alphas.append((1 - 2 / size + torch.exp(centred) * tail / size**2) / projected.diagonal())
    alpha = torch.stack(alphas)
    p = from_functional(Categorical(), mean, covariance, link="bridge").mean
    torch.testing.assert_close(p, alpha / alpha.sum(-1, keepdim=True), rtol=1e-10, atol=1e-12)


def test_bridge_inverts_the_laplace_approximation_of_a_dirichlet():
    alpha = torch.tensor([0.7, 2.0, 5.0, 1.3], dtype=torch.float64)
    p = from_functional(Categorical(), *laplace_of_dirichlet(alpha), link="bridge").mean[0]
    torch.testing.assert_close(p, alpha / alpha.sum(), rtol=1e-10, atol=1e-12)


def test_bridge_does_not_overflow():
    mean = torch.tensor([[800.0, 0.0, -800.0], [0.0, 0.0, 0.0]])
    covariance = torch.stack([torch.eye(3), torch.zeros(3, 3)])
    p = from_functional(Categorical(), mean, covariance, link="bridge").mean
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_monte_carlo_is_the_integral():
    n = 200_000
    mean, covariance = gaussian(3, size=1, scale=3.0)
    truth = expectation(torch.sigmoid, mean[:, 0], covariance[:, 0, 0])
    binary = from_functional(Bernoulli(), mean, covariance, link="mc", n_samples=n, generator=generator())
    error = 4 * (binary.epistemic[:, 0] / n).sqrt()
    assert ((binary.mean[:, 0] - truth).abs() <= error).all()
    # Two classes with logits (f, 0) are one binary question.
    pair = torch.cat([mean, torch.zeros_like(mean)], -1)
    wide = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
    classes = from_functional(Categorical(), pair, wide, link="mc", n_samples=n, generator=generator(1))
    assert ((classes.mean[:, 0] - truth).abs() <= error).all()


def test_gaussian_is_exact():
    mean, covariance = gaussian(4, size=3)
    noise = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    prediction = from_functional(Gaussian(noise), mean, covariance)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert prediction.link == "exact"
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.epistemic, variance)
    torch.testing.assert_close(prediction.aleatoric, (noise**2).expand(4, 3))
    torch.testing.assert_close(prediction.variance, variance + noise**2)
    torch.testing.assert_close(prediction.distribution.variance, prediction.variance)


def test_poisson_moments_are_exact():
    mean, covariance = gaussian(4, size=2, scale=0.5)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    prediction = from_functional(Poisson(), mean, covariance)
    rate = expectation(torch.exp, mean, variance)
    torch.testing.assert_close(prediction.mean, rate, rtol=1e-9, atol=0)
    torch.testing.assert_close(prediction.aleatoric, rate, rtol=1e-9, atol=0)
    square = expectation(lambda f: torch.exp(2 * f), mean, variance)
    torch.testing.assert_close(prediction.epistemic, square - rate**2, rtol=1e-8, atol=0)
    torch.testing.assert_close(prediction.distribution.mean, prediction.mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(prediction.distribution.variance, prediction.variance, rtol=1e-9, atol=0)


def test_heteroscedastic_moments_are_exact():
    mean, covariance = gaussian(4, size=4, scale=0.8)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    prediction = from_functional(HeteroscedasticGaussian(), mean, covariance)
    noise = expectation(torch.exp, mean[:, 2:], variance[:, 2:])
    torch.testing.assert_close(prediction.mean, mean[:, :2])
    torch.testing.assert_close(prediction.epistemic, variance[:, :2])
    torch.testing.assert_close(prediction.aleatoric, noise, rtol=1e-9, atol=0)
    torch.testing.assert_close(prediction.distribution.variance, prediction.variance)


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Poisson(), HeteroscedasticGaussian()])
def test_monte_carlo_agrees_with_the_exact_link(likelihood):
    mean, covariance = gaussian(3, size=2, scale=0.3)
    exact = from_functional(likelihood, mean, covariance, link="exact")
    sampled = from_functional(likelihood, mean, covariance, link="mc", n_samples=100_000, generator=generator())
    torch.testing.assert_close(sampled.mean, exact.mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(sampled.epistemic, exact.epistemic, rtol=0.05, atol=0.0)
    torch.testing.assert_close(sampled.aleatoric, exact.aleatoric, rtol=0.03, atol=0.0)


# Shapes, dtypes -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 2).map(lambda half: 2 * half),
    st.sampled_from([(likelihood, link) for likelihood in LIKELIHOODS for link in likelihood.links]),
    st.integers(0, 50),
)
def test_shapes(lead, size, choice, seed):
    likelihood, link = choice
    mean, covariance = gaussian(*lead, size=size, seed=seed, scale=0.5)
    prediction = from_functional(likelihood, mean, covariance, link=link, n_samples=5, generator=generator(seed))
    entries = size // 2 if isinstance(likelihood, HeteroscedasticGaussian) else size
    assert prediction.mean.shape == prediction.variance.shape == (*lead, entries)
    assert prediction.epistemic.shape == prediction.aleatoric.shape == (*lead, entries)
    assert prediction.samples.shape == (5, *lead, entries)
    assert prediction.functional_samples.shape == (5, *lead, size)
    assert prediction.entropy().shape == prediction.mutual_information().shape == tuple(lead)
    y = likelihood.sample(mean, generator=generator(seed))
    assert prediction.log_prob(y).shape == tuple(lead)
    event = () if isinstance(likelihood, Categorical) else (entries,)
    assert prediction.distribution.batch_shape == (*lead, *event)
    everything = (
        prediction.mean,
        prediction.variance,
        prediction.samples,
        prediction.entropy(),
        prediction.log_prob(y),
    )
    assert all(value.dtype == torch.float64 and value.isfinite().all() for value in everything)


@pytest.mark.parametrize(
    ("likelihood", "link"), [(likelihood, link) for likelihood in LIKELIHOODS for link in likelihood.links]
)
def test_no_inputs_give_an_empty_prediction(likelihood, link):
    mean = torch.zeros(0, 2)
    prediction = from_functional(likelihood, mean, torch.zeros(0, 2, 2), link=link, generator=generator())
    assert prediction.mean.shape[0] == prediction.epistemic.shape[0] == len(prediction.entropy()) == 0
    assert prediction.log_prob(likelihood.sample(mean, generator=generator())).shape == (0,)


@pytest.mark.parametrize(("likelihood", "link"), [pair for pair in CLOSED if pair[1] not in ("gumbel", "bridge")])
def test_variances_alone_suffice_for_closed_forms(likelihood, link):
    mean, covariance = gaussian(3, 2, size=4)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    full = from_functional(likelihood, mean, covariance, link=link)
    diagonal = from_functional(likelihood, mean, variance, link=link, generator=generator())
    torch.testing.assert_close(diagonal.mean, full.mean)
    torch.testing.assert_close(diagonal.variance, full.variance)
    torch.testing.assert_close(diagonal.epistemic + diagonal.aleatoric, diagonal.variance)
    assert (diagonal.mutual_information() >= 0).all()


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "link"), [(likelihood, link) for likelihood in LIKELIHOODS for link in likelihood.links]
)
def test_gradients_flow_to_mean_and_covariance(likelihood, link):
    mean, covariance = gaussian(2, size=4, scale=0.5)
    y = likelihood.sample(mean, generator=generator(7))

    def evaluate(mean, covariance):
        covariance = (covariance + covariance.mT) / 2
        prediction = from_functional(likelihood, mean, covariance, link=link, n_samples=6, generator=generator(3))
        return prediction.mean, prediction.variance, prediction.epistemic, prediction.samples, prediction.log_prob(y)

    inputs = (mean.requires_grad_(), covariance.requires_grad_())
    fast = not isinstance(likelihood, Categorical)  # along random directions
    assert torch.autograd.gradcheck(evaluate, inputs, rtol=1e-4, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.3)])
def test_entropies_are_differentiable(likelihood):
    mean, covariance = gaussian(2, size=3, scale=0.5)

    def evaluate(mean):
        prediction = from_functional(likelihood, mean, covariance, n_samples=6, generator=generator(3))
        return prediction.entropy(), prediction.mutual_information()

    assert torch.autograd.gradcheck(evaluate, (mean.requires_grad_(),), rtol=1e-4, atol=1e-6)


# Several inputs together ----------------------------------------------------------------------------------------------


def joint_gaussian(*lead, size, scale=1.0, seed=0):
    n = math.prod(lead) * size
    mean, covariance = gaussian(size=n, scale=scale, seed=seed)
    return mean.reshape(*lead, size), covariance.reshape(*lead, size, *lead, size), covariance


def blocks(covariance, n, size):
    return torch.stack([covariance[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(n)])


def test_joint_gaussian_is_one_multivariate_normal():
    mean, covariance, flat = joint_gaussian(3, size=2)
    noise = torch.tensor([0.3, 0.8], dtype=torch.float64)
    prediction = from_functional(Gaussian(noise), mean, covariance, joint=True)
    reference = td.MultivariateNormal(mean.reshape(-1), flat + torch.diag((noise**2).repeat(3)))
    torch.testing.assert_close(prediction.distribution.covariance_matrix, reference.covariance_matrix)
    y = normal(3, 2, seed=9)
    torch.testing.assert_close(prediction.log_prob(y), reference.log_prob(y.reshape(-1)))
    single = from_functional(Gaussian(noise), mean, blocks(flat, 3, 2))
    for name in ("mean", "variance", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(prediction, name), getattr(single, name))
    torch.testing.assert_close(prediction.entropy(), single.entropy())
    torch.testing.assert_close(prediction.mutual_information(), single.mutual_information())
    assert torch.equal(prediction.functional_covariance, covariance)


@pytest.mark.diagonal
@pytest.mark.parametrize("lead", [(3,), (2, 2)])
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_joint_classification_correlates_inputs(lead, link):
    mean, covariance, flat = joint_gaussian(*lead, size=3, scale=2.0)
    n = 40_000
    prediction = from_functional(
        Categorical(), mean, covariance, link=link, n_samples=n, generator=generator(), joint=True
    )
    f = prediction.functional_samples.reshape(n, -1) - mean.reshape(-1)
    products = f[:, :, None] * f[:, None]
    assert ((products.mean(0) - flat).abs() <= 5 * products.std(0) / math.sqrt(n)).all()
    assert prediction.samples.shape == (n, *lead, 3)
    torch.testing.assert_close(prediction.samples, prediction.functional_samples.softmax(-1))
    single_covariance = blocks(flat, math.prod(lead), 3).reshape(*lead, 3, 3)
    single = from_functional(Categorical(), mean, single_covariance, link=link, n_samples=n, generator=generator(1))
    torch.testing.assert_close(prediction.mean, single.mean, rtol=0, atol=0.02 if link == "mc" else 1e-12)
    y = torch.zeros(lead, dtype=torch.long)
    expected = prediction.samples[..., 0].reshape(n, -1).prod(-1).mean().log()
    torch.testing.assert_close(prediction.log_prob(y), expected)
    assert prediction.log_prob(y).shape == () and prediction.entropy().shape == lead


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "link", "part"),
    [
        (Categorical(), "exact", "gumbel, probit, mc, bridge"),
        (Bernoulli(), "bridge", "probit, mc"),
        (Gaussian(), "probit", "exact, mc"),
        (Poisson(), "probit", "exact, mc"),
        (HeteroscedasticGaussian(), "probit", "exact, mc"),
        (LogDensity(lambda f, y: f.sum(-1)), "probit", "mc"),
    ],
)
def test_unknown_links(likelihood, link, part):
    with pytest.raises(ConfigurationError, match=part):
        from_functional(likelihood, torch.zeros(2, 2), torch.eye(2).expand(2, 2, 2), link=link)


@pytest.mark.parametrize("link", ["mc", "bridge"])
def test_links_that_need_covariances_say_so(link):
    with pytest.raises(ConfigurationError, match="needs no more"):
        from_functional(Categorical(), torch.zeros(2, 3), torch.ones(2, 3), link=link)
    with pytest.raises(ConfigurationError, match=r"a tensor \[2, 2, 2\]. Got: float32 \[2, 2\]"):
        from_functional(HeteroscedasticGaussian(), torch.zeros(2, 2), torch.ones(2, 2), link="mc")


def test_shapes_that_do_not_fit():
    with pytest.raises(ConfigurationError, match="The covariance has another shape"):
        from_functional(Gaussian(), torch.zeros(3, 2), torch.ones(3, 3))
    with pytest.raises(ConfigurationError, match="joint=True"):
        from_functional(Gaussian(), torch.zeros(3, 2), torch.ones(3, 2, 3, 2))
    with pytest.raises(ConfigurationError, match="across inputs"):
        from_functional(Gaussian(), torch.zeros(3, 2), torch.ones(3, 2, 2), joint=True)
    for outputs in (torch.zeros(3, 2), torch.zeros(0, 3, 2)):
        with pytest.raises(ConfigurationError, match="samples of network outputs"):
            from_samples(Gaussian(), outputs)


def test_numbers_that_are_none():
    mean, covariance = torch.zeros(2, 2), torch.eye(2).repeat(2, 1, 1)
    with pytest.raises(NonFiniteError, match="1 of 4"):
        from_functional(Gaussian(), torch.tensor([[0.0, math.nan], [0.0, 0.0]]), covariance)
    covariance[0, 0, 0] = math.inf
    with pytest.raises(NonFiniteError, match="covariance"):
        from_functional(Gaussian(), mean, covariance)
    with pytest.raises(NonFiniteError, match="1 of 12"):
        from_samples(
            Gaussian(), torch.full((3, 2, 2), 0.0).index_put_((torch.tensor([0]),) * 3, torch.tensor(math.nan))
        )


def test_negative_variances():
    with pytest.raises(NotPositiveDefiniteError, match="negative"):
        from_functional(Gaussian(), torch.zeros(2, 2), torch.tensor([[1.0, -0.1], [1.0, 1.0]]))
    # … but rounding is forgiven.
    prediction = from_functional(Gaussian(), torch.zeros(1, 2), torch.tensor([[1.0, -1e-9]]))
    assert prediction.epistemic.tolist() == [[1.0, 0.0]]
