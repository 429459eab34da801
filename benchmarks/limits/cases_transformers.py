"""DistilBERT: all weights, and adapters alone."""

from __future__ import annotations

from collections.abc import Iterator

import limits_factors as factors
import peers
from fitting import fit
from models import Problem
from tasks import Target, Task

import laplace_plus as lp


def transformers(problem: Problem) -> Iterator[Task]:
    """Monte Carlo factors of all weights beside hooks written for it; adapters beside a pass of training."""
    n = len(problem.inputs)
    if problem.name == "lora":
        adapters = [name for name, parameter in problem.model.named_parameters() if parameter.requires_grad]
        yield Task(
            "transformers",
            f"KFAC exact fit of adapters, N={n}",
            problem,
            lambda: fit(problem, lp.KFAC, parameters=adapters),
            problem.epoch,
            "1 forward + backward",
            Target(2.5),
            peers={"curvlinops": (peers.curvlinops_factors(problem, monte_carlo=False), 1)},
        )
        return
    yield Task(
        "transformers",
        f"KFAC Monte Carlo fit of all weights, N={n}",
        problem,
        lambda: fit(problem, lp.KFAC, backend=lp.Native("ggn_mc")),
        lambda: factors.deferred_factors(problem),
        "1 forward + 1 backward to layer outputs + Gram products, postponed until rows are as many as columns",
        Target(1.3, peak_ratio=1.0),
        peers={"curvlinops": (peers.curvlinops_factors(problem, monte_carlo=True), 1)},
    )
