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
        structure: ``"scalar"``, ``"layerwise"`` (one for each of the model's groups) or ``"diagonal"``.
        temperature: 0-d.
        tune_noise: Whether noise levels are searched too.
        scaling: Positive ``[P]``: the prior precision of each entry over that of its group; None for ones.
        limits: The box in which to search, if not :meth:`bounds`.
    """

    model: LaplaceModel
    structure: str
    temperature: Tensor
    tune_noise: bool
    scaling: Tensor | None = None
    limits: Tensor | None = None

    @classmethod
    def create(
        cls,
        model: LaplaceModel,
        structure: str,
        temperature: Tensor,
        tune_noise: bool | None,
        scaling: Tensor | None = None,
    ) -> Objective:
        """Check the choices; by default noise is tuned whenever the likelihood has any.

        Raises:
            ConfigurationError: An unknown structure, one for each entry that is scaled besides, or noise to be tuned
                that does not exist.
        """
        if structure not in STRUCTURES:
            raise ConfigurationError("Unknown prior structure.", expected=", ".join(STRUCTURES), got=repr(structure))
        has_noise = model.likelihood.noise_std is not None
        if tune_noise and not has_noise:
            raise ConfigurationError(
                "There is no noise to tune.", expected="a Gaussian likelihood", got=type(model.likelihood).__name__
            )
        if scaling is not None and structure == "diagonal":
            raise ConfigurationError(
                "A precision for each entry leaves nothing to scale.",
                expected='structure="scalar", "layerwise" or "normalized_groups" with scaling="g_prior"',
                got=repr(structure),
            )
        chosen = has_noise if tune_noise is None else tune_noise
        return cls(model, structure, temperature.detach(), chosen, scaling)

    @property
    def n_precisions(self) -> int:
        """How many prior precisions there are."""
        return {"scalar": 1, "layerwise": self.model.n_layers, "diagonal": len(self.model.vector)}[self.structure]

    @property
    def n_noise(self) -> int:
        """How many noise levels are searched."""
        return self.model.likelihood.n_noise if self.tune_noise else 0

    def split(self, logarithms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Precisions, of each entry where they are scaled, and noise levels (None if they are not searched)."""
        precision, noise = logarithms[: self.n_precisions].exp(), logarithms[self.n_precisions :].exp()
        if self.structure == "scalar":
            precision = precision[0]
        if self.scaling is not None:
            each = precision if self.structure == "scalar" else precision[self.model.layer_index.to(precision.device)]
            precision = each * self.scaling.to(precision.device)
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

    def scatter(self) -> Tensor:
        """``Σ s_j (θ̂−μ₀)_j²`` over the entries that share a precision, with their scaling s, ``[n_precisions]``."""
        if self.scaling is None:
            return self.model.scatter(self.structure).detach().cpu().view(-1)
        return self._sums(self.model.scatter("diagonal").detach().cpu() * self.scaling.double().cpu())

    def sizes(self) -> Tensor:
        """How many entries share each precision, ``[n_precisions]`` float64."""
        return self._sums(torch.ones(len(self.model.vector), dtype=torch.float64, device="cpu"))

    def _sums(self, entries: Tensor) -> Tensor:
        if self.structure == "diagonal":
            return entries
        if self.structure == "scalar":
            return entries.sum()[None]
        return entries.new_zeros(self.n_precisions).index_add(0, self.model.layer_index.cpu(), entries)

    def residual_noise(self) -> Tensor:
        """Log noise levels that the training residuals alone suggest, ``[n_noise]``."""
        sums, counts = self.model.statistics.double().chunk(2)
        return (sums / counts).clamp_min(1e-20).log() / 2

    def pack(self, log_precision: float, noise: Tensor | None = None) -> Tensor:
        """The point with one precision for all and given (by default: residual) log noise levels."""
        precisions = torch.full((self.n_precisions,), log_precision, dtype=torch.float64, device="cpu")
        if not self.tune_noise:
            return precisions
        return torch.cat([precisions, self.residual_noise() if noise is None else noise])

    def start(self) -> Tensor:
        """The best point of a coarse grid.

        Where the search starts does not decide where it ends, but far away from the optimum the evidence is flat.
        """
        centre = self._centre
        ends = min(math.log(1e-6), centre - 5), max(math.log(1e8), centre + 5)
        grid = torch.linspace(*ends, 29, dtype=torch.float64, device="cpu")
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
        squares = self.scatter().sum() / len(self.model.vector)
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
        """The least and the greatest point that is searched, ``[2, n]``."""
        if self.limits is not None:
            return self.limits
        return torch.tensor(self.bounds(), dtype=torch.float64, device="cpu").T
