"""Expected log-densities of the variational last layer, and bounds of them, beside averages over many samples."""

from __future__ import annotations

import pytest
import torch
from problems import generator
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.posteriors.variational_last_layer.bounds import expected_log_density


@pytest.mark.parametrize("bound", ["jensen", "reduced_kn"])
def test_bounds_of_a_datum_are_below_its_expectation(bound):
    mean = 2 * torch.randn(50, 4, generator=generator(), dtype=torch.float64)
    variance = 3 * torch.rand(50, 4, generator=generator(1), dtype=torch.float64)
    y = torch.randint(0, 4, (50,), generator=generator(2))
    noise = torch.randn(4000, 50, 4, generator=generator(3), dtype=torch.float64)
    each = (mean + variance.sqrt() * noise).log_softmax(-1).gather(-1, y.expand(4000, -1)[..., None])[..., 0]
    exact, error = each.mean(0), each.std(0) / 4000**0.5
    assert (expected_log_density(lp.Categorical(), bound, mean, variance, y) <= exact + 3 * error).all()
    small = 1e-4 * variance  # to first order in the variances, the reduced bound is the expectation
    p, change = mean.softmax(-1), expected_log_density(lp.Categorical(), bound, mean, small, y)
    change = change - lp.Categorical().log_density(mean, y)
    exact = -(p * (1 - p) * small).sum(-1) / 2
    if bound == "reduced_kn":
        assert_close(change, exact, rtol=1e-3, atol=1e-12)
    else:
        assert (change < 1.2 * exact).all()


def test_class_weights_and_smoothing_belong_to_the_bounds():
    likelihood = lp.Categorical(weight=[1.0, 2.0, 0.5], label_smoothing=0.2)
    mean = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    y, variance = torch.tensor([0, 1, 2, 0, 1, 2]), torch.full_like(mean, 0.7)
    targets = 0.8 * nn.functional.one_hot(y, 3).double() + 0.2 / 3
    targets = targets * torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    raised = (mean + variance / 2).logsumexp(-1)
    expected = (targets * mean).sum(-1) - targets.sum(-1) * raised
    assert_close(expected_log_density(likelihood, "jensen", mean, variance, y), expected)


def test_two_classes_are_a_binary_output():
    mean = torch.randn(30, 2, generator=generator(), dtype=torch.float64)
    variance = 2 * torch.rand(30, 2, generator=generator(1), dtype=torch.float64)
    y = torch.randint(0, 2, (30,), generator=generator(2))
    noise = torch.randn(4000, 30, 2, generator=generator(3), dtype=torch.float64)
    two = expected_log_density(lp.Categorical(), "mc", mean, variance, y, noise)
    difference, spread = mean[:, 1:] - mean[:, :1], variance.sum(-1, keepdim=True)
    one = expected_log_density(lp.Bernoulli(), "quadrature", difference, spread, y.double()[:, None])
    assert (two - one).abs().max() < 0.02 and (two - one).mean().abs() < 0.01


def test_exact_expectations_are_those_of_many_samples():
    mean = torch.randn(20, 2, generator=generator(), dtype=torch.float64)
    variance = 0.5 * torch.rand(20, 2, generator=generator(1), dtype=torch.float64)
    noise = torch.randn(150, 20, 2, generator=generator(2), dtype=torch.float64)
    cases = [
        (lp.HeteroscedasticGaussian(), "exact", torch.randn(20, 1, generator=generator(3), dtype=torch.float64)),
        (lp.Poisson(), "quadrature", torch.poisson(torch.ones(20, 2, dtype=torch.float64), generator=generator(4))),
    ]
    for likelihood, bound, targets in cases:
        known = expected_log_density(likelihood, bound, mean, variance, targets)
        many = torch.stack(
            [likelihood.log_density(mean + s * variance.sqrt() * e, targets) for e in noise for s in (1, -1)]
        )
        assert ((many.mean(0) - known).abs() < 4 * many.std(0) / 300**0.5 + 1e-3).all()
