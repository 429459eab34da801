"""Small problems of which everything about the evidence is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LOG_2PI = math.log(2 * math.pi)


class TwoLayers(nn.Module):
    """``a·x[:3] + b·x[3:]``: linear in its weights, in two layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        self.b = nn.Linear(4, 1, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.a(x[:, :3]) + self.b(x[:, 3:])


def linear_data(n=60, noise=0.5, seed=0):
    """Inputs ``[n, 7]`` and targets; the last four weights are small."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1.5, -2.0, 1.0, 0.1, -0.2, 0.15, 0.05], dtype=torch.float64)
    return x, x @ weights[:, None] + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)


class LinearOracle:
    """Bayesian linear regression with tempered likelihood, dense and in float64.

    ``evidence`` is the integral of ``p(D|θ)^(1/T) p(θ)``, written out as a Gaussian integral; nothing of the package is
    used.
    """

    def __init__(self, x, y, groups, temperature=1.0):
        self.x, self.y = x.numpy(), y.numpy()[:, 0]
        self.groups, self.temperature = np.asarray(groups), temperature

    def posterior(self, precisions, noise):
        total = self.x.T @ self.x / (noise**2 * self.temperature) + np.diag(np.asarray(precisions)[self.groups])
        return np.linalg.solve(total, self.x.T @ self.y / (noise**2 * self.temperature)), total

    def evidence(self, precisions, noise):
        prior = np.asarray(precisions)[self.groups]
        mean, total = self.posterior(precisions, noise)
        residual = self.y - self.x @ mean
        fit = -0.5 * residual @ residual / noise**2 - len(self.y) * (math.log(noise) + LOG_2PI / 2)
        quadratic = mean @ (prior * mean)
        return fit / self.temperature - (quadratic + np.linalg.slogdet(total)[1] - np.log(prior).sum()) / 2

    def optimum(self, noise=None):
        """Precisions, noise and weights where the evidence is greatest; a given noise is kept."""
        n = self.groups.max() + 1

        def negative(point):
            return -self.evidence(np.exp(point[:n]), math.exp(point[n]) if noise is None else noise)

        start = np.zeros(n + (noise is None))
        found = minimize(negative, start, method="BFGS", options={"gtol": 1e-9})
        polished = minimize(negative, found.x, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-13})
        precisions = np.exp(polished.x[:n])
        level = math.exp(polished.x[n]) if noise is None else noise
        return precisions, level, self.posterior(precisions, level)[0], -polished.fun


def loader(x, y, batch_size=16, seed=0, **options):
    return DataLoader(
        TensorDataset(x, y),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def classes(n=60, seed=0):
    """Inputs ``[n, 4]`` and three classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    centres = 1.5 * torch.eye(3, 4)
    return torch.randn(n, 4, generator=generator) + centres[y], y


def classifier(seed=0, dropout=0.0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(8, 3))
