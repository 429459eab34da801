"""The null space of a decoder's losses: which pixels of a reconstruction are uncertain, and which images are strange.

    python benchmarks/study/decoder.py --data DATA --output FOLDER --pages PAGES

A variational autoencoder learns digits. ``lp.NullSpace(rows="loss")`` over its decoder's weights, with the log-density
of an image given its code as a likelihood, leaves the loss of each training image as it is, to first order. Writes
study-decoder.md and study-decoder.png; goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.study.rows import Row, Rows, said, script, section_of, table
from benchmarks.study.sets import load
from laplace_plus import metrics

EPOCHS, CODE, UNITS = 100, 10, 64
SAMPLES, ALLOWANCE = 20, 1.0
TRAIN, TEST = 400, 200


class Autoencoder(nn.Module):
    """Images ``[B, 784]`` to the logits of their pixels, by the mean of their codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, UNITS), nn.Tanh(), nn.Linear(UNITS, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, UNITS), nn.Tanh(), nn.Linear(UNITS, 784))

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction."""
        return self.decoder(self.encoder(x)[:, :CODE])

    def bound(self, x: Tensor) -> Tensor:
        """Minus the evidence's lower bound, with one draw of each code."""
        mean, log_std = self.encoder(x).chunk(2, 1)
        code = mean + log_std.exp() * torch.randn_like(mean)
        divergence = ((2 * log_std).exp() + mean.square() - 1).sum(1) / 2 - log_std.sum(1)
        return divergence - log_density(self.decoder(code), x)


def log_density(logits: Tensor, pixels: Tensor) -> Tensor:
    """Of an image's pixels, each taken as a probability, ``[B]``."""
    return -functional.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(-1)


def trained(x: Tensor, seed: int) -> Autoencoder:
    """The autoencoder after Adam, in float64."""
    torch.manual_seed(seed)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            model.bound(x[rows]).mean().backward()
            optimizer.step()
    return model.double().eval()


def pictures(arguments: Namespace, seed: int) -> dict[str, Tensor]:
    """Pixels in [0, 1]: training and test digits, and images from elsewhere."""
    section = section_of("digits")
    data = load(section.name, seed, arguments.data, section.source)
    low, high = data.train[0].min(), data.train[0].max()
    parts = {"train": data.train[0][:TRAIN], "mnist": data.test[0], **data.ood}
    return {name: ((x - low) / (high - low)).flatten(1).double() for name, x in parts.items()}


def measured(arguments: Namespace, seed: int) -> Row:
    """One autoencoder."""
    images = pictures(arguments, seed)
    train = images["train"]
    model = trained(train.float(), seed)
    posterior = lp.NullSpace(
        model, lp.LogDensity(log_density), rows="loss", parameters="decoder.*", n_samples=SAMPLES, projector="svd"
    )
    generator = torch.Generator().manual_seed(seed)
    posterior.fit(list(zip(train.split(250), train.split(250), strict=True)), generator=generator)
    posterior.fit_prior_precision("line_search", allowance=ALLOWANCE)
    pixels = lp.through(posterior, lambda x: model(x).sigmoid())
    losses = lp.through(posterior, lambda x: -log_density(model(x), x)[:, None])

    def std(view: Any, x: Tensor) -> Tensor:
        return view.functional_posterior(x, outputs="diagonal").covariance.clamp_min(0).sqrt()

    found: Row = {"parameters": posterior.n_parameters, "precision": float(posterior.prior_precision)}
    found["residual"] = float(posterior.report.residual.max())
    scores: dict[str, dict[str, Tensor]] = {}
    maps = {}
    for name in images:
        x = images[name][:TEST]
        with torch.no_grad():
            deviation, loss = std(pixels, x), -log_density(model(x), x)
            scores[name] = {"std": deviation.mean(1), "loss": loss, "loss_std": std(losses, x)[:, 0]}
            maps[name] = [x[:6], model(x[:6]).sigmoid(), deviation[:6]]
        found[name] = {score: float(value.mean()) for score, value in scores[name].items()}
        found[name]["sampled"] = _sampled(posterior, model, x)
        if name == "mnist":
            ink = x > 0.5  # noqa: PLR2004
            found |= {"std_ink": float(deviation[ink].mean()), "std_ground": float(deviation[~ink].mean())}
        elif name != "train":
            auroc = {score: metrics.ood_auroc(scores["mnist"][score], value) for score, value in scores[name].items()}
            found[name]["auroc"] = {score: float(value) for score, value in auroc.items()}
    torch.save(maps, arguments.output / f"decoder-{seed}.pt")
    return found


def _sampled(posterior: lp.NullSpace, model: Autoencoder, x: Tensor) -> float:
    """The mean loss of sampled decoders."""
    weights, total = dict(model.named_parameters()), 0.0
    sizes = [weights[name].numel() for name in posterior.parameter_names]
    for sample in posterior.sample(10, generator=torch.Generator().manual_seed(0)):
        parts = zip(posterior.parameter_names, sample.split(sizes), strict=True)
        with torch.no_grad():
            outputs = functional_call(model, {name: part.view_as(weights[name]) for name, part in parts}, (x,))
        total -= float(log_density(outputs, x).mean())
    return total / 10


INTRODUCTION = """
# The null space of a decoder's losses

Variational autoencoders of {train} digits of MNIST (codes of {code} numbers, {units} hidden units, {weights} weights in
the decoder, float64), {seeds} seeds, mean ± standard error. The posterior is
`lp.NullSpace(model, lp.LogDensity(log_density), rows="loss", parameters="decoder.*")`, {samples} samples, scaled by
`fit_prior_precision("line_search", allowance={allowance:g})`: so many nats may a training image lose. Standard
deviations of pixels, which are in [0, 1], come from `lp.through(posterior, lambda x: model(x).sigmoid())`, those of
losses from `lp.through(posterior, lambda x: -log_density(model(x), x)[:, None])`. `python benchmarks/study/decoder.py`
measures it.

![Images of three sets, their reconstructions, and the standard deviations of the pixels](study-decoder.png)

*From the top: images, reconstructions, standard deviations (black: zero).*
"""


def page(rows: Rows) -> str:
    """The tables."""
    every = rows.all
    about = {
        "train": TRAIN,
        "code": CODE,
        "units": UNITS,
        "samples": SAMPLES,
        "allowance": ALLOWANCE,
    }
    about |= {"weights": every[0]["parameters"], "seeds": len(every)}
    lines = [INTRODUCTION.strip().format(**about), "", "## Training predictions stay", ""]
    largest = max(row["residual"] for row in every)
    largest = max(row["residual"] for row in every)
    lines += [f"Largest residual of a sample, relative (`report.residual`): {largest:.1e}. Standard"]
    largest = max(row["train"]["loss_std"] for row in every)
    lines += [f"deviation of a training image's loss to first order, mean: at most {largest:.1e} nats.", ""]
    parts = {"training images": "train", "test images": "mnist", "Fashion-MNIST": "fashion_mnist", "KMNIST": "kmnist"}
    head = ["nats for each image", "loss of the trained decoder", "mean of sampled decoders", "std to first order"]

    def of(part: str, key: str, digits: int) -> str:
        return said([row[part][key] for row in every], digits)

    cells = [[t, of(part, "loss", 2), of(part, "sampled", 2), of(part, "loss_std", 4)] for t, part in parts.items()]
    lines += [*table(head, cells), "## Pixels", ""]
    cells = [[title, of(part, "std", 4)] for title, part in parts.items()]
    places = {"ink of test images": "std_ink", "their ground": "std_ground"}
    cells += [[title, said([row[key] for row in every], 4)] for title, key in places.items()]
    lines += table(["", "mean standard deviation of a pixel"], cells)
    lines += ["## AUROC of images from elsewhere against test digits", ""]
    ways = {"loss of the reconstruction": "loss", "mean standard deviation of pixels": "std"}
    ways["standard deviation of the loss"] = "loss_std"
    others = list(parts.items())[2:]
    cells = [[way, *(said([row[o]["auroc"][key] for row in every]) for _, o in others)] for way, key in ways.items()]
    lines += table(["by", *(title for title, _ in others)], cells)
    return "\n".join(lines).rstrip() + "\n"


def picture(maps: dict[str, list[Tensor]]) -> Figure:
    """Images, reconstructions and deviations."""
    names = [name for name in maps if name != "train"]
    figure = Figure(figsize=(2.6 * len(names), 2.2), layout="constrained")
    panels = figure.subplots(1, len(names))
    largest = max(float(maps[name][2].max()) for name in names)
    for panel, name in zip(panels, names, strict=True):
        x, mean, deviation = maps[name]
        strips = [torch.cat(list(part.view(-1, 28, 28)), 1) for part in (x, mean, deviation / largest)]
        panel.imshow(torch.cat(strips, 0), cmap="gray", vmin=0, vmax=1)
        panel.set_title(name, fontsize=8)
        panel.set_axis_off()
    return figure


def measure(rows: Rows, arguments: Namespace) -> None:
    """All that is missing."""
    for seed in range(arguments.seeds):
        rows.of(partial(measured, arguments, seed), seed=seed)


def main() -> None:
    """Measure what is missing, and write the page."""
    _, arguments = script(__doc__ or "", "decoder", measure, page)
    maps = torch.load(arguments.output / "decoder-0.pt", weights_only=True)
    picture(maps).savefig(arguments.pages / "study-decoder.png", dpi=65)


if __name__ == "__main__":
    main()
