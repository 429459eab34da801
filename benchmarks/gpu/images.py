"""CIFAR-10 from one small folder, shifted images and others, and what is said of predictions for them.

The folder has ``train_jpegq75.npz`` and ``test_jpegq75.npz``, the quantised coefficients of images that were
recompressed as JPEG of quality 75 (19 MB together), and perhaps ``t10k-images-idx3-ubyte.gz`` of notMNIST. Without a
folder there are random blobs, for tests.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import laplace_plus as lp
from benchmarks.gpu.measuring import Row, Settings

Images = tuple[Tensor, Tensor]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def decoded(path: Path, most: int | None = None) -> Images:
    """Images ``[N, 3, 32, 32]`` of uint8 and labels, from quantised coefficients: what a JPEG decoder does."""
    with np.load(path, allow_pickle=False) as file:
        coefficients = file["coef"].astype(np.int16)  # [64, blocks, N]
        coefficients.reshape(-1)[file["ovf_index"]] = file["ovf_value"]
        steps, labels = file["q"], file["y"].astype(np.int64)
    if most is not None:  # rows are sorted by class
        some = np.random.default_rng(0).permutation(len(labels))[:most]
        coefficients, labels = coefficients[:, :, some], labels[some]
    k = np.arange(8)
    cosines = np.cos((2 * k[:, None] + 1) * k * np.pi / 16) / 2
    cosines[:, 0] /= 2**0.5
    inverse = np.kron(cosines, cosines).astype(np.float32)
    steps = steps[[0, 0, 0, 0, 1, 1] * 4].T[:, :, None].astype(np.float32)
    colours = np.array([[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]], np.float32)
    found = []
    for start in range(0, len(labels), 5000):
        part = coefficients[:, :, start : start + 5000] * steps
        n = part.shape[2]
        blocks = np.clip(np.rint(inverse @ part.reshape(64, -1) + 128), 0, 255).reshape(8, 8, 2, 2, 6, n)
        blocks = blocks.transpose(5, 2, 3, 4, 0, 1)
        light = blocks[:, :, :, :4].reshape(n, 2, 2, 2, 2, 8, 8).transpose(0, 1, 3, 5, 2, 4, 6).reshape(n, 32, 32)
        colour = blocks[:, :, :, 4:].transpose(0, 3, 1, 4, 2, 5).reshape(n, 2, 16, 16)
        colour = _doubled(_doubled(colour, 2), 3) - 128
        rgb = np.stack([light, colour[:, 0], colour[:, 1]], -1) @ colours.T
        found.append(np.clip(np.rint(rgb), 0, 255).astype(np.uint8).transpose(0, 3, 1, 2))
    return torch.from_numpy(np.concatenate(found)), torch.from_numpy(labels)


def _doubled(values: np.ndarray, axis: int) -> np.ndarray:
    """Twice as many along an axis, by a triangular filter."""
    values = np.moveaxis(values, axis, -1)
    padded = np.concatenate([values[..., :1], values, values[..., -1:]], -1)
    both = np.stack([0.75 * values + 0.25 * padded[..., :-2], 0.75 * values + 0.25 * padded[..., 2:]], -1)
    return np.moveaxis(both.reshape(*values.shape[:-1], 2 * values.shape[-1]), -1, axis)


def standard(images: Tensor) -> Tensor:
    """Of uint8, with the training images' mean and standard deviation."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


class Cifar:
    """Images on the device: 45 000 to train and fit, 5 000 to validate, 10 000 to test; few where it is tiny."""

    def __init__(self, settings: Settings):
        sizes = settings.sized((40, 20, 20), (45_000, 5_000, 10_000))
        if settings.data is None:
            g = torch.Generator().manual_seed(0)
            y = torch.randint(0, 10, (sum(sizes),), generator=g)
            blobs = 40 * torch.randn(10, 3, 32, 32, generator=g)[y] + 60 * torch.randn(len(y), 3, 32, 32, generator=g)
            whole = (blobs + 128).clamp(0, 255).to(torch.uint8), y
        else:
            few = settings.sized((sum(sizes[:2]), sizes[2]), (None, None))
            files = [settings.data / f"{name}_jpegq75.npz" for name in ("train", "test")]
            parts = [decoded(file, most) for file, most in zip(files, few, strict=True)]
            order = torch.randperm(len(parts[0][1]), generator=torch.Generator().manual_seed(0))
            whole = torch.cat([parts[0][0][order], parts[1][0]]), torch.cat([parts[0][1][order], parts[1][1]])
        parts = zip(*(part.to(settings.device).split(sizes) for part in whole), strict=True)
        self.train, self.validation, self.test = parts
        self.letters = None if settings.data is None else settings.data / "t10k-images-idx3-ubyte.gz"

    def shifted(self) -> dict[str, Tensor]:
        """The test images: as they are, with noise, blurred, and of low contrast."""
        x = standard(self.test[0])
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        box, mean = x.new_full((3, 1, 3, 3), 1 / 9), x.mean((2, 3), keepdim=True)
        blurred = F.conv2d(F.conv2d(x, box, padding=1, groups=3), box, padding=1, groups=3)
        return {"clean": x, "noisy": x + 0.3 * noise, "blurred": blurred, "low contrast": mean + 0.3 * (x - mean)}

    def others(self) -> dict[str, Tensor]:
        """As many images of no class: patches in another order, noise, and letters where they are at hand."""
        x, g = standard(self.test[0]), torch.Generator().manual_seed(2)
        patches = x.unflatten(3, (4, 8)).unflatten(2, (4, 8)).transpose(3, 4).flatten(2, 3)  # [N, 3, 16, 8, 8]
        patches = patches[:, :, torch.randperm(16, generator=g).to(x.device)].unflatten(2, (4, 4))
        found = {"patches": patches.transpose(3, 4).reshape(x.shape), "noise": torch.randn(x.shape, generator=g).to(x)}
        if self.letters is not None and self.letters.exists():
            grey = np.frombuffer(gzip.decompress(self.letters.read_bytes()), np.uint8, offset=16).reshape(-1, 1, 28, 28)
            some = torch.from_numpy(grey[: len(x)].copy()).to(x.device)
            found["letters"] = standard(F.pad(some, (2, 2, 2, 2)).expand(-1, 3, -1, -1))
        return found


def scores(probabilities: Tensor, labels: Tensor) -> Row:
    """Accuracy, NLL in nats, and ECE in 15 bins."""
    p = probabilities.double()
    found = {"accuracy": lp.metrics.accuracy(p, labels), "nll": lp.metrics.negative_log_likelihood(p, labels)}
    found["ece"] = lp.metrics.expected_calibration_error(p, labels)
    return {name: round(float(value), 4) for name, value in found.items()}


def entropy(probabilities: Tensor) -> Tensor:
    """Of each row, in nats."""
    return torch.special.entr(probabilities.double()).sum(-1)
