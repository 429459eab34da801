"""Tomography of KMNIST images: a parallel-beam projector, and networks trained on one sinogram each."""

from __future__ import annotations

import gzip
import math
import time
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from torch import nn

GAMMA = {
    **{(0.05, 5): 1e-5, (0.05, 10): 3e-5, (0.05, 20): 1e-4},
    **{(0.1, 5): 3e-5, (0.1, 10): 1e-4, (0.1, 20): 3e-4},
    **{(0.2, 5): 1e-4, (0.2, 10): 3e-4, (0.2, 20): 1e-3},
}
"""The weight of the total variation, by noise and number of angles: the paper's, and its trend for a noise of 20 %."""


def projector(n: int, angles: int) -> torch.Tensor:
    """Intersection lengths of rays with the pixels of an n × n image (Siddon, 1985), sparse ``[angles · d, n²]``.

    Ray k of angle θ is the line ``x cos θ + y sin θ = s_k``. The d detector pixels (an odd number) cover the diagonal.
    """
    half = n / 2
    d = 2 * math.ceil(half * math.sqrt(2)) + 1
    offsets = (np.arange(d) - (d - 1) / 2) * (2 * half * math.sqrt(2) / d)
    lines = np.arange(n + 1) - half
    rows, columns, lengths = [], [], []
    for number, theta in enumerate(np.arange(angles) * np.pi / angles):
        normal = np.array([np.cos(theta), np.sin(theta)])
        along = np.array([-normal[1], normal[0]])
        for k, offset in enumerate(offsets):
            start = offset * normal
            crossed = [(lines - start[axis]) / along[axis] for axis in (0, 1) if abs(along[axis]) > 1e-12]
            t = np.unique(np.concatenate(crossed))
            middle = start + ((t[:-1] + t[1:]) / 2)[:, None] * along
            pixel = np.floor(middle + half).astype(int)
            inside = ((pixel >= 0) & (pixel < n)).all(1) & (np.diff(t) > 1e-12)
            columns.append((n - 1 - pixel[inside, 1]) * n + pixel[inside, 0])  # rows of the image go down
            lengths.append(np.diff(t)[inside])
            rows.append(np.full(inside.sum(), number * d + k))
    found = [np.concatenate(part) for part in (lengths, rows, columns)]
    matrix = scipy.sparse.csr_array((found[0], (found[1], found[2])), shape=(angles * d, n * n))
    index = torch.tensor(np.stack(matrix.nonzero()))
    return torch.sparse_coo_tensor(index, torch.tensor(matrix.data), matrix.shape, check_invariants=True).coalesce()


def back_projection(matrix: torch.Tensor, y: torch.Tensor, angles: int) -> torch.Tensor:
    """Filtered back-projection ``[n²]``: ramp-filtered rows, pushed back; scaled to fit the measurements best."""
    rows = y.view(angles, -1)
    d = rows.shape[1]
    ramp = torch.fft.rfftfreq(2 * d).to(y)
    filtered = torch.fft.irfft(torch.fft.rfft(rows, 2 * d) * ramp, 2 * d)[:, :d]
    image = matrix.mT @ filtered.reshape(-1)
    again = matrix @ image
    return image * (again @ y / again.square().sum())


class UNet(nn.Module):
    """A U-Net of three scales without normalisation; the first part of a parameter's name is its stage.

    Args:
        channels: Of each scale.
        skip: Channels of a skip connection.
        dropout: Probability with which outputs of 3 × 3 convolutions are dropped, also in evaluation mode.
    """

    def __init__(self, channels: int = 32, skip: int = 4, dropout: float = 0.0):
        super().__init__()

        def block(inputs: int, stride: int = 1, n: int = 2) -> nn.Sequential:
            layers: list[nn.Module] = []
            for i in range(n):
                layers += [nn.Conv2d(inputs if i == 0 else channels, channels, 3, stride if i == 0 else 1, 1)]
                layers += [Dropped(dropout)] if dropout else []
                layers += [nn.LeakyReLU(0.2)]
            return nn.Sequential(*layers)

        self.inc = block(1, n=1)
        self.down1, self.down2 = block(channels, 2), block(channels, 2)
        self.up1, self.up2 = block(channels + skip), block(channels + skip)
        self.skip1, self.skip2 = (nn.Sequential(nn.Conv2d(channels, skip, 1), nn.LeakyReLU(0.2)) for _ in range(2))
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``[B, 1, H, W]``, of values between 0 and 1."""
        first = self.inc(x)
        second = self.down1(first)
        third = self.down2(second)
        for skip, up, before in ((self.skip1, self.up1, second), (self.skip2, self.up2, first)):
            larger = nn.functional.interpolate(third, size=before.shape[-2:], mode="bilinear", align_corners=False)
            third = up(torch.cat([larger, skip(before)], 1))
        return self.out(third).sigmoid()


class Dropped(nn.Module):
    """Dropout in evaluation mode, too."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, without some entries."""
        return nn.functional.dropout(x, self.p, training=True)


def stage(name: str) -> str:
    """The block of a parameter of the U-Net: its stage; 1 × 1 convolutions have blocks of their own."""
    return name.split(".")[0]


def total_variation(image: torch.Tensor) -> torch.Tensor:
    """Sum of absolute differences of neighbours, of ``[..., H, W]``."""
    return image.diff(dim=-1).abs().sum() + image.diff(dim=-2).abs().sum()


class Problem:
    """One image, its noisy sinogram, and the input of the network; float64. Of 14 pixels, each is the mean of four."""

    def __init__(self, data: Path, image: int, angles: int, noise: float, size: int = 28):
        stored = gzip.decompress((data / "kmnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
        pixels = np.frombuffer(stored, np.uint8, offset=16).reshape(-1, 28, 28)[image] / 255.0
        self.image = nn.functional.adaptive_avg_pool2d(torch.tensor(pixels)[None], size)[0]
        self.angles, self.noise, self.matrix = angles, noise, projector(size, angles)
        clean = self.matrix @ self.image.flatten()
        self.noise_std = float(noise * clean.abs().mean())
        generator = torch.Generator().manual_seed(1000 * image + angles)
        self.y = clean + self.noise_std * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
        self.z = back_projection(self.matrix, self.y, angles).view(1, 1, size, size)
        self.gamma = GAMMA[noise, angles]


def train(problem: Problem, steps: int, rate: float, dropout: float, channels: int) -> tuple[UNet, dict]:
    """A network trained on one sinogram, by Adam with a rate that falls to a tenth over the last half."""
    start = time.process_time()
    torch.manual_seed(0)
    net = UNet(channels, dropout=dropout)
    matrix, y, z = problem.matrix.float().to_dense(), problem.y.float(), problem.z.float()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.1 ** max(0.0, 2 * i / steps - 1))
    trace = []
    for number in range(steps):
        optimizer.zero_grad()
        image = net(z)
        loss = (matrix @ image.flatten() - y).square().mean() + problem.gamma * total_variation(image)
        loss.backward()
        optimizer.step()
        schedule.step()
        if number % (steps // 20) == 0 or number == steps - 1:
            error = (image[0, 0].detach().double() - problem.image).square().mean()
            trace.append([number, float(loss.detach()), -10 * math.log10(float(error))])
    return net.eval(), {"seconds": time.process_time() - start, "trace": trace}
