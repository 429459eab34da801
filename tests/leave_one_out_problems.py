"""Small networks and data for every likelihood, for leave-one-out and for surveys of the data of a fit."""

from __future__ import annotations

import torch
from torch import nn

import laplace_plus as lp

LIKELIHOODS = {
    "classification": lp.Categorical(),
    "binary": lp.Bernoulli(),
    "Poisson": lp.Poisson(),
    "regression": lp.Gaussian(0.6),
    "noise of each output": lp.Gaussian(torch.tensor([0.4, 0.7, 1.1])),
    "heteroscedastic": lp.HeteroscedasticGaussian(),
}


def problem(name, n=16):
    """A small network and data; nothing here asks for an optimum."""
    torch.manual_seed(0)
    outputs = 4 if name == "heteroscedastic" else 3
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = torch.randn(n, 4, dtype=torch.float64)
    targets = {
        "classification": torch.randint(0, 3, (n,)),
        "binary": torch.randint(0, 2, (n, 3)),
        "Poisson": torch.randint(0, 4, (n, 3)),
        "heteroscedastic": torch.randn(n, 2, dtype=torch.float64),
    }
    return net, x, targets.get(name, torch.randn(n, 3, dtype=torch.float64))


def chunks(x, y, *sizes):
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def linear_problem(n=30, classification=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    signal = x @ torch.tensor([[1.0], [-0.5], [0.0]], dtype=torch.float64)
    y = signal + 0.5 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(seed)
    net = nn.Linear(3, 2 if classification else 1).double()
    target = (y[:, 0] > 0).long() if classification else y
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=100)

    def loss():
        optimizer.zero_grad()
        outputs = net(x)
        decay = sum(p.square().sum() for p in net.parameters()) / 2
        fit = (
            nn.functional.cross_entropy(outputs, target, reduction="sum")
            if classification
            else 2 * (outputs - y).square().sum()
        )
        (fit + decay).backward()
        return fit + decay

    optimizer.step(loss)
    return net, x, target


class Dense:
    """Softmax regression by dense matrices."""

    def __init__(self, net, x, y):
        self.rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        self.jacobians = torch.einsum("nd,ck->nckd", self.rows, torch.eye(2, dtype=torch.float64)).flatten(2)
        probabilities = net(x).detach().softmax(-1)
        self.hessians = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
        self.curvature = torch.einsum("ncp,ncd,ndq->pq", self.jacobians, self.hessians, self.jacobians)
        self.blocks = torch.kron(self.hessians.sum(0), self.rows.T @ self.rows / len(x))
        self.gradients = probabilities - nn.functional.one_hot(y, 2)
        self.gradient = torch.einsum("ncp,nc->p", self.jacobians, self.gradients)
        self.weights = torch.cat([net.weight, net.bias[:, None]], 1).detach().flatten()
        self.loss = nn.functional.cross_entropy(net(x), y, reduction="sum").detach()

    def inverse(self, curvature, precision):
        return torch.linalg.inv(curvature + precision * torch.eye(8, dtype=torch.float64))

    def covariances(self, curvature, precision):
        return torch.einsum("ncp,pq,ndq->ncd", self.jacobians, self.inverse(curvature, precision), self.jacobians)
