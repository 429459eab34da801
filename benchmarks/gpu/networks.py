"""The networks of the rows: a wide ResNet, LeNet, ResNets, a vision transformer, GPT-2 with adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        changes = before != after or stride != 1
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        short = x if self.short is None else self.short(h)
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + short


class WideResNet(nn.Module):
    """WRN-16-4 for images of 32 × 32 pixels (Zagoruyko and Komodakis 2016); fewer blocks and channels are for tests."""

    def __init__(self, width: int = 4, blocks: int = 2, first: int = 16, classes: int = 10):
        super().__init__()
        channels = [first, first * width, 2 * first * width, 4 * first * width]
        layers: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False)]
        for stage in range(3):
            for number in range(blocks):
                before = channels[stage] if number == 0 else channels[stage + 1]
                layers.append(_Block(before, channels[stage + 1], 2 if stage and number == 0 else 1))
        self.body, self.norm = nn.Sequential(*layers), nn.BatchNorm2d(channels[3])
        self.head = nn.Linear(channels[3], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``[B, 3, 32, 32]``."""
        return self.head(F.relu(self.norm(self.body(x))).mean((2, 3)))


@dataclass
class Case:
    """A network with random weights, and batches that it takes.

    Attributes:
        name: What the rows say.
        build: The network and its inputs ``[N, …]``, one tensor.
        classes: Number of outputs.
        batch: Examples in a batch.
        sampled: Whether the Fisher is of one sampled label, as for many classes.
        seconds: Of a fit, about.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    classes: int
    batch: int
    sampled: bool
    seconds: float


def lenet(rows: int) -> tuple[nn.Module, Tensor]:
    """LeNet, 61 706 weights."""
    body = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*body, *head), torch.randn(rows, 1, 28, 28)


def resnet18(rows: int) -> tuple[nn.Module, Tensor]:
    """ResNet-18 for images of 32 × 32 pixels."""
    model = import_module("torchvision").models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model, torch.randn(rows, 3, 32, 32)


def named(name: str, rows: int, side: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """A network of torchvision."""
    return getattr(import_module("torchvision").models, name)(**options), torch.randn(rows, 3, side, side)


class Tokens(nn.Module):
    """A language model that takes tokens and gives logits of the next ones."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, words]``."""
        return self.model(input_ids=ids).logits


def adapters(rows: int, length: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """GPT-2 with adapters of rank 8 on the attention's inputs; all else is frozen."""
    transformers, peft = import_module("transformers"), import_module("peft")
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    chosen = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, chosen)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first
            nn.init.normal_(parameter, std=0.02)
    return Tokens(model), torch.randint(0, base.config.vocab_size, (rows, length))


def cases(tiny: bool) -> list[Case]:
    """All of them, the cheapest first."""
    if tiny:
        words = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 11, "n_positions": 8}
        return [
            Case("LeNet", lambda: lenet(16), 10, 4, False, 0.0),
            Case("GPT-2, adapters", lambda: adapters(8, 5, **words), 11, 2, True, 0.0),
        ]
    return [
        Case("LeNet", lambda: lenet(60_000), 10, 500, False, 10.0),
        Case("ResNet-18, 32²", lambda: resnet18(4096), 10, 256, False, 15.0),
        Case("ViT-B/16", lambda: named("vit_b_16", 512, 224), 1000, 64, True, 15.0),
        Case("ResNet-50, 224²", lambda: named("resnet50", 512, 224), 1000, 64, True, 15.0),
        Case("GPT-2, adapters", lambda: adapters(128, 256), 50257, 8, True, 20.0),
    ]
