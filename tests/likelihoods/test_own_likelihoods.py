"""Likelihoods that give no more than a log-density or a distribution."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as td
from likelihoods.own import Ordinal, StudentT
from problems import generator, normal

from laplace_plus.errors import (
    ConfigurationError,
    LabelError,
    UnsupportedError,
)
from laplace_plus.likelihoods import (
    Bernoulli,
    Categorical,
    LogDensity,
    Poisson,
)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson()])
def test_defaults_by_autodiff_agree_with_closed_forms(likelihood):
    outputs = normal(6, 4, scale=1.5)
    targets = likelihood.sample(outputs, generator=generator(1))
    own = LogDensity(likelihood.log_density)
    torch.testing.assert_close(own.gradient(outputs, targets), likelihood.gradient(outputs, targets))
    root, known = own.output_root(outputs, targets), likelihood.output_root(outputs, targets)
    torch.testing.assert_close(root @ root.mT, known @ known.mT, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own.statistics(outputs, targets)[0], likelihood.statistics(outputs, targets)[0])
    assert not root.requires_grad


def test_a_linear_log_density_has_no_curvature():
    own = LogDensity(lambda f, y: (f * y).sum(-1))
    assert torch.equal(own.output_root(torch.ones(2, 3), torch.ones(2, 3)), torch.zeros(2, 3, 3))


def test_a_log_density_that_is_not_concave_is_named():
    near, far = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 5.0, dtype=torch.float64)
    assert StudentT().output_root(near, near).item() > 0
    with pytest.raises(UnsupportedError, match="not concave"):
        StudentT().output_root(far, near)
    hessian = torch.autograd.functional.hessian(lambda f: -StudentT().log_density(f, near).sum(), far)
    assert hessian.item() < 0


def test_a_distribution_of_ones_own_gives_moments_and_samples():
    likelihood = Ordinal()
    outputs = normal(3, 2)
    mean, variance = likelihood.moments(outputs)
    torch.testing.assert_close(mean, td.Geometric(logits=outputs).mean)
    torch.testing.assert_close(variance, td.Geometric(logits=outputs).variance)
    state = torch.random.get_rng_state()
    first, again = (likelihood.sample_targets(outputs, generator=generator(1)) for _ in range(2))
    assert torch.equal(first, again) and torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, likelihood.sample_targets(outputs, generator=generator(2)))


def test_without_a_distribution_there_are_no_samples():
    outputs = normal(3, 2)
    assert StudentT().moments(outputs)[1] is None
    torch.testing.assert_close(StudentT().moments(outputs)[0], outputs)
    for ask in (StudentT().distribution, StudentT().sample, StudentT().mixture, LogDensity(lambda f, y: f).sample):
        with pytest.raises(UnsupportedError, match="only gives its log-density"):
            ask(outputs)


def test_log_densities_of_the_wrong_kind():
    with pytest.raises(ConfigurationError, match="another shape"):
        LogDensity(lambda f, y: (f * y).sum()).gradient(torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="does not require grad"):
        LogDensity(lambda f, y: f.detach().sum(-1)).gradient(torch.ones(2, 1), torch.ones(2, 1))


def test_missing_targets_are_the_functions_own_matter():
    outputs, targets = torch.zeros(3, 1), torch.tensor([[1.0], [float("nan")], [2.0]])
    density = LogDensity(lambda f, y: -(f - y).square().sum(-1))
    with pytest.raises(LabelError, match="log-density is NaN"):
        density.validate(outputs, targets)
    LogDensity(lambda f, y: density.log_density(f, y.nan_to_num()).where(~y[:, 0].isnan(), 0.0)).validate(
        outputs, targets
    )
