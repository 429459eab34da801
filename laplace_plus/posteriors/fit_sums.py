"""What a fit adds up over the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from laplace_plus.curvature import Curvature


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
