"""Fits of many passes over the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus.io.checkpoints import Checkpoint
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import DataSums
from laplace_plus.network.gradients import forward_parts
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.training_data import require_restartable


class FitStart(NamedTuple):
    """What :meth:`ResumableFit._start` found and decided before the first stage of a fit."""

    n_data: int
    n_outputs: int
    sums: list[str]
    checkpoint: Checkpoint
    seed: int


class ResumableFit(Posterior):
    """A posterior whose fit passes over the data many times."""

    _checkpoint_folder = None

    def _start(self, data: Iterable[Any], generator: torch.Generator | None, why: str, **settings: Tensor) -> FitStart:
        """Survey the data and choose the seed."""
        require_restartable(data, why)
        n_data, n_outputs, sums = survey(self, data)
        return FitStart(n_data, n_outputs, sums, Checkpoint(), draw_seed(generator))


def survey(posterior: Posterior, data: Iterable[Any]) -> tuple[int, int, list[str]]:
    """Number of examples, of outputs, and sums that differ for other data or order; SelectionError without a target."""
    sums, n_outputs, doubt, counts = DataSums(posterior.network.device), 0, 0.0, False
    for batch in posterior.batches(data):
        forward_parts(posterior.network, batch.inputs)
        outputs = posterior.network.forward(batch.inputs)
        posterior.likelihood.validate(outputs, batch.target)
        doubt += posterior.likelihood.evidence_for_probabilities(outputs, batch.target)
        sums.add(batch, len(outputs))
        counts = counts or bool(posterior.likelihood.rows(outputs, batch.target)[2].any())
        n_outputs = outputs.shape[-1]
    if not counts:
        raise posterior.zero_curvature()
    if doubt > 0:
        doubt_logits(posterior.likelihood, doubt)
    return sums.count, n_outputs, [f"{value:.6e}" for value in sums.values()]


def stage_generator(seed: int, stage: int) -> torch.Generator:
    """The random numbers of one stage, which do not depend on how many the stages before have drawn.

    Consecutive seeds differ by 2⁶⁴ divided by the golden ratio, which spreads them over all 64 bits.
    """
    return torch.Generator().manual_seed((seed + stage * 0x9E3779B97F4A7C15) % 2**63)
