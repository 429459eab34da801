"""Likelihoods whose targets are numbers, one for each output: shared checks, classes of zeros and ones, and counts.

Bernoulli's closed-form link ``"probit"`` is MacKay's (1992, "The evidence framework applied to classification
networks") ``sigmoid(m / √(1 + π/8 v))``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, NegativeBinomial
from torch.distributions import Poisson as PoissonDistribution
from torch.nn.functional import logsigmoid

from laplace_plus import checks
from laplace_plus.checks import describe
from laplace_plus.errors import LabelError
from laplace_plus.likelihoods.base import Likelihood, OutputCurvature, filled, refuse_several_targets, refuse_targets
from laplace_plus.likelihoods.marginal import Marginal, uniform_mixture, variance_of
from laplace_plus.likelihoods.sampling import draw_by


class Elementwise(Likelihood):
    """Targets of the outputs' shape, ``[B, *]`` also if there is one; a diagonal curvature, the same for all targets.

    NaN is an entry that was not observed: it has no term in the log-density, and neither gradient nor curvature.
    Errors say ``wrong_targets`` of values that are none, ``valid_targets`` of what is expected, and a ``hint``.
    """

    couples_outputs = False
    wrong_targets: str
    valid_targets: str
    hint: str

    @abstractmethod
    def is_valid(self, targets: Tensor) -> Tensor:
        """Which entries are targets, NaN among them, boolean of the same shape."""

    def observed(self, targets: Tensor) -> Tensor:
        """Which entries ``[N, D]`` of targets were observed."""
        return ~targets.isnan()

    @abstractmethod
    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The diagonal ``[N, C]`` of :meth:`output_root`."""

    def n_targets(self, n_outputs: int) -> int:
        """The numbers in one target."""
        return n_outputs

    def align(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets ``[B, *, D]`` for outputs ``[B, *, C]``; nothing but ``[B, *]`` is broadcast: LabelError."""
        if not isinstance(targets, Tensor):
            refuse_several_targets(self, targets)
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

    def check_targets(self, outputs: Tensor, targets: Any) -> None:
        """Refuse invalid targets, and targets of another shape than the outputs'."""
        aligned = self.align(outputs, targets)
        valid = self.is_valid(aligned)
        if not bool(valid.all()):
            refuse_targets(~valid, aligned, self.wrong_targets, expected=self.valid_targets, fix=self.hint)

    def prepare(self, outputs: Tensor, targets: Any, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Floating targets ``[N, D]``; rows without an observed entry do not count."""
        aligned = self.align(outputs, targets).flatten(0, outputs.dim() - 2).to(flat.dtype)
        return aligned, self.observed(aligned).any(-1)

    def n_terms(self, targets: Tensor, weight: Tensor, n_outputs: int) -> float:
        """The observed entries, each as often as its row counts."""
        return float(weight @ self.observed(targets).sum(-1).to(weight))

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y_c|f)`` of every entry, ``[N, D]``, all of them observed."""
        log_density: Tensor = self.distribution(outputs).log_prob(targets)
        return log_density

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c log p(y_c|f)`` over the observed entries, ``[N]``."""
        targets = targets.to(torch.promote_types(targets.dtype, outputs.dtype))
        return self.entries(outputs, filled(targets)).where(self.observed(targets), 0.0).sum(-1)

    def output_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``diag`` of :meth:`root_diagonal`, zero for outputs of entries that were not observed, ``[N, C, C]``."""
        observed = self.observed(targets).repeat(1, outputs.shape[-1] // self.n_targets(outputs.shape[-1]))
        return torch.diag_embed(self.root_diagonal(outputs, targets).where(observed, 0.0))

    def mixture(self, outputs: Tensor) -> Distribution:
        """A mixture over samples ``[S, ..., C]`` for every entry of a target by itself."""
        given = self.distribution(outputs)
        last = {name: getattr(given, name).movedim(0, -1) for name in given.arg_constraints}
        return uniform_mixture(type(given)(**last, validate_args=False), like=outputs)


def like_observed(drawn: Tensor, targets: Any) -> Tensor:
    """Drawn targets, NaN where the data's own are."""
    alike = isinstance(targets, Tensor) and drawn.shape == targets.shape and drawn.is_floating_point()
    return drawn.where(~targets.isnan(), math.nan) if alike else drawn


@final
@dataclass(frozen=True)
class Bernoulli(Elementwise):
    """``p(y_c = 1 | f) = sigmoid(f_c)``, independent over the ``C`` outputs of a row.

    Targets are zeros and ones (integer, boolean or floating) of the outputs' shape; ``[B, *]`` also if ``C`` is 1.
    The weight of ones belongs to training, as class weights do: predictions and their scores are without it.

    Args:
        output_axis: The axis of the logits in the network's output, and of their targets.
        pos_weight: The factor on terms whose target is one, as of ``torch.nn.BCEWithLogitsLoss``: a number, or one for
            each output, ``[C]``, positive; None for 1.
        weighted: Whether targets come with weights; see :class:`~laplace_plus.Likelihood`.

    Raises:
        ConfigurationError: Weights that are not positive.

    Example:
        >>> Bernoulli().log_density(torch.zeros(1, 1), torch.tensor([[1.0]])).exp()
        tensor([0.5000])
    """

    output_axis: int = -1
    pos_weight: Any = None
    weighted: bool = False
    per_output = ("pos_weight",)
    training_options = {"pos_weight": None}  # noqa: RUF012
    config_name = "bernoulli"
    links = ("probit", "mc", "network")
    is_classifier = True
    wrong_targets = "There are binary targets other than 0 and 1."
    valid_targets = "exactly 0 or 1, or NaN where it is missing"
    hint = 'Map labels to 0 and 1, or use likelihood="classification" for one class out of several.'

    def __post_init__(self) -> None:
        if self.pos_weight is not None:
            weight = torch.as_tensor(self.pos_weight, dtype=torch.float64).detach()
            checks.numbers("pos_weight", checks.shape("pos_weight", weight, [None] * min(weight.dim(), 1)), above=0.0)
            object.__setattr__(self, "pos_weight", tuple(weight.flatten().tolist()))

    def factors(self, targets: Tensor) -> Tensor:
        """The factor ``[N, C]`` of each term: ``pos_weight`` of ones, else 1."""
        if self.pos_weight is None:
            return torch.ones_like(targets)
        return torch.where(targets == 1, torch.tensor(self.pos_weight, dtype=targets.dtype, device=targets.device), 1.0)

    def is_valid(self, targets: Tensor) -> Tensor:
        """Zeros, ones and NaN."""
        return (targets == 0) | (targets == 1) | targets.isnan()

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log sigmoid(±f_c)``, ``[N, C]``; unlike a cross-entropy without cancellation where p is close to y."""
        return self.factors(targets) * logsigmoid((2 * targets - 1) * outputs)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``sigmoid(f) - y``, ``[N, C]``."""
        sign = 2 * targets - 1
        gradient = -sign * (-sign * outputs).sigmoid()  # no cancellation where p is close to y
        return (self.factors(targets) * gradient).where(self.observed(targets), 0.0)

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``√(p (1 - p))``, by default that of new targets; else times ``√pos_weight`` where they are one."""
        root = (0.5 * (logsigmoid(outputs) + logsigmoid(-outputs))).exp()
        return root if targets is None else root * self.factors(targets).sqrt()

    def output_curvature(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> OutputCurvature:
        """``diag w p (1 - p)``; zero for entries that were not observed."""
        scales = weight.unsqueeze(-1) * self.observed(targets) * self.root_diagonal(outputs, targets).square()
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
        weighted: Whether targets come with weights; see :class:`~laplace_plus.Likelihood`.

    Example:
        >>> Poisson().log_density(torch.zeros(1, 1), torch.tensor([[0.0]]))
        tensor([-1.])
    """

    output_axis: int = -1
    weighted: bool = False
    config_name = "poisson"
    links = ("exact", "mc")
    wrong_targets = "Some targets are not counts."
    valid_targets = "whole numbers, 0 or more, or NaN where one is missing"
    hint = 'Use likelihood="regression" for real numbers.'

    def is_valid(self, targets: Tensor) -> Tensor:
        """Whole numbers from 0, and NaN."""
        counts = targets.double()
        return (counts >= 0) & (counts == counts.floor()) & torch.isfinite(counts) | counts.isnan()

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``y_c f_c - exp f_c - log y_c!``, ``[N, C]``."""
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1)

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
