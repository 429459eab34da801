"""What becomes of a posterior that is copied or pickled."""

from __future__ import annotations

from typing import Any, Self

from laplace_plus.network import Network
from laplace_plus.posteriors.training_data import TrainingData


class Copied:
    """Shallow copies remember the network's weights for themselves; pickles and deep copies go without the data."""

    network: Network

    _holds_data: tuple[str, ...] = ()
    """Attributes that hold the training data, and that a class can do without."""

    def __copy__(self) -> Self:
        result = object.__new__(type(self))
        vars(result).update(vars(self))
        # A later fit of one of the two is to new weights, which are no news to that one alone.
        result.network = self.network.twin()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(self._holds_data) | {"_data": TrainingData()}
