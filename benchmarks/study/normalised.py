"""Bayesian normalisation layers on networks with batch normalisation, beside the network, KFAC and a temperature.

    python benchmarks/study/normalised.py --data DATA --output runs/normalised

Noisy digits (0 to 7 of scikit-learn's, with 8 and 9 from elsewhere) need no data, and also train a network of 16
normalised layers; MNIST and Fashion-MNIST are read from ``DATA``. ``--development`` takes other splits and other test
images, on which the defaults of :class:`lp.ABNN` were chosen: digits and Fashion-MNIST. Cells that are there are not
run again; ``--page`` writes their tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import laplace_plus as lp
from benchmarks.study import evaluation, sets
from benchmarks.study.scored import Predict
from benchmarks.study.sets import DataSet
from laplace_plus.predictive import from_samples

SETS = ("digits", "digits_deep", "mnist", "fashion_mnist")
OTHERS = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
NOISE = 0.5
SPLITS = 5
N_TEST = 1000


def load(name: str, seed: int, folder: Path | None, *, development: bool) -> DataSet:
    """A split of a set."""
    if name.startswith("digits"):
        return replace(_digits(seed), name=name)
    if folder is None:
        raise SystemExit(f"{name} needs --data")
    sizes = {"train_size": 2000, "validation_size": 500, "test_size": 2 * N_TEST}
    found = sets.load(name, seed, folder, {"images": True, **sizes, "ood": [OTHERS[name], "kmnist", "notmnist"]})
    part = slice(N_TEST, 2 * N_TEST) if development else slice(N_TEST)
    x, y = found.test
    return replace(found, test=(x[part], y[part]), ood={other: own[part] for other, own in found.ood.items()})


def _digits(seed: int) -> DataSet:
    digits, generator = load_digits(), torch.Generator().manual_seed(seed)
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    pixels = pixels + NOISE * torch.randn(pixels.shape, generator=generator)
    labels = torch.tensor(digits.target)
    known = (labels < 8).nonzero().squeeze(-1)  # noqa: PLR2004
    known = known[torch.randperm(len(known), generator=generator)]
    pixels = (pixels - pixels[known].mean()) / pixels[known].std()
    n = len(known)
    parts = [(pixels[own], labels[own]) for own in known.split([n // 2, n // 8, n - n // 2 - n // 8])]
    return DataSet("digits", seed, *parts, True, 8, ood={"digits 8 and 9": pixels[labels >= 8]})  # noqa: PLR2004


def network(data: DataSet) -> nn.Sequential:
    """Two convolutions and a hidden layer, each with batch normalisation; or 16 convolutions, none skipped."""
    if data.name == "digits_deep":
        layers: list[nn.Module] = []
        for number in range(16):
            layers += [nn.Conv2d(8 if number else 1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number == 8 else []  # noqa: PLR2004
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, data.n_outputs))
    size = data.train[0].shape[-1]
    kernel, left = (3, 2) if size == 8 else (5, 4)  # noqa: PLR2004
    padding = 1 if size == 8 else 0  # noqa: PLR2004
    return nn.Sequential(
        *(nn.Conv2d(1, 8, kernel, padding=padding), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, kernel, padding=padding), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * left**2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, data.n_outputs)),
    )


def trained(data: DataSet, folder: Path, epochs: int = 20) -> tuple[nn.Module, float]:
    """The network after SGD with a cosine schedule, and the seconds of training."""
    path = folder / f"{data.name}-{data.number}.pt"
    torch.manual_seed(data.number)
    model = network(data)
    if path.exists():
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["state"])
        return model.eval(), found["seconds"]
    started, (inputs, targets) = time.process_time(), data.train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        schedule.step()
    seconds = time.process_time() - started
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state": model.state_dict(), "seconds": seconds}, path)
    return model.eval(), seconds


Method = Callable[[nn.Module, DataSet], tuple[Predict, dict[str, Any]]]


def generator() -> torch.Generator:
    """The same random numbers for every method."""
    return torch.Generator().manual_seed(0)


def the_network(model: nn.Module, data: DataSet) -> tuple[Predict, dict[str, Any]]:
    """Itself."""

    def predict(x: Tensor) -> lp.Prediction:
        with torch.no_grad():
            return from_samples(lp.Categorical(), model(x)[None])

    return predict, {}


def temperature(model: nn.Module, data: DataSet) -> tuple[Predict, dict[str, Any]]:
    """Of least validation loss."""
    x, y = data.validation
    with torch.no_grad():
        outputs = model(x)
        tried = [2 ** (step / 10) for step in range(-30, 51)]
        best = min(tried, key=lambda t: float(nn.functional.cross_entropy(outputs / t, y)))

    def predict(x: Tensor) -> lp.Prediction:
        with torch.no_grad():
            return from_samples(lp.Categorical(), model(x)[None] / best)

    return predict, {"temperature": best}


def kfac(*, validation: bool) -> Method:
    """KFAC, tuned on its training data or on the validation part."""

    def run(model: nn.Module, data: DataSet) -> tuple[Predict, dict[str, Any]]:
        posterior = lp.KFAC(model, "classification").fit(data.loader("train", 250))
        posterior.fit_prior_precision(data=data.loader("validation") if validation else None)
        chosen = {"link": posterior.link, "scale": posterior.covariance_scale}
        return lambda x: posterior.predictive(x, generator=generator()), chosen

    return run


def abnn(*, tuned: bool = False, n_samples: int | None = None, **options: Any) -> Method:
    """Normalisation layers with noise; with ``tuned``, by the validation part."""

    def run(model: nn.Module, data: DataSet) -> tuple[Predict, dict[str, Any]]:
        posterior = lp.ABNN(model, "classification", **options)
        posterior.fit(data.loader("train", 50), generator=generator())
        if tuned:
            posterior.fit_prior_precision(data=data.loader("validation"), n_samples=20, generator=generator())
        chosen = {"scale": posterior.noise_scale, "fine_tuned": posterior.fine_tuned}
        return lambda x: posterior.predictive(x, n_samples=n_samples, generator=generator()), chosen

    return run


METHODS: dict[str, Method] = {
    "network": the_network,
    "temperature, by validation": temperature,
    "KFAC": kfac(validation=False),
    "KFAC, by validation": kfac(validation=True),
    "ABNN": abnn(),
    "ABNN, tuned": abnn(tuned=True),
    "ABNN, noise per element": abnn(noise="element", n_samples=20),
}
_SCALES = ("channel 0.1", "channel 0.2", "channel 0.3", "element 0.2", "element 0.3")
_TRIED = {label: {"noise": label.split()[0], "scale": float(label.split()[1])} for label in _SCALES}
DEVELOPMENT: dict[str, Method] = {
    "network": the_network,
    **{label: abnn(n_samples=20, **own) for label, own in _TRIED.items()},
    **{f"{label}, not tuned": abnn(n_samples=20, epochs=0, n_members=1, **own) for label, own in _TRIED.items()},
    **{f"{label}, rate .02": abnn(n_samples=20, learning_rate=0.02, **own) for label, own in _TRIED.items()},
}


def cell(data: DataSet, model: nn.Module, method: Method) -> dict[str, Any]:
    """Scores, seconds of the fit and of predicting, what was chosen, and what was warned of."""
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predict, chosen = method(model, data)
        seconds = time.process_time() - started
        scores = evaluation.scores(predict, data)
    kept = {name: value for name, value in scores.items() if not name.startswith("legacy")}
    said = sorted({type(one.message).__name__ for one in caught})
    return {"scores": kept, "fit_seconds": seconds, "chosen": chosen, "warnings": said}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells that are missing; returns all there are."""
    path = arguments.output / ("development.jsonl" if arguments.development else "cells.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["set"], row["seed"], row["method"]) for row in rows}
    methods = DEVELOPMENT if arguments.development else METHODS
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.sets:
        for seed in range(arguments.splits):
            number = seed + 10 * arguments.development
            data = load(name, number, arguments.data, development=arguments.development)
            model, seconds = trained(data, arguments.output / "networks")
            for label, method in methods.items():
                if (name, number, label) in known or (arguments.methods and label not in arguments.methods):
                    continue
                row = {
                    "set": name,
                    "seed": number,
                    "method": label,
                    "training_seconds": seconds,
                    **cell(data, model, method),
                }
                rows.append(row)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                scores = {key: round(value, 4) for key, value in row["scores"].items()}
                sys.stderr.write(f"{name} {number} {label}: {scores}, {row['fit_seconds']:.1f} s {row['warnings']}\n")
    return rows


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.mean()), float(tensor.std() / math.sqrt(len(tensor))) if len(values) > 1 else math.nan


def auroc(row: dict[str, Any]) -> float:
    """Mean over the sets from elsewhere."""
    found = [value for name, value in row["scores"].items() if name.startswith("ood_auroc")]
    return sum(found) / len(found)


def page(rows: list[dict[str, Any]]) -> str:
    """Tables of scores, of paired differences to the network, and of costs."""
    by: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        by[row["set"]][row["method"]][row["seed"]] = row
    lines: list[str] = []
    kinds: dict[str, Callable[[dict[str, Any]], float]] = {
        "NLL": lambda row: row["scores"]["nll"],
        "AUROC": auroc,
        "ECE": lambda row: row["scores"]["ece"],
        "accuracy": lambda row: row["scores"]["accuracy"],
    }
    for name, methods in by.items():
        base = methods["network"]
        lines += [
            f"## {name}",
            "",
            "| | " + " | ".join(f"{kind} | difference" for kind in kinds) + " | fit, s | 1000 predictions, s |",
        ]
        lines += ["|---" * (2 * len(kinds) + 3) + "|"]
        for label, own in methods.items():
            entries = []
            for get in kinds.values():
                seeds = sorted(own.keys() & base.keys())
                mean, _ = summary([get(own[seed]) for seed in seeds])
                difference, error = summary([get(own[seed]) - get(base[seed]) for seed in seeds])
                entries += [f"{mean:.4f}", "" if label == "network" else f"{difference:+.4f} ± {error:.4f}"]
            costs = [summary([row["fit_seconds"] for row in own.values()])[0]]
            costs += [summary([row["scores"]["seconds_per_1000"] for row in own.values()])[0]]
            entries += [f"{cost:.3g}" for cost in costs]
            lines.append(f"| {label} | " + " | ".join(entries) + " |")
        lines += ["", f"Training took {summary([row['training_seconds'] for row in base.values()])[0]:.3g} s.", ""]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of MNIST-like images")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--development", action="store_true")
    parser.add_argument("--page", action="store_true", help="only write the tables of what is there")
    arguments = parser.parse_args()
    if arguments.page:
        arguments.sets = []
    torch.set_num_threads(1)
    sys.stdout.write(page(run(arguments)) + "\n")


if __name__ == "__main__":
    main()
