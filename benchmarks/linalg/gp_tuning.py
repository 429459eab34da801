"""Hyperparameters of Gaussian processes by what they predict, through LSMR, beside the marginal likelihood.

    OMP_NUM_THREADS=1 python benchmarks/linalg/gp_tuning.py --data DATA --output FILE

M random Fourier features of a squared-exponential kernel with a lengthscale for each input. Lengthscales, the scale of
outputs and the noise are tuned by Adam. Splits whose results the output holds already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_plus.applications.uses import ridge_left_out
from laplace_plus.linalg import cg, slq_logdet

TABLES = ("snelson", "boston", "concrete", "energy", "power")
LOG_2PI = math.log(2 * math.pi)
ROWS = 8
"""Data left out in each step, drawn anew."""

METHOD = """\
Mean ± standard error over splits. NLL is that of test targets, in nats and in the targets' own units. {features} random
Fourier features of a squared-exponential kernel, a lengthscale for each input; inputs and targets are standardised by
the training part. Lengthscales (√d at first), the scale of outputs (1) and the noise (.3) are tuned by Adam, {steps}
steps of .05, in float64; the last step counts. Splits are the standard ones, of snelson ten per cent drawn at random.
All ways see the same features of a split.

* "left out, LSMR": the NLL of {rows} data, drawn anew in each step, each predicted from all others;
  `lp.uses.ridge_left_out`, one LSMR with {right} right-hand sides at tolerances of 1e-4, and its implicit derivative.
* "left out, dense": the same for all data, by a Cholesky factorisation.
* "evidence, SLQ": the log marginal likelihood by `slq_logdet` ({probes} probes, depth {depth}) and `cg`, both on the
  M × M side.
* "evidence, dense": the same by a Cholesky factorisation.

CPU time of a step with its derivative, on one thread of a machine with other work: the least over steps of the mean of
ten. A factorisation of 500 features is cheap; the ways without one keep no M × M matrix. Nothing was chosen by test
results."""

PROBES, DEPTH = 4, 30


class Process:
    """A Gaussian process with M features on standardised data; hyperparameters are logarithms."""

    def __init__(self, x: Tensor, y: Tensor, features: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.x, self.y = x, y
        self.waves = torch.randn(x.shape[1], features // 2, generator=self.generator, dtype=x.dtype)
        lengthscales = torch.full((x.shape[1],), math.log(x.shape[1]) / 2, dtype=x.dtype)
        scale, noise = torch.zeros((), dtype=x.dtype), torch.tensor(math.log(0.3), dtype=x.dtype)
        self.hyperparameters = [value.requires_grad_() for value in (lengthscales, scale, noise)]

    @property
    def noise(self) -> Tensor:
        """σ."""
        return self.hyperparameters[2].exp()

    def features(self, x: Tensor) -> Tensor:
        """Φ, ``[N, M]``."""
        angles = (x / self.hyperparameters[0].exp()) @ self.waves
        scale = self.hyperparameters[1].exp() / self.waves.shape[1] ** 0.5
        return scale * torch.cat([angles.cos(), angles.sin()], 1)

    def cholesky(self, phi: Tensor) -> Tensor:
        """L of ``ΦᵀΦ + σ² = L Lᵀ``."""
        return torch.linalg.cholesky(phi.T @ phi + self.noise**2 * torch.eye(phi.shape[1], dtype=phi.dtype))

    def test_nll(self, x: Tensor, y: Tensor) -> float:
        """Mean NLL of new targets."""
        with torch.no_grad():
            phi, new = self.features(self.x), self.features(x)
            root = self.cholesky(phi)
            mean = new @ torch.cholesky_solve((phi.T @ self.y)[:, None], root)[:, 0]
            spread = torch.linalg.solve_triangular(root, new.T, upper=False).square().sum(0)
            std = self.noise * (1 + spread).sqrt()
            return float(-torch.distributions.Normal(mean, std).log_prob(y).mean())


def left_out_lsmr(process: Process) -> Tensor:
    """Mean NLL of some data, each left out."""
    rows = torch.randperm(len(process.y), generator=process.generator)[:ROWS]
    options: Any = {"rows": rows, "atol": 1e-4, "btol": 1e-4, "conlim": 0.0}
    return ridge_left_out(process.features(process.x), process.y, process.noise, **options).nll(process.noise)


def left_out_dense(process: Process) -> Tensor:
    """Mean NLL of all data, each left out."""
    phi = process.features(process.x)
    root = process.cholesky(phi)
    residual = process.y - phi @ torch.cholesky_solve((phi.T @ process.y)[:, None], root)[:, 0]
    kept = 1 - torch.linalg.solve_triangular(root, phi.T, upper=False).square().sum(0)
    variance = process.noise**2 / kept
    return (LOG_2PI + variance.log() + (residual / kept).square() / variance).mean() / 2


def evidence(process: Process, phi: Tensor, weights: Tensor, log_det: Tensor) -> Tensor:
    """``−log p(y)/N`` from ``w`` and ``log det(ΦᵀΦ + σ²)``."""
    (n, m), log_noise = phi.shape, process.hyperparameters[2]
    square = process.y @ (process.y - phi @ weights) / process.noise**2
    return (square + log_det + 2 * (n - m) * log_noise + n * LOG_2PI) / (2 * n)


def evidence_slq(process: Process) -> Tensor:
    """By stochastic Lanczos quadrature and conjugate gradients."""
    phi, noise = process.features(process.x), process.noise

    def multiply(v: Tensor) -> Tensor:
        return (v @ phi.T) @ phi + noise**2 * v

    tensors = [phi, noise]
    options: Any = {"probes": PROBES, "depth": DEPTH, "generator": process.generator, "parameters": tensors}
    log_det = slq_logdet(multiply, phi.shape[1], dtype=phi.dtype, **options).value
    weights = cg(multiply, phi.T @ process.y, rtol=1e-4, parameters=tensors).value
    return evidence(process, phi, weights, log_det)


def evidence_dense(process: Process) -> Tensor:
    """By a factorisation."""
    phi = process.features(process.x)
    root = process.cholesky(phi)
    weights = torch.cholesky_solve((phi.T @ process.y)[:, None], root)[:, 0]
    return evidence(process, phi, weights, 2 * root.diagonal().log().sum())


WAYS: dict[str, Callable[[Process], Tensor]] = {
    "left out, LSMR": left_out_lsmr,
    "left out, dense": left_out_dense,
    "evidence, SLQ": evidence_slq,
    "evidence, dense": evidence_dense,
}


def table(folder: Path, name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Training and test part, standardised, and the logarithm of the targets' unit."""
    with np.load(folder / name / "data.npz", allow_pickle=False) as file:
        x, y = file["x"].astype(np.float64), file["y"].astype(np.float64)
        if "standard_test" in file:
            test = file["standard_test"][split]
        else:
            test = np.isin(np.arange(len(y)), np.random.default_rng(split).permutation(len(y))[: len(y) // 10])
    mean, std = x[~test].mean(0), x[~test].std(0)
    x, unit = (x - mean) / np.where(std > 0, std, 1.0), y[~test].std()
    y = (y - y[~test].mean()) / unit
    parts = (torch.from_numpy(part) for part in (x[~test], y[~test], x[test], y[test]))
    return *parts, math.log(unit)  # type: ignore[return-value]


def measured(folder: Path, name: str, split: int, features: int, steps: int) -> dict[str, Any]:
    """Test NLL, hyperparameters and time of each way on one split."""
    x, y, x_test, y_test, unit = table(folder, name, split)
    row: dict[str, Any] = {"table": name, "split": split, "n": len(y), "inputs": x.shape[1]}
    row["at first"] = {"nll": Process(x, y, features, split).test_nll(x_test, y_test) + unit}
    for way, loss in WAYS.items():
        process = Process(x, y, features, split)
        optimizer, spans = torch.optim.Adam(process.hyperparameters, lr=0.05), []
        for _ in range(steps):
            start = time.process_time()
            optimizer.zero_grad()
            loss(process).backward()
            optimizer.step()
            spans.append(time.process_time() - start)
        for value in process.hyperparameters:
            value.requires_grad_(False)
        lengthscales, scale, noise = (value.exp() for value in process.hyperparameters)
        row[way] = {
            "nll": process.test_nll(x_test, y_test) + unit,
            "evidence": -float(evidence_dense(process)),
            "left_out": float(left_out_dense(process)),
            "seconds": min(sum(spans[k : k + 10]) / 10 for k in range(max(1, steps - 9))),
            "all_seconds": sum(spans),
            "noise": float(noise),
            "scale": float(scale),
            "lengthscales": lengthscales.tolist(),
        }
    return row


def cell(values: list[float], digits: int = 3) -> str:
    """Mean ± standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    error = f" ± {numbers.std() / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{numbers.mean():.{digits}f}{error}"


def grid(rows: list[dict[str, Any]], ways: list[str], value: Callable[[dict[str, Any]], float], digits: int) -> str:
    """A table with a line for each data set."""
    lines = ["| | splits | N | " + " | ".join(ways) + " |", "| --- " * (3 + len(ways)) + "|"]
    for name in TABLES:
        own = [row for row in rows if row["table"] == name]
        cells = [cell([value(row[way]) for row in own], digits) for way in ways] if own else []
        lines += [f"| {name} | {len(own)} | {own[0]['n']} | " + " | ".join(cells) + " |"] if own else []
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """The page."""
    rows, ways = document["rows"], list(WAYS)
    words = METHOD.format(rows=ROWS, right=1 + ROWS, probes=PROBES, depth=DEPTH, **document["settings"])
    parts = ["# Hyperparameters of Gaussian processes by what they predict", words, "## Test NLL"]
    parts += [grid(rows, ["at first", *ways], lambda found: found["nll"], 3)]
    parts += ["## CPU milliseconds a step", grid(rows, ways, lambda found: 1e3 * found["seconds"], 0)]
    parts += [
        "## Noise found, in standard deviations of the targets",
        grid(rows, ways, lambda found: found["noise"], 3),
    ]
    parts += ["## Log evidence of a datum at the end, exact", grid(rows, ways, lambda found: found["evidence"], 3)]
    parts += ["## Mean NLL of data left out at the end, exact", grid(rows, ways, lambda found: found["left_out"], 3)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure what is not in the output yet; rows are kept after each split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with snelson/, boston/, …")
    parser.add_argument("--output", type=Path, required=True, help="where to write, without .json and .md")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--features", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="5 steps of 50 features: whether it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.features, arguments.steps, arguments.splits = 50, 5, 1
    settings = {"features": arguments.features, "steps": arguments.steps}
    path = arguments.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if document["settings"] != settings:
        raise SystemExit(f"{path} has other settings: {document['settings']}")
    for name in arguments.tables:
        for split in range(arguments.splits):
            if any((row["table"], row["split"]) == (name, split) for row in document["rows"]):
                continue
            document["rows"].append(measured(arguments.data, name, split, arguments.features, arguments.steps))
            path.write_text(json.dumps(document, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
