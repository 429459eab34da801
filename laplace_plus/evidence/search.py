"""The space of hyperparameters that a tuning method searches: logarithms of precisions and noise levels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.priors import STRUCTURES

LOW, HIGH = math.log(1e-10), math.log(1e12)
"""Log precisions that the search may always reach."""

SPAN = math.log(1e30)
"""Beyond this, float32 has no numbers left."""


@dataclass(frozen=True)
class Objective:
    """The evidence as a function of one vector of logarithms, ``[log precisions…, log noise…]``.

    Attributes:
        model: What the evidence is a function of.
        structure: ``"scalar"``, ``"layerwise"`` or ``"diagonal"``.
        temperature: 0-d.
        tune_noise: Whether noise levels are searched too.
    """

    model: LaplaceModel
    structure: str
    temperature: Tensor
    tune_noise: bool

    @classmethod
    def create(cls, model: LaplaceModel, structure: str, temperature: Tensor, tune_noise: bool | None) -> Objective:
        """Check the choices; by default noise is tuned whenever the likelihood has any.

        Raises:
            ConfigurationError: An unknown structure, or noise to be tuned that does not exist.
        """
        if structure not in STRUCTURES:
            raise ConfigurationError("Unknown prior structure.", expected=", ".join(STRUCTURES), got=repr(structure))
        has_noise = model.likelihood.noise_std is not None
        if tune_noise and not has_noise:
            raise ConfigurationError(
                "There is no noise to tune.", expected="a Gaussian likelihood", got=type(model.likelihood).__name__
            )
        return cls(model, structure, temperature.detach(), has_noise if tune_noise is None else tune_noise)

    @property
    def n_precisions(self) -> int:
        """How many prior precisions there are."""
        return {"scalar": 1, "layerwise": self.model.n_layers, "diagonal": len(self.model.vector)}[self.structure]

    @property
    def n_noise(self) -> int:
        """How many noise levels are searched."""
        return self.model.likelihood.n_noise if self.tune_noise else 0

    def split(self, logarithms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Precisions and noise levels (None if they are not searched)."""
        precision, noise = logarithms[: self.n_precisions].exp(), logarithms[self.n_precisions :].exp()
        if self.structure == "scalar":
            precision = precision[0]
        if not self.tune_noise:
            return precision, None
        own = self.model.likelihood.noise_std
        return precision, noise[0] if own is not None and own.ndim == 0 else noise

    def value(self, logarithms: Tensor) -> Tensor:
        """The log evidence; differentiable."""
        precision, noise = self.split(logarithms)
        return self.model.log_marginal_likelihood(precision, self.temperature, noise)

    def value_and_gradient(self, logarithms: Tensor) -> tuple[float, Tensor]:
        """The log evidence and its gradient."""
        with torch.enable_grad():
            point = logarithms.detach().clone().requires_grad_()
            value = self.value(point)
            (gradient,) = torch.autograd.grad(value, point)
        return value.item(), gradient

    def residual_noise(self) -> Tensor:
        """Log noise levels that the training residuals alone suggest, ``[n_noise]``."""
        sums, counts = self.model.statistics.double().chunk(2)
        return (sums / counts).clamp_min(1e-20).log() / 2

    def pack(self, log_precision: float, noise: Tensor | None = None) -> Tensor:
        """The point with one precision for all and given (by default: residual) log noise levels."""
        precisions = torch.full((self.n_precisions,), log_precision, dtype=torch.float64)
        if not self.tune_noise:
            return precisions
        return torch.cat([precisions, self.residual_noise() if noise is None else noise])

    def start(self) -> Tensor:
        """The best point of a coarse grid.

        Where the search starts does not decide where it ends, but far away from the optimum the evidence is flat.
        """
        centre = self._centre
        grid = torch.linspace(min(math.log(1e-6), centre - 5), max(math.log(1e8), centre + 5), 29, dtype=torch.float64)
        shifts = (-1.0, 0.0, 0.7) if self.tune_noise else (0.0,)
        noises = [self.residual_noise() + shift if self.tune_noise else None for shift in shifts]
        # One precision for all: the evidence is that of a scalar prior, whatever the structure.
        alike = replace(self, structure="scalar")
        points = [(level, noise) for level in grid.tolist() for noise in noises]
        with torch.no_grad():
            return self.pack(*max(points, key=lambda point: alike.value(alike.pack(*point)).item()))

    @cached_property
    def _centre(self) -> float:
        """Logarithm of the precision that the parameters' size alone suggests."""
        squares = self.model.scatter("scalar").detach() / len(self.model.vector)
        return -math.log(squares.clamp(1e-16, 1e26).item())

    def bounds(self) -> list[tuple[float, float]]:
        """Box in which the search stays, wide on the scale of the parameters."""
        centre = self._centre
        precision = (max(min(LOW, centre - 30), -SPAN), min(max(HIGH, centre + 30), SPAN))
        result = [precision] * self.n_precisions
        if self.tune_noise:
            result += [(noise.item() - 12, noise.item() + 8) for noise in self.residual_noise()]
        return result

    @cached_property
    def box(self) -> Tensor:
        """The least and the greatest point of :meth:`bounds`, ``[2, n]``."""
        return torch.tensor(self.bounds(), dtype=torch.float64).T
