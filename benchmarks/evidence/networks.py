"""Small classifiers of 28×28 images, about 46 000 weights each: five ways of normalising, or of doing without.

After the architectures that Antorán et al. (2022), "Adapting the linearised Laplace model evidence for modern deep
learning", compare; resolution falls early so that a pass over the data is cheap on a CPU. Biases in front of a batch
normalisation would have no effect and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def _convolution(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class _Pool(nn.Module):
    """Mean over all positions, ``[B, C, H, W] -> [B, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def cnn(widths: Sequence[int] = (1, 12, 24, 36, 44, 52), strides: Sequence[int] = (2, 2, 1, 1, 2)) -> nn.Module:
    """Convolutions only, each followed by batch normalisation, then a dense head."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in zip(widths[:-1], widths[1:], strides, strict=True):
        layers += [_convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, _Pool(), nn.Linear(widths[-1], 10))


class _Residual(nn.Module):
    """``relu(shortcut(x) + BN(conv(relu(BN(conv(x))))))`` (He et al., 2016a)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.first_norm = _convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = _convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, stride, 1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.shortcut(x) + self.second_norm(self.second(hidden)))


class _PreActivation(nn.Module):
    """``shortcut(x) + conv(relu(BN(conv(relu(BN(x))))))`` (He et al., 2016b)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first_norm, self.first = nn.BatchNorm2d(inputs), _convolution(inputs, outputs, stride)
        self.second_norm, self.second = nn.BatchNorm2d(outputs), _convolution(outputs, outputs)
        self.shortcut = _convolution(inputs, outputs, stride, 1) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(functional.relu(self.first_norm(x)))
        return self.shortcut(x) + self.second(functional.relu(self.second_norm(hidden)))


class _Fixup(nn.Module):
    """A residual block without normalisation: scalar biases and a scale instead (Zhang et al., 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int, depth: int):
        super().__init__()
        self.first, self.second = _convolution(inputs, outputs, stride), _convolution(outputs, outputs)
        self.biases, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(1))
        self.shortcut = _convolution(inputs, outputs, stride, 1) if stride > 1 else nn.Identity()
        nn.init.normal_(self.first.weight, std=(2 / (outputs * 9)) ** 0.5 * depth**-0.5)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x + self.biases[0]) + self.biases[1])
        hidden = self.second(hidden + self.biases[2]) * self.scale + self.biases[3]
        return functional.relu(self.shortcut(x) + hidden)


SHAPES = ((12, 27, 2), (27, 27, 1), (27, 37, 2))
"""Inputs, outputs and stride of the residual blocks."""


def resnet() -> nn.Module:
    """Residual blocks with batch normalisation behind each convolution."""
    stem = [_convolution(1, 12, 2), nn.BatchNorm2d(12), nn.ReLU()]
    return nn.Sequential(*stem, *(_Residual(*shape) for shape in SHAPES), _Pool(), nn.Linear(SHAPES[-1][1], 10))


def preresnet() -> nn.Module:
    """Residual blocks with batch normalisation in front of each convolution, and once more in front of the head."""
    blocks, width = [_PreActivation(*shape) for shape in SHAPES], SHAPES[-1][1]
    return nn.Sequential(
        _convolution(1, 12, 2), *blocks, nn.BatchNorm2d(width), nn.ReLU(), _Pool(), nn.Linear(width, 10)
    )


def fixup(shapes: Sequence[tuple[int, int, int]] = SHAPES) -> nn.Module:
    """The residual network without normalisation, in Fixup's initialisation and parameters."""
    blocks, width = [_Fixup(*shape, depth=len(shapes)) for shape in shapes], shapes[-1][1]
    head = nn.Linear(width, 10)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Conv2d(1, shapes[0][0], 3, 2, 1), nn.ReLU(), *blocks, _Pool(), head)


class _Attention(nn.Module):
    """Self-attention over ``[B, T, D]``."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2))


class _Encoder(nn.Module):
    """Attention and a dense layer, each followed by a sum and layer normalisation (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention, self.attention_norm = _Attention(width, heads), nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dense_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.dense_norm(x + self.dense(x))


class _Transformer(nn.Module):
    """Two encoder layers over 16 patches of 7×7 pixels, the mean over patches, and a dense head."""

    def __init__(self, width: int = 40, heads: int = 4, hidden: int = 181):
        super().__init__()
        self.patches = nn.Linear(49, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_Encoder(width, heads, hidden) for _ in range(2)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, 7)).unflatten(-3, (4, 7)).transpose(-3, -2).flatten(-2)  # [B, 1, 4, 4, 49]
        tokens = self.patches(x.flatten(1, 3)) + self.positions
        return self.head(self.layers(self.norm(tokens)).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "transformer": _Transformer,
    "cnn": cnn,
    "resnet": resnet,
    "preresnet": preresnet,
    "fixup": fixup,
}
"""By name, in the order of the published table."""

NORMALISED = ("transformer", "cnn", "resnet", "preresnet")
"""Those with normalisation layers."""
