"""Public networks that ship their weights, on real rows that they were not trained on.

    pip install im2deep==2.0.2 magika==1.0.3 onnx deeplc==4.5.0
    python benchmarks/real/run.py --output FOLDER [--networks peptides filetypes times] [--halves 5] [--kfac-halves 2]

A network that is not installed is skipped. ``real.jsonl`` holds a line for each network, half and method; a run goes on
where it ended. ``real.md`` is the table. Rows and features are kept in ``--cache``, by default a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.real.methods import Half

INSTALL = "pip install im2deep==2.0.2 magika==1.0.3 onnx deeplc==4.5.0"
NETWORKS = {
    "peptides": (("im2deep",), "IM2Deep, 891 469 weights, cross-sections of peptides in Å²"),
    "filetypes": (("magika", "onnx"), "Magika, 784 519 weights, 214 types of files"),
    "times": (("deeplc",), "DeepLC, 2 132 945 weights and one output, retention times of peptides in minutes"),
}
COLUMNS = ("nll", "calibration", "auroc", "surest", "kinds", "forwards")
HEADS = {
    "classification": "| | halves | NLL | ECE | AUROC, worst tenth | error rate, surest 80 % | AUROC, unknown kinds |",
    "regression": "| | halves | NLL | 90 % coverage | AUROC, worst tenth | error, surest 80 % | AUROC, unknown kinds |",
}


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a file, without one that was cut off."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def cell(values: list[float | None]) -> str:
    """A mean with its standard error."""
    numbers = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(numbers):
        return ""
    digits = max(0, 2 - math.floor(math.log10(max(abs(float(numbers.mean())), 1e-3))))
    digits = min(digits, 3)
    error = f" ± {float(numbers.std()) / math.sqrt(len(numbers)):.{digits}f}" if len(numbers) > 1 else ""
    return f"{float(numbers.mean()):.{digits}f}{error}"


def table(rows: list[dict[str, Any]]) -> str:
    """Of one network: a line for each method."""
    lines = [HEADS[rows[0]["likelihood"]] + " cost in forwards | chosen |", "|---" * 9 + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        cells = [cell([row[column] for row in own]) for column in COLUMNS]
        chosen = ", ".join(dict.fromkeys(row["chosen"] for row in own))
        lines.append(f"| {method} | {len(own)} | " + " | ".join([*cells, chosen]) + " |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]]) -> str:
    """All tables."""
    parts = []
    for name in NETWORKS:
        own = [row for row in rows if row["network"] == name]
        if own:
            parts.append(f"## {NETWORKS[name][1]}\n\n{table(own)}\n")
    return "\n".join(parts)


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--halves", type=int, default=5)
    parser.add_argument("--kfac-halves", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    options.output.mkdir(parents=True, exist_ok=True)
    cache = options.cache or Path(tempfile.mkdtemp())
    cache.mkdir(parents=True, exist_ok=True)
    results = options.output / "real.jsonl"
    done = {(row["network"], row["half"], row["method"]) for row in read(results)}
    for name in options.networks:
        if not all(map(find_spec, NETWORKS[name][0])):
            sys.stdout.write(f"{NETWORKS[name][1]}: not installed. {INSTALL}\n")
            continue
        problem = import_module(f"benchmarks.real.{name}").load(cache)
        for structure, halves in (("", options.halves), ("KFAC", options.kfac_halves)):  # the slow ones at the end
            for half in (Half(problem, seed) for seed in range(halves)):
                for method in problem.methods:
                    if method.startswith("KFAC") != bool(structure) or (name, half.seed, method) in done:
                        continue
                    row = {"network": name, "likelihood": problem.likelihood, "half": half.seed, "method": method}
                    row |= half.row(method)
                    with results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()
    text = page(read(results))
    (options.output / "real.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
