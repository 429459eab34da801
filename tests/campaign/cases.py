"""A tiny posterior of each class, and what is compared of one."""

from __future__ import annotations

import copy
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
    "SWAG": lambda net, likelihood, **o: lp.SWAG(net, likelihood, rank=2, n_snapshots=3, n_members=2, **o),
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


def collected(net: nn.Module) -> Any:
    """Of weights along a path that somebody else went."""
    posterior, moving = CLASSES["SWAG"](net, "classification"), copy.deepcopy(net)
    for number in range(3):
        with torch.no_grad():
            moving[0].weight += 0.1 * torch.randn(4, 3, generator=seeded(number), dtype=torch.float64)
        posterior.collect(moving)
    return posterior.fit(DATA, generator=seeded())


def given(net: nn.Module) -> Any:
    count = lp.Diagonal(net, "classification").n_parameters
    return lp.Diagonal.from_variance(net, torch.linspace(0.01, 0.2, count), "classification")


FURTHER: dict[str, Callable[[nn.Module], Any]] = {
    **{
        f"{name}, continued": lambda net, name=name: fitted(name, net, DATA[:1]).continue_on(net).fit(DATA[1:])
        for name in ("Full", "KFAC", "EKFAC", "limited rank", "Diagonal", "Subnetwork", "last layer")
    },
    "SWAG, collected": collected,
    "variances that were given": given,
    "Full, around the tangent's optimum": lambda net: fitted("Full", net).fit_prior_precision(
        lp.Tangent(curvature_at="optimum", predictive_mean="tangent", max_iterations=3)
    ),
}
"""Posteriors that one fit alone does not give."""


def fitted(name: str, net: nn.Module | None = None, data: Any = DATA, **options: Any) -> Any:
    """A fitted posterior of the class; the same each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = network_of(name) if net is None else net
        if name in FURTHER:
            return FURTHER[name](net)
        if name in OTHER:
            make, likelihood = OTHER[name]
            data = REALS if name.startswith("regression") else [(x, (y > 0).double()) for x, y in REALS]
            return make(net, likelihood).fit(data)
        return CLASSES[name](net, "classification").fit(data, generator=seeded(), **options)


def calibrated(name: str = "Full", net: nn.Module | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lp.calibrate(fitted(name, net), weight_decay=0.1, generator=seeded())


def trained(train: Any, net: nn.Module, folder: Any, **options: Any) -> Any:
    """The posterior of a copy that was trained, which goes on from the folder if there is one."""
    torch.manual_seed(3)
    options |= {"epochs": 2, "checkpoint": folder, "resume": folder is not None}
    return train(copy.deepcopy(net), DATA, "classification", **options).posterior


def tuned(name: str, tuner: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda net, folder: fitted(name, net).fit_prior_precision(tuner, generator=seeded(4), checkpoint=folder)


FITS = [*SAMPLED, *(name for name in GAUSSIAN if name != "SpatialField")]
"""Classes whose fits can be continued."""
RESUMED: dict[str, Callable[[nn.Module, Any], Any]] = {
    **{name: lambda net, folder, name=name: fitted(name, net, checkpoint=folder) for name in FITS},
    "draws of Riemannian": lambda net, folder: fitted("Riemannian", net).draw(generator=seeded(2), checkpoint=folder),
    "update of KFAC": lambda net, folder: fitted("KFAC", net, DATA[:1]).update(DATA[1:], checkpoint=folder),
    "default tuning": tuned("KFAC", lp.Auto()),
    "leave-one-out": tuned("Full", lp.LeaveOneOut(1.0)),
    "validation": tuned("Diagonal", lp.Validation(DATA, grid=(0.1, 1.0), link="mc", n_samples=3)),
    "tangent": tuned("Full", lp.Tangent(max_iterations=3, predictive_mean="tangent")),
    "tangent, at its optimum": tuned("KFAC", lp.Tangent(max_iterations=3, curvature_at="optimum")),
    "sampled evidence": lambda net, folder: fitted("SampledLaplace", net).fit_prior_precision(
        lp.SampledEvidence(max_steps=2, checkpoint=folder)
    ),
    "calibration": lambda net, folder: lp.calibrate(
        fitted("Full", net), DATA, weight_decay=0.1, generator=seeded(4), checkpoint=folder
    ),
    "scaling": lambda net, folder: lp.calibrate(
        fitted("Full", net), DATA, "vector", generator=seeded(4), checkpoint=folder
    ),
    "training": lambda net, folder: trained(
        lp.train_marginal_likelihood, net, folder, posterior=lp.KFAC, frequency=1, hyper_steps=2
    ),
    "data-emphasised training": lambda net, folder: trained(lp.train_data_emphasized, net, folder),
}
"""Work that can be continued from a folder, as a posterior."""


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
