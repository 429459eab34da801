"""Fitted posteriors, which the cases compare with what is done by hand."""

from __future__ import annotations

from typing import Any

from models import Problem
from torch import Tensor

import laplace_plus as lp


def relative(ours: Tensor, limit: Tensor) -> float:
    """Their distance as a part of the limit's norm."""
    return ((ours - limit).norm() / limit.norm()).item()


def fit(problem: Problem, kind: type[lp.GaussianPosterior], **options: Any) -> lp.GaussianPosterior:
    """A posterior that is fitted to the problem's data."""
    return kind(problem.model, problem.likelihood, **options).fit(problem.batches)


def fit_and_decompose(
    problem: Problem, kind: type[lp.GaussianPosterior], *, tuned: bool = False, **options: Any
) -> lp.GaussianPosterior:
    """The same, with decompositions that otherwise wait until they are needed."""
    posterior = fit(problem, kind, **options)
    if tuned:
        posterior.fit_prior_precision("marginal_likelihood")
    posterior.sample(1)
    return posterior
