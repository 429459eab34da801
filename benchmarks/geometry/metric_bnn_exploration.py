"""Exploration of MetricBNN: particles together beside one after the other, and a fit beside the exponential map's.

Run as ``python benchmarks/geometry/metric_bnn_exploration.py --data FOLDER --output PREFIX``, which writes
``PREFIX.json`` and ``PREFIX.md``. ``FOLDER`` holds ``NAME/data.npz`` with ``x``, ``y`` and ``split`` (0 where a row is
for training). The network has two hidden layers of 32 ReLU units. Times are CPU seconds on one thread, ratios within
one process.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import laplace_plus as lp
from laplace_plus.errors import SmoothnessWarning
from laplace_plus.geometry import LossLandscape
from laplace_plus.geometry.landscape import gradients
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.posteriors.metric_bnn.metric_bnn import Walk, draw_directions, explore

DECAY = 0.01
FEW = 10
"""Steps of drift that the loops take; the whole exploration has five times as many."""


def training_part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Standardised inputs and labels of the first split."""
    with np.load(folder / name / "data.npz", allow_pickle=False) as file:
        chosen = file["split"][0] == 0
        x, y = file["x"][chosen].astype(np.float64), file["y"][chosen]
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0)
    return torch.from_numpy(x).float(), torch.from_numpy(y.astype(np.int64))


def trained(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """The network after Adam with batches of 32."""
    torch.manual_seed(0)
    outputs = int(y.max()) + 1
    net = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=DECAY)
    for _ in range(epochs):
        for some in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
    return net


def together(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> tuple[Tensor, str]:
    """All particles, as the package moves them."""
    landscape = LossLandscape(net, "classification", [(x, y)], prior_precision=DECAY * len(x))
    directions = draw_directions(walk.n_particles, landscape.vector, 0)
    with exact_arithmetic(landscape.network):  # as in a fit
        deviations, _ = explore(landscape, directions, walk)
    return deviations[:, -1], landscape.first_order.way


class OneByOne(LossLandscape):
    """Plain backward passes, point by point."""

    def gradient(self, points: Tensor) -> Tensor:
        """The sum of the prior's part and those of the batches."""
        parts = [gradients(partial(self._batch_loss, batch), points) for batch in self._batches()]
        return self.prior_gradient(points) + sum(parts)


def by_package(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    """One particle after the other, with the package's own gradient of one point."""
    landscape = OneByOne(net, "classification", [(x, y)], prior_precision=DECAY * len(x))
    directions = draw_directions(walk.n_particles, landscape.vector, 0)
    with exact_arithmetic(landscape.network):
        return explore(landscape, directions, walk)[0][:, -1]


def by_functional_calls(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    """One particle after the other, each gradient by a functional call of the network."""
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    start = nn.utils.parameters_to_vector(net.parameters()).detach()

    def loss(point: Tensor) -> Tensor:
        pieces = point.split([shape.numel() for shape in shapes.values()])
        own = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        fit = nn.functional.cross_entropy(functional_call(net, own, (x,)), y)
        return fit + DECAY / 2 * point.square().sum()

    ends = []
    for direction in draw_directions(walk.n_particles, start, 0):
        point = start.clone()
        for _ in range(walk.n_steps):
            point = point + walk.step_size * direction
            for _ in range(walk.n_refinements):
                point = point - walk.learning_rate * torch.func.grad(loss)(point)
        ends.append(point - start)
    return torch.stack(ends)


def by_optimizer(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    """One particle after the other, each a copy of the network that SGD moves in place: the leanest loop."""
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    ends = []
    for direction in draw_directions(walk.n_particles, start, 0):
        moving = copy.deepcopy(net)
        parameters = list(moving.parameters())
        pieces = direction.split([parameter.numel() for parameter in parameters])
        steps = [walk.step_size * piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        optimizer = torch.optim.SGD(parameters, lr=float(walk.learning_rate), weight_decay=DECAY)
        for _ in range(walk.n_steps):
            with torch.no_grad():
                for parameter, step in zip(parameters, steps, strict=True):
                    parameter += step
            for _ in range(walk.n_refinements):
                optimizer.zero_grad()
                nn.functional.cross_entropy(moving(x), y).backward()
                optimizer.step()
        ends.append(nn.utils.parameters_to_vector(parameters).detach() - start)
    return torch.stack(ends)


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def limit(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> float:
    """Seconds that an exploration's matrix products would take at the rate of a large one."""
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(net(x), y).backward()
    square = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / min(seconds(lambda: square @ square) for _ in range(10))
    return walk.n_particles * walk.n_steps * walk.n_refinements * counter.get_total_flops() / rate


def measure(name: str, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one data set."""
    net = trained(x, y, options.epochs)
    few, whole = Walk(n_steps=FEW), Walk(n_steps=5 * FEW)
    ways: dict[str, Callable[[], Any]] = {
        "together": lambda: together(net, x, y, whole),
        "package": lambda: by_package(net, x, y, few),
        "functional": lambda: by_functional_calls(net, x, y, few),
        "optimizer": lambda: by_optimizer(net, x, y, few),
    }
    for call in ways.values():  # the first calls import and allocate
        call()
    rounds = [{way: seconds(call) for way, call in ways.items()} for _ in range(options.rounds)]
    least = {way: min(one[way] for one in rounds) for way in ways}
    result: dict[str, Any] = {
        "set": name,
        "examples": len(x),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "way": together(net, x, y, whole)[1],
        "together_seconds": least["together"],
        "limit_seconds": limit(net, x, y, whole),
        "package_seconds": 5 * least["package"],
        "functional_seconds": 5 * least["functional"],
        "optimizer_seconds": 5 * least["optimizer"],
        "difference_float32": difference(net, x, y, few),
        "difference_float64": difference(copy.deepcopy(net).double(), x.double(), y, few),
    }
    data, source = [(x, y)], torch.Generator()
    latent = lp.MetricBNN(net, "classification", weight_decay=DECAY)
    explored = lp.MetricBNN(net, "classification", weight_decay=DECAY, sampling="exploration")
    geodesics = lp.Riemannian(net, "classification", prior_precision=DECAY * len(x))
    result["metric_bnn_fit_seconds"] = seconds(lambda: latent.fit(data, generator=source.manual_seed(0)))
    result["exploration_fit_seconds"] = seconds(lambda: explored.fit(data, generator=source.manual_seed(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmoothnessWarning)  # of the ReLU
        result["exponential_map_seconds"] = seconds(lambda: geodesics.fit(data, generator=source.manual_seed(0)).draw())
    result["exponential_map_samples"] = len(geodesics.samples)
    result["autoencoder_epochs"] = len(latent.latent_report.history)
    result["unexplained"] = latent.latent_report.unexplained
    return result


def difference(net: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> float:
    """The largest entry by which particles together end elsewhere than one after the other."""
    return float((together(net, x, y, walk)[0] - by_functional_calls(net, x, y, walk)).abs().max())


def table(results: list[dict[str, Any]]) -> str:
    """The numbers as Markdown."""
    lines = [
        "# MetricBNN's exploration, one CPU thread",
        "",
        "CPU seconds of an exploration by 10 particles, 50 steps of drift and 10 refinements each, on a network of two",
        "hidden layers of 32 ReLU units; in brackets, how many times as long as all particles together. The loops move",
        "one particle after the other: with the package's own gradient of any network at one point, with that of a",
        "functional call of this network, and as a copy of the network that SGD moves in place, the leanest there is.",
        "What is done once, the largest curvature and the recording of a gradient, counts. The limit is the time that",
        "the matrix products of all gradients would take at the rate of one of 1024 rows and columns.",
        "",
        "| set | examples | weights | limit | together | package, one by one | functional calls | SGD in place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        loops = [
            f"{r[f'{way}_seconds']:.1f} ({r[f'{way}_seconds'] / r['together_seconds']:.1f})"
            for way in ("package", "functional", "optimizer")
        ]
        times = (f"{r['limit_seconds']:.2f}", f"{r['together_seconds']:.2f}")
        own = (r["set"], r["examples"], f"{r['parameters']:,}", *times)
        lines.append(f"| {' | '.join(map(str, (*own, *loops)))} |")
    lines += [
        "",
        "Largest difference of the particles' ends after 10 steps from those of the functional calls. In float32",
        "rounding may grow where a ReLU switches; in float64 it does not get that far.",
        "",
        "| set | float32 | float64 |",
        "|---|---|---|",
    ]
    for r in results:
        lines.append(f"| {r['set']} | {r['difference_float32']:.0e} | {r['difference_float64']:.0e} |")
    lines += [
        "",
        "CPU seconds of whole fits with default options: MetricBNN with its autoencoder and without, and",
        "`lp.Riemannian` with its 50 samples drawn by the exponential map at the same prior.",
        "",
        "| set | MetricBNN | exploration alone | exponential map | autoencoder's epochs | unexplained by it |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['set']} | {r['metric_bnn_fit_seconds']:.1f} | {r['exploration_fit_seconds']:.1f} "
            f"| {r['exponential_map_seconds']:.1f} | {r['autoencoder_epochs']} | {r['unexplained']:.1e} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["glass", "ionosphere", "australian"])
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(name, *training_part(options.data, name), options) for name in options.sets]
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
