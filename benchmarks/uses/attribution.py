"""Attribution on a small scale, against retraining: 150 images of three digits, a network of two convolutions.

python benchmarks/uses/attribution.py --data DATA --part flips|single|halves --seeds 0 1 ... --out FILE.jsonl
python benchmarks/uses/attribution.py --summary FILE.jsonl

``flips``: a tenth of the labels is wrong; AUROC of self-influence. ``single``: networks without one of 20 images, which
are the truth for scores. ``halves``: networks of random halves; the linear datamodeling score is Spearman's
correlation, over the halves, of a query's loss with the sum of the scores of the half's images, times −1. ``scores``
are needed for both. Queries are 60 test images.
All training minimises Σ NLL + DECAY/2 ‖θ‖², so that the posteriors' prior precision is DECAY whatever the data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from mislabels import auroc, load
from scipy.stats import spearmanr
from torch import nn
from torch.nn.functional import cross_entropy

import laplace_plus as lp

CLASSES, EACH, QUERIES, LEFT_OUT, DECAY, STEPS = (0, 1, 2), 50, 20, 20, 0.5, 120


def digits(folder: Path, part: str, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many images of each class, the first ones of the file."""
    x, y = load(folder, "mnist", 2000, part)
    chosen = torch.cat([(y == label).nonzero()[:each, 0] for label in CLASSES])
    return x[chosen].view(-1, 1, 28, 28), y[chosen]


def trained(x, y, seed: int) -> nn.Module:
    """Two convolutions and a linear layer, at the optimum of the penalised loss as far as the steps go."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.Tanh(), nn.Conv2d(8, 16, 5, stride=2), nn.Tanh(), nn.Flatten()),
        nn.Linear(256, len(CLASSES)),
    )
    line = {"line_search_fn": "strong_wolfe", "history_size": 20, "tolerance_grad": 1e-6, "tolerance_change": 1e-12}
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=STEPS, max_eval=2 * STEPS, **line)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        decay = DECAY / 2 * sum(p.square().sum() for p in net.parameters())
        total = (cross_entropy(net(x), y, reduction="sum") + decay) / len(CLASSES) / EACH
        total.backward()
        return total

    optimizer.step(loss)
    return net.eval()


def posteriors(net: nn.Module, data: list) -> dict:
    """Posteriors with the precision of training."""
    options = {"prior_precision": DECAY}
    found = {
        "KFAC": lp.KFAC(net, "classification", **options),
        "EKFAC": lp.KFAC(net, "classification", eigenvalue_corrected=True, **options),
        "Full, last layer": lp.Full(net, "classification", parameters="last_layer", **options),
    }
    return {name: posterior.fit(data) for name, posterior in found.items()}


def losses(net: nn.Module, query: tuple) -> torch.Tensor:
    """Of each query."""
    with torch.no_grad():
        return cross_entropy(net(query[0]), query[1], reduction="none").double()


def flips(x, y, seed: int) -> dict:
    """AUROC of each score for wrong labels."""
    torch.manual_seed(seed)
    flipped = torch.zeros(len(x), dtype=torch.bool)
    flipped[torch.randperm(len(x))[: len(x) // 10]] = True
    noisy = torch.where(flipped, (y + torch.randint(1, len(CLASSES), y.shape)) % len(CLASSES), y)
    net = trained(x, noisy, seed)
    found = {n: auroc(lp.uses.self_influence(p), flipped) for n, p in posteriors(net, [(x, noisy)]).items()}
    return found | {"loss": auroc(losses(net, (x, noisy)), flipped)}


def scores(x, y, query: tuple, seed: int) -> dict:
    """Of one network of all images: its posteriors' scores, ``[Q, N]``."""
    found = {}
    for name, posterior in posteriors(trained(x, y, seed), [(x, y)]).items():
        found[name] = lp.uses.influence(posterior, [query]).mean.tolist()
    return found


def summary(file: Path) -> None:
    """Tables over seeds."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    of = defaultdict(list)
    for row in rows:
        of[row["part"]].append(row)
    write = sys.stdout.write
    if of["flips"]:
        write(f"| score | AUROC of wrong labels, {len(of['flips'])} seeds | s.e. | least |\n|---|---|---|---|\n")
        for name in of["flips"][0]["auroc"]:
            own = torch.tensor([row["auroc"][name] for row in of["flips"]])
            write(f"| {name} | {own.mean():.3f} | {own.std() / len(own) ** 0.5:.3f} | {own.min():.3f} |\n")
    if not of["scores"]:
        return
    names = list(of["scores"][0]["scores"])
    double = torch.float64
    members = {n: torch.tensor([row["scores"][n] for row in of["scores"]], dtype=double) for n in names}  # [T, Q, N]
    if of["single"]:
        images = of["single"][0]["images"]
        truth = torch.tensor([row["changes"] for row in of["single"]], dtype=double)  # [T, Q, images]
        mean = truth.mean(0)
        write(f"\n| scores | Spearman with the truth of {len(truth)} seeds, means of all | single networks |\n")
        write("|---|---|---|\n")
        if len(truth) > 1:
            halves = torch.stack([truth[::2].mean(0), truth[1::2].mean(0)])
            write(f"| truth of every other seed | {spearmanr(*halves.flatten(1)).statistic:.3f} | |\n")
        for name in names:
            own = members[name][..., images]
            whole = spearmanr(own.mean(0).flatten(), mean.flatten()).statistic
            each = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(own, truth, strict=False)]
            write(f"| {name} | {whole:.3f} | {sum(each) / len(each):.3f} |\n")
    if of["halves"]:
        masks = torch.tensor([row["mask"] for row in of["halves"]]).double()  # [M, N]
        truth = torch.tensor([row["losses"] for row in of["halves"]], dtype=double)  # [M, Q]
        write(f"\n| scores | linear datamodeling score, {len(masks)} halves | s.e. over queries | single networks |\n")
        write("|---|---|---|---|\n")
        for name in names:

            def score(own, masks=masks, truth=truth):
                predicted = -masks @ own.T  # a datum that is present changes the loss by minus its score
                return torch.tensor([spearmanr(a, b).statistic for a, b in zip(predicted.T, truth.T, strict=True)])

            whole, each = score(members[name].mean(0)), [float(score(own).mean()) for own in members[name]]
            error = whole.std() / len(whole) ** 0.5
            write(f"| {name} | {whole.mean():.3f} | {error:.3f} | {sum(each) / len(each):.3f} |\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--part", choices=("flips", "scores", "single", "halves"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), help="first, and the one after the last")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path)
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
        return
    (x, y), query = digits(options.data, "train", EACH), digits(options.data, "t10k", QUERIES)
    for seed in range(*options.seeds):
        row: dict = {"part": options.part, "seed": seed}
        if options.part == "flips":
            row["auroc"] = flips(x, y, seed)
        elif options.part == "scores":
            row["scores"] = scores(x, y, query, seed)
        elif options.part == "single":
            before, kept = losses(trained(x, y, seed), query), torch.ones(len(x), dtype=torch.bool)
            images = torch.linspace(0, len(x) - 1, LEFT_OUT).round().long().tolist()
            changes = []
            for image in images:
                kept[image] = False
                changes.append(losses(trained(x[kept], y[kept], seed), query) - before)
                kept[image] = True
            row |= {"images": images, "changes": torch.stack(changes, 1).tolist()}
        else:
            torch.manual_seed(seed)
            mask = torch.zeros(len(x), dtype=torch.bool)
            mask[torch.randperm(len(x))[: len(x) // 2]] = True
            row |= {"mask": mask.tolist(), "losses": losses(trained(x[mask], y[mask], seed), query).tolist()}
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
