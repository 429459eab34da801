"""Scaling of a classifier's outputs by held-out data (Guo et al., 2017).

The Gaussian over outputs becomes ``N(A f + b, A V Aᵀ)`` with the least mean loss of held-out targets. ``A`` is ``I/T``
with ``b = 0`` (``"temperature"``), diagonal (``"vector"``) or any matrix (``"matrix"``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.posteriors import Posterior
from laplace_plus.predictive import from_functional
from laplace_plus.predictive.linearized import FunctionalPosterior
from laplace_plus.predictive.outputs import MANY_OUTPUTS

LARGEST = 8.0
"""A factor on outputs beyond this, or a temperature, is taken for a search that did not end."""


class Scaling(NamedTuple):
    """``A = diag(weight)/T`` or ``weight/T``, b, the link, and mean held-out losses in nats before and after."""

    temperature: float
    weight: Tensor | None
    bias: Tensor | None
    link: str
    held_out_nll: float
    calibrated_nll: float
    converged: bool


def scaled(mean: Tensor, covariance: Tensor, weight: Tensor | None, bias: Tensor | None) -> FunctionalPosterior:
    """``N(A f + b, A V Aᵀ)`` for a diagonal ``[C]`` or a whole A ``[C, C]``; V as a functional posterior has it."""
    if weight is None:
        return FunctionalPosterior(mean, covariance)
    matrix = (weight.diag() if weight.dim() == 1 else weight).to(mean)
    moved = mean @ matrix.mT if bias is None else mean @ matrix.mT + bias.to(mean)
    if covariance.shape == mean.shape:
        return FunctionalPosterior(moved, covariance * matrix.diagonal().square())
    if covariance.dim() == mean.dim() + 1:
        return FunctionalPosterior(moved, matrix @ covariance @ matrix.mT)
    n = mean[..., 0].numel()
    across = torch.einsum("ac,ncmd,bd->namb", matrix, covariance.reshape(n, len(matrix), n, len(matrix)), matrix)
    return FunctionalPosterior(moved, across.reshape(covariance.shape))


def fit_scaling(
    posterior: Posterior,
    data: Iterable[Any],
    method: Literal["temperature", "vector", "matrix"],
    *,
    link: str | None,
    n_samples: int,
    generator: torch.Generator | None,
    progress: bool,
) -> Scaling:
    """The scaling of a classifier; arguments, errors and warnings as of :func:`laplace_plus.calibrate`."""
    likelihood, size = posterior.likelihood, posterior.n_outputs
    link = link or posterior.link or likelihood.links[0]
    checks.choice("link", link, likelihood.links)
    if method == "matrix" and size > MANY_OUTPUTS:
        what = "A matrix has too many entries for held-out data."
        raise UnsupportedError(what, expected=f"at most {MANY_OUTPUTS} outputs", got=f"{size}", fix='Use "vector".')
    parts = []
    for batch in iterate(data, device=posterior.network.device, progress=progress, description=f"calibrate: {method}"):
        mean, covariance = posterior.functional_posterior(batch.inputs, generator=generator)
        likelihood.validate(mean, batch.target)
        flat, targets, weight = likelihood.rows(mean.double(), batch.target)
        parts.append((flat, covariance.double().reshape(len(flat), flat.shape[1], -1), targets, weight))
    mean, covariance, targets, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    checks.positive("The number of targets that count", float(weight.sum()))
    first = {"temperature": mean.new_zeros(1), "vector": mean.new_ones(size), "matrix": torch.eye(size).to(mean)}
    free = [first[method], mean.new_zeros(size)][: 1 if method == "temperature" else 2]
    seed = draw_seed(generator) if link == "mc" else 0

    def factors() -> tuple[Tensor, Tensor | None]:
        if method == "temperature":
            return (-free[0]).exp().expand(size), None
        # What a matrix adds to all logits alike says nothing, but the link "probit" would use it to change variances.
        shared = free[0].mean(0) if method == "matrix" and likelihood.couples_outputs else 0.0
        return free[0] - shared, free[1]

    def loss() -> Tensor:  # with common random numbers
        common = torch.Generator(device=mean.device).manual_seed(seed)
        options: dict[str, Any] = {"link": link, "n_samples": n_samples, "generator": common}
        found = from_functional(likelihood, *scaled(mean, covariance, *factors()), **options)
        return -(found.log_prob(targets) * weight).sum() / weight.sum()

    def evaluate() -> float:
        value = loss()
        for own, slope in zip(free, torch.autograd.grad(value, free), strict=True):
            own.grad = slope
        return float(value.detach())

    before = float(loss())
    with torch.enable_grad():
        for own in free:
            own.requires_grad_()
        limits: dict[str, Any] = {"max_iter": 200, "tolerance_grad": 1e-7, "tolerance_change": 1e-12}
        torch.optim.LBFGS(free, line_search_fn="strong_wolfe", **limits).step(evaluate)
        after = evaluate()
    slope = max(float(own.grad.abs().max()) for own in free if own.grad is not None)
    largest = float(factors()[0].detach().abs().max())
    converged = slope < 1e-4 and 1 / LARGEST < largest < LARGEST  # noqa: PLR2004
    if not converged:
        message = f"Scaling by {method} ended at a factor of {largest:.3g}, with a derivative of {slope:.2g} nats."
        warn(message, ConvergenceWarning)
    weight, bias = factors()
    ending = link, before, after, converged
    if method == "temperature":
        return Scaling(1 / largest, None, None, *ending)
    return Scaling(1.0, weight.detach(), None if bias is None else bias.detach(), *ending)
