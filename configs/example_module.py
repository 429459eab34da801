"""What `wrap_example.yaml` names: a trained network and its data, here noisy values of a sine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def sine(low: float, high: float, n_examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Places between `low` and `high`, and the sine there with noise of standard deviation 0.2, ``[N, 1]`` each."""
    generator = torch.Generator().manual_seed(seed)
    places = low + (high - low) * torch.rand(n_examples, 1, generator=generator)
    return places, places.sin() + 0.2 * torch.randn(n_examples, 1, generator=generator)


def batches(
    n_examples: int, seed: int, low: float = -3.0, high: float = 3.0, batch_size: int = 100
) -> DataLoader[tuple[Tensor, ...]]:
    """The data as batches of inputs and targets."""
    return DataLoader(TensorDataset(*sine(low, high, n_examples, seed)), batch_size=batch_size)


def network(hidden: int = 32) -> nn.Module:
    """A network of two hidden layers from ``[B, 1]`` to ``[B, 1]``."""
    return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def trained_network(hidden: int = 32, n_steps: int = 1000) -> nn.Module:
    """The network after training on what `batches(n_examples=100, seed=0)` yields.

    Training here stands for whatever made your network; with a `checkpoint`, name `network` in the configuration.
    """
    model = network(hidden)
    inputs, targets = sine(-3.0, 3.0, n_examples=100, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.eval()
