"""Leaving data out of a ridge problem, without a factorisation: a criterion for its hyperparameters with derivatives.

Of ``w = argmin ‖Φ w − y‖² + λ² ‖w‖²`` without datum i, the residual at that datum is ``r_i / (1 − h_i)``, where
``r = y − Φ w`` and ``h_i = φ_iᵀ (ΦᵀΦ + λ²)⁻¹ φ_i`` (R. D. Cook, "Detection of influential observation in linear
regression", 1977). Both follow from one least-squares problem with the right-hand sides y and unit vectors e_i, since
``h_i`` is the i-th prediction for ``e_i``. With features of unit prior variance and noise ``σ = λ`` the datum left out
has the distribution ``N(y_i − r_i/(1 − h_i), σ²/(1 − h_i))`` of a Gaussian process with the kernel ``Φ Φᵀ`` (C. E.
Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006, section 5.4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.linalg import Dense, LeastSquaresSolution, Operator, lsmr


@dataclass(frozen=True)
class LeftOut:
    """Predictions of data that were left out, R of them; all tensors are differentiable.

    Attributes:
        residual: ``[R]``, targets less their predictions without them.
        leverage: ``[R]``, h, from 0 (others determine the prediction) to 1 (the datum alone does).
        weights: ``[M]``, w from all data.
        solution: That of :func:`~laplace_plus.linalg.lsmr`, for y and then for each unit vector.
    """

    residual: Tensor
    leverage: Tensor
    weights: Tensor
    solution: LeastSquaresSolution

    def nll(self, noise_std: float | Tensor) -> Tensor:
        """Mean of ``−log p(y_i | the others)`` in nats, 0-d, for features that were scaled to ``λ = noise_std``."""
        variance = noise_std**2 / (1 - self.leverage)
        return ((2 * math.pi * variance).log() + self.residual.square() / variance).mean() / 2


def ridge_left_out(
    features: Tensor | Operator, targets: Tensor, damp: float | Tensor, *, rows: Tensor | None = None, **options: Any
) -> LeftOut:
    """Leave data out of ``min ‖Φ w − y‖² + λ² ‖w‖²``, one at a time; differentiable in Φ, y and λ.

    Costs one LSMR with 1 + R right-hand sides, and as many again for derivatives. Memory is some ``(1 + R)(N + M)``
    numbers, whatever the number of iterations, and N × M for dense features.

    Args:
        features: Φ, ``[N, M]``; an operator needs its transpose.
        targets: y, ``[N]``.
        damp: λ > 0.
        rows: Numbers of the R data that are left out; all by default. A random choice, drawn anew in each step of an
            optimisation, estimates the mean over all.
        **options: Of :func:`~laplace_plus.linalg.lsmr`: ``atol``, ``btol``, ``max_iterations``, ``parameters``, ….

    Raises:
        ConfigurationError: Targets or damping that do not fit, or a bad option.
        NonFiniteError: NaN or infinity among the features or the targets.

    Example:
        >>> x = torch.linspace(-1, 1, 9, dtype=torch.float64)
        >>> found = ridge_left_out(torch.stack([torch.ones_like(x), x], 1), 2 * x, 1e-4)
        >>> bool(found.residual.abs().max() < 1e-6), round(found.leverage.sum().item(), 6)
        (True, 2.0)
    """
    n = features.shape[0]
    checks.shape("targets", targets, [n])
    checks.positive("damp", float(torch.as_tensor(damp).detach()))
    rows = torch.as_tensor(range(n) if rows is None else rows, device=targets.device)
    if isinstance(features, Tensor):
        options = {"parameters": [features]} | options
        features = Dense(features)
    units = torch.nn.functional.one_hot(rows, n).to(targets)
    solution = lsmr(features, features.T, torch.cat([targets[None], units]), damp=damp, **options)
    checks.finite("The solution", solution.value, "Look for NaN and infinite values among features and targets.")
    predicted = features(solution.value)
    leverage = predicted[1:].gather(1, rows[:, None])[:, 0]
    residual = (targets - predicted[0])[rows] / (1 - leverage)
    return LeftOut(residual, leverage, solution.value[0], solution)
