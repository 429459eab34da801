"""The default tuning, cell by cell: what the two lines gain or lose against the network itself.

    python benchmarks/defaults/run.py --data DATA --output FOLDER [--cells "glass, decay" …] [--seeds 5]

Trained networks and rows are kept in the folder, and a run goes on where it ended. ``defaults.jsonl`` holds a row for
each cell, seed and class: test NLL of the network, and how much the marginal likelihood and the default add to it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.defaults.cells import CELLS, Cell, train
from benchmarks.study.sets import DataSet

CLASSES: dict[str, Any] = {
    "KFAC": (lp.KFAC, {}),
    "Diagonal": (lp.Diagonal, {}),
    "last layer": (lp.KFAC, {"parameters": "last_layer"}),
    "Full": (lp.Full, {}),
}

FEW = 3500
"""Weights up to which the full matrix is run."""

TEST_ROWS = 1000


def trained(cell: Cell, data: DataSet, folder: Path) -> nn.Module:
    """The network of a cell and split, from the folder if it is there."""
    path = folder / f"{cell.name}-{data.number}.pt"
    if not path.exists():
        torch.save(train(cell, data).state_dict(), path)
    torch.manual_seed(data.number)
    network = cell.network(data)
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def network_nll(network: nn.Module, data: DataSet) -> float:
    """Of the test rows; in regression with the noise of the training residuals."""
    x, y = (part[:TEST_ROWS] for part in data.test)
    with torch.no_grad():
        outputs = network(x)
        if data.classification:
            return float(nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten()))
        noise = (network(data.train[0]) - data.train[1]).square().mean()
        return float(((outputs - y).square().mean() / noise + (2 * math.pi * noise).log()) / 2)


def nll(posterior: Any, data: DataSet) -> float:
    """Of the test rows, for each of their targets."""
    x, y = (part[:TEST_ROWS] for part in data.test)
    parts = zip(x.split(200), y.split(200), strict=True)
    return -sum(float(posterior.predictive(inputs).log_prob(targets).sum()) for inputs, targets in parts) / y.numel()


def row(cell: Cell, data: DataSet, network: nn.Module, name: str) -> dict[str, Any]:
    """What tuning by the marginal likelihood and by the default gives."""
    kind, options = CLASSES[name]
    posterior = kind(network, "classification" if data.classification else "regression", **options)
    posterior.fit(data.loader("train"))
    own = network_nll(network, data)
    posterior.fit_prior_precision("marginal_likelihood")
    evidence = nll(posterior, data) - own
    started = time.perf_counter()
    posterior.fit_prior_precision()
    seconds, found = time.perf_counter() - started, posterior.tuning
    return {
        "cell": cell.name,
        "development": cell.development,
        "seed": data.number,
        "class": name,
        "network": own,
        "marginal_likelihood": evidence,
        "default": nll(posterior, data) - own,
        "expected_gain": found.expected_gain,
        "chosen": found.chosen,
        "seconds": seconds,
    }


def main() -> None:
    """Run what is missing, and print each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--classes", nargs="*", default=list(CLASSES))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = arguments.output / "defaults.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(entry["cell"], entry["seed"], entry["class"]) for entry in known}
    warnings.simplefilter("ignore")
    for cell in (CELLS[name] for name in arguments.cells):
        for seed in range(arguments.seeds):
            missing = [name for name in arguments.classes if (cell.name, seed, name) not in done]
            if not missing:
                continue
            data = cell.data(seed, arguments.data)
            network = trained(cell, data, arguments.output)
            size = sum(parameter.numel() for parameter in network.parameters())
            for name in missing:
                if name != "Full" or size <= FEW:
                    found = row(cell, data, network, name)
                    with results.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    sys.stdout.write(f"{cell.name:34} {seed} {name:10} {found['default']:+.3f} {found['chosen']}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
