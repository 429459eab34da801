"""An LSTM that forecasts a chaotic series, and a U-Net with transposed convolutions that removes noise from digits.

    python benchmarks/uses/recurrent_transposed.py --page benchmarks/results/recurrent-transposed-cpu.md

Both are trained, then the Kronecker curvature of all their weights stands beside the diagonal one and the network with
its noise alone. Times are CPU seconds on one thread, beside an epoch (forward and backward passes over the same rows)
and a forward pass. Two minutes in all.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp

SEEDS, BATCH = (0, 1), 50
CLASSES = {"KFAC": lp.KFAC, "diagonal": lp.Diagonal}
TUNERS = {"marginal_likelihood": "evidence", "auto": "default"}
COLUMNS = ("NLL", "90 % interval", "NLL, shifted", "90 % interval, shifted", "fit, epochs", "predict, forwards")


class Forecaster(nn.Module):
    """The next value of a series from 30 values before."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 30, 1]`` to ``[B, 1]``."""
        return self.head(self.lstm(x)[0][:, -1])


class UNet(nn.Module):
    """Two scales down and up again, by transposed convolutions."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.deep, self.middle = nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up_deep = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.up = nn.ConvTranspose2d(4 * width, width, 3, 2, 1, 1)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1, 8, 8]`` to the 16 pixels in the middle."""
        fine = F.gelu(self.first(x))
        coarse = F.gelu(self.down(fine))
        deepest = F.gelu(self.middle(F.gelu(self.deep(coarse))))
        coarse = torch.cat([coarse, F.gelu(self.up_deep(deepest))], 1)
        return self.out(torch.cat([fine, F.gelu(self.up(coarse))], 1))[:, :, 2:6, 2:6].flatten(1)


def series(length: int, delay: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of the Mackey-Glass equation with noise, ``[N, 30, 1]``, and the noisy values three steps on."""
    values = [1.2 + 0.1 * float(torch.rand((), generator=generator))] * (delay * 10)
    while len(values) < (length + 150) * 10:
        late = values[-delay * 10]
        values.append(values[-1] + 0.1 * (0.2 * late / (1 + late**10) - 0.1 * values[-1]))
    found = torch.tensor(values[1000::10])
    found = found + 0.05 * torch.randn(len(found), generator=generator)
    return found.unfold(0, 30, 1)[: length - 3, :, None], found[32:][: length - 3, None]


def forecast(seed: int) -> tuple[nn.Module, Any, Any, Any, int]:
    """Network, rows to train on, to test on, shifted ones, and epochs."""
    generator = torch.Generator().manual_seed(seed)
    x, y = series(303, 17, generator)
    return Forecaster(), (x, y), series(503, 17, generator), series(503, 30, generator), 150


def denoise(seed: int) -> tuple[nn.Module, Any, Any, Any, int]:
    """As :func:`forecast`."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = images[torch.randperm(len(images), generator=generator)]

    def noisy(some: Tensor) -> tuple[Tensor, Tensor]:
        return some + 0.3 * torch.randn(some.shape, generator=generator), some[:, :, 2:6, 2:6].flatten(1)

    train, test = images[:100], images[-100:]
    return UNet(), noisy(train), noisy(test), noisy(1 - test), 100


TASKS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "forecast": ("LSTM of 64 units, 30 steps (17 985 weights)", forecast),
    "denoise": ("U-Net with two transposed convolutions, 16 of 8 × 8 pixels", denoise),
}


def batches(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Rows in batches."""
    return [*zip(data[0].split(BATCH), data[1].split(BATCH), strict=True)]


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, generator: torch.Generator) -> None:
    """Adam with a rate that falls along a cosine."""
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        order = torch.randperm(len(data[0]), generator=generator)
        for x, y in batches((data[0][order], data[1][order])):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        schedule.step()


def seconds(function: Callable[[], Any], times: int = 3) -> float:
    """The least CPU time of some calls after a first one."""
    function()
    found = []
    for _ in range(times):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def scores(mean: Tensor, std: Tensor, y: Tensor) -> list[float]:
    """Mean negative log-density of single values, and how many lie within the 90 % interval."""
    found = torch.distributions.Normal(mean, std)
    return [-float(found.log_prob(y).mean()), float(((y - mean).abs() <= 1.645 * std).float().mean())]


def measured(task: str, seed: int) -> dict[str, list[float]]:
    """The columns for each method."""
    torch.manual_seed(seed)
    model, data, test, shifted, epochs = TASKS[task][1](seed)
    train(model, data, epochs, torch.Generator().manual_seed(seed))
    model.eval()

    def epoch() -> None:
        for x, y in batches(data):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()

    def forward() -> None:
        with torch.no_grad():
            model(test[0][:BATCH])

    one_epoch, one_forward = seconds(epoch), seconds(forward, 10)
    with torch.no_grad():
        noise = (model(data[0]) - data[1]).square().mean().sqrt()
        rows = [scores(model(own[0]), noise, own[1]) for own in (test, shifted)]
    found = {"network, noise of its residuals": [*rows[0], *rows[1], 0.0, 1.0]}
    for name, cls in CLASSES.items():
        fit = seconds(lambda cls=cls: cls(model, "regression").fit(batches(data)), 1)
        posterior = cls(model, "regression").fit(batches(data))
        for tuner in TUNERS if task == "forecast" else ["marginal_likelihood"]:
            posterior.fit_prior_precision(tuner)
            predict = seconds(lambda own=posterior: own.predictive(test[0][:BATCH]))
            rows = []
            for own in (test, shifted):
                parts = [posterior.predictive(x) for x in own[0].split(BATCH)]
                mean, variance = (torch.cat([getattr(part, key) for part in parts]) for key in ("mean", "variance"))
                rows += scores(mean, variance.sqrt(), own[1])
            found[f"{name}, {TUNERS[tuner]}"] = [*rows, fit / one_epoch, predict / one_forward]
    return found


def page(found: dict[str, dict[str, list[list[float]]]]) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Recurrent layers and transposed convolutions",
        "",
        "`python benchmarks/uses/recurrent_transposed.py --page PAGE` made this page "
        f"(Python {platform.python_version()}, torch {torch.__version__}, one thread of a busy machine).",
        "",
        f"Means over {len(SEEDS)} trainings, with the standard error of NLL, which is in nats for each value. The LSTM",
        "forecasts a noisy Mackey-Glass series (delay 17) three steps ahead from 300 windows; shifted rows are of a",
        "series with delay 30. The U-Net removes noise from 100 of scikit-learn's digits; shifted rows are inverted",
        "digits. Prior precision and noise are at the maximum of the evidence, or as the default has them. An epoch is",
        f"a forward and a backward pass over the rows of the fit, in the same batches of {BATCH}; predictions are of",
        f"{BATCH} inputs, beside the network's forward pass without gradients.",
    ]
    for task, rows in found.items():
        lines += ["", f"## {TASKS[task][0]}", "", f"| | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
        for name, values in rows.items():
            table = torch.tensor(values)
            mean, error = table.mean(0).tolist(), (table.std(0) / len(table) ** 0.5).tolist()
            cells = [f"{mean[n]:.3f} ± {error[n]:.3f}" if n in (0, 2) else f"{mean[n]:.3g}" for n in range(len(mean))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for task in arguments.tasks:
        for seed in SEEDS:
            for name, values in measured(task, seed).items():
                found.setdefault(task, {}).setdefault(name, []).append(values)
                print(task, seed, name, *(f"{value:.3f}" for value in values), flush=True)  # noqa: T201
    text = page(found)
    print(text)  # noqa: T201
    if arguments.page:
        arguments.page.write_text(text)


if __name__ == "__main__":
    main()
