"""Last layers: of a thousand classes, tied to a table of tokens, or of each pixel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import limits_predictive as predictive
import peers
import torch
from fitting import fit, fit_and_decompose, relative
from models import Problem
from tasks import Target, Task
from torch import Tensor

import laplace_plus as lp


def _head_agreement(problem: Problem, x: Tensor) -> float:
    """How far variances of the outputs are apart, in float64."""
    part, x = problem.take(48).double(), x[:48].double()
    posterior = fit(part, lp.Full, parameters="last_layer")
    ours = posterior.functional_posterior(x, outputs="diagonal").covariance
    return relative(ours, predictive.head_predictive(part, x))


def last_layer(problem: Problem) -> Iterator[Task]:
    """Fit and prediction with a last layer of a thousand classes."""
    x = problem.probe(256)
    for kind, structure in ((lp.KFAC, "kron"), (lp.Diagonal, "diag"), (lp.Full, "full")):

        def fitted(kind: type[lp.GaussianPosterior] = kind) -> lp.GaussianPosterior:
            return fit(problem, kind, parameters="last_layer")

        def first(fitted: Callable[[], lp.GaussianPosterior] = fitted) -> None:
            fitted().predictive(x, link="probit")

        def twice() -> None:
            problem.forward()
            problem.forward()

        try:
            posterior = fit_and_decompose(problem, kind, tuned=True, parameters="last_layer")
        except (lp.errors.LaplacePlusError, RuntimeError) as error:
            failure = error

            def predict(error: Exception = failure) -> None:
                raise error
        else:

            def predict(posterior: lp.GaussianPosterior = posterior) -> None:
                posterior.predictive(x, link="probit")

        once, both = "1 forward over the same images", "2 forwards over the same images"
        for words, call, peer, limit, limit_is in (
            ("fit", fitted, peers.fit(problem, structure, subset="last_layer"), problem.forward, once),
            ("fit and first predict 256", first, None, twice, both),
            ("predict 256", predict, peers.predict(problem, structure, x, subset="last_layer"), problem.forward, once),
        ):
            yield Task(
                "last_layer",
                f"1000-class last layer, {kind.__name__}: {words}",
                problem,
                call,
                limit,
                limit_is,
                Target(3, peak_mb=2e3),
                peers={"laplace-torch": (peer, 1)} if peer else {},
            )
        if kind is lp.Full:
            as_ours = partial(predictive.head_predictive, problem, x, dtype=torch.float64)
            yield Task(
                "last_layer",
                "1000-class last layer, Full: fit and first predict 256, by class",
                problem,
                first,
                lambda: predictive.head_predictive(problem, x),
                "2 forwards, an N × N inverse and 2 products with it for each class",
                Target(1.15, peak_mb=2e3),
                {
                    "the limit, in float64 as ours": as_ours,
                    "forwards, inverses and products alone": lambda: predictive.head_operations(problem, x),
                },
                check=partial(_head_agreement, problem, x),
            )


def heads(problem: Problem) -> Iterator[Task]:
    """A tied head of 50 257 tokens, a convolution as the head of each pixel, as last layers."""
    tokens = problem.name == "gpt2"
    x = problem.probe(4 if tokens else 1)
    batch = Problem(**(vars(problem) | {"inputs": x, "targets": problem.targets[: len(x)]}))
    best = problem.model(x).detach().topk(5).indices
    for kind in (lp.KFAC, lp.Diagonal):
        posterior = fit_and_decompose(problem, kind, tuned=True, parameters="last_layer")

        def fitted(kind: type[lp.GaussianPosterior] = kind) -> lp.GaussianPosterior:
            return fit(problem, kind, parameters="last_layer")

        def predict(posterior: lp.GaussianPosterior = posterior) -> Any:
            return posterior.functional_posterior(x, outputs=best) if tokens else posterior.predictive(x, link="gumbel")

        limit, limit_is = (problem.epoch, "1 forward + backward") if tokens else (problem.forward, "1 forward")
        name = f"{'Tied' if tokens else 'Pixels’'} head, {kind.__name__}"
        structure = "kron" if kind is lp.KFAC else "diag"
        theirs = {"laplace-torch": (peers.fit(problem, structure, subset="last_layer"), 1)}
        target = Target(1.5 if tokens else 4, peak_mb=4e3)
        yield Task("heads", f"{name}: fit", problem, fitted, limit, limit_is, target, peers=theirs)
        what, target = ("5 best tokens", Target(1.5, peak_mb=4e3)) if tokens else ("predict", Target(3, peak_mb=1e3))
        yield Task("heads", f"{name}: {what}", batch, predict, batch.forward, "1 forward", target)
        if not tokens:

            def information(predict: Callable[[], Any] = predict) -> None:
                predict().mutual_information()

            what, target = f"{name}: predict, mutual information", Target(math.inf, peak_mb=1e3)
            yield Task("heads", what, batch, information, batch.forward, "1 forward", target)


def frozen(problem: Problem) -> Iterator[Task]:
    """One input through a frozen last layer, eager and traced, beside the network treated likewise."""
    x = problem.probe(1)
    one = Problem(**(vars(problem) | {"inputs": x, "targets": problem.targets[:1]}))
    served = lp.freeze(fit(problem, lp.KFAC, parameters="last_layer"), problem.probe(3))
    model = one.model.eval()
    for way in ("eager", "traced"):
        pair = []
        for module in (served, model):
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # torch's own, of tracing
                pair.append(torch.jit.trace(module, (problem.probe(3),)) if way == "traced" else module)

        def times(module: Any) -> None:
            with torch.inference_mode():
                for _ in range(20):
                    module(x)

        ours, limit = (partial(times, module) for module in pair)
        yield Task("frozen", f"Frozen last layer, {way}, B=1, 20 times", one, ours, limit, "20 forwards", Target(2))
