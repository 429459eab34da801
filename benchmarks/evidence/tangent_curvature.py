"""The tangent evidence with its curvature at the network's outputs and at its own optimum, on small tables.

    OMP_NUM_THREADS=1 python benchmarks/evidence/tangent_curvature.py --data DATA --output FILE

Networks are those of :mod:`leave_one_out_networks`. Splits whose results the output holds already are not measured
again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import data as sources
import torch
from leave_one_out_networks import table_networks
from tangent import cell
from torch import nn

import laplace_plus as lp
from laplace_plus.tuning import TangentModel
from laplace_plus.tuning.tangent_curvature import curvature_at

TABLES = ("australian", "breast_wisconsin_original", "glass")
WAYS = (
    "the network",
    "Laplace evidence",
    "tangent, H at the network",
    "tangent, H at the optimum",
    "the same H predicts",
)

METHOD = """\
# The tangent evidence with its curvature at its own optimum

Mean ± standard error over splits {splits}: two hidden layers of 32 ReLU units, {epochs} epochs, weight decay .01.
EKFAC, one precision for all weights or one for each layer, converged where no derivative exceeds {tolerance} nats.
Predictions are linearised around the network's outputs, by Monte Carlo (1000 samples), with the curvature of the fit;
in the last column with H from h(θ*), too. CPU time is that of the tuning, on a machine with other work. Nothing was
chosen by test results."""


def measured(model: nn.Module, split: sources.Split, structure: str, tolerance: float) -> dict[str, Any]:
    """Test NLL, precisions and time of all ways."""
    loader, (x, y) = sources.batches(*split.train, 250), split.test
    posterior = lp.KFAC(model, "classification", eigenvalue_corrected=True).fit(loader)

    def nll() -> float:
        generator = torch.Generator().manual_seed(0)
        prediction = posterior.predictive(x, link="mc", n_samples=1000, generator=generator)
        return -float(prediction.log_prob(y).double().mean())

    with torch.no_grad():
        row: dict[str, Any] = {WAYS[0]: {"nll": float(nn.functional.cross_entropy(model(x), y))}}
    tuners = [lp.MarginalLikelihood(structure=structure)]
    options: dict[str, Any] = {"structure": structure, "tolerance": tolerance, "data": loader}
    tuners += [lp.Tangent(curvature_at=place, **options) for place in ("network", "optimum")]
    for way, tuner in zip(WAYS[1:], tuners, strict=False):
        start = time.process_time()
        posterior.fit_prior_precision(tuner)
        found, seconds = posterior.tuning, time.process_time() - start
        row[way] = {"nll": nll(), "precision": posterior.prior_precision.flatten().tolist(), "seconds": seconds}
        row[way] |= {"converged": found.converged, "evidence": found.value}
        row[way] |= {"alternations": getattr(found, "n_iterations", None)}
    tangent = TangentModel(posterior.network, posterior.likelihood, loader)
    curvature, precision = curvature_at(posterior, tangent, posterior.tuning.vector), posterior.prior_precision
    posterior.adopt(replace(posterior.sums, curvature=curvature), posterior.mean)
    posterior.prior_precision = precision
    row[WAYS[4]] = {"nll": nll()}
    return row


def markdown(document: dict[str, Any]) -> str:
    """The page."""
    rows, parts = document["rows"], [METHOD.format(**document["settings"])]
    quantities = [("Test NLL", "nll", 0, 3), ("CPU seconds of tuning", "seconds", 1, 2)]
    quantities += [("Alternations", "alternations", 2, 1), ("Evidence", "evidence", 1, 1)]
    for title, key, first, digits in quantities:
        ways = WAYS[first : 5 if key == "nll" else 4]
        lines = [f"## {title}", "", "| | " + " | ".join(("precisions", *ways)) + " |", "| --- " * (2 + len(ways)) + "|"]
        for name in TABLES:
            for structure in ("scalar", "layerwise"):
                own = [row for row in rows if (row["table"], row["structure"]) == (name, structure)]
                cells = [cell(own, lambda row, way=way, key=key: row[way][key], digits) for way in ways] if own else []
                lines += [f"| {name} | {structure} | " + " | ".join(cells) + " |"] if own else []
        parts.append("\n".join(lines))
    failed = sum(not row[way]["converged"] for row in rows for way in WAYS[1:4])
    parts.append(f"Of {3 * len(rows)} tunings {failed} did not converge.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure what is not in the output yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with glass/, australian/, …")
    parser.add_argument("--output", type=Path, required=True, help="where to write, without .json and .md")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--tolerance", type=float, default=0.05)
    arguments = parser.parse_args()
    settings = {key: getattr(arguments, key) for key in ("splits", "epochs", "tolerance")}
    path = arguments.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if document["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {document['settings']}")
    for name in arguments.tables:
        folder = Path(f"{arguments.output}-networks")
        networks = table_networks(folder, name, arguments.splits, arguments.data, arguments.epochs)
        for number, network in zip(arguments.splits, networks, strict=True):
            for structure in ("scalar", "layerwise"):
                known = {"table": name, "split": number, "structure": structure}
                if any(known.items() <= row.items() for row in document["rows"]):
                    continue
                split = sources.table(arguments.data, name, number)
                document["rows"].append(known | measured(network, split, structure, arguments.tolerance))
                path.write_text(json.dumps(document, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
