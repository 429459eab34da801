"""Fits, predictions, samples and evidence: what is compared with what."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import limits_factors as factors
import limits_predictive as predictive
import peers
import torch
from cases_last_layer import frozen, heads, last_layer
from cases_transformers import transformers
from fitting import fit, fit_and_decompose, relative
from models import Problem, build, friedman
from tasks import Target, Task
from torch import Tensor

import laplace_plus as lp

BATCHED = "1 forward + C backward to layer outputs"
TO_WEIGHTS = "1 forward + C backward to weights"
BY_HAND = "the same covariance in plain torch, norms left out"


def _by_hand(
    problem: Problem, kind: type[lp.GaussianPosterior], x: Tensor, precision: float = 1.0
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The limit's prediction at x, by a posterior of its own."""
    if kind is lp.KFAC:
        return partial(predictive.kronecker_predictive, problem, predictive.decomposed(problem, precision), x)
    variances = [1 / (diagonal + precision) for diagonal in predictive.diagonal_curvature(problem)]
    return partial(predictive.diagonal_predictive, problem, variances, x)


def _agreement(problem: Problem, kind: type[lp.GaussianPosterior]) -> float:
    """How far fits to some of the data and the predictions that follow are apart, in float64."""
    part, precision = problem.take(256).double(), 1e-3  # the curvature must count
    x = part.inputs[:8]
    ours = fit(part, kind, prior_precision=precision).functional_posterior(x).covariance
    return relative(ours, _by_hand(part, kind, x, precision)()[1])


def _has_norms(problem: Problem) -> bool:
    """Whether the limit, which knows linear and convolutional layers only, lacks something."""
    known = sum(p.numel() for m in problem.model.modules() if isinstance(m, factors.LAYERS) for p in m.parameters())
    return known != sum(p.numel() for p in problem.model.parameters())


# -- fits --------------------------------------------------------------------------------------------------------------


def kfac_fit(problem: Problem) -> Iterator[Task]:
    """KFAC from the exact Gauss-Newton matrix, decomposed."""
    yield Task(
        "kfac_fit",
        f"KFAC exact fit, N={len(problem.inputs)}",
        problem,
        lambda: fit_and_decompose(problem, lp.KFAC),
        lambda: factors.kronecker_fit(problem, monte_carlo=False),
        f"{BATCHED} + Gram products + eigh",
        Target(1.3 if _has_norms(problem) else 1.15),
        {"factors only (limit)": lambda: factors.kronecker_factors(problem, monte_carlo=False)},
        {
            "curvlinops": (peers.curvlinops_factors(problem, monte_carlo=False), 1),
            "laplace-torch": (peers.fit(problem, "kron"), 1),
            "laplace-torch, BackPACK": (peers.fit(problem, "kron", backend="BackPackGGN"), 1),
        },
        None if _has_norms(problem) else partial(_agreement, problem, lp.KFAC),
    )


def kfac_mc_fit(problem: Problem) -> Iterator[Task]:
    """KFAC from the Fisher matrix with sampled labels, decomposed."""
    yield Task(
        "kfac_mc_fit",
        f"KFAC Monte Carlo fit, N={len(problem.inputs)}",
        problem,
        lambda: fit_and_decompose(problem, lp.KFAC, backend=lp.Native("ggn_mc")),
        lambda: factors.kronecker_fit(problem, monte_carlo=True),
        "1 forward + 1 backward to layer outputs + Gram products + eigh",
        Target(1.15),
        {"factors only (limit)": lambda: factors.kronecker_factors(problem, monte_carlo=True)},
        {
            "curvlinops": (peers.curvlinops_factors(problem, monte_carlo=True), 1),
            "laplace-torch, stochastic": (peers.fit(problem, "kron", backend_kwargs={"stochastic": True}), 1),
        },
    )


def kfac_mc_factors(problem: Problem) -> Iterator[Task]:
    """The sums alone, without decompositions, on the sizes that other packages were measured on."""
    n, ratio = {"mlp1024": (512, 0.7), "resnet18": (64, 0.6), "vit_tiny": (32, 1.1)}[problem.name]
    part = problem.take(n)

    def streaming() -> list[Tensor]:
        with factors.frozen(part.model):
            return factors.streamed_factors(part)

    yield Task(
        "kfac_mc_factors",
        f"KFAC Monte Carlo factors, N={n}",
        part,
        lambda: fit(part, lp.KFAC, backend=lp.Native("ggn_mc")),
        lambda: factors.kronecker_factors(part, monte_carlo=True),
        "1 forward + 1 backward to layer outputs + Gram products",
        Target(ratio, peak_ratio=1.0, peak_of="streaming"),
        {"streaming": streaming},
        {"curvlinops": (peers.curvlinops_factors(part, monte_carlo=True), 1)},
    )


def ekfac_fit(problem: Problem) -> Iterator[Task]:
    """Eigenvalue-corrected KFAC, in units of ordinary training."""
    part = problem.take(512)
    yield Task(
        "ekfac_fit",
        "EKFAC Monte Carlo fit, N=512",
        part,
        lambda: fit(part, lp.KFAC, eigenvalue_corrected=True, backend=lp.Native("ggn_mc")),
        part.epoch,
        "1 forward + backward",
        Target(8),
        {"EKFAC exact fit (ours)": lambda: fit(part, lp.KFAC, eigenvalue_corrected=True)},
    )


def diagonal_fit(problem: Problem) -> Iterator[Task]:
    """The exact diagonal."""

    def limit() -> None:
        for inputs, _ in problem.batches:
            factors.directions_to_weights(problem, inputs)

    n = len(problem.inputs)
    yield Task(
        "diagonal_fit",
        f"Diagonal fit, N={n}",
        problem,
        lambda: fit(problem, lp.Diagonal),
        limit,
        TO_WEIGHTS,
        Target({"mlp1024": 0.55}.get(problem.name, 1.0)),
        {"by hand": lambda: predictive.diagonal_curvature(problem), "BackPACK": peers.backpack_diagonal(problem)},
        {
            "laplace-torch": (peers.fit(problem, "diag", n_data=problem.batch_size), n / problem.batch_size),
            "laplace-torch, BackPACK": (peers.fit(problem, "diag", backend="BackPackGGN"), 1),
        },
        partial(_agreement, problem, lp.Diagonal),
    )


# -- predictions -------------------------------------------------------------------------------------------------------


def _predict(problem: Problem, kind: type[lp.GaussianPosterior], structure: str, name: str) -> Iterator[Task]:
    # The link costs next to nothing: the limits are those of covariances. benchmarks/defaults/links.py times links.
    x = problem.probe(64)
    batch = Problem(**(vars(problem) | {"inputs": x, "targets": problem.targets[:1].expand(64)}))
    posterior = fit_and_decompose(problem, kind, tuned=True)
    others = {
        "functional_posterior": lambda: posterior.functional_posterior(x),
        "variances only": lambda: posterior.functional_posterior(x, outputs="diagonal"),
    }
    quantity = f"Linearised {kind.__name__} predictive, B=64"
    check: Callable[[], float] | None = None
    if _has_norms(problem):
        target = Target(4, peak_mb=3e3) if problem.name == "resnet18" else Target(3, peak_mb=4e3)
        limit, limit_is = (lambda: factors.directions_to_outputs(problem, x)), BATCHED
        del others["functional_posterior"]  # a minute's work less
        if kind is lp.KFAC and problem.name == "vit_tiny":
            others[BY_HAND] = _by_hand(problem, kind, x)
            others["its operations alone, without copies"] = lambda: predictive.kronecker_operations(problem, x)
        others[TO_WEIGHTS] = lambda: factors.directions_to_weights(problem, x)
    else:
        exact = kind is lp.KFAC
        limit, limit_is = _by_hand(problem, kind, x), "exact C × C covariance layer by layer, no Jacobian"
        target = Target(1.3, peak_ratio=2.0 if exact else None)
        others[BATCHED] = lambda: factors.directions_to_outputs(problem, x)
        check = partial(_agreement, problem, kind)

    theirs = {"laplace-torch": (peers.predict(problem, structure, x), 1.0)}
    if problem.name == "mlp1024" and structure == "diag":
        theirs = {}  # its fit takes a quarter of an hour
    predict = partial(posterior.predictive, x, link="probit")
    yield Task(name, quantity, batch, predict, limit, limit_is, target, others, theirs, check)


def kfac_predict(problem: Problem) -> Iterator[Task]:
    """Predictions with the exact covariance of all outputs."""
    yield from _predict(problem, lp.KFAC, "kron", "kfac_predict")


def diagonal_predict(problem: Problem) -> Iterator[Task]:
    """The same with independent weights."""
    yield from _predict(problem, lp.Diagonal, "diag", "diagonal_predict")


def many_classes(problem: Problem) -> Iterator[Task]:
    """All weights of networks of a thousand classes: the exact fit, and the default prediction, from samples."""
    x = problem.inputs
    if problem.name == "mlp_1000":
        name = f"1000-class KFAC exact fit, N={len(x)}"
        limit = partial(factors.kronecker_factors, problem, monte_carlo=False)
        ours = partial(fit, problem, lp.KFAC)
        theirs: dict[str, tuple[Callable[[], Callable[[], Any]], float]] = {
            "curvlinops": (peers.curvlinops_factors(problem, monte_carlo=False), 1),
            "laplace-torch, BackPACK": (peers.fit(problem, "kron", backend="BackPackGGN"), 1),
        }
        limit_is = f"{BATCHED} + Gram products"
        yield Task("many_classes", name, problem, ours, limit, limit_is, Target(1.3), peers=theirs)
        return
    posterior = fit_and_decompose(problem, lp.KFAC, backend=lp.Native("ggn_mc"))
    best = problem.model(x).detach().topk(5).indices
    others = {
        "5 best classes, exact": lambda: posterior.functional_posterior(x, outputs=best),
        "5 draws of the weights alone": lambda: posterior.sample(5),
    }
    name = f"1000-class KFAC predictive, all weights, B={len(x)}"
    predict = partial(posterior.predictive, x)
    target = Target(30, peak_mb=4e3)
    yield Task("many_classes", name, problem, predict, problem.forward, "1 forward", target, others, passes=False)


def small_predict(problem: Problem) -> Iterator[Task]:
    """One input of a tiny network, by the default link: what calls cost, whatever they compute."""
    x = problem.probe(1)
    one = Problem(**(vars(problem) | {"inputs": x, "targets": problem.targets[:1]}))
    kinds = {"KFAC": (lp.KFAC, "all"), "Full": (lp.Full, "all"), "Diagonal": (lp.Diagonal, "all")}
    for name, (kind, selection) in (kinds | {"last layer": (lp.KFAC, "last_layer")}).items():
        posterior = fit(problem, kind, parameters=selection)
        predict = partial(posterior.predictive, x)
        yield Task("small_predict", f"{name} predictive, B=1", one, predict, one.forward, "1 forward", Target(8))
    if problem.likelihood == "regression":
        explored = fit(problem, lp.MetricBNN)
        predict = partial(explored.predictive, x)

        def networks() -> None:
            for _ in range(100):
                one.forward()

        name = "MetricBNN predictive, 100 networks, B=1"
        yield Task("small_predict", name, one, predict, networks, "100 forwards", Target(1))


# -- hyperparameters and samples ---------------------------------------------------------------------------------------


def _evidence_by_hand(problem: Problem, posterior: lp.GaussianPosterior) -> tuple[predictive.Evidence, Tensor | None]:
    """The evidence from eigenvalues, and the dense curvature that they are of, if there is one."""
    with torch.no_grad():
        likely = sum(_log_likelihood(problem, *batch).item() for batch in problem.batches)
    matrix = None
    if isinstance(posterior, lp.Full):
        matrix = posterior.precision_matrix() - torch.eye(posterior.n_parameters)
        values = [torch.linalg.eigvalsh(matrix)]
    else:
        pairs = [own.eigen() for own in factors.kronecker_factors(problem, monte_carlo=False)]
        values = [left[:, None] * right for left, _, right, _ in pairs]
    return predictive.Evidence(values, posterior.mean.double().square().sum().item(), likely), matrix


def _hundred(posterior: lp.GaussianPosterior, points: Tensor) -> list[tuple[float, float]]:
    """The evidence and its derivative at logarithms of the prior precision."""
    result = []
    for point in points:
        logarithm = point.clone().requires_grad_()
        value = posterior.log_marginal_likelihood(logarithm.exp())
        value.backward()
        assert logarithm.grad is not None
        result.append((value.item(), logarithm.grad.item()))
    return result


def evidence(problem: Problem) -> Iterator[Task]:
    """The evidence and its gradient at a hundred prior precisions."""
    kind = lp.Full if problem.name == "mlp50" else lp.KFAC
    points = torch.linspace(-3, 3, 100, dtype=torch.float64)
    fitted = fit(problem, kind)
    posterior = copy.deepcopy(fitted)
    posterior.sample(1)
    by_hand, matrix = _evidence_by_hand(problem, posterior)
    double = predictive.Evidence([v.double() for v in by_hand.values], by_hand.squared_norm, by_hand.log_likelihood)

    def hundred(what: predictive.Evidence) -> list[tuple[float, float]]:
        return [what.value_and_gradient(point) for point in points.tolist()]

    def check() -> float:
        part = problem.take(256).double()
        own = fit(part, kind)
        both = zip(_hundred(own, points), hundred(_evidence_by_hand(part, own)[0]), strict=True)
        return max(abs(a - b) / (1 + abs(b)) for first, second in both for a, b in zip(first, second, strict=True))

    name = f"100 evidence steps, {kind.__name__} P={posterior.n_parameters}"
    others: dict[str, Callable[[], Any]] = {"in float64 by hand": lambda: hundred(double)}
    theirs = {"laplace-torch": (peers.tune(problem, "full" if kind is lp.Full else "kron", 100), 1.0)}
    limit_is = "value and closed-form gradient from eigenvalues"

    def steps() -> list[tuple[float, float]]:
        return _hundred(posterior, points)

    if matrix is None:
        limit = partial(hundred, by_hand)
        yield Task("evidence", name, problem, steps, limit, limit_is, Target(1.5), others, theirs, check)
        return

    def with_eigenvalues() -> None:
        torch.linalg.eigvalsh(matrix)
        hundred(by_hand)

    yield Task(
        "evidence",
        f"{name}, from the fit on",
        problem,
        lambda: _hundred(copy.deepcopy(fitted), points),
        with_eigenvalues,
        f"eigvalsh once, {limit_is}",
        Target(1.5),
        others | {"the steps alone (ours)": steps},
        theirs,
        check,
    )


def _log_likelihood(problem: Problem, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of one batch, constants included; regression with a noise level of one."""
    outputs = problem.model(inputs).double()
    if problem.likelihood == "classification":
        return -torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    return torch.distributions.Normal(outputs, 1.0).log_prob(targets.double()).sum()


def kfac_samples(problem: Problem) -> Iterator[Task]:
    """Draws from the posterior."""
    posterior = fit_and_decompose(problem, lp.KFAC)
    known = predictive.decomposed(problem)

    def check() -> float:
        # In units of standard errors: the second moments of a few hundred entries, from draws that share no noise.
        generator = torch.Generator().manual_seed(0)
        mean, variance = posterior.mean[:256], posterior.variance()[:256]
        drawn = torch.cat([posterior.sample(100, generator=generator)[:, :256] for _ in range(3)]) - mean
        hand = torch.cat([predictive.kronecker_samples(problem, known, 100)[:, :256] for _ in range(3)]) - mean
        error = math.sqrt(2 / (300 * 256))  # they are nearly independent
        return max(abs((d.square() / variance).mean().item() - 1) / error for d in (drawn, hand))

    yield Task(
        "kfac_samples",
        "100 KFAC samples",
        problem,
        lambda: posterior.sample(100),
        lambda: predictive.kronecker_samples(problem, known, 100),
        "white noise, scaled, and 2 products for each sample and layer",
        Target(1.1),
        peers={"laplace-torch": (peers.samples(problem, "kron", 100), 1)},
        check=check,
    )


# -- closed forms and few data -----------------------------------------------------------------------------------------


def closed_forms(problem: Problem) -> Iterator[Task]:
    """A precision for each weight; null spaces and leading eigenpairs of few data."""
    if problem.name == "mlp1024":
        yield _entries(problem)
        return
    if problem.name == "mlp32":
        inputs, targets = friedman(500, torch.Generator().manual_seed(3))
        problem = Problem(**(vars(problem) | {"inputs": inputs, "targets": targets}))
    together, x = [(problem.inputs, problem.targets)], problem.inputs

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(problem.model, weights, (x,))[:, 0]

    def null_space() -> Tensor:
        blocks = torch.func.jacrev(outputs)(dict(problem.model.named_parameters()))
        rows = torch.cat([block.flatten(1) for block in blocks.values()], 1).double()
        values, left = torch.linalg.eigh(rows @ rows.T)
        kept = values > 1e-12 * values[-1]
        basis = (left[:, kept] / values[kept].sqrt()).T @ rows
        noise = torch.randn(30, basis.shape[1], dtype=torch.float64)
        return noise - noise @ basis.T @ basis

    def low_rank(batches: Any) -> lp.LowRank:
        return lp.LowRank(problem.model, problem.likelihood).fit(batches, generator=torch.Generator().manual_seed(0))

    n, many = len(x), len(problem.batches)
    for kind, target in ((lp.NullSpace, Target(1.5)), (lp.VIKING, None)):
        yield Task(
            "closed_forms",
            f"{kind.__name__} fit, N={n}",
            problem,
            lambda kind=kind: kind(problem.model, problem.likelihood).fit(problem.batches),
            null_space,
            "the Jacobian, eigh of its Gram matrix, 30 vectors projected",
            target,
        )
    yield Task(
        "closed_forms",
        f"LowRank(50) fit, N={n} in {many} batches",
        problem,
        lambda: low_rank(problem.batches),
        lambda: low_rank(together),
        "laplace_plus' own, all data in one batch",
        Target(1.15),
    )


def _entries(problem: Problem) -> Task:
    """The best prior precision of each weight, for a diagonal curvature."""

    def by_hand(posterior: lp.Diagonal) -> Tensor:
        h, squares = 1 / posterior.variance().double() - 1, posterior.mean.double().square()
        share = h * squares
        return 2 * h / (share + (share.square() + 4 * share).sqrt())

    def tuned(posterior: lp.GaussianPosterior) -> Tensor:
        posterior.fit_prior_precision("marginal_likelihood", structure="diagonal")
        return posterior.prior_precision

    def check() -> float:
        posterior = fit(problem.take(64).double(), lp.Diagonal)
        hand = by_hand(posterior)
        ours = tuned(posterior)
        inside = (posterior.mean != 0) & (hand > 2 * ours.min())
        return (ours / hand - 1)[inside].abs().max().item()

    fitted = fit(problem, lp.Diagonal)
    return Task(
        "closed_forms",
        f"a prior precision for each of {fitted.n_parameters} weights",
        problem,
        lambda: tuned(copy.deepcopy(fitted)),
        lambda: by_hand(fitted),
        "the closed form alone, in float64",
        Target(30.0),
        check=check,
    )


CASES: dict[str, tuple[Callable[[Problem], Iterator[Task]], tuple[str, ...]]] = {
    "kfac_fit": (kfac_fit, ("mlp1024", "lenet", "resnet18", "vit_tiny")),
    "kfac_mc_fit": (kfac_mc_fit, ("mlp1024", "lenet")),
    "kfac_mc_factors": (kfac_mc_factors, ("mlp1024", "resnet18", "vit_tiny")),
    "ekfac_fit": (ekfac_fit, ("mlp1024",)),
    "diagonal_fit": (diagonal_fit, ("mlp1024", "lenet")),
    "kfac_predict": (kfac_predict, ("mlp1024", "lenet", "resnet18", "vit_tiny")),
    "diagonal_predict": (diagonal_predict, ("mlp1024", "lenet", "resnet18", "vit_tiny")),
    "small_predict": (small_predict, ("mlp32", "mlp32_2")),
    "many_classes": (many_classes, ("mlp_1000", "resnet50")),
    "evidence": (evidence, ("mlp50", "mlp1024", "lenet")),
    "kfac_samples": (kfac_samples, ("mlp1024",)),
    "closed_forms": (closed_forms, ("mlp1024", "mlp32", "mlp50")),
    "last_layer": (last_layer, ("resnet18_1000",)),
    "heads": (heads, ("gpt2", "unet")),
    "transformers": (transformers, ("distilbert", "lora")),
    "frozen": (frozen, ("mlp32", "mlp32_2", "resnet18")),
}


def tasks(case: str, model: str, networks: Path) -> Iterator[Task]:
    """Everything of one case on one network, set up one after the other."""
    yield from CASES[case][0](build(model, networks))
