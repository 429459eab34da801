"""Networks whose weights reach the outputs by ways that a backward pass to the outputs of calls does not see."""

from __future__ import annotations

import warnings

import pytest
import torch
from dense_reference import relative_error
from torch import nn
from torch.autograd import forward_ad

import laplace_plus as lp

EXACT = 1e-11  # float64, small networks
CLASSES = [lp.Full, lp.Diagonal, lp.KFAC, lp.LowRank]


def perceptron(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def reals(n=8, outputs=3):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, generator=generator, dtype=torch.float64),
        torch.randn(n, outputs, generator=generator, dtype=torch.float64),
    )


def jacobian(model, x):
    """``[B, C, P]`` by plain backward passes of the very module."""
    parameters = list(model.parameters())
    rows = [
        torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        for value in model(x).flatten()
    ]
    stacked = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return stacked.unflatten(0, (len(x), -1))


def assert_exact(model, posterior_class, x, y):
    """Diagonal of the curvature, and the functional variance that follows from the posterior's own covariance."""
    posterior = posterior_class(model, "regression").fit([(x, y)])
    rows = jacobian(model, x)
    expected = rows.square().sum((0, 1))
    assert relative_error(posterior.precision_matrix().diagonal() - 1, expected) < EXACT
    variance = rows[:2] @ posterior.covariance_matrix() @ rows[:2].mT
    assert relative_error(posterior.functional_posterior(x[:2]).covariance, variance) < EXACT


# -- networks that are derivatives themselves --------------------------------------------------------------------------


def by_grad(energy, x):
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def by_backward(energy, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reference cycle
        energy(x).sum().backward(create_graph=True)
    return x.grad


def by_jvp(energy, x):
    return torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1].expand(-1, 3)


def by_dual_numbers(energy, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(energy(dual)).tangent.expand(-1, 3)


def by_func(energy, x):
    return torch.func.vmap(torch.func.grad(lambda z: energy(z)[0]))(x)


class Force(nn.Module):
    """Minus the derivative of an energy by the positions, and a layer behind it."""

    def __init__(self, derivative):
        super().__init__()
        self.energy, self.derivative, self.head = perceptron(1), derivative, nn.Linear(3, 3).double()

    def forward(self, x):
        with torch.enable_grad():
            return self.head(-self.derivative(self.energy, x.detach().requires_grad_()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own decompositions for forward mode
@pytest.mark.parametrize("derivative", [by_grad, by_backward, by_jvp, by_dual_numbers, by_func])
@pytest.mark.parametrize("posterior_class", CLASSES)
def test_networks_that_differentiate_themselves(posterior_class, derivative):
    """Their weights reach the outputs by the derivative, past the outputs of the layers."""
    assert_exact(Force(derivative), posterior_class, *reals())
