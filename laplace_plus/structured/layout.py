"""Where the entries of a block's ``[G, o, i]`` array lie in the parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

MATRIX, EMBEDDING, CHANNELS, GENERAL = "matrix", "embedding", "per channel", "general"


class Places:
    """Reads and writes the entries of an array with ``[G, o, i]`` positions ``index`` in vectors.

    Example:
        >>> weight_and_bias = torch.tensor([[[0, 1, 4], [2, 3, 5]]])
        >>> Places(weight_and_bias).gather(torch.arange(10, 16))
        tensor([[[10, 11, 14],
                 [12, 13, 15]]])
    """

    def __init__(self, index: Tensor):
        self.shape: tuple[int, int, int] = (index.shape[0], index.shape[1], index.shape[2])
        self._flat = index.flatten()

    def _on(self, device: torch.device) -> Tensor:
        self._flat = self._flat.to(device)
        return self._flat

    def gather(self, vector: Tensor) -> Tensor:
        """The array's entries of ``[…, P]`` vectors, ``[…, G, o, i]``; differentiable."""
        return vector.index_select(-1, self._on(vector.device)).unflatten(-1, self.shape)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        vector.index_copy_(-1, self._on(vector.device), values.flatten(-3).to(vector.dtype))

    def add_(self, vector: Tensor, values: Tensor) -> None:
        """Add ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        vector.index_add_(-1, self._on(vector.device), values.flatten(-3))


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
    def places(self) -> Places:
        """Reads and writes the block's entries in parameter vectors."""
        return Places(self.index)

    def gather(self, vector: Tensor) -> Tensor:
        """The block's part of ``[…, P]`` vectors, ``[…, G, o, i]``."""
        return self.places.gather(vector)

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their positions in ``[…, P]`` vectors."""
        self.places.scatter_(vector, values)
