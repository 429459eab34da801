"""CIFAR-10 from a ``--data`` folder, as the quantised coefficients of its JPEG files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_COLOURS = torch.tensor([[1.0, 1.0, 1.0], [0.0, -0.344136, 1.772], [1.402, -0.714136, 0.0]])  # of Y, Cb and Cr


def cifar10(folder: Path, part: str, choose: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """Colour images ``[N, 3, 32, 32]`` in [0, 1] and labels ``[N]`` of rows ``choose(count)`` of a part.

    The part is "train" or "test". ``coef [64, 24, N]`` holds the frequencies of four macroblocks of 16×16 pixels, each
    with four blocks of brightness and one of each colour difference at half the resolution; ``ovf_*`` are entries
    beyond eight bits.
    """
    with np.load(folder / "cifar10" / f"{part}_jpegq75.npz", allow_pickle=False) as file:
        quantised = file["coef"].astype(np.int16)
        quantised.reshape(-1)[file["ovf_index"]] = file["ovf_value"]
        scales, labels = torch.from_numpy(file["q"].astype(np.float32)), torch.from_numpy(file["y"].astype(np.int64))
    chosen = choose(len(labels))
    places, steps = torch.arange(8)[:, None], torch.arange(8)
    cosines = torch.cos((2 * places + 1) * steps * math.pi / 16) / 2
    cosines[:, 0] /= math.sqrt(2)
    blocks = torch.from_numpy(quantised[:, :, chosen.numpy()]).float().view(8, 8, 4, 6, -1)
    scale = scales[[0, 0, 0, 0, 1, 1]].T.reshape(8, 8, 1, 6, 1)
    pixels = torch.einsum("yv,xu,vumbn->nmbyx", cosines, cosines, blocks * scale)
    pixels = (pixels + 128).round().clamp(0, 255).view(-1, 2, 2, 6, 8, 8)  # by image, macroblock, block
    bright = pixels[:, :, :, :4].reshape(-1, 2, 2, 2, 2, 8, 8).permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 1, 32, 32)
    tints = pixels[:, :, :, 4:].permute(0, 3, 1, 4, 2, 5).reshape(-1, 2, 16, 16) - 128
    tints = functional.interpolate(tints, scale_factor=2, mode="bilinear")
    rgb = torch.einsum("ncyx,ck->nkyx", torch.cat([bright, tints], 1), _COLOURS)
    return rgb.round().clamp(0, 255) / 255, labels[chosen]


def coloured(grey: Tensor) -> Tensor:
    """Grey images ``[N, 1, 28, 28]`` as ``[N, 3, 32, 32]``, with a border of their own black."""
    return functional.pad(grey, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
