"""Losses of left-out data at several precisions and scales of the covariance, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.predictive import from_functional
from laplace_plus.tuning.deletions import DeletionBatch, Deletions, leave_out


class Losses(NamedTuple):
    """Of precisions and scales mean losses ``[G · S]``, and noise factors or else a classifier's mean confidences."""

    losses: Tensor
    factors: Tensor
    largest_leverage: float
    n_observations: float


def left_out_losses(
    deletions: Deletions,
    base: Tensor,
    levels: Tensor,
    scales: Sequence[float] = (1.0,),
    *,
    noisy: bool,
    progress: bool = False,
    seed: int | None = None,
    **options: Any,
) -> Losses:
    """The losses at precisions ``level · base`` and scales of V, in one pass.

    Where they are ``noisy``, the noise and V are scaled together to their optimum; else options are those of the link,
    with the ``seed`` of its random numbers.
    """
    likelihood, own = deletions.model.likelihood, deletions.leverages == "own"
    totals = torch.zeros(len(levels), len(scales), 2, dtype=torch.float64, device="cpu")
    valid = torch.ones(len(levels), dtype=torch.bool, device="cpu")
    n_entries, n_observations, largest = 0.0, 0.0, []
    for batch in deletions.batches([(base * level, None) for level in levels], progress=progress):
        counted = float(likelihood.rows(batch.outputs, batch.targets)[2].sum())
        n_observations += counted
        n_entries += counted * batch.outputs.shape[-1]
        largest.append(batch.leverages.amax(-1))
        if bool((largest[-1] >= deletions.limit).any()):
            continue  # they are refused, once all are counted
        for number, covariance in enumerate(batch.covariances):
            if own or deletions.without_own:
                leverages, _, left = leave_out(covariance, batch.root, batch.gradient)
                below = (leverages < deletions.limit).all(-1)
                valid[number] &= not own or bool(below.all())
                covariance = torch.where(below[:, None, None], left, covariance)
            if valid[number]:
                covariance = batch.by_position(covariance)
                for place, scale in enumerate(scales):
                    if noisy:
                        totals[number, place] += _noise_terms(likelihood, batch, scale * covariance)
                    else:
                        totals[number, place] += _loss(likelihood, batch, scale * covariance, seed, options)
    deletions.check(largest)
    losses, factors = totals[..., 0], totals[..., 1] / n_observations
    if noisy:
        factors = (totals[..., 1] / n_entries).sqrt()
        # ½ Σ (Q/m² + log det + C log 2πm²) at its minimum m² = Q / n_entries over the noise factor m.
        losses = losses + n_entries * (1 + factors.square().log() + math.log(2 * math.pi)) / 2
    losses = torch.where(valid[:, None] & losses.isfinite(), losses / n_observations, torch.inf)
    return Losses(losses.flatten(), factors.flatten(), float(torch.cat(largest).max()), n_observations)


def _loss(likelihood: Likelihood, batch: DeletionBatch, covariance: Tensor, seed: int | None, options: Any) -> Tensor:
    """A batch's loss, and a classifier's confidences: the probabilities of the most probable classes."""
    generator = None if seed is None else torch.Generator(device=covariance.device).manual_seed(seed)
    found = from_functional(likelihood, batch.mean, covariance, generator=generator, **options)
    p = found.mean
    sure = p.amax(-1) if likelihood.couples_outputs else torch.maximum(p, 1 - p).mean(-1)
    return torch.stack([-found.log_prob(batch.targets).sum(), sure.sum()]).double().cpu()


def _noise_terms(likelihood: Likelihood, batch: DeletionBatch, covariance: Tensor) -> Tensor:
    """Half a batch's log-determinants, and its squared Mahalanobis distances."""
    assert likelihood.noise_std is not None
    flat, targets, _ = likelihood.rows(batch.mean, batch.targets)
    noise = likelihood.noise_std.to(flat).square().expand(flat.shape[-1])
    lower = torch.linalg.cholesky(covariance.reshape(len(flat), *covariance.shape[-2:]) + torch.diag(noise))
    distance = torch.linalg.solve_triangular(lower, (targets - flat)[..., None], upper=False)
    determinants = lower.diagonal(dim1=-2, dim2=-1).log().sum()
    return torch.stack([determinants, distance.square().sum()]).double().cpu()


def link_options(tuner: Any, likelihood: Likelihood, generator: torch.Generator | None) -> dict[str, Any]:
    """A tuner's options of the link, with a seed where that draws samples."""
    seed = draw_seed(generator) if (tuner.link or likelihood.links[0]) == "mc" else None
    return {"link": tuner.link, "n_samples": tuner.n_samples, "seed": seed}
