"""Rotated digits and corrupted photographs: what a network and its posteriors say as inputs leave the training data.

    python benchmarks/study/shifts.py --data DATA --output FOLDER --pages PAGES

MNIST is turned by up to 180°; CIFAR-10 is blurred, loses contrast or is covered by noise, at five levels each. Rows are
those of configs/study-rows.yaml. Writes study-shifts.md and study-shifts.png; goes on where it was interrupted.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study import yardsticks as yardsticks  # for its entries in the registry
from benchmarks.study.evaluation import Gathered, gather
from benchmarks.study.last_layers import mean_of
from benchmarks.study.methods import Task, run
from benchmarks.study.rows import Row, Rows, said, script, section_of, table, task_of
from benchmarks.study.scored import Classified, Predict
from benchmarks.study.sets import DataSet
from laplace_plus import metrics

SHIFTED = 150
"""Test images that are shifted, of the corrupted photographs."""

LEVELS = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),
    "blur": (0.5, 0.8, 1.2, 1.8, 2.5),
    "contrast": (0.75, 0.5, 0.35, 0.25, 0.15),
}
"""Standard deviation of noise, of the blur in pixels; what is left of an image's deviations from its mean."""

SCORES = {"nll": "NLL", "ece": "ECE", "accuracy": "accuracy", "entropy": "mean entropy"}
SHOWN = {
    "mnist": ("MNIST, rotated", [f"rotation {level}" for level in (2, 3, 4, 6, 12)]),
    "cifar10": ("CIFAR-10, corrupted", [f"{kind} {level}" for kind in LEVELS for level in (3, 5)]),
}
"""Levels in the tables; the picture has all."""


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images turned about their centres, bilinear, what comes in from outside being zero."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), math.sin(angle), 0.0], [-math.sin(angle), math.cos(angle), 0.0]])
    grid = functional.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def noisy(images: Tensor, std: float) -> Tensor:
    """Images in [0, 1] with normal noise, cut off there; the same noise for every method."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + std * noise).clamp(0, 1)


def blurred(images: Tensor, std: float) -> Tensor:
    """Images convolved with a normal density, their borders repeated."""
    reach = math.ceil(3 * std)
    kernel = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * std**2))
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, 1, -1)
    for pad, one in (((reach, reach, 0, 0), kernel), ((0, 0, reach, reach), kernel.mT)):
        images = functional.conv2d(functional.pad(images, pad, mode="replicate"), one, groups=images.shape[1])
    return images


def flattened(images: Tensor, factor: float) -> Tensor:
    """Images whose deviations from their own means are ``factor`` times what they were."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + factor * (images - mean)


CORRUPTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"noise": noisy, "blur": blurred, "contrast": flattened}


def shifts(data: DataSet) -> Iterator[tuple[str, int, Tensor]]:
    """Test images as they are, level 0, and shifted; images are standardised, pixels being in [0, 1]."""
    low, high = data.train[0].min(), data.train[0].max()
    inputs = data.test[0]
    pixels = (inputs - low) / (high - low)
    if data.name == "mnist":
        yield from (("rotation", k, low + (high - low) * rotated(pixels, 15.0 * k)) for k in range(13))
        return
    yield "none", 0, inputs
    for kind, levels in LEVELS.items():
        shift = CORRUPTIONS[kind]
        yield from ((kind, k + 1, low + (high - low) * shift(pixels[:SHIFTED], x)) for k, x in enumerate(levels))


def scored(found: Gathered) -> dict[str, float]:
    """Means over a part: of scores, and of the entropy of predictions."""
    assert isinstance(found.scored, Classified)
    own = found.scored.scores()
    names = {"ece": "expected_calibration_error", "accuracy": "accuracy"}
    entropy = float(found.scored.uncertainty().mean())
    return {"nll": -float(found.log_density.mean()), **{k: own[name] for k, name in names.items()}, "entropy": entropy}


def measured(task: Task, options: dict[str, Any]) -> Row:
    """Scores of every level, AUROC of images from elsewhere, and costs."""
    started = time.process_time()
    fitted = run(task, options)
    fit = time.process_time() - started

    def of(inputs: Tensor, targets: Tensor, predict: Predict = fitted.predict) -> Gathered:
        return gather(predict, list(zip(inputs.split(250), targets.split(250), strict=True)), classification=True)

    levels, targets, own = {}, task.data.test[1], None
    for kind, level, inputs in shifts(task.data):
        found = of(inputs, targets[: len(inputs)])
        levels[f"{kind} {level}"] = scored(found)
        own = found if own is None else own
    assert own is not None and isinstance(own.scored, Classified)
    doubt, ood = own.scored.uncertainty(), {}
    for name, inputs in task.data.ood.items():
        strange = of(inputs, torch.zeros(len(inputs), dtype=torch.long)).scored
        assert isinstance(strange, Classified)
        ood[name] = float(metrics.ood_auroc(doubt, strange.uncertainty()))
    return {"levels": levels, "ood": ood, "fit_seconds": fit, "tuning": fitted.tuning, "predict_seconds": own.seconds}


def measure(rows: Rows, arguments: Namespace) -> None:
    """All that is missing."""
    for name in SHOWN:
        section = section_of(name)
        labels = [label for label, options in section.methods.items() if options.get("only") != "regression"]
        for seed in range(arguments.seeds):
            if all(rows.where(set=name, method=label, seed=seed) for label in labels):
                continue
            task = task_of(section, seed, arguments)
            for label in labels:
                part = partial(measured, task, section.methods[label])
                rows.of(part, set=name, method=label, seed=seed)


INTRODUCTION = """
# Rotated digits and corrupted photographs

A LeNet on {digits} digits of MNIST, and one with {channels} channels and ReLUs on {size} images of CIFAR-10, which were
recompressed as JPEG; {test} test images ({shifted} where photographs are corrupted). Mean ± standard error over splits,
which are drawn anew. The default rows are the two lines of the README, for all weights and for the last layer;
the link of all posteriors is the default one.

![Four scores against the level of each shift, a line for each method](study-shifts.png)

"""


def page(rows: Rows) -> str:
    """Inputs as they are, with images from elsewhere; then, for each score, some levels."""
    photographs = section_of("cifar10")
    digits = section_of("mnist").source
    about = {
        "digits": digits["train_size"],
        "test": digits["test_size"],
        "channels": " and ".join(map(str, photographs.network["channels"])),
        "size": photographs.source["train_size"],
    }
    lines = [INTRODUCTION.strip().format(shifted=SHIFTED, **about), ""]
    for name, (title, shown) in SHOWN.items():
        by = by_method(rows, name)
        if not by:
            continue
        first = next(iter(by.values()))[0]
        plain, elsewhere = next(iter(first["levels"])), list(first["ood"])
        head = [
            "",
            "NLL",
            "ECE",
            "accuracy",
            *(f"AUROC, {other.replace('_', ' ')}" for other in elsewhere),
            "fit, CPU s",
        ]
        n = len({row["seed"] for row in rows.where(set=name)})
        lines += [
            f"## {title} ({n} split{'s' * (n > 1)})",
            "",
            "Test images as they are, and by entropy images of two other sets:",
            "",
        ]
        lines += table(head, ([label, *_plain(some, plain, elsewhere)] for label, some in by.items()))
        for score, long in SCORES.items():
            lines += [f"{long}:", ""]
            cells = ([label, *(said(values(some, level, score)) for level in shown)] for label, some in by.items())
            lines += table(["", *(titled(level) for level in shown)], cells)
    return "\n".join(lines).rstrip() + "\n"


def by_method(rows: Rows, name: str) -> dict[str, list[Row]]:
    """A set's rows, method by method."""
    own = rows.where(set=name)
    return {label: [row for row in own if row["method"] == label] for label in dict.fromkeys(r["method"] for r in own)}


def values(rows: list[Row], level: str, score: str) -> list[float]:
    """A score at a level, split by split."""
    return [row["levels"][level][score] for row in rows]


def _plain(rows: list[Row], level: str, elsewhere: list[str]) -> list[str]:
    own = [said(values(rows, level, score)) for score in ("nll", "ece", "accuracy")]
    ood = [said([row["ood"][other] for row in rows]) for other in elsewhere]
    return [*own, *ood, f"{min(row['fit_seconds'] for row in rows):.2g}"]


def titled(level: str) -> str:
    """What a level is."""
    kind, number = level.split()
    return f"{15 * int(number)}°" if kind == "rotation" else f"{kind} {LEVELS[kind][int(number) - 1]}"


def picture(rows: Rows) -> Figure:
    """A column for each shift, a row for each score."""
    kinds = {"rotation": "mnist", **dict.fromkeys(LEVELS, "cifar10")}
    figure = Figure(figsize=(11, 9), layout="constrained")
    panels = figure.subplots(len(SCORES), len(kinds), sharex="col")
    for column, (kind, name) in enumerate(kinds.items()):
        for label, some in by_method(rows, name).items():
            levels = [level for level in some[0]["levels"] if level.split()[0] in (kind, "none")]
            places = [15 * k if kind == "rotation" else k for k in range(len(levels))]
            for score, panel in zip(SCORES, panels[:, column], strict=True):
                found = [mean_of(values(some, level, score)) for level in levels]
                panel.errorbar(places, *zip(*found, strict=True), marker="o", ms=2.5, lw=1, capsize=1.5, label=label)
        panels[0, column].set_title(f"{name.upper()}, {kind}", fontsize=10)
        panels[-1, column].set_xlabel("degrees" if kind == "rotation" else "level")
    for score, panel in zip(SCORES.values(), panels[:, 0], strict=True):
        panel.set_ylabel(score)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    """Measure what is missing, and write the page."""
    rows, arguments = script(__doc__ or "", "shifts", measure, page)
    picture(rows).savefig(arguments.pages / "study-shifts.png", dpi=60)


if __name__ == "__main__":
    main()
