"""Pruning without fine-tuning: LeNet on 5000 images of Fashion-MNIST, by several criteria, over seeds.

python benchmarks/uses/pruning.py --data DATA --out pruning.jsonl [--held]
python benchmarks/uses/pruning.py --summary pruning.jsonl

``--held`` evaluates on 5000 other training images, for choices; without it, on the 10,000 test images. Priors are tuned
by the marginal likelihood on the 5000 training images first.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from mislabels import load
from torch import nn
from torch.nn.functional import cross_entropy

import laplace_plus as lp

TRAIN, EPOCHS, BATCH, DECAY = 5000, 30, 100, 1e-4
LEVELS = (0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99)


def trained(x, y, seed: int) -> nn.Module:
    """LeNet with ReLU, trained with weight decay."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    steps = EPOCHS * len(x) // BATCH
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            decay = DECAY / 2 * sum(p.square().sum() for p in net.parameters())
            (cross_entropy(net(x[part]), y[part]) + decay).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def measured(net: nn.Module, state: dict, data: list) -> tuple[float, float]:
    """Accuracy and mean negative log-likelihood with other weights."""
    with torch.no_grad():
        logits = torch.cat([torch.func.functional_call(net, state, (x,)) for x, _ in data])
    y = torch.cat([y for _, y in data])
    return float((logits.argmax(1) == y).double().mean()), float(cross_entropy(logits, y))


def without(net: nn.Module, scores: dict, share: float) -> dict:
    """Weights of which the share with the least scores, over all layers, is zero."""
    flat = torch.cat([own.flatten() for own in scores.values()])
    least = flat.sort().values[round(share * len(flat)) - 1]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for name, own in scores.items():
        state[name][own <= least] = 0
    return state


def baselines(net: nn.Module, data: list, seed: int) -> dict:
    """Scores of each weight that need no posterior: random, and the gradient of the loss times the weight."""
    weights = {name: p for name, p in net.named_parameters() if p.ndim > 1}
    loss = sum(cross_entropy(net(x), y, reduction="sum") for x, y in data)
    slopes = torch.autograd.grad(loss, list(weights.values()))
    generator = torch.Generator().manual_seed(seed)
    return {
        "random": {name: torch.rand(p.shape, generator=generator) for name, p in weights.items()},
        "gradient": {name: (g * p.detach()).abs() for (name, p), g in zip(weights.items(), slopes, strict=True)},
    }


def posteriors(net: nn.Module, data: list) -> dict:
    """Posteriors with tuned priors, by name."""
    found = {
        "Diagonal, prior by weight": lp.Diagonal(net, "classification").fit(iter(data)),
        "Diagonal, prior by layer": lp.Diagonal(net, "classification").fit(iter(data)),
        "KFAC, prior by layer": lp.KFAC(net, "classification").fit(iter(data)),
    }
    for name, posterior in found.items():
        structure = "diagonal" if "by weight" in name else "layerwise"
        posterior.fit_prior_precision("marginal_likelihood", structure)
    return found


def run(options, seed: int) -> None:
    """One network: all criteria at all levels, appended to the file."""
    x, y = load(options.data, "fashion_mnist", 2 * TRAIN)
    x = x.view(-1, 1, 28, 28)
    data = list(zip(x[:TRAIN].split(500), y[:TRAIN].split(500), strict=True))
    if options.held:
        test = list(zip(x[TRAIN:].split(500), y[TRAIN:].split(500), strict=True))
    else:
        x_test, y_test = load(options.data, "fashion_mnist", 10_000, "t10k")
        test = list(zip(x_test.view(-1, 1, 28, 28).split(500), y_test.split(500), strict=True))
    net = trained(x[:TRAIN], y[:TRAIN], seed)

    def note(name: str, share: float, state: dict) -> None:
        accuracy, nll = measured(net, state, test)
        row = {"seed": seed, "criterion": name, "sparsity": share, "accuracy": accuracy, "nll": nll}
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    if options.steps:
        small = copy.deepcopy(net)
        for share in options.levels:
            posterior = lp.KFAC(small, "classification").fit(iter(data))
            posterior.fit_prior_precision("marginal_likelihood", "layerwise")
            pruned = lp.uses.prune(posterior, sparsity=share)  # those that are zero already are the least salient
            small.load_state_dict(pruned.state_dict)
            note("precision, KFAC, prior by layer, compensated, in steps", share, pruned.state_dict)
        return
    note("unpruned", 0.0, net.state_dict())
    for name, scores in baselines(net, data, seed).items():
        for share in options.levels:
            note(name, share, without(net, scores, share))
    for of, posterior in posteriors(net, data).items():
        for criterion in ("magnitude", "precision", "evidence"):
            for compensate in (False, True) if "KFAC" in of else (False,):
                if criterion == "magnitude" and "KFAC" not in of:  # the same for all posteriors
                    continue
                if criterion == "evidence" and "KFAC" in of and not options.all:  # nine tenths of the time
                    continue
                name = f"{criterion}, {of}{', compensated' * compensate}"
                name = "magnitude" if criterion == "magnitude" and not compensate else name
                start = time.process_time()
                for share in options.levels:
                    pruned = lp.uses.prune(posterior, sparsity=share, criterion=criterion, compensate=compensate)
                    note(name, share, pruned.state_dict)
                sys.stderr.write(f"{seed} {name}: {time.process_time() - start:.0f} s of CPU\n")


def summary(file: Path) -> None:
    """Tables of means over seeds: accuracies, then losses."""
    found = defaultdict(list)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        found[row["criterion"], row["sparsity"]].append(row)
    levels, seeds = sorted({row["sparsity"] for row in rows}), len({row["seed"] for row in rows})
    for what in ("accuracy", "nll", "accuracy minus magnitude's"):
        key = what.split()[0]
        sys.stdout.write(f"| {what} | " + " | ".join(f"{level:.0%}" for level in levels) + " |\n")
        sys.stdout.write("|---" * (len(levels) + 1) + "|\n")
        for name in dict.fromkeys(row["criterion"] for row in rows):
            cells = []
            for level in levels:
                own = {row["seed"]: row[key] for row in found[name, level]}
                base = {row["seed"]: row[key] for row in found["magnitude", level]}
                if what != key:
                    own = {seed: value - base[seed] for seed, value in own.items() if seed in base}
                values = torch.tensor(list(own.values()), dtype=torch.float64)
                error = f" ± {values.std() / len(values) ** 0.5:.3f}" if what != key and len(values) > 1 else ""
                cells.append(f"{values.mean():.3f}{error}" if len(own) == seeds else "")
            sys.stdout.write(f"| {name} | " + " | ".join(cells) + " |\n")
        sys.stdout.write("\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--steps", action="store_true", help="a new posterior at each level, and nothing else")
    parser.add_argument("--all", action="store_true", help="with the evidence of KFAC, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS)
    parser.add_argument("--summary", type=Path)
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
        return
    for seed in options.seeds:
        run(options, seed)


if __name__ == "__main__":
    main()
