"""Sums over data, by which the same data are known again in another pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from laplace_plus.network.batches import Batch, Examples, flatten, leaves_of

_ENTRIES_AT_A_TIME = 2**22
"""Entries of the data that are converted to float64 together, for their sums: 32 MiB."""

_MISSING = 0.7853
"""What stands for NaN in these sums: a target that is missing."""


class DataSums:
    """The number of examples, and two sums over their entries, on a device: they tell two passes apart.

    An example contributes ``Σ_k r_k + Σ_{j<k} r_j r_k``, where ``r_k`` is a weighted sum over the entries of its k-th
    tensor, the target among them: inputs with other examples' targets have other products. The second sum weights
    examples by their number, so that it also tells the order. Both are computed for each example by itself: how the
    data are cut into batches does not matter, nor does padding of an example's first dimension by zeros.
    """

    def __init__(self, device: torch.device | str):
        self.count = 0
        self._plain = torch.zeros((), dtype=torch.float64, device=device)
        self._weighted = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, batch: Batch, size: int) -> None:
        """Add a batch with ``size`` examples."""
        device = self._plain.device
        total, pairs = (torch.zeros(size, dtype=torch.float64, device=device) for _ in range(2))
        for number, leaf in enumerate(leaves_of((batch.inputs, batch.target)), start=1):
            values = leaf.data if isinstance(leaf, PackedSequence) else leaf
            if isinstance(leaf, Examples):
                values = torch.stack([_weighted(own) for own in leaf])
            if not isinstance(values, Tensor) or values.is_complex() or not values.numel():
                continue
            values = values.detach().to(device)
            if values.ndim == 0 or values.shape[0] != size:
                self._plain += values.sum(dtype=torch.float64) / number
                continue
            # Weighted, as the plain sums of probabilities are all the same.
            values = values.reshape(size, -1)
            weights = _irregular(0, values.shape[1], device)
            some = values.split(max(1, _ENTRIES_AT_A_TIME // values.shape[1]))
            sums = torch.cat([part.double().nan_to_num(_MISSING) @ weights for part in some]) / number
            pairs += total * sums
            total += sums
        total += pairs
        self._plain += total.sum()
        self._weighted += total @ _irregular(self.count, self.count + size, device)
        self.count += size

    def values(self) -> tuple[float, float]:
        """The sum that does not depend on the order, and the one that does."""
        return float(self._plain), float(self._weighted)


def same_sum(before: float, now: float) -> bool:
    """Whether two sums of :class:`DataSums` come from the same data, up to rounding."""
    return not abs(before - now) > 1e-6 * (1 + abs(before))


def _weighted(example: Any) -> Tensor:
    """A weighted sum over all entries of one example's tensors, 0-d float64."""
    parts = [own.detach().reshape(-1).double() for own in flatten(example)[0] if isinstance(own, Tensor)]
    entries = torch.cat([torch.zeros(1, dtype=torch.float64), *[own.cpu() for own in parts]])
    return entries @ _irregular(0, len(entries), entries.device)


def _irregular(start: int, stop: int, device: torch.device) -> Tensor:
    """Weights between 1/2 and 3/2 without regularity (multiples of the golden ratio), one for each number."""
    numbers = torch.arange(start, stop, dtype=torch.float64, device=device)
    return 0.5 + (numbers * 0.6180339887498949) % 1.0
