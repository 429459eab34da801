"""Networks under equality constraints: a periodic curve, conservative scores, sparsity.

    for part in periodic scores pruning speed; do
        python benchmarks/uses/constraints.py $part --folder FOLDER --data DATA
    done
    python benchmarks/uses/constraints.py page --folder FOLDER --output benchmarks/results/constraints.md

Each part writes its section into the folder; ``page`` joins them. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from laplace_plus.applications.constraints import (
    NullSpaceOptimizer,
    Sparse,
    asymmetry,
    conservative,
    periodic,
    project,
    value,
)

PARTS = ("periodic", "scores", "pruning", "speed")


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


# -- a periodic curve --------------------------------------------------------------------------------------------------


def curve_network(seed: int) -> nn.Module:
    """Two hidden layers of 16."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def train_curve(kind: str, log: Path) -> None:
    """Write step, MSE, rms of c, MSE on the wide interval and CPU seconds to a log, each 100 steps."""
    x = torch.linspace(-math.pi, math.pi, 500)[:, None]
    wide = torch.linspace(-3 * math.pi, 3 * math.pi, 1000)[:, None]
    torch.manual_seed(0)
    points = 4 * torch.randn(2000, 1) - 2 * math.pi
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    constraint = periodic(2 * math.pi)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    if kind == "null space":
        optimizer = NullSpaceOptimizer(optimizer, constraint, net, points, rate=0.01, warm_up=100)
    start, lines = time.process_time(), []
    for step in range(1, 5001):
        optimizer.zero_grad()
        (mse_loss(net(x), x.sin()) / 2).backward()
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                fit, wider = (float(mse_loss(net(one), one.sin())) for one in (x, wide))
                rms = float(constraint(net, points).square().mean().sqrt())
            lines.append(f"{step} {fit} {rms} {wider} {time.process_time() - start:.1f}")
    log.write_text("\n".join(lines))


def periodic_part(options: argparse.Namespace) -> str:
    """The example of Roy, Hauberg and Krämer's package, by its settings; finished logs in the folder are used again."""
    rows = []
    for kind, shown in (("unconstrained", (500, 5000)), ("null space", (500, 1000, 2000, 2500, 3000, 4000, 5000))):
        log = options.folder / f"{kind}.log"
        if not log.exists():
            train_curve(kind, log)
        found = [[float(word) for word in line.split()] for line in log.read_text().splitlines()]
        for step, *figures, spent in found:
            if step in shown:
                rows.append([kind, int(step), *(f"{one:.2g}" for one in figures), f"{spent:.0f}"])
        late = [row[3] for row in found if row[0] > 4000]
        rows.append([kind, "4100 to 5000, worst", "", "", f"{max(late):.2g}", ""])
    head = ["training", "steps", "MSE on [−π, π]", "rms of c", "MSE on [−3π, 3π]", "CPU s"]
    return f"""## A periodic curve

A network of 1-16-16-1 tanh units learns sin from 500 points on [−π, π] by Adam, lr 0.003. The constraint is
f(x + 2π) = f(x) at 2000 points from N(−2π, 4²), γ = 0.01, after 100 steps of warm-up; at most 50 iterations of LSMR.
These are the settings of the authors' example. There are more values of c than weights (321), so that c cannot be zero.
First the curve flattens, which is periodic, too; then it becomes the sine. At this constant rate Adam leaves the
solution now and then, and comes back.

{table(head, rows)}"""


# -- conservative scores -----------------------------------------------------------------------------------------------


class Score(nn.Module):
    """The score of data with noise σ, from ``[x, ln σ]``: three hidden layers of 64."""

    def __init__(self):
        super().__init__()
        sizes = [3, 64, 64, 64]
        layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 2))

    def forward(self, z):
        """``[B, 2]``."""
        return self.layers(z) / z[:, 2:].exp()


def moons(n: int, generator: torch.Generator) -> torch.Tensor:
    """Two moons, centred, with noise of 0.05."""
    angle = math.pi * torch.rand(n, generator=generator)
    upper = torch.rand(n, generator=generator) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=generator)


def noisy(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data with noise of σ in [0.05, 1], the noise itself, and ln σ."""
    log_std = math.log(0.05) * torch.rand(n, 1, generator=generator)
    noise = torch.randn(n, 2, generator=generator)
    return moons(n, generator) + log_std.exp() * noise, noise, log_std


def score_loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Denoising score matching, weighted by σ²."""
    x, noise, log_std = batch
    return (log_std.exp() * net(torch.cat([x, log_std], 1)) + noise).square().sum(1).mean()


FIELDS = conservative()


def antisymmetric(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``σ² (J v − Jᵀ v)`` at points with their own noise."""
    x, log_std = batch
    return FIELDS(lambda points: model(torch.cat([points, log_std], 1)), x) * (2 * log_std).exp()


def circulation(net: nn.Module, std: float, generator: torch.Generator) -> float:
    """Root mean square of ``∮ s·dx / ∮ ‖s‖ ‖dx‖`` over 200 circles among the data, of radii in [0.1, 1]."""
    angle = 2 * math.pi * torch.arange(400) / 400
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    tangent = torch.stack([-angle.sin(), angle.cos()], 1)
    found = []
    for _ in range(200):
        centre = (torch.rand(2, generator=generator) - 0.5) * torch.tensor([2.0, 1.0])
        radius = 0.1 + 0.9 * torch.rand(1, generator=generator)
        x = centre + radius * circle
        with torch.no_grad():
            s = net(torch.cat([x, torch.full((400, 1), math.log(std))], 1))
        found.append((s * tangent).sum() / s.norm(dim=1).sum())
    return float(torch.stack(found).square().mean().sqrt())


def train_scores(kind: str, weight: float, seed: int, steps: int = 500) -> tuple[nn.Module, float]:
    """A network and its CPU seconds: plain, with a penalty of some weight, or by null-space steps."""
    torch.manual_seed(seed)
    net, generator = Score(), torch.Generator().manual_seed(seed)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def points() -> tuple[torch.Tensor, torch.Tensor]:
        x, _, log_std = noisy(64, generator)
        return x, log_std

    if kind == "null space":
        optimizer = NullSpaceOptimizer(optimizer, antisymmetric, net, points, rate=1.0, warm_up=100, max_iterations=10)
    start = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = score_loss(net, noisy(256, generator))
        if kind == "penalty":
            loss = loss + weight * antisymmetric(net, points()).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net, time.process_time() - start


def scores_part(options: argparse.Namespace) -> str:
    """Plain, penalised and constrained score networks."""
    kinds = [("plain", 0.0), *(("penalty", weight) for weight in (0.1, 1.0, 10.0)), ("null space", 0.0)]
    rows = []
    for kind, weight in kinds:
        found = []
        for seed in range(options.seeds):
            net, spent = train_scores(kind, weight, seed)
            generator = torch.Generator().manual_seed(1000 + seed)
            with torch.no_grad():
                own = [float(score_loss(net, noisy(20_000, generator)))]
            for std in (0.1, 0.3, 1.0):
                log_std = torch.full((2000, 1), math.log(std))
                x = moons(2000, generator) + std * torch.randn(2000, 2, generator=generator)

                def field(points, net=net, log_std=log_std):
                    return net(torch.cat([points, log_std.repeat(len(points) // len(log_std), 1)], 1))

                energy = asymmetry(field, x, n_probes=2, generator=generator)
                own += [float(energy.value), float(energy.sem), circulation(net, std, generator)]
            found.append([*own, spent])
        mean = torch.tensor(found).mean(0).tolist()
        cells = [f"{mean[0]:.4f}"]
        for k in (1, 4, 7):
            cells += [f"{mean[k]:.4f} ± {mean[k + 1]:.4f}", f"{mean[k + 2]:.4f}"]
        rows.append([f"{kind}, λ = {weight}" if weight else kind, *cells, f"{mean[-1]:.0f}"])
    head = ["training", "loss"]
    head += [f"{what}, σ = {std}" for std in ("0.1", "0.3", "1") for what in ("asymmetry", "circulation")] + ["CPU s"]
    return f"""## Conservative scores

Score networks of two moons (3-64-64-64-2 SiLU units, noise σ in [0.05, 1], denoising score matching weighted by σ²,
500 steps of Adam on 256 new points, cosine schedule from 0.002). The constraint and the penalty λ ‖c‖² / m are on c
= σ² (J v − Jᵀ v) at 64 new points of each step, with new random signs v; null-space steps have γ = 1 after 100
steps, and at most 10 iterations of LSMR. Loss: on 20,000 new points. Asymmetry: ‖J − Jᵀ‖ / ‖J‖ on 2000 new points ±
its standard error. Circulation: the root mean square over 200 circles of the line integral of s, relative to that of
its length; 0 for the gradient of a function. Mean over {options.seeds} seed(s). γ was chosen on seed 0, once: with 0.01
the asymmetry at σ = 0.3 hardly changed (0.118 after 800 steps, 0.125 without the constraint).

{table(head, rows)}"""


# -- sparsity: quality -------------------------------------------------------------------------------------------------


def images(folder: Path, part: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first n of Fashion-MNIST, ``[n, 1, 28, 28]`` between 0 and 1, and their classes."""
    files = (folder / "fashion_mnist" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    pixels, labels = (gzip.decompress(file.read_bytes()) for file in files)
    x = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28)[:n]
    return torch.tensor(x) / 255.0, torch.tensor(np.frombuffer(labels, np.uint8, offset=8)[:n].astype(np.int64))


def lenet() -> nn.Module:
    """About 61,000 weights."""
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *head)


def fit(net: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, epochs: int, after: Any = None) -> None:
    """Epochs of batches of 100, with something ``after`` each step."""
    step = 0
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
            step += 1
            if after is not None:
                after(step)


def sparse_network(trained: nn.Module, kind: str, share: float, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Five epochs of fine-tuning by one of the ways, from the same batches."""
    torch.manual_seed(1)
    net, steps = copy.deepcopy(trained), 5 * len(x) // 200
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    sparse = Sparse(share, steps=steps if "γ" in kind else 0, every=10)
    if "γ" in kind:
        fit(net, NullSpaceOptimizer(optimizer, sparse, net, rate=float(kind.split()[-1])), x, y, 5)
        net.load_state_dict(project(net, sparse).state)
        return net

    def prune(step: int) -> None:
        if kind == "magnitude, gradual" and (step <= steps and step % 10 == 0):
            sparse.choose(dict(net.named_parameters()), share * (1 - (1 - step / steps) ** 3))
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name in sparse.masks:
                    parameter.masked_fill_(sparse.masks[name], 0.0)

    if kind == "magnitude, at once":
        sparse.choose(dict(net.named_parameters()), share)
        prune(0)
    fit(net, optimizer, x, y, 5, after=prune)
    return net


def pruning_part(options: argparse.Namespace) -> str:
    """LeNet at four sparsities."""
    x, y = images(options.data, "train", 5000)
    test_x, test_y = images(options.data, "t10k", 10_000)
    kinds = ("magnitude, at once", "magnitude, gradual", "null space, γ = 0.1", "null space, γ = 10")
    shares = (0.5, 0.8, 0.9, 0.95)
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        net = lenet()
        fit(net, torch.optim.Adam(net.parameters(), lr=1e-3), x, y, 12)
        nets = {("trained", 0.0): net}
        dense = copy.deepcopy(net)
        torch.manual_seed(1)
        fit(dense, torch.optim.Adam(dense.parameters(), lr=1e-3), x, y, 5)
        nets["dense, fine-tuned as long", 0.0] = dense
        nets |= {(kind, share): sparse_network(net, kind, share, x, y) for share in shares for kind in kinds}
        for key, one in nets.items():
            zeros = sum(int((p == 0).sum()) for p in one.parameters() if p.ndim > 1)
            total = sum(p.numel() for p in one.parameters() if p.ndim > 1)
            assert not key[1] or abs(zeros / total - key[1]) < 1e-3, (key, zeros / total)
            with torch.no_grad():
                outputs = one(test_x)
            right = float((outputs.argmax(1) == test_y).double().mean())
            found.setdefault(key, []).append((100 * right, float(cross_entropy(outputs, test_y))))
    rows = []
    for (kind, share), values in found.items():
        accuracy, nll = torch.tensor(values).T
        error = accuracy.std() / len(values) ** 0.5
        spread = f" ± {error:.2f}" if len(values) > 1 else ""
        rows.append([kind, f"{share:.0%}", f"{accuracy.mean():.2f}{spread}", f"{nll.mean():.3f}"])
    return f"""## Sparsity: quality

LeNet on 5000 images of Fashion-MNIST (12 epochs of Adam, lr 0.001, batches of 100). All sparse networks have five
more epochs from the same network and the same batches. *At once*: the smallest weights are zero from the start.
*Gradual*: the cubic schedule over the first half, chosen every 10 steps, set to zero. *Null space*: the same schedule
by `lp.constraints.Sparse`, and `project` at the end. Shares are of the weights of all layers, not of biases. Test:
10,000 images; mean over {options.seeds} seed(s), with the standard error of the accuracy where there are several.

Adam divides γ θ by the size of the gradients before it, so that with γ = 0.1 many held weights are not yet near zero
when `project` removes them: at 90 % their root mean square was 0.003 and the largest 0.08, beside 0.00001 and 0.0001
with γ = 10. The latter was added after the results with 0.1 were seen.

{table(["fine-tuning", "zeros", "accuracy in %", "NLL"], rows)}"""


# -- sparsity: time and memory -----------------------------------------------------------------------------------------


def one_case(kind: str) -> str:
    """CPU seconds of a step of 5·10⁷ weights, and the peak of this process's memory in GB."""
    torch.manual_seed(0)
    sizes = [784, 4800, 4800, 4800, 10]
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    n = 1024 if "1024" in kind else 128
    x, y = torch.randn(n, 784), torch.randint(0, 10, (n,))
    optimizer: Any = torch.optim.Adam(net.parameters())
    if kind == "closed form":
        optimizer = NullSpaceOptimizer(optimizer, Sparse(0.9), net)
    elif kind == "LSMR, held weights":
        sparse = Sparse(0.9)
        sparse.choose(dict(net.named_parameters()), 0.9)
        held = {name: mask.float() for name, mask in sparse.masks.items()}
        optimizer = NullSpaceOptimizer(
            optimizer,
            lambda model, _: torch.cat([(model.parameters[name] * held[name]).flatten() for name in held]),
            net,
        )
    elif "LSMR" in kind:
        hard = value(torch.randn(16, 784), torch.zeros(16, 10))
        optimizer = NullSpaceOptimizer(optimizer, hard, net, max_iterations=10, tolerance=0.0)
    times = []
    for _ in range(3):
        start = time.process_time()
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        times.append(time.process_time() - start)
    first, rest = times[0], min(times[1:])
    iterations = optimizer.last.iterations if "plain" not in kind else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return f"{first:.3f} {rest:.3f} {peak:.2f} {iterations}"


def speed_part(options: argparse.Namespace) -> str:
    """One step of each kind, in processes of their own."""
    found: dict[str, list[list[float]]] = {}
    for kind in (*("plain", "closed form") * 3, "LSMR, held weights", "LSMR, values", "plain, 1024 inputs"):
        command = [sys.executable, __file__, "one", "--folder", str(options.folder), "--kind", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.setdefault(kind, []).append([float(word) for word in done.stdout.split()])
    best = {kind: torch.tensor(rows).amin(0).tolist() for kind, rows in found.items()}
    rows = []
    for kind, (first, rest, peak, iterations) in best.items():
        ratio = f"{rest / best['plain'][1]:.2f}"
        rows.append([kind, f"{first:.2f}", f"{rest:.2f}", ratio, f"{peak:.2f}", int(iterations)])
    head = ["step", "first step, s", "later steps, s", "× plain", "peak, GB", "iterations of LSMR"]
    return f"""## Sparsity: time and memory

A network of 784-4800-4800-4800-10 units, 5·10⁷ weights, one step of Adam on 128 inputs, or 1024. *Closed form*: 90 %
of the weights held by `Sparse`, which are chosen in the first step. *LSMR, held weights*: the same constraint as a
function of one's own. *LSMR, values*: 160 values of the network prescribed (`value` at 16 inputs), tolerance 0, 10
iterations. Minima of two later steps and, for the first two rows, of three processes in turn. Peak memory includes
torch itself. **For sparsity take `Sparse`, the closed form**: LSMR finds the same gradient in one iteration, but as
many rows as weights make it several times as dear as a step.

What LSMR adds does not depend on the number of inputs of the loss. In each iteration the product with J took 0.13 s,
the one with Jᵀ 0.26 s, and the recurrences the rest; all are bound by memory.

{table(head, rows)}"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS, "page", "one"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kind", default="plain")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "one":
        sys.stdout.write(one_case(options.kind))
    elif options.part == "page":
        sections = "\n".join((options.folder / f"{part}.md").read_text() for part in PARTS)
        head = f"""# Networks under equality constraints

[`benchmarks/uses/constraints.py`](../uses/constraints.py) measures `lp.constraints` and writes this page. CPU seconds
are those of one thread ({platform.machine()}, torch {torch.__version__}), with other work beside it.

"""
        options.output.write_text(head + sections)
    else:
        run = {"periodic": periodic_part, "scores": scores_part, "pruning": pruning_part, "speed": speed_part}
        (options.folder / f"{options.part}.md").write_text(run[options.part](options))


if __name__ == "__main__":
    main()
