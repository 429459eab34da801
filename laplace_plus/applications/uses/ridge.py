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

from laplace_plus.applications.uses.checks import require_finite
from laplace_plus.errors import ConfigurationError
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
        ConfigurationError: Features, targets, damping or rows that do not fit, or a bad option.
        NonFiniteError: NaN or infinity among the features or the targets.

    Example:
        >>> x = torch.linspace(-1, 1, 9, dtype=torch.float64)
        >>> found = ridge_left_out(torch.stack([torch.ones_like(x), x], 1), 2 * x, 1e-4)
        >>> bool(found.residual.abs().max() < 1e-6), round(found.leverage.sum().item(), 6)
        (True, 2.0)
    """
    if features.ndim != 2 if isinstance(features, Tensor) else not isinstance(features, Operator):  # noqa: PLR2004
        what, got = "The features are no matrix.", getattr(features, "shape", type(features).__name__)
        raise ConfigurationError(what, expected="a tensor [N, M] or an operator", got=str(got))
    n = features.shape[0]
    if targets.shape != (n,) or not targets.is_floating_point():
        got = f"{targets.dtype} of shape {list(targets.shape)}"
        raise ConfigurationError("The targets do not fit the features.", expected=f"reals [{n}]", got=got)
    rows = torch.as_tensor(range(n) if rows is None else rows, device=targets.device)
    if not 0 < float(torch.as_tensor(damp).detach()) < math.inf:
        raise ConfigurationError("There is no such damping.", expected="a finite damp > 0", got=repr(damp))
    if rows.ndim != 1 or rows.is_floating_point() or not bool(((rows >= 0) & (rows < n)).all()):
        raise ConfigurationError(
            "The rows are none of the data.", expected=f"integers from 0 to {n - 1}", got=f"{rows}"
        )
    if isinstance(features, Tensor):
        options = {"parameters": [features]} | options
        features = Dense(features)
    units = torch.nn.functional.one_hot(rows, n).to(targets)
    solution = lsmr(features, features.T, torch.cat([targets[None], units]), damp=damp, **options)
    require_finite("features, targets, or weights", solution.value)
    predicted = features(solution.value)
    leverage = predicted[1:].gather(1, rows[:, None])[:, 0]
    residual = (targets - predicted[0])[rows] / (1 - leverage)
    return LeftOut(residual, leverage, solution.value[0], solution)
