"""What it costs to examine which rows of a batch belong to which example.

    python benchmarks/limits/rows.py --weights FOLDER

prints a table of CPU times in one process, as parts of the time without: of the first batch only, as in networks that
move no rows by their data, and of every batch, as in networks that do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from models import Batches, build, train
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.network import invariant
from laplace_plus.network.network import Network

KINDS = {"exact": "ggn", "a sampled label": "ggn_mc"}


class Transformer(nn.Module):
    """Two layers of width 64 on 16 tokens, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(100, 64), nn.Parameter(torch.randn(16, 64) / 10)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, 16]`` to logits ``[B, 10]``."""
        return self.head(self.body(self.table(x) + self.place).mean(1))


def transformer() -> tuple[nn.Module, Batches]:
    """A transformer that was trained for a while to count its tokens below ten, and data."""
    torch.manual_seed(0)
    model, x = Transformer(), torch.randint(0, 100, (512, 16))
    batches = list(zip(x.split(64), (x < 10).sum(1).clamp(max=9).split(64), strict=True))  # noqa: PLR2004
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for inputs, targets in batches * 10:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.eval(), batches


def times(call: Callable[[], Any], network: Network, repetitions: int) -> list[float]:
    """Median CPU seconds of a call if no batch is examined, the first one or every one."""
    found = [list[float]() for _ in range(3)]
    for _ in range(repetitions):
        for number, own in enumerate(found):
            changes = ExitStack()
            if number == 0:
                changes.enter_context(mock.patch.object(network, "forget"))  # a fit begins with what is known already
            elif number == 1:
                network.forget()
            else:
                changes.enter_context(mock.patch.object(invariant, "places", moved))
            with changes:
                begin = time.process_time()
                call()
                own.append(time.process_time() - begin)
    return list(map(median, found))


def moved(*_: Any) -> tuple[None, frozenset[int]]:
    """What the graph tells of a network that moves rows."""
    return None, frozenset()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of trained networks")
    parser.add_argument("--networks", nargs="+", default=["lenet", "transformer", "resnet18"])
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    print("| network, batches | what | ms | first batch | every batch |\n|---|---|---|---|---|")  # noqa: T201
    for name in given.networks:
        if name == "transformer":
            model, batches = transformer()
        else:
            train(name, given.weights)
            problem = build(name, given.weights)
            model, size = problem.model, problem.batch_size if name != "resnet18" else 16
            batches = list(zip(problem.inputs.split(size), problem.targets.split(size), strict=True))[:8]
        for kind, curvature in KINDS.items():
            posterior = lp.KFAC(model, "classification", prior_precision=1.0, backend=lp.Native(curvature)).fit(batches)
            rows = {f"KFAC, {kind}": partial(posterior.fit, batches)}
            if curvature == "ggn":
                for n in 1, 8:
                    rows[f"covariances of {n}"] = partial(posterior.functional_posterior, batches[0][0][:n])
            for what, call in rows.items():
                plain, first, every = times(call, posterior.network, given.repetitions)
                measured = f"{1e3 * plain:.0f} | {first / plain:.2f} | {every / plain:.2f}"
                print(f"| {name}, {len(batches)} | {what} | {measured} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
