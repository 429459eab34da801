"""The links of classification against Monte Carlo, over means, covariances and numbers of classes.

    python benchmarks/defaults/links.py [--quick]          # writes benchmarks/results/links-cpu.md

The truth is the average of softmax over 10⁵ samples in antithetic pairs. Beside the package's links are the mean-field
approximations of Lu, Ie and Sha (2020, arXiv:2006.07584), with variances and with the covariances of all pairs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_plus.likelihoods import Categorical
from laplace_plus.predictive import from_functional

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2, 3, 5, 10, 30, 100, 300, 1000)
SCALES = (0.1, 1.0, 10.0, 100.0)
KINDS = ("equal", "unequal", "Wishart", "low rank", "shared", "inverse curvature")
SPREADS = (0.5, 2.0, 6.0)
F64 = torch.float64


class Case(NamedTuple):
    """A Gaussian over logits, and the average of softmax with its standard errors."""

    size: int
    scale: float
    kind: str
    mean: Tensor
    covariance: Tensor
    truth: Tensor
    lead_error: float


def covariance_of(kind: str, size: int, scale: float, mean: Tensor, g: torch.Generator) -> Tensor:
    """A covariance ``[C, C]`` whose variances are about the scale."""
    identity, ones = torch.eye(size, dtype=F64), torch.ones(size, size, dtype=F64)
    if kind == "equal":
        return scale * identity
    if kind == "unequal":
        return scale * torch.diag(torch.randn(size, generator=g, dtype=F64).exp())
    if kind in ("Wishart", "low rank"):
        rank = size + 2 if kind == "Wishart" else min(size, 5)
        root = torch.randn(size, rank, generator=g, dtype=F64)
        return scale * (root @ root.mT / rank + (0.01 * identity if kind == "low rank" else 0))
    if kind == "shared":
        return scale * (0.95 * ones + 0.05 * identity)
    p = mean.softmax(-1)
    return torch.linalg.inv(torch.diag(p) - torch.outer(p, p) + identity / scale)


def truth(mean: Tensor, covariance: Tensor, n: int, g: torch.Generator) -> tuple[Tensor, float]:
    """The average over n samples, and the standard error of the two largest probabilities' difference."""
    jitter = 1e-12 * covariance.diagonal().max() * torch.eye(len(mean), dtype=F64)
    root = torch.linalg.cholesky(covariance + jitter)
    total, squares, first, second = torch.zeros_like(mean), 0.0, None, None
    step = max(1, int(2e6) // len(mean))
    for start in range(0, n // 2, step):
        moved = torch.randn(min(step, n // 2 - start), len(mean), generator=g, dtype=F64) @ root.mT
        pairs = ((mean + moved).softmax(-1) + (mean - moved).softmax(-1)) / 2
        total += pairs.sum(0)
        first, second = total.topk(2).indices.tolist() if first is None else (first, second)
        squares += float((pairs[:, first] - pairs[:, second]).square().sum())
    mean_p = total / (n // 2)
    variance = squares / (n // 2) - float(mean_p[first] - mean_p[second]) ** 2
    return mean_p, math.sqrt(max(0.0, variance) / (n // 2))


def cases(n: int) -> Iterator[Case]:
    """Every size, kind, scale and spread of the means."""
    g = torch.Generator().manual_seed(0)
    for size in SIZES:
        for kind in KINDS:
            for scale in SCALES:
                for spread in SPREADS:
                    mean = spread * torch.randn(size, generator=g, dtype=F64)
                    covariance = covariance_of(kind, size, scale, mean, g)
                    p, error = truth(mean, covariance, n if size <= 100 else max(1000, n // 5), g)
                    yield Case(size, scale, kind, mean, covariance, p, error)


def package(link: str, n_samples: int = 100) -> Callable[[Tensor, Tensor], Tensor]:
    """A link of the package, from ``[B, C]`` and ``[B, C, C]`` to probabilities."""

    def apply(mean: Tensor, covariance: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(1)
        made = from_functional(Categorical(), mean, covariance, link=link, n_samples=n_samples, generator=g)
        return made.mean

    return apply


def mean_field(mean: Tensor, covariance: Tensor) -> Tensor:
    """Lu et al. with the covariances of all pairs: ``1 / Σ_j exp(−(m_k − m_j) / √(1 + π/8 V_kj))``, normalised."""
    own = covariance.diagonal(dim1=-2, dim2=-1)
    between = (own[..., :, None] + own[..., None, :] - 2 * covariance).clamp_min(0)
    scaled = (mean[..., None, :] - mean[..., :, None]) / (1 + math.pi / 8 * between).sqrt()
    return (-scaled.logsumexp(-1)).softmax(-1)


def mean_field_variances(mean: Tensor, covariance: Tensor) -> Tensor:
    """The same as if logits were uncorrelated."""
    return mean_field(mean, torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1)))


LINKS = {
    "gumbel (the default)": package("gumbel"),
    "probit": package("probit"),
    "bridge": package("bridge"),
    "mean field, variances": mean_field_variances,
    "mean field, covariances": mean_field,
    "mc, 100 samples": package("mc"),
}


class Score(NamedTuple):
    """KL from the truth in nats; whether the largest probability is the truth's, and whether the truth cannot tell."""

    size: int
    scale: float
    kind: str
    kl: float
    agrees: bool
    tied: bool


def scored(case: Case, p: Tensor) -> Score:
    """The score of probabilities ``[C]``; a tie: the truth's first two differ by at most three standard errors."""
    q = p.double().clamp_min(1e-300)
    kl = float((case.truth * (case.truth.clamp_min(1e-300) / q).log()).sum())
    first, second = case.truth.topk(2).values.tolist()
    tied = first - second <= 3 * case.lead_error
    return Score(case.size, case.scale, case.kind, max(0.0, kl), float(case.truth[q.argmax()]) == first, tied)


def table(
    scores: dict[str, list[Score]], by: str, values: tuple[object, ...], show: Callable[[list[Score]], str]
) -> str:
    """One row for each link, one column for each value of an attribute, and one for all."""
    lines = [f"| link | {' | '.join(map(str, values))} | all |", "|---" * (len(values) + 2) + "|"]
    for name, own in scores.items():
        cells = [show([score for score in own if getattr(score, by) == value]) for value in values] + [show(own)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_kl(scores: list[Score]) -> str:
    """Mean KL, and the largest."""
    return f"{sum(s.kl for s in scores) / len(scores):.4f} ({max(s.kl for s in scores):.2f})"


def agreement(scores: list[Score]) -> str:
    """How often the argmax is the truth's, where that can be told."""
    told = [s for s in scores if not s.tied]
    return f"{sum(s.agrees for s in told) / len(told):.1%}"


def agreements(scores: dict[str, list[Score]], by: str, values: tuple[object, ...]) -> str:
    """The table of :func:`agreement`, with the number of cases in which it can be told."""
    counts = table({"cases": scores["probit"]}, by, values, lambda own: str(sum(not s.tied for s in own)))
    return "\n".join([table(scores, by, values, agreement), counts.splitlines()[-1]])


def timed(apply: Callable[[Tensor, Tensor], Tensor], size: int, batch: int) -> float:
    """CPU milliseconds for one input in float32, the least of five runs."""
    g = torch.Generator().manual_seed(2)
    root = torch.randn(batch, size, min(size, 10), generator=g)
    mean, covariance = 2 * torch.randn(batch, size, generator=g), root @ root.mT / 3 + 0.1 * torch.eye(size)
    taken = []
    for _ in range(5):
        start = time.process_time()
        apply(mean, covariance)
        taken.append(time.process_time() - start)
    return 1e3 * min(taken) / batch


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    scores: dict[str, list[Score]] = {name: [] for name in LINKS}
    with torch.no_grad():
        for case in cases(10_000 if quick else 100_000):
            for name, apply in LINKS.items():
                scores[name].append(scored(case, apply(case.mean[None], case.covariance[None])[0]))
        clock = {
            name: [timed(apply, *pair) for pair in ((10, 1), (10, 256), (100, 64), (1000, 4))]
            for name, apply in LINKS.items()
        }
    times = "\n".join(
        f"| {name} | " + " | ".join(f"{value:.3g}" for value in row) + " |" for name, row in clock.items()
    )
    told = sum(not s.tied for s in scores["probit"])
    raw, raw_probit = (sum(s.agrees for s in own) / len(own) for own in list(scores.values())[:2])
    page = f"""# Links of classification against Monte Carlo

`python benchmarks/defaults/links.py` wrote this page: {len(scores["probit"])} Gaussians over logits.
Means have a standard deviation of .5, 2 or 6; the scale is about the variance of a logit; covariances are equal or
unequal and independent, Wishart, of rank five, almost entirely shared, or inverse curvatures.
The truth is the average over 100 000 samples in antithetic pairs (20 000 above 100 classes).

## Mean KL to the truth in nats, and the largest, by number of classes

{table(scores, "size", SIZES, mean_kl)}

## By scale

{table(scores, "scale", SCALES, mean_kl)}

## By kind of covariance

{table(scores, "kind", KINDS, mean_kl)}

## How often the most probable class is the truth's

Only cases in which the truth's two largest probabilities differ by more than three of their standard errors: {told} of
{len(scores["probit"])}. Over all cases, ties included, the default agrees in {raw:.1%}, probit in {raw_probit:.1%}.

{agreements(scores, "scale", SCALES)}

{agreements(scores, "size", SIZES)}

{agreements(scores, "kind", KINDS)}

## CPU milliseconds for one input, from a covariance

One thread, float32, other work beside it.

| link | C = 10, one input | C = 10, of 256 | C = 100, of 64 | C = 1000, of 4 |
|---|---|---|---|---|
{times}
"""
    if not quick:
        (ROOT / "benchmarks" / "results" / "links-cpu.md").write_text(page)
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
