"""A flat room from few views: how well uncertainties of a radiance field order the errors of depth in new views.

    python benchmarks/fields/room.py --seeds 5 --folder FOLDER --page FILE

Three discs hide parts of a square room; two of its walls have patterns, two have none. Depths are exact. Nine cameras
along the front see it, with a line of pixels each. A field (a network of 3 × 64 units on positional encodings) learns
their rays. Six more cameras look from between these and from the sides, behind the discs. Fields and rows are kept in
the folder, and what is there is not computed again. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp

DISTORTION, EDGE, NEAR, FAR, PIXELS, SAMPLES = 1e-3, 1.1, 0.2, 2.9, 128, 64
BOX = [[-EDGE] * 2, [EDGE] * 2]
CENTRES, RADII = torch.tensor([[-0.4, -0.05], [0.35, -0.2], [0.05, 0.45]]), torch.tensor([0.25, 0.18, 0.2])
COLOURS = torch.tensor([[0.9, 0.3, 0.2], [0.2, 0.75, 0.3], [0.25, 0.35, 0.9]])
PLAIN = torch.tensor([0.55, 0.6, 0.7])
SEEN = [(x, -0.9) for x in (-0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8)]
NEW = [(-0.45, -0.9), (0.45, -0.9), (-0.9, -0.4), (0.9, -0.4), (-0.9, 0.2), (0.9, 0.2)]


def camera(eye):
    """Rays ``[PIXELS, 4]`` (origin and direction) of a pinhole camera that looks at the room's middle."""
    eye = torch.tensor(eye)
    ahead = nn.functional.normalize(torch.tensor([0.0, 0.2]) - eye, dim=0)
    right = torch.stack([ahead[1], -ahead[0]])
    side = (torch.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    direction = nn.functional.normalize(ahead + math.tan(math.radians(35)) * side[:, None] * right, dim=-1)
    return torch.cat([eye.expand_as(direction), direction], -1)


def truth(rays):
    """Colours ``[R, 3]`` and depths ``[R]`` of the first surface that each ray meets."""
    origin, direction = rays[:, :2], rays[:, 2:]
    wall, axis = ((direction.sign() - origin) / direction).min(-1)
    along = (origin + wall[:, None] * direction).sum(-1, keepdim=True)
    waves = 0.5 + 0.25 * (torch.sin(torch.tensor([7.0, 9.0, 11.0]) * along) + torch.sin(4 * along))
    colour = torch.where(axis[:, None] == 1, waves, PLAIN)
    away = origin[:, None] - CENTRES
    b = (away * direction[:, None]).sum(-1)
    inside = b.square() - away.square().sum(-1) + RADII.square()
    disc, which = torch.where(inside > 0, -b - inside.clamp_min(0).sqrt(), torch.inf).min(-1)
    hit = origin + disc.clamp_max(9)[:, None] * direction
    stripes = 0.75 + 0.25 * torch.sin(14 * hit.sum(-1, keepdim=True))
    near = disc < wall
    return torch.where(near[:, None], COLOURS[which] * stripes, colour), torch.where(near, disc, wall)


class Field(nn.Module):
    """From positions ``[..., 2]`` to a density and a colour, ``[..., 4]``."""

    def __init__(self, width=64, frequencies=5):
        super().__init__()
        self.register_buffer("frequencies", math.pi / 2 * 2.0 ** torch.arange(frequencies))
        sizes = [2 + 4 * frequencies, *[width] * 3]
        layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 4))

    def forward(self, x):
        """Density and colour."""
        waves = (x[..., None] * self.frequencies).flatten(-2)
        found = self.layers(torch.cat([x, waves.sin(), waves.cos()], -1))
        return torch.cat([20 * nn.functional.softplus(found[..., :1] - 3), found[..., 1:].sigmoid()], -1)


def composite(density, gaps):
    """Weights ``[R, S]`` of samples."""
    alpha = 1 - torch.exp(-density * gaps)
    passed = torch.cumprod(1 - alpha + 1e-10, -1)
    return alpha * torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], -1)


class Renderer(nn.Module):
    """The field as a function of rays."""

    def __init__(self):
        super().__init__()
        self.field = Field()

    def weights(self, rays, displace=lambda x: x, jitter=0.5):
        """Weights ``[R, S]`` of the samples, with their distances, positions and colours."""
        gap = (FAR - NEAR) / SAMPLES
        t = NEAR + (torch.arange(SAMPLES) + jitter) * gap
        t = t.expand(len(rays), -1)
        x = rays[:, None, :2] + t[..., None] * rays[:, None, 2:]
        found = self.field(displace(x))
        return composite(found[..., 0], gap), t, x, found[..., 1:]

    def forward(self, rays, displace=lambda x: x, jitter=0.5):
        """Colours ``[R, 3]``."""
        weights, _, _, colour = self.weights(rays, displace, jitter)
        return (weights[..., None] * colour).sum(1)

    def depth(self, rays, displace=lambda x: x):
        """Depths ``[R, 1]``."""
        weights, t, _, _ = self.weights(rays, displace)
        return ((weights * t).sum(-1) + (1 - weights.sum(-1)) * FAR)[:, None]


def trained(seed, folder, steps, batch=128):
    """A trained field, and its CPU seconds."""
    file, renderer = folder / f"{seed}.pt", Renderer()
    if not file.exists():
        torch.manual_seed(seed)
        start, renderer = time.process_time(), Renderer()
        rays = torch.cat([camera(eye) for eye in SEEN])
        colours = truth(rays)[0]
        optimizer = torch.optim.Adam(renderer.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(rays), (batch,))
            optimizer.zero_grad()
            weights, t, _, colour = renderer.weights(rays[some], jitter=torch.rand(batch, SAMPLES))
            loss = nn.functional.mse_loss((weights[..., None] * colour).sum(1), colours[some])
            apart = (t[:, :, None] - t[:, None]).abs()  # weights of a ray belong together, as in Barron et al. (2022)
            spread = (weights[:, :, None] * weights[:, None] * apart).sum((1, 2)).mean()
            (loss + DISTORTION * spread).backward()
            optimizer.step()
            schedule.step()
        torch.save({"field": renderer.state_dict(), "seconds": time.process_time() - start}, file)
    stored = torch.load(file)
    renderer.load_state_dict(stored["field"])
    return renderer.eval(), stored["seconds"]


def views_that_see(renderer, rays):
    """For each ray's surface ``[R]``, the transmittances from the cameras, summed where their pictures have it."""
    surface = rays[:, :2] + renderer.depth(rays) * rays[:, 2:]
    total = torch.zeros(len(rays))
    for eye in SEEN:
        own = camera(eye)
        to = surface - own[0, :2]
        distance, middle = to.norm(dim=-1), nn.functional.normalize(own[:, 2:].mean(0), dim=0)
        direction = to / distance[:, None]
        corner = (own[:, 2:] @ middle).min()
        weights, t, _, _ = renderer.weights(torch.cat([own[:1, :2].expand_as(direction), direction], -1))
        before = (weights * (t < distance[:, None] - 0.1)).sum(-1)  # a hand's breadth before the surface
        total += (1 - before) * (direction @ middle >= corner)
    return total


def run(seed, options):
    """All figures of one seed: of the network, and of each row."""
    fields = [trained((seed + more) % options.seeds, options.folder, options.steps) for more in range(3)]
    renderer, training = fields[0]
    seen, new = (torch.cat([camera(eye) for eye in eyes]) for eyes in (SEEN, NEW))
    (colours, near), (_, depths) = truth(seen), truth(new)
    with torch.no_grad():
        noise = float((renderer(seen) - colours).square().mean().sqrt())
        weights, t, x, _ = renderer.weights(new)
        found = renderer.depth(new)
        error = (found[:, 0] - depths).abs()
        at_seen = float((renderer.depth(seen)[:, 0] - near).abs().mean())
        network = {
            "root mean squared error of colours": noise,
            "mean error of depth, views that it learnt": at_seen,
            "mean error of depth, new views": float(error.mean()),
            "training, s": training,
        }
        simple = {
            "ensemble of 3 fields: standard deviation of depth": torch.cat(
                [own.depth(new) for own, _ in fields], 1
            ).std(1),
            "views that see the surface, fewest first": -views_that_see(renderer, new),
            "spread of the ray's weights": (weights * (t - found).square()).sum(-1),
            "the depth itself, farthest first": found[:, 0],
        }
    print(seed, network, flush=True)  # noqa: T201
    rows = {}

    def add(name, uncertainty, seconds):
        rows[name] = {"AUSE": float(lp.metrics.ause(uncertainty, error)), "seconds": seconds}
        print(f"{name:75} {rows[name]['AUSE']:.4f} {seconds:.1f}", flush=True)  # noqa: T201

    data = list(zip(seen.split(512), colours.split(512), strict=True))
    for resolution in options.resolutions:
        for structure in ("diagonal", "block"):
            start = time.process_time()
            kinds = {"box": BOX, "resolution": resolution, "structure": structure, "render": renderer}
            field = lp.SpatialField(renderer.field, lp.Gaussian(noise), **kinds).fit(data)
            view = lp.through(field, partial(renderer.depth, displace=field.field.displace))
            theirs = 1e-4 / resolution**2 * len(seen) / noise**2  # of H/R + λ, in terms of H/σ² + prior precision
            for scale, precision in (("one cell", float(field.prior_precision)), ("their λ", theirs)):
                field.prior_precision = precision
                name = f"G = {resolution}, {structure}, prior {scale}"
                add(f"{name}: composited", field.render_uncertainty(weights, x), time.process_time() - start)
                u = torch.cat([view.functional_posterior(some).covariance[:, 0, 0] for some in new.split(1024)])
                add(f"{name}: depth", u, time.process_time() - start)
    start = time.process_time()
    kfac = lp.KFAC(renderer, lp.Gaussian(noise), parameters="last_layer").fit(data)
    view = lp.through(kfac.fit_prior_precision("marginal_likelihood", tune_noise=False), renderer.depth, "regression")
    add("last layer, KFAC: depth", view.functional_posterior(new).covariance[:, 0, 0], time.process_time() - start)
    for name, uncertainty in simple.items():
        add(name, uncertainty, 2 * training if "ensemble" in name else 0.0)
    generator = torch.Generator().manual_seed(seed)
    chance = [float(lp.metrics.ause(torch.rand(len(error), generator=generator), error)) for _ in range(20)]
    rows["random"] = {"AUSE": statistics.fmean(chance), "seconds": 0.0}
    return {"network": network, "rows": rows}


def page(runs):
    """The results as markdown."""
    mean, lines = (
        statistics.fmean,
        [f"Python {platform.python_version()}, torch {torch.__version__}, {len(runs)} seeds.", ""],
    )

    def error(values):
        return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan

    for name in runs[0]["network"]:
        values = [own["network"][name] for own in runs]
        lines.append(f"- {name}: {mean(values):.3g} ± {error(values):.2g}")
    lines += ["", "| uncertainty | AUSE, of each seed | mean | minus the last layer's | s |", "|---|---|---|---|---|"]
    reference = [own["rows"]["last layer, KFAC: depth"]["AUSE"] for own in runs]
    for name in runs[0]["rows"]:
        found = [own["rows"][name]["AUSE"] for own in runs]
        gaps = [a - b for a, b in zip(found, reference, strict=True)]
        each, seconds = ", ".join(f"{value:.3f}" for value in found), mean(own["rows"][name]["seconds"] for own in runs)
        lines.append(f"| {name} | {each} | {mean(found):.3f} | {mean(gaps):+.3f} ± {error(gaps):.3f} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    every = []
    for number in range(arguments.seeds):
        rows_file = arguments.folder / f"{number}.json"
        if not rows_file.exists():
            rows_file.write_text(json.dumps(run(number, arguments)))
        every.append(json.loads(rows_file.read_text()))
        if arguments.page:
            arguments.page.write_text(page(every))
    print(page(every))  # noqa: T201
