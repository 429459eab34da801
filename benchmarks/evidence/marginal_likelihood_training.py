"""Training by the marginal likelihood beside the same training with the usual weight decay, on Fashion-MNIST.

python benchmarks/evidence/marginal_likelihood_training.py --data DIR --output PREFIX --networks "[mlp, cnn, resnet]"
python benchmarks/evidence/marginal_likelihood_training.py --config configs/marginal_likelihood_fashion.yaml --data DIR

writes PREFIX.json and PREFIX.md. Network, initial weights, minibatches, optimiser, learning rates and number of epochs
are the same for both; they differ in where the weight decay comes from. ``--evaluate validation`` scores on training
images that nothing is trained on, for choosing settings. Networks and seeds whose results PREFIX.json holds already are
not trained again.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from data import images
from jsonargparse import CLI
from networks import fixup
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import laplace_plus as lp
from laplace_plus.metrics import expected_calibration_error
from laplace_plus.predictive import from_functional

APART = ("data", "output", "progress", "seeds", "networks")
"""Arguments by which rows of one file may differ."""

MEAN, STD = 0.2860, 0.3530  # of the training images' pixels


def lenet() -> nn.Sequential:
    """Two convolutions and two dense layers with ReLU, 42 038 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def mlp() -> nn.Sequential:
    """One hidden layer of 128 ReLU units, 101 770 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Sequential:
    """Two convolutions of stride two and two dense layers with ReLU, 52 266 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet": lenet,
    "resnet": functools.partial(fixup, ((8, 16, 2), (16, 16, 1))),
}
"""By name; the residual network has two Fixup blocks of 16 channels, and no normalisation."""


def parts(folder: Path, n_train: int, evaluate: str, seed: int) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Training images, drawn anew for each seed, and those to score on."""
    x, y = images(folder, "fashion_mnist", "train")
    x = (x - MEAN) / STD
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train = TensorDataset(x[order[:n_train]], y[order[:n_train]])
    if evaluate == "validation":
        held_out = order[n_train:][-10_000:]
        return train, (x[held_out], y[held_out])
    x_test, y_test = images(folder, "fashion_mnist", "t10k")
    return train, ((x_test - MEAN) / STD, y_test)


def score(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, mean NLL in nats, and calibration error of predicted probabilities."""
    p = probabilities.double().cpu()
    return {
        "accuracy": (p.argmax(1) == y).double().mean().item(),
        "nll": -p.gather(1, y[:, None]).clamp_min(1e-300).log().mean().item(),
        "ece": float(expected_calibration_error(p, y)),
    }


class Bench:
    """Both trainings at one setting."""

    def __init__(self, data: Path, device: str, settings: dict[str, Any]):
        self.data, self.device, self.settings = data, device, settings

    def run(self, seed: int) -> dict[str, Any]:
        """All numbers of one seed."""
        chosen = self.settings
        train, (x, y) = parts(self.data, chosen["n_train"], chosen["evaluate"], seed)
        result: dict[str, Any] = {"network": chosen["network"], "seed": seed}
        result["n_parameters"] = sum(p.numel() for p in self.start(train, seed)[0].parameters())
        for decay in chosen["weight_decays"]:
            start = time.process_time()
            model = self.usual(train, decay, seed)
            seconds = time.process_time() - start
            result[f"weight decay {decay:g}, MAP"] = {**self.map(model, x, y), "cpu_seconds": seconds}
        start = time.process_time()
        trained = self.marginal_likelihood(train, seed)
        seconds = time.process_time() - start
        result["marginal likelihood, MAP"] = {**self.map(trained.model, x, y), "cpu_seconds": seconds}
        for link, predicted in self.predict(trained.posterior, x, seed).items():
            result[f"marginal likelihood, posterior predictive ({link})"] = score(predicted, y)
        result["evidence"] = {
            "epochs": [update.epoch for update in trained.updates],
            "nats": list(trained.evidences),
            "kept_epoch": trained.epoch,
            "prior_precisions": dict(
                zip(trained.posterior.prior_groups.names, trained.posterior.prior_precision.tolist(), strict=True)
            ),
        }
        return result

    def start(self, train: TensorDataset, seed: int) -> tuple[nn.Module, DataLoader[tuple[Tensor, ...]]]:
        """The initial network and the minibatches of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = NETWORKS[self.settings.get("network", "lenet")]().to(self.device)
        shuffling = torch.Generator().manual_seed(seed)
        return model, DataLoader(train, self.settings["batch_size"], shuffle=True, generator=shuffling)

    def optimizer(self, parameters: Any, weight_decay: float = 0.0) -> torch.optim.Optimizer:
        """The same for both, but for the weight decay."""
        return torch.optim.SGD(
            parameters, self.settings["learning_rate"], momentum=0.9, nesterov=True, weight_decay=weight_decay
        )

    def scheduler(self, optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        """Down to a hundredth."""
        return CosineAnnealingLR(optimizer, self.settings["epochs"], eta_min=self.settings["learning_rate"] / 100)

    def usual(self, train: TensorDataset, weight_decay: float, seed: int) -> nn.Module:
        """Training as everybody does it."""
        model, loader = self.start(train, seed)
        optimizer = self.optimizer(model.parameters(), weight_decay)
        scheduler = self.scheduler(optimizer)
        for _ in range(self.settings["epochs"]):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.to(self.device)), y.to(self.device)).backward()
                optimizer.step()
            scheduler.step()
        return model

    def marginal_likelihood(self, train: TensorDataset, seed: int) -> Any:
        """The same, with the precisions of the prior learnt."""
        chosen = self.settings
        model, loader = self.start(train, seed)
        return lp.train_marginal_likelihood(
            model,
            loader,
            "classification",
            epochs=chosen["epochs"],
            posterior=chosen["posterior"],
            structure=chosen["structure"],
            prior_precision=chosen["prior_precision"],
            temperature=chosen["temperature"],
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            burn_in=chosen["burn_in"],
            frequency=chosen["frequency"],
            hyper_steps=chosen["hyper_steps"],
            hyper_lr=chosen["hyper_lr"],
            early_stopping=chosen["early_stopping"],
            backend=lp.Native(chosen["curvature"]),
            generator=torch.Generator(self.device).manual_seed(seed),
            curvature_loader=DataLoader(train, 500),
            progress=chosen["progress"],
        )

    def map(self, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
        """Scores of the trained weights by themselves."""
        model.eval()
        with torch.no_grad():
            return score(torch.cat([model(chunk.to(self.device)).softmax(-1) for chunk in x.split(500)]), y)

    def predict(self, posterior: lp.GaussianPosterior, x: Tensor, seed: int) -> dict[str, Tensor]:
        """Probabilities by both links, from one pass over the inputs."""
        generator = torch.Generator(self.device).manual_seed(seed)
        found: dict[str, list[Tensor]] = {"probit": [], "mc": []}
        for chunk in x.split(500):
            outputs = posterior.functional_posterior(chunk.to(self.device))
            for link, predicted in found.items():
                prediction = from_functional(
                    posterior.likelihood, *outputs, link=link, n_samples=200, generator=generator
                )
                predicted.append(prediction.mean)
        return {link: torch.cat(predicted) for link, predicted in found.items()}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = tensor.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return tensor.mean().item(), error


def rows_of(result: dict[str, Any]) -> list[str]:
    """The names of what was trained and predicted."""
    return [name for name in result if name not in ("network", "n_parameters", "seed", "evidence")]


def table(results: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown, for one network; differences are those of the same seeds."""
    best = min(
        (name for name in rows_of(results[0]) if name.startswith("weight decay")),
        key=lambda name: sum(result[name]["nll"] for result in results),
    )
    lines = [
        f"| training and prediction | accuracy ↑ | NLL ↓ | NLL less that of {best.split(',')[0]} | ECE ↓ | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for name in rows_of(results[0]):
        apart = [{**result[name], "apart": result[name]["nll"] - result[best]["nll"]} for result in results]
        cells = []
        for metric in ("accuracy", "nll", "apart", "ece"):
            mean, error = mean_and_error([own[metric] for own in apart])
            text = f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"
            cells.append(text if metric != "apart" or name != best else "")
        seconds = [own["cpu_seconds"] for own in apart if "cpu_seconds" in own]
        cells.append(f"{sum(seconds) / len(seconds):.0f}" if seconds else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def evidences(results: list[dict[str, Any]]) -> list[str]:
    """What became of the evidence and of the precisions, for one network."""
    lines = ["| seed | first | last | greatest, kept | after epoch | precisions |", "|---|---|---|---|---|---|"]
    for result in results:
        evidence = result["evidence"]
        precisions = ", ".join(f"{value:.3g}" for value in evidence["prior_precisions"].values())
        nats = evidence["nats"]
        row = [result["seed"], *(f"{value:.0f}" for value in (nats[0], nats[-1], max(nats))), evidence["kept_epoch"]]
        lines.append("| " + " | ".join(map(str, [*row, precisions])) + " |")
    return lines


def write(output: Path, settings: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The two files."""
    versions = {"laplace_plus": lp.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {"settings": settings, "versions": versions, "results": results}
    output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    where = "10 000 test images" if settings["evaluate"] == "test" else "10 000 held-out training images"
    text = [
        "# Training by the marginal likelihood, Fashion-MNIST",
        "",
        f"Networks trained on {settings['n_train']} images, scored on {where}; mean ± standard error over seeds, each"
        " with its own training images, initial weights and minibatches. All rows of a seed share these, and SGD with"
        " Nesterov momentum 0.9, cosine learning rates and the number of epochs. Differences are paired, and from the"
        f" weight decay that is best on the {where}.",
    ]
    for network in dict.fromkeys(result["network"] for result in results):
        own = [result for result in results if result["network"] == network]
        text += ["", f"## {network}, {own[0]['n_parameters']} weights, seeds: {len(own)}", "", *table(own)]
        text += [
            "",
            "Evidence in nats after the updates of the hyperparameters, and each layer's precision at the end:",
        ]
        text += ["", *evidences(own)]
    text += ["", f"Settings: {chosen}. torch {versions['torch']}."]
    output.with_suffix(".md").write_text("\n".join(text) + "\n")


def main(
    data: Path,
    output: Path = Path("benchmarks/results/marginal-likelihood-training"),
    networks: tuple[str, ...] = ("lenet",),
    n_train: int = 5000,
    epochs: int = 40,
    batch_size: int = 100,
    learning_rate: float = 0.02,
    weight_decays: tuple[float, ...] = (5e-4, 5e-3, 0.0),
    posterior: str = "KFAC",
    curvature: str = "ggn",
    structure: str = "layerwise",
    prior_precision: float = 1.0,
    temperature: float = 1.0,
    burn_in: int = 10,
    frequency: int = 5,
    hyper_steps: int | None = 100,
    hyper_lr: float = 0.1,
    early_stopping: bool = True,
    seeds: tuple[int, ...] = (0, 1, 2),
    evaluate: Literal["test", "validation"] = "test",
    device: str = "cpu",
    progress: bool = False,
) -> None:
    """Train both ways for all networks and seeds, and write down what comes out."""
    settings = {name: value for name, value in locals().items() if name not in APART}
    settings["weight_decays"] = list(weight_decays)
    path = output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {"settings": settings, "results": []}
    if document["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {document['settings']}")
    results = document["results"]
    for network, seed in itertools.product(networks, seeds):
        if any((result["network"], result["seed"]) == (network, seed) for result in results):
            continue
        results.append(Bench(data, device, {**settings, "network": network, "progress": progress}).run(seed))
        write(output, settings, results)
        print(network, seed, flush=True)  # noqa: T201


if __name__ == "__main__":
    CLI(main, as_positional=False)
