"""Draws the picture of rules that refuse: ``python docs/abstain.py docs/abstain.png``."""

from __future__ import annotations

import sys

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.applications import plotting

RISK, REPETITIONS = 0.05, 400


def moons(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of two classes that overlap."""
    return tuple(map(torch.tensor, make_moons(n, noise=0.3, random_state=seed)))


def draw() -> Figure:
    """What a rule accepts, and how often the promise holds where rules are made again and again."""
    torch.manual_seed(0)
    x, y = moons(300, 0)
    model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(500):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = lp.KFAC(model, "classification").fit([(x, y)]).fit_prior_precision("marginal_likelihood")
    held_out = moons(1000, 1)
    rule = lp.abstain(posterior, [held_out], risk=RISK)
    side = torch.linspace(-2, 3, 120, dtype=torch.float64)
    prediction, accepted = rule(torch.cartesian_prod(side, side))

    new, labels = moons(20_000, 2)
    predicted = posterior.predictive(new).mean
    wrong, sure = predicted.argmax(1) != labels, predicted.amax(1).double()
    risks = []
    for seed in range(REPETITIONS):
        again = lp.abstain(posterior, [moons(1000, 10 + seed)], risk=RISK)
        risks.append(float(wrong[sure > again.threshold].double().mean()))
    above = sum(risk > RISK for risk in risks) / REPETITIONS

    with mpl.rc_context(plotting.STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        plotting.class_plane(left, side, side, prediction.mean[:, 1], held_out[0][:150], held_out[1][:150])
        refused = (~accepted).double().view(len(side), -1).T
        left.contourf(side, side, refused, levels=[0.5, 1.5], colors="none", hatches=["////"])
        left.set(title=f"hatched: refused, {rule.refused:.0%} of the data", xlabel="first input", ylabel="second input")
        right.hist(risks, bins=30, color="#56b4e9")
        right.axvline(RISK, color="#d55e00", linewidth=1.8)
        right.set(title=f"{REPETITIONS} rules on new data: {above:.1%} are\nabove {RISK:.0%}, 5% may be")
        right.set(xlabel="error of what a rule accepts", ylabel="rules")
    return figure


if __name__ == "__main__":
    draw().savefig(sys.argv[1], dpi=150)
