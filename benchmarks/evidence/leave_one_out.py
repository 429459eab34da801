"""Calibration by leave-one-out beside the network itself, a validated temperature and the marginal likelihood.

    OMP_NUM_THREADS=1 python benchmarks/evidence/leave_one_out.py --data DATA --output benchmarks/results/leave-one-out

Networks are trained as :mod:`leave_one_out_networks` says, once, and kept in a folder beside the output. Only the row
"MAP + T(validation)" looks at validation data; none looks at test data. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import data as sources
import torch
from leave_one_out_networks import WEIGHT_DECAY, image_network, table_networks
from torch import Tensor, nn

import laplace_plus as lp

TABLES = ("australian", "breast_wisconsin_original", "glass", "ionosphere", "banana")
IMAGES = ("mnist", "fashion_mnist")

MAP, VALIDATED, EVIDENCE = "MAP", "MAP + T(validation)", "marginal likelihood, probit"
PROBIT, MC, SPLIT = "R, probit", "R, Monte Carlo", "R, KFAC covariance"
TUNED = "prior by leave-one-out"

REFERENCE = {
    "australian": {MAP: (0.411, 0.022), VALIDATED: (0.356, 0.009), PROBIT: (0.340, 0.007)},
    "breast_wisconsin_original": {MAP: (0.082, 0.015), VALIDATED: (0.391, 0.312), PROBIT: (0.081, 0.016)},
    "glass": {MAP: (0.899, 0.083), VALIDATED: (0.847, 0.056), PROBIT: (0.806, 0.048)},
    "ionosphere": {MAP: (0.254, 0.059), VALIDATED: (0.244, 0.047), PROBIT: (0.236, 0.052)},
    "banana": {MAP: (0.276, 0.007), VALIDATED: (0.252, 0.009), PROBIT: (0.251, 0.010)},
}
"""Test NLL, mean and standard error, over splits 0 to 4, of other networks of the same protocol, as measured before."""

REFERENCE_GAIN = {
    "australian": (-0.072, 0.019),
    "breast_wisconsin_original": (-0.000, 0.001),
    "glass": (-0.093, 0.043),
    "ionosphere": (-0.018, 0.009),
    "banana": (-0.026, 0.004),
}
"""Of the same networks: R with probit less MAP, paired."""


def nll(prediction: lp.Prediction, labels: Tensor) -> float:
    """Mean negative log-likelihood in nats."""
    return -float(prediction.log_prob(labels).double().mean())


def validated_temperature(outputs: Tensor, labels: Tensor) -> float:
    """The temperature of least loss, between 1/8 and 8 as for the recipe."""
    grid = torch.logspace(math.log10(1 / 8), math.log10(8), 2001, dtype=torch.float64)
    losses = [nn.functional.cross_entropy(outputs.double() / t, labels) for t in grid]
    return float(grid[int(torch.stack(losses).argmin())])


def predictions(posterior: lp.Posterior | lp.CalibratedPosterior, x: Tensor, y: Tensor, link: str) -> float:
    """Test NLL, a part of the test data at a time."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for inputs, labels in sources.batches(x, y, 500):
        prediction = posterior.predictive(inputs, link=link, n_samples=1000, generator=generator)
        total -= float(prediction.log_prob(labels).double().sum())
    return total / len(y)


def calibrated(posterior: lp.GaussianPosterior, split: sources.Split, link: str, leverages: str) -> tuple[float, dict]:
    """The recipe's test NLL and what it found."""
    started = time.process_time()
    generator = torch.Generator().manual_seed(0)
    found = lp.calibrate(
        posterior, weight_decay=WEIGHT_DECAY, link=link, leverages=leverages, n_samples=1000, generator=generator
    )
    report = vars(found.report) | {"scale": found.covariance_scale, "cpu_seconds": time.process_time() - started}
    return predictions(found, *split.test, link), report


def evaluate(model: nn.Module, split: sources.Split, *, large: bool) -> tuple[dict[str, float], dict[str, dict]]:
    """The rows of one network, and what the recipes found."""
    loader = sources.batches(*split.train, 250)
    with torch.no_grad():
        held_out = model(split.validation[0])
        outputs = torch.cat([model(x) for x, _ in sources.batches(*split.test)])
    labels = split.test[1]
    temperature = validated_temperature(held_out, split.validation[1])
    rows = {
        MAP: float(nn.functional.cross_entropy(outputs, labels)),
        VALIDATED: float(nn.functional.cross_entropy(outputs / temperature, labels)),
    }
    found = {VALIDATED: {"temperature": temperature}}
    kfac = lp.KFAC(model, "classification").fit(loader)
    main = kfac if large else lp.Full(model, "classification").fit(loader)
    main.fit_prior_precision("marginal_likelihood")
    found[EVIDENCE] = {"prior_precision": float(main.prior_precision)}
    rows[EVIDENCE] = predictions(main, *split.test, "probit")
    recipes = [(PROBIT, main, "probit", "own"), (MC, main, "mc", "own"), (SPLIT, kfac, "probit", "full")]
    if large:
        recipes = [(PROBIT, kfac, "probit", "full")]
    for name, posterior, link, leverages in recipes:
        rows[name], found[name] = calibrated(posterior, split, link, leverages)
    if large:
        return rows, found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a search that ends at no covariance says so
        main.fit_prior_precision("leave_one_out", weight_decay=WEIGHT_DECAY)
    found[TUNED] = {"prior_precision": float(main.prior_precision), "converged": main.tuning.converged}
    rows[TUNED] = predictions(main, *split.test, "probit")
    return rows, found


def networks_of(
    name: str, numbers: list[int], arguments: argparse.Namespace
) -> Iterator[tuple[nn.Module, sources.Split]]:
    """Networks and data of one set."""
    folder = Path(f"{arguments.output}-networks")
    if name in TABLES:
        networks = table_networks(folder, name, numbers, arguments.data, arguments.epochs)
        for number, network in zip(numbers, networks, strict=True):
            yield network, sources.table(arguments.data, name, number)
        return
    inputs, labels = sources.images(arguments.data, name, "train")
    pixels, digits = sources.images(arguments.data, name, "t10k")
    some = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))[: arguments.n_test]
    test = pixels[some], digits[some]
    for number in numbers[: arguments.seeds]:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))
        train, held_out = order[: arguments.n_images], order[arguments.n_images :][:500]
        split = sources.Split((inputs[train], labels[train]), (inputs[held_out], labels[held_out]), test)
        yield image_network(folder, name, number, split.train, arguments.image_epochs), split


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan


def shown(pair: tuple[float, float], sign: str = "") -> str:
    """Mean ± standard error in text."""
    return f"{pair[0]:{sign}.3f} ± {pair[1]:.3f}"


def markdown(results: dict[str, list[dict]], settings: dict) -> str:
    """The tables."""
    lines = [
        "# Calibration by leave-one-out",
        "",
        INTRODUCTION.format(**settings | {"splits": ", ".join(map(str, settings["splits"]))}).strip(),
        "",
    ]
    for name, cells in chosen(results).items():
        rows = [cell["nll"] for cell in cells]
        kind = "splits" if name in TABLES else "seeds"
        lines += [f"## {name}, {len(rows)} {kind}", ""]
        lines += ["| | test NLL | less MAP, paired | less MAP + T(validation) | reference |", "|---|---|---|---|---|"]
        for row in rows[0]:
            values = [cell[row] for cell in rows]
            apart = []
            for other in (MAP, VALIDATED):
                gains = [cell[row] - cell[other] for cell in rows]
                apart.append("" if other == row else shown(spread(gains), "+"))
            known = REFERENCE.get(name, {}).get(row)
            text = "" if known is None else shown(known)
            if row == PROBIT and name in REFERENCE_GAIN:
                text += f" (less MAP {shown(REFERENCE_GAIN[name], '+')})"
            lines.append(f"| {row} | {shown(spread(values))} | {apart[0]} | {apart[1]} | {text} |")
        found = [cell["found"][PROBIT] for cell in cells]
        lines += ["", "Found by R with probit: " + "; ".join(map(described, found)) + ".", ""]
    return "\n".join(lines)


def described(found: dict) -> str:
    """One calibration in words."""
    used = f"s = {found['scale']:.2f}" if found["rule"] == "covariance" else "no covariance"
    losses = [f"{found[key]:.3f}" for key in ("training_nll", "leave_one_out_nll", "calibrated_nll")]
    text = f"T = {found['fitted_temperature']:.2f}, {used}, leverages up to {found['largest_leverage']:.2f}"
    return f"{text}, NLL {losses[0]} in training, {losses[1]} left out, {losses[2]} calibrated"


INTRODUCTION = """
Test NLL in nats, mean ± standard error; differences are paired. R is `lp.calibrate(posterior, weight_decay=0.01)`: with
κ = 2 and no validation data. "Prior by leave-one-out" is `fit_prior_precision("leave_one_out")`, with probit.

Tables: two hidden layers of 32 ReLU units, Adam at 1e-3, batches of 32, {epochs} epochs, weight decay .01, splits
{splits} in parts of 70/15/15 %, standardised; the posterior is `lp.Full`. "R, KFAC covariance" has `lp.KFAC` for the
covariance and the exact Gauss-Newton matrix for displacements. The reference column is of other networks of the same
protocol, measured before.

Images: {n_images} training images, 500 to validate the temperature of that row alone, {n_test} test images; a
convolutional network of 2 202 weights, the same optimiser, {image_epochs} epochs. The posterior is `lp.KFAC`;
displacements are of the exact Gauss-Newton matrix of all weights, or of the last layer's. The recipe is as it is for
tables: nothing was tuned on images.
"""


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", required=True, help="prefix of the .json and .md files")
    parser.add_argument("--sets", nargs="+", default=[*TABLES, *IMAGES], choices=[*TABLES, *IMAGES])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, default=3, help="of the image sets: the first so many of --splits")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--n-images", type=int, default=2000)
    parser.add_argument("--n-test", type=int, default=3000, help="test images")
    parser.add_argument("--image-epochs", type=int, default=50)
    arguments = parser.parse_args()
    names = ("splits", "seeds", "epochs", "n_images", "n_test", "image_epochs")
    settings = {name: getattr(arguments, name) for name in names} | {"torch": torch.__version__}
    written = Path(f"{arguments.output}.json")
    known = json.loads(written.read_text()) if written.exists() else {}
    results: dict[str, list[dict]] = known["results"] if known.get("settings") == settings else {}
    for name in arguments.sets:
        cells = results.setdefault(name, [])
        for number, (network, split) in enumerate(networks_of(name, arguments.splits, arguments)):
            if number < len(cells):  # from an earlier run with the same settings
                continue
            rows, found = evaluate(network, split, large=name in IMAGES)
            cells.append({"nll": rows, "found": found})
            print(name, {row: round(value, 4) for row, value in rows.items()}, flush=True)  # noqa: T201
            written.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    Path(f"{arguments.output}.md").write_text(markdown(results, settings) + "\n")


def chosen(results: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Sets with results, in the usual order."""
    return {name: results[name] for name in (*TABLES, *IMAGES) if results.get(name)}


if __name__ == "__main__":
    main()
