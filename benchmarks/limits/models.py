"""The six networks, with random weights and data, and plain passes through them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """A network in evaluation mode with data to fit to.

    Attributes:
        name: One of :data:`MODELS`.
        model: The network.
        likelihood: ``"classification"`` or ``"regression"``.
        inputs: ``[N, …]``.
        targets: ``[N]`` classes or ``[N, C]`` values.
        batch_size: Of the fit.
        n_outputs: C.
        batched: Whether a batched backward pass is the quicker one; else one pass for each direction is.
    """

    name: str
    model: nn.Module
    likelihood: str
    inputs: Tensor
    targets: Tensor
    batch_size: int
    n_outputs: int
    batched: bool

    @property
    def batches(self) -> Batches:
        """The data, cut."""
        return list(zip(self.inputs.split(self.batch_size), self.targets.split(self.batch_size), strict=True))

    def take(self, n: int) -> Problem:
        """The same with the first n data only."""
        return Problem(**(vars(self) | {"inputs": self.inputs[:n], "targets": self.targets[:n]}))

    def double(self) -> Problem:
        """A copy of everything in float64: where two ways to compute something are compared."""
        targets = self.targets.double() if self.targets.is_floating_point() else self.targets
        changed = {"model": copy.deepcopy(self.model).double(), "inputs": self.inputs.double(), "targets": targets}
        return Problem(**(vars(self) | changed))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over examples."""
        if self.likelihood == "classification":
            return nn.functional.cross_entropy(outputs, targets, reduction="sum")
        return (outputs - targets).square().sum() / 2

    def forward(self) -> None:
        """A plain forward pass over the data, without gradients."""
        with torch.no_grad():
            for inputs, _ in self.batches:
                self.model(inputs)

    def epoch(self) -> None:
        """A forward and a backward pass over the data, as in training."""
        for inputs, targets in self.batches:
            self.loss(self.model(inputs), targets).backward()
            self.model.zero_grad()

    def probe(self, n: int) -> Tensor:
        """N inputs to predict at."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(n, *self.inputs.shape[1:], generator=generator).to(self.inputs)


def multilayer(*sides: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A multilayer perceptron."""
    hidden = [layer for a, b in pairwise(sides[:-1]) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(sides[-2], sides[-1]))


def lenet() -> nn.Module:
    """LeNet-5, 62 thousand weights."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *head)


def resnet18(n_classes: int) -> nn.Module:
    """Torchvision's ResNet-18."""
    from torchvision.models import resnet18 as build  # noqa: PLC0415  -- an extra

    return build(num_classes=n_classes)


def vit_tiny() -> nn.Module:
    """Timm's ViT-tiny for 32 × 32 images in patches of 4 × 4: 65 tokens, 5.4 million weights."""
    from timm import create_model  # noqa: PLC0415  -- an extra

    return create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)


IMAGE = (3, 32, 32)
# what builds it, an input's shape, numbers of outputs and of data, batch size, whether batched backwards are quicker
MODELS: dict[str, tuple[Any, tuple[int, ...], int, int, int, bool]] = {
    "mlp50": (lambda: multilayer(8, 50, 50, 1, activation=nn.Tanh), (8,), 1, 1000, 100, True),
    "mlp1024": (lambda: multilayer(784, 1024, 1024, 10), (784,), 10, 2000, 64, True),
    "lenet": (lenet, (1, 28, 28), 10, 2000, 64, True),
    "resnet18": (lambda: resnet18(10), IMAGE, 10, 64, 64, False),
    "vit_tiny": (vit_tiny, IMAGE, 10, 64, 64, False),
    "resnet18_1000": (lambda: resnet18(1000), IMAGE, 1000, 256, 64, False),
}


def build(name: str) -> Problem:
    """The problem of that name; always the same one."""
    make, shape, n_outputs, n_data, batch_size, batched = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    inputs = torch.randn(n_data, *shape)
    regression = n_outputs == 1
    targets = torch.randn(n_data, 1) if regression else torch.randint(n_outputs, (n_data,))
    likelihood = "regression" if regression else "classification"
    return Problem(name, model, likelihood, inputs, targets, batch_size, n_outputs, batched)
