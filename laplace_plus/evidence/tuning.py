"""Tuning the prior precision, and the noise level with it.

The evidence's curvature is diagonalised before, so that an evaluation costs one pass over eigenvalues. With the
weights fixed and a positive semi-definite curvature H, the evidence is concave in the logarithms of all hyperparameters
together: ``det(e^b H + diag(e^u))`` is a sum of exponentials of linear functions with non-negative coefficients, so its
logarithm is convex. There is one optimum, and the coarse grid that all methods start from only shortens the way to it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.search import Objective
from laplace_plus.evidence.validation import validate
from laplace_plus.network import Network

METHODS = ("marginal_likelihood", "mackay", "em", "validation")


@dataclass(frozen=True)
class TuningResult:
    """What a tuning found, and how it ended.

    Attributes:
        method: Name of the method.
        prior_precision: 0-d, ``[L]`` or ``[P]``.
        noise_std: 0-d or ``[C]``; None if there is none or it was not tuned.
        value: The log evidence in nats, or minus the mean held-out loss.
        converged: Whether the tolerance was met; for validation, whether the best point lies within the grid.
        gradient_norm: Largest derivative of the evidence by a logarithm of a hyperparameter (away from bounds); NaN for
            validation.
        n_evaluations: How often the objective was evaluated.
    """

    method: str
    prior_precision: Tensor
    noise_std: Tensor | None
    value: float
    converged: bool
    gradient_norm: float
    n_evaluations: int


def tune(
    model: LaplaceModel,
    *,
    method: str,
    structure: str,
    initial: Tensor,
    temperature: Tensor,
    tune_noise: bool | None,
    network: Network,
    scaling: Tensor | None = None,
    data: Iterable[Any] | None = None,
    progress: bool = False,
    tolerance: float = 1e-3,
    max_iterations: int = 2000,
    **options: Any,
) -> TuningResult:
    """Tune hyperparameters.

    Args:
        model: The evidence's parts.
        method: One of ``METHODS``.
        structure: ``"scalar"``, ``"layerwise"`` (one precision for each of the model's groups) or ``"diagonal"``.
        initial: The current prior precision.
        temperature: The current temperature, which stays.
        tune_noise: Whether to tune the noise; None for whenever there is any.
        network: For held-out predictions.
        scaling: Positive ``[P]``: the prior precision of each entry over that of its group.
        data: Held-out batches, for ``"validation"``.
        progress: Whether to show a progress bar.
        tolerance: Converged when no derivative of the evidence by a log hyperparameter exceeds this, or the best step
            along the gradient would gain less (nats).
        max_iterations: Where to give up.
        **options: For ``"validation"``: see :func:`laplace_plus.evidence.validation.validate`.

    Raises:
        ConfigurationError: An unknown method, structure or option.
        DataError: All held-out targets are ignored.
        NonFiniteError: The loss on the held-out data is finite nowhere on the grid.

    Warns:
        ConvergenceWarning: The tolerance was not met, or the best point of the grid lies at its end.
    """
    if method not in METHODS:
        names = ", ".join([*METHODS, "leave_one_out"])
        raise ConfigurationError("Unknown tuning method.", expected=names, got=repr(method))
    objective = Objective.create(model, structure, temperature, tune_noise, scaling)
    if method == "validation":
        found = validate(objective, network, data, initial=initial, progress=progress, **options)
        if not found.converged:
            warnings.warn(
                f"Tuning by validation ended at {float(found.precision.mean()):.3g}, the last point of the grid that "
                "can be used, and the loss may still fall beyond: the data do not determine the precision, or the grid "
                "is too short.",
                ConvergenceWarning,
                stacklevel=3,
            )
        how = found.converged, float("nan"), found.n_evaluations
        return TuningResult(method, found.precision, found.noise_std, found.value, *how)
    if options or data is not None:
        unknown = ", ".join([*options, *(["data"] if data is not None else [])])
        raise ConfigurationError(f'Tuning by "{method}" takes no {unknown}.', expected='method="validation" for these')
    climb = ascend if method == "marginal_likelihood" else _fixed_point
    ticks = iter(progress_bar(itertools.count(), enabled=progress, description=f"tuning by {method}"))
    start = objective.start()
    value, point, evaluations = climb(objective, start, method, tolerance, max_iterations, ticks)
    _, gradient = objective.value_and_gradient(point)
    norm = free_gradient(objective, point, gradient).abs().max().item()
    converged = norm <= tolerance or predicted_gain(objective, point, gradient) <= tolerance
    pressing = (gradient - free_gradient(objective, point, gradient)).abs().max().item()
    if pressing > tolerance:
        converged = False
        warnings.warn(
            f"Tuning by {method} ended at the limits of the search, where the evidence still rises by {pressing:.2g} "
            "nats for each e-fold of a hyperparameter: the data do not determine it. Is the fit exact?",
            ConvergenceWarning,
            stacklevel=3,
        )
    elif not converged:
        warnings.warn(
            f"Tuning by {method} ended with a derivative of {norm:.2g} nats (tolerance {tolerance:.2g}) after "
            f"{evaluations} evaluations; raise max_iterations, or use method='marginal_likelihood'.",
            ConvergenceWarning,
            stacklevel=3,
        )
    precision, noise = objective.split(point)
    return TuningResult(method, precision.to(model.vector.dtype), noise, value, converged, norm, evaluations)


def ascend(
    objective: Objective, start: Tensor, method: str, tolerance: float, max_iterations: int, ticks: Iterator[int]
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


def _fixed_point(
    objective: Objective, start: Tensor, method: str, tolerance: float, max_iterations: int, ticks: Iterator[int]
) -> tuple[float, Tensor, int]:
    """MacKay's (1992) fixed point or expectation maximisation, see :func:`fixed_point_step`."""
    point = start
    for iteration in range(1, max_iterations + 1):
        next(ticks)
        value, gradient = objective.value_and_gradient(point)
        if free_gradient(objective, point, gradient).abs().max() <= tolerance / 10:
            return value, point, iteration
        point = fixed_point_step(objective, point, gradient, method)
    with torch.no_grad():
        return objective.value(point).item(), point, max_iterations


def effective_parameters(objective: Objective, point: Tensor, gradient: Tensor) -> Tensor:
    """``γ_g = d_g − ∂ log det Λ / ∂ log λ_g``, how many of each precision's entries the data determine.

    Taken from the evidence's gradient, ``∂E/∂log λ_g = ½ (γ_g − λ_g ‖θ−μ‖²_g)``.
    """
    n = objective.n_precisions
    effective = 2 * gradient[:n] + point[:n].exp() * objective.scatter()
    return effective.clamp(min=0.0).minimum(objective.sizes())


def fixed_point_step(objective: Objective, point: Tensor, gradient: Tensor, method: str) -> Tensor:
    """One step of MacKay's (1992) fixed point or of expectation maximisation.

    With ``γ_g`` effective parameters in group g (see :func:`effective_parameters`), MacKay sets
    ``λ_g = γ_g / ‖θ−μ‖²_g`` and EM ``λ_g = d_g / (‖θ−μ‖²_g + (d_g − γ_g)/λ_g)``; both set each noise level to
    ``σ² = SSE / (N − T γ)``.
    """
    n, precision = objective.n_precisions, point[: objective.n_precisions].exp()
    scatter, size = objective.scatter().clamp_min(1e-30), objective.sizes()
    effective = effective_parameters(objective, point, gradient)
    if method == "mackay":
        updated = (effective / scatter).clamp_min(1e-30).log()
    else:
        updated = (size / (scatter + (size - effective) / precision)).log()
    new = [updated]
    if objective.tune_noise:
        temperature = objective.temperature.double().cpu()
        sums, counts = objective.model.statistics.double().chunk(2)
        # dE/dlogσ = (SSE/σ² − N)/T + γ
        noise_effective = gradient[n:] - (sums / (2 * point[n:]).exp() - counts) / temperature
        new.append((sums / (counts - temperature * noise_effective).clamp_min(1e-12)).clamp_min(1e-30).log() / 2)
    low, high = objective.box
    return torch.cat(new).clamp(low, high)


def free_gradient(objective: Objective, point: Tensor, gradient: Tensor) -> Tensor:
    """The gradient without the entries that only press against a bound."""
    low, high = objective.box
    pressing = ((point <= low + 1e-9) & (gradient < 0)) | ((point >= high - 1e-9) & (gradient > 0))
    return gradient.masked_fill(pressing, 0.0)


def predicted_gain(objective: Objective, point: Tensor, gradient: Tensor, step: float = 1e-2) -> float:
    """What the best step along the gradient would still gain, in nats, by a quadratic model.

    With millions of parameters the evidence is large, and rounding hides steps that gain less than its last digits:
    the derivative then cannot reach an absolute tolerance, but there is nothing left to gain.
    """
    free = free_gradient(objective, point, gradient)
    slope = free.norm()
    _, ahead = objective.value_and_gradient(point + step * free / slope)
    curvature = (slope - ahead @ free / slope) / step
    return (slope.square() / (2 * curvature)).item() if curvature > 0 else float("inf")
