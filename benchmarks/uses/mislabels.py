"""Wrong labels of MNIST by self-influence: AUROC, beside that of the loss, over seeds.

``--data DATA --seeds 5`` prints a table. A network of 784-64-10 tanh units learns 2000 images, 10 % of which have
another label, by 40 epochs of Adam with weight decay; ``lp.KFAC`` has the prior precision of that weight decay.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import laplace_plus as lp

DECAY = 1e-3


def load(folder: Path, name: str, n: int, part: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """The first images of a data set, flat and between 0 and 1, and their labels."""
    files = (folder / name / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    images, labels = (gzip.decompress(file.read_bytes()) for file in files)
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784)[:n]
    return torch.tensor(x) / 255.0, torch.tensor(np.frombuffer(labels, np.uint8, offset=8)[:n].astype(np.int64))


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Of scores that are larger for positive ones."""
    return float((scores[positive][:, None] > scores[~positive]).double().mean())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    x, y = load(options.data, "mnist", 2000)
    rows = []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        flipped = torch.rand(len(x)) < 0.1
        noisy = torch.where(flipped, (y + torch.randint(1, 10, y.shape)) % 10, y)
        net = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(40):
            for part in torch.randperm(len(x)).split(100):
                optimizer.zero_grad()
                decay = sum(p.square().sum() for p in net.parameters()) * DECAY / 2
                (cross_entropy(net(x[part]), noisy[part]) + decay).backward()
                optimizer.step()
        data = list(zip(x.split(500), noisy.split(500), strict=True))
        posterior = lp.KFAC(net, "classification", prior_precision=DECAY * len(x)).fit(data)
        with torch.no_grad():
            losses = cross_entropy(net(x), noisy, reduction="none")
        rows.append([auroc(lp.uses.self_influence(posterior), flipped), auroc(losses, flipped)])
    found = torch.tensor(rows)
    error = found.std(0) / len(found) ** 0.5
    sys.stdout.write("| score | AUROC | s.e. |\n|---|---|---|\n")
    for name, mean, own in zip(("self-influence, KFAC", "loss"), found.mean(0), error, strict=True):
        sys.stdout.write(f"| {name} | {mean:.4f} | {own:.4f} |\n")


if __name__ == "__main__":
    main()
