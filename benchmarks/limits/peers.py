"""laplace-torch, curvlinops and BackPACK, set up for the same quantities."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from limits_factors import LAYERS
from measuring import Call
from models import Problem
from torch import nn


def _laplace(
    problem: Problem, structure: str, *, subset: str = "all", backend: str | None = None, **options: Any
) -> Any:
    from laplace import Laplace  # noqa: PLC0415  -- an extra

    if backend:
        from laplace import curvature  # noqa: PLC0415

        options["backend"] = getattr(curvature, backend)
    return Laplace(
        copy.deepcopy(problem.model),
        problem.likelihood,
        subset_of_weights=subset,
        hessian_structure=structure,
        **options,
    )


def _loader(problem: Problem) -> Any:
    data = torch.utils.data.TensorDataset(problem.inputs, problem.targets)
    return torch.utils.data.DataLoader(data, problem.batch_size)


def fit(problem: Problem, structure: str, *, n_data: int | None = None, **options: Any) -> Callable[[], Call]:
    """What sets up a fit; to part of the data on request."""

    def set_up() -> Call:
        data = _loader(problem.take(n_data or len(problem.inputs)))

        def call() -> None:
            _laplace(problem, structure, **options).fit(data)

        return call

    return set_up


def _fitted(problem: Problem, structure: str, **options: Any) -> Any:
    peer = _laplace(problem, structure, **options)
    peer.fit(_loader(problem))
    return peer


def predict(problem: Problem, structure: str, x: torch.Tensor, **options: Any) -> Callable[[], Call]:
    """What fits and returns a prediction."""

    def set_up() -> Call:
        peer = _fitted(problem, structure, **options)
        chunks = x.split(64)

        def call() -> None:
            for chunk in chunks:
                if problem.likelihood == "regression":
                    peer(chunk)
                else:
                    peer(chunk, link_approx="probit")

        return call

    return set_up


def samples(problem: Problem, structure: str, n: int) -> Callable[[], Call]:
    """What fits and returns the drawing of n samples."""

    def set_up() -> Call:
        peer = _fitted(problem, structure)
        return lambda: peer.sample(n)

    return set_up


def tune(problem: Problem, structure: str, steps: int) -> Callable[[], Call]:
    """What fits and returns that many gradient steps on the evidence."""

    def set_up() -> Call:
        peer = _fitted(problem, structure)
        return lambda: peer.optimize_prior_precision(method="marglik", n_steps=steps)

    return set_up


def curvlinops_factors(problem: Problem, *, monte_carlo: bool) -> Callable[[], Call]:
    """What sets up the Kronecker factors of linear and convolutional layers by curvlinops alone."""

    def set_up() -> Call:
        from curvlinops import FisherType, KFACLinearOperator  # noqa: PLC0415

        model, loss = copy.deepcopy(problem.model), nn.CrossEntropyLoss(reduction="sum")
        layers = (module for module in model.modules() if isinstance(module, LAYERS))
        wanted = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
        options = {"fisher_type": FisherType.MC if monte_carlo else FisherType.TYPE2, "check_deterministic": False}

        def call() -> None:
            operator = KFACLinearOperator(
                model, loss, wanted, problem.batches, separate_weight_and_bias=False, **options
            )
            operator.compute_kronecker_factors()

        return call

    return set_up


def backpack_diagonal(problem: Problem) -> Call:
    """The exact diagonal by BackPACK alone, summed over the data."""
    from backpack import backpack, extend  # noqa: PLC0415
    from backpack.extensions import DiagGGNExact  # noqa: PLC0415

    model = extend(copy.deepcopy(problem.model))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))

    def call() -> None:
        sums: list[torch.Tensor] = []
        for inputs, targets in problem.batches:
            with backpack(DiagGGNExact()):
                loss(model(inputs), targets).backward()
            found = [parameter.diag_ggn_exact for parameter in model.parameters()]
            sums = found if not sums else [a.add_(b) for a, b in zip(sums, found, strict=True)]
            model.zero_grad()

    return call
