"""Scalar curvature of the loss against what a network does on test data: over widths and sizes of batches.

    python benchmarks/study/curvature.py --data DATA --output FOLDER --pages PAGES

Networks of one hidden layer learn 1000 digits by plain SGD until the training loss is the same for all. Then the
curvature of the mean training loss is estimated there. Writes study-curvature.md; goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study.rows import Row, Rows, said, script, section_of, table
from benchmarks.study.sets import DataSet, load
from laplace_plus.geometry import LossLandscape, estimate_scalar_curvature
from laplace_plus.linalg import eigsh

PROBES, DEFLATED = 40, 5
LOSS, RATE, MOST = 0.05, 0.1, 1500
"""Training ends at this mean loss, or after so many epochs."""

CELLS = [*((64, batch) for batch in (8, 32, 128)), *((width, 32) for width in (16, 32, 128))]
"""Widths and sizes of batches."""

COLUMNS = {
    "train": "training NLL",
    "test": "test NLL",
    "accuracy": "accuracy",
    "curvature": "S",
    "trace": "tr H",
    "largest": "largest λ",
}


def trained(data: DataSet, width: int, batch: int, seed: int) -> tuple[nn.Module, int]:
    """A network at the training loss where all stop, and its epochs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, 10))
    x, y = data.train
    near = False
    for epoch in range(MOST):
        for step, rows in enumerate(torch.randperm(len(x)).split(batch)):
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad  # type: ignore[operator]
                    parameter.grad = None
                if near and step % 5 == 0 and float(functional.cross_entropy(model(x), y)) <= LOSS:
                    return model.eval(), epoch + 1
        with torch.no_grad():
            near = float(functional.cross_entropy(model(x), y)) <= 3 * LOSS
    return model.eval(), MOST


def measured(data: DataSet, width: int, batch: int, seed: int) -> Row:
    """One network."""
    model, epochs = trained(data, width, batch, seed)
    x, y = data.train
    surface = LossLandscape(model, "classification", [(x, y)], prior_precision=0.0, temperature=len(x))
    point, generator = surface.vector, torch.Generator().manual_seed(0)
    found = estimate_scalar_curvature(surface, point, probes=PROBES, deflate=DEFLATED, generator=generator)

    def product(vectors: Tensor) -> Tensor:
        rows = vectors.reshape(-1, len(point))
        return surface.derivatives(point.expand_as(rows), rows).products.view_as(vectors)

    options: dict[str, Any] = {"generator": generator, "dtype": point.dtype, "device": point.device}
    values = eigsh(product, len(point), 1, which="largest", **options).values
    signs = torch.randint(2, (PROBES, len(point)), generator=generator).to(point) * 2 - 1
    trace = torch.cat([(part * product(part)).sum(1) for part in signs.split(15)]).mean()
    with torch.no_grad():
        own, outputs = functional.cross_entropy(model(x), y), model(data.test[0])
    return {
        "epochs": epochs,
        "train": float(own),
        "test": float(functional.cross_entropy(outputs, data.test[1])),
        "accuracy": float((outputs.argmax(1) == data.test[1]).double().mean()),
        "curvature": float(found.value),
        "sem": float(found.sem),
        "trace": float(trace),
        "largest": float(values[0]),
        "gradient": float(surface.gradient(point[None])[0].norm()),
    }


INTRODUCTION = """
# Scalar curvature of the loss, and test loss

Networks 784–width–10 with tanh units learn 1000 digits of MNIST by SGD (rate {rate}, no momentum and no weight decay)
until the mean training loss is {loss}. {seeds} seeds, mean ± standard error. S is the scalar curvature of the surface
of the mean training loss without a prior, estimated with {probes} probes and {deflated} eigenvectors removed; its own
relative standard error is at most {sem:.1%}. `python benchmarks/study/curvature.py` measures it.
"""


def page(rows: Rows) -> str:
    """The table, and rank correlations."""
    seeds = len({row["seed"] for row in rows.all})
    sem = max(row["sem"] / abs(row["curvature"]) for row in rows.all)
    lines = [
        INTRODUCTION.strip().format(probes=PROBES, deflated=DEFLATED, rate=RATE, loss=LOSS, seeds=seeds, sem=sem),
        "",
    ]
    cells = []
    for width, batch in CELLS:
        some = rows.where(width=width, batch=batch)
        digits = {"curvature": 1, "trace": 2, "largest": 3}
        own = [said([row[key] for row in some], digits.get(key, 3)) for key in COLUMNS]
        cells.append([str(width), str(batch), said([float(row["epochs"]) for row in some], 0), *own])
    lines += table(["width", "batch", "epochs", *COLUMNS.values()], cells)
    lines += ["Spearman's rank correlation with the test NLL (p-value) over the networks of the given rows:", ""]
    groups = {
        "all": rows.all,
        "width 64, all batches": rows.where(width=64),
        "batch 32, all widths": rows.where(batch=32),
    }
    keys = ("curvature", "trace", "largest")
    found = []
    for name, some in groups.items():
        ranks = [spearmanr([row[key] for row in some], [row["test"] for row in some]) for key in keys]
        found.append([f"{name} ({len(some)})", *(f"{one.statistic:.2f} ({one.pvalue:.2g})" for one in ranks)])
    lines += table(["", *(COLUMNS[key] for key in keys)], found)
    return "\n".join(lines).rstrip() + "\n"


def measure(rows: Rows, arguments: Namespace) -> None:
    """All that is missing."""
    section = section_of("digits")
    for seed in range(arguments.seeds):
        data = load(section.name, seed, arguments.data, section.source)
        for width, batch in CELLS:
            rows.of(partial(measured, data, width, batch, seed), width=width, batch=batch, seed=seed)


def main() -> None:
    """Measure what is missing, and write the page."""
    script(__doc__ or "", "curvature", measure, page)


if __name__ == "__main__":
    main()
