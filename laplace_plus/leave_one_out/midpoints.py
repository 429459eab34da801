"""Midpoints of neighbouring training data, which stand for new data where a network interpolates.

Gradients vanish at data that a network fits all but perfectly: leaving them out then tells little of the loss at new
data. Halfway between a datum and a near neighbour it was not trained. Either's label is as good there, as for the
synthetic examples of Chawla et al. (2002, "SMOTE: synthetic minority over-sampling technique"), whose five neighbours
are taken. Partners drawn from all data, as mixup has them, leave the region of the data: where classes are curved
around each other, they showed losses that new data do not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus.batches import iterate, thinned
from laplace_plus.curvature.gradients import runs_apart
from laplace_plus.errors import UnsupportedError
from laplace_plus.evidence.tuning import Tunable
from laplace_plus.leave_one_out.predictions import Deletions

NEIGHBOURS = 5
"""Of each example, as in SMOTE. With up to ten, gains were larger, but calibrated networks lost up to .007 nats."""

KEPT = 1e8
"""Numbers of the inputs among which neighbours are searched, and of distances; of more, evenly spread examples."""


def midpoints(posterior: Tunable, data: Iterable[Any], precision: Tensor, most: int) -> Deletions | None:
    """At most so many midpoints, each with the label of its first end, as data that are left out: undisplaced.

    One pass over the data. None where inputs are no single floating tensor of one shape, or are too few.

    Raises:
        UnsupportedError: The network does not run on each example alone.
    """
    network, n_data = posterior.network, posterior.n_data
    parts: list[tuple[Tensor, Tensor]] = []
    count, size, share = n_data, 0, 1.0
    for batch in iterate(data, device=network.device):
        x = batch.inputs
        if not (isinstance(x, Tensor) and x.is_floating_point()) or parts and x.shape[1:] != parts[0][0].shape[1:]:
            return None
        if not parts:
            if runs_apart(network, batch) is False:
                raise UnsupportedError("An example's outputs depend on the others.")
            count = min(count, int(min(most, KEPT / x[0].numel())) // NEIGHBOURS)
            size, share = len(x), min(1.0, KEPT / (n_data * max(x[0].numel(), count)))
        some = thinned(batch, share)
        parts.append((some.inputs, some.target))
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    if len(x) <= NEIGHBOURS or not count:
        return None
    chosen = torch.linspace(0, len(x) - 1, min(count, len(x))).round().long().to(x.device)
    flat = x.flatten(1).float()
    distances = torch.cdist(flat[chosen], flat).scatter_(1, chosen[:, None], torch.inf)
    near = distances.topk(NEIGHBOURS, largest=False).indices
    between, labels = ((x[chosen, None] + x[near]) / 2).flatten(0, 1), y[chosen].repeat_interleave(NEIGHBOURS, 0)
    pairs = list(zip(between.split(size), labels.split(size), strict=True))
    found = Deletions(posterior, pairs, precision, None, "first_order", "position", displacing=_undisplaced)
    found.share = 1 - 1e-9  # a whole pass would check that these are the data of the fit
    return found


def _undisplaced(number: int, inputs: Any, outputs: Tensor) -> list[Tensor]:
    """No covariance ``[U, C, C]``."""
    flat = outputs.flatten(0, -2)
    return [flat.new_zeros(*flat.shape, flat.shape[-1])]
