"""Where the entries of a block's ``[G, o, i]`` array lie in the parameter vector, as views wherever that is possible.

A layer's weight fills one contiguous range of the parameter vector and its bias another one, so that the array of both
is two views side by side. No list of positions, three times the size of the values, has to be read to reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

MATRIX, EMBEDDING, CHANNELS, GENERAL = "matrix", "embedding", "per channel", "general"

_MOST_SLICES = 4
"""A weight, a bias and their like; arrays in more slices are reached by their list of positions."""


@dataclass(frozen=True)
class _Slice:
    """Some ``columns`` of the array, which fill a contiguous range of the vector from ``start``.

    The part has the ``shape`` ``(G, o, i')``; ``order`` are its axes from the slowest to the fastest.
    """

    columns: slice
    start: int
    shape: tuple[int, ...]
    order: list[int]

    def view(self, vector: Tensor) -> Tensor:
        """The columns of ``[…, P]`` vectors, ``[…, G, o, i']``."""
        lead = vector.ndim - 1
        size = self.shape[0] * self.shape[1] * self.shape[2]
        inner = vector.narrow(-1, self.start, size).unflatten(-1, [self.shape[axis] for axis in self.order])
        return inner.permute(*range(lead), *[lead + self.order.index(axis) for axis in range(3)])


class ParameterSlices:
    """Reads and writes the entries of an array with ``[G, o, i]`` positions ``index``, none negative, in vectors.

    Example:
        >>> weight_and_bias = torch.tensor([[[0, 1, 4], [2, 3, 5]]])
        >>> ParameterSlices(weight_and_bias).gather(torch.arange(10, 16))
        tensor([[[10, 11, 14],
                 [12, 13, 15]]])
    """

    def __init__(self, index: Tensor):
        self.shape: tuple[int, int, int] = (index.shape[0], index.shape[1], index.shape[2])
        self.slices = _slices_of(index)
        self._index = None if self.slices else index

    def gather(self, vector: Tensor) -> Tensor:
        """The array's entries of ``[…, P]`` vectors, ``[…, G, o, i]``, perhaps as a view; differentiable."""
        if self._index is not None:
            return vector[..., self._index.to(vector.device)]
        views = [part.view(vector) for part in self.slices]
        return views[0] if len(views) == 1 else torch.cat(views, -1)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        if self._index is not None:
            vector[..., self._index.to(vector.device)] = values.to(vector.dtype)
        for part in self.slices:
            part.view(vector).copy_(values[..., part.columns])

    def add_(self, vector: Tensor, values: Tensor) -> None:
        """Add ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        if self._index is not None:
            vector.index_add_(-1, self._index.flatten().to(vector.device), values.flatten(-3))
        for part in self.slices:
            part.view(vector).add_(values[..., part.columns])


def _slices_of(index: Tensor) -> list[_Slice]:
    """The contiguous ranges that make up the array; none where there are too many."""
    if not index.numel():
        return []
    # A slice ends where the distance from one column to the next is not the usual one.
    steps = index[0, 0].diff()
    borders = (steps != steps.mode().values).nonzero().flatten() + 1 if len(steps) else steps
    if len(borders) >= _MOST_SLICES:
        return []
    found = []
    for start, stop in pairwise([0, *borders.tolist(), index.shape[2]]):
        own = index[..., start:stop].cpu()
        shape, first = tuple(own.shape), int(own[0, 0, 0])
        stride = [int(own.select(axis, 1)[0, 0]) - first if shape[axis] > 1 else 0 for axis in range(3)]
        part = _Slice(slice(start, stop), 0, shape, sorted(range(3), key=lambda axis: -stride[axis]))
        if first < 0 or not torch.equal(part.view(torch.arange(own.numel())), own - first):
            return []
        found.append(replace(part, start=first))
    return found


class Layout:
    """Positions of a block's ``[G, o, i]`` array in the parameter vector.

    Args:
        key: Identifies the block within its network.
        names: The parameters that it covers, wholly or in part.
        rule: Origin of its gradients: ``"matrix"``, ``"embedding"``, ``"per channel"`` or ``"general"``.
        index: ``[G, o, i]`` positions in the parameter vector. Or a function that returns them, to save eight bytes for
            each weight until they are needed.
        shape: The index's shape, where it is a function.
    """

    def __init__(
        self,
        key: str,
        names: tuple[str, ...],
        rule: str,
        index: Tensor | Callable[[], Tensor],
        shape: Sequence[int] | None = None,
    ):
        self.key, self.names, self.rule, self._index = key, names, rule, index
        groups, rows, columns = index.shape if isinstance(index, Tensor) else shape or ()
        self.shape: tuple[int, int, int] = (groups, rows, columns)
        self.n_entries = groups * rows * columns

    @property
    def index(self) -> Tensor:
        """``[G, o, i]`` positions in the parameter vector."""
        return self._index if isinstance(self._index, Tensor) else self._index()

    @cached_property
    def parameter_slices(self) -> ParameterSlices:
        """Reads and writes the block's entries in parameter vectors."""
        return ParameterSlices(self.index)

    def gather(self, vector: Tensor) -> Tensor:
        """The block's part of ``[…, P]`` vectors, ``[…, G, o, i]``."""
        return self.parameter_slices.gather(vector)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their positions in ``[…, P]`` vectors."""
        self.parameter_slices.scatter_(vector, values)
