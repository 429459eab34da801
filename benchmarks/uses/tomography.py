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
from laplace_plus.applications.reconstruction import FilterCovariance, ImagePosterior

METHODS = {
    "isotropic": "network, isotropic noise of the fit's residuals",
    "layerwise, at the network": "scalar prior for each layer, evidence at the network's weights",
    "filters, at the network": "filter priors, evidence at the network's weights",
    "filters + TV, at the network": "filter priors and TV-PredCP, evidence at the network's weights",
    "dropout": "MC dropout",
    "null space": "`lp.NullSpace`",
}
AT_NETWORK = ", at the network"
STEPS = {(0.05, 10): 1800, (0.05, 20): 2500, (0.1, 10): 800, (0.1, 20): 1000}
RATE = 2e-3
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
        "rank correlation": float(scipy.stats.spearmanr(std, error.abs()).statistic)
        if std.max() > std.min() + 1e-9
        else None,
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
    for kind in ("layerwise", "filters"):
        names = [name for name in wanted if name.startswith(kind)]
        if names:
            start = time.process_time()
            blocks, prior = (stage, FilterCovariance()) if kind == "filters" else (None, FilterCovariance(0.0))
            posterior = ImagePosterior(net, problem.matrix, blocks=blocks).fit(z, y)
            shared = time.process_time() - start
            for name in names:
                posterior.prior, posterior.noise_std = prior, fitted
                rate = problem.gamma * len(y) if "TV" in name else None
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
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--angles", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    parser.add_argument("--channels", type=int, default=32)
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
                (net, seconds), (dropped, more) = (network(problem, image, p, options) for p in (0.0, 0.05))
                for name, own in cell(problem, net, dropped, wanted).items():
                    trained = more if name == "dropout" else seconds
                    row = {"noise level": noise, "angles": angles, "image": image, "method": name, "trained": trained}
                    with file.open("a") as out:
                        out.write(json.dumps({**row, **own}) + "\n")
    if options.page:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        options.page.write_text(page(rows, options.channels, options.folder))


INTRODUCTION = """# Error bars of tomographic reconstructions

`python benchmarks/uses/tomography.py --data DATA --folder FOLDER --channels {channels} --page PAGE` made this page
({versions}). Images are the first {images} of KMNIST's test set, 28 × 28 pixels. The projector has 41 detector pixels
at each angle; noise is {noises} of the mean measurement. For each sinogram a U-Net of {weights} weights (three scales
of {channels} channels, where the paper has 32, without normalisation, a sigmoid at the end) was trained from the
filtered back-projection, by the mean square of the residuals and total variation, whose weights are those of Antorán
et al. (2022). Training is shorter than theirs: Adam at 2e-3, falling to 2e-4 over the last half, for {steps} steps, a
sixteenth of their number at 1e-4. MC dropout (p = 0.05 after each 3 × 3 convolution, 1000 samples) has a network of
its own, trained with it.

Priors and noise are at the maximum of the evidence, by L-BFGS; variances are at least 1e-3, as the authors' are. The
evidence is that at the network's weights, as the authors have it on KMNIST.
Blocks of filter priors are the stages of the network; 1 × 1 convolutions have blocks of their own.

Log-likelihoods of the true image are in nats per pixel, larger is better: of all pixels together, of 4 × 4 patches,
of single pixels. The noise as it is seen in the image, `image_noise(rank=100)`, is added to each variance; for the
network alone that is all there is. The pseudo-inverse in it is dominated by singular values near zero, so that its
rank matters: the last table has others. Rank 100 was chosen before any result was seen. Entries are means over images
± standard errors. Rank correlations are those of standard deviation and absolute error over the pixels of an image.
Times are CPU seconds of fit, tuning and covariance, on one thread of a busy machine.
"""


def mean(values: list[Any], digits: int = 2) -> str:
    """Mean and standard error."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return ""
    error = f" ± {statistics.stdev(known) / len(known) ** 0.5:.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{error}"


def filters_of(folder: Path) -> str:
    """How correlated neighbouring taps of trained filters are, and which length scales the evidence chose."""
    found = []
    for file in sorted((folder / "nets").glob("*-0.0.pt")):
        for weight in torch.load(file)["net"].values():
            if weight.ndim == 4 and weight.shape[-1] > 1:  # noqa: PLR2004
                products = (weight[..., 1:] * weight[..., :-1]).mean() + (
                    weight[..., 1:, :] * weight[..., :-1, :]
                ).mean()
                found.append(float(products / 2 / weight.square().mean()))
    return f"{statistics.fmean(found):.2f} on average over layers and networks ({min(found):.2f} to {max(found):.2f})"


def page(rows: list[dict[str, Any]], channels: int, folder: Path) -> str:
    """The results as markdown."""
    groups: dict[Any, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row["noise level"], row["angles"]][row["method"]][row["image"]] = row
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    noises = " and ".join(f"{100 * noise:g} %" for noise in sorted({noise for noise, _ in groups}))
    steps = ", ".join(f"{STEPS[key]} ({key[1]} angles, {100 * key[0]:g} %)" for key in sorted(groups))
    count = max(len(own) for methods in groups.values() for own in methods.values())
    facts = {"versions": versions, "noises": noises, "steps": steps, "images": count, "channels": channels}
    facts["weights"] = sum(parameter.numel() for parameter in UNet(channels).parameters())
    lines = [
        INTRODUCTION.format(**facts),
        "## What it says",
        "",
        *bars(groups),
        *why(rows, folder),
        "",
        "## The tables",
        "",
    ]
    for (noise, angles), methods in sorted(groups.items()):
        n = max(map(len, methods.values()))
        lines += [
            f"{angles} angles, {100 * noise:g} % noise, {n} image{'s' * (n > 1)}; training of a network took "
            f"{statistics.fmean(row['trained'] for own in methods.values() for row in own.values()):.0f} CPU seconds.",
            "",
            "| error bars | all pixels | patches | pixels | PSNR, dB | rank correlation | mean std / mean error | s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, title in METHODS.items():
            own = list(methods[name].values())
            if own:
                scores = [mean([row["log-likelihood"]["rank 100"][score] for row in own]) for score in SCORES]
                others = [mean([row[key] for row in own]) for key in ("psnr", "rank correlation")]
                ratio = mean([row["mean std"] / row["mean |error|"] for row in own])
                seconds = f"{statistics.fmean(row['seconds'] for row in own):.0f}"
                lines.append(f"| {title} | {' | '.join([*scores, *others, ratio, seconds])} |")
        lines.append("")
    lines += ["All pixels together, with other ranks of the pseudo-inverse:", ""]
    lines += [
        "| angles, noise | error bars | rank 100 | values above a hundredth of the largest | none |",
        "|---|---|---|---|---|",
    ]
    for (noise, angles), methods in sorted(groups.items()):
        for name, title in METHODS.items():
            own = list(methods[name].values())
            if own:
                found = [mean([row["log-likelihood"][key]["joint"] for row in own]) for key in own[0]["log-likelihood"]]
                lines.append(f"| {angles}, {100 * noise:g} % | {title} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def why(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """What stands behind the differences."""
    lines = []
    for name in ("filters", "filters + TV"):
        own = [row["lengthscale"][:5] for row in rows if row["method"] == name + AT_NETWORK]  # of the stages
        values = [value for lengths in own for value in lengths]
        if values:
            low, high = min(values), max(values)
            lines.append(f"{METHODS[name + AT_NETWORK]}: {statistics.median(values):.2f} ({low:.2f} to {high:.2f})")
    return [
        f"- **Correlation of neighbouring taps** within the trained filters: {filters_of(folder)}.",
        f"- **Length scales** in taps, median over stages and images (range): {'; '.join(lines)}. Most are so short, "
        "that the priors are nearly those without correlations, although the trained filters have some.",
    ]


def bars(groups: Any) -> list[str]:
    """Paired differences of log-likelihoods (all pixels), and rank correlations."""
    lines = []
    for better, worse in (
        *((f"filters{more}{AT_NETWORK}", f"layerwise{AT_NETWORK}") for more in ("", " + TV")),
        (f"layerwise{AT_NETWORK}", "dropout"),
    ):
        parts = []
        for (noise, angles), methods in sorted(groups.items()):
            own, other = methods[better], methods[worse]
            gaps = [
                own[i]["log-likelihood"]["rank 100"]["joint"] - other[i]["log-likelihood"]["rank 100"]["joint"]
                for i in sorted(own.keys() & other.keys())
            ]
            if gaps:
                wins = sum(gap > 0 for gap in gaps)
                parts.append(f"{mean(gaps, 3)} at {angles} angles and {100 * noise:g} % ({wins} of {len(gaps)} images)")
        lines.append(f"- **{METHODS[better]}**, minus {METHODS[worse]}, paired, all pixels: {'; '.join(parts)}.")
    correlations = [
        row["rank correlation"]
        for methods in groups.values()
        for name, own in methods.items()
        if name.startswith(("layerwise", "filters"))
        for row in own.values()
    ]
    what = "of standard deviation and error under linearised priors"
    ends = f"{min(correlations):.2f} to {max(correlations):.2f}"
    return [*lines, f"- **Rank correlations** {what}: {ends}; the bar was 0.3."]


if __name__ == "__main__":
    main()
