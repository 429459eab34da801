"""Where the entries of a block lie in the parameter vector."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from laplace_plus.network import Network
from laplace_plus.structured.parameter_slices import ParameterSlices

MATRIX, EMBEDDING, CHANNELS, GENERAL = "matrix", "embedding", "per channel", "general"


class Layout:
    """Where a block's ``[G, o, i]`` array lies in the parameter vector.

    Args:
        key: Identifies the block within its network.
        names: The parameters that it covers, wholly or in part.
        rule: How its gradients come about: ``"matrix"``, ``"embedding"``, ``"per channel"`` or ``"general"``.
        index: ``[G, o, i]`` positions in the parameter vector, −1 for entries that are not selected; or a function that
            gives them, where all are selected, since eight bytes for each weight are not needed by everybody.
        shape: The index's shape, where it is a function.
    """

    def __init__(
        self,
        key: str,
        names: tuple[str, ...],
        rule: str,
        index: Tensor | Callable[[], Tensor],
        shape: tuple[int, ...] | None = None,
    ):
        self.key, self.names, self.rule = key, names, rule
        self._index = index
        size = tuple(index.shape) if isinstance(index, Tensor) else shape
        assert size is not None
        self.shape: tuple[int, int, int] = (size[0], size[1], size[2])

    @property
    def index(self) -> Tensor:
        """``[G, o, i]`` positions in the parameter vector; −1 for entries that are not selected."""
        return self._index if isinstance(self._index, Tensor) else self._index()

    @cached_property
    def parameter_slices(self) -> ParameterSlices:
        """Reads and writes the block's entries, which are all selected, in parameter vectors."""
        return ParameterSlices(self.index)

    @property
    def n_entries(self) -> int:
        """G·o·i."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every entry is selected."""
        return not isinstance(self._index, Tensor) or bool((self._index >= 0).all())

    @cached_property
    def selected(self) -> Layout:
        """The layout itself, or, where only some of its entries are selected, those as one row."""
        if self.is_whole:
            return self
        flat = self.index.flatten()
        return Layout(self.key, self.names, GENERAL, flat[flat >= 0][None, None])

    @cached_property
    def chosen(self) -> Tensor:
        """``[n]`` places of the selected entries in the flattened ``[G, o, i]`` array."""
        return (self.index.flatten() >= 0).nonzero().squeeze(-1)

    def gather(self, vector: Tensor) -> Tensor:
        """The block's part of ``[…, P]`` vectors, ``[…, G, o, i]``."""
        return self.parameter_slices.gather(vector)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        self.parameter_slices.scatter_(vector, values)

    def __repr__(self) -> str:
        return f"Layout({self.key!r}, {list(self.shape)})"


def whole_layout(network: Network) -> Layout:
    """One block that covers the parameter vector in its own order."""
    total = network.n_parameters
    return Layout("all", network.parameter_names, GENERAL, partial(_counted, total), (1, 1, total))


def _counted(total: int) -> Tensor:
    return torch.arange(total)[None, None]
