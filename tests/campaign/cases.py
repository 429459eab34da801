"""A tiny posterior of each class, and what is compared of one."""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3
DATA = [(X[:7], Y[:7]), (X[7:], Y[7:])]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0, hidden: int = 4) -> nn.Module:
    """In training mode, with a module frozen in evaluation mode."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(hidden).eval()
    result = nn.Sequential(nn.Linear(3, hidden), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(hidden, 3)).double()
    result[0].bias.requires_grad_(False)
    result.train()
    norm.eval()
    return result


def adapted(net: nn.Module) -> nn.Module:
    """The network with adapters of all linear layers, which look trained."""
    layers = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    peft = importlib.import_module("peft")
    net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=layers)).double()
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5, generator=seeded())
    return net


def network_of(name: str, seed: int = 0, hidden: int = 4) -> nn.Module:
    """A network for the class."""
    net = network(seed, hidden)
    return adapted(net) if name == ADAPTED else net


def model_of(posterior: Any) -> nn.Module:
    """The network that the posterior was made for."""
    return posterior.model if isinstance(posterior, lp.SpatialField) else posterior.network.model


BOX = torch.tensor([[-4.0] * 3, [4.0] * 3]).double()

GAUSSIAN: dict[str, Callable[..., Any]] = {
    "Full": lp.Full,
    "KFAC": lp.KFAC,
    "EKFAC": lambda net, likelihood, **o: lp.KFAC(net, likelihood, eigenvalue_corrected=True, **o),
    "limited rank": lambda net, likelihood, **o: lp.KFAC(net, likelihood, factor_rank=2, **o),
    "Diagonal": lp.Diagonal,
    "LowRank": lambda net, likelihood, **o: lp.LowRank(net, likelihood, rank=4, remainder_probes=2, **o),
    "Subnetwork": lambda net, likelihood, **o: lp.Subnetwork(net, likelihood, lp.LargestMagnitude(6), **o),
    "last layer": lambda net, likelihood, **o: lp.Full(net, likelihood, parameters="last_layer", **o),
    "SpatialField": lambda net, likelihood, **o: lp.SpatialField(net, likelihood, box=BOX, resolution=2, **o),
}

SAMPLED: dict[str, Callable[..., Any]] = {
    "NullSpace": lambda net, likelihood, **o: lp.NullSpace(net, likelihood, rows="loss", n_samples=2, **o),
    "VIKING": lambda net, likelihood, **o: lp.VIKING(net, likelihood, rows="loss", n_samples=2, **o),
    "Riemannian": lambda net, likelihood, **o: lp.Riemannian(net, likelihood, n_samples=2, prior_precision=10.0, **o),
    "MetricBNN": lambda net, likelihood, **o: lp.MetricBNN(
        net,
        likelihood,
        n_particles=2,
        n_steps=3,
        n_refinements=1,
        latent=lp.LatentModel(dimension=2, hidden=(4,), epochs=3, tolerance=10.0),
        **o,
    ),
    "SampledLaplace": lambda net, likelihood, **o: lp.SampledLaplace(net, likelihood, n_samples=2, **o),
    "ABNN": lambda net, likelihood, **o: lp.ABNN(net, likelihood, n_members=2, epochs=2, **o),
}

ADAPTED = "TrainingFreeLoRA"
FIXED: dict[str, Callable[..., Any]] = {
    "VariationalLastLayer": lambda net, likelihood, **o: lp.VariationalLastLayer(
        net, likelihood, max_iterations=20, **o
    ),
}
if importlib.util.find_spec("peft"):
    FIXED[ADAPTED] = lambda net, likelihood, **o: lp.TrainingFreeLoRA(net, likelihood, n_samples=2, halvings=3, **o)

CLASSES = GAUSSIAN | SAMPLED | FIXED
"""Gaussians of the weights' curvature; those whose fits have stages; and those of one short fit."""

REALS = [(X[:7], X[:7].sin()), (X[7:], X[7:].sin())]
OTHER: dict[str, tuple[Callable[..., Any], Any]] = {  # likelihoods
    "regression": (lp.KFAC, lp.Gaussian(torch.tensor([0.1, 0.2, 0.3]).double())),
    "regression, Full": (lp.Full, lp.Gaussian(torch.tensor([0.1, 0.2, 0.3]).double())),
    "binary": (lp.Diagonal, "binary"),
}


def fitted(name: str, net: nn.Module | None = None, data: Any = DATA, **options: Any) -> Any:
    """A fitted posterior of the class; the same each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = network_of(name) if net is None else net
        if name in OTHER:
            make, likelihood = OTHER[name]
            data = REALS if name.startswith("regression") else [(x, (y > 0).double()) for x, y in REALS]
            return make(net, likelihood).fit(data)
        return CLASSES[name](net, "classification").fit(data, generator=seeded(), **options)


def calibrated(name: str = "Full", net: nn.Module | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lp.calibrate(fitted(name, net), weight_decay=0.1, generator=seeded())


def answer(posterior: Any) -> Tensor:
    """What a user gets: probabilities, for inputs of the fit and far away."""
    x = torch.cat([X[:3], 5 * X[3:4]])
    return posterior.predictive(x, generator=seeded(5)).mean


def same(one: Tensor, other: Tensor, tolerance: float = 1e-9) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= tolerance)


class Tally:
    """How often what came of it, and the violations: outcomes in capitals, or others than are allowed."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def note(self, kind: str, detail: str, outcome: str, allowed: set[str] | None = None) -> None:
        loud = outcome.split(":")[0].isupper()
        if loud if allowed is None else outcome not in allowed:
            self.violations.append(f"{kind}, {detail}: {outcome}")
        self.counts[f"{kind}: {outcome.split(':')[0] if loud else outcome}"] += 1

    def __iadd__(self, other: Tally) -> Tally:
        self.counts += other.counts
        self.violations += other.violations
        return self

    def report(self, part: str, least: int) -> None:
        """Print a line of figures, which pytest shows with ``-s`` or ``-rP``; fail on any violation."""
        found = ", ".join(f"{what} {number}" for what, number in sorted(self.counts.items()))
        line = f"{part}: {self.counts.total()} in {time.monotonic() - self.began:.0f} s"
        sys.stdout.write(f"\n{line}, {len(self.violations)} violations; {found}\n")
        assert not self.violations, "\n".join(self.violations)
        assert self.counts.total() >= least
