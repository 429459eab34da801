"""Small networks of many kinds with data, float64 and seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance

N, SIZES = 16, (7, 5, 4)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


class Attention(nn.Module):
    """Tokens to logits ``[B, T, K]`` by causal attention; with ``tied`` the embedding is the readout, too."""

    def __init__(self, tied: bool, tokens: int = 6, width: int = 4):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(5, width))
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.place[: ids.shape[1]]
        q, k, v = self.query(h).chunk(3, -1)
        scores = (q @ k.mT / 2).masked_fill(~torch.ones(2 * ids.shape[1:], device=ids.device).tril().bool(), -torch.inf)
        return self.head(self.norm(h + self.out(scores.softmax(-1) @ v)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 3), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.cat([self.embed(ids), x], -1))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Residual(nn.Module):
    """The first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5).requires_grad_(False), nn.Linear(5, 3)
        self.norm, self.block = nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.block(self.norm(h)))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, under the names that PEFT gives."""

    def __init__(self):
        super().__init__()
        self.base, self.active_adapters = nn.Linear(4, 3).requires_grad_(False), ["default"]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def mlp(*widths: int) -> nn.Module:
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def conv_group() -> nn.Module:
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, 3))


def conv_batch() -> nn.Module:
    body = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh()]
    body += [nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def positions() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))


def floats(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda n, seed: normal(n, *shape, seed=seed)


def ids(n: int, seed: int) -> Tensor:
    return torch.randint(0, 6, (n, 5), generator=generator(seed))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int, int], Any]]] = {
    "curve": (lambda: mlp(1, 8, 1), "regression", floats(1)),
    "two outputs": (lambda: mlp(3, 6, 2), "regression", floats(3)),
    "classes": (lambda: mlp(4, 8, 3), "classification", floats(4)),
    "binary": (lambda: mlp(3, 6, 1), "binary", floats(3)),
    "conv group norm": (conv_group, "classification", floats(2, 4, 4)),
    "conv batch norm": (conv_batch, "classification", floats(1, 6, 6)),
    "encoder": (Encoder, "classification", floats(4, 3)),
    "tokens": (lambda: Attention(tied=False), "classification", ids),
    "tied": (lambda: Attention(tied=True), "classification", ids),
    "table": (Table, lp.Poisson(), lambda n, seed: (ids(n, seed)[:, 0], normal(n, 3, seed=seed))),
    "recurrent": (Recurrent, lp.HeteroscedasticGaussian(), floats(3, 2)),
    "residual": (Residual, lp.Categorical(label_smoothing=0.1), floats(3)),
    "positions": (positions, lp.Gaussian(0.5), floats(4, 3)),
    "adapter": (Adapted, "classification", floats(4)),
}


@dataclass(frozen=True)
class Problem:
    """A network that looks trained, its data, and four other inputs."""

    model: nn.Module
    likelihood: Any
    batches: list[tuple[Any, Tensor]]
    x: Any

    @classmethod
    def of(cls, name: str) -> Problem:
        build, likelihood, inputs = NETWORKS[name]
        with torch.random.fork_rng(devices=[]):
            model = build().double().eval()
        x = inputs(N, 100)
        with torch.no_grad():
            for number, (own, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
                if tensor.is_floating_point():
                    noise = normal(*tensor.shape, seed=number) / max(1, tensor[0].numel() ** 0.5)
                    scale = own.endswith("running_var") or (tensor.ndim == 1 and own.endswith("weight"))
                    tensor.copy_((0.2 * noise).exp() if scale else noise)
            outputs = model(*x) if isinstance(x, tuple) else model(x)
        noise = normal(*outputs.shape, seed=101)
        if likelihood == "binary":
            y = (outputs + 2 * noise > 0).double()
        elif isinstance(likelihood, lp.Poisson):
            y = (outputs.exp() + noise).clamp_min(0).round()
        elif isinstance(likelihood, lp.HeteroscedasticGaussian):
            y = outputs[:, :1] + noise[:, :1]
        elif isinstance(likelihood, lp.Gaussian) or likelihood == "regression":
            y = outputs + 0.3 * noise
        else:
            y = (outputs + 2 * noise).argmax(-1)
            y = y.where(y != 5, -100)  # of tokens: some are ignored
        where, data = PosteriorConformance.device, PosteriorConformance.data_device
        x, new, y = tree_map(lambda own: own.to(data), (x, inputs(4, 102), y))
        parts = zip(*(part.split(SIZES) for part in x), strict=True) if isinstance(x, tuple) else x.split(SIZES)
        return cls(model.to(where), likelihood, list(zip(parts, y.split(SIZES), strict=True)), new)

    def make(self, cls: str, **options: Any) -> Any:
        return getattr(lp, cls)(self.model, self.likelihood, **{"prior_precision": 1.5, **options})
