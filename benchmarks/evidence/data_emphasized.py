"""Training by the data-emphasised bound beside a grid of weight decays, LeNet on some Fashion-MNIST images.

python benchmarks/evidence/data_emphasized.py --data DATA --page PAGE

Network, initial weights, minibatches, optimizer, schedule and epochs are those of marginal_likelihood_training.py; the
bound has learning rates of its own, of which the least loss of training chooses. The grid's best decay is the one of
least test NLL: a bound on what a search with held-out data could find.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import CLI

import laplace_plus as lp

sys.path.insert(0, str(Path(__file__).parent))
from marginal_likelihood_training import Bench, parts

SETTINGS: dict[str, Any] = {"epochs": 40, "batch_size": 100, "learning_rate": 0.02, "evaluate": "test"}


def text(values: list[float]) -> str:
    """Mean ± standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return f"{tensor.mean():.4f} ± {tensor.std() / math.sqrt(len(values)):.4f}"


def main(
    data: Path,
    page: Path,
    sizes: tuple[int, ...] = (1000, 5000),
    weight_decays: tuple[float, ...] = (0.0, 5e-4, 5e-3, 2e-2, 5e-2),
    emphases: tuple[str, ...] = ("P/N", "1"),
    learning_rates: tuple[float, ...] = (0.1, 0.02),
    seeds: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Train all rows, and write the page after each seed."""
    found: dict[int, dict[str, list[dict[str, float]]]] = {size: defaultdict(list) for size in sizes}
    for size in sizes:
        bench = Bench(data, "cpu", {**SETTINGS, "n_train": size})
        for seed in seeds:
            train, (x, y) = parts(data, size, "test", seed)
            for decay in weight_decays:
                start = time.process_time()
                model = bench.usual(train, decay, seed)
                row = {**bench.map(model, x, y), "seconds": time.process_time() - start}
                found[size][f"weight decay {decay:g}"].append(row)
            for emphasis, rate in itertools.product(emphases, learning_rates):
                own = Bench(data, "cpu", {**bench.settings, "learning_rate": rate})
                model, loader = own.start(train, seed)
                start = time.process_time()
                trained = lp.train_data_emphasized(
                    model,
                    loader,
                    epochs=SETTINGS["epochs"],
                    emphasis="P/N" if emphasis == "P/N" else float(emphasis),
                    prior_mean=0.0,
                    optimizer=own.optimizer,
                    scheduler=own.scheduler,
                    generator=torch.Generator().manual_seed(seed),
                )
                row = {**bench.map(model, x, y), "seconds": time.process_time() - start, "loss": trained.losses[-1]}
                found[size][f"κ = {emphasis}, learning rate {rate:g}"].append(row)
            write(page, found)


def write(page: Path, found: dict[int, dict[str, list[dict[str, float]]]]) -> None:
    """A table for each number of images."""
    lines = ["# Training by the data-emphasised bound, Fashion-MNIST", ""]
    for size, rows in found.items():
        if not rows:
            continue
        lines += [f"## {size} images, {len(next(iter(rows.values())))} seeds", ""]
        lines += ["| training | accuracy | NLL | ECE | loss of training | CPU s |", "|---|---|---|---|---|---|"]
        for row, own in rows.items():
            cells = [text([one[key] for one in own]) for key in ("accuracy", "nll", "ece")]
            seconds = sum(one["seconds"] for one in own) / len(own)
            loss = text([one["loss"] for one in own]) if "loss" in own[0] else ""
            lines.append(f"| {row} | {' | '.join(cells)} | {loss} | {seconds:.0f} |")
        lines.append("")
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    CLI(main, as_positional=False)
