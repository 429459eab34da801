"""One step of sample-then-optimise on a ResNet-18: memory, time, and time beside the products that it consists of.

Run as ``python benchmarks/evidence/sampled_resnet18.py --output PREFIX``, which writes ``PREFIX.json`` and
``PREFIX.md``. Images are random numbers, or CIFAR-100's from ``--data FOLDER`` (that with ``cifar-100-python`` in it);
weights are random. Neither changes what is measured: CPU time on one thread, and the process's largest memory.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

import laplace_plus as lp
from laplace_plus.errors import ConvergenceWarning
from laplace_plus.likelihoods import Categorical
from laplace_plus.network.network import Network
from laplace_plus.posteriors.sampled.systems import TangentCurvature

CLASSES = 100


def is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Everything but the scales and shifts of normalisations."""
    return parameter.ndim > 1 or name.startswith("fc.")


def network() -> nn.Module:
    """A ResNet-18 with statistics of batch normalisation that fit its weights, in evaluation mode."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.train()
    with torch.no_grad():
        for _ in range(10):
            model(torch.randn(64, 3, 32, 32))
    return model.eval()


def images(folder: Path | None, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of ``size`` images with labels."""
    if folder is None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(count, 3, 32, 32, generator=generator)
        y = torch.randint(CLASSES, (count,), generator=generator)
    else:
        with open(folder / "cifar-100-python" / "train", "rb") as file:
            content: Any = pickle.load(file, encoding="bytes")
        x = torch.from_numpy(content[b"data"][:count]).view(-1, 3, 32, 32).float() / 255
        x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
        y = torch.tensor(content[b"fine_labels"][:count])
    return list(zip(x.split(size), y.split(size), strict=True))


def products(model: nn.Module, batches: list[tuple[Tensor, Tensor]], vectors: Tensor) -> Tensor:
    """The products that a pass consists of, by torch alone: ``Jᵀ Λ J v`` of all vectors, batch by batch."""
    chosen = [(name, p.detach()) for name, p in model.named_parameters() if is_weight(name, p)]
    sizes = [p.numel() for _, p in chosen]

    def named(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split(sizes)
        return {name: part.view_as(p) for (name, p), part in zip(chosen, parts, strict=True)}

    point = torch.cat([p.flatten() for _, p in chosen])
    total = torch.zeros_like(vectors)
    for x, _ in batches:
        leaf = point.clone().requires_grad_()
        outputs = functional_call(model, named(leaf), (x,))
        p = outputs.detach().softmax(-1)

        def outputs_of(vector: Tensor, x: Tensor = x) -> Tensor:
            return functional_call(model, named(vector), (x,))

        def tangent(vector: Tensor, f: Callable[[Tensor], Tensor] = outputs_of) -> Tensor:
            return jvp(f, (point,), (vector,))[1]

        pushed = vmap(tangent)(vectors)
        cotangents = p * (pushed - (p * pushed).sum(-1, keepdim=True))
        for row, cotangent in zip(total, cotangents, strict=True):
            row += torch.autograd.grad(outputs, leaf, cotangent, retain_graph=True)[0]
    return total


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def peak_gigabytes() -> float:
    """The largest memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> dict[str, Any]:
    """Passes over the data, and the products that they consist of, in turn."""
    wrapped = Network(model, is_weight, Categorical().arrange)
    curvature = TangentCurvature(wrapped, Categorical(), batches)
    vectors = torch.randn(options.samples, wrapped.n_parameters, generator=torch.Generator().manual_seed(2))
    ours, theirs = curvature(vectors), products(model, batches, vectors)
    rounds = [
        (cpu_seconds(lambda: curvature(vectors)), cpu_seconds(lambda: products(model, batches, vectors)))
        for _ in range(options.rounds)
    ]
    own, plain = (min(column) for column in zip(*rounds, strict=True))
    return {
        "difference": float((ours - theirs).norm() / theirs.norm()),
        "pass_seconds": own,
        "products_seconds": plain,
        "ratio": statistics.median(a / b for a, b in rounds),
        "rounds": rounds,
        "memory_before_step_gb": peak_gigabytes(),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers."""
    torch.set_num_threads(1)
    model, batches = network(), images(options.data, options.images, options.batch)
    solver = lp.CGSolver(max_iterations=options.iterations)
    posterior = lp.SampledLaplace(
        model,
        "classification",
        parameters=is_weight,
        prior_precision=options.precision,
        n_samples=options.samples,
        solver=solver,
    )
    result: dict[str, Any] = {
        "parameters": posterior.n_parameters,
        "images": options.images,
        "batch": options.batch,
        "samples": options.samples,
        "iterations": options.iterations,
        "data": "random" if options.data is None else "CIFAR-100",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result |= passes(model, batches, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # iterations are few on purpose
        result["fit_seconds"] = cpu_seconds(lambda: posterior.fit(batches, generator=torch.Generator().manual_seed(3)))
        result["em_step_seconds"] = cpu_seconds(
            lambda: posterior.fit_prior_precision(max_steps=1, optimum_tolerance=options.optimum_tolerance)
        )
    report, step = posterior.report, posterior.tuning.steps[0]
    result |= {
        "peak_memory_gb": peak_gigabytes(),
        "residual": float(report.residual.max()),
        "energy": report.energy[0],
        "effective_dimension": float(step.effective_dimension[0]),
        "effective_dimension_sem": float(step.sem[0]) if options.samples > 1 else None,
        "prior_precision": float(posterior.prior_precision),
    }
    return result


def table(result: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    sem = result["effective_dimension_sem"]
    rows = [
        ("parameters", f"{result['parameters']:,}"),
        ("images", f"{result['images']} ({result['data']}), batches of {result['batch']}"),
        ("samples", str(result["samples"])),
        ("CPU time of a pass", f"{result['pass_seconds']:.2f} s"),
        ("CPU time of its products alone", f"{result['products_seconds']:.2f} s"),
        ("ratio (median of rounds; at most 1.5)", f"{result['ratio']:.2f}"),
        ("difference of the two results", f"{result['difference']:.1e}"),
        (f"fit ({result['iterations']} iterations)", f"{result['fit_seconds']:.1f} s"),
        ("step of the prior's tuning", f"{result['em_step_seconds']:.1f} s"),
        ("largest memory (at most 12 GB)", f"{result['peak_memory_gb']:.2f} GB"),
        ("largest relative residual", f"{result['residual']:.1e}"),
        ("E[zᵀ H z] / P", f"{result['energy']:.4f}"),
        ("effective dimension", f"{result['effective_dimension']:.1f}" + ("" if sem is None else f" ± {sem:.1f}")),
    ]
    lines = ["# SampledLaplace on a ResNet-18, one CPU thread", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows), ""])


def main() -> None:
    """Measure, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", type=float, default=100.0)
    parser.add_argument("--optimum-tolerance", type=float, default=1e-2)
    options = parser.parse_args()
    result = measure(options)
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    options.output.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
