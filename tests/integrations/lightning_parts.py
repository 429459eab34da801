"""Modules of Lightning, apart from the tests that use them: to collect these takes no import of Lightning."""

from __future__ import annotations

import lightning
import torch
from torch import nn

from laplace_plus.integrations.lightning import LaplaceCallback, LaplacePredictor, load_posterior

__all__ = ["LaplaceCallback", "LaplacePredictor", "Module", "Validated", "Weighted", "lightning", "load_posterior"]


class Module(lightning.LightningModule):
    def __init__(self, decay=0.01):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))
        self.decay = decay

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2, weight_decay=self.decay)


class Validated(Module):
    def validation_step(self, batch, index):
        pass


class Weighted(Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1)

    def training_step(self, batch, index):
        return self.loss(self(batch[0]), batch[1])
