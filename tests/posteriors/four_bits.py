"""Linear layers of weights that are packed two to a byte, as those of bitsandbytes are."""

from __future__ import annotations

import torch
from torch import nn


class FourBits(torch.autograd.Function):
    """``x Wᵀ`` for packed weights, as bitsandbytes has it: nothing but x has a derivative."""

    @staticmethod
    def forward(ctx, x, packed, scale):
        ctx.save_for_backward(packed, scale)
        return x @ FourBits.unpacked(packed, scale).T

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.needs_input_grad == (True, False, False)
        return gradient @ FourBits.unpacked(*ctx.saved_tensors), None, None

    @staticmethod
    def unpacked(packed, scale):
        nibbles = torch.stack([packed & 15, packed >> 4], 1).flatten().view(len(scale), -1)
        return (nibbles.to(scale) - 8) * scale


class Packed(nn.Parameter):
    """Packed weights with their scale as an attribute, which views do not have."""

    def __new__(cls, data, scale):
        result = torch.Tensor._make_subclass(cls, data, False)
        result.scale = scale
        return result


class Linear4bit(nn.Linear):
    """A linear layer whose weights are two to a byte, with a scale for each row."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        nibbles = (weight / scale).round().add(8).to(torch.uint8).view(-1, 2)
        self.weight = Packed((nibbles[:, 0] + 16 * nibbles[:, 1])[:, None], scale)

    def forward(self, x):
        return FourBits.apply(x, self.weight.data[:, 0], self.weight.scale)
