"""Batch active learning for regression: log RMSE, averaged over rounds, of each way to choose data.

python benchmarks/uses/active_learning.py --data DATA --table power --out power.jsonl
python benchmarks/uses/active_learning.py --summary power.jsonl protein.jsonl ...
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

import laplace_plus as lp

METHODS = ("random", "determinant", "lcmd", "kmeans++", "max_distance", "variance", "targets")
START, ROUNDS, EACH, POOL, VALID, WIDTH = 256, 8, 32, 2000, 512, 64
STEPS, PATIENCE = 1200, 300


def load(folder: Path, table: str, split: int):
    """Standardised inputs and targets of the pool (that to start from in front), for validation, and for tests."""
    z = np.load(folder / table / "data.npz", allow_pickle=False)
    x, y = torch.tensor(z["x"], dtype=torch.float32), torch.tensor(z["y"], dtype=torch.float32)[:, None]
    test = torch.tensor(z["standard_test"][split])
    rows = (~test).nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(split))]
    valid, rows = rows[: min(VALID, len(rows) // 5)], rows[min(VALID, len(rows) // 5) :][: START + POOL]
    center, scale = x[rows].mean(0), x[rows].std(0)
    mean, std = y[rows].mean(), y[rows].std()
    scale = torch.where(scale > 1e-6, scale, torch.ones(()))
    return [((x[part] - center) / scale, (y[part] - mean) / std) for part in (rows, valid, test)]


def trained(x, y, valid, seed: int) -> nn.Module:
    """A network that was fitted to some data, as it was when its loss of the validation data was least."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    best, at, state = math.inf, 0, net.state_dict()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            with torch.no_grad():
                loss = float(nn.functional.mse_loss(net(valid[0]), valid[1]))
            if loss < best:
                best, at, state = loss, step, {name: value.clone() for name, value in net.state_dict().items()}
            elif step > at + PATIENCE:
                break
    net.load_state_dict(state)
    return net.eval()


def run(data, method: str, split: int) -> list[float]:
    """Test log RMSE at the start and after each round."""
    (x, y), valid, (x_test, y_test) = data
    known = torch.zeros(len(x), dtype=torch.bool)
    known[:START] = True
    generator, logs = torch.Generator().manual_seed(split), []
    for number in range(ROUNDS + 1):
        net = trained(x[known], y[known], valid, 100 * split + number)
        with torch.no_grad():
            logs.append(float((net(x_test) - y_test).square().mean().sqrt().log()))
        if number == ROUNDS:
            return logs
        rest = (~known).nonzero()[:, 0]
        if method == "random":
            best = torch.randperm(len(rest), generator=generator)[:EACH]
        else:
            posterior = lp.KFAC(net, "regression").fit([(x[known], y[known])])
            if method in ("determinant", "variance", "targets"):
                posterior.fit_prior_precision("marginal_likelihood")
            best = lp.uses.select(
                posterior, x[rest], EACH, method=method, n_features=256, scale="layer", generator=generator
            ).indices
        known[rest[best]] = True
    raise AssertionError


def summary(files: list[Path]) -> None:
    """A table of means and of paired differences from random choice."""
    found = defaultdict(dict)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["table"], row["method"]][row["split"]] = sum(row["logs"][1:]) / ROUNDS
    sys.stdout.write("| table | method | mean log RMSE | minus random | s.e. | splits |\n|---|---|---|---|---|---|\n")
    for (table, method), own in sorted(found.items()):
        base = found[table, "random"]
        gaps = torch.tensor([own[s] - base[s] for s in own if s in base], dtype=torch.float64)
        error = float(gaps.std()) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        mean = sum(own.values()) / len(own)
        row = f"| {table} | {method} | {mean:.4f} | {float(gaps.mean()):+.4f} | {error:.4f} | {len(gaps)} |"
        sys.stdout.write(row + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--table", nargs="+")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path, nargs="+")
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
        return
    for split in options.splits:
        for table in options.table:
            for method in options.methods:
                logs = run(load(options.data, table, split), method, split)
                row = {"table": table, "method": method, "split": split, "logs": logs}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
