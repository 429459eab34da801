"""A room from four views: how well uncertainties of a radiance field order the errors of depth in new views.

    python benchmarks/fields/room.py --seeds 5 --folder FOLDER --page benchmarks/results/spatial-field-room-cpu.md

Three balls hide parts of a room; its floor and its back have patterns, its other walls none. Depths are exact. Four
cameras side by side see it. A field of dense grids (16³, 32³, 48³ cells of two features) and a small network learns
their rays. Six more cameras, between these, above, and below, look behind the balls. Fields and rows are kept in the
folder, and what is there is not computed again. Times are CPU seconds on one thread.
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

EDGE, NEAR, FAR, PIXELS, SAMPLES = 1.1, 0.1, 2.9, 32, 48
BOX = [[-EDGE] * 3, [EDGE] * 3]
CENTRES = torch.tensor([[-0.35, 0.05, -0.35], [0.35, -0.15, -0.1], [0.0, 0.5, 0.25]])
RADII = torch.tensor([0.3, 0.22, 0.25])
COLOURS = torch.tensor([[0.9, 0.3, 0.2], [0.2, 0.75, 0.3], [0.25, 0.35, 0.9]])
PLAIN = torch.tensor([[0.75, 0.7, 0.6], [0.55, 0.6, 0.7], [0.8, 0.8, 0.8]])  # walls across x, y and z
SEEN = [(x, -0.85, 0.1) for x in (-0.6, -0.2, 0.2, 0.6)]
NEW = [
    (-0.4, -0.85, 0.1),
    (0.4, -0.85, 0.1),
    (-0.3, -0.7, 0.6),
    (0.5, -0.7, 0.6),
    (-0.7, -0.7, -0.5),
    (0.2, -0.7, -0.5),
]


def camera(eye):
    """Rays ``[PIXELS², 6]`` (origin and direction) of a pinhole camera that looks at the room's middle."""
    eye = torch.tensor(eye)
    ahead = nn.functional.normalize(torch.tensor([0.0, 0.35, -0.05]) - eye, dim=0)
    right = nn.functional.normalize(torch.linalg.cross(ahead, torch.tensor([0.0, 0.0, 1.0])), dim=0)
    side = (torch.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    v, u = torch.meshgrid(-side, side, indexing="ij")
    steps = u[..., None] * right + v[..., None] * torch.linalg.cross(right, ahead)
    direction = nn.functional.normalize(ahead + math.tan(math.radians(35)) * steps, dim=-1).view(-1, 3)
    return torch.cat([eye.expand_as(direction), direction], -1)


def truth(rays):
    """Colours ``[R, 3]`` and depths ``[R]`` of the first surface that each ray meets."""
    origin, direction = rays[:, :3], rays[:, 3:]
    wall, axis = ((direction.sign() - origin) / direction).min(-1)
    x = origin + wall[:, None] * direction
    waves = 0.5 + 0.25 * (torch.sin(9 * x) + torch.sin(5 * x.roll(1, -1) + 1))
    pattern = (axis == 1) | ((axis == 2) & (x[:, 2] < 0))  # noqa: PLR2004
    colour = PLAIN[axis] * torch.where(pattern[:, None], waves, torch.ones_like(waves))
    away = origin[:, None] - CENTRES
    b = (away * direction[:, None]).sum(-1)
    inside = b.square() - away.square().sum(-1) + RADII.square()
    ball, which = torch.where(inside > 0, -b - inside.clamp_min(0).sqrt(), torch.inf).min(-1)
    hit = origin + ball.clamp_max(9)[:, None] * direction
    stripes = 0.75 + 0.25 * torch.sin(12 * hit.sum(-1, keepdim=True))
    near = ball < wall
    return torch.where(near[:, None], COLOURS[which] * stripes, colour), torch.where(near, ball, wall)


class Field(nn.Module):
    """From positions ``[..., 3]`` to a density and a colour, ``[..., 4]``."""

    def __init__(self):
        super().__init__()
        self.grids = nn.ParameterList(0.1 * torch.randn(1, 2, n + 1, n + 1, n + 1) for n in (16, 32, 48))
        self.hidden, self.last = nn.Linear(6, 32), nn.Linear(32, 4)

    def forward(self, x):
        """Density and colour."""
        at = (x / EDGE).view(1, 1, 1, -1, 3)
        options = {"padding_mode": "border", "align_corners": True}
        features = torch.cat([nn.functional.grid_sample(grid, at, **options)[0, :, 0, 0] for grid in self.grids])
        found = self.last(self.hidden(features.mT).relu()).view(*x.shape[:-1], 4)
        return torch.cat([20 * nn.functional.softplus(found[..., :1] - 2), found[..., 1:].sigmoid()], -1)


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
        x = rays[:, None, :3] + t[..., None] * rays[:, None, 3:]
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


def trained(seed, folder, steps, batch=256):
    """A trained field, and its CPU seconds."""
    file, renderer = folder / f"{seed}.pt", Renderer()
    if not file.exists():
        torch.manual_seed(seed)
        start, renderer = time.process_time(), Renderer()
        rays = torch.cat([camera(eye) for eye in SEEN])
        colours = truth(rays)[0]
        grids, own = renderer.field.grids.parameters(), renderer.field.named_parameters()
        network = [parameter for name, parameter in own if not name.startswith("grids")]
        optimizer = torch.optim.Adam([{"params": grids, "lr": 2e-2}, {"params": network, "lr": 3e-3}])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(rays), (batch,))
            optimizer.zero_grad()
            nn.functional.mse_loss(renderer(rays[some], jitter=torch.rand(batch, SAMPLES)), colours[some]).backward()
            optimizer.step()
            schedule.step()
        torch.save({"field": renderer.state_dict(), "seconds": time.process_time() - start}, file)
    stored = torch.load(file)
    renderer.load_state_dict(stored["field"])
    return renderer.eval(), stored["seconds"]


def views_that_see(renderer, rays):
    """For each ray's surface ``[R]``, the transmittances from the four cameras, summed where their pictures have it."""
    surface = rays[:, :3] + renderer.depth(rays) * rays[:, 3:]
    total = torch.zeros(len(rays))
    for eye in SEEN:
        own = camera(eye)
        to = surface - own[0, :3]
        distance, middle = to.norm(dim=-1), nn.functional.normalize(own[:, 3:].mean(0), dim=0)
        direction = to / distance[:, None]
        corner = (own[:, 3:] @ middle).min()
        weights, t, _, _ = renderer.weights(torch.cat([own[:1, :3].expand_as(direction), direction], -1))
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
            "mean error of depth, the four views": at_seen,
            "mean error of depth, the six": float(error.mean()),
            "training, s": training,
        }
        simple = {
            "ensemble of 3 fields: standard deviation of depth": torch.cat(
                [own.depth(new) for own, _ in fields], 1
            ).std(1),
            "views that see the surface, fewest first": -views_that_see(renderer, new),
            "spread of the ray's weights": (weights * (t - found).square()).sum(-1),
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
            theirs = 1e-4 / resolution**3 * len(seen) / noise**2  # of H/R + λ, in terms of H/σ² + prior precision
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
    parser.add_argument("--steps", type=int, default=1000)
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
