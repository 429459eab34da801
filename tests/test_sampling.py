"""Samples have the posterior's mean and covariance, come from the generator that was given, and from nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from problems import ekfac
from scipy.stats import chi2, norm
from torch import nn

import laplace_plus as lp

N_DRAWS = 20_000
LEVEL = 1e-6
"""Chance with which a correct sampler would fail a test (the seeds are fixed, so it either does or does not)."""


CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "EKFAC": ekfac, "Diagonal": lp.Diagonal}


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def grouped_convolution():
    return nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def embedding():
    return nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.LayerNorm(3), nn.Flatten(), nn.Linear(12, 3))


NETWORKS = {
    "mlp": (mlp, lambda n, g: torch.randn(n, 3, generator=g, dtype=torch.float64)),
    "grouped convolution": (
        grouped_convolution,
        lambda n, g: torch.randn(n, 4, 3, 3, generator=g, dtype=torch.float64),
    ),
    "embedding": (embedding, lambda n, g: torch.randint(0, 6, (n, 4), generator=g)),
}


def fitted(cls, network="mlp", likelihood="classification", *, n=25, prior_precision=0.5, **options):
    make, inputs = NETWORKS[network]
    torch.manual_seed(5)
    net = make().double().eval()
    generator = torch.Generator().manual_seed(6)
    x = inputs(n, generator)
    if likelihood in ("classification",):
        y = torch.randint(0, 3, (n,), generator=generator)
    elif isinstance(likelihood, lp.Poisson):
        y = torch.randint(0, 4, (n, 3), generator=generator)
    else:
        y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    posterior = cls(net, likelihood, prior_precision=torch.tensor(prior_precision).double(), **options)
    return posterior.fit([(x[:16], y[:16]), (x[16:], y[16:])]), x


def moment_statistics(draws, mean, precision):
    """Standardised errors of the sample moments, and the bound that the largest of them keeps with chance 1 − LEVEL.

    Whitened draws z are N(0, I) exactly, in whichever basis. The means' squared errors then follow a χ² distribution,
    and every entry of √n (Σ z zᵀ / n − I) has variance 1 (2 on the diagonal): Bonferroni over all of them.
    """
    n, p = draws.shape
    white = (draws - mean) @ torch.linalg.cholesky(precision)
    chi_squared = n * white.mean(0).square().sum().item()
    errors = math.sqrt(n) * (white.T @ white / n - torch.eye(p, dtype=torch.float64))
    errors = errors / (1 + (math.sqrt(2) - 1) * torch.eye(p, dtype=torch.float64))
    # Products of two normals have heavier tails than a normal; at these n and levels 6 % covers them.
    bound = 1.06 * norm.isf(LEVEL / (p * (p + 1)))
    return chi_squared / chi2.isf(LEVEL, p), errors.abs().max().item() / bound


def assert_moments(posterior, seed=7):
    draws = posterior.sample(N_DRAWS, generator=torch.Generator().manual_seed(seed))
    assert draws.shape == (N_DRAWS, posterior.n_parameters)
    mean, covariance = moment_statistics(draws, posterior.mean, posterior.precision_matrix())
    assert mean < 1
    assert covariance < 1


@pytest.mark.diagonal
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", CLASSES)
def test_moments(name, network):
    assert_moments(fitted(CLASSES[name], network)[0])


MASK = torch.arange(31) % 3 == 0
SELECTIONS = {
    "last layer": "last_layer",
    "names": ["0.weight", "2.bias"],
    "glob": "*.weight",
    "predicate": lambda name, parameter: parameter.ndim == 1,
    "mask": MASK,
    "masks": {"0.weight": torch.eye(4, 3, dtype=torch.bool), "2.weight": torch.ones(3, 4, dtype=torch.bool)},
}


@pytest.mark.diagonal
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_moments_of_selections(name, selection):
    posterior, _ = fitted(CLASSES[name], parameters=SELECTIONS[selection])
    assert posterior.n_parameters < 31
    assert_moments(posterior)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Full", "diagonal"),
        ("Diagonal", "diagonal"),
        ("Full", "layerwise"),
        ("KFAC", "layerwise"),
        ("EKFAC", "layerwise"),
    ],
)
def test_moments_under_other_priors(name, precision):
    values = {"diagonal": torch.logspace(-1, 2, 31).tolist(), "layerwise": [0.1, 20.0]}[precision]
    assert_moments(fitted(CLASSES[name], prior_precision=values, prior_mean=0.3, temperature=0.5)[0])


@pytest.mark.parametrize("name", CLASSES)
def test_moments_with_noise_for_each_output(name):
    noise = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    assert_moments(fitted(CLASSES[name], likelihood=lp.Gaussian(noise))[0])


def test_the_statistic_sees_ten_percent():
    """A covariance that is ten per cent too large is far outside of the bound at this number of draws."""
    posterior, _ = fitted(lp.Full)
    draws = posterior.sample(N_DRAWS, generator=torch.Generator().manual_seed(1))
    wide = posterior.mean + 1.1**0.5 * (draws - posterior.mean)
    assert moment_statistics(wide, posterior.mean, posterior.precision_matrix())[1] > 1


# -- the generator -----------------------------------------------------------------------------------------------------


def test_monte_carlo_curvature_takes_the_generator():
    posterior, x = fitted(lp.Diagonal)
    y = torch.arange(len(x)) % 3
    model = posterior.network.model

    def curvature(seed):
        mc = lp.Diagonal(model, "classification", backend=lp.Native("ggn_mc"))
        return mc.fit([(x, y)], generator=torch.Generator().manual_seed(seed)).precision_matrix()

    state = torch.get_rng_state()
    first, second, other = curvature(0), curvature(0), curvature(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# -- sampled networks --------------------------------------------------------------------------------------------------


@pytest.mark.quick("Full")
@pytest.mark.parametrize(
    "name", ["Full", "KFAC", *(pytest.param(n, marks=pytest.mark.slow) for n in ("EKFAC", "Diagonal"))]
)
def test_sampled_networks_agree_where_the_network_is_linear(name):
    """There the linearised network is the network: both predictives estimate one distribution."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    posterior = CLASSES[name](net, lp.Gaussian(0.4), prior_precision=torch.tensor(0.5).double()).fit([(x, y)])
    exact = posterior.predictive(x)
    n = 2000
    sampled = posterior.predictive(x, method="sampled", n_samples=n, generator=torch.Generator().manual_seed(2))
    errors = (sampled.mean - exact.mean) / (exact.epistemic / n).sqrt()
    spread = (sampled.epistemic / exact.epistemic - 1) / math.sqrt(2 / n)
    bound = norm.isf(LEVEL / (2 * errors.numel()))  # 18 numbers, Bonferroni
    assert errors.abs().max() < bound
    assert spread.abs().max() < 1.1 * bound  # a χ² with 2000 degrees is a little skewed
    assert sampled.aleatoric.sub(0.16).abs().max() < 1e-12


@pytest.mark.slow
def test_sampled_classification_agrees_where_the_network_is_linear():
    torch.manual_seed(0)
    net = nn.Linear(3, 3).double()
    x, y = torch.randn(9, 3).double(), torch.arange(9) % 3
    posterior = lp.Full(net, "classification", prior_precision=torch.tensor(0.5).double()).fit([(x, y)])
    n = 2000
    first = posterior.predictive(x, link="mc", n_samples=n, generator=torch.Generator().manual_seed(2))
    second = posterior.predictive(x, method="sampled", n_samples=n, generator=torch.Generator().manual_seed(3))
    error = ((first.epistemic + second.epistemic) / n).sqrt()
    assert ((first.mean - second.mean) / error).abs().max() < norm.isf(LEVEL / (2 * first.mean.numel()))


def test_sampled_predictions_are_of_one_network_for_all_inputs():
    """Samples keep the correlation across inputs: the same network sees all of them."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 1).double()
    posterior = lp.Full(net, "regression").fit([(x, y)])
    twice = torch.stack([x[0], x[0], 2 * x[0]])
    outputs = posterior.predictive(twice, method="sampled", n_samples=8).samples
    assert torch.equal(outputs[:, 0], outputs[:, 1])
    assert not torch.equal(outputs[:, 0], outputs[:, 2])


def test_draws_among_very_many_classes_have_the_networks_frequencies():
    generator, n = torch.Generator().manual_seed(0), 8_000
    logits = torch.randn(1500, generator=generator) * 3
    logits[[0, 700, 1499]] = -torch.inf
    p = logits.double().softmax(-1)
    drawn = lp.Categorical().sample(logits.expand(2, n // 2, -1), generator=generator)
    assert drawn.shape == (2, n // 2) and drawn.dtype == torch.long
    counts = drawn.flatten().bincount(minlength=1500)
    assert counts[[0, 700, 1499]].sum() == 0
    expected = torch.cat([n * p[p * n >= 5], n * p[p * n < 5].sum()[None]])
    found = torch.cat([counts[p * n >= 5], counts[p * n < 5].sum()[None]])
    statistic, freedom = float(((found - expected) ** 2 / expected).sum()), len(expected) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5  # of a chi-squared variable
    again = lp.Categorical().sample(logits.expand(9, -1), generator=torch.Generator().manual_seed(3))
    assert torch.equal(again, lp.Categorical().sample(logits.expand(9, -1), generator=torch.Generator().manual_seed(3)))
