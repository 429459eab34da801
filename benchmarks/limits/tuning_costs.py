"""What the default tuning costs beside training: CPU time of one thread, for networks of several kinds.

    python benchmarks/limits/tuning_costs.py --output benchmarks/results/tuning-costs.md [--cases lstm cnn …]

Classes are clouds of inputs that can be told apart, with 10 % wrong labels, so that both views of new data count;
targets of regressions are sines of sums of the inputs and noise. An epoch is a pass forward and backward over the same
data. Rows are replaced in the page as they are measured.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from costs import case
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models import VisionTransformer, convnext_tiny

import laplace_plus as lp

ABOUT = """# What the default tuning costs

`python benchmarks/limits/tuning_costs.py` takes the CPU time of one thread; see there for the data. The goal is
`fit_prior_precision()` within three epochs (passes forward and backward over the same data) or a second, whichever is
more. For `Full` over all weights the goal is at most five decompositions of a P × P matrix, and a first prediction of
200 rows within .5 s. Other work shared the machine's cores, from which ratios to an epoch suffer less than seconds.

Covariances of outputs at 200 data and as many midpoints take 55 % of the LSTM's time, where each of a datum's five
outputs is a backward pass through 30 steps, and at 64 midpoints two thirds of the ViT's, with ten outputs each, more
than its 64 rows take in training. Of the CNN's time 44 % is the eigendecomposition of a factor of 1568 rows, which the
first prediction would take otherwise. Of 1000 classes most of the time are the link's integrals. Fewer points would be
cheaper, but decide worse: a mean loss at 200 has a standard error of about .06 nats.

Of a regression's time two thirds are the left-out residuals of the tangent: three passes over the data, and
decompositions that depend on the numbers in the targets alone, and so take many epochs of a small network.

| network | posterior | weights | rows | epoch, s | fit, epochs | tuning, epochs | s | goal | P × P; predict 200, s |
|---|---|---|---|---|---|---|---|---|---|
"""

POSTERIORS: dict[str, Callable[[nn.Module, str], Any]] = {
    "KFAC": lp.KFAC,
    "Diagonal": lp.Diagonal,
    "last layer": lambda model, kind: lp.KFAC(model, kind, parameters="last_layer"),
    "Full": lp.Full,
}


class Recurrent(nn.Module):
    """Classes of series of eight numbers, or numbers."""

    def __init__(self, units: int = 64, outputs: int = 5) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, units, batch_first=True), nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[B, C]`` of ``[B, T, 8]``."""
        return self.head(self.body(x)[0][:, -1])


def layers(*sizes: int) -> nn.Module:
    """A multilayer perceptron."""
    parts = [part for i, o in zip(sizes[:-1], sizes[1:], strict=True) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def convolutions(outputs: int = 10) -> nn.Module:
    """Ten classes of grey images of 28 × 28 pixels, or numbers."""
    pooled = nn.ReLU(), nn.MaxPool2d(2)
    body = nn.Conv2d(1, 16, 3, padding=1), *pooled, nn.Conv2d(16, 32, 3, padding=1), *pooled
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, outputs))


def vit() -> nn.Module:
    """Ten classes of 16 patches of an image of 32 × 32 pixels."""
    model = VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=96, mlp_dim=384, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.05)  # which is zero
    return model


Case = tuple[Callable[[], nn.Module], tuple[int, ...], int, int]
CASES: dict[str, Case] = {  # a network, the shape of its inputs, classes and rows
    "MLP 50-100-100-5": (lambda: layers(50, 100, 100, 5), (50,), 5, 5000),
    "MLP 784-1024-1024-10": (lambda: layers(784, 1024, 1024, 10), (784,), 10, 2000),
    "1000 classes, 64-128-1000": (lambda: layers(64, 128, 1000), (64,), 1000, 2000),
    "LSTM 64, 30 steps": (Recurrent, (30, 8), 5, 1000),
    "CNN": (convolutions, (1, 28, 28), 10, 1500),
    "ViT, 3 layers": (vit, (3, 32, 32), 10, 64),
    "ConvNeXt tiny": (lambda: convnext_tiny(num_classes=10), (3, 32, 32), 10, 64),
    "MLP 30-60-32-5": (lambda: layers(30, 60, 32, 5), (30,), 5, 3500),
}
REGRESSIONS: dict[str, Case] = {  # outputs in place of classes
    "MLP 8-64-64-1, regression": (lambda: layers(8, 64, 64, 1), (8,), 1, 1500),
    "MLP 8-64-64-4, regression": (lambda: layers(8, 64, 64, 4), (8,), 4, 1000),
    "LSTM 24, 12 steps, regression": (lambda: Recurrent(24, 1), (12, 8), 1, 600),
    "CNN, regression": (lambda: convolutions(1), (1, 28, 28), 1, 800),
}
OTHERS = {"LeNet": "lenet", "transformer, 4 layers": "transformer"}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and its data."""
    if name in OTHERS:
        model, inputs, labels = case(OTHERS[name])
    elif name in REGRESSIONS:
        torch.manual_seed(0)
        build, shape, outputs, rows = REGRESSIONS[name]
        model, inputs = build(), torch.randn(rows, *shape)
        sums = inputs.flatten(1) @ torch.randn(inputs[0].numel(), outputs) / inputs[0].numel() ** 0.5
        return model, inputs, torch.sin(2 * sums) + 0.3 * torch.randn(rows, outputs)
    else:
        torch.manual_seed(0)
        build, shape, n_classes, rows = CASES[name]
        model, labels = build(), torch.randint(n_classes, (rows,))
        clouds = (0.4 if len(torch.zeros(shape).flatten()) > 100 else 0.9) * torch.randn(n_classes, *shape)
        inputs = clouds[labels] + torch.randn(rows, *shape)
    wrong = torch.rand(len(labels)) < 0.1
    return model, inputs, torch.where(wrong, labels[torch.randperm(len(labels))], labels)


class Decompositions(TorchFunctionMode):
    """Counts decompositions of matrices with so many rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and count."""
        name = getattr(func, "__name__", "")
        is_one = any(part in name for part in ("eig", "cholesky", "svd", "linalg_qr", "linalg_inv"))
        self.count += is_one and "solve" not in name and args[0].shape[-1] == self.size
        return func(*args, **(kwargs or {}))


def seconds(function: Callable[[], Any]) -> float:
    """Of the process's CPU time."""
    start = time.process_time()
    function()
    return time.process_time() - start


def row(name: str, kind: str) -> str:
    """A line of the table."""
    model, inputs, labels = made(name)
    size = 16 if len(labels) < 100 else 64
    loader = list(zip(inputs.split(size), labels.split(size), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = nn.functional.mse_loss if labels.is_floating_point() else nn.functional.cross_entropy

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()

    for _ in range(20 if labels.is_floating_point() else 3):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    model.eval()
    own = min(seconds(epoch) for _ in range(3))
    posterior = POSTERIORS[kind](model, "regression" if labels.is_floating_point() else "classification")
    fit = seconds(lambda: posterior.fit(loader))
    n, end = sum(own.numel() for own in model.parameters()), "–"
    with Decompositions(n if kind == "Full" else -1) as counted:
        tune = seconds(posterior.fit_prior_precision)
        first = seconds(lambda: posterior.predictive(inputs[:200]).mean) if kind == "Full" else 0.0
    if kind == "Full":
        end = f"{counted.count}, {first:.2f}"
        met = "met" if counted.count <= 5 and first <= 0.5 else "not met"  # noqa: PLR2004
    else:
        met = "met" if tune <= max(3 * own, 1.0) else "not met"
    found = f"{n} | {len(labels)} | {own:.2f} | {fit / own:.1f} | {tune / own:.1f} | {tune:.2f}"
    return f"| {name} | {kind} | {found} | {met} | {end} |"


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES, *REGRESSIONS, *OTHERS])
    parser.add_argument("--posteriors", nargs="+", default=["KFAC", "Diagonal", "last layer"])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of posteriors that gain nothing
    for name in options.cases:
        for kind in ["Full"] if name == "MLP 30-60-32-5" else options.posteriors:
            line = row(name, kind)
            print(line, flush=True)  # noqa: T201
            text = options.output.read_text() if options.output.exists() else ABOUT
            same = re.compile(rf"^\| {re.escape(name)} \| {kind} \|.*\n", re.MULTILINE)
            text = same.sub(lambda _, line=line: line + "\n", text) if same.search(text) else text + line + "\n"
            options.output.write_text(text)


if __name__ == "__main__":
    main()
