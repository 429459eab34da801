"""The plain training that adapters do where the user hands over data and no trained network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: nn.Module,
    *,
    epochs: int,
    lr: float,
    weight_decay: float,
    batch_size: int,
) -> None:
    """Train in place by Adam, minibatches in random order and steps that shrink to zero along a cosine.

    Weights end where the loss is stationary, which a Laplace approximation supposes. The model ends in evaluation mode.
    """
    device = next(model.parameters()).device
    inputs, targets, model = inputs.to(device), targets.to(device), model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr, weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, max(1, epochs))
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).to(device).split(batch_size):
            optimizer.zero_grad()
            loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
