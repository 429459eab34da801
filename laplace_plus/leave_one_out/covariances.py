"""Covariances ``V = J Σ Jᵀ`` of the outputs of what is left out: an example, or a position of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.batches import batch_size, can_be_cut, cut
from laplace_plus.curvature import Layout
from laplace_plus.curvature.gradients import same_outputs
from laplace_plus.errors import DataError
from laplace_plus.network import Network
from laplace_plus.predictive.linearized import functional_posteriors
from laplace_plus.structured import Factor

Unit = Literal["example", "position"]


class Covariances(ABC):
    """Gives each batch's ``[U, b, b]``, for one or several posteriors."""

    def start(self) -> None:
        """Begin a pass over the data; nothing to do where batches are told by their inputs."""
        return

    @abstractmethod
    def of(self, inputs: Any, outputs: Tensor) -> list[Tensor]:
        """For a batch's inputs, and the network's outputs on them, one ``[U, b, b]`` for each posterior."""


class FactorCovariances(Covariances):
    """From factorised posterior precisions, layer by layer.

    Args:
        network: The network that the factors are of.
        factor_sets: One for each posterior.
        unit: What is left out.
        n_outputs: C.
        layouts: The blocks of the precisions, where they may be others than the layers.
    """

    def __init__(
        self,
        network: Network,
        factor_sets: Sequence[Mapping[str, Factor]],
        unit: Unit,
        n_outputs: int,
        layouts: Sequence[Layout] | None = None,
    ):
        self._network, self._sets, self._unit = network, factor_sets, unit
        self._options: dict[str, Any] = {"expected_outputs": n_outputs, "layouts": layouts}

    @override
    def of(self, inputs: Any, outputs: Tensor) -> list[Tensor]:
        shape = outputs.shape
        if self._unit == "example" and shape[1:-1].numel() > 1:
            return self._of_examples(inputs, shape)
        found = functional_posteriors(self._network, self._sets, inputs, **self._options)
        return [posterior.covariance.reshape(-1, shape[-1], shape[-1]) for posterior in found]

    def _of_examples(self, inputs: Any, shape: torch.Size) -> list[Tensor]:
        """Examples with several positions, one by one: their positions' outputs vary together."""
        size, count = shape[1:].numel(), batch_size(inputs)
        if not can_be_cut(inputs, count):
            raise DataError(
                "An example with several positions can only be left out where examples can be run by themselves.",
                expected="inputs whose tensors all have the examples along their first axis",
                got="other inputs",
                fix='Pass unit="position", which leaves out one position at a time.',
            )
        parts = []
        for number in range(count):
            one = cut(inputs, slice(number, number + 1))
            found = functional_posteriors(self._network, self._sets, one, joint=True, **self._options)
            parts.append([posterior.covariance.reshape(1, size, size) for posterior in found])
        return [torch.cat(column) for column in zip(*parts, strict=True)]


class KnownCovariances(Covariances):
    """Computed for all data before; handed out batch by batch in the order of the data, in each pass over them.

    Args:
        batches: ``[U, b, b]`` of each batch.
        outputs: The network's outputs of each batch, by which it is known again.
    """

    def __init__(self, batches: Sequence[Tensor], outputs: Sequence[Tensor]):
        self._batches, self._outputs, self._next = batches, outputs, 0

    @override
    def start(self) -> None:
        self._next = 0

    @override
    def of(self, inputs: Any, outputs: Tensor) -> list[Tensor]:
        number = self._next
        self._next += 1
        if number >= len(self._batches) or not same_outputs(self._outputs[number].to(outputs), outputs):
            raise DataError(
                "The data came in another order, or other data came, than in the pass before.",
                expected="the same batches in the same order in each pass",
                got=f"another batch {number}",
                fix="Pass data= as a loader that does not shuffle.",
            )
        return [self._batches[number]]


def split_units(covariance: Tensor, outputs: Tensor) -> Tensor:
    """The covariances ``[U, *, C, C]`` of each position by itself, out of those of units, ``[U, b, b]``."""
    n, size = outputs.shape[0], outputs.shape[-1]
    count = covariance.shape[-1] // size
    if count == 1:
        return covariance.reshape(*outputs.shape, size)
    blocks = covariance.view(n, count, size, count, size).diagonal(dim1=1, dim2=3)  # [U, C, C, M]
    return blocks.movedim(-1, 1).reshape(*outputs.shape, size)
