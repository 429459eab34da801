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
