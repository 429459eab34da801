"""The expected total variation against samples, and its derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from problems import generator
from torch import nn

from laplace_plus.applications.reconstruction import FilterCovariance, ImagePosterior, differences, expected_absolute
from laplace_plus.errors import ConfigurationError

DOUBLE = {"dtype": torch.float64}


def net(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1), *last).double()


def fitted(model, size=5, **options):
    z = torch.randn(1, 1, size, size, generator=generator(1), **DOUBLE)
    matrix, y = (torch.randn(*shape, generator=generator(2), **DOUBLE) for shape in ((8, size**2), (8,)))
    return ImagePosterior(model, matrix, **options).fit(z, y), z


def jacobian(model, z):
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (z,)).flatten())(values)
    return torch.cat([found[name].flatten(1) for name in values], 1)


def test_expected_absolute_against_samples():
    mean, variance = torch.tensor([0.0, 0.3, -2.0, 5.0], **DOUBLE), torch.tensor([1.0, 0.5, 0.1, 4.0], **DOUBLE)
    drawn = (mean + variance.sqrt() * torch.randn(200_000, 4, generator=generator(), **DOUBLE)).abs()
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((expected_absolute(mean, variance) - drawn.mean(0)).abs() < 3 * error).all()
    assert (error < 0.01).all()


def test_expected_absolute_at_its_limits():
    mean = torch.tensor([0.0, -3.0, 2.0, 1e-200], requires_grad=True, **DOUBLE)
    variance = torch.tensor([0.0, 0.0, 1e-300, 1e-12], requires_grad=True, **DOUBLE)
    found = expected_absolute(mean, variance)
    torch.testing.assert_close(found, torch.tensor([0.0, 3.0, 2.0, math.sqrt(2e-12 / math.pi)], **DOUBLE))
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(found.sum(), (mean, variance)))


def test_derivatives_of_expected_absolute():
    mean = torch.tensor([0.0, 0.3, -2.0], requires_grad=True, **DOUBLE)
    variance = torch.tensor([1.0, 0.5, 0.1], requires_grad=True, **DOUBLE)
    assert torch.autograd.gradcheck(expected_absolute, (mean, variance))
    assert torch.autograd.gradgradcheck(expected_absolute, (mean, variance))
    # E|N(m, v)| solves the heat equation: its derivative by v is half the second one by m, the density at zero
    (slope,) = torch.autograd.grad(expected_absolute(mean, variance).sum(), variance)
    density = torch.exp(-mean.square() / (2 * variance)) / (2 * math.pi * variance).sqrt()
    torch.testing.assert_close(slope, density.detach())


def test_differences_are_those_of_neighbours():
    image = torch.arange(6.0).view(2, 3) ** 2
    assert differences(image).tolist() == [9.0, 15.0, 21.0, 1.0, 3.0, 7.0, 9.0]
    assert differences(image.expand(4, 5, 2, 3)).shape == (4, 5, 7)


def complexity(posterior, model, z, prior, block):
    """κ of one block with sampled images, ``[n]`` total variations; differentiable."""
    rows, filters = jacobian(model, z), posterior.filters
    only = torch.tensor([name == block for name in posterior.blocks])[filters.blocks]
    coefficients = torch.where(only, filters.coefficients(prior), 0.0)
    covariance = filters.product(rows, rows, coefficients)
    values, vectors = torch.linalg.eigh(covariance + 1e-9 * torch.eye(len(rows), **DOUBLE))
    noise = torch.randn(4000, len(rows), generator=generator(3), **DOUBLE)
    images = model(z).detach().flatten() + noise @ (vectors * values.clamp_min(0).sqrt()).mT
    return differences(images.view(-1, *z.shape[-2:])).abs().sum(-1)


def test_hyperprior_against_samples_and_finite_differences():
    model = net(nn.Sigmoid())
    posterior, z = fitted(model)
    rate, step = 0.7, 1e-4

    def kappa(length, block):
        """κ with the closed form from the dense covariance of the image."""
        rows, filters = jacobian(model, z), posterior.filters
        only = torch.tensor([name == block for name in posterior.blocks])[filters.blocks]
        coefficients = torch.where(only, filters.coefficients(FilterCovariance(length, 0.3)), 0.0)
        moved = differences(rows.mT.view(-1, 5, 5)).mT
        variance = filters.product(moved, moved, coefficients).diagonal()
        return float(expected_absolute(differences(model(z).detach()).flatten(), variance).sum())

    expected = 0.0
    for block in posterior.blocks:
        drawn = complexity(posterior, model, z, FilterCovariance(0.8, 0.3), block)
        assert abs(float(drawn.mean()) - kappa(0.8, block)) < 3 * float(drawn.std()) / len(drawn) ** 0.5
        slope = (kappa(0.8 + step, block) - kappa(0.8 - step, block)) / (2 * step)
        expected += math.log(abs(slope)) - rate * kappa(0.8, block)
    found = posterior.log_hyperprior(rate, FilterCovariance(0.8, 0.3))
    assert abs(float(found.detach()) - expected) < 1e-6


def test_derivative_of_the_complexity_against_samples():
    """Pathwise derivatives of sampled total variations by log ℓ, of one linear layer's images."""
    model = nn.Conv2d(1, 1, 3, padding=1).double()
    posterior, z = fitted(model)
    rows, filters = jacobian(model, z), posterior.filters
    mean, noise = model(z).detach().flatten(), torch.randn(20_000, rows.shape[1], generator=generator(), **DOUBLE)
    log_length = torch.tensor(0.2, requires_grad=True, **DOUBLE)
    coefficients = filters.coefficients(FilterCovariance(log_length.exp(), 0.5))
    variance = differences(rows.mT.view(-1, 5, 5)).mT
    variance = coefficients @ filters.grams(variance, diagonal=True)
    closed = expected_absolute(differences(mean.view(5, 5)), variance).sum()
    (slope,) = torch.autograd.grad(closed, log_length, retain_graph=True)

    identity = torch.eye(rows.shape[1], **DOUBLE)
    root = torch.linalg.cholesky(filters.product(identity, identity, coefficients.detach()))
    # The derivative of a root: L Φ(L⁻¹ Σ' L⁻ᵀ), with the lower half of the symmetric matrix
    tangent = torch.autograd.functional.jvp(
        lambda value: filters.coefficients(FilterCovariance(value.exp(), 0.5)),
        log_length.detach(),
        torch.ones((), **DOUBLE),
    )[1]
    changed = filters.product(identity, identity, tangent)
    middle = torch.linalg.solve_triangular(root, changed, upper=False)
    middle = torch.linalg.solve_triangular(root, middle.mT, upper=False)
    moved_root = root @ (middle.tril() - middle.diagonal().diag() / 2)
    images = differences((mean + noise @ root.mT @ rows.mT).view(-1, 5, 5))
    moving = differences((noise @ moved_root.mT @ rows.mT).view(-1, 5, 5))
    each = (images.sign() * moving).sum(-1)
    error = float(each.std()) / len(each) ** 0.5
    assert abs(float(slope) - float(each.mean())) < 4 * error
    assert error < 0.05 * abs(float(slope))


def test_with_zero_mean_the_derivative_by_the_log_variance_is_half_the_complexity():
    model = net()
    model[2].weight.data.zero_()
    model[2].bias.data.zero_()  # the image is zero, and the last layer moves it
    posterior, _ = fitted(model)
    assert not posterior.image.any()
    log_variance = torch.tensor(0.4, requires_grad=True, **DOUBLE)
    kappa = posterior.complexity(FilterCovariance(0.6, log_variance.exp())).sum()
    assert kappa > 1
    (slope,) = torch.autograd.grad(kappa, log_variance)
    torch.testing.assert_close(slope, kappa.detach() / 2, rtol=1e-12, atol=0)


def test_constant_images_have_a_finite_hyperprior():
    """Samples at the mean have derivatives of zero there, since sign(0) = 0, and a hyperprior of −∞."""
    model = net()
    model[2].weight.data.zero_()
    posterior, z = fitted(model)
    assert not differences(posterior.image).any()
    length = torch.tensor([0.5, 0.8], requires_grad=True, **DOUBLE)
    found = posterior.log_hyperprior(1.0, FilterCovariance(length, 1.0))  # the first layer moves nothing
    slopes = torch.autograd.grad(found, length)[0]
    assert torch.isfinite(found) and torch.isfinite(slopes).all()
    assert slopes[0] == 0 and slopes[1] != 0


def test_derivatives_of_the_hyperprior():
    posterior, _ = fitted(net(nn.Sigmoid()), size=3)

    def function(length, variance):
        return posterior.log_hyperprior(2.0, FilterCovariance(length, variance))

    inputs = [torch.tensor(values, requires_grad=True, **DOUBLE) for values in ([0.5, 0.9], [1.0, 0.2])]
    assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


def test_without_length_scales_there_is_no_hyperprior():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 1, 1)).double()
    posterior, _ = fitted(model)
    assert float(posterior.log_hyperprior(1.0).detach()) == 0
    with pytest.raises(ConfigurationError, match="rate"):
        posterior.log_hyperprior(-1.0)
