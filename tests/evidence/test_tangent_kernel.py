"""The tangent kernel between numbers in the outputs, against products of the Jacobian."""

from __future__ import annotations

import pytest
import torch
from problems import normal
from torch import nn

import laplace_plus as lp
from laplace_plus.network.linearization import batch_jacobian
from laplace_plus.network.selection import trained
from laplace_plus.tuning import tangent_kernel
from laplace_plus.tuning.tangent_kernel import OutputGradients, output_gradients


class Words(nn.Module):
    """Embeddings, a layer at several positions, and a parameter without a rule."""

    def __init__(self):
        super().__init__()
        self.table, self.at_each, self.last = nn.Embedding(11, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, words):
        return self.last((torch.tanh(self.at_each(self.table(words))) * self.scale).mean(1))


def networks():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    return {
        "mlp": (mlp, normal(7, 3)),
        "positions": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), normal(7, 3, 3)),
        "grouped convolution": (conv, normal(7, 2, 5, 5)),
        "words": (Words(), torch.randint(0, 11, (7, 3))),
    }


@pytest.mark.parametrize("name", networks())
def test_the_kernel_is_that_of_the_jacobian(name):
    net, inputs = networks()[name]
    net = net.double()
    with torch.no_grad():
        targets = torch.zeros_like(net(inputs))
    posterior = lp.Diagonal(net, "regression").fit([(inputs, targets)])
    network = posterior.network.selecting(trained)
    jacobian = batch_jacobian(network, inputs)[1]
    chosen = torch.tensor([9, 0, 3, 13, 4])
    some, line = output_gradients(network, inputs, chosen)
    every, lines = output_gradients(network, inputs, torch.arange(len(jacobian)))
    torch.testing.assert_close(every.kernel(some), jacobian @ jacobian[chosen].T)
    torch.testing.assert_close(lines, jacobian @ network.vector())
    torch.testing.assert_close(line, lines[chosen])
    halves = OutputGradients.join([every.at(torch.arange(4)), every.at(torch.arange(4, len(jacobian)))])
    torch.testing.assert_close(halves.kernel(halves), jacobian @ jacobian.T)
    parts = OutputGradients.join([OutputGradients({}, 1), some])  # of a batch that uses no weight
    torch.testing.assert_close(parts.kernel(some)[1:], some.kernel(some))
    assert not parts.kernel(some)[0].any()


def test_blocks_by_their_mean_square_norm():
    net, inputs = networks()["grouped convolution"]
    posterior = lp.Diagonal(net.double(), "regression").fit([(inputs, torch.zeros(7, 2).double())])
    network = posterior.network.selecting(trained)
    jacobian = batch_jacobian(network, inputs)[1]
    every = output_gradients(network, inputs, torch.arange(14))[0]
    layers = jacobian.split([sum(p.numel() for p in net[k].parameters()) for k in (0, 2, 4)], 1)
    wanted = sum(own @ own.T / own.square().sum(1).mean() for own in layers)
    torch.testing.assert_close(every.kernel(every.by_block(torch.ones(14))), wanted)
    factors = torch.arange(1.0, 15.0)
    torch.testing.assert_close(every.times(factors).kernel(every.by_block(torch.ones(14))), factors[:, None] * wanted)


@pytest.mark.parametrize("name", ["grouped convolution", "words"])
def test_large_blocks_are_mixed_and_keep_the_kernel_in_expectation(monkeypatch, name):
    net, inputs = networks()[name]
    net, inputs = net.double(), inputs[:3]
    posterior = lp.Diagonal(net, "regression").fit([(inputs, torch.zeros(3, 2).double())])
    network = posterior.network.selecting(trained)
    jacobian = batch_jacobian(network, inputs)[1]
    source = torch.Generator().manual_seed(1)

    def mixing(groups, size, fewer, device):
        return torch.randn(groups, size, fewer, generator=source, dtype=torch.float64) / fewer**0.5

    monkeypatch.setattr(tangent_kernel, "_ENTRIES", 6)
    monkeypatch.setattr(tangent_kernel, "_ROWS", 2)
    monkeypatch.setattr(tangent_kernel, "_mixing", mixing)
    draws = []
    for _ in range(100):
        own = output_gradients(network, inputs, torch.arange(6))[0]
        draws.append(own.kernel(own))
    draws = torch.stack(draws)
    error = (draws.mean(0) - jacobian @ jacobian.T) / (draws.std(0) / 10)
    assert error.abs().max() < 4 and error.square().mean() < 2
    assert draws.std(0).min() > 0
