"""A full covariance over 42 000 of the weights of a ResNet-18: time and memory of its fit and its predictions.

Run as ``python benchmarks/geometry/subnetwork_resnet18.py --output PREFIX``, which writes ``PREFIX.json`` and
``PREFIX.md``. Weights and images are random numbers, which changes nothing of what is measured: CPU time on one thread,
and the process's largest memory. With N images of C classes the posterior keeps S·N·C numbers, as long as that is less
than S². Training one network and choosing by variance are not measured: the chosen weights are those of largest
magnitude, among all of the network's.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import torchvision
from measuring import cpu_seconds, peak_gigabytes
from torch import nn

import laplace_plus as lp

CLASSES = 10


def network() -> nn.Module:
    """A ResNet-18 with statistics of batch normalisation that fit its weights, in evaluation mode."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.train()
    with torch.no_grad():
        for _ in range(10):
            model(torch.randn(64, 3, 32, 32))
    return model.eval()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers."""
    torch.set_num_threads(1)
    model, generator = network(), torch.Generator().manual_seed(1)
    x = torch.randn(options.images, 3, 32, 32, generator=generator)
    y = torch.randint(CLASSES, (options.images,), generator=generator)
    data = list(zip(x.split(options.batch), y.split(options.batch), strict=True))
    inputs = torch.randn(options.inputs, 3, 32, 32, generator=generator)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "chosen": options.size,
        "images": options.images,
        "inputs": options.inputs,
        "classes": CLASSES,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "memory_before_gb": peak_gigabytes(),
    }
    posterior = lp.Subnetwork(model, "classification", lp.LargestMagnitude(options.size))
    result["fit_seconds"] = cpu_seconds(lambda: posterior.fit(data))
    result["tune_seconds"] = cpu_seconds(lambda: posterior.fit_prior_precision("marginal_likelihood"))
    result["first_prediction_seconds"] = cpu_seconds(lambda: posterior.predictive(inputs))
    result["prediction_seconds"] = cpu_seconds(lambda: posterior.predictive(inputs))
    result["layers_touched"] = len(posterior.network.selected)
    result["prior_precision"] = float(posterior.prior_precision)
    result["peak_memory_gb"] = peak_gigabytes()
    return result


def table(result: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    rows = [
        ("parameters", f"{result['parameters']:,}"),
        ("chosen, by magnitude", f"{result['chosen']:,}, in {result['layers_touched']} parameters"),
        ("images", f"{result['images']} of 32×32, {result['classes']} classes"),
        ("fit", f"{result['fit_seconds']:.1f} s"),
        ("tune the prior precision", f"{result['tune_seconds']:.1f} s"),
        (f"predict {result['inputs']} inputs, the first time", f"{result['first_prediction_seconds']:.1f} s"),
        (f"predict {result['inputs']} inputs, again", f"{result['prediction_seconds']:.1f} s"),
        ("largest memory (at most 24 GB)", f"{result['peak_memory_gb']:.2f} GB"),
        ("of that before the fit", f"{result['memory_before_gb']:.2f} GB"),
    ]
    lines = ["# A subnetwork of a ResNet-18, full covariance, one CPU thread", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows), ""])


def main() -> None:
    """Measure, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", type=int, default=42_000)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=16)
    options = parser.parse_args()
    result = measure(options)
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    options.output.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
