"""Where a structured block's entries lie in the parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from laplace_plus.structured.parameter_slices import ParameterSlices

MATRIX, EMBEDDING, CHANNELS, GENERAL = "matrix", "embedding", "per channel", "general"


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

    def __repr__(self) -> str:
        return f"Layout({self.key!r}, {list(self.shape)})"
