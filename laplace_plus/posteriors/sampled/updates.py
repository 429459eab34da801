"""One step of an alternation between samples and prior precisions: updates, and all that an interrupted one needs.

With the tangent model's optimum θ★ and the effective dimension γ_g of each group of parameters, of size d_g,

    MacKay (1992)                λ_g ← γ_g / ‖θ★_g − μ_g‖²
    expectation maximisation     λ_g ← d_g / (‖θ★_g − μ_g‖² + (d_g − γ_g) / λ_g)
    both                         σ² ← Σ residual² / (N C − T γ)

Both have the same fixed points, where the evidence of the tangent model is stationary. Expectation maximisation never
lowers the evidence, and is slower: where γ_g is far below d_g its steps are short far from any fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus.posteriors.resuming import Checkpoint

SampledMethod = Literal["mackay", "em"]

LARGEST_STEP = math.log(10)
"""Largest change of a precision's logarithm in one step: far from a fixed point γ is too inexact for longer ones."""

_TINY = torch.finfo(torch.float64).tiny

_LEAST = 1e-3
"""Least effective parameters of a group, far below any standard error of γ; the logarithm of zero has no limit."""


def mackay_steps(precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """``log(γ_g / (λ_g ‖θ★_g − μ_g‖²))``, ``[G]``: zero where the evidence is stationary.

    Arguments as for :func:`updated_precision`.
    """
    return (effective.clamp_min(_LEAST).minimum(size) / (precision * squares).clamp_min(_TINY)).log()


def updated_precision(
    method: SampledMethod, precision: Tensor, effective: Tensor, size: Tensor, squares: Tensor
) -> Tensor:
    """One update of the precisions ``[G]``, with a limited step.

    Args:
        method: ``"mackay"`` or ``"em"``.
        precision: λ_g.
        effective: γ_g, between 0 and the size.
        size: d_g.
        squares: ``‖θ★_g − μ_g‖²``.
    """
    if method == "mackay":
        step = mackay_steps(precision, effective, size, squares)
    else:
        effective = effective.clamp_min(_LEAST).minimum(size)
        step = (size / (precision * squares + size - effective).clamp_min(_TINY)).log()
    return precision * step.clamp(-LARGEST_STEP, LARGEST_STEP).exp()


def updated_noise(statistics: Tensor, effective: float, temperature: float) -> Tensor:
    """The noise level ``σ`` at which the evidence is stationary, 0-d float64.

    Args:
        statistics: Sum of squared residuals and number of outputs.
        effective: γ of all parameters.
        temperature: T.
    """
    total, count = statistics.double().cpu()
    return (total / (count - temperature * effective).clamp_min(1e-12)).clamp_min(1e-30).sqrt()


@dataclass(frozen=True)
class TuningStep:
    """One update.

    Attributes:
        prior_precision: After it, ``[G]``.
        noise_std: After it; None where there is none.
        effective_dimension: γ of every group at the precisions before, ``[G]``.
        sem: Its standard error over the samples, ``[G]``.
        squared_norm: ``‖θ★_g − μ_g‖²`` at the precisions before, ``[G]``.
        residual: How far the hyperparameters before were from a fixed point: the largest
            ``|log(γ_g / (λ_g ‖θ★_g − μ_g‖²))|``, or change of the logarithm of the noise variance.
        iterations: Solver iterations at the precisions after.
    """

    prior_precision: Tensor
    noise_std: Tensor | None
    effective_dimension: Tensor
    sem: Tensor
    squared_norm: Tensor
    residual: float
    iterations: int


@dataclass
class TuningState:
    """Where the iteration is; all that an interrupted one needs to continue.

    Attributes:
        precision: The current precisions, ``[G]``.
        noise_std: The current noise level.
        z: Samples: at these hyperparameters, or, while they are being solved for, at those before.
        steps: The updates so far.
        optimum: θ★ at the hyperparameters before.
        solver: The state of an unfinished solve.
        pending: The update whose solve is unfinished.
        sound: Whether all solves and optima so far have converged.
    """

    precision: Tensor
    noise_std: Tensor | None
    z: Tensor
    steps: list[TuningStep]
    optimum: Tensor | None = None
    solver: Mapping[str, Tensor] | None = None
    pending: TuningStep | None = None
    sound: bool = True

    def write(self, checkpoint: Checkpoint) -> None:
        """Write it down."""
        found = {name: getattr(self, name) for name in ("precision", "noise_std", "z", "optimum")}
        found |= {f"solver.{name}": value for name, value in (self.solver or {}).items()}
        steps = [*self.steps, *([] if self.pending is None else [self.pending])]
        for number, step in enumerate(steps):
            for name, value in vars(step).items():
                if value is not None:
                    found[f"step.{number}.{name}"] = torch.as_tensor(value, dtype=torch.float64)
        header: dict[str, Any] = {"steps": len(steps), "pending": self.pending is not None, "sound": self.sound}
        checkpoint.write("tuning", header, {name: value for name, value in found.items() if value is not None})

    @classmethod
    def read(cls, checkpoint: Checkpoint, device: torch.device) -> TuningState | None:
        """What was written; None if nothing was."""
        found = checkpoint.read("tuning", device)
        if found is None:
            return None
        header, tensors = found
        steps = []
        for number in range(header["steps"]):
            values: dict[str, Any] = {
                item.name: tensors.get(f"step.{number}.{item.name}") for item in fields(TuningStep)
            }
            values = {name: None if value is None else value.cpu() for name, value in values.items()}
            values |= {"residual": float(values["residual"]), "iterations": int(values["iterations"])}
            steps.append(TuningStep(**values))
        pending = steps.pop() if header["pending"] else None
        solver = {name.removeprefix("solver."): value for name, value in tensors.items() if name.startswith("solver.")}
        noise = tensors.get("noise_std")
        return cls(
            precision=tensors["precision"].cpu(),
            noise_std=None if noise is None else noise.cpu(),
            z=tensors["z"],
            steps=steps,
            optimum=tensors.get("optimum"),
            solver=solver or None,
            pending=pending,
            sound=header["sound"],
        )
