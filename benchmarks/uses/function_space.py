"""Function space: `lp.LowRank` with a Nyström basis beside ELLA of laplace-torch, on the same networks.

    python benchmarks/uses/function_space.py --data DATA --rows ROWS --page benchmarks/results/function-space-cpu.md

Needs `pip install laplace-torch` for the rows of ELLA, and a folder with idx files of Fashion-MNIST and the table of
energy for two of the tasks. Rows that the file has are not measured again. CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "evidence"))

from data import images

import laplace_plus as lp

SEEDS, BATCH, SUBSET, GRID = (0, 1), 100, 200, torch.logspace(-4, 4, 25)
TUNERS = (("validation", "validation"), ("evidence", "marginal_likelihood"), ("default", "auto"))
Part = tuple[Tensor, Tensor]


def digits(seed: int, folder: Path | None) -> tuple[nn.Module, list[Part]]:
    """A perceptron of 1930 weights, and 1000 rows to train on, 397 for validation and 400 to test on."""
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(seed))
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 10))
    return model, [*zip(x.split([1000, 397, 400]), y.split([1000, 397, 400]), strict=True)]


def fashion(seed: int, folder: Path | None) -> tuple[nn.Module, list[Part]]:
    """A convolutional network of 29 396 weights, and 2000, 500 and 2000 images."""
    assert folder is not None, "--data"
    (x, y), test = images(folder, "fashion_mnist", "train"), images(folder, "fashion_mnist", "t10k")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:2500]
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(800, 30), nn.ReLU(), nn.Linear(30, 10)),
    )
    train, validation = order.split([2000, 500])
    return model, [(x[train], y[train]), (x[validation], y[validation]), (test[0][:2000], test[1][:2000])]


def energy(seed: int, folder: Path | None) -> tuple[nn.Module, list[Part]]:
    """A perceptron of 3051 weights for the heating load, and 591, 100 and 77 rows of the standard splits."""
    assert folder is not None, "--data"
    with np.load(folder / "energy" / "data.npz") as file:
        x, y, test = (torch.from_numpy(file[key]) for key in ("x", "y", "standard_test"))
    at = test[seed].bool()
    mean, std = x[~at].mean(0), x[~at].std(0).clamp_min(1e-9)
    x, y = ((x - mean) / std).float(), ((y - y[~at].mean()) / y[~at].std()).float()[:, None]
    order = (~at).nonzero()[:, 0][torch.randperm(int((~at).sum()), generator=torch.Generator().manual_seed(seed))]
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    return model, [(x[own], y[own]) for own in (order[100:], order[:100], at.nonzero()[:, 0])]


TASKS: dict[str, tuple[Callable[[int, Path | None], Any], str, int, tuple[int, ...]]] = {
    "digits": (digits, "classification", 100, (20, 100)),
    "Fashion-MNIST": (fashion, "classification", 25, (20,)),
    "energy": (energy, "regression", 200, (20, 100)),
}


def train(model: nn.Module, data: Part, epochs: int, loss: Callable[[Tensor, Tensor], Tensor], seed: int) -> None:
    """Adam with a little weight decay."""
    optimizer, source = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4), torch.Generator()
    source.manual_seed(seed)
    for _ in range(epochs):
        for own in torch.randperm(len(data[0]), generator=source).split(BATCH):
            optimizer.zero_grad()
            loss(model(data[0][own]), data[1][own]).backward()
            optimizer.step()


def loader(data: Part) -> Any:
    """Batches in order."""
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), BATCH)


def nll(mean: Tensor, variance: Tensor | None, y: Tensor) -> float:
    """Mean negative log-density of classes by the ``mean`` of their probabilities, or of numbers."""
    if variance is None:
        return float(F.nll_loss(mean.clamp_min(1e-12).log(), y))
    return float(0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).mean())


def timed(function: Callable[..., Any], *values: Any, **named: Any) -> tuple[Any, float]:
    """What it returns, and CPU seconds."""
    start = time.process_time()
    return function(*values, **named), time.process_time() - start


def predicted(function: Callable[..., Any], x: Tensor, **named: Any) -> list[Any]:
    """Batch by batch."""
    return [function(part, **named) for part in x.split(BATCH)]


def ours(model: nn.Module, parts: list[Part], kind: str, noise: float, cls: Any, **options: Any) -> Iterator[Any]:
    """Ours, tuned on the validation rows as theirs is, by the evidence and by default."""
    likelihood, small = lp.Gaussian(noise) if kind == "regression" else kind, len(parts[2][0]) < 1000
    link: dict[str, Any] = {"link": "probit"} if kind == "classification" else {}
    train, validation, (x, y) = *map(loader, parts[:2]), parts[2]
    for tuner, name in TUNERS[: 3 if small else 1]:
        if cls is lp.LowRank:
            options["remainder_probes"] = 0 if tuner == "validation" else 8
        posterior, fit = timed(cls(model, likelihood, **options).fit, train)
        arguments = {"data": validation, "grid": GRID, **link} if tuner == "validation" else {}
        tune = timed(posterior.fit_prior_precision, name, tune_noise=False, **arguments)[1]
        found, predict = timed(predicted, posterior.predictive, x, **({} if tuner == "default" else link))
        mean = torch.cat([one.mean for one in found])
        variance = torch.cat([one.variance for one in found]) if kind == "regression" else None
        yield tuner, [nll(mean, variance, y), fit, tune, predict]


def ella(model: nn.Module, parts: list[Part], kind: str, noise: float, rank: int) -> Iterator[Any]:
    """Theirs, with the precision of least validation loss on the same grid."""
    from laplace import Laplace  # noqa: PLC0415  -- an extra
    from laplace.curvature import CurvlinopsGGN  # noqa: PLC0415

    options: dict[str, Any] = {"subsample_size": max(SUBSET, rank), "n_eigenvalues": rank, "backend": CurvlinopsGGN}
    options |= {"sigma_noise": noise} if kind == "regression" else {}
    train, validation, (x, y) = *map(loader, parts[:2]), parts[2]
    names: dict[str, Any] = {"subset_of_weights": "all", "hessian_structure": "gp"}
    theirs = Laplace(model, kind, functional_approximation="nystrom", **names, **options)
    fit = timed(theirs.fit, train)[1]
    tune = timed(theirs.optimize_hyperparameters, validation, GRID)[1]
    options = {"link_approx": "probit"} if kind == "classification" else {}
    found, predict = timed(predicted, theirs, x, pred_type="gp", **options)
    if kind == "classification":
        yield "validation", [nll(torch.cat(found), None, y), fit, tune, predict]
    else:
        mean, variance = (torch.cat(column) for column in zip(*found, strict=True))
        yield "validation", [nll(mean, variance.squeeze(-1) + noise**2, y), fit, tune, predict]


def measured(task: str, seed: int, folder: Path | None, known: set[Any]) -> Iterator[tuple[str, str, list[float]]]:
    """Method, tuner, and NLL with the seconds of fitting, tuning and predicting."""
    make, kind, epochs, ranks = TASKS[task]
    torch.manual_seed(seed)
    model, parts = make(seed, folder)
    train(model, parts[0], epochs, F.mse_loss if kind == "regression" else F.cross_entropy, seed)
    model.eval()
    with torch.no_grad():
        outputs, held_out = model(parts[2][0]), model(parts[1][0])
    noise = float((held_out - parts[1][1]).square().mean().sqrt()) if kind == "regression" else 1.0
    plain = (outputs, torch.full_like(outputs, noise**2)) if kind == "regression" else (outputs.softmax(-1), None)
    methods: dict[str, Callable[[], Iterator[Any]]] = {}
    for rank in ranks:
        options: dict[str, Any] = {"rank": rank}
        methods[f"ELLA, K = {rank}"] = lambda rank=rank: ella(model, parts, kind, noise, rank)
        for basis in ("nystrom", "eigenvectors")[: 1 + (rank == ranks[0] and task != "Fashion-MNIST")]:
            own = {**options, "basis": basis}
            methods[f"LowRank, {basis}, K = {rank}"] = lambda own=own: ours(
                model, parts, kind, noise, lp.LowRank, **own
            )
    if task != "Fashion-MNIST":
        methods["Full"] = lambda: ours(model, parts, kind, noise, lp.Full)
    if (task, seed, "network") not in known:
        yield "network", "", [nll(*plain, parts[2][1]), 0.0, 0.0, 0.0]
    for name, method in methods.items():
        if (task, seed, name) not in known:
            with warnings.catch_warnings(), suppress(ModuleNotFoundError):
                warnings.simplefilter("ignore")
                yield from ((name, *row) for row in method())


def page(rows: list[dict[str, Any]]) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Function space: a Nyström basis beside ELLA",
        "",
        "`python benchmarks/uses/function_space.py --data DATA --rows ROWS --page PAGE` made this page "
        f"(Python {platform.python_version()}, torch {torch.__version__}, one thread of a busy machine).",
        "",
        "`lp.LowRank(..., basis='nystrom')` and ELLA (Deng, Zhou and Zhu, 2022) of laplace-torch 0.3 have the same",
        f"networks, data and noise (that of the validation rows). ELLA's K features are from {SUBSET} gradients of",
        f"outputs, ours are K gradients. Both take the prior precision of least validation loss among {len(GRID)} from",
        "10⁻⁴ to 10⁴, by the probit link for classes, but for the default. It and the evidence use no validation data;",
        "their fits hold eight random vectors for the rest of the curvature. NLL of the test rows, in nats, mean over",
        "trainings, and its difference from the network's with a standard error. CPU seconds of one fit, of tuning,",
        "and of all test rows. The precision of the evidence suits the whole curvature: where K pairs are a small part",
        "of it, what is beside them keeps too much variance, and the default or validation is the tuner to take. Rows",
        "without a standard error are of one training.",
    ]
    for task, (make, _, _, _) in TASKS.items():
        own = [row for row in rows if row["task"] == task]
        if not own:
            continue
        n = len({row["seed"] for row in own})
        lines += ["", f"## {task}", "", f"{make.__doc__} Trainings: {n}.", ""]
        lines += ["| | tuned by | NLL | − network's | fit, s | tune, s | predict, s |", "|---|---|---|---|---|---|---|"]
        plain = {row["seed"]: row["values"][0] for row in own if row["method"] == "network"}
        for name, tuner in dict.fromkeys((row["method"], row["tuner"]) for row in own):
            some = [row for row in own if (row["method"], row["tuner"]) == (name, tuner)]
            mean = torch.tensor([row["values"] for row in some]).mean(0).tolist()
            gain = torch.tensor([row["values"][0] - plain[row["seed"]] for row in some], dtype=torch.float64)
            spread = f" ± {gain.std() / len(gain) ** 0.5:.4f}" if len(gain) > 1 else ""
            cells = [f"{gain.mean():+.4f}{spread}", *(f"{value:.2g}" for value in mean[1:])]
            lines.append(f"| {name} | {tuner} | {mean[0]:.4f} | {' | '.join(cells if tuner else [''] * 4)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    for seed in SEEDS:
        for task in arguments.tasks:
            known = {(row["task"], row["seed"], row["method"]) for row in rows}
            for method, tuner, values in measured(task, seed, arguments.data, known):
                rows.append({"task": task, "seed": seed, "method": method, "tuner": tuner, "values": values})
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(task, seed, method, tuner, *(f"{value:.4f}" for value in values), flush=True)  # noqa: T201
    if arguments.page:
        arguments.page.write_text(page(rows))


if __name__ == "__main__":
    main()
