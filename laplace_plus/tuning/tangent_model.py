"""The network's tangent as a model of its own, and its optimum.

    h(θ, x) = f(θ̃, x) + J(x) (θ − θ̃)

is linear in the parameters. For log-concave likelihoods its penalised loss is convex and has one optimum θ*, however
the network was trained (Antorán et al., 2022). θ̃ are the network's weights. The prior is on θ itself, not on θ − θ̃.

All sums stream over the data, which may come in another order in each pass. For small problems the Jacobian of all data
is kept instead, and later passes do not run the network.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace_plus.curvature.streaming import CHUNK_SIZE, Stream
from laplace_plus.errors import NonFiniteError
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network.linearization import WrittenJacobian
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.priors import GaussianPrior

_KEPT_BYTES = 2 * 2**30
"""A Jacobian of all data up to this size is kept: products with it take a tenth of the time of derivatives."""

_PAIRS = 20
"""Steps that L-BFGS remembers."""


class Evaluation(NamedTuple):
    """A loss at one point, its gradient ``[P]`` float64, and the likelihood's statistics there."""

    value: float
    gradient: Tensor
    statistics: Tensor

    @property
    def is_finite(self) -> bool:
        """Whether value and gradient are finite."""
        return math.isfinite(self.value) and bool(torch.isfinite(self.gradient).all())


class TangentModel:
    """``h(θ, x) = f(θ̃, x) + J(x) (θ − θ̃)`` on data, under a likelihood; points are deviations ``θ − θ̃``, ``[P]``.

    Args:
        network: The network, or a module of which all parameters that require gradients are taken.
        likelihood: A name or a :class:`~laplace_plus.Likelihood`.
        data: An iterable of batches that can be started again; the order may change, the examples may not.
        temperature: Divides the log-likelihood.
        chunk_size: Number of vectors that are pushed through the network at a time.

    Attributes:
        vector: θ̃, ``[P]``.

    Raises:
        DataError: Data that can be run over only once, or of no known form.
        LabelError: Targets that do not fit the likelihood.
        NonFiniteError: NaN or infinity in the parameters, the inputs or the outputs.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(20, 3, dtype=torch.float64)
        >>> model = TangentModel(nn.Linear(3, 1).double(), "regression", [(x, x.sum(1, keepdim=True))])
        >>> best = tangent_optimum(model, 1e-6)
        >>> torch.allclose(best.vector, torch.tensor([1.0, 1.0, 1.0, 0.0]).double(), atol=1e-4)
        True
    """

    def __init__(
        self,
        network: Network | nn.Module,
        likelihood: str | Likelihood,
        data: Iterable[Any],
        *,
        temperature: float | Tensor = 1.0,
        chunk_size: int = CHUNK_SIZE,
    ):
        self.likelihood = resolve_likelihood(likelihood)
        self._stream = Stream(network, self.likelihood.arrange, data, chunk_size, progress=False)
        self.network = self._stream.network
        self.temperature = torch.as_tensor(temperature, dtype=torch.float64).detach()
        with exact_arithmetic(self.network):
            for batch, outputs in self._stream.survey("tangent model: data"):
                self.likelihood.validate(outputs, batch.target)
            self.vector = self.network.vector()
            n_bytes = self._stream.n_outputs * len(self.vector) * self.vector.element_size()
            self._kept = None
            if n_bytes <= _KEPT_BYTES:
                batches = self._stream.batches("tangent model", ordered=False)
                self._kept = [(batch, WrittenJacobian(self.network, batch.inputs)) for batch in batches]

    def with_likelihood(self, likelihood: Likelihood) -> TangentModel:
        """The same model under another likelihood, e.g. with another noise; all else is shared."""
        result = copy.copy(self)
        result.likelihood = likelihood
        return result

    def evaluate(self, deviation: Tensor) -> Evaluation:
        """The loss ``−log p(D | h(θ))/T``, its gradient and statistics at a deviation ``[P]``, in one pass."""
        gradient = torch.zeros(len(self.vector), dtype=torch.float64, device=self.vector.device)
        statistics, pushed = torch.zeros(()), deviation.to(self.vector)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch, line in self._kept or self._stream.linearizations("tangent model", ordered=False):
                outputs = line.outputs + line.push(pushed[None])[0]
                statistics = statistics + self.likelihood.statistics(outputs, batch.target).cpu()
                gradient += line.pull(self._residual(outputs, batch.target).to(pushed)[None])[0]
        loss = -self.likelihood.log_likelihood(statistics) / self.temperature
        return Evaluation(float(loss), gradient / self.temperature.to(gradient.device), statistics)

    def _residual(self, outputs: Tensor, target: Any) -> Tensor:
        """``−∂ log p(y | h) / ∂h`` at the current noise, in the outputs' shape."""
        flat, targets, weight = self.likelihood.rows(outputs, target)
        scale = self.likelihood.curvature_weights()[self.likelihood.output_groups(flat.shape[-1])].to(flat)
        gradient = self.likelihood.gradient(flat, targets)
        # Ignored observations have placeholder targets, and 0 · inf would not be zero.
        return torch.where(weight[:, None] > 0, gradient * scale * weight[:, None], 0.0).view(outputs.shape)


@dataclass(frozen=True)
class TangentOptimum:
    """The optimum θ* of a tangent model, or where the search for it ended.

    Attributes:
        vector: θ*, ``[P]``.
        value: The penalised loss ``−log p(D | h(θ*))/T + ½ (θ*−μ₀)ᵀ P₀ (θ*−μ₀)``, in nats.
        statistics: The likelihood's statistics at ``h(θ*)``.
        decrement: ``½ gᵀ P⁻¹ g`` with the preconditioner P: an estimate of the excess loss, in nats.
        converged: Whether the decrement met the tolerance, or rounding allows no further step.
    """

    vector: Tensor
    value: float
    statistics: Tensor
    decrement: float
    n_iterations: int
    converged: bool


def tangent_optimum(
    model: TangentModel,
    prior: GaussianPrior | Tensor | float,
    start: Tensor | None = None,
    *,
    precondition: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> TangentOptimum:
    """The optimum of a tangent model's penalised loss, by preconditioned L-BFGS (Nocedal, 1980).

    Args:
        model: The tangent model.
        prior: A prior, or the precisions ``[P]`` or a precision of one with mean zero.
        start: ``[P]``; by default the network's weights.
        precondition: Multiplies ``[P]`` by an approximate inverse of the penalised loss's Hessian; by default by the
            inverse prior precision.
        tolerance: Stop once the decrement is at most this, in nats.
        max_iterations: Largest number of steps, each of about one pass over the data.

    Raises:
        NonFiniteError: The loss is not finite at the start.
    """
    if isinstance(prior, GaussianPrior):
        precision, centre = prior.vector(), prior.mean
    else:
        precision, centre = torch.as_tensor(prior).detach(), torch.zeros(())
    origin = model.vector.double()
    precision, centre = precision.detach().to(origin), centre.detach().to(origin)
    rounding = 10 * torch.finfo(model.vector.dtype).eps

    def function(deviation: Tensor) -> Evaluation:
        at = model.evaluate(deviation)
        away = origin + deviation - centre
        return Evaluation(at.value + float(precision * away @ away) / 2, at.gradient + precision * away, at.statistics)

    def scaled(vector: Tensor) -> Tensor:
        return vector / precision if precondition is None else precondition(vector)

    point = torch.zeros_like(origin) if start is None else start.to(origin) - origin
    if not (at := function(point)).is_finite:
        what, got = "The loss of the tangent model is not finite at the start.", f"a loss of {at.value:.3g}"
        fix = "Start from a larger prior precision, or look for outliers among the data."
        raise NonFiniteError(what, expected="a finite loss and gradient", got=got, fix=fix)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_PAIRS)
    for iteration in range(max_iterations + 1):
        conditioned = scaled(at.gradient)
        decrement = float(at.gradient @ conditioned) / 2
        converged = decrement <= tolerance
        if converged or iteration == max_iterations:
            break
        direction = -_two_loops(pairs, at.gradient, conditioned, scaled)
        if not float(direction @ at.gradient) < 0:  # the stored pairs are dominated by rounding
            pairs.clear()
            direction = -conditioned
        found = _line_search(function, point, at, direction, rounding)
        if found is not None:
            step, new = found
            if float((new.gradient - at.gradient) @ step) > 0:
                pairs.append((step, new.gradient - at.gradient))
            point, at = point + step, new
        elif pairs:
            pairs.clear()
        else:  # a step would gain less than values and gradients resolve
            converged = decrement <= max(tolerance, 10 * rounding * abs(at.value))
            break
    return TangentOptimum(origin + point, at.value, at.statistics, decrement, iteration, converged)


def _line_search(
    function: Callable[[Tensor], Evaluation], point: Tensor, at: Evaluation, direction: Tensor, rounding: float
) -> tuple[Tensor, Evaluation] | None:
    """A step that halves the derivative along the direction, and the function there; None if there is none.

    Derivatives locate the minimum of a convex function to more digits than its values do.
    """
    slope, length = float(direction @ at.gradient), 1.0
    low, high = (0.0, slope), (math.inf, math.inf)
    for _ in range(20 if -slope > 10 * rounding * abs(at.value) else 4):  # few trials where rounding hides the gain
        new = function(point + length * direction)
        along = float(new.gradient @ direction) if new.is_finite else math.inf
        lower = new.value <= at.value + 1e-4 * length * slope + rounding * abs(at.value)
        if lower and abs(along) <= abs(slope) / 2:
            return length * direction, new
        if along > 0 or not lower:
            high = length, along
        else:
            low = length, along
        if math.isinf(high[0]):  # extrapolate the derivative linearly to zero, by a factor of two to ten
            ahead = length * slope / (slope - along) if along > slope else math.inf
            length = min(max(ahead, 2 * length), 10 * length)
        else:  # interpolate it
            part = low[1] / (low[1] - high[1]) if 0 < high[1] < math.inf else 0.25
            length = low[0] + (high[0] - low[0]) * min(max(part, 0.05), 0.95)
    return None


def _two_loops(
    pairs: deque[tuple[Tensor, Tensor]], gradient: Tensor, conditioned: Tensor, precondition: Callable[[Tensor], Tensor]
) -> Tensor:
    """The inverse Hessian of the stored pairs and the preconditioner, times the gradient.

    The preconditioner is scaled to the latest step (Nocedal and Wright, 2006, section 7.2). Its overall size may be
    wrong, as that of Kronecker factors with shared weights, which would cost many steps.
    """
    if not pairs:
        return conditioned
    result, weights = gradient.clone(), []
    for step, change in reversed(pairs):
        weights.append(float(step @ result) / float(step @ change))
        result -= weights[-1] * change
    step, change = pairs[-1]
    result = precondition(result) * (float(step @ change) / float(change @ precondition(change)))
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        result += (weight - float(change @ result) / float(step @ change)) * step
    return result
