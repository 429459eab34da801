"""Kernel samples of a vision transformer of 28 million weights: memory, and time beside plain Jacobian products.

Run as ``python benchmarks/geometry/null_space_vit.py --output PREFIX``, which writes ``PREFIX.json`` and
``PREFIX.md``. The network is timm's VisionTransformer on 64×64 images with 1000 classes; images and weights are random
numbers, which changes nothing of what is measured: CPU time on one thread and the process's largest memory. An
iteration of LSMR takes one product with the rows' Jacobian and one with its transpose; the same two are timed by
``torch.func`` alone, and by the package's operator alone, in the same process. Iterations are few on purpose. At the
end, processes of their own fit networks with 10, 1000 and 10 000 classes to fewer images, for the memory that outputs
take.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import cpu_seconds, peak_gigabytes
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import laplace_plus as lp
from laplace_plus.errors import ConvergenceWarning
from laplace_plus.likelihoods import Categorical
from laplace_plus.network.network import Network
from laplace_plus.posteriors.projection import NullSpaceRows

Batches = list[tuple[Tensor, Tensor]]


class Watched:
    """Batches that remember the CPU time at which each pass over them started."""

    def __init__(self, batches: Batches):
        self.batches, self.starts = batches, list[float]()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.starts.append(time.process_time())
        return iter(self.batches)


def network(width: int, depth: int, classes: int) -> nn.Module:
    """A vision transformer with random weights, on 16 patches of 16×16 pixels."""
    torch.manual_seed(0)
    heads = max(1, width // 72)
    model = VisionTransformer(
        img_size=64, patch_size=16, embed_dim=width, depth=depth, num_heads=heads, num_classes=classes
    )
    return model.eval()


def images(count: int, size: int, classes: int) -> Batches:
    """Batches of ``size`` images with labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 64, 64, generator=generator)
    y = torch.randint(classes, (count,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


class PlainRows:
    """Products with the Jacobian of each example's loss or outputs, by ``torch.func`` alone."""

    def __init__(self, model: nn.Module, batches: Batches, rows: str):
        self.model, self.batches, self.rows = model, batches, rows
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        self.sizes = [p.numel() for p in self.parameters.values()]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector's parts in the parameters' shapes."""
        parts = vector.split(self.sizes)
        return {name: part.view_as(p) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def function(self, x: Tensor, y: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        """What is differentiated, on one batch."""

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            found = functional_call(self.model, parameters, (x,))
            return nn.functional.cross_entropy(found, y, reduction="none") if self.rows == "loss" else found

        return outputs

    def push(self, vector: Tensor) -> Tensor:
        """``J v``."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward derivative
            products = [jvp(self.function(x, y), (self.parameters,), (self.named(vector),))[1] for x, y in self.batches]
        return torch.cat(products).flatten()

    def pull(self, vector: Tensor) -> Tensor:
        """``Jᵀ u``."""
        total, first = torch.zeros(sum(self.sizes)), 0
        for x, y in self.batches:
            outputs, pullback = vjp(self.function(x, y), self.parameters)
            (gradient,) = pullback(vector[first : first + outputs.numel()].view_as(outputs))
            total += torch.cat([gradient[name].flatten() for name in self.parameters])
            first += outputs.numel()
        return total


def pairs(model: nn.Module, batches: Batches, options: argparse.Namespace) -> dict[str, Any]:
    """One product in each direction: the package's operator beside torch alone, in turn."""
    likelihood = Categorical()
    wrapped = Network(model, "all", likelihood.arrange)
    plain = PlainRows(model, batches, options.rows)
    own = NullSpaceRows(wrapped, likelihood, batches, options.rows).whole
    generator = torch.Generator().manual_seed(2)
    v, u = torch.randn(own.shape[1], generator=generator), torch.randn(own.shape[0], generator=generator)
    expected, pushed, pulled = plain.push(v), own(v), own.T(u)
    scale = pushed / expected if options.rows == "loss" else torch.ones(())  # rows of losses have unit length
    rounds = []
    for _ in range(options.rounds):
        times = {"plain": cpu_seconds(lambda: plain.push(v)) + cpu_seconds(lambda: plain.pull(u))}
        times["own"] = cpu_seconds(lambda: own(v)) + cpu_seconds(lambda: own.T(u))
        rounds.append(times)
    return {
        "rows": own.shape[0],
        "difference": float((plain.pull(scale * u) - pulled).norm() / pulled.norm()),
        "plain_pair_seconds": statistics.median(times["plain"] for times in rounds),
        "own_pair_seconds": statistics.median(times["own"] for times in rounds),
        "rounds": rounds,
        "memory_after_pairs_gb": peak_gigabytes(),
    }


def sample(model: nn.Module, batches: Batches, options: argparse.Namespace) -> dict[str, Any]:
    """Draw and project, and read each iteration's time off the starts of its two passes over the data."""
    watched = Watched(batches)
    projector = lp.linalg.LSMRProjection(max_iterations=options.iterations, refinements=0)
    posterior = lp.NullSpace(model, "classification", rows=options.rows, projector=projector, n_samples=options.samples)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        posterior.fit(watched, generator=torch.Generator().manual_seed(3))
    total, count = time.process_time() - start, int(posterior.report.iterations.max())
    ends = watched.starts[-1 - 2 * count :]  # A v comes before the first iteration, Aᵀ z after the last one
    return {
        "parameters": posterior.n_parameters,
        "iterations": count,
        "passes": len(watched.starts),
        "iteration_seconds": [after - before for before, after in zip(ends[:-2:2], ends[2::2], strict=True)],
        "fit_seconds": total,
        "setup_seconds": watched.starts[-2 - 2 * count] - start,
        "residual": float(posterior.report.residual.max()),
        "peak_memory_gb": peak_gigabytes(),
    }


def other_outputs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The largest memory for several numbers of classes, each in a process of its own."""
    found = []
    for classes in options.other_classes:
        command = [sys.executable, __file__, "--memory-only", "--classes", str(classes), "--iterations", "2"]
        command += ["--images", str(options.other_images), "--rows", options.rows, "--batch", str(options.batch)]
        command += ["--width", str(options.width), "--depth", str(options.depth)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(answer.stdout))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers."""
    model = network(options.width, options.depth, options.classes)
    batches = images(options.images, options.batch, options.classes)
    if options.memory_only:
        return {"classes": options.classes, "images": options.images, **sample(model, batches, options)}
    result: dict[str, Any] = {
        "images": options.images,
        "batch": options.batch,
        "classes": options.classes,
        "kind_of_rows": options.rows,
        "samples": options.samples,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    result |= pairs(model, batches, options)
    result |= sample(model, batches, options)
    iteration = statistics.median(result["iteration_seconds"])
    result["ratio_to_plain_pair"] = iteration / result["plain_pair_seconds"]
    result["ratio_to_own_pair"] = iteration / result["own_pair_seconds"]
    result["other_outputs"] = other_outputs(options)
    return result


def table(result: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    iteration = statistics.median(result["iteration_seconds"])
    rows = [
        ("parameters P", f"{result['parameters']:,}"),
        ("images", f"{result['images']} of 64×64, batches of {result['batch']}"),
        ("rows", f"{result['rows']:,}, kind {result['kind_of_rows']}"),
        ("CPU time of an iteration of LSMR (median)", f"{iteration:.1f} s"),
        ("of a pair J v, Jᵀ u by torch.func alone", f"{result['plain_pair_seconds']:.1f} s"),
        ("of the same pair by the package's operator", f"{result['own_pair_seconds']:.1f} s"),
        ("iteration / pair by torch.func (at most 1.3)", f"{result['ratio_to_plain_pair']:.2f}"),
        ("difference of the two results", f"{result['difference']:.1e}"),
        (
            f"before the first product (checks{', lengths of the rows' if result['kind_of_rows'] == 'loss' else ''})",
            f"{result['setup_seconds']:.1f} s",
        ),
        (f"whole fit, {result['samples']} sample, {result['iterations']} iterations", f"{result['fit_seconds']:.0f} s"),
        ("residual after these", f"{result['residual']:.1e}"),
        ("largest memory (at most 12 GB)", f"{result['peak_memory_gb']:.2f} GB"),
    ]
    lines = ["# A kernel sample of a vision transformer, one CPU thread", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", "Memory by the number of outputs, each in a process of its own:", ""]
    lines += ["| classes | images | parameters | largest memory |", "|---|---|---|---|"]
    lines += [
        f"| {row['classes']:,} | {row['images']} | {row['parameters']:,} | {row['peak_memory_gb']:.2f} GB |"
        for row in result["other_outputs"]
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--rows", choices=("loss", "logit", "ggn"), default="loss")
    parser.add_argument("--width", type=int, default=432)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other-classes", type=int, nargs="*", default=(10, 1000, 10_000))
    parser.add_argument("--other-images", type=int, default=64)
    parser.add_argument("--memory-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    if options.output is None:
        sys.stdout.write(json.dumps(result))
        return
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    options.output.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
