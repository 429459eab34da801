"""A radiance field of three spheres, seen from one side: how well uncertainties order the errors of depth on the other.

    python benchmarks/fields/spheres.py --seeds 5 --output benchmarks/results/spatial-field-cpu.md

The scene is analytic, so that true depths are known. 12 cameras on an arc of 120° see it with 24 × 24 rays each; 6 more
look from the opposite side. A field (a network of 4 × 64 units on positional encodings) learns the 12 views. The error
of a pixel is that of its expected depth on the 6 others. Uncertainties are those of ``lp.SpatialField``, the standard
deviation of depths over 30 samples of a last layer (``lp.KFAC``, tuned by its evidence), and random numbers. Times are
CPU seconds on one thread. With ``--fields FOLDER`` trained fields are kept there, and taken from there.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp

BOX = [[-1.0] * 3, [1.0] * 3]
NEAR, FAR, PIXELS = 1.6, 4.4, 24
CENTRES = torch.tensor([[-0.4, 0.0, -0.25], [0.35, 0.3, 0.0], [0.1, -0.45, 0.2]])
RADII = torch.tensor([0.35, 0.3, 0.25])
COLOURS = torch.tensor([[0.9, 0.25, 0.2], [0.2, 0.75, 0.3], [0.25, 0.35, 0.95]])


def scene(x):
    """Density ``[...]`` and colour ``[..., 3]`` of three spheres with stripes, at points ``[..., 3]``."""
    inside = RADII - (x[..., None, :] - CENTRES).norm(dim=-1)  # [..., 3]
    share = torch.softmax(inside / 0.02, -1)
    stripes = 0.75 + 0.25 * torch.sin(14 * x.sum(-1, keepdim=True))
    return 60 * torch.sigmoid(inside / 0.015).amax(-1), share @ COLOURS * stripes


def camera(angle, height=0.5, distance=3.0):
    """Rays ``[576, 6]`` (origin and direction) of a pinhole camera that looks at the middle."""
    eye = torch.tensor([distance * math.cos(angle), distance * math.sin(angle), height])
    ahead = nn.functional.normalize(-eye, dim=0)
    right = nn.functional.normalize(torch.linalg.cross(ahead, torch.tensor([0.0, 0.0, 1.0])), dim=0)
    side = (torch.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    v, u = torch.meshgrid(-side, side, indexing="ij")
    steps = u[..., None] * right + v[..., None] * torch.linalg.cross(right, ahead)
    direction = nn.functional.normalize(ahead + math.tan(math.radians(20)) * steps, dim=-1).view(-1, 3)
    return torch.cat([eye.expand_as(direction), direction], -1)


def samples(rays, n=32):
    """Distances ``[n]`` and positions ``[R, n, 3]`` along rays."""
    t = NEAR + (torch.arange(n) + 0.5) / n * (FAR - NEAR)
    return t, rays[:, None, :3] + t[:, None] * rays[:, None, 3:]


def composite(density, t):
    """Weights ``[R, S]`` of the samples."""
    alpha = 1 - torch.exp(-density * (FAR - NEAR) / len(t))
    passed = torch.cumprod(1 - alpha + 1e-10, -1)
    return alpha * torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)


def depth_of(weights, t):
    """Expected depths ``[R]``; the background lies at the far end."""
    return (weights * t).sum(-1) + (1 - weights.sum(-1)) * FAR


def truth(rays):
    """Colours ``[R, 3]`` and depths ``[R]`` of the scene."""
    t, x = samples(rays, 256)
    density, colour = scene(x)
    weights = composite(density, t)
    return (weights[..., None] * colour).sum(1), depth_of(weights, t)


class Field(nn.Module):
    """A network from positions ``[..., 3]`` to a density and a colour, ``[..., 4]``."""

    def __init__(self, width=64, frequencies=6):
        super().__init__()
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(frequencies))
        sizes = [3 + 6 * frequencies, *[width] * 4]
        layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 4))

    def forward(self, x):
        """Density and colour."""
        waves = (x[..., None] * self.frequencies).flatten(-2)
        found = self.layers(torch.cat([x, waves.sin(), waves.cos()], -1))
        return torch.cat([20 * nn.functional.softplus(found[..., :1] - 2), found[..., 1:].sigmoid()], -1)


class Renderer(nn.Module):
    """The field as a function of rays; ``displace`` is what a spatial field needs."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def weights(self, rays, displace=lambda x: x):
        """Weights ``[R, S]`` of the samples, with their distances, positions and colours."""
        t, x = samples(rays)
        found = self.field(displace(x))
        return composite(found[..., 0], t), t, x, found[..., 1:]

    def forward(self, rays):
        """Colours ``[R, 3]``."""
        return self.colour(rays)

    def colour(self, rays, displace=lambda x: x):
        """Colours ``[R, 3]``."""
        weights, _, _, colour = self.weights(rays, displace)
        return (weights[..., None] * colour).sum(1)

    def depth(self, rays, displace=lambda x: x):
        """Depths ``[R, 1]``."""
        weights, t, _, _ = self.weights(rays, displace)
        return depth_of(weights, t)[:, None]


def train(rays, colours, seed, steps=2000, batch=256):
    """A field trained on all rays."""
    torch.manual_seed(seed)
    renderer = Renderer(Field())
    optimizer = torch.optim.Adam(renderer.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        some = torch.randint(len(rays), (batch,))
        optimizer.zero_grad()
        nn.functional.mse_loss(renderer(rays[some]), colours[some]).backward()
        optimizer.step()
        schedule.step()
    return renderer.eval()


def views():
    """Rays of the 12 views, and of the 6 from the other side."""
    angles = torch.linspace(-60, 60, 12).tolist(), torch.linspace(120, 240, 6).tolist()
    return [torch.cat([camera(math.radians(angle)) for angle in each]) for each in angles]


def trained(seed, folder):
    """A trained field, and its CPU seconds."""
    file = None if folder is None else Path(folder) / f"{seed}.pt"
    if file is not None and file.exists():
        renderer, stored = Renderer(Field()), torch.load(file)
        renderer.load_state_dict(stored["field"])
        return renderer.eval(), stored["seconds"]
    rays, _ = views()
    renderer, seconds = timed(lambda: train(rays, truth(rays)[0], seed))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"field": renderer.state_dict(), "seconds": seconds}, file)
    return renderer, seconds


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and its CPU seconds."""
    start = time.process_time()
    return function(), time.process_time() - start


def seen_and_unseen(weights, x, generator):
    """Points on the surfaces that the 12 views show, and on those sides of the spheres that look away from them."""
    opaque = weights.sum(1) > 0.9
    share = weights[opaque] / weights[opaque].sum(1, keepdim=True)
    normals = nn.functional.normalize(torch.randn(3, 2000, 3, generator=generator), dim=-1)
    surface = CENTRES[:, None] + RADII[:, None, None] * normals
    return (share[..., None] * x[opaque]).sum(1), surface[normals[..., 0] < -0.7]


def composited_variance(field, weights, x):
    """The standard deviation of a point drawn along the ray; the background has the smallest of all vertices."""
    least = field.render_uncertainty(torch.zeros_like(weights[:1]), x[:1])
    rest = (1 - weights.sum(-1)).clamp_min(0)
    return ((weights * field.std(x).square()).sum(-1) + rest * least.square()).sqrt()


def run(seed, folder):
    """All figures of one seed, by row and column."""
    generator = torch.Generator().manual_seed(seed)
    seen, new = views()
    (colours, _), (_, depths) = truth(seen), truth(new)
    renderer, training = trained(seed, folder)
    with torch.no_grad():
        noise = float((renderer(seen) - colours).square().mean().sqrt())
        (weights, _, x, _), (far, _, places, _) = renderer.weights(seen), renderer.weights(new)
        error = (renderer.depth(new)[:, 0] - depths).abs()
    front, back = seen_and_unseen(weights, x, generator)
    figures: dict[str, dict[str, float]] = {}
    print(f"seed {seed}: RMSE of colours {noise:.4f}, mean error of depth {error.mean():.4f}")  # noqa: T201
    network = {"RMSE of colours": noise, "error of depth": float(error.mean()), "training, s": training}
    data = list(zip(seen.split(512), colours.split(512), strict=True))
    options = {"box": BOX, "render": renderer.colour}

    def add(name, uncertainty, fit=0.0, query=0.0, **others):
        found = {"AUSE": float(lp.metrics.ause(uncertainty, error)), "fit, s": fit, "query, s": query, **others}
        figures[name] = found
        print(f"  {name:50}", {key: round(value, 4) for key, value in found.items()}, flush=True)  # noqa: T201

    for resolution, structure in ((32, "diagonal"), (32, "block"), (64, "diagonal")):
        field = lp.SpatialField(
            renderer.field, lp.Gaussian(noise), resolution=resolution, structure=structure, **options
        )
        _, fit = timed(lambda field=field: field.fit(data))
        view = lp.through(field, partial(renderer.depth, displace=field.field.displace))
        for prior in ("one cell", "the box"):
            if prior == "the box":
                field.prior_precision = 0.25
            ratio = {"unseen / seen": float(field.std(back).median() / field.std(front).median())}
            name = f"G = {resolution}, {structure}, prior {prior}"
            u, query = timed(lambda f=field: f.render_uncertainty(far, places))
            add(f"{name}: composited log", u, fit, query, **ratio)
            u, query = timed(lambda f=field: composited_variance(f, far, places))
            add(f"{name}: composited variance", u, fit, query, **ratio)
            u, query = timed(lambda view=view: view.functional_posterior(new).covariance[:, 0, 0])
            add(f"{name}: depth", u, fit, query, **ratio)

    kfac = lp.KFAC(renderer, lp.Gaussian(noise), parameters="last_layer")
    _, fit = timed(lambda: kfac.fit(data).fit_prior_precision("marginal_likelihood", tune_noise=False))
    view = lp.through(kfac, renderer.depth, "regression")
    own = {"method": "sampled", "n_samples": 30}
    u, query = timed(lambda: view.predictive(new, **own, generator=torch.Generator().manual_seed(seed)).epistemic)
    add("last layer, KFAC: depth", u[:, 0], fit, query)
    u, query = timed(lambda: view.functional_posterior(new).covariance[:, 0, 0])
    add("last layer, KFAC: depth, linearised", u, fit, query)
    chance = [lp.metrics.ause(torch.rand(len(error), generator=generator), error) for _ in range(20)]
    figures["random"] = {"AUSE": float(torch.stack(chance).mean())}
    print("  random", figures["random"])  # noqa: T201
    return network, figures


def page(runs) -> str:
    """The results as markdown."""
    columns = ("AUSE", "unseen / seen", "fit, s", "query, s")
    lines = [f"Python {platform.python_version()}, torch {torch.__version__}, {len(runs)} seeds, one thread.", ""]
    for name in runs[0][0]:
        values = torch.tensor([network[name] for network, _ in runs])
        lines.append(f"- {name}: {values.mean():.3g} ± {values.std():.2g}")
    lines += [
        "",
        "| uncertainty | AUSE, of each seed | mean | unseen / seen | fit, s | query, s |",
        "|---|---|---|---|---|---|",
    ]
    for name in runs[0][1]:
        found = {column: [figures[name].get(column) for _, figures in runs] for column in columns}
        each = ", ".join(f"{value:.3f}" for value in found["AUSE"])
        means = ["" if None in values else f"{sum(values) / len(values):.3g}" for values in found.values()]
        lines.append(f"| {name} | {each} | {' | '.join(means)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fields", help="a folder for trained fields")
    parser.add_argument("--output", help="a file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = page([run(seed, arguments.fields) for seed in range(arguments.seeds)])
    if arguments.output:
        Path(arguments.output).write_text(table)
    print(table)  # noqa: T201
