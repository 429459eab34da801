"""Draws the pictures of the how-to pages, and the gallery's thumbnails: ``python docs/figures.py``."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.applications import plotting

DOCS = Path(__file__).parent
PICTURES = {  # of notebooks: which of its pictures, and the part of it (left, top, right, bottom)
    "choosing_data": (0, (0, 0, 1, 0.45)),
    "classification": (1, (0, 0, 1, 0.44)),
    "constraints": (0, (0, 0, 1, 0.5)),
    "gp_tuning": (0, (0, 0.33, 1, 0.66)),
    "lora": (0, (0, 0, 0.61, 0.74)),
    "metric_bnn": (0, (0, 0, 1, 0.46)),
    "null_space": (0, (0, 0, 1, 0.59)),
    "pde": (0, (0, 0, 1, 0.47)),
    "pruning": (0, (0, 0, 1, 0.81)),
    "regression": (1, (0, 0, 1, 0.82)),
    "riemannian": (0, (0, 0, 1, 0.82)),
    "spatial_field": (0, (0, 0, 1, 0.63)),
    "subnetwork": (2, (0, 0, 1, 1)),
    "tangent_evidence": (0, (0, 0, 1, 0.44)),
    "tomography": (0, (0, 0, 1, 1)),
    "viking": (1, (0, 0, 1, 1)),
}


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int) -> nn.Module:
    """The network after some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def shapes(n: int, squares: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images ``[n, 1, 32, 32]`` of a bright disc, or a square of another brightness, with masks ``[n, 32, 32]``."""
    axis = torch.arange(32.0)
    centre, radius = (
        8 + 16 * torch.rand(n, 2, 1, 1, generator=generator),
        4 + 4 * torch.rand(n, 1, 1, generator=generator),
    )
    rows, columns = (axis[:, None] - centre[:, 0]).abs(), (axis - centre[:, 1]).abs()
    inside = torch.maximum(rows, columns) < radius if squares else rows**2 + columns**2 < radius**2
    bright = inside * (0.45 if squares else 1.0) + 0.35 * torch.randn(n, 32, 32, generator=generator)
    return bright[:, None], inside.long()


def segmentation() -> Figure:
    """What a network of discs makes of a disc and of a fainter square."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    layers = nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1)
    images, masks = shapes(24, False, generator)
    model = trained(nn.Sequential(*layers), images, masks, nn.functional.cross_entropy, 150)
    posterior = lp.KFAC(model, lp.Categorical(output_axis=1)).fit([(images, masks)])
    posterior = posterior.fit_prior_precision("marginal_likelihood")
    new = torch.cat([shapes(1, squares, generator)[0] for squares in (False, True)])
    prediction = posterior.predictive(new)
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    columns = {
        "image": new[:, 0],
        "probability": prediction.mean[..., 1],
        "entropy": prediction.entropy(),
        "mutual\ninformation": prediction.mutual_information(),
    }
    for k, (name, values) in enumerate(columns.items()):
        for row, kind in enumerate(("as in training", "unfamiliar")):
            panel = figure.add_subplot(2, 4, 4 * row + k + 1)
            panel.imshow(values[row], cmap="Greys_r" if k < 2 else "magma", vmin=0 if k else -0.5, vmax=values.max())
            panel.set(xticks=[], yticks=[], title="" if row else name, ylabel="" if k else kind)
    return figure


def conformal() -> Figure:
    """Intervals of 90 % whose width follows the posterior, and of one width."""
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        x = 6 * torch.rand(n, 1, generator=generator) - 3
        return x, torch.sin(x) + 0.06 * (4 + x) * torch.randn(n, 1, generator=generator)

    torch.manual_seed(0)
    (x, y), held_out, grid = drawn(300), drawn(300), torch.linspace(-4.5, 4.5, 200)[:, None]
    layers = nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)
    model = trained(nn.Sequential(*layers), x, y, nn.functional.mse_loss, 300)
    posterior = lp.learn_noise(lp.Full(model, "regression").fit([(x, y)]).fit_prior_precision(), [held_out])
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    for k, score in enumerate(("scaled", "residual")):
        low, high = lp.conformalize(posterior, [drawn(500)], level=0.9, score=score).interval(grid)
        panel = figure.add_subplot(2, 1, k + 1)
        panel.fill_between(grid[:, 0], low[:, 0], high[:, 0], color="#a9d5f2")
        panel.plot(*drawn(200), "k.", markersize=3)
        panel.set(title=f'score="{score}"', ylim=(-2.6, 2.6), ylabel="target", xlabel="input" if k else "")
    return figure


def abstain() -> Figure:
    """What a rule refuses of two moons, and the errors of 200 rules on new data."""

    def moons(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = make_moons(n, noise=0.3, random_state=seed)
        return torch.tensor(x).float(), torch.tensor(y)

    torch.manual_seed(0)
    x, y = moons(300, 0)
    layers = nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2)
    model = trained(nn.Sequential(*layers), x, y, nn.functional.cross_entropy, 500)
    posterior = lp.KFAC(model, "classification").fit([(x, y)]).fit_prior_precision("marginal_likelihood")
    rule = lp.abstain(posterior, [moons(1000, 1)], risk=0.05)
    side, (new, labels) = torch.linspace(-2, 3, 120), moons(20_000, 2)
    prediction, accepted = rule(torch.cartesian_prod(side, side))
    share, errors = posterior.predictive(new).mean, []
    wrong, sure = (share.argmax(1) != labels).double(), share.amax(1).double()
    for seed in range(10, 210):
        again = lp.abstain(posterior, [moons(1000, seed)], risk=0.05)
        errors.append(100 * float(wrong[sure > again.threshold].mean()))
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    plotting.class_plane(left, side, side, prediction.mean[:, 1], x[:100], y[:100])
    refused = (~accepted).double().view(120, 120).T
    left.contourf(side, side, refused, levels=[0.5, 1.5], colors="none", hatches=["////"])
    left.set(title=f"hatched: refused, {rule.refused:.0%}", xticks=[], yticks=[])
    right.hist(errors, bins=20, color="#a9d5f2")
    right.axvline(5, color="#d55e00")
    right.set(title="200 rules on new data", xlabel="errors of what is accepted, %", ylabel="rules")
    return figure


def pretrained() -> Figure:
    """The page's own picture: one noise, and a noise head."""
    generator = torch.Generator().manual_seed(0)

    def measured(n: int) -> tuple[Tensor, Tensor]:
        x = 6 * torch.rand(n, 1, generator=generator) - 3
        return x, x + torch.sin(x) + 0.05 * (4 + x) * torch.randn(n, 1, generator=generator)

    torch.manual_seed(0)
    layers = nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)
    model = trained(nn.Sequential(*layers), *measured(1000), nn.functional.mse_loss, 200)
    rows, (x, y), grid = [measured(500)], measured(300), torch.linspace(-3, 3, 200)[:, None]
    posterior = lp.KFAC(model, "regression").fit(rows).fit_prior_precision("unseen")
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    for k, (name, one) in enumerate({"one noise": posterior, "noise head": lp.learn_noise(posterior, rows)}.items()):
        low, high = one.predictive(grid).interval(0.9)
        panel = figure.add_subplot(1, 2, k + 1)
        panel.fill_between(grid[:, 0], low[:, 0], high[:, 0], color="#a9d5f2")
        panel.plot(x, y, "k.", markersize=2)
        panel.set(title=name, xlabel="input", ylabel="" if k else "target")
    return figure


def tokens() -> Figure:
    """A tagger's doubt about each letter of a word: vowel or consonant, where the word's end was never seen."""
    torch.manual_seed(0)
    alphabet = torch.arange(26)
    vowel = torch.isin(alphabet, torch.tensor([0, 4, 8, 14, 20])).long()
    model = nn.Sequential(nn.Embedding(26, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    ids = torch.randint(0, 20, (60, 8))  # letters from a to t
    model = trained(model, ids, vowel[ids], lambda f, y: nn.functional.cross_entropy(f.mT, y), 150)
    posterior = lp.KFAC(model, "classification").fit([(ids, vowel[ids])]).fit_prior_precision("marginal_likelihood")
    words = "bayesian", "laplacex", "curvatur"
    doubt = posterior.predictive(torch.tensor([[ord(c) - 97 for c in word] for word in words])).mutual_information()
    figure = Figure(figsize=(5.4, 2.2), layout="constrained")
    panel = figure.subplots()
    shown = panel.imshow(doubt, cmap="Blues", vmin=0)
    for row, word in enumerate(words):
        for column, letter in enumerate(word):
            dark = doubt[row, column] > 0.6 * doubt.max()
            panel.text(column, row, letter, ha="center", va="center", color="white" if dark else "black")
    panel.set(xticks=[], yticks=[], title="letters from u to z were never in training")
    figure.colorbar(shown, ax=panel, label="mutual\ninformation")
    return figure


def tables() -> Figure:
    """Prices of flats against their areas, with intervals of one noise and of a noise head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1200, 3, generator=generator)  # area, age, distance
    y = 360 * x[:, :1] - 60 * x[:, 1:2] - 40 * x[:, 2:]
    y = (y + (2 + 30 * x[:, :1]) * torch.randn(1200, 1, generator=generator)) / 100
    torch.manual_seed(0)
    layers = nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)
    model = trained(nn.Sequential(*layers), x[:600], y[:600], nn.functional.mse_loss, 300)
    posterior = lp.Full(model, "regression").fit([(x[:600], y[:600])]).fit_prior_precision(data=[(x[600:], y[600:])])
    noisy = lp.learn_noise(posterior, [(x[600:], y[600:])])
    figure, order = Figure(figsize=(5.4, 3.1), layout="constrained"), x[:200, 0].argsort()
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (name, one) in zip(panels, {"one noise": posterior, "noise head": noisy}.items(), strict=True):
        low, high = (100 * end[order, 0] for end in one.predictive(x[:200]).interval(0.9))
        panel.vlines(120 * x[order, 0], low, high, color="#a9d5f2", linewidth=1.5)
        panel.plot(120 * x[order, 0], 100 * y[order, 0], "k.", markersize=3)
        panel.set(title=name, xlabel="area")
    panels[0].set_ylabel("price, less 90")
    return figure


def image_classifier() -> Figure:
    """The tutorial's network beside its posterior: reliability, and the error of what is answered."""
    torch.manual_seed(0)
    scans, digits = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(scans))
    scans, digits = scans[order].float().reshape(-1, 1, 8, 8) / 16, digits[order]
    scans += 0.3 * torch.randn(scans.shape)
    x, y = scans[digits < 8], digits[digits < 8]
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 8)
    model = trained(nn.Sequential(*layers), x[:500], y[:500], nn.functional.cross_entropy, 60)
    posterior = lp.KFAC(model, "classification").fit([(x[:500], y[:500])]).fit_prior_precision()
    figure = Figure(figsize=(5.4, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = {"network": model(x[500:]).detach().softmax(1), "posterior": posterior.predictive(x[500:]).mean}
    for (name, share), color in zip(shares.items(), ("#d55e00", "#0072b2"), strict=True):
        confidence, order = share.max(1).values.sort(descending=True)
        wrong = (share.argmax(1) != y[500:])[order].float()
        bins = [part for part in ((confidence * 10).long() == k for k in range(3, 11)) if part.sum() > 9]
        left.plot(*zip(*[(confidence[p].mean(), 1 - wrong[p].mean()) for p in bins], strict=True), "o-", color=color)
        answered = torch.arange(1, len(wrong) + 1)
        right.plot(answered[50:] / len(wrong), (wrong.cumsum(0) / answered)[50:], color=color, label=name)
    left.plot([0.3, 1], [0.3, 1], "--", color="#707070", linewidth=1)
    left.set(title="reliability", xlabel="confidence", ylabel="accuracy")
    right.set(title="error of what is answered", xlabel="share answered")
    right.legend()
    return figure


def study() -> Figure:
    """Three columns of ``study.csv``, from the network's value; one far beyond the others has its number."""
    with (DOCS / "study.csv").open() as file:
        rows = list(csv.DictReader(file))[::-1]
    columns = {
        "tables": ("NLL\non tables", (0.34, 0.43), (0.35, 0.4)),
        "gaps: rank": ("mean rank\nin gaps", (5, 37), (10, 20, 30)),
        "AUROC, Fashion-MNIST": ("AUROC,\nunfamiliar", (0.81, 0.96), (0.85, 0.95)),
    }
    figure = Figure(figsize=(5.4, 6.0), layout="constrained")
    for panel, (name, (title, limits, ticks)) in zip(figure.subplots(1, 3, sharey=True), columns.items(), strict=True):
        network = float(rows[-1][name])
        for k, row in enumerate(rows):
            if row[name]:
                panel.plot([network, float(row[name])], [k, k], color="#a9d5f2", linewidth=2)
                panel.plot(float(row[name]), k, "o", color="#0072b2", markersize=5)
                if float(row[name]) > limits[1]:
                    panel.text(limits[1], k, row[name], ha="right", va="bottom", fontsize=9)
        panel.axvline(network, color="#707070", linewidth=1, linestyle="--")
        panel.set_title(title, fontsize=10)
        panel.set(xlim=limits, xticks=ticks)
    names = [row["method"].replace("by validation", "valid.").replace("diffusion in the", "diffusion,") for row in rows]
    panel.set_yticks(range(len(rows)), names, fontsize=9.5)
    return figure


def in_notebook(name: str) -> Image.Image:
    """The part of a notebook's picture that stands for it."""
    index, (left, top, right, bottom) = PICTURES[name]
    cells = json.loads((DOCS.parent / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    found = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    image = Image.open(io.BytesIO(base64.b64decode(found[index]))).convert("RGB")
    width, height = image.size
    return image.crop((int(left * width), int(top * height), int(right * width), int(bottom * height)))


if __name__ == "__main__":
    images = {name: in_notebook(name) for name in PICTURES}
    for name in ("constraints", "lora", "pruning", "tomography"):
        images[name].save(DOCS / "figures" / f"{name}.webp", quality=85)
    for draw in (segmentation, conformal, abstain, pretrained, tokens, tables, image_classifier, study):
        name = draw.__name__.replace("_", "-")
        with mpl.rc_context(plotting.STYLE):
            draw().savefig(DOCS / "figures" / f"{name}.webp", dpi=150)
        images[name] = Image.open(DOCS / "figures" / f"{name}.webp").convert("RGB")
    images["study"] = images["study"].crop((0, 0, 810, 506))
    for name in ("start", "reliability", "evaluate"):
        images[name] = Image.open(DOCS / f"{name}.png").convert("RGB")
    for name, image in images.items():
        thumbnail = ImageOps.pad(image, (360, 225), color="white")
        thumbnail.save(DOCS / "thumbnails" / f"{name}.webp", quality=75)
