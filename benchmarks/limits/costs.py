"""What the README says of costs: fit, default tuning and predictions of KFAC on three networks, beside plain passes.

    python benchmarks/limits/costs.py [--networks lenet transformer resnet18]

CPU time of one thread. Epochs are passes forward and backward over the same data, forwards those of the 64 inputs that
are predicted; memory is by how much the high-water mark of a process that has trained rises. Data are random, with a
class in each.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import laplace_plus as lp


class Transformer(nn.Module):
    """Ten classes of texts of 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 128), nn.Parameter(0.02 * torch.randn(32, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, 10]`` of ids ``[B, 32]``."""
        return self.head(self.layers(self.tokens(ids) + self.places).mean(1))


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs and labels."""
    torch.manual_seed(0)
    labels = torch.randint(10, (2000 if name == "lenet" else 256,))
    if name == "transformer":
        return Transformer(), torch.randint(100, (len(labels), 32)) + 90 * labels[:, None], labels
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    images = torch.randn(10, *shape)[labels] + 2 * torch.randn(len(labels), *shape)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), images, labels
    convolutions = nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()
    hidden = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
    return nn.Sequential(*convolutions, *hidden, nn.Linear(84, 10)), images, labels


def memory(name: str) -> float:
    """A line of the process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measured(function: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds, and MB by which the high-water mark rises."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    held, start = memory("VmRSS"), time.process_time()
    function()
    return time.process_time() - start, memory("VmHWM") - held


def row(name: str, parameters: str) -> str:
    """A line of the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of posteriors that gain nothing on random data
    model, inputs, labels = case(name)
    loader = list(zip(inputs.split(64), labels.split(64), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def forward() -> None:
        with torch.no_grad():
            model(inputs[:64])

    own = min(measured(epoch)[0] for _ in range(4))
    model.eval()
    once = min(measured(forward)[0] for _ in range(8))
    posterior = lp.KFAC(model, "classification", parameters=parameters)
    fit = measured(lambda: posterior.fit(loader))
    tune = measured(posterior.fit_prior_precision)
    predict = [measured(lambda: posterior.predictive(inputs[:64]).mean) for _ in range(3)]
    peak = max(part[1] for part in (fit, tune, *predict))
    found = f"{fit[0] / own:.1f} | {tune[0] / own:.1f} | {min(predict)[0] / once:.1f} | {peak:.0f} MB"
    return f"| {name}, {parameters} | {found} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["lenet", "transformer", "resnet18"])
    cases = [(name, part) for name in parser.parse_args().networks for part in ("last_layer", "all")]
    print("| | fit, epochs | tune, epochs | predict, forwards | memory |\n|---|---|---|---|---|")  # noqa: T201
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for line in pool.map(row, *zip(*cases, strict=True)):
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
