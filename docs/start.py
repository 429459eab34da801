"""Draws the start page's picture: ``python docs/start.py docs/start.png``."""

from __future__ import annotations

import sys

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.applications import plotting


def trained(inputs: Tensor, targets: Tensor, loss: nn.Module, outputs: int, steps: int) -> nn.Module:
    """A small network that has learnt the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 50), nn.Tanh(), nn.Linear(50, outputs)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def draw() -> Figure:
    """Two planes of probabilities and a curve."""
    generator = torch.Generator().manual_seed(0)
    (points, labels), (new_points, new_labels) = (
        map(torch.tensor, make_moons(n, noise=0.35, random_state=seed)) for seed, n in enumerate((100, 1000))
    )
    classifier = trained(points, labels, nn.CrossEntropyLoss(), 2, 1000)
    posterior = lp.KFAC(classifier, likelihood="classification").fit([(points, labels)]).fit_prior_precision()
    side = torch.linspace(-3, 4, 80, dtype=torch.float64)
    plane = torch.cartesian_prod(side, side)
    shares = classifier(plane).softmax(1)[:, 1], posterior.predictive(plane).mean[:, 1]
    own = nn.functional.cross_entropy(classifier(new_points), new_labels)
    wrapped = -posterior.predictive(new_points).log_prob(new_labels).mean()

    x = torch.rand(60, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([2 * x[:30] - 3, 2 * x[30:] + 1])
    y = torch.sin(x) + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    curve = lp.KFAC(trained(x, y, nn.MSELoss(), 1, 1000), likelihood="regression").fit([(x, y)]).fit_prior_precision()
    grid = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    prediction = curve.predictive(grid)

    with mpl.rc_context(plotting.STYLE):
        figure = Figure(figsize=(5.2, 4.9), layout="constrained")  # whose letters a phone shows
        axes = figure.subplot_mosaic([["network", "wrapped"], ["curve", "curve"]], height_ratios=[1.5, 1])
        panels = list(axes.values())
        titles = f"the trained network:\ntest NLL {own:.2f}", f"the same, wrapped:\ntest NLL {wrapped:.2f}"
        for panel, share, title in zip(panels, shares, titles, strict=False):
            field = plotting.class_plane(panel, side, side, share, points, labels)
            panel.set(title=title, xlabel="first input", ylabel="" if panel is panels[1] else "second input")
        figure.colorbar(
            field, ax=panels[:2], location="bottom", aspect=45, label="probability of class 1", ticks=[0, 0.5, 1]
        )
        panels[2].set(title="regression: ± 2 standard deviations", xlabel="input", ylabel="target", ylim=(-3, 3))
        plotting.curve(panels[2], grid, prediction.mean, prediction.std)
        panels[2].plot(x, y, "k.", markersize=3)
    return figure


if __name__ == "__main__":
    draw().savefig(sys.argv[1], dpi=150)
