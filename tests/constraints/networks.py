"""Small problems that the tests of constraints share."""

from __future__ import annotations

import torch
from torch import nn

from laplace_plus.applications.constraints import NullSpaceOptimizer


class Vector(nn.Module):
    """A network that is nothing but a vector of weights."""

    def __init__(self, n):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(n, dtype=torch.float64))

    def forward(self, x):
        return x * self.weights


class Quadratic:
    """``½ θᵀ Q θ − qᵀ θ`` subject to ``A θ = b``, with its solution."""

    def __init__(self, n=10, m=3, seed=0):
        torch.manual_seed(seed)
        root = torch.randn(n, n, dtype=torch.float64)
        self.Q, self.q = root @ root.T / n + torch.eye(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
        self.A, self.b = torch.randn(m, n, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
        system = torch.cat(
            [torch.cat([self.Q, self.A.T], 1), torch.cat([self.A, torch.zeros(m, m, dtype=torch.float64)], 1)]
        )
        self.solution = torch.linalg.solve(system, torch.cat([self.q, self.b]))[:n]
        self.model = Vector(n)

    def constraint(self, model, _):
        return self.A @ model.parameters["weights"] - self.b

    def backward(self):
        weights = self.model.weights
        loss = weights @ self.Q @ weights / 2 - self.q @ weights
        loss.backward()
        return loss

    def run(self, make, steps, rate=1.0, **options):
        optimizer = NullSpaceOptimizer(make(self.model.parameters()), self.constraint, self.model, rate=rate, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            self.backward()
            optimizer.step()
        return optimizer

    def error(self):
        return float((self.model.weights.detach() - self.solution).abs().max())


def mlp(sizes=(1, 8, 8, 1), seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def flat(model, of=lambda parameter: parameter):
    return torch.cat([of(parameter).detach().flatten().clone() for parameter in model.parameters()])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25)


def periodic_problem(dtype=torch.float32):
    net, x = mlp(dtype=dtype), torch.linspace(-3, 3, 30, dtype=dtype)[:, None]
    points = torch.linspace(-6, 6, 20, dtype=dtype)[:, None]
    return net, x, points


def train(net, optimizer, x, steps, schedule=None):
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - x.sin()).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return flat(net)
