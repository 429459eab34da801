"""When tuning by an evidence pays: from few MNIST images to all of them, early and late in training.

    OMP_NUM_THREADS=1 python benchmarks/evidence/tangent_sizes.py --data DATA --output FILE --cases tiny:1000:full:20

A case is NETWORK:IMAGES:CURVATURE or NETWORK:IMAGES:CURVATURE:EPOCHS; epochs of training are ended early by validation
images unless their number is given. Cases and seeds whose results FILE.json holds already are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from data import batches
from networks import cnn, resnet
from tangent import VALIDATION, Data, accuracy, cell, nll, standardised, trained
from torch import nn

import laplace_plus as lp
from laplace_plus.predictive import from_functional

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tiny": functools.partial(cnn, (1, 4, 6, 8), (2, 2, 2)),
    "cnn": cnn,
    "resnet": resnet,
}

CURVATURES: dict[str, Callable[[nn.Module], lp.GaussianPosterior]] = {
    "full": lambda model: lp.Full(model, "classification"),
    "ekfac": lambda model: lp.KFAC(model, "classification", eigenvalue_corrected=True),
    "ekfac, sampled labels": lambda model: lp.KFAC(
        model, "classification", eigenvalue_corrected=True, backend=lp.Native("ggn_mc")
    ),
    "last layer": lambda model: lp.KFAC(model, "classification", parameters="last_layer"),
}

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "θ*, groups": ("tangent", {"structure": "normalized_groups"}),
    "θ*": ("tangent", {}),
    "θ̃": ("marginal_likelihood", {}),
    "default": ("auto", {}),
}
"""Name, tuner and options."""

SCALES = [10 ** (-k / 4) for k in range(17)]
"""Of the covariance of θ*'s single precision, of which the one of least NLL on validation images is taken."""

METHOD = """\
Test NLL in nats, probabilities by 500 samples of the linearised outputs, for the first {test} test images; mean ±
standard error over seeds. Networks ("tiny": three convolutions of stride two with batch normalisation, and a dense
head) are trained with Adam (batches of 64, rate .002, no weight decay) on the first images of MNIST's training set, and
stopped by the NLL on its last {validation} images where no number of epochs is given. θ* is the tangent evidence at its
own optimum (to P/100 nats), with a precision for each normalised layer, the last and the rest ("groups") or one; θ̃ the
Laplace evidence. All means are the network's outputs but for "mean at θ*", where it is the tangent's optimum's.
"Default" is `fit_prior_precision()`. The best scale multiplies the covariance of θ* (one precision); it is the number
between 1 and 1/10000 that is best on 1000 validation images. γ is what θ* (one precision) counts as determined weights.
Curvature is the exact Gauss-Newton matrix's, but for "sampled labels"."""


def probabilities_nll(posterior: Any, data: Data, scales: Sequence[float] = (1.0,), link: str = "mc") -> list[float]:
    """Mean NLL at each scale of the posterior's covariance."""
    sums = torch.zeros(len(scales), dtype=torch.float64)
    for x, y in batches(*data, 250):
        mean, covariance = posterior.functional_posterior(x)
        for k, scale in enumerate(scales):
            generator = torch.Generator().manual_seed(0)
            given: Any = {"link": link, "n_samples": 500, "generator": generator}
            prediction = from_functional(posterior.likelihood, mean, scale * covariance, **given)
            sums[k] -= prediction.log_prob(y).sum().item()
    return (sums / len(data[1])).tolist()


def measured(model: nn.Module, curvature: str, train: Data, validation: Data, test: Data) -> Any:
    """All numbers of a trained network."""
    row: dict[str, Any] = {"network nll": nll(model, test), "train nll": nll(model, train)}
    row |= {"accuracy": accuracy(model, test), "parameters": sum(p.numel() for p in model.parameters())}
    start = time.process_time()
    posterior = CURVATURES[curvature](model)
    posterior.fit(batches(*train), generator=torch.Generator().manual_seed(0))
    row["fit seconds"] = time.process_time() - start
    for name, (tuner, options) in RULES.items():
        given = options | ({"tolerance": row["parameters"] / 100} if tuner == "tangent" else {})
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior.fit_prior_precision(tuner, **given)
        found: dict[str, Any] = {"precision": posterior.prior_precision.flatten().tolist()}
        found |= {"seconds": time.process_time() - start, "warnings": [str(entry.message) for entry in caught]}
        if name == "default":  # which may choose the link
            predictions = [
                (posterior.predictive(x, generator=torch.Generator().manual_seed(0)), y) for x, y in batches(*test, 250)
            ]
            found["nll"] = -sum(prediction.log_prob(y).sum().item() for prediction, y in predictions) / len(test[1])
        else:
            found["nll"], *_ = probabilities_nll(posterior, test)
        if name == "θ*":
            found["effective"] = float(posterior.tuning.effective_parameters.sum())
            found["steps"] = posterior.tuning.n_steps
            found["probit"], *_ = probabilities_nll(posterior, test, link="probit")
            values = probabilities_nll(posterior, (validation[0][:1000], validation[1][:1000]), SCALES)
            found["scale"] = SCALES[min(range(len(SCALES)), key=values.__getitem__)]
            found["scaled"], *_ = probabilities_nll(posterior, test, [found["scale"]])
            posterior.predictive_mean = "tangent"
            row["θ*, mean at θ*"] = {"nll": probabilities_nll(posterior, test)[0]}
            posterior.predictive_mean = "network"
        row[name] = found
    return row


def _order(case: str) -> tuple[str, int, str, int]:
    """Of lines: by network, number of images, curvature and epochs."""
    network, images, curvature, *epochs = case.split(":")
    return network, int(images), curvature, int(epochs[0]) if epochs else 0


def markdown(document: dict[str, Any]) -> str:
    """The report."""
    settings, rows = document["settings"], document["rows"]
    lines = ["# Tuning by an evidence, from few images to all of MNIST", "", METHOD.format(**settings), ""]
    names = [
        "network",
        "weights",
        "images",
        "curvature",
        "epochs",
        "seeds",
        "network's NLL, training",
        "γ",
        "the network",
    ]
    rules = ["θ*, groups", "θ*", "θ*, mean at θ*", "θ̃"]
    names += [*rules, "θ*, probit", "best scale", "its NLL", "default"]
    lines += ["| " + " | ".join(names) + " |", "| --- |" + " --- |" * (len(names) - 1)]
    for case in sorted(dict.fromkeys(row["case"] for row in rows), key=_order):
        own = [row for row in rows if row["case"] == case]
        network, images, curvature, *epochs = case.split(":")
        cells = [network, str(own[0]["parameters"]), images, curvature, *(epochs or ["early"]), str(len(own))]
        cells += [cell(own, lambda row: row["train nll"]), cell(own, lambda row: row["θ*"]["effective"], 0)]
        cells += [cell(own, lambda row: row["network nll"])]
        cells += [cell(own, lambda row, name=name: row[name]["nll"]) for name in rules]
        cells += [cell(own, lambda row: row["θ*"]["probit"]), cell(own, lambda row: row["θ*"]["scale"], 4)]
        cells += [cell(own, lambda row: row["θ*"]["scaled"]), cell(own, lambda row: row["default"]["nll"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is not in the output yet; rows are kept after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/")
    parser.add_argument("--output", type=Path, required=True, help="where to write, without .json and .md")
    parser.add_argument("--cache", type=Path, default=Path("runs/tangent-sizes"), help="for trained weights")
    parser.add_argument("--cases", nargs="+", required=True, help="NETWORK:IMAGES:CURVATURE[:EPOCHS]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--test", type=int, default=2000, help="test images")
    arguments = parser.parse_args()
    settings = {"test": arguments.test, "validation": VALIDATION}
    every, test = standardised(arguments.data, "train"), standardised(arguments.data, "t10k")
    validation, test = (
        (every[0][-VALIDATION:], every[1][-VALIDATION:]),
        (test[0][: arguments.test], test[1][: arguments.test]),
    )
    path = arguments.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if document["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {document['settings']}")
    for case, seed in itertools.product(arguments.cases, arguments.seeds):
        if any((row["case"], row["seed"]) == (case, seed) for row in document["rows"]):
            continue
        network, images, curvature, *epochs = case.split(":")
        train = (every[0][: int(images)], every[1][: int(images)])
        given: Any = {"epochs": int(epochs[0]), "patience": None} if epochs else {"epochs": 40, "patience": 5}
        kept = arguments.cache / f"{network}-{images}-{given['epochs']}-{seed}.pt"
        if not kept.exists():
            arguments.cache.mkdir(parents=True, exist_ok=True)
            torch.save(trained(NETWORKS[network], seed, train, validation, **given).state_dict(), kept)
        model = NETWORKS[network]()
        model.load_state_dict(torch.load(kept, weights_only=True))
        row = {"case": case, "seed": seed}
        row |= measured(model.eval(), curvature, train, validation, test)
        document["rows"].append(row)
        path.write_text(json.dumps(document, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(markdown(document))
        print(json.dumps(row), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
