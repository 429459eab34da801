"""The evidence as a function of logarithms of precisions and noise levels, and ways to climb it.

With the weights fixed and a positive semi-definite curvature H, the evidence is concave in the logarithms of all
hyperparameters together: ``det(e^b H + diag(e^u))`` is a sum of exponentials of linear functions with non-negative
coefficients, so its logarithm is convex. There is one optimum; the coarse grid of :meth:`Objective.start` only shortens
the way to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.evidence.groups import g_prior_scaling
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.tuning import tunes_noise
from laplace_plus.priors import PriorStructure

LOW, HIGH = math.log(1e-10), math.log(1e12)
"""Log precisions that the search may always reach: weights of standard deviations from 1e-6 to 1e5."""

SPAN = math.log(1e30)
"""Largest log precision, in absolute value: float32 ends at 1e38."""

NOISE_SHIFTS = (-1.0, 0.0, 0.7)
"""Log noise levels of the coarse grid, beside those of the residuals: with T < 1 or many parameters they differ."""


@dataclass(frozen=True)
class Objective:
    """The evidence as a function of one vector of logarithms, ``[log precisions…, log noise…]``, float64 on the CPU.

    Attributes:
        model: What the evidence is a function of.
        structure: ``"scalar"``, ``"layerwise"`` (one precision for each of the model's groups) or ``"diagonal"``.
        temperature: 0-d.
        tune_noise: Whether noise levels are searched too.
        scaling: Positive ``[P]``: the prior precision of each entry over that of its group; None for ones.
        limits: The box ``[2, n]`` in which to search; None for the default.
    """

    model: LaplaceModel
    structure: PriorStructure
    temperature: Tensor
    tune_noise: bool
    scaling: Tensor | None = None
    limits: Tensor | None = None

    @classmethod
    def create(
        cls,
        model: LaplaceModel,
        structure: PriorStructure,
        temperature: Tensor,
        tune_noise: bool | None = None,
        scaling: str | None = None,
    ) -> Objective:
        """Check the choices.

        Raises:
            ConfigurationError: A scaling beside one precision for each entry, or noise to be tuned that does not exist.
        """
        chosen = tunes_noise(model.likelihood, tune_noise)
        if scaling is not None and structure == "diagonal":
            raise ConfigurationError(
                "A precision for each entry leaves nothing to scale.",
                expected='structure="scalar", "layerwise" or "normalized_groups" with scaling="g_prior"',
                got=repr(structure),
            )
        diagonal = None if scaling is None else g_prior_scaling(model, structure)
        return cls(model, structure, temperature.detach(), chosen, diagonal)

    @property
    def n_precisions(self) -> int:
        """How many prior precisions there are."""
        return {"scalar": 1, "layerwise": self.model.n_layers, "diagonal": len(self.model.vector)}[self.structure]

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

    def noise_grid(self) -> list[Tensor]:
        """Log noise levels to start from; one empty tensor where they are not searched."""
        if not self.tune_noise:
            return [torch.zeros(0, dtype=torch.float64, device="cpu")]
        return [self.residual_noise() + shift for shift in NOISE_SHIFTS]

    def start(self) -> Tensor:
        """The best point of a coarse grid: far away from the optimum the evidence is flat."""
        centre = self._centre
        ends = min(math.log(1e-6), centre - 5), max(math.log(1e8), centre + 5)
        # One precision for all: the evidence is that of a scalar prior, whatever the structure.
        alike = replace(self, structure="scalar")
        grid = torch.linspace(*ends, 29, dtype=torch.float64, device="cpu")[:, None]
        points = [torch.cat([level, noise]) for level in grid for noise in self.noise_grid()]
        with torch.no_grad():
            best = max(points, key=lambda point: alike.value(point).item())
        return torch.cat([best[:1].expand(self.n_precisions), best[1:]])

    @cached_property
    def _centre(self) -> float:
        """Logarithm of the precision that the parameters' size alone suggests."""
        squares = self.scatter().sum() / len(self.model.vector)
        return -math.log(squares.clamp(1e-16, 1e26).item())

    @cached_property
    def box(self) -> Tensor:
        """The least and the greatest point that is searched, ``[2, n]``; wide on the scale of the parameters."""
        if self.limits is not None:
            return self.limits
        ends = max(min(LOW, self._centre - 30), -SPAN), min(max(HIGH, self._centre + 30), SPAN)
        box = torch.tensor(ends, dtype=torch.float64, device="cpu")[:, None].expand(2, self.n_precisions)
        if not self.tune_noise:
            return box
        noise = self.residual_noise()
        return torch.cat([box, torch.stack([noise - 12, noise + 8])], 1)

    def effective_parameters(self, point: Tensor, gradient: Tensor) -> Tensor:
        """``γ_g = d_g − ∂ log det Λ / ∂ log λ_g``, how many of each precision's entries the data determine.

        Taken from the evidence's gradient, ``∂E/∂log λ_g = ½ (γ_g − λ_g ‖θ−μ‖²_g)``.
        """
        n = self.n_precisions
        effective = 2 * gradient[:n] + point[:n].exp() * self.scatter()
        return effective.clamp(min=0.0).minimum(self.sizes())

    def free_gradient(self, point: Tensor, gradient: Tensor) -> Tensor:
        """The gradient without the entries that only press against a bound."""
        low, high = self.box
        pressing = ((point <= low + 1e-9) & (gradient < 0)) | ((point >= high - 1e-9) & (gradient > 0))
        return gradient.masked_fill(pressing, 0.0)

    def predicted_gain(self, point: Tensor, gradient: Tensor, step: float = 1e-2) -> float:
        """What the best step along the gradient would still gain, in nats, by a quadratic model.

        With millions of parameters the evidence is large, and rounding hides steps that gain less than its last digits:
        the derivative then cannot reach an absolute tolerance, but there is nothing left to gain.
        """
        free = self.free_gradient(point, gradient)
        slope = free.norm()
        _, ahead = self.value_and_gradient(point + step * free / slope)
        curvature = (slope - ahead @ free / slope) / step
        return (slope.square() / (2 * curvature)).item() if curvature > 0 else math.inf


def ascend(
    objective: Objective, start: Tensor, tolerance: float, max_iterations: int, ticks: Iterator[int]
) -> tuple[float, Tensor, int]:
    """L-BFGS with bounds and line search (Byrd et al., 1995): value, point and number of evaluations."""

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        next(ticks)
        value, gradient = objective.value_and_gradient(torch.from_numpy(x))
        return -value, -gradient.numpy()

    result = minimize(
        negative,
        start.numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=objective.box.T.tolist(),
        options={"maxiter": max_iterations, "maxfun": 10 * max_iterations, "gtol": tolerance / 10, "ftol": 1e-15},
    )
    return -float(result.fun), torch.from_numpy(result.x), int(result.nfev)


def fixed_point_step(objective: Objective, point: Tensor, gradient: Tensor, method: str) -> Tensor:
    """One step of MacKay's (1992) fixed point or of expectation maximisation.

    With ``γ_g`` effective parameters in group g, MacKay sets ``λ_g = γ_g / ‖θ−μ‖²_g`` and EM
    ``λ_g = d_g / (‖θ−μ‖²_g + (d_g − γ_g)/λ_g)``; both set each noise level to ``σ² = SSE / (N − T γ)``.

    Args:
        objective: The evidence.
        point: Where to step from.
        gradient: The evidence's gradient there.
        method: ``"mackay"`` or ``"em"``.
    """
    n, precision = objective.n_precisions, point[: objective.n_precisions].exp()
    scatter, size = objective.scatter().clamp_min(1e-30), objective.sizes()
    effective = objective.effective_parameters(point, gradient)
    if method == "mackay":
        new = [(effective / scatter).clamp_min(1e-30).log()]
    else:
        new = [(size / (scatter + (size - effective) / precision)).log()]
    if objective.tune_noise:
        temperature = objective.temperature.double().cpu()
        sums, counts = objective.model.statistics.double().chunk(2)
        # dE/dlogσ = (SSE/σ² − N)/T + γ
        noise_effective = gradient[n:] - (sums / (2 * point[n:]).exp() - counts) / temperature
        new.append((sums / (counts - temperature * noise_effective).clamp_min(1e-12)).clamp_min(1e-30).log() / 2)
    low, high = objective.box
    return torch.cat(new).clamp(low, high)
