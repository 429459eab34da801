"""Where the entries of a ``[G, o, i]`` array lie in a long vector, as views wherever that is possible.

A layer's weight fills one contiguous range of the parameter vector and its bias another one, so that the array of both
is two views side by side: no list of positions has to be read to reach them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_MOST_PIECES = 4
"""Arrays that fall into more pieces are reached by their list of positions."""


@dataclass(frozen=True)
class _Piece:
    """Some columns of the array, which fill a contiguous range in some order of the axes.

    Attributes:
        columns: Which.
        start: Where the range begins.
        shape: ``(G, o, i')``.
        order: The axes from the slowest to the fastest.
    """

    columns: slice
    start: int
    shape: tuple[int, int, int]
    order: tuple[int, int, int]

    def view(self, vector: Tensor) -> Tensor:
        """The piece of ``[…, P]`` vectors, ``[…, G, o, i']``."""
        lead = vector.ndim - 1
        groups, rows, columns = self.shape
        inner = vector.narrow(-1, self.start, groups * rows * columns).unflatten(
            -1, [self.shape[a] for a in self.order]
        )
        return inner.permute(*range(lead), *(lead + self.order.index(axis) for axis in range(3)))

    def positions(self) -> Tensor:
        """The positions that it stands for, ``[G, o, i']``."""
        groups, rows, columns = self.shape
        return self.view(torch.arange(self.start + groups * rows * columns))


class ParameterSlices:
    """Reads and writes an array's entries in vectors.

    Args:
        index: ``[G, o, i]`` positions, none negative; only kept where there are no views.

    Attributes:
        shape: ``(G, o, i)``.

    Example:
        >>> weight_and_bias = torch.tensor([[[0, 1, 4], [2, 3, 5]]])
        >>> ParameterSlices(weight_and_bias).gather(torch.arange(10, 16))
        tensor([[[10, 11, 14],
                 [12, 13, 15]]])
    """

    def __init__(self, index: Tensor):
        self.shape: tuple[int, int, int] = (index.shape[0], index.shape[1], index.shape[2])
        self._pieces = _pieces_of(index)
        self._index = None if self._pieces is not None else index

    @property
    def is_contiguous(self) -> bool:
        """Whether :meth:`views` gives views."""
        return self._index is None

    def views(self, vector: Tensor) -> list[tuple[slice, Tensor]]:
        """Columns and the view of them, ``[…, G, o, i']``, for all pieces; only where :attr:`is_contiguous`."""
        assert self._pieces is not None
        return [(piece.columns, piece.view(vector)) for piece in self._pieces]

    def gather(self, vector: Tensor) -> Tensor:
        """The array's entries of ``[…, P]`` vectors, ``[…, G, o, i]``, perhaps as a view; differentiable."""
        if self._index is not None:
            return vector[..., self._index.to(vector.device)]
        views = [view for _, view in self.views(vector)]
        return views[0] if len(views) == 1 else torch.cat(views, -1)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        if self._index is not None:
            vector[..., self._index.to(vector.device)] = values.to(vector.dtype)
            return
        for columns, view in self.views(vector):
            view.copy_(values[..., columns])

    def add_(self, vector: Tensor, values: Tensor) -> None:
        """Add ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        if self._index is not None:
            vector.index_add_(-1, self._index.flatten().to(vector.device), values.flatten(-3))
            return
        for columns, view in self.views(vector):
            view += values[..., columns]


def _pieces_of(index: Tensor) -> tuple[_Piece, ...] | None:
    columns = index.shape[2]
    if not index.numel():
        return None
    # A piece ends where the distance from one column to the next is not the usual one.
    steps = index[0, 0].diff()
    borders = (steps != steps.mode().values).nonzero().flatten() + 1 if len(steps) else steps
    if len(borders) >= _MOST_PIECES:
        return None
    edges = [0, *borders.tolist(), columns]
    pieces = [_piece_of(index[..., start:stop], slice(start, stop)) for start, stop in pairwise(edges)]
    found = tuple(piece for piece in pieces if piece is not None)
    return found if len(found) == len(pieces) else None


def _piece_of(index: Tensor, columns: slice) -> _Piece | None:
    shape = (index.shape[0], index.shape[1], index.shape[2])
    start = int(index[0, 0, 0])
    stride = [int(index.select(axis, 1)[0, 0]) - start if shape[axis] > 1 else 0 for axis in range(3)]
    order = sorted(range(3), key=lambda axis: -stride[axis])
    piece = _Piece(columns, start, shape, (order[0], order[1], order[2]))
    return piece if start >= 0 and torch.equal(piece.positions(), index.cpu()) else None
