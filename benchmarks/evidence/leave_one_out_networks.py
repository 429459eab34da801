"""Networks for the leave-one-out benchmark, trained once and kept in a folder.

Tables: two hidden layers of 32 ReLU units, Adam at 1e-3, batches of 32, 1000 epochs, weight decay .01 (PyTorch's, on
the mean loss). All splits of a table are trained together as one batched network; each has its own initial weights and
order of batches, and Adam treats every weight by itself, so the results are those of separate training runs.
Images: a convolutional network of 2 202 weights, the same optimiser, fewer epochs.
"""

from __future__ import annotations

from pathlib import Path

import data as sources
import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.01


def perceptron(n_features: int, n_classes: int) -> nn.Sequential:
    """The tables' network, with PyTorch's initial weights."""
    return nn.Sequential(nn.Linear(n_features, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, n_classes))


def convolutional() -> nn.Sequential:
    """The images' network: 28×28 grey values to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 8, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def table_networks(
    folder: Path, name: str, numbers: list[int], data: Path, epochs: int = 1000, decay: float = WEIGHT_DECAY
) -> list[nn.Module]:
    """Trained networks of some splits, from the folder where they are there already."""
    kept = folder / f"{name}-{epochs}-{decay:g}-{'_'.join(map(str, numbers))}.pt"
    parts = [sources.table(data, name, number).train for number in numbers]
    n_classes = 1 + max(int(labels.max()) for _, labels in parts)
    networks = []
    for number, (inputs, _) in zip(numbers, parts, strict=True):
        torch.manual_seed(number)
        networks.append(perceptron(inputs.shape[1], n_classes))
    if kept.exists():
        states = torch.load(kept, weights_only=True)
    else:
        states = _train_together(networks, parts, epochs, decay)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(states, kept)
    for network, state in zip(networks, states, strict=True):
        network.load_state_dict(state)
    return list(networks)


def _train_together(
    networks: list[nn.Sequential], parts: list[tuple[Tensor, Tensor]], epochs: int, decay: float
) -> list[dict[str, Tensor]]:
    names = list(networks[0].state_dict())
    stacked = [torch.stack([net.state_dict()[name] for net in networks]).requires_grad_() for name in names]
    optimizer = torch.optim.Adam(stacked, lr=1e-3, weight_decay=decay)
    generators = [torch.Generator().manual_seed(number) for number in range(len(parts))]
    size = len(parts[0][1])
    for _ in range(epochs):
        orders = [torch.randperm(size, generator=generator) for generator in generators]
        inputs = torch.stack([x[order] for (x, _), order in zip(parts, orders, strict=True)])
        labels = torch.stack([y[order] for (_, y), order in zip(parts, orders, strict=True)])
        for x, y in zip(inputs.split(32, 1), labels.split(32, 1), strict=True):
            hidden = x
            for layer in range(0, len(stacked), 2):
                weight, bias = stacked[layer], stacked[layer + 1]
                hidden = torch.baddbmm(bias[:, None], hidden, weight.mT)
                if layer + 2 < len(stacked):
                    hidden = hidden.relu()
            loss = nn.functional.cross_entropy(hidden.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return [
        {name: values[k].detach().clone() for name, values in zip(names, stacked, strict=True)}
        for k in range(len(parts))
    ]


def image_network(
    folder: Path, name: str, seed: int, train: tuple[Tensor, Tensor], epochs: int, decay: float = WEIGHT_DECAY
) -> nn.Module:
    """A trained convolutional network, from the folder where it is there already."""
    inputs, labels = train
    kept = folder / f"{name}-{len(labels)}-{epochs}-{decay:g}-{seed}.pt"
    torch.manual_seed(seed)
    network = convolutional()
    if kept.exists():
        network.load_state_dict(torch.load(kept, weights_only=True))
        return network
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(32):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), kept)
    return network
