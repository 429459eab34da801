"""Draws the picture of the page on evaluation and prints its table: ``python docs/evaluate.py docs/evaluate.png``."""

from __future__ import annotations

import sys

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_plus as lp
from laplace_plus.applications import plotting


def digits() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Noisy images of the digits 0 to 7 for training and test, and of 8 and 9."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16 + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    known, new = (
        TensorDataset(images[labels < 8], labels[labels < 8]),
        TensorDataset(images[labels > 7], labels[labels > 7]),
    )
    train, test = torch.utils.data.random_split(known, [500, len(known) - 500], torch.Generator().manual_seed(0))
    return DataLoader(train, 100), DataLoader(test, 500), DataLoader(new, 500)


def trained(loader: DataLoader[tuple[Tensor, ...]]) -> nn.Module:
    """A small network that has learnt the data, and is too sure of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


if __name__ == "__main__":
    train, test, new = digits()
    posterior = lp.KFAC(trained(train), "classification").fit(train).fit_prior_precision()
    report = lp.evaluate(posterior, test, other=new)
    sys.stdout.write(f"{report}\n")
    with mpl.rc_context(plotting.STYLE):
        report.plot().savefig(sys.argv[1], dpi=150)
