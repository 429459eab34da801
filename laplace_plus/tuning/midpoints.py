"""Neighbours in the training data: their midpoints and votes, which stand for new data where a network interpolates.

Gradients vanish at data that a network fits all but perfectly: leaving them out then tells little of the loss at new
data. Halfway between a datum and a near neighbour it was not trained. Either's label is as good there, as for the
synthetic examples of Chawla et al. (2002, "SMOTE: synthetic minority over-sampling technique"), whose five neighbours
are taken. Partners drawn from all data, as mixup has them, leave the region of the data: where classes are curved
around each other, they showed losses that new data do not have.

Where classes overlap, midpoints err more often than new data. The same neighbours bound that: a datum's label is the
vote of its neighbours in a share of the data that a trained network should reach, too. A posterior that is less sure on
average is too wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus.network.batches import Batch, iterate
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.deletions import Deletions, thinned

NEIGHBOURS = 5
"""Of each example, as in SMOTE. With up to ten, gains were larger, but calibrated networks lost up to .007 nats."""

KEPT = 1e8
"""Numbers of the inputs, and of distances, among which neighbours are searched at most; of more, evenly spread ones."""


def neighbours(
    posterior: Tunable, data: Iterable[Any], first: Batch, precision: Tensor, most: int
) -> tuple[Deletions, float] | None:
    """At most so many midpoints of a classifier's data, and the share of data whose label is their neighbours' vote.

    Midpoints have the label of their first end, and are left out: undisplaced. One pass over the data, of which
    ``first`` is the first batch. None where inputs are no single floating tensor of one shape, or are too few.
    """
    network, n_data, x = posterior.network, posterior.n_data, first.inputs
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    count = min(n_data, int(min(most, KEPT / x[0].numel())) // NEIGHBOURS)
    share = min(1.0, KEPT / (n_data * max(x[0].numel(), count)))
    parts = list(thinned(iterate(data, device=network.device), share))
    if any(part.inputs.shape[1:] != x.shape[1:] for part in parts):
        return None
    size, x, y = len(x), torch.cat([part.inputs for part in parts]), torch.cat([part.target for part in parts])
    model = posterior.laplace_model()
    labelled = model.likelihood.rows(y.new_zeros(len(y), model.n_outputs, dtype=torch.float), y)[2] > 0
    x, y = x[labelled], y[labelled]
    if len(x) <= NEIGHBOURS or not count:
        return None
    chosen = torch.linspace(0, len(x) - 1, min(count, len(x))).round().long().to(x.device)
    flat = (x - x.mean(0)).flatten(1).float()  # distances come of products, which lose digits far from the origin
    distances = torch.cdist(flat[chosen], flat).scatter_(1, chosen[:, None], torch.inf)
    near = distances.topk(NEIGHBOURS, largest=False).indices
    between, labels = ((x[chosen, None] + x[near]) / 2).flatten(0, 1), y[chosen].repeat_interleave(NEIGHBOURS, 0)
    pairs = list(zip(between.split(size), labels.split(size), strict=True))
    found = Deletions(posterior, pairs, precision, None, "first_order", "position", displacing=_undisplaced)
    found.of_the_fit = False
    soft = model.likelihood.couples_outputs and y.is_floating_point()
    classes = y.argmax(-1) if soft else y
    agree = classes[near].mode(1).values == classes[chosen]
    return found, float(agree.double().mean())


def _undisplaced(inputs: Any, outputs: Tensor) -> list[Tensor]:
    """No covariance ``[U, C, C]``."""
    flat = outputs.flatten(0, -2)
    return [flat.new_zeros(*flat.shape, flat.shape[-1])]


class Between(NamedTuple):
    """Losses at midpoints, ``[G]``, which scales are sure enough there, and how often neighbours' votes are right."""

    losses: Tensor
    allowed: Tensor
    accuracy: float


def compared_between(
    posterior: Tunable, data: Iterable[Any], first: Batch, most: int, search: Callable[..., Any]
) -> Between | None:
    """What at most so many midpoints of neighbouring data say; None without any, or where losses are not finite."""
    near = neighbours(posterior, data, first, posterior.prior_precision.detach(), most)
    if near is None:
        return None
    found, accuracy = search(near[0], noisy=False), near[1]
    allowed = found.factors >= min(accuracy, float(found.factors[-1]))
    return Between(found.losses, allowed, accuracy) if bool(found.losses.isfinite().all()) else None
