"""What `wrap_example.yaml` names: a trained network and its data, here two interleaved half moons."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def two_moons(n_examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points ``[N, 2]`` on two noisy half circles, and which of the two each is on, ``[N]``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n_examples) % 2
    angles = math.pi * torch.rand(n_examples, generator=generator)
    upper = torch.stack([angles.cos(), angles.sin()], dim=-1)
    lower = torch.stack([1 - angles.cos(), 0.5 - angles.sin()], dim=-1)
    points = torch.where(labels[:, None] == 0, upper, lower)
    return points + 0.1 * torch.randn(n_examples, 2, generator=generator), labels


def batches(n_examples: int, seed: int, batch_size: int = 100) -> DataLoader[tuple[Tensor, ...]]:
    """The moons as batches of points and labels."""
    return DataLoader(TensorDataset(*two_moons(n_examples, seed)), batch_size=batch_size)


def far_away(n_examples: int = 500, seed: int = 2) -> DataLoader[tuple[Tensor, ...]]:
    """Points on a wide circle around the moons, which belong to neither; their labels mean nothing."""
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.rand(n_examples, generator=generator)
    points = torch.tensor([0.5, 0.25]) + 5 * torch.stack([angles.cos(), angles.sin()], dim=-1)
    return DataLoader(TensorDataset(points, torch.zeros(n_examples, dtype=torch.long)), batch_size=100)


def network(hidden: int = 32) -> nn.Module:
    """A network of two hidden layers from points to two logits."""
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def trained_network(hidden: int = 32, n_steps: int = 500) -> nn.Module:
    """The network after training on what `batches(n_examples=200, seed=0)` yields.

    Training here stands for whatever made your network; with a `checkpoint`, name `network` in the configuration.
    """
    model = network(hidden)
    points, labels = two_moons(200, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model.eval()
