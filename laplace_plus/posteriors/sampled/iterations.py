"""Resumable iterations for ``A X = B`` with many right-hand sides, whose whole state can be written down and read back.

:func:`laplace_plus.linalg.cg` solves a system in one call. Where each product is a pass over a large data set, a solve
takes hours: these iterations do one step at a time and give their state as tensors, from which another process goes on
bit for bit where the first one stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import NonFiniteError
from laplace_plus.linalg.linear_maps import require_finite

Rows = Callable[[Tensor], Tensor]
"""A linear function of row-stacked vectors ``[k, n]``."""


class Iteration(ABC):
    """What every resumable iteration has.

    Attributes:
        x: The iterate ``[k, n]``.
        iteration: Number of steps so far.
    """

    x: Tensor
    iteration: int

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on; the number of steps is among it, as a tensor."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` returned."""


class ConjugateGradientIteration(Iteration):
    """Preconditioned conjugate gradients on all rows together, each with coefficients of its own.

    Rows that have converged rest. The residual is that of the recurrence.

    Args:
        product: A, symmetric positive definite.
        b: Right-hand sides ``[k, n]``.
        x: First guess, overwritten; zero where None.
        precondition: ``P⁻¹``, symmetric positive definite.
        tolerance: A row has converged once ``‖r‖ ≤ tolerance ‖b‖``.

    Source: Hestenes and Stiefel (1952), Methods of conjugate gradients for solving linear systems.

    Example:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> iteration = ConjugateGradientIteration(lambda v: v @ A, torch.tensor([[3.0, 4.0]]), tolerance=1e-5)
        >>> while not iteration.done:
        ...     iteration.step()
        >>> iteration.x.round(decimals=4)
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        product: Rows,
        b: Tensor,
        x: Tensor | None = None,
        *,
        precondition: Rows | None = None,
        tolerance: float,
        state: Mapping[str, Tensor] | None = None,
    ):
        self._product, self._precondition = product, precondition
        self._target = tolerance * b.norm(dim=-1)
        self.iteration = 0
        if state is not None:
            self.restore(state)
            return
        if x is None:
            self.x, self._residual = torch.zeros_like(b), b.clone()
        else:
            self.x, self._residual = x, b - product(x)
        preconditioned = self._preconditioned()
        self._direction = preconditioned.clone()
        self._energy = _inner(self._residual, preconditioned)

    @property
    def residual_norm(self) -> Tensor:
        """``‖r‖`` of the recurrence, ``[k]``."""
        return self._residual.norm(dim=-1)

    @property
    def done(self) -> bool:
        """Whether every row has converged."""
        return bool((self.residual_norm <= self._target).all())

    def step(self) -> None:
        """One product, and the next iterate.

        Raises:
            NonFiniteError: A product is NaN or infinite.
        """
        active = self.residual_norm > self._target
        self._direction.masked_fill_(~active[:, None], 0.0)
        image = self._product(self._direction)
        require_finite("conjugate gradients", image)
        curvature = _inner(self._direction, image)
        active &= (curvature > 0) & (self._energy > 0)
        alpha = torch.where(active, self._energy / torch.where(active, curvature, 1.0), 0.0)
        self.x.addcmul_(alpha[:, None], self._direction)
        self._residual.addcmul_(-alpha[:, None], image)
        del image
        preconditioned = self._preconditioned()
        energy = _inner(self._residual, preconditioned)
        beta = torch.where(active, energy / torch.where(active, self._energy, 1.0), 0.0)
        self._direction.mul_(beta[:, None]).add_(preconditioned)
        self._energy = energy
        self.iteration += 1

    def _preconditioned(self) -> Tensor:
        return self._residual if self._precondition is None else self._precondition(self._residual)

    @override
    def state(self) -> dict[str, Tensor]:
        return {
            "x": self.x,
            "residual": self._residual,
            "direction": self._direction,
            "energy": self._energy,
            "iteration": torch.tensor(self.iteration),
        }

    @override
    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.x, self._residual = state["x"].clone(), state["residual"].clone()
        self._direction, self._energy = state["direction"].clone(), state["energy"].clone()
        self.iteration = int(state["iteration"])


class NesterovIteration(Iteration):
    """Stochastic gradient descent with Nesterov's momentum, a learning rate that falls linearly, and clipping.

    ``v ← μ v + g``, ``x ← x − η (g + μ v)`` (Sutskever et al., 2013) with gradients ``g = Â x − b``, whose
    product alone is stochastic.

    Args:
        b: Right-hand sides ``[k, n]``.
        x: First guess, overwritten; zero where None.
        learning_rate: η at the first step.
        total: Number of steps in which it falls.
        final: Part of it that is left at the last step.
        momentum: μ.
        clip: A row's gradient is never longer than so many times ``‖b‖``; None for no limit.
        average: Part of the steps, at the end, of which the iterates are averaged (Polyak and Juditsky, 1992); 0 for
            the last iterate.
    """

    def __init__(
        self,
        b: Tensor,
        x: Tensor | None = None,
        *,
        learning_rate: float,
        total: int,
        final: float,
        momentum: float,
        clip: float | None,
        average: float,
        state: Mapping[str, Tensor] | None = None,
    ):
        self._b, self._learning_rate, self._total, self._final = b, learning_rate, total, final
        self._momentum, self._clip = momentum, clip
        self._longest = b.norm(dim=-1)
        self._averaged_from = total - round(average * total)
        self.iteration = 0
        if state is not None:
            self.restore(state)
            return
        self.x = torch.zeros_like(b) if x is None else x
        self._velocity = torch.zeros_like(b)
        self._mean: Tensor | None = torch.zeros_like(b) if self._averaged_from < total else None

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        done = min(1.0, self.iteration / max(1, self._total - 1))
        return self._learning_rate * (1 - done * (1 - self._final))

    def step(self, product: Rows) -> None:
        """One step along the gradient ``product(x) − b``.

        Raises:
            NonFiniteError: The iterates diverged.
        """
        gradient = product(self.x).sub_(self._b)
        norm = gradient.norm(dim=-1)
        if not bool(torch.isfinite(norm).all()):
            raise NonFiniteError(
                f"Stochastic gradient descent diverged after {self.iteration} steps.",
                expected="finite gradients",
                got="NaN or infinity",
                fix=f"Lower the learning rate, which is {self.rate:.3g}, or use conjugate gradients.",
            )
        if self._clip is not None:
            gradient.mul_((self._clip * self._longest / norm.clamp_min(1e-30)).clamp_max(1.0)[:, None])
        self._velocity.mul_(self._momentum).add_(gradient)
        rate = self.rate
        self.x.add_(gradient, alpha=-rate).add_(self._velocity, alpha=-rate * self._momentum)
        self.iteration += 1
        if self._mean is not None and self.iteration > self._averaged_from:
            self._mean.lerp_(self.x, 1 / (self.iteration - self._averaged_from))

    @property
    def result(self) -> Tensor:
        """The average of the last iterates, or the last one."""
        return self.x if self._mean is None or self.iteration <= self._averaged_from else self._mean

    @override
    def state(self) -> dict[str, Tensor]:
        state = {"x": self.x, "velocity": self._velocity, "iteration": torch.tensor(self.iteration)}
        state["rate"] = torch.tensor(self._learning_rate, dtype=torch.float64)
        return state if self._mean is None else {**state, "mean": self._mean}

    @override
    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.x, self._velocity = state["x"].clone(), state["velocity"].clone()
        self._mean = state["mean"].clone() if "mean" in state else None
        self._learning_rate = float(state["rate"])
        self.iteration = int(state["iteration"])


def largest_eigenvalue(product: Rows, start: Tensor, iterations: int) -> float:
    """A lower bound of the largest eigenvalue of a positive semi-definite matrix, by power iterations on a few rows.

    Args:
        product: The matrix.
        start: Random rows ``[m, n]``.
        iterations: Number of products.
    """
    vectors = start / start.norm(dim=-1, keepdim=True)
    found = torch.zeros(len(vectors), dtype=vectors.dtype, device=vectors.device)
    for _ in range(iterations):
        vectors = product(vectors)
        found = vectors.norm(dim=-1)
        vectors = vectors / found.clamp_min(1e-30)[:, None]
    return float(found.max())


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("kn,kn->k", a, b)
