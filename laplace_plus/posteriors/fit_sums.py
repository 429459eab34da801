"""What a fit adds up over the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.errors import DataError, NonFiniteError


@dataclass(frozen=True)
class FitSums:
    """What a fit adds up over the data.

    Attributes:
        curvature: H at unit noise.
        statistics: The likelihood's additive statistics.
        n_data: Number of examples seen.
        n_outputs: C.
    """

    curvature: Curvature
    statistics: Tensor
    n_data: int
    n_outputs: int

    def plus(self, other: FitSums) -> FitSums:
        """The sums over both data sets; neither is changed."""
        curvature = self.curvature.clone()
        curvature.add_(other.curvature)
        return replace(
            self, curvature=curvature, statistics=self.statistics + other.statistics, n_data=self.n_data + other.n_data
        )


def changed_shape(expected: str, got: str) -> DataError:
    """The error for a batch that does not go with those before it."""
    return DataError(
        "A batch is of another shape than the first one, and the network cannot take it.",
        expected=expected,
        got=got,
        fix="Let the loader yield inputs of one kind.",
    )


def require_finite(curvature: Curvature) -> None:
    """Raise :class:`NonFiniteError` for a curvature with NaN or infinity."""
    for layout, block in curvature:
        if not block.is_finite():
            raise NonFiniteError(
                f"The curvature of {', '.join(layout.names)} is not finite.",
                expected="finite activations and output gradients",
                got="NaN or Inf",
                fix="Look for NaNs in the data, or run the network in float32 if it overflows in half precision.",
            )
