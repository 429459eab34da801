"""A likelihood from a plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.distributions import Distribution

from laplace_plus.likelihoods.base import Likelihood
from laplace_plus.likelihoods.checks import widen


@final
class LogDensity(Likelihood):
    """A likelihood with a user-defined log-density.

    Args:
        function: ``(outputs [N, C], targets [N, ...]) -> [N]``, the log-density of every row, all constants included,
            twice differentiable in the outputs.
        distribution: ``outputs [..., C] -> torch.distributions.Distribution``; without it predictions have a mean (the
            network's outputs) and a log-density, but no variance and no entropy.
        output_axis: The axis of the outputs in the network's output.

    Example:
        >>> import torch
        >>> cauchy = LogDensity(lambda f, y: torch.distributions.Cauchy(f, 1.0).log_prob(y).sum(-1))
        >>> cauchy.log_density(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([-1.1447])
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        distribution: Callable[[Tensor], Distribution] | None = None,
        *,
        output_axis: int = -1,
    ):
        self._function = function
        self._distribution = distribution
        self.output_axis = output_axis

    def __repr__(self) -> str:
        return f"LogDensity({getattr(self._function, '__qualname__', self._function)})"

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The function's value, ``[N]``."""
        return self._function(widen(outputs), targets)

    def distribution(self, outputs: Tensor) -> Distribution:
        """``p(y|f)``, if it was given.

        Raises:
            UnsupportedError: If not.
        """
        if self._distribution is None:
            return super().distribution(outputs)
        return self._distribution(widen(outputs))

    def config(self) -> dict[str, Any]:
        """``{"name": "custom", "class": …}`` with the function's qualified name."""
        module = getattr(self._function, "__module__", None)
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return {"name": "custom", "class": f"{module}.{name}" if module else name}
