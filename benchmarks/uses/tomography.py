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
from pathlib import Path
from typing import Any

import scipy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tomography_problem import Problem, UNet, stage, train

import laplace_plus as lp
from laplace_plus.reconstruction import FilterCovariance, ImagePosterior

METHODS = {
    "isotropic": "network, isotropic noise of the fit's residuals",
    "layerwise": "scalar prior for each layer",
    "filters": "filter priors",
    "filters + TV": "filter priors and TV-PredCP",
    "dropout": "MC dropout",
    "null space": "`lp.NullSpace`",
}
STEPS = {(0.05, 10): 3600, (0.05, 20): 5100, (0.1, 10): 1600, (0.1, 20): 2100}
SCORES = ("joint", "patches", "pixels")


def log_probs(error: torch.Tensor, covariance: torch.Tensor, extra: float) -> dict[str, float]:
    """Log-densities in nats per pixel: of the whole image, of 4 × 4 patches, and of single pixels."""
    n = int(len(error) ** 0.5)
    index = torch.arange(n * n).view(n, n)
    total = covariance + (extra + 1e-6) * torch.eye(n * n, dtype=covariance.dtype)
    found = {}
    for name, size in zip(SCORES, (n, 4, 1), strict=True):
        cells = [cell.flatten() for row in index.split(size) for cell in row.split(size, 1)]
        normals = (torch.distributions.MultivariateNormal(torch.zeros(len(c)).to(error), total[c][:, c]) for c in cells)
        found[name] = sum(float(p.log_prob(error[c])) for p, c in zip(normals, cells, strict=True)) / len(error)
    return found


def described(problem: Problem, mean: torch.Tensor, covariance: torch.Tensor, noise: dict[str, float]) -> dict:
    """All scores of one reconstruction; ``noise`` are variances to add."""
    error = (problem.image - mean.view(28, 28)).flatten()
    std = (covariance.diagonal().clamp_min(0) + noise["rank 100"]).sqrt()
    return {
        "psnr": -10 * math.log10(float(error.square().mean())),
        "rank correlation": float(scipy.stats.spearmanr(std, error.abs()).statistic) if std.std() > 0 else None,
        "mean std": float(std.mean()),
        "mean |error|": float(error.abs().mean()),
        "log-likelihood": {name: log_probs(error, covariance, extra) for name, extra in noise.items()},
    }


class Measured(nn.Module):
    """The network's measurements."""

    def __init__(self, net: nn.Module, matrix: torch.Tensor):
        super().__init__()
        self.net, self.matrix = net, matrix.float()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """``[B, d_y]``."""
        return self.net(z).flatten(1) @ self.matrix.mT


def image_noise(problem: Problem, std: float) -> dict[str, float]:
    """The noise's variance in the image: of 100 singular vectors, of those above a hundredth of the largest, none."""
    values = torch.linalg.svdvals(problem.matrix.to_dense())
    chosen = {"rank 100": values[:100], "a hundredth": values[values > values[0] / 100], "none": values[:0]}
    return {name: std**2 * float(some.pow(-2).sum()) / 784 for name, some in chosen.items()}


def cell(problem: Problem, net: UNet, dropped: UNet, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of some methods on one problem."""
    z, y, rows = problem.z.float(), problem.y, {}
    with torch.no_grad():
        mean = net(z)[0, 0].double()
    residual = y - problem.matrix @ mean.flatten()
    fitted = float(residual.square().mean().sqrt())
    nothing = torch.zeros(784, 784, dtype=torch.float64)

    def add(name: str, start: float, mean: torch.Tensor, covariance: torch.Tensor, std: float, **others: Any) -> None:
        own = described(problem, mean, covariance, image_noise(problem, std))
        rows[name] = {**own, "noise": std / problem.noise_std, "seconds": time.process_time() - start, **others}

    def tune(posterior: ImagePosterior, start: float, **options: Any) -> tuple[Any, ...]:
        posterior.fit_prior(**options)
        length, variance = posterior.prior.values()
        found = {
            "evidence": float(posterior.log_marginal_likelihood()),
            "lengthscale": length.expand(len(posterior.blocks)).tolist(),
            "variance": variance.tolist(),
        }
        return (start, mean, posterior.covariance(), float(posterior.noise_std)), found

    if "isotropic" in wanted:
        add("isotropic", time.process_time(), mean, nothing, fitted)
    if "layerwise" in wanted:
        start = time.process_time()
        posterior = ImagePosterior(net, problem.matrix, noise_std=fitted, prior=FilterCovariance(0.0)).fit(z, y)
        found, others = tune(posterior, start)
        add("layerwise", *found, **others)
    names = {"filters": None, "filters + TV": problem.gamma * len(y)} if wanted else {}
    if any(name in wanted for name in names):
        start = time.process_time()
        posterior = ImagePosterior(net, problem.matrix, noise_std=fitted, blocks=stage).fit(z, y)
        shared = time.process_time() - start
        for name, rate in names.items():
            if name in wanted:
                posterior.prior, posterior.noise_std = FilterCovariance(), fitted
                found, others = tune(posterior, time.process_time() - shared, total_variation=rate)
                add(name, *found, **others)
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
        view = posterior.through(lambda z: net(z).flatten(1), "regression")
        covariance = view.functional_posterior(z).covariance[0].double()
        add("null space", start, mean, covariance, fitted)
    return rows


def network(problem: Problem, image: int, dropout: float, folder: Path) -> tuple[UNet, float]:
    """A trained network and its CPU seconds, from the folder if it is there."""
    file = folder / "nets" / f"{image}-{problem.angles}-{problem.noise}-{dropout}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        net, info = train(problem, STEPS[problem.noise, problem.angles], 1e-3, dropout)
        torch.save({"net": net.state_dict(), **info}, file)
    stored = torch.load(file)
    net = UNet(dropout=dropout)
    net.load_state_dict(stored["net"])
    return net.eval(), stored["seconds"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--angles", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.folder / "rows.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["noise level"], row["angles"], row["image"], row["method"]) for row in known}
    for noise in options.noise:
        for image in range(options.images):
            for angles in options.angles:
                wanted = [name for name in options.methods if (noise, angles, image, name) not in done]
                if not wanted:
                    continue
                problem = Problem(options.data, image, angles, noise)
                (net, seconds), (dropped, more) = (network(problem, image, p, options.folder) for p in (0.0, 0.05))
                for name, own in cell(problem, net, dropped, wanted).items():
                    trained = more if name == "dropout" else seconds
                    row = {"noise level": noise, "angles": angles, "image": image, "method": name, "trained": trained}
                    with file.open("a") as out:
                        out.write(json.dumps({**row, **own}) + "\n")
    if options.page:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        options.page.write_text(page(rows))


def page(rows: list[dict[str, Any]]) -> str:
    """The results as markdown."""
    return str(rows)


if __name__ == "__main__":
    main()
