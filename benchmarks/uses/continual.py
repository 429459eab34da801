"""Split MNIST: five tasks of two digits, one after the other, by online Laplace, EWC, fine-tuning, and all at once.

    python benchmarks/uses/continual.py --data DATA --out cells.jsonl
    python benchmarks/uses/continual.py --report cells.jsonl > benchmarks/results/continual.md

A network of 196-100-100 ReLU units learns 500 images of each task, of 14 × 14 pixels. What is in the file is not run
again. The penalty's strength is that of the best mean accuracy on held-out training images, with a seed of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

import laplace_plus as lp

PER_TASK, HELD_OUT, EPOCHS, BATCH, RATE, PRIOR = 500, 300, 10, 100, 1e-3, 1.0
STRENGTHS, CHOICE_SEED = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5), 100
SETTINGS = {
    "multi-head": "a head of two outputs for each task, which is known at test time",
    "single-head, 2 outputs": "one head of two outputs, the first and the second digit of any task",
    "single-head, 10 outputs": "one head of ten outputs: tasks are told apart, too",
}
METHODS = {
    "KFAC": "online Laplace, `lp.KFAC`",
    "Diagonal": "online Laplace, `lp.Diagonal`",
    "EWC": "EWC, a diagonal Fisher matrix and a penalty for each task",
    "fine-tuning": "fine-tuning",
    "joint": "all tasks at once",
}
PENALISED = ("KFAC", "Diagonal", "EWC")

PAGE = """# Split MNIST, one task after the other

`benchmarks/uses/continual.py`, {seeds} seeds, mean ± standard error in percent.

Five tasks of two digits, {PER_TASK} training images of 14 × 14 pixels each; 196-100-100 ReLU units; {EPOCHS} epochs of
Adam at {RATE:g}, batches of {BATCH}; a prior precision of {PRIOR:g} for all rows, which is the only penalty of
fine-tuning and of all tasks at once. A seed is a start, a choice of images and an order of batches. Accuracy is a mean
over the tasks' test images after the last task; forgetting is the mean over the first four of what was lost since each
was learnt.

The penalty's strength is a factor on it, among {strengths}: that of the best mean accuracy on
{HELD_OUT} further training images of each task, in one run with another seed. No test image had a part in it. But all
tasks' held-out images had, and a learner that sees one task at a time could not choose so. A strength of 1 is Bayes'
rule as it stands.
"""


def load(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat images of 14 × 14 pixels between 0 and 1, and labels."""
    files = (folder / "mnist" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    images, labels = (gzip.decompress(file.read_bytes()) for file in files)
    x = torch.tensor(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)) / 255.0
    return avg_pool2d(x, 2).flatten(1), torch.tensor(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))


class Net(nn.Module):
    """A network with a head for each task, or one for all; ``task`` says which one answers."""

    def __init__(self, setting: str):
        super().__init__()
        self.multi, self.task = setting == "multi-head", 0
        self.body = nn.Sequential(nn.Linear(196, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        outputs = 10 if setting.endswith("10 outputs") else 2
        self.heads = nn.ModuleList([nn.Linear(100, outputs) for _ in range(5 if self.multi else 1)])

    def forward(self, x):
        """Logits of the present task's head."""
        return self.heads[self.task if self.multi else 0](self.body(x))


def split(x, y, setting: str, per_task: int, seed: int):
    """For each task images and labels for training, and held-out ones."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    found = []
    for task in range(5):
        own = order[(y[order] // 2) == task]
        labels = y[own] if setting.endswith("10 outputs") else y[own] % 2
        found.append((x[own], labels))
    if not per_task:
        return found, found
    train = [(a[:per_task], b[:per_task]) for a, b in found]
    return train, [(a[per_task : per_task + HELD_OUT], b[per_task : per_task + HELD_OUT]) for a, b in found]


def learn(net: Net, tasks, penalty, generator: torch.Generator) -> None:
    """Minimise the mean cross-entropy of some tasks plus the penalty over the number of data, by Adam."""
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    total = sum(len(y) for _, (_, y) in tasks)
    for _ in range(EPOCHS):
        parts = [
            (task, x[i], y[i])
            for task, (x, y) in tasks
            for i in torch.randperm(len(y), generator=generator).split(BATCH)
        ]
        for number in torch.randperm(len(parts), generator=generator).tolist():
            net.task, x, y = parts[number]
            optimizer.zero_grad()
            (cross_entropy(net(x), y) + penalty(net) / total).backward()
            optimizer.step()


def decay(net: nn.Module):
    """The prior's penalty."""
    return PRIOR / 2 * sum(p.square().sum() for p in net.parameters())


def fisher(net: Net, x) -> dict[str, torch.Tensor]:
    """The diagonal of the Fisher matrix, summed over the data and over all labels."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    with torch.no_grad():
        probabilities = net(x).softmax(-1)

    def log_density(parameters, one, label):
        return torch.func.functional_call(net, parameters, one[None])[0].log_softmax(-1)[label]

    each = torch.func.vmap(torch.func.grad(log_density), (None, 0, None))
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for label in range(probabilities.shape[1]):
        for i in torch.arange(len(x)).split(BATCH):
            found = each(parameters, x[i], label)
            for name, own in found.items():
                total[name] += torch.einsum("n,n...->...", probabilities[i, label], own.square())
    return total


def accuracy(net: Net, data) -> list[float]:
    """Of each task."""
    found = []
    with torch.no_grad():
        for net.task, (x, y) in enumerate(data):
            found.append(float((net(x).argmax(-1) == y).double().mean()))
    return found


def run(train, tests, setting: str, method: str, strength: float, seed: int) -> dict:
    """Accuracies of each task after each task, on each of the test sets."""
    torch.manual_seed(seed)
    net, generator = Net(setting), torch.Generator().manual_seed(seed)
    rows, start = [], time.process_time()
    posterior, anchors = None, []

    def penalty(net: Net):
        if method == "fine-tuning" or not (posterior or anchors):
            return decay(net)
        if posterior:
            return strength * lp.penalty(posterior, net)
        named = dict(net.named_parameters())
        parts = [(f[n] * (p - theta[n]).square()).sum() for theta, f in anchors for n, p in named.items()]
        return decay(net) + strength / 2 * sum(parts)

    if method == "joint":
        learn(net, list(enumerate(train)), penalty, generator)
    for task, data in enumerate(train if method != "joint" else ()):
        learn(net, [(task, data)], penalty, generator)
        net.task, (x, y) = task, data
        if method in ("KFAC", "Diagonal"):
            if posterior is None:
                posterior = getattr(lp, method)(net, "classification", prior_precision=PRIOR)
            else:
                posterior = lp.continue_on(posterior, net)
            posterior.fit(list(zip(x.split(250), y.split(250), strict=True)))
        elif method == "EWC":
            anchors.append(({n: p.detach().clone() for n, p in net.named_parameters()}, fisher(net, x)))
        rows.append([accuracy(net, own) for own in tests])
    seconds = time.process_time() - start
    rows = rows or [[accuracy(net, own) for own in tests]]
    return {"seconds": seconds, "held_out": [row[0] for row in rows], "test": [row[1] for row in rows]}


def cells(seeds: int):
    """What is to be run: the choices of a strength first."""
    for setting in SETTINGS:
        for method in METHODS:
            for strength in STRENGTHS if method in PENALISED else ():
                yield setting, method, strength, CHOICE_SEED
    for setting in SETTINGS:
        for seed in range(seeds):
            for method in METHODS:
                yield setting, method, None if method in PENALISED else 0.0, seed


def chosen(found: dict, setting: str, method: str) -> float:
    """The strength of the best mean accuracy over tasks on held-out images."""
    return max(STRENGTHS, key=lambda s: sum(found[setting, method, s, CHOICE_SEED]["held_out"][-1]))


def read(file: Path) -> dict:
    """Cells that are there."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {(row["setting"], row["method"], row["strength"], row["seed"]): row for row in lines}


def mean_and_error(values: list[float]) -> str:
    """In percent."""
    own = 100 * torch.tensor(values, dtype=torch.float64)
    return f"{float(own.mean()):.1f} ± {float(own.std()) / math.sqrt(len(own)):.1f}"


def report(found: dict) -> None:
    """The page of results."""
    write = sys.stdout.write
    seeds = sorted({key[3] for key in found} - {CHOICE_SEED})
    write(PAGE.format(**globals(), seeds=len(seeds), strengths=", ".join(f"{s:g}" for s in STRENGTHS)))
    for setting, what in SETTINGS.items():
        write(f"\n## {setting[0].upper()}{setting[1:]}: {what}\n\n")
        write("| method | strength | accuracy | forgetting | seconds of CPU |\n|---|---|---|---|---|\n")
        rows = [(m, s) for m in METHODS for s in ({chosen(found, setting, m)} if m in PENALISED else {0.0})]
        for method, strength in rows:
            own = [found[setting, method, strength, seed] for seed in seeds]
            after = [sum(one["test"][-1]) / 5 for one in own]
            lost = [
                sum(one["test"][t][t] - one["test"][-1][t] for t in range(4)) / 4
                for one in own
                if len(one["test"]) == 5
            ]
            seconds = sum(one["seconds"] for one in own) / len(own)
            forgotten = mean_and_error(lost) if lost else ""
            shown = f"{strength:g}" if method in PENALISED else ""
            write(f"| {METHODS[method]} | {shown} | {mean_and_error(after)} | {forgotten} | {seconds:.1f} |\n")
        write("\nAccuracy on held-out images of the run that chose, by strength:\n\n")
        write(f"| | {' | '.join(f'{s:g}' for s in STRENGTHS)} |\n|---|{'---|' * len(STRENGTHS)}\n")
        for method in PENALISED:
            each = [sum(found[setting, method, s, CHOICE_SEED]["held_out"][-1]) / 5 for s in STRENGTHS]
            write(f"| {METHODS[method]} | {' | '.join(f'{100 * one:.1f}' for one in each)} |\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.report:
        report(read(options.report))
        return
    train, test = load(options.data, "train"), load(options.data, "t10k")
    for setting, method, strength, seed in cells(options.seeds):
        found = read(options.out)
        strength = chosen(found, setting, method) if strength is None else strength
        if (setting, method, strength, seed) in found:
            continue
        own, held = split(*train, setting, PER_TASK, seed)
        result = run(own, (held, split(*test, setting, 0, 0)[0]), setting, method, strength, seed)
        row = {"setting": setting, "method": method, "strength": strength, "seed": seed, **result}
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        last = row["held_out"][-1]
        sys.stderr.write(
            f"{setting}, {method}, {strength:g}, seed {seed}: {sum(last) / 5:.3f}, {result['seconds']:.0f} s\n"
        )


if __name__ == "__main__":
    main()
