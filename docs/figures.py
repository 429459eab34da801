"""Draws the pictures of the how-to pages, and the gallery's thumbnails: ``python docs/figures.py``."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import matplotlib as mpl
import networkx
import numpy as np
import torch
import transformers
from botorch.acquisition import qLogExpectedImprovement
from botorch.optim import optimize_acqf
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from sklearn.datasets import load_diabetes, load_digits, make_moons
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

import laplace_plus as lp
from laplace_plus.applications import plotting
from laplace_plus.integrations.botorch import LaplaceSurrogate
from laplace_plus.integrations.lightning import LaplaceCallback
from laplace_plus.integrations.sklearn import LaplaceClassifier, LaplaceRegressor
from laplace_plus.integrations.torch_geometric import GraphLoader, GraphNetwork
from laplace_plus.integrations.transformers import predict_texts

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
    "pruning": (0, (0, 0, 1, 1)),
    "regression": (1, (0, 0, 1, 0.82)),
    "riemannian": (0, (0, 0, 1, 0.82)),
    "spatial_field": (0, (0, 0, 1, 0.63)),
    "subnetwork": (2, (0, 0, 1, 1)),
    "tangent_evidence": (0, (0, 0, 1, 0.44)),
    "tomography": (0, (0, 0, 1, 1)),
    "viking": (1, (0, 0, 1, 1)),
}


def trained(
    model: nn.Module, x: Any, y: Tensor, loss: Callable[[Any, Tensor], Tensor], steps: int, **options: float
) -> Any:
    """The network after some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), **{"lr": 1e-2, **options})
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
    ids = torch.randint(0, 20, (600, 8))  # letters from a to t
    model = trained(model, ids, vowel[ids], lambda f, y: nn.functional.cross_entropy(f.mT, y), 60)
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


def reliability(panel: Axes, shares: dict[str, Tensor], labels: Tensor, least: int = 10) -> None:
    """Accuracy and its standard error by confidence, of a network and its posterior, in tenths that have enough."""
    for (name, share), color in zip(shares.items(), ("#d55e00", "#0072b2"), strict=True):
        confidence, right = share.max(1).values, (share.argmax(1) == labels).float()
        bins = [part for part in ((confidence * 10).long() == k for k in range(3, 11)) if part.sum() >= least]
        points = [(confidence[part].mean(), right[part].mean()) for part in bins]
        errors = [(share * (1 - share) / part.sum()).sqrt() for (_, share), part in zip(points, bins, strict=True)]
        panel.errorbar(*zip(*points, strict=True), errors, fmt="o-", color=color, label=name)
    panel.plot([0.3, 1], [0.3, 1], "--", color="#707070", linewidth=1)
    panel.set(title="reliability", xlabel="confidence", ylabel="accuracy")


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
    new, labels = x[1000:], y[1000:]
    figure = Figure(figsize=(5.4, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = {"network": model(new).detach().softmax(1), "posterior": posterior.predictive(new).mean}
    reliability(left, shares, labels)
    for (name, share), color in zip(shares.items(), ("#d55e00", "#0072b2"), strict=True):
        order = share.max(1).values.argsort(descending=True)
        wrong = (share.argmax(1) != labels)[order].float()
        answered = torch.arange(1, len(wrong) + 1)
        right.plot(answered[50:] / len(wrong), (wrong.cumsum(0) / answered)[50:], color=color, label=name)
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


def scikit_learn() -> Figure:
    """The page's table in five folds, each held out: intervals of its numbers, and reliability of three classes."""
    features, progression = load_diabetes(return_X_y=True)
    thirds, y = np.digitize(progression, np.quantile(progression, [1 / 3, 2 / 3])), torch.tensor(progression)
    mean, low, high = torch.zeros(3, len(y)).double()
    shares = {name: torch.zeros(len(y), 3).double() for name in ("network", "posterior")}
    for seen, new in KFold(5, shuffle=True, random_state=0).split(features):
        regressor = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=0, epochs=20))
        regressor.fit(features[seen], progression[seen])
        prediction = regressor[-1].predictive(regressor[:-1].transform(features[new]))
        mean[new], (low[new], high[new]) = prediction.mean[:, 0], (end[:, 0] for end in prediction.interval(0.9))
        classifier = make_pipeline(StandardScaler(), LaplaceClassifier(random_state=0)).fit(
            features[seen], thirds[seen]
        )
        prediction = classifier[-1].predictive(classifier[:-1].transform(features[new]))
        shares["network"][new], shares["posterior"][new] = prediction.functional_mean.softmax(1), prediction.mean
    figure = Figure(figsize=(5.4, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.vlines(mean, low, high, color="#a9d5f2", linewidth=1.5)
    left.plot(mean, y, "k.", markersize=3)
    inside = ((y > low) & (y < high)).double().mean()
    left.set(title=f"90 % intervals: {100 * inside:.0f} % within", xlabel="predicted", ylabel="progression, held out")
    reliability(right, shares, torch.tensor(thirds), least=25)
    right.legend()
    return figure


class Regressor(lightning.LightningModule):
    """A module as of the Lightning page, of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The values."""
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, as on the page."""
        return torch.optim.Adam(self.parameters(), 1e-2)


def lightning_callback() -> Figure:
    """Error bars that a callback adds to a module of numbers."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(50, 1) - 2.5, 1.5 * torch.rand(50, 1) + 0.5])
    y, grid = torch.sin(2 * x) + 0.15 * torch.randn(100, 1), torch.linspace(-4, 4, 200)[:, None]
    module, callback = Regressor(), LaplaceCallback("regression", "Full")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=150, callbacks=[callback], accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True))
    prediction = callback.posterior.predictive(grid)
    figure = Figure(figsize=(5.4, 2.7), layout="constrained")
    panel = figure.subplots()
    panel.set(ylim=(-2.5, 2.5), xlabel="input", ylabel="target", title="the module, and what the callback adds")
    panel.fill_between(
        grid[:, 0], *(end[:, 0] for end in prediction.interval(0.9)), color="#a9d5f2", label="90 % interval"
    )
    panel.plot(grid, module(grid).detach(), color="#d55e00", label="module")
    panel.plot(x, y, "k.", markersize=4)
    panel.legend(loc="upper center")
    return figure


def hugging_face() -> Figure:
    """What a small model of texts says of clear words, of one that had both labels, and of unseen ones."""
    torch.manual_seed(0)
    words = ["[PAD]", "a", "film", "book", "play", "good", "great", "fine", "superb"]
    words += ["bad", "dull", "poor", "awful", "long", "odd", "zany", "camp"]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[PAD]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]")
    texts = [f"a {word} {noun}" for word in words[5:15] for noun in words[2:5]] * 2
    labels = torch.tensor([0] * 12 + [1] * 12 + [0] * 6 + [0] * 12 + [1] * 12 + [1] * 6)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
    ids, loss = tokenizer(texts, return_tensors="pt")["input_ids"], nn.functional.cross_entropy
    model = trained(model, ids, labels, lambda found, y: loss(found.logits, y), 100, lr=3e-3)
    posterior = lp.KFAC(model, "classification", parameters="all").fit([{"input_ids": ids, "labels": labels}])
    asked = ["a good film", "a superb play", "a dull book", "a long film", "a zany film", "a camp play"]
    prediction = predict_texts(posterior.fit_prior_precision("marginal_likelihood"), tokenizer, asked)
    network, mean = prediction.functional_mean.softmax(1)[:, 1], prediction.mean[:, 1]
    panel = (figure := Figure(figsize=(5.4, 2.7), layout="constrained")).subplots()
    name = 'posterior, parameters="all"'
    panel.barh(asked, mean, xerr=prediction.epistemic[:, 1], color="#a9d5f2", capsize=3, label=name)
    panel.plot(network, asked, "o", color="#d55e00", label="network")
    panel.set(title="long had both labels; zany and camp none", xlabel="probability that the review is bad")
    panel.invert_yaxis()
    panel.legend()
    return figure


def botorch() -> Figure:
    """A surrogate of four values, and of eight, with the points that it chose."""

    def f(x: Tensor) -> Tensor:
        return torch.sin(7 * x) - x / 2

    torch.manual_seed(0)
    bounds, grid = torch.tensor([[0.0], [1.0]]).double(), torch.linspace(0, 1, 200)[:, None].double()
    x, figure = torch.tensor([[0.05], [0.4], [0.6], [0.9]]).double(), Figure(figsize=(5.4, 2.9), layout="constrained")
    panels = dict(zip((4, 8), figure.subplots(1, 2, sharey=True), strict=True))
    while len(x) <= 8:
        model = LaplaceSurrogate(x, f(x))
        if panel := panels.get(len(x)):
            found = model.posterior(grid)
            mean, band = found.mean[:, 0].detach(), 2 * found.variance.sqrt()[:, 0].detach()
            panel.fill_between(grid[:, 0], mean - band, mean + band, color="#a9d5f2")
            panel.plot(grid, mean, color="#0072b2", label="surrogate")
            panel.plot(grid, f(grid), "--", color="#707070", label="f")
            panel.plot(x[:4], f(x[:4]), "k.", markersize=8, label="given")
            panel.plot(x[4:], f(x[4:]), "^", color="#d55e00", label="chosen")
            panel.set(title=f"{len(x)} values", xlabel="x")
        acquisition = qLogExpectedImprovement(model, best_f=f(x).max())
        x = torch.cat([x, optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)[0]])
    panel.legend(loc="upper right")
    return figure


class GCN(nn.Module):
    """The graphs page's network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 16), GCNConv(16, 2)

    def forward(self, data: Data) -> Tensor:
        """The logits of each node."""
        return self.second(self.first(data.x, data.edge_index).relu(), data.edge_index)


def graphs() -> Figure:
    """A graph of two communities: each node's probability, and its doubt."""
    torch.manual_seed(0)
    graph = networkx.planted_partition_graph(2, 30, 0.12, 0.015, seed=0)
    edges, y = torch.tensor(list(graph.edges)).T, torch.arange(60) // 30
    x, mask = torch.randn(60, 4) + 0.6 * y[:, None], torch.arange(60) % 3 == 0
    data = Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y, train_mask=mask)
    loss = nn.functional.cross_entropy
    model = trained(GCN(), data, y[mask], lambda found, y: loss(found[mask], y), 100, weight_decay=1e-3)
    network = GraphNetwork(model)
    posterior = lp.KFAC(network, "classification").fit(GraphLoader(data, network, mask="train_mask"))
    prediction = posterior.fit_prior_precision().predictive(network.inputs(data))
    places = networkx.spring_layout(graph, seed=1, iterations=200)
    figure = Figure(figsize=(5.4, 3.0), layout="constrained")
    doubt = prediction.mutual_information()[0]
    columns = {"probability of class 1": prediction.mean[0, :, 1], "mutual information": doubt}
    for k, (panel, (name, values)) in enumerate(zip(figure.subplots(1, 2), columns.items(), strict=True)):
        style = {"cmap": "Blues" if k else "RdYlBu_r", "vmin": 0, "vmax": None if k else 1, "edgecolors": "black"}
        style["linewidths"] = [1.8 if known else 0.4 for known in mask]
        networkx.draw_networkx_edges(graph, places, ax=panel, edge_color="#c8c8c8", width=0.7)
        shown = panel.scatter(*zip(*(places[i] for i in range(60)), strict=True), c=values, s=32, zorder=3, **style)
        panel.set(title=name, xticks=[], yticks=[], xlabel="" if k else "bold rim: in training")
        panel.spines[:].set_visible(False)
        figure.colorbar(shown, ax=panel, location="bottom", aspect=30, ticks=mpl.ticker.MaxNLocator(3))
    return figure


def torchmetrics() -> Figure:
    """Two scores of a network and of its posterior, by the number of rows that they had; means of ten seeds."""
    sizes, seeds = (20, 40, 80, 160), range(10)
    scores = {"accuracy": MulticlassAccuracy(3, average="micro"), "calibration error": MulticlassCalibrationError(3)}
    found = torch.zeros(2, 2, len(sizes))
    for size, seed in [(size, seed) for size in range(len(sizes)) for seed in seeds]:
        torch.manual_seed(seed)
        x = torch.randn(sizes[size] + 2000, 2)
        labels = (x[:, 0] + 0.5 * torch.randn(len(x))).mul(1.2).add(1.5).floor().clamp(0, 2).long()
        given, new = (x[:-2000], labels[:-2000]), x[-2000:]
        layers = nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 3)
        model = trained(nn.Sequential(*layers), *given, nn.functional.cross_entropy, 200)
        posterior = lp.KFAC(model, "classification").fit([given]).fit_prior_precision()
        for i, share in enumerate((model(new).detach().softmax(1), posterior.predictive(new).mean)):
            for k, score in enumerate(scores.values()):
                found[k, i, size] += score(share, labels[-2000:]) / len(seeds)
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    for k, (panel, name) in enumerate(zip(figure.subplots(1, 2), scores, strict=True)):
        for i, (method, color) in enumerate({"network": "#d55e00", "posterior": "#0072b2"}.items()):
            panel.plot(sizes, found[k, i], "o-", color=color, markersize=9 - 4 * i, label=method)
        panel.set(title=name, xscale="log", xlabel="rows in training")
        panel.set_xticks(sizes, sizes, minor=False)
        panel.minorticks_off()
    panel.legend()
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
    own = segmentation, conformal, abstain, pretrained, tokens, tables, image_classifier, study
    for draw in (*own, scikit_learn, lightning_callback, hugging_face, botorch, graphs, torchmetrics):
        name = draw.__name__.removesuffix("_callback").replace("_", "-")
        with mpl.rc_context(plotting.STYLE):
            draw().savefig(DOCS / "figures" / f"{name}.webp", dpi=150)
        images[name] = Image.open(DOCS / "figures" / f"{name}.webp").convert("RGB")
    images["study"] = images["study"].crop((0, 0, 810, 506))
    for name in ("start", "reliability", "evaluate"):
        images[name] = Image.open(DOCS / f"{name}.png").convert("RGB")
    for name, image in images.items():
        thumbnail = ImageOps.pad(image, (360, 225), color="white")
        thumbnail.save(DOCS / "thumbnails" / f"{name}.webp", quality=75)
