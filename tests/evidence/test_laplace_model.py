"""The evidence and its derivatives against dense float64 linear algebra, however often it is evaluated."""

from __future__ import annotations

import math

import pytest
import torch
from problems import ekfac
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, UnsupportedError

CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "EKFAC": ekfac, "Diagonal": lp.Diagonal}
STRUCTURES = {"Full": 3, "KFAC": 2, "EKFAC": 2, "Diagonal": 3}


def network():
    return nn.Sequential(
        nn.Unflatten(1, (2, 5)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )


def fitted(name, likelihood="classification", **options):
    torch.manual_seed(0)
    net = network().double()
    x = torch.randn(14, 10, dtype=torch.float64)
    y = torch.randint(0, 3, (14,)) if likelihood == "classification" else torch.randn(14, 3, dtype=torch.float64)
    return CLASSES[name](net, likelihood, **options).fit([(x[:9], y[:9]), (x[9:], y[9:])]), x, y


def precisions(posterior, structure):
    layers = posterior.network.layer_index()
    sizes = {"scalar": (), "layerwise": (int(layers.max()) + 1,), "diagonal": (len(layers),)}
    return torch.rand(sizes[structure], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def dense_evidence(posterior, precision, temperature, noise):
    """By the formula, with every matrix written out."""
    model = posterior.laplace_model()
    layers = posterior.network.layer_index()
    each = precision.expand(len(layers)) if precision.ndim == 0 else precision
    each = each if len(each) == len(layers) else each[layers]
    weights = model.weights(noise)
    unit = torch.eye(len(weights), dtype=torch.float64)
    curvature = sum(w * model.curvature.dense(row) for w, row in zip(weights, unit, strict=True))
    deviation = posterior.mean - model.prior_mean
    determinants = torch.logdet(curvature / temperature + torch.diag(each)) - each.log().sum()
    return model.log_likelihood(noise) / temperature - ((each * deviation**2).sum() + determinants) / 2


def assert_same_function(found, want, inputs):
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-10)
    for mine, exact in zip(
        torch.autograd.grad(found, inputs, retain_graph=True), torch.autograd.grad(want, inputs), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-8, atol=1e-9)


@pytest.mark.diagonal
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("name", CLASSES)
def test_value_and_gradient_for_every_structure(name, structure):
    if structure == "diagonal" and STRUCTURES[name] < 3:
        return
    posterior, _, _ = fitted(name, prior_mean=0.1)
    precision = precisions(posterior, structure).requires_grad_()
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    want = dense_evidence(posterior, precision, temperature, None)
    assert_same_function(
        posterior.log_marginal_likelihood(precision, temperature=temperature), want, (precision, temperature)
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("n_noise", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_derivative_by_the_noise(name, n_noise):
    noise = torch.tensor(0.6 if n_noise == 1 else [0.4, 0.6, 0.9], dtype=torch.float64)
    posterior, _, _ = fitted(name, lp.Gaussian(noise))
    precision = precisions(posterior, "layerwise").requires_grad_()
    noise = (noise * 1.3).requires_grad_()
    if n_noise == 3 and name == "KFAC":  # its curvature is linear in the weights in the left factor alone
        found = posterior.log_marginal_likelihood(precision, noise)
        (gradient,) = torch.autograd.grad(found, noise)
        for k in range(3):
            step = 1e-5 * torch.eye(3, dtype=torch.float64)[k]
            ahead, behind = (
                posterior.log_marginal_likelihood(precision.detach(), (noise + s * step).detach()) for s in (1, -1)
            )
            assert gradient[k].item() == pytest.approx((ahead - behind).item() / 2e-5, rel=1e-6, abs=1e-6)
        return
    found = posterior.log_marginal_likelihood(precision, noise)
    want = dense_evidence(posterior, precision, torch.ones(()).double(), noise)
    assert_same_function(found, want, (precision, noise))


@pytest.mark.parametrize("name", CLASSES)
def test_second_derivatives(name):
    posterior, _, _ = fitted(name)
    assert torch.autograd.gradgradcheck(
        lambda p, t: posterior.log_marginal_likelihood(p, temperature=t),
        (torch.tensor(0.8).double().requires_grad_(), torch.tensor(1.2).double().requires_grad_()),
    )


def test_derivative_by_the_prior_mean():
    """Nothing of a graph is kept from one evaluation to the next."""
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    posterior, _, _ = fitted("KFAC", prior_mean=mean)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(posterior.log_marginal_likelihood(2.0), mean)
        torch.testing.assert_close(gradient, 2.0 * (posterior.mean - mean).sum())


def test_nothing_is_computed_twice(monkeypatch):
    """After the first evaluations no pass over parameters, and none over eigenvalues, is left."""
    posterior, _, _ = fitted("KFAC")
    for structure in ("scalar", "layerwise"):
        posterior.log_marginal_likelihood(precisions(posterior, structure))
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    model = posterior.laplace_model()
    assert model is posterior.laplace_model()
    with Watch():
        model.log_marginal_likelihood(precisions(posterior, "scalar"))
    assert max(sizes) < posterior.n_parameters


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_a_kronecker_product_takes_no_precision_of_each_entry(name):
    """Not under several noise levels that are differentiated either."""
    noise = torch.tensor([0.4, 0.6, 0.9], dtype=torch.float64)
    posterior, _, _ = fitted(name, lp.Gaussian(noise))
    for level in (noise, noise.clone().requires_grad_()):
        with pytest.raises(UnsupportedError, match="entry to entry"):
            posterior.log_marginal_likelihood(precisions(posterior, "diagonal"), level)


def test_bad_precisions_are_refused_at_every_evaluation():
    posterior, _, _ = fitted("KFAC")
    posterior.log_marginal_likelihood(1.0)
    for bad in (0.0, -1.0, math.nan, math.inf, [1.0, math.nan], [1.0, 2.0, 3.0]):
        with pytest.raises(ConfigurationError, match="prior precision"):
            posterior.log_marginal_likelihood(torch.tensor(bad))
