"""What becomes of a posterior that is copied."""

from __future__ import annotations

from typing import Self

from laplace_plus.network import Network


class Copied:
    """Shallow copies remember the network's weights for themselves."""

    network: Network

    def __copy__(self) -> Self:
        result = object.__new__(type(self))
        vars(result).update(vars(self))
        # A later fit of one of the two is to new weights, which are no news to that one alone.
        result.network = self.network.twin()
        return result
