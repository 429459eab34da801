"""Evidence at the network's weights and at the tangent model's optimum, on five kinds of networks (MNIST).

    OMP_NUM_THREADS=1 python benchmarks/evidence/tangent.py --data DATA --ekfac --test 1000 --output FILE

Networks and seeds whose results the output holds already are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from data import batches, images
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional

import laplace_plus as lp
from laplace_plus.predictive import from_functional
from laplace_plus.predictive.linearized import functional_posteriors

Data = tuple[Tensor, Tensor]

COMBINATIONS = (
    ("tangent_multiple", "tangent", "normalized_groups"),
    ("tangent_single", "tangent", "scalar"),
    ("weights_multiple", "laplace", "normalized_groups"),
    ("weights_single", "laplace", "scalar"),
)
"""Name, evidence and structure."""

TITLES = ("θ*, a precision per group", "θ*, one precision", "θ̃, a precision per group", "θ̃, one precision")

_PUBLISHED = {
    "transformer": (0.162, 0.162, 0.162, 0.310),
    "cnn": (0.025, 0.025, 0.205, 0.253),
    "resnet": (0.016, 0.017, 0.236, 0.252),
    "preresnet": (0.016, 0.017, 0.239, 0.220),
    "fixup": (0.061, 0.055, 0.200, 0.153),
}
PUBLISHED = {
    name: dict(zip((key for key, _, _ in COMBINATIONS), values, strict=True)) for name, values in _PUBLISHED.items()
}

METHOD = """\
Mean ± standard error over seeds (initial weights, order of training). θ̃ is the Laplace evidence at the network's own
weights, θ* that of its tangent model at its optimum; "a precision per group" is one for each normalised layer, one for
the last layer and one for the rest. Published: Antorán et al. (2022), on networks of the same kinds and size.

Networks are trained on the first {images} training images with Adam, without weight decay, and stopped early by the
NLL on the last {validation} training images, which serve nothing else. Curvature ({curvature}, exact Gauss-Newton) and
θ* are those of the same {images} images; predictions are linearised around the network's own outputs, for the first
{test} test images; "Monte Carlo" takes 1000 samples of the outputs. The tangent evidence is
converged when none of its derivatives by the logarithm of a precision exceeds {tolerance} nats.
{choice}"""

CHOICES = {
    False: "Nothing was chosen by test results.",
    True: "EKFAC was taken once results with KFAC had been seen; nothing else was chosen by test results.",
}
"""Whether curvature is EKFAC, and what to say of it."""

VALIDATION = 5000
"""So many of the last training images say when to stop training, and nothing else."""


def standardised(folder: Path, part: str) -> Data:
    """Images of mean 0 and standard deviation 1 (that of the training images), and labels."""
    pixels, labels = images(folder, "mnist", part)
    return (pixels - 0.1307) / 0.3081, labels


def nll(model: nn.Module, data: Data) -> float:
    """Mean negative log-likelihood of the network as it is, in nats."""
    with torch.no_grad():
        sums = [functional.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches(*data, 1000)]
    return sum(sums) / len(data[1])


def trained(
    make: Callable[[], nn.Module],
    seed: int,
    data: Data,
    validation: Data,
    *,
    epochs: int = 40,
    patience: int | None = 5,
) -> nn.Module:
    """Adam without weight decay; the weights of least validation NLL, once ``patience`` epochs were worse.

    Without ``patience`` the last weights.
    """
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    best, state, since = float("inf"), model.state_dict(), 0
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(data[1]))
        for chunk in order.split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(data[0][chunk]), data[1][chunk]).backward()
            optimizer.step()
        if patience is None:
            continue
        value, since = nll(model.eval(), validation), since + 1
        if value < best:
            best, since = value, 0
            state = {key: entry.clone() for key, entry in model.state_dict().items()}
        if since == patience:
            break
    if patience is not None:
        model.load_state_dict(state)
    return model.eval()


def weights_of(name: str, seed: int, train: Data, validation: Data, cache: Path) -> nn.Module:
    """A trained network, from the cache where it is there."""
    path = cache / f"{name}-{len(train[1])}-{seed}.pt"
    if path.exists():
        model = NETWORKS[name]()
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    model = trained(NETWORKS[name], seed, train, validation)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def measured(model: nn.Module, train: Data, test: Data, seed: int, *, ekfac: bool, tolerance: float) -> dict[str, Any]:
    """Precisions, evidence and cost of each combination, and the test NLL of all from one pass over the test images."""
    start = time.process_time()
    posterior = lp.KFAC(model, "classification", eigenvalue_corrected=ekfac).fit(batches(*train))
    row: dict[str, Any] = {"map": nll(model, test), "map_train": nll(model, train), "accuracy": accuracy(model, test)}
    row |= {"n_parameters": posterior.n_parameters, "fit_seconds": time.process_time() - start}
    factors, links = [], ("probit", "mc")
    for name, evidence, structure in COMBINATIONS:
        start = time.process_time()
        options = {"tolerance": tolerance} if evidence == "tangent" else {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior.fit_prior_precision("marginal_likelihood", evidence=evidence, structure=structure, **options)
        found = posterior.tuning
        row[name] = {
            "precision": posterior.prior_precision.flatten().tolist(),
            "groups": list(posterior.prior_groups.names) if structure != "scalar" else ["all"],
            "evidence": found.value,
            "converged": found.converged,
            "warnings": [str(entry.message) for entry in caught],
            "seconds": time.process_time() - start,
        }
        if evidence == "tangent":
            row[name] |= {"alternations": found.n_iterations, "steps": found.n_steps, "trace": list(found.trace)}
            row[name] |= {"effective": found.effective_parameters.tolist(), "at_weights": found.network_value}
        factors.append(posterior.laplace_model().factors(posterior.prior_precision, posterior.temperature))
    sums = {(name, link): 0.0 for name, _, _ in COMBINATIONS for link in links}
    for x, y in batches(*test, 250):
        with torch.no_grad():
            functional = functional_posteriors(posterior.network, factors, x)
            for (name, _, _), (mean, covariance) in zip(COMBINATIONS, functional, strict=True):
                for link in links:
                    generator = torch.Generator().manual_seed(seed)
                    prediction = from_functional(
                        posterior.likelihood, mean, covariance, link=link, n_samples=1000, generator=generator
                    )
                    sums[name, link] -= prediction.log_prob(y).sum().item()
    for (name, link), value in sums.items():
        row[name][link] = value / len(test[1])
    return row


def accuracy(model: nn.Module, data: Data) -> float:
    """Share of images whose class is the most probable one."""
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in batches(*data, 1000)) / len(data[1])


def cell(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], digits: int = 3) -> str:
    """Mean ± standard error over seeds."""
    values = torch.tensor([value(row) for row in rows], dtype=torch.float64)
    if len(values) < 2:
        return f"{values.mean():.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std() / len(values) ** 0.5:.{digits}f}"


def table(rows: Sequence[dict[str, Any]], link: str) -> list[str]:
    """One line for each network, ours above the published."""
    lines = ["| | seeds | MAP | " + " | ".join(TITLES) + " |", "| --- |" + " --- |" * (2 + len(TITLES))]
    for name in NETWORKS:
        own = [row for row in rows if row["network"] == name]
        if own:
            cells = [cell(own, lambda row, key=key: row[key][link]) for key, _, _ in COMBINATIONS]
            lines.append(f"| {name} | {len(own)} | {cell(own, lambda row: row['map'])} | " + " | ".join(cells) + " |")
            cells = [f"{PUBLISHED[name][key]:.3f}" for key, _, _ in COMBINATIONS]
            lines.append(f"| {name}, published | | | " + " | ".join(cells) + " |")
    return lines


def precisions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was found for the first seed of each network, and at what cost."""
    lines = ["| | combination | prior precisions | alternations, passes | CPU s |", "| --- | --- | --- | --- | --- |"]
    for name in NETWORKS:
        first = next((row for row in rows if row["network"] == name), None)
        for key, _, _ in COMBINATIONS if first else ():
            found = first[key]
            pairs = zip(found["groups"], found["precision"], strict=True)
            text = ", ".join(f"{group} {value:.3g}" for group, value in pairs)
            cost = f"{found['alternations']}, {found['steps']}" if "steps" in found else ""
            cost += "" if found["converged"] else " (not converged)"
            lines.append(f"| {name} | {key} | {text} | {cost} | {found['seconds']:.3g} |")
    return lines


def markdown(document: dict[str, Any]) -> str:
    """The report."""
    rows, settings = document["rows"], document["settings"]
    curvature = "EKFAC" if settings["ekfac"] else "KFAC"
    choice = CHOICES[settings["ekfac"]]
    words = METHOD.format(curvature=curvature, choice=choice, validation=VALIDATION, **settings)
    parts = ["# Tangent evidence on networks of about 46 000 weights, MNIST", words]
    parts += ["## Test NLL, probabilities by Monte Carlo", "\n".join(table(rows, "mc"))]
    parts += ["## Test NLL, probabilities by probit", "\n".join(table(rows, "probit"))]
    parts += ["## Precisions found, seed 0", "\n".join(precisions(rows))]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure what is not in the output yet; rows are kept after each network, tables written at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/")
    parser.add_argument("--output", type=Path, required=True, help="where to write, without .json and .md")
    parser.add_argument("--cache", type=Path, default=Path("runs/tangent-evidence"), help="for trained weights")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="training images, for weights and posterior alike")
    parser.add_argument("--test", type=int, default=10000, help="test images")
    parser.add_argument("--ekfac", action="store_true", help="correct the eigenvalues of KFAC")
    parser.add_argument("--tolerance", type=float, default=5.0, help="of derivatives of the tangent evidence, in nats")
    parser.add_argument("--quick", action="store_true", help="one seed, 300 images: whether it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.images, arguments.test = 1, 300, 300
    settings = {key: getattr(arguments, key) for key in ("images", "test", "ekfac", "tolerance")}
    train, test = standardised(arguments.data, "train"), standardised(arguments.data, "t10k")
    validation = (train[0][-VALIDATION:], train[1][-VALIDATION:])
    train = (train[0][: arguments.images], train[1][: arguments.images])
    test = (test[0][: arguments.test], test[1][: arguments.test])
    path = arguments.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if document["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {document['settings']}")
    for seed, name in itertools.product(range(arguments.seeds), arguments.networks):
        if any(row["network"] == name and row["seed"] == seed for row in document["rows"]):
            continue
        model = weights_of(name, seed, train, validation, arguments.cache)
        row = measured(model, train, test, seed, ekfac=arguments.ekfac, tolerance=arguments.tolerance)
        document["rows"].append({"network": name, "seed": seed} | row)
        path.write_text(json.dumps(document, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
