"""Error bars of tomographic reconstructions of KMNIST images by a deep image prior.

    python benchmarks/uses/tomography.py --data DATA --folder FOLDER --page benchmarks/results/tomography.md

For each image, number of angles and noise, a U-Net learns one sinogram; another does with dropout. Rows are appended to
``FOLDER/rows.jsonl``, networks are kept in ``FOLDER/nets``; what is there is not computed again. Times are CPU seconds
on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tomography_problem import Problem, UNet, projector, stage, train

import laplace_plus as lp
from laplace_plus.applications.reconstruction import ImagePosterior

AT = ("network", "optimum")
METHODS = {
    "isotropic": "network, isotropic noise of the fit's residuals",
    **{f"scalar, {at}": f"scalar priors, at the {at}" for at in AT},
    "dropout": "MC dropout",
    "null space": "`lp.NullSpace`",
}
STEPS = {
    **{(0.05, 5): 900, (0.05, 10): 1800, (0.05, 20): 2500},
    **{(0.1, 5): 450, (0.1, 10): 800, (0.1, 20): 1000},
    **{(0.2, 5): 250, (0.2, 10): 400, (0.2, 20): 500},
}
RATE = 2e-3
SCORES = ("joint", "patches", "pixels")
LEVEL = 0.9


def log_probs(error: torch.Tensor, covariance: torch.Tensor, extra: float) -> dict[str, float]:
    """Log-densities in nats per pixel: of the whole image, of 4 × 4 patches, and of single pixels."""
    n = int(len(error) ** 0.5)
    index = torch.arange(n * n).view(n, n)
    total = covariance + (extra + 1e-6) * torch.eye(n * n, dtype=covariance.dtype)
    found = {}
    for name, size in zip(SCORES, (n, 4), strict=False):
        cells = [cell.flatten() for row in index.split(size) for cell in row.split(size, 1)]
        normals = (torch.distributions.MultivariateNormal(torch.zeros(len(c)).to(error), total[c][:, c]) for c in cells)
        found[name] = sum(float(p.log_prob(error[c])) for p, c in zip(normals, cells, strict=True)) / len(error)
    pixels = torch.distributions.Normal(torch.zeros_like(error), total.diagonal().sqrt())
    return {**found, "pixels": float(pixels.log_prob(error).mean())}


def described(problem: Problem, mean: torch.Tensor, covariance: torch.Tensor, noise: dict[str, float]) -> dict:
    """All scores of one reconstruction; ``noise`` are variances to add."""
    error = (problem.image - mean.view(problem.image.shape)).flatten()
    std = (covariance.diagonal().clamp_min(0) + noise["a quarter"]).sqrt()
    inside = error.abs() <= scipy.stats.norm.ppf((1 + LEVEL) / 2) * std
    return {
        "coverage": float(inside.double().mean()),
        "psnr": -10 * math.log10(float(error.square().mean())),
        "rank correlation": float(scipy.stats.spearmanr(std, error.abs()).statistic)
        if std.max() > std.min() + 1e-9
        else None,
        "mean std": float(std.mean()),
        "mean |error|": float(error.abs().mean()),
        "log-likelihood": {name: log_probs(error, covariance, extra) for name, extra in noise.items()},
    }


class AtOptimum(ImagePosterior):
    """The tangent model's own posterior: mean and evidence are those at its optimum, not those at the weights."""

    def seen(self) -> torch.Tensor:
        """What the tangent model takes for measurements of ``A J θ``, ``[d_y]``: ``y − A (f(z) − J θ̃)``."""
        return self._residual + self._jacobian.double() @ self.network.vector().double()

    def log_marginal_likelihood(self, prior_variance: Any = None, noise_std: Any = None) -> torch.Tensor:
        """``log N(seen; 0, S)``."""
        root = self._factored(prior_variance, noise_std)[0]
        seen = self.seen()
        return torch.distributions.MultivariateNormal(torch.zeros_like(seen), scale_tril=root).log_prob(seen)

    def mean(self) -> torch.Tensor:
        """The image at the optimum, ``f(z) − J θ̃ + K Aᵀ S⁻¹ seen``, ``[d_x]``."""
        root, variance, _ = (one.detach() for one in self._factored())
        weights = torch.cholesky_solve(self.seen()[:, None], root)[:, 0]
        parts = []
        for rows in self._chunks(self.image.numel()):
            across = self._product(rows, self._jacobian, variance)
            parts.append(across @ weights - rows.double() @ self.network.vector().double())
        return self.image.double().flatten() + torch.cat(parts)


class Measured(nn.Module):
    """The network's measurements."""

    def __init__(self, net: nn.Module, matrix: torch.Tensor):
        super().__init__()
        self.net, self.matrix = net, matrix.float()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """``[B, d_y]``."""
        return self.net(z).flatten(1) @ self.matrix.mT


def image_noise(problem: Problem, std: float) -> dict[str, float]:
    """The noise's variance in the image: of a quarter of the singular vectors, of those above a hundredth, of none."""
    values = torch.linalg.svdvals(problem.matrix.to_dense())
    chosen = {
        "a quarter": values[: len(values) // 4],
        "a hundredth": values[values > values[0] / 100],
        "none": values[:0],
    }
    return {name: std**2 * float(some.pow(-2).sum()) / problem.image.numel() for name, some in chosen.items()}


def cell(problem: Problem, net: UNet, dropped: UNet, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of some methods on one problem."""
    z, y, rows = problem.z.float(), problem.y, {}
    with torch.no_grad():
        mean = net(z)[0, 0].double()
    residual = y - problem.matrix @ mean.flatten()
    fitted = float(residual.square().mean().sqrt())
    nothing = torch.zeros(2 * [problem.image.numel()], dtype=torch.float64)

    def add(name: str, start: float, mean: torch.Tensor, covariance: torch.Tensor, std: float, **others: Any) -> None:
        own = described(problem, mean, covariance, image_noise(problem, std))
        rows[name] = {**own, "noise": std / problem.noise_std, "seconds": time.process_time() - start, **others}

    def tune(posterior: ImagePosterior, start: float) -> tuple[Any, ...]:
        posterior.fit_prior()
        found = {
            "evidence": float(posterior.log_marginal_likelihood()),
            "variance": posterior.prior_variance.tolist(),
        }
        covariance, std = posterior.covariance(), float(posterior.noise_std)
        if isinstance(posterior, AtOptimum):  # beside it: its error bars around the network's image
            own = described(problem, mean, covariance, image_noise(problem, std))
            found["around the network"] = {key: own[key] for key in ("log-likelihood", "coverage")}
            return (start, posterior.mean(), covariance, std), found
        return (start, mean, covariance, std), found

    if "isotropic" in wanted:
        add("isotropic", time.process_time(), mean, nothing, fitted)
    for at in AT:
        if f"scalar, {at}" in wanted:
            start = time.process_time()
            make = AtOptimum if at == "optimum" else ImagePosterior
            found, others = tune(make(net, problem.matrix, noise_std=fitted, blocks=stage).fit(z, y), start)
            add(f"scalar, {at}", *found, **others)
    if "dropout" in wanted:
        start = time.process_time()
        torch.manual_seed(0)
        with torch.no_grad():
            images = torch.cat([dropped(z.expand(50, -1, -1, -1)) for _ in range(20)]).flatten(1).double()
        std = float((y - problem.matrix @ images.mean(0)).square().mean().sqrt())
        add("dropout", start, images.mean(0), torch.cov(images.mT), std)
    if "null space" in wanted:
        start = time.process_time()
        posterior = lp.NullSpace(Measured(net, problem.matrix), lp.Gaussian(fitted), n_samples=100)
        posterior.fit([(z, y[None].float())], generator=torch.Generator().manual_seed(0))
        posterior.fit_prior_precision("optimal")
        view = lp.through(posterior, lambda z: net(z).flatten(1), "regression")
        covariance = view.functional_posterior(z).covariance[0].double()
        add("null space", start, mean, covariance, fitted)
    return rows


def network(problem: Problem, image: int, dropout: float, options: Any) -> tuple[UNet, float]:
    """A trained network and its CPU seconds, from the folder if it is there."""
    file = options.folder / "nets" / f"{image}-{problem.angles}-{problem.noise}-{dropout}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        net, info = train(problem, STEPS[problem.noise, problem.angles], RATE, dropout, options.channels)
        torch.save({"net": net.state_dict(), **info}, file)
    stored = torch.load(file)
    net = UNet(options.channels, dropout=dropout)
    net.load_state_dict(stored["net"])
    return net.eval(), stored["seconds"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--angles", type=int, nargs="+", default=[5])
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.folder / "rows.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["noise level"], row["angles"], row["image"], row["method"]) for row in known}
    for image in range(options.images):
        for noise in options.noise:
            for angles in options.angles:
                wanted = [name for name in options.methods if (noise, angles, image, name) not in done]
                if not wanted:
                    continue
                problem = Problem(options.data, image, angles, noise, options.size)
                net, seconds = network(problem, image, 0.0, options)
                dropped, more = network(problem, image, 0.05, options) if "dropout" in wanted else (net, seconds)
                for name, own in cell(problem, net, dropped, wanted).items():
                    trained = more if name == "dropout" else seconds
                    row = {"noise level": noise, "angles": angles, "image": image, "method": name, "trained": trained}
                    with file.open("a") as out:
                        out.write(json.dumps({**row, **own}) + "\n")
    if options.page:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        options.page.write_text(page(rows, options))


INTRODUCTION = """# Error bars of tomographic reconstructions

`python benchmarks/uses/tomography.py --data DATA --folder FOLDER --size {size} --channels {channels} --page PAGE`
made this page ({versions}). Images are the first {images} of KMNIST's test set, of {size} × {size}
pixels. The projector has {angles} angles and {measurements} measurements; noise is {noises} of the mean measurement.
For each sinogram a U-Net of {weights} weights (three scales of {channels} channels, without normalisation, a sigmoid at
the end) was trained from the filtered back-projection, by the mean square of the residuals and total variation, whose
weights are those of Antorán et al. (2022). Training is shorter than theirs: Adam at 2e-3, falling to 2e-4 over the last
half, for {steps} steps, about a sixteenth of their number at 1e-4.

Priors and noise are at the maximum of the evidence, by L-BFGS; variances are at least 1e-3, as the authors' are. Blocks
are the stages of the network, 1 × 1 convolutions by themselves. **At the network**:
evidence and mean are those at the trained weights, as `ImagePosterior` and the authors have it on KMNIST. **At the
optimum**: the evidence is `log N(y − A (f(z) − J θ̃); 0, A K Aᵀ + σ² I)`, and the mean is the image of the tangent
model at its own optimum, `f(z) + J (θ* − θ̃)`. Covariances have the same formula.

Log-densities of the true image are in nats per pixel, larger is better: of all pixels together, of 4 × 4 patches, of
single pixels. The noise as it is seen in the image, by a quarter of the singular values of A, is added to each
variance, as the authors do; one column is without it. Coverage is the share of pixels within their intervals of 90 %.
Entries are means over images ± standard errors; differences are paired by image.
"""


def mean(values: list[Any], digits: int = 2) -> str:
    """Mean and standard error."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return ""
    error = f" ± {statistics.stdev(known) / len(known) ** 0.5:.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{error}"


def density(row: dict[str, Any], score: str = "joint", noise: str = "a quarter") -> float:
    """The log-density of the truth, in nats per pixel."""
    return row["log-likelihood"][noise][score]


def around(row: dict[str, Any]) -> dict[str, Any]:
    """The row of the same error bars around the network's image."""
    return row["around the network"]


COMPARISONS = [
    ("optimum − network, scalar priors", "scalar, optimum", "scalar, network"),
    ("scalar priors at the network − MC dropout", "scalar, network", "dropout"),
]
COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "all pixels": density,
    "single pixels": lambda row: density(row, "pixels"),
    "coverage": lambda row: row["coverage"],
    "PSNR, dB": lambda row: row["psnr"],
}


def page(rows: list[dict[str, Any]], options: Any) -> str:
    """The results as markdown."""
    groups: dict[Any, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row["noise level"], row["angles"]][row["method"]][row["image"]] = row
    for methods in groups.values():  # rows of the same images only
        most = max(map(len, methods.values()))
        for name in [name for name, own in methods.items() if len(own) < most]:
            del methods[name]
    noises, angles = sorted({noise for noise, _ in groups}), sorted({angles for _, angles in groups})
    facts = {
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "noises": ", ".join(f"{100 * noise:g} %" for noise in noises),
        "steps": ", ".join(str(STEPS[key]) for key in sorted(groups)),
        "images": max(len(own) for methods in groups.values() for own in methods.values()),
        "angles": " or ".join(map(str, angles)),
        "measurements": " or ".join(str(projector(options.size, count).shape[0]) for count in angles),
        "weights": sum(parameter.numel() for parameter in UNet(options.channels).parameters()),
    }
    lines = [INTRODUCTION.format(**facts, size=options.size, channels=options.channels)]
    lines += ["## Paired differences", "", f"| | noise, angles | images | {' | '.join(COLUMNS)} |", "|---" * 7 + "|"]
    for title, better, worse in COMPARISONS:
        pooled: list[list[float]] = []
        for (noise, angle), methods in sorted(groups.items()):
            own, other = methods.get(better, {}), methods.get(worse, {})
            images = sorted(own.keys() & other.keys())
            gaps = [[of(own[i]) - of(other[i]) for of in COLUMNS.values()] for i in images]
            pooled += gaps
            if gaps:
                cells = [mean(list(column), 3) for column in zip(*gaps, strict=True)]
                lines.append(f"| {title} | {100 * noise:g} %, {angle} | {len(gaps)} | {' | '.join(cells)} |")
        if pooled:
            cells = [mean(list(column), 3) for column in zip(*pooled, strict=True)]
            lines.append(f"| {title} | all | {len(pooled)} | {' | '.join(cells)} |")
    lines += ["", "## The scores", ""]
    titles = [
        *COLUMNS,
        "patches",
        "all pixels, without the image's noise",
        "rank correlation",
        "std / error",
        "σ / true",
        "s",
    ]
    for (noise, angle), methods in sorted(groups.items()):
        trained = statistics.fmean(row["trained"] for own in methods.values() for row in own.values())
        lines += [f"{100 * noise:g} % noise, {angle} angles; training of a network took {trained:.0f} CPU seconds.", ""]
        lines += [f"| error bars | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        for name, title in METHODS.items():
            own = [row for _, row in sorted(methods.get(name, {}).items())]
            if own:
                cells = [mean([of(row) for row in own]) for of in COLUMNS.values()]
                cells += [
                    mean([density(row, "patches") for row in own]),
                    mean([density(row, noise="none") for row in own]),
                ]
                cells += [mean([row["rank correlation"] for row in own])]
                cells += [
                    mean([row["mean std"] / row["mean |error|"] for row in own]),
                    mean([row["noise"] for row in own]),
                ]
                lines.append(
                    f"| {title} | {' | '.join(cells)} | {statistics.fmean(row['seconds'] for row in own):.0f} |"
                )
        lines.append("")
    shown = [row for methods in groups.values() for own in methods.values() for row in own.values()]
    optima = [row for row in shown if "around the network" in row]
    gaps = [density(row) - density(around(row)) for row in optima]
    lines += [
        f"As the mean, the image at the optimum gains {mean(gaps, 3)} nats per pixel over the network's.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
