"""The default link of classification against samples, quadrature, closed forms and its own symmetries, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from problems import generator, normal

from laplace_plus.likelihoods import Categorical
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.predictive import from_functional

F64 = torch.float64


def link(mean, covariance):
    return from_functional(Categorical(), mean, covariance).distribution.logits


def wishart(size, scale=1.0, seed=0, rank=None):
    factor = normal(size, rank or size + 2, seed=seed)
    return scale * factor @ factor.mT / factor.shape[1]


def covariances(size):
    """Kinds of covariance, and the largest error of a probability that the link may make."""
    p = normal(size, seed=3).softmax(-1)
    identity, ones = torch.eye(size, dtype=F64), torch.ones(size, size, dtype=F64)
    yield 0.002, torch.diag(normal(size, seed=5).exp())
    yield 0.002, 3.0 * (0.95 * ones + 0.05 * identity)
    yield 0.01, torch.linalg.inv(torch.diag(p) - torch.outer(p, p) + 0.05 * identity)
    yield 0.02, wishart(size)
    yield 0.05, wishart(size, 10.0)
    yield 0.05, wishart(size, 10.0, rank=3) + 0.01 * identity


@pytest.mark.quick("2", "40")
@pytest.mark.parametrize("size", [2, 3, 10, 40])
def test_it_is_near_the_average_over_samples(size):
    n = 100_000 if size < 20 else 20_000
    off = []  # KL of the link and of probit
    for number, (bound, covariance) in enumerate(covariances(size)):
        mean = 2 * normal(size, seed=number)
        root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(size, dtype=F64))
        drawn = (mean + torch.randn(n, size, generator=generator(number), dtype=F64) @ root.mT).softmax(-1)
        truth, error = drawn.mean(0), drawn.std(0) / n**0.5
        p = link(mean[None], covariance[None])[0].exp()
        assert ((p - truth).abs() <= 4 * error + bound).all(), number
        probit = from_functional(Categorical(), mean[None], covariance[None], link="probit").mean[0]
        off.append([float((truth * (truth / q).log()).sum()) for q in (p, probit)])
    ours, before = map(sum, zip(*off, strict=True))
    assert ours < before / 3


def test_independent_logits_are_exact():
    x, w = torch.linspace(-6, 6, 41, dtype=F64), torch.linspace(-6, 6, 41, dtype=F64).square().div(-2).softmax(0)
    for variances in ([0.5, 4.0, 0.0], [30.0, 0.1, 2.0], [1e-6, 1e-3, 1.0]):
        mean, variance = torch.tensor([0.3, -1.0, 1.5], dtype=F64), torch.tensor(variances, dtype=F64)
        axes = [m + s * x for m, s in zip(mean, variance.sqrt(), strict=True)]
        f = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
        truth = torch.einsum("ijkc,i,j,k->c", f.softmax(-1), w, w, w)
        torch.testing.assert_close(link(mean[None], variance[None])[0].exp(), truth, rtol=0, atol=3e-4)
        torch.testing.assert_close(link(mean[None], torch.diag(variance)[None])[0].exp(), truth, rtol=0, atol=3e-4)


def test_two_classes_are_the_logistic_normal_integral():
    grid = torch.linspace(-12, 12, 20_001, dtype=F64)
    weight = (-grid.square() / 2).softmax(0)
    for number, scale in enumerate((0.0, 0.01, 1.0, 10.0, 100.0)):
        mean, covariance = 2 * normal(2, seed=number), wishart(2, scale, seed=number)
        spread = covariance.diagonal().sum() - 2 * covariance[0, 1]
        truth = ((mean[0] - mean[1] + spread.sqrt() * grid).sigmoid() * weight).sum()
        assert abs(float(link(mean[None], covariance[None])[0, 0].exp() - truth)) < 3e-4


def test_small_variances_leave_the_integral_as_it_is():
    """Of 3000 pairs, about half take the second order in the deviations instead of the integral."""
    grid, v, m = torch.linspace(-9, 9, 401, dtype=F64), torch.logspace(-4, -1, 30, dtype=F64), normal(100) * 4
    weight = (-grid.square() / 2).softmax(0)
    mean, variance = (part.flatten()[:, None] for part in torch.meshgrid(m, v, indexing="ij"))
    mean, variance = torch.cat([mean, -mean / 2], 1), torch.cat([variance, variance / 3], 1)
    gap, deviation = mean.diff(dim=1), variance.sum(1, keepdim=True).sqrt()
    truth = (torch.nn.functional.logsigmoid(gap + deviation * grid).exp() * weight).sum(1)
    for extra in (0.0, 5.0):  # of a class that cannot win
        several = torch.cat([mean, torch.full_like(gap, -40.0)], 1), torch.cat([variance, extra + 0 * gap], 1)
        found = link(*several)
        assert (found[:, 1].exp() - truth).abs().max() < 1e-4
        assert (found[:, 1] - truth.log()).abs().max() < 1e-3
        torch.testing.assert_close(link(several[0][:50], several[1][:50]), found[:50])


def test_what_all_logits_share_does_not_matter():
    mean, covariance = normal(4, 6), torch.stack([wishart(6, 4.0, seed=n) for n in range(4)])
    torch.testing.assert_close(link(mean + 7.0, covariance + 50.0), link(mean, covariance))
    # … nor does covariance with it.
    both = normal(4, 6, 1, seed=9, scale=0.1)
    torch.testing.assert_close(
        link(mean, covariance + 1 + both + both.mT), link(mean, covariance), rtol=1e-6, atol=1e-6
    )


def test_classes_are_treated_alike_and_probabilities_sum_to_one():
    mean, covariance = 2 * normal(1, 7), wishart(7, 5.0)
    order = torch.randperm(7, generator=generator())
    found = link(mean, covariance[None])
    torch.testing.assert_close(link(mean[:, order], covariance[order][:, order][None]), found[:, order])
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(1, dtype=F64))
    equal = link(torch.zeros(1, 7, dtype=F64), torch.eye(7, dtype=F64)[None] * 9)
    torch.testing.assert_close(equal.exp(), torch.full((1, 7), 1 / 7, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_without_variance_it_is_softmax(scale, dtype):
    mean = scale * normal(20, 6).to(dtype)
    for zero in (torch.zeros(20, 6, dtype=dtype), torch.zeros(20, 6, 6, dtype=dtype)):
        found = link(mean, zero)
        tolerance = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(found, mean.log_softmax(-1), **tolerance)


def test_improbable_classes_keep_their_logarithm():
    mean = torch.tensor([[0.0, 60.0], [0.0, 1e4], [-1e4, 1e4]])
    found = link(mean, torch.full((3, 2), 0.5))
    assert (found[:, 0] / torch.tensor([-59.5, -9999.5, -19999.5]) - 1).abs().max() < 0.01
    for variance in (0.0, 1e-12, 1.0, 1e2, 1e4, 1e8):
        for spread in (1.0, 1e4):
            own = variance * torch.tensor([1.0, 0.0, 0.3, 1e-3])
            assert link(spread * normal(10, 4).float(), own.expand(10, 4)).isfinite().all()


@pytest.mark.parametrize("deviation", [0.01, 0.5, 2.0, 2.9])
def test_classes_far_below_have_the_probability_of_quadrature(deviation):
    grid = torch.linspace(-14, 14, 20_001, dtype=F64)
    weight = (-grid.square() / 2).softmax(0)
    mean, variance = torch.tensor([[0.0, -30.0]], dtype=F64), torch.tensor([[0.0, deviation**2]], dtype=F64)
    truth = ((mean[0, 1] + deviation * grid).sigmoid() * weight).sum().log()
    assert abs(float(link(mean, variance)[0, 1] - truth)) < 1e-6


@pytest.mark.parametrize("size", [2, 3, 5])
def test_derivatives(size):
    mean, covariance = 2 * normal(2, size), torch.stack([wishart(size, 3.0, seed=n) for n in range(2)])

    def symmetric(m, v):
        return link(m, (v + v.mT) / 2)

    assert torch.autograd.gradcheck(symmetric, (mean.requires_grad_(), covariance.requires_grad_()), fast_mode=True)
    variance = normal(2, size, seed=4).exp().requires_grad_()
    assert torch.autograd.gradcheck(link, (mean, variance), fast_mode=True)


def test_derivatives_without_variance_are_those_of_the_heat_equation():
    mean, variance = normal(1, 4).requires_grad_(), torch.zeros(1, 4, dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(link(mean, variance).exp()[0, 0], variance)
    second = torch.autograd.functional.hessian(lambda m: m.softmax(-1)[0], mean.detach()[0]).diagonal()
    torch.testing.assert_close(found[0], second / 2, rtol=1e-3, atol=2e-5)


def test_the_fitted_variances_minimise_their_squares():
    mean, covariance = normal(6, seed=2), wishart(6, 2.0) + 10 * torch.eye(6, dtype=F64)  # none is clamped
    w, own = centring_weights(mean), covariance.diagonal()
    pairs = (w[:, None] * w) * (1 - torch.eye(6, dtype=F64))
    between = own[:, None] + own - 2 * covariance
    d = independent_variances(mean, covariance).requires_grad_()
    (slope,) = torch.autograd.grad((pairs * (d[:, None] + d - between).square()).sum(), d)
    assert slope.abs().max() < 1e-12 and (d > 0).all()
    assert float(w.sum()) == pytest.approx(1) and float(centring_weights(50 * mean).max()) < 0.46
    centring = torch.eye(6, dtype=F64) - w  # f_k − wᵀf
    centred = (centring @ covariance @ centring.mT).diagonal()
    torch.testing.assert_close(independent_variances(mean, centred), d.detach())


def test_one_class_is_certain():
    assert link(torch.zeros(2, 1), torch.ones(2, 1, 1)).tolist() == [[0.0], [0.0]]
    assert math.isclose(float(centring_weights(torch.zeros(1))), 1.0)
