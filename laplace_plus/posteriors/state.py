"""What a fit finds: a frozen value, assigned when the fit has succeeded, shared by copies, and saved as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.persistence import stored


@stored
@dataclass(frozen=True)
class State:
    """What every method's fit finds; a method with more derives a stored, frozen dataclass of its own.

    Attributes:
        mean: The posterior mean in ``parameter_names`` order, ``[P]``.
        n_data: The number of examples.
        n_outputs: C, or 0 where the method does not say.

    Example:
        >>> import torch
        >>> @stored
        ... @dataclass(frozen=True)
        ... class Members(State):
        ...     members: Tensor
        >>> Members(torch.zeros(2), 10, 1, torch.ones(3, 2)).n_data
        10
    """

    mean: Tensor
    n_data: int
    n_outputs: int


def of_state(name: str, doc: str, check: Callable[[Any], Any] | None = None) -> Any:
    """A property of a fitted posterior, a field of its state; it can be set to what ``check`` returns, if given."""

    def get(posterior: Any) -> Any:
        posterior.require_fit()
        return getattr(posterior.state, name)

    def set_(posterior: Any, value: Any) -> None:
        assert check is not None
        posterior.require_fit()
        posterior.set_state(replace(posterior.state, **{name: check(value)}))

    return property(get, None if check is None else set_, doc=doc)


@stored
@dataclass(frozen=True)
class GaussianState(State):
    """Of a Gaussian posterior, the sums over the data, from which every number follows.

    Attributes:
        curvature: H at unit noise.
        statistics: The likelihood's additive statistics, on the CPU.
        travelled: Of a posterior that was continued: in place of ``|θ̂ − μ₀|``, the length of the way from task to
            task, ``[P]``.
    """

    curvature: Curvature
    statistics: Tensor
    travelled: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", self.statistics.cpu())

    def plus(self, other: GaussianState) -> Self:
        """The sums over both data sets; neither is changed."""
        return replace(
            self,
            curvature=self.curvature.clone().add_(other.curvature),
            statistics=self.statistics + other.statistics,
            n_data=self.n_data + other.n_data,
            n_outputs=other.n_outputs,
        )
