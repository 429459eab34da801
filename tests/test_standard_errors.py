"""Standard errors cover: the exact value lies within the 95 % interval of Student's t for 95 ± 2 % of the seeds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from problems import generator
from scipy import stats
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.applications.constraints import asymmetry
from laplace_plus.geometry.curvature import estimate_scalar_curvature, scalar_curvature
from laplace_plus.linalg import diagonal, slq_logdet, slq_trace, trace

pytestmark = pytest.mark.slow

N, SEEDS, FITS = 50, 1000, 400
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3
DATA = [(X[:7], Y[:7]), (X[7:], Y[7:])]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    net[0].bias.requires_grad_(False)
    return net


MATRIX = torch.randn(N, N, generator=generator(3), dtype=torch.float64)
MATRIX = MATRIX @ MATRIX.T / N + torch.eye(N, dtype=torch.float64)
STEEP = torch.linalg.qr(torch.randn(N, N, generator=generator(4), dtype=torch.float64))[0]
STEEP = (STEEP * torch.logspace(0, -6, N, dtype=torch.float64)) @ STEEP.T
LARGE = torch.randn(400, 400, generator=generator(6), dtype=torch.float64)  # more than ten probes of 30 steps
LARGE = LARGE @ LARGE.T / 400 + torch.eye(400, dtype=torch.float64)
Pairs = Iterable[tuple[Tensor, Tensor, int]]
"""For each seed the error, its standard error, and the number of independent samples behind it."""


def by(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: v @ matrix


def estimates(make: Callable[[torch.Generator], Any], exact: Tensor, probes: int | None = None) -> Pairs:
    for seed in range(SEEDS):
        found = make(generator(seed))
        yield found.value - exact, found.sem, probes or found.probes


def traces(method: str, matrix: Tensor = MATRIX) -> Pairs:
    options: dict[str, Any] = {"matvecs": 20, "method": method, "dtype": torch.float64}
    return estimates(lambda g: trace(by(matrix), N, generator=g, **options), matrix.trace())


def diagonals(method: str) -> Pairs:
    options: dict[str, Any] = {"matvecs": 20, "method": method, "symmetric": True, "dtype": torch.float64}
    return estimates(lambda g: diagonal(by(MATRIX), N, generator=g, **options), MATRIX.diagonal())


def log_determinants() -> Pairs:
    options: dict[str, Any] = {"probes": 10, "depth": 30, "dtype": torch.float64}
    return estimates(lambda g: slq_logdet(by(LARGE), 400, generator=g, **options), LARGE.logdet())


def spectral_traces() -> Pairs:
    options: dict[str, Any] = {"probes": 10, "depth": 30, "dtype": torch.float64}
    exact = torch.linalg.eigvalsh(LARGE).sqrt().sum()
    return estimates(lambda g: slq_trace(by(LARGE), torch.sqrt, 400, generator=g, **options), exact)


def curvatures() -> Pairs:
    point = torch.randn(8, generator=generator(5), dtype=torch.float64)
    matrix = MATRIX[:8, :8]

    def surface(v: Tensor) -> Tensor:
        return (v @ matrix @ v) / 2 + v.sin().sum()

    exact = scalar_curvature(surface, point)
    return estimates(lambda g: estimate_scalar_curvature(surface, point, probes=40, generator=g), exact)


def dimensions() -> Pairs:
    net = network()
    exact = lp.Full(net, "classification").fit(DATA)
    covariance = exact.covariance_matrix()
    gamma = len(covariance) - covariance.trace()  # the prior precision is one
    k = 30
    for seed in range(FITS):
        posterior = lp.SampledLaplace(net, "classification", n_samples=k, solver=lp.CGSolver(tolerance=1e-8))
        found = posterior.fit(DATA, generator=generator(seed)).effective_dimension()
        yield found.value - gamma, found.sem, k


def kernel_dimensions() -> Pairs:
    net = network()
    exact = (
        lp.NullSpace(net, "classification", rows="loss", projector="svd", n_samples=2).fit(DATA).null_space_dimension
    )
    for seed in range(FITS):
        posterior = lp.NullSpace(net, "classification", rows="loss", projector="lsmr", n_samples=20)
        found = posterior.fit(DATA, generator=generator(seed)).null_space_dimension
        # The error is that of a sum of χ² numbers, and not estimated from the samples: of a normal distribution.
        yield found.value - exact.value, found.sem, 10**6


def remainders(**options: Any) -> Pairs:
    net = network()
    full = lp.Full(net, "classification").fit(DATA)
    for seed in range(SEEDS):
        posterior = lp.LowRank(net, "classification", rank=4, **options)
        with mock.patch.multiple("laplace_plus.structured.low_rank", REMAINDER_DEPTH=35, WHOLE=0):
            posterior.fit(DATA, generator=generator(seed))
        exact = 2 * (posterior.log_marginal_likelihood() - full.log_marginal_likelihood())
        found = posterior.remainder()  # enters the evidence with the factor −1/2
        yield -exact, found.sem, found.probes


def predictions(**options: Any) -> Pairs:
    posterior = lp.KFAC(network(), "classification").fit(DATA)
    count = options.pop("n_samples", 30)
    made = [posterior.predictive(X[:4], n_samples=count, generator=generator(s), **options) for s in range(SEEDS)]
    reference = torch.stack([one.mean for one in made]).mean(0)
    for one in made:
        yield one.mean - reference, one.standard_error, count


def asymmetries() -> Pairs:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)).double(), X
    jacobians = torch.func.vmap(torch.func.jacrev(net))(x).detach()
    exact = ((jacobians - jacobians.mT).square().sum() / jacobians.square().sum()).sqrt()
    return estimates(lambda g: asymmetry(net, x, n_probes=5, generator=g), exact)


ESTIMATES: dict[str, tuple[Callable[[], Pairs], float]] = {  # and the largest coverage that the docs allow
    "trace, hutchinson": (lambda: traces("hutchinson"), 0.97),
    "trace, xtrace": (lambda: traces("xtrace"), 0.97),
    "trace, xnystrace": (lambda: traces("xnystrace"), 0.97),
    "trace, xtrace, steep spectrum": (lambda: traces("xtrace", STEEP), 1.0),
    "trace, xnystrace, steep spectrum": (lambda: traces("xnystrace", STEEP), 1.0),
    "diagonal, hutchinson": (lambda: diagonals("hutchinson"), 0.97),
    "diagonal, xdiag": (lambda: diagonals("xdiag"), 0.97),
    "slq_logdet": (log_determinants, 0.97),
    "slq_trace": (spectral_traces, 0.97),
    "scalar curvature": (curvatures, 0.97),
    "effective dimension": (dimensions, 0.97),
    "NullSpace.null_space_dimension": (kernel_dimensions, 0.97),
    "LowRank.remainder": (remainders, 0.97),
    "LowRank.remainder, 8 vectors": (lambda: remainders(remainder_probes=8), 0.97),
    "constraints.asymmetry": (asymmetries, 0.97),
    "prediction, link mc": (lambda: predictions(link="mc"), 0.97),
    "prediction, sampled": (lambda: predictions(method="sampled"), 0.97),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_coverage(name: str) -> None:
    make, largest = ESTIMATES[name]
    covered, ratios = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for error, sem, samples in make():
            covered.append((error.abs() <= stats.t.ppf(0.975, samples - 1) * sem).double().mean())
            ratios.append(torch.stack([error.square().mean(), sem.square().mean()]))
    coverage = float(torch.stack(covered).mean())
    error, claimed = torch.stack(ratios).mean(0).sqrt().tolist()
    sys.stdout.write(f"\n| {name} | {len(covered)} | {samples} | {100 * coverage:.1f} % | {claimed / error:.2f} |\n")
    assert 0.93 <= coverage <= largest
