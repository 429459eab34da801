"""Fits whose state a given memory budget does not hold are refused early, and the error names the least that works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus._memory import parse_bytes
from laplace_plus.errors import ConfigurationError

LATENT = lp.LatentModel(dimension=1, hidden=(4,), epochs=2, tolerance=1e9)
WALK: Any = {"n_particles": 2, "n_steps": 2, "n_refinements": 1, "latent": LATENT}
FEW = {"name": "cg", "max_iterations": 2}

METHODS: dict[str, Callable[..., Any]] = {
    "LowRank": lambda *args, **options: lp.LowRank(*args, rank=2, remainder_probes=0, **options),
    "SampledLaplace": lambda *args, **options: lp.SampledLaplace(*args, n_samples=2, **options),
    "NullSpace": lambda *args, **options: lp.NullSpace(*args, rows="loss", n_samples=2, **options),
    "VIKING": lambda *args, **options: lp.VIKING(*args, rows="loss", n_samples=2, **options),
    "MetricBNN": lambda *args, **options: lp.MetricBNN(*args, **WALK, **options),
    "geodesics": lambda *args, **o: lp.Riemannian(*args, tangent="Diagonal", n_samples=1, **o),
    "diffusions": lambda *args, **o: lp.Riemannian(
        *args, tangent="Diagonal", n_samples=1, method=lp.Diffusion(n_steps=2, rank=3), **o
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_budget_that_holds_too_few_vectors_is_refused_by_the_least_that_works(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))
    x, y = torch.randn(6, 20), torch.arange(6) % 2
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))

    def draw(budget: int | None) -> Any:
        posterior = METHODS[name](net, "classification", memory_budget=budget)
        passes.clear()
        return posterior.fit([(x, y)], generator=torch.Generator().manual_seed(0)).sample(1)

    with pytest.raises(ConfigurationError, match="parameter vectors") as refusal:
        draw(3 * 4 * 692)  # three vectors
    assert name in ("geodesics", "diffusions") or not passes  # whose tangent comes first
    (least,) = re.findall(r"memory_budget of at least ([0-9.]+ [KM]iB)", str(refusal.value))
    assert draw(parse_bytes(least)).shape == draw(None).shape  # as much as is free


def test_the_default_tuning_leaves_out_selected_weights_alone_where_all_do_not_fit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 2))
    x, y = torch.randn(40, 20), torch.arange(40) % 2
    posterior = lp.Diagonal(net, "classification", parameters="last_layer", memory_budget="300 KiB").fit([(x, y)])
    assert "the curvature of all weights" in posterior.fit_prior_precision().tuning.why
    posterior.memory_budget = "300 MiB"
    assert "the curvature of all weights" not in posterior.fit_prior_precision().tuning.why


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
def test_tuning_by_samples_takes_more_than_their_solution_and_names_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    x, y, brief = torch.randn(6, 4), torch.arange(6) % 2, {"max_steps": 1, "optimum_tolerance": 0.1}
    posterior = METHODS["SampledLaplace"](net, "classification", memory_budget="20 KiB", solver=FEW).fit([(x, y)])
    with pytest.raises(ConfigurationError, match="tangent model's optimum") as refusal:
        posterior.fit_prior_precision(**brief)
    posterior.memory_budget = re.findall(r"at least ([0-9.]+ [KM]iB)", str(refusal.value))[0]
    assert len(posterior.fit_prior_precision(**brief).tuning.steps) == 1


def test_a_selector_that_trains_keeps_to_the_budget() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))
    before = [parameter.clone() for parameter in net.parameters()]
    selector = lp.LargestVariance(10, lp.DiagonalSWAG(n_snapshots=2))
    posterior = lp.Subnetwork(net, "classification", selector, memory_budget="16 KiB")
    with pytest.raises(ConfigurationError, match="a step of training on 64 examples"):
        posterior.fit([(torch.randn(64, 20), torch.arange(64) % 2)], generator=torch.Generator().manual_seed(0))
    assert all(map(torch.equal, net.parameters(), before))
