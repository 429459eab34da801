"""Real data sets from a ``--data`` folder: MNIST-like images as idx files, tables as ``.npz``."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Inputs and labels of three parts; ``validation`` may be empty."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def images(folder: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    """Images ``[N, 1, 28, 28]`` in [0, 1] and labels ``[N]`` of part "train" or "t10k"."""
    with gzip.open(folder / name / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / name / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.from_numpy(pixels / np.float32(255)), torch.from_numpy(labels.astype(np.int64))


def table(folder: Path, name: str, number: int) -> Split:
    """Split ``number`` of a table, standardised by its training part; ``split`` is 0, 1, 2 for the three parts."""
    with np.load(folder / name / "data.npz", allow_pickle=False) as file:
        x, y, part = file["x"].astype(np.float64), file["y"], file["split"][number]
    mean, std = x[part == 0].mean(0), x[part == 0].std(0)
    x = (x - mean) / np.where(std > 0, std, 1.0)
    inputs, labels = torch.from_numpy(x).float(), torch.from_numpy(y.astype(np.int64))
    of = [(inputs[torch.from_numpy(part == k)], labels[torch.from_numpy(part == k)]) for k in range(3)]
    return Split(*of)


def batches(inputs: Tensor, labels: Tensor, size: int = 500) -> list[tuple[Tensor, Tensor]]:
    """Batches in order, as a list that can be run over again."""
    return list(zip(inputs.split(size), labels.split(size), strict=True))
