"""Likelihoods whose targets are numbers, one for each output: shared checks, classes of zeros and ones, and counts.

Bernoulli's closed-form link ``"probit"`` is MacKay's (1992, "The evidence framework applied to classification
networks") ``sigmoid(m / √(1 + π/8 v))``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, NegativeBinomial
from torch.distributions import Poisson as PoissonDistribution
from torch.nn.functional import binary_cross_entropy, logsigmoid

from laplace_plus import checks
from laplace_plus.errors import LabelError
from laplace_plus.likelihoods.base import (
    Likelihood,
    Marginal,
    OutputCurvature,
    describe,
    uniform_mixture,
    variance_of,
)
from laplace_plus.likelihoods.sampling import draw_by


class Elementwise(Likelihood):
    """Targets of the outputs' shape, ``[B, *]`` also if there is one; a diagonal curvature, the same for all targets.

    Errors say ``wrong_targets`` of values that are none, ``valid_targets`` of what is expected, and a ``hint``.
    """

    couples_outputs = False
    wrong_targets: str
    valid_targets: str
    hint: str

    @abstractmethod
    def is_valid(self, targets: Tensor) -> Tensor:
        """Which entries are targets, boolean of the same shape."""

    @abstractmethod
    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The diagonal ``[N, C]`` of :meth:`output_root`."""

    def n_targets(self, n_outputs: int) -> int:
        """The numbers in one target."""
        return n_outputs

    def align(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets ``[B, *, D]`` for outputs ``[B, *, C]``; nothing but ``[B, *]`` is broadcast: LabelError."""
        observations, size = outputs.shape[:-1], self.n_targets(outputs.shape[-1])
        if size == 1 and targets.shape == observations:
            return targets.unsqueeze(-1)
        aligned = targets.movedim(self.output_axis, -1) if targets.dim() == outputs.dim() else targets
        if aligned.shape == (*observations, size):
            return aligned
        wanted = torch.empty(*observations, size, device="meta").movedim(-1, self.output_axis).shape
        expected = f"{list(wanted)}{f' or {list(observations)}' if size == 1 else ''}, as nothing is broadcast"
        what = "The targets do not have the shape of the outputs."
        raise LabelError(what, expected=expected, got=describe(targets), fix=self.hint)

    def validate(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse invalid targets, and targets of another shape than the outputs'."""
        checks.finite("The network's output", outputs)
        aligned = self.align(outputs, targets)
        refuse_targets(~self.is_valid(aligned), aligned, self.wrong_targets, expected=self.valid_targets, fix=self.hint)

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Flatten a batch; targets become floating ``[N, D]``."""
        flat, aligned, weight = super().rows(outputs, self.align(outputs, targets))
        return flat, aligned.to(flat.dtype), weight

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c log p(y_c|f)``, ``[N]``."""
        targets = targets.to(torch.promote_types(targets.dtype, outputs.dtype))
        log_density: Tensor = self.distribution(outputs).log_prob(targets)
        return log_density.sum(-1)

    def output_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``diag`` of :meth:`root_diagonal`, ``[N, C, C]``."""
        return torch.diag_embed(self.root_diagonal(outputs, targets))

    def mixture(self, outputs: Tensor) -> Distribution:
        """A mixture over samples ``[S, ..., C]`` for every entry of a target by itself."""
        given = self.distribution(outputs)
        last = {name: getattr(given, name).movedim(0, -1) for name in given.arg_constraints}
        return uniform_mixture(type(given)(**last, validate_args=False), like=outputs)


def refuse_targets(wrong: Tensor, targets: Tensor, message: str, *, expected: str, fix: str) -> None:
    """Raise a ``LabelError`` if any target is wrong; it names the first one and counts them."""
    if bool(wrong.any()):
        got = f"{targets[wrong][0].item()} ({int(wrong.sum())} of {targets.numel()} targets of {targets.dtype})"
        raise LabelError(message, expected=expected, got=got, fix=fix)


@final
@dataclass(frozen=True)
class Bernoulli(Elementwise):
    """``p(y_c = 1 | f) = sigmoid(f_c)``, independent over the ``C`` outputs of a row.

    Targets are zeros and ones (integer, boolean or floating) of the outputs' shape; ``[B, *]`` also if ``C`` is 1.

    Args:
        output_axis: The axis of the logits in the network's output, and of their targets.

    Example:
        >>> Bernoulli().log_density(torch.zeros(1, 1), torch.tensor([[1.0]])).exp()
        tensor([0.5000])
    """

    output_axis: int = -1
    config_name = "bernoulli"
    links = ("probit", "mc", "network")
    is_classifier = True
    wrong_targets = "There are binary targets other than 0 and 1."
    valid_targets = "exactly 0 or 1"
    hint = 'Map labels to 0 and 1, or use likelihood="classification" for one class out of several.'

    def is_valid(self, targets: Tensor) -> Tensor:
        """Zeros and ones."""
        return (targets == 0) | (targets == 1)

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c log sigmoid(±f_c)``, ``[N]``; unlike a cross-entropy without cancellation where p is close to y."""
        return logsigmoid((2 * targets.to(outputs.dtype) - 1) * outputs).sum(-1)

    def evidence_for_probabilities(self, outputs: Tensor, targets: Tensor) -> float:
        """The log-likelihood of outputs in [0, 1] as probabilities, less that as logits, or as the best constant.

        Logits of a trained network may all lie in [0, 1] where one class is a little more frequent. As probabilities
        they then fit worse than a constant, while those of a trained network fit better.
        """
        flat, targets, _ = self.rows(outputs, targets)
        if flat.min() < 0 or flat.max() > 1:
            return -math.inf
        constant = binary_cross_entropy(targets.mean().expand_as(flat), targets, reduction="sum")
        loss = torch.minimum(constant, -self.log_density(flat, targets).sum())
        return float(loss - binary_cross_entropy(flat, targets, reduction="sum"))

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``sigmoid(f) - y``, ``[N, C]``."""
        sign = 2 * targets - 1
        return -sign * (-sign * outputs).sigmoid()  # no cancellation where p is close to y

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``√(p (1 - p))``."""
        return (0.5 * (logsigmoid(outputs) + logsigmoid(-outputs))).exp()

    def output_curvature(self, outputs: Tensor, weight: Tensor) -> OutputCurvature:
        """``diag p (1 - p)``; zero for ignored rows."""
        scales = weight.unsqueeze(-1) * self.root_diagonal(outputs).square()
        return OutputCurvature(scales, scales, coupled=False)

    def distribution(self, outputs: Tensor) -> BernoulliDistribution:
        """Bernoulli distributions with batch shape ``[..., C]``."""
        return BernoulliDistribution(logits=outputs, validate_args=False)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Zeros and ones ``[..., C]``, floating."""
        return draw_by(torch.bernoulli, outputs.sigmoid(), generator)

    def class_probabilities(self, mean: Tensor) -> Tensor:
        """``[1 - p, p]`` of every output by itself, ``[N C, 2]``."""
        p = mean.reshape(-1)
        return torch.stack([1 - p, p], -1)

    def mixture(self, outputs: Tensor) -> BernoulliDistribution:
        """The Bernoulli distributions of the average probabilities, every output by itself."""
        logits = logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)
        return BernoulliDistribution(logits=logits, validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"probit"``, which needs variances only, or ``"network"``: ``sigmoid(m)``."""
        logits = mean if link == "network" else mean / (1 + math.pi / 8 * variance_of(mean, covariance)).sqrt()
        p = logits.sigmoid()
        return Marginal(p, p * (-logits).sigmoid(), BernoulliDistribution(logits=logits, validate_args=False))


@final
@dataclass(frozen=True)
class Poisson(Elementwise):
    """``p(y | f) = Poisson(exp f)``, independent over the ``C`` outputs of a row.

    Targets are counts (integer or whole floating numbers) of the outputs' shape; ``[B, *]`` also if ``C`` is 1.

    Args:
        output_axis: The axis of the log-rates in the network's output, and of their targets.

    Example:
        >>> Poisson().log_density(torch.zeros(1, 1), torch.tensor([[0.0]]))
        tensor([-1.])
    """

    output_axis: int = -1
    config_name = "poisson"
    links = ("exact", "mc")
    wrong_targets = "Some targets are not counts."
    valid_targets = "whole numbers, 0 or more"
    hint = 'Use likelihood="regression" for real numbers.'

    def is_valid(self, targets: Tensor) -> Tensor:
        """Whole numbers from 0."""
        counts = targets.double()
        return (counts >= 0) & (counts == counts.floor()) & torch.isfinite(counts)

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c y_c f_c - exp f_c - log y_c!``, ``[N]``."""
        return (targets * outputs - outputs.exp() - torch.lgamma(targets + 1)).sum(-1)

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``exp(f/2)``."""
        return (0.5 * outputs).exp()

    def distribution(self, outputs: Tensor) -> PoissonDistribution:
        """Poisson distributions with batch shape ``[..., C]``."""
        return PoissonDistribution(outputs.exp(), validate_args=False)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Counts ``[..., C]``, floating."""
        return draw_by(torch.poisson, outputs.exp(), generator)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: the exact moments of a log-normal rate, ``E[y] = exp(m + v/2)`` and so on.

        The log-normal mixture of Poisson distributions has no closed density; ``distribution`` is the negative binomial
        (a gamma mixture) of the same mean and variance. It is computed in ``float64``, because for small ``v`` its
        log-density is a difference of large numbers.
        """
        variance = variance_of(mean, covariance)
        rate = (mean + 0.5 * variance).exp()
        spread = variance.expm1()  # relative variance of the rate
        # The dispersion's floor changes the distribution's variance by at most 1e-6 of the squared mean.
        dispersion = spread.double().clamp_min(1e-6)
        log_odds = mean.double() + 0.5 * variance.double() + dispersion.log()
        law = NegativeBinomial(1 / dispersion, logits=log_odds, validate_args=False)
        epistemic = spread * rate.square()
        checks.finite("A predicted variance of the counts", epistemic + rate)
        return Marginal(rate, epistemic + rate, law, epistemic, rate)
