"""What is computed for the file of right values: what each posterior says about small networks.

A case is a network with a recipe; it gives values of four kinds:

- ``exact``: a function of network and data, up to rounding;
- ``iterated``: eigenpairs up to the tolerance at which their search ended;
- ``tuned``: where an optimiser stopped, known up to its tolerance;
- ``sampled``: from seeded random numbers. The file has a standard error beside these: their spread over other seeds.

Names that are public but more likely to change than ``fit``, ``predictive`` and their like are in the first section.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from right_values.networks import NETWORKS, Problem, generator, normal
from torch import Tensor

import laplace_plus as lp

Values = dict[str, dict[str, Tensor]]
Recipe = Callable[["Problem", int], Values]
PATH = Path(__file__).with_name("values.npz")

# -- names that may change ---------------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[Any], Any]] = {
    "variance": lambda posterior: posterior.variance(),
    "precision": lambda posterior: posterior.precision_matrix(),
    "covariance": lambda posterior: posterior.covariance_matrix(),
    "dimension": lambda posterior: posterior.effective_dimension(),
    "layers": lambda posterior: len(posterior.layer_names),
    "samples held": lambda posterior: posterior.samples[:3],
    "null space": lambda posterior: posterior.null_space_dimension,
    "bound": lambda posterior: posterior.elbo(),
    "image std": lambda posterior: posterior.image_std,
    "kernel std": lambda posterior: posterior.kernel_std,
    "std": lambda posterior: posterior.std(normal(4, 3, seed=102)),
    "scale": lambda posterior: posterior.covariance_scale,
}


def ask(posterior: Any, *names: str) -> dict[str, Tensor]:
    """What a posterior says under these names: of estimates their values, of a bound with its terms the bound."""
    found = {name: ASKED[name](posterior) for name in names}
    found = {name: getattr(value, "value", getattr(value, "elbo", value)) for name, value in found.items()}
    return {name: torch.as_tensor(value).double() for name, value in found.items()}


# -- what posteriors say -----------------------------------------------------------------------------------------------


def predictions(posterior: Any, problem: Problem, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    found = posterior.predictive(problem.x, generator=generator(seed), **options)
    name = " ".join(["predictive", *map(str, options.values())])
    return {f"{name} mean": found.mean, f"{name} variance": found.variance}


def functional(posterior: Any, problem: Problem, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    mean, covariance = posterior.functional_posterior(problem.x, generator=generator(seed), **options)
    return {"functional mean": mean, "functional covariance": covariance}


def tuned(posterior: Any, tuner: str = "marginal_likelihood", **options: Any) -> dict[str, Tensor]:
    """What a tuning sets; the posterior stays tuned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the networks are at no optimum, and not all gain
        posterior.fit_prior_precision(tuner, **options)
    name = f"by {tuner} {options.get('structure', '')}".strip()
    found = {f"precision {name}": posterior.prior_precision}
    return found if posterior.noise_std is None else found | {f"noise {name}": posterior.noise_std}


def gaussian(problem: Problem, seed: int, *, cls: str, kind: str = "exact", tune: bool = True, **options) -> Values:
    """A Gaussian posterior: evidence, moments, functional posterior, predictive, and a tuning by the evidence."""
    posterior = problem.make(cls, **options).fit(problem.batches, generator=generator(seed))
    layers = torch.linspace(0.5, 2.0, int(ask(posterior, "layers")["layers"]), dtype=torch.float64)
    evidence = posterior.log_marginal_likelihood
    found = {"evidence": torch.stack([evidence(), evidence(0.2), evidence(layers), evidence(3.0, temperature=2.0)])}
    found |= {"mean": posterior.mean, **ask(posterior, "dimension", "variance", "precision", "covariance")}
    values = {kind: found | functional(posterior, problem) | predictions(posterior, problem)}
    if tune:
        values["tuned"] = tuned(posterior, tolerance=1e-6)
        values["tuned"] |= {"evidence tuned": posterior.log_marginal_likelihood(), **predictions(posterior, problem)}
    return values


def random(problem: Problem, seed: int, *, cls: str, **options: Any) -> Values:
    """A Gaussian posterior that depends on random numbers."""
    posterior = problem.make(cls, **options).fit(problem.batches, generator=generator(seed))
    found = {"evidence": posterior.log_marginal_likelihood(), **ask(posterior, "variance")}
    return {"sampled": found | functional(posterior, problem) | tuned(posterior, tolerance=1e-6)}


def updated(problem: Problem, seed: int, *, cls: str, **options: Any) -> Values:
    """In two calls in place of one fit; in the first as many rows as make the bases of corrected eigenvalues unique."""
    posterior = problem.make(cls, **options)
    posterior.update(problem.batches[:2]).update(problem.batches[2:])
    return {"exact": {"evidence": posterior.log_marginal_likelihood(), **functional(posterior, problem)}}


def links(problem: Problem, seed: int, *, cls: str, closed: tuple[str, ...] = ()) -> Values:
    """Links other than the default, sampled networks, draws of the weights, and joint covariances."""
    posterior = problem.make(cls).fit(problem.batches)
    exact = {"joint": functional(posterior, problem, joint=True)["functional covariance"]}
    for link in closed:
        exact |= predictions(posterior, problem, link=link)
    sampled = {"samples": posterior.sample(3, generator=generator(seed))}
    sampled |= predictions(posterior, problem, seed, link="mc")
    return {"exact": exact, "sampled": sampled | predictions(posterior, problem, seed, method="sampled")}


def tunings(problem: Problem, seed: int, *, cls: str) -> Values:
    """Other tuners and structures of the prior, each after a fit of its own, and what is chosen by default."""
    found, precise = {}, {"tolerance": 1e-6}
    options = [{"structure": "layerwise", **precise}, {"tuner": "mackay", **precise}, {"tuner": "tangent", **precise}]
    for own in [*options, {"tuner": "validation", "data": problem.batches[:1]}, {"tuner": "auto"}]:
        posterior = problem.make(cls).fit(problem.batches)
        found |= tuned(posterior, generator=generator(seed), **own)
    return {"tuned": found | ask(posterior, "scale") | predictions(posterior, problem)}


def left_out(problem: Problem, seed: int, *, cls: str, **options: Any) -> Values:
    found = lp.leave_one_out(problem.make(cls, prior_precision=4.0).fit(problem.batches), **options)
    return {"exact": {name: getattr(found, name) for name in ("mean", "covariance", "leverages")}}


def by_samples(problem: Problem, seed: int, *, cls: str, asked=(), tune: str | None = None, **options: Any) -> Values:
    """A posterior that is made of samples: some of them, its predictions, and what else it is asked."""
    source = generator(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lp.errors.NoGainWarning)
        posterior = problem.make(cls, **options).fit(problem.batches, generator=source)
    found = {"samples": posterior.sample(3, generator=source), "mean": posterior.mean, **ask(posterior, *asked)}
    found |= predictions(posterior, problem, seed, n_samples=20)
    return {"sampled": found | (tuned(posterior, tune) if tune else {})}


def variational(problem: Problem, seed: int, **options: Any) -> Values:
    posterior = problem.make("VariationalLastLayer", **options).fit(problem.batches)
    found = {"mean": posterior.mean, **ask(posterior, "bound")}
    found |= functional(posterior, problem) | predictions(posterior, problem)
    found = {f"{name}, fitted": value for name, value in found.items()}
    kind = "exact" if problem.likelihood == "regression" else "tuned"  # a closed form
    return {kind: found} | {"tuned": ({} if kind == "exact" else found) | tuned(posterior, "elbo")}


def field(problem: Problem, seed: int, *, structure: str) -> Values:
    """A field in space, shown at its displaced points."""
    options: dict[str, Any] = {"box": [[-2.0] * 3, [2.0] * 3], "resolution": 2, "structure": structure}
    posterior = lp.SpatialField(problem.model, lp.Gaussian(0.4), **options).fit(problem.batches)
    found = {"evidence": posterior.log_marginal_likelihood(), **ask(posterior, "std", "variance")}
    return {"exact": found | functional(posterior, problem) | predictions(posterior, problem)}


# -- the cases ---------------------------------------------------------------------------------------------------------

UNTUNED = partial(gaussian, tune=False)
ALL = tuple(NETWORKS)[:-1]  # all but the adapter
FEW = ("curve", "classes", "conv group norm", "tied", "positions")
SHARED, NORMALISED = ("conv group norm", "encoder", "positions"), ("conv group norm", "conv batch norm", "residual")
FISHER, TARGETS = lp.Native("empirical_fisher"), lp.Native("ggn_mc", n_samples=5)
PAIRS: dict[str, Any] = {"rank": 6, "tolerance": 1e-10}
BY_SGD = lp.LargestVariance(12, variances=lp.DiagonalSWAG(n_snapshots=4))
HELD = partial(by_samples, asked=("samples held",))
EXACT: dict[str, Any] = {"cls": "NullSpace", "projector": "svd", "n_samples": 10, "tune": "marginal_likelihood"}
NULL_SPACE = partial(by_samples, **EXACT, asked=("samples held", "null space"))
VIKING = partial(by_samples, cls="VIKING", asked=("bound", "image std", "kernel std"))
DIFFUSION = {"name": "diffusion", "n_steps": 4, "rank": 5}
PATHS = partial(by_samples, cls="MetricBNN", n_particles=4, n_steps=6, n_refinements=2, learning_rate="auto")
LATENT = {"dimension": 3, "hidden": (8,), "epochs": 20, "tolerance": 10.0}
RECIPES: list[tuple[str, Recipe, tuple[str, ...]]] = [
    ("Full", partial(gaussian, cls="Full"), ALL),
    ("KFAC", partial(gaussian, cls="KFAC"), ALL),
    ("EKFAC", partial(gaussian, cls="KFAC", eigenvalue_corrected=True), ALL),
    ("Diagonal", partial(gaussian, cls="Diagonal"), ALL),
    ("LowRank", partial(UNTUNED, cls="LowRank", kind="iterated", **PAIRS, remainder_probes=0), FEW),
    ("Full, last layer", partial(UNTUNED, cls="Full", parameters="last_layer"), ALL),
    ("KFAC, last layer", partial(UNTUNED, cls="KFAC", parameters="last_layer"), ALL),
    ("Diagonal, last layer", partial(UNTUNED, cls="Diagonal", parameters="last_layer"), ALL),
    ("Full, links", partial(links, cls="Full"), ("curve", "table")),
    ("Full, links", partial(links, cls="Full", closed=("probit", "network")), ("binary", "encoder")),
    ("KFAC, links", partial(links, cls="KFAC", closed=("probit", "bridge", "network")), ("classes", "conv batch norm")),
    ("Full, tunings", partial(tunings, cls="Full"), ("curve", "classes")),
    ("KFAC, tunings", partial(tunings, cls="KFAC"), ("two outputs", "residual")),
    ("Full, leave-one-out", partial(left_out, cls="Full"), ("curve", "classes", "tied", "table")),
    ("KFAC, leave-one-out", partial(left_out, cls="KFAC"), ("two outputs", "binary")),
    ("KFAC, leave-one-out", partial(left_out, cls="KFAC", leverages="full"), ("conv group norm",)),
    ("Full, updated", partial(updated, cls="Full"), ("two outputs", "tied")),
    ("KFAC, updated", partial(updated, cls="KFAC"), ("conv group norm", "tokens")),
    ("EKFAC, updated", partial(updated, cls="KFAC", eigenvalue_corrected=True), ("classes",)),
    ("Diagonal, updated", partial(updated, cls="Diagonal"), ("residual",)),
    ("KFAC, reduce", partial(UNTUNED, cls="KFAC", weight_sharing="reduce"), SHARED),
    ("KFAC, diagonal output factor", partial(UNTUNED, cls="KFAC", output_factor="diagonal"), ("classes", "tokens")),
    ("KFAC, factor rank", partial(UNTUNED, cls="KFAC", factor_rank=3), ("classes",)),
    ("KFAC, first layer", partial(UNTUNED, cls="KFAC", parameters=["0.*"]), ("classes", "conv batch norm")),
    ("Full, weights", partial(UNTUNED, cls="Full", parameters=lambda name, _: "weight" in name), ("residual",)),
    ("Full, Fisher", partial(UNTUNED, cls="Full", backend=FISHER), ("classes", "tied")),
    ("KFAC, Fisher", partial(UNTUNED, cls="KFAC", backend=FISHER), ("residual",)),
    ("Full, sampled Fisher", partial(random, cls="Full", backend=TARGETS), ("classes",)),
    ("KFAC, sampled Fisher", partial(random, cls="KFAC", backend=TARGETS), ("classes", "tokens")),
    ("LowRank, remainder", partial(random, cls="LowRank", **PAIRS), ("classes", "conv group norm")),
    ("Subnetwork, magnitude", partial(gaussian, cls="Subnetwork", selector=lp.LargestMagnitude(12)), ("curve", "tied")),
    ("Subnetwork, variance", partial(gaussian, cls="Subnetwork", selector=lp.LargestVariance(12)), ("classes",)),
    ("Subnetwork, random", partial(gaussian, cls="Subnetwork", selector=lp.Random(12, seed=0)), ("residual",)),
    ("Subnetwork, SWAG", partial(random, cls="Subnetwork", selector=BY_SGD, posterior="KFAC"), ("curve", "classes")),
    ("NullSpace, logits", partial(NULL_SPACE, rows="logit"), ("curve", "conv group norm")),
    ("NullSpace, curvature", partial(NULL_SPACE, rows="ggn"), ("classes",)),
    ("NullSpace, losses", partial(NULL_SPACE, rows="loss"), ("residual",)),
    ("VIKING", partial(VIKING, projector="svd", n_samples=6), ("curve", "classes")),
    ("VIKING, trained", partial(VIKING, mode=lp.ELBOTraining(epochs=3, scale_epochs=1), n_samples=4), ("curve",)),
    ("Riemannian", partial(HELD, cls="Riemannian", n_samples=3, prior_precision=10.0), ("curve", "classes")),
    ("Riemannian, diffusion", partial(HELD, cls="Riemannian", n_samples=3, method=DIFFUSION), ("curve", "classes")),
    ("MetricBNN", partial(PATHS, latent=LATENT), ("curve", "classes")),
    ("MetricBNN, paths", partial(PATHS, sampling="exploration"), ("curve",)),
    ("MetricBNN, moments", partial(PATHS, sampling="gaussian"), ("curve",)),
    ("SampledLaplace", partial(HELD, cls="SampledLaplace", tune="mackay"), ("classes", "residual")),
    ("SampledLaplace, SGD", partial(HELD, cls="SampledLaplace", solver="sgd"), ("classes",)),
    ("ABNN", partial(by_samples, cls="ABNN", n_members=2, epochs=2), NORMALISED),
    ("SWAG", partial(by_samples, cls="SWAG", n_snapshots=5, rank=3, n_members=4), ("curve", "conv batch norm")),
    ("VariationalLastLayer", variational, ("curve", "classes")),
    ("VariationalLastLayer, Student-t", partial(variational, noise="student_t", mean="optimal"), ("two outputs",)),
    ("VariationalLastLayer, Jensen", partial(variational, bound="jensen", covariance="diagonal"), ("residual",)),
    ("SpatialField", partial(field, structure="diagonal"), ("two outputs",)),
    ("SpatialField, blocks", partial(field, structure="block"), ("two outputs",)),
    ("TrainingFreeLoRA", partial(by_samples, cls="TrainingFreeLoRA", n_samples=4, halvings=6), ("adapter",)),
]
CASES: dict[str, tuple[str, Recipe]] = {
    f"{network}: {name}": (network, recipe) for name, recipe, networks in RECIPES for network in networks
}


def values(case: str, seed: int = 0) -> dict[str, Tensor]:
    """All values of a case by kind and name, flat; long ones as every n-th entry, mean and root mean square."""
    network, recipe = CASES[case]
    return {
        f"{kind}, {name}": shortened(value.detach().cpu().double().flatten())
        for kind, group in recipe(Problem.of(network), seed).items()
        for name, value in group.items()
    }


def shortened(value: Tensor, most: int = 36) -> Tensor:
    if len(value) <= most:
        return value
    return torch.cat([value[:: -(-len(value) // most)], value.mean()[None], value.square().mean().sqrt()[None]])
