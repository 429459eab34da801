"""Trained VIKING against the network: what it loses.

    python benchmarks/defaults/viking.py --data DATA --output FOLDER [--seeds 3] [--cells "glass, decay" …] [--sampled]

Cells are those of the battery, by default the development cells of tables of classes; trained networks are kept in the
folder. Writes the rows of a table. ``--sampled`` trains and predicts by sampled networks for 50 epochs, the defaults of
``mode="train"``; else the network is linearised, and there are ten epochs, as in the study.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.defaults.cells import CELLS
from benchmarks.defaults.run import trained

TABLES = ("australian", "glass", "breast_wisconsin_original", "ionosphere", "banana")
OPTIONS = {
    False: {"mode": {"epochs": 10, "scale_epochs": 2}, "expectation": "linearized"},
    True: {"mode": "train"},
}


def measure(name: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Test NLL of the network, of the posterior and of its linearised predictions."""
    data = CELLS[name].data(seed, arguments.data)
    network, (x, y), (inputs, targets) = trained(CELLS[name], data, arguments.output), data.train, data.test
    posterior = lp.VIKING(network, "classification", projector="svd", **OPTIONS[arguments.sampled])
    posterior.fit(list(zip(x.split(32), y.split(32), strict=True)), generator=torch.Generator().manual_seed(seed))

    def loss(**options: str) -> float:
        return -float(posterior.predictive(inputs, **options).log_prob(targets).mean())

    with torch.no_grad():
        return float(cross_entropy(network(inputs), targets)), loss(), loss(method="linearized")


def mean(values: Tensor) -> str:
    """A mean ± its standard error."""
    return f"{values.mean():+.3f} ± {values.std() / len(values) ** 0.5:.3f}"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sampled", action="store_true")
    small = [name for name, cell in CELLS.items() if cell.development and name.startswith(TABLES)]
    parser.add_argument("--cells", nargs="*", default=[name for name in small if "normalised" not in name])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.cells:
        rows = torch.tensor([measure(name, seed, arguments) for seed in range(arguments.seeds)], dtype=torch.float64)
        network, own, linear = rows.T
        found = f"{network.mean():.3f} | {mean(own - network)} | {mean(linear - network)}"
        sys.stdout.write(f"| {name} | {found} |\n")


if __name__ == "__main__":
    main()
