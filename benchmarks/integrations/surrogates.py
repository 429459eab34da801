"""Bayesian optimisation with ``LaplaceSurrogate`` beside ``SingleTaskGP``.

    python -W ignore benchmarks/integrations/surrogates.py [--seeds 10] [--functions SixHumpCamel Hartmann]

Functions of ``botorch.test_functions``, 30 evaluations without noise, of which the first 10 are Sobol points that all
surrogates share; then qLogEI with q = 1. The last row goes on with Sobol points.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from botorch import fit_gpytorch_mll
from botorch.acquisition import qLogExpectedImprovement
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann, SixHumpCamel
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from laplace_plus.integrations.botorch import LaplaceSurrogate

INITIAL, EVALUATIONS = 10, 30


def gaussian_process(x: Tensor, y: Tensor) -> SingleTaskGP:
    """BoTorch's default model with its fitted hyperparameters."""
    model = SingleTaskGP(x, y, input_transform=Normalize(x.shape[-1]))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def laplace(x: Tensor, y: Tensor) -> LaplaceSurrogate:
    """The surrogate's defaults."""
    return LaplaceSurrogate(x, y, input_transform=Normalize(x.shape[-1]))


SURROGATES: dict[str, Callable[..., Any] | None] = {"LaplaceSurrogate": laplace, "SingleTaskGP": gaussian_process}
SURROGATES["Sobol"] = None


def best(problem: Any, make: Callable[..., Any] | None, seed: int) -> tuple[float, float]:
    """The largest value after all evaluations, and seconds for each step."""
    x = draw_sobol_samples(problem.bounds, EVALUATIONS, 1, seed=seed)[:, 0]
    if make is None:
        return float(problem(x).max()), 0.0
    torch.manual_seed(seed)
    x, start = x[:INITIAL], time.perf_counter()
    while len(x) < EVALUATIONS:
        y = problem(x)[:, None]
        acquisition = qLogExpectedImprovement(make(x, y), best_f=y.max())
        new, _ = optimize_acqf(acquisition, bounds=problem.bounds, q=1, num_restarts=4, raw_samples=128)
        x = torch.cat([x, new])
    return float(problem(x).max()), (time.perf_counter() - start) / (EVALUATIONS - INITIAL)


def main() -> None:
    """Print a table: mean and standard error of the best value, the median, seconds for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=10, help="the first seed; some below 10 chose the defaults")
    parser.add_argument("--functions", nargs="+", default=["SixHumpCamel", "Hartmann"])
    parser.add_argument("--surrogates", nargs="+", default=[*SURROGATES])
    arguments = parser.parse_args()
    first = arguments.first
    torch.set_default_dtype(torch.float64)
    known = {"SixHumpCamel": SixHumpCamel, "Hartmann": Hartmann}
    sys.stdout.write(
        "| function | surrogate | best value | gap to the maximum: median | seconds a step |\n|---|---|---|---|---|\n"
    )
    for name in arguments.functions:
        problem = known[name](negate=True)
        for surrogate in arguments.surrogates:
            found = [best(problem, SURROGATES[surrogate], seed) for seed in range(first, first + arguments.seeds)]
            values, seconds = map(torch.tensor, zip(*found, strict=True))
            gap = float((problem.optimal_value - values).median())
            error = float(values.std()) / len(values) ** 0.5
            row = f"| {name} | {surrogate} | {float(values.mean()):.3f} ± {error:.3f} | {gap:.3f} "
            sys.stdout.write(row + f"| {float(seconds.mean()):.1f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
