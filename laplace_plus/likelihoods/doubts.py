"""Whether outputs are what the likelihood takes them for, as the data of a trained network tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from laplace_plus.errors import OutputError, warn
from laplace_plus.likelihoods.base import Likelihood, UnnamedAxis, each, filled, widen
from laplace_plus.likelihoods.categorical import Categorical
from laplace_plus.likelihoods.elementwise import Bernoulli, Poisson
from laplace_plus.likelihoods.gaussian import HeteroscedasticGaussian

_STRONG_EVIDENCE = 5.0
"""Nats, odds of 150 to 1, by which outputs fit better on another scale, or along their own axis, before it is said."""

# How many nats a batch's outputs [B, *, C] fit better on another scale; −∞ if they cannot be on it.


def _as_probabilities(likelihood: Likelihood, outputs: Tensor, targets: Any) -> float:
    """∞ where no entry is negative and every row sums to one, up to rounding."""
    if outputs.min() < 0 or (widen(outputs).sum(-1) - 1).abs().max() > torch.finfo(outputs.dtype).eps ** 0.5:
        return -math.inf
    return math.inf


def _as_chances(likelihood: Bernoulli, outputs: Tensor, targets: Any) -> float:
    """The log-likelihood of outputs in [0, 1] as probabilities, less that as logits, or as the best constant.

    Logits of a trained network may all lie in [0, 1] where one class is a little more frequent. As probabilities
    they then fit worse than a constant, while those of a trained network fit better.
    """
    flat, targets, weight = likelihood.rows(outputs, targets)
    if flat.min() < 0 or flat.max() > 1:
        return -math.inf
    share, y = weight.unsqueeze(-1) * likelihood.observed(targets) * likelihood.factors(targets), filled(targets)
    losses = partial(binary_cross_entropy, target=y, weight=share, reduction="sum")
    constant = losses(((share * y).sum() / share.sum().clamp_min(1e-30)).expand_as(flat))
    loss = torch.minimum(constant, losses(flat.sigmoid()))
    return float(loss - losses(flat))


def _as_rates(likelihood: Likelihood, outputs: Tensor, targets: Any) -> float:
    """The log-likelihood of positive outputs as rates, less that as their logarithms."""
    if outputs.min() <= 0:
        return -math.inf
    return float(likelihood.statistics(outputs.log(), targets) - likelihood.statistics(outputs, targets))


def _as_variances(likelihood: Likelihood, outputs: Tensor, targets: Any) -> float:
    """The larger log-likelihood of positive numbers as variances or deviations, less that as log-variances."""
    mean, spread = outputs.chunk(2, -1)
    if spread.min() <= 0:
        return -math.inf
    readings = spread.log(), 2 * spread.log(), spread
    first, second, own = (likelihood.statistics(torch.cat([mean, one], -1), targets) for one in readings)
    return float(torch.maximum(first, second) - own)


_NO_SOFTMAX = "Take the last softmax or sigmoid out of the network; torch.log_softmax is fine as its last operation."
_OTHER_SCALES: dict[type[Likelihood], tuple[Callable[..., float], str, str, str]] = {
    Categorical: (_as_probabilities, "probabilities", "logits", _NO_SOFTMAX),
    Bernoulli: (_as_chances, "probabilities", "logits", _NO_SOFTMAX),
    Poisson: (_as_rates, "rates", "log-rates", "Leave out the last exp or softplus, or return torch.log of it."),
    HeteroscedasticGaussian: (
        _as_variances,
        "variances or deviations",
        "log-variances",
        "Return torch.log(variance), or 2 * torch.log(deviation), beside the means, and train so.",
    ),
}
"""How well another scale fits, what is given there, what the likelihood takes, and how to give that."""


@dataclass
class Doubts:
    """Sums over the data: how much better outputs fit on another scale, and with their axis at 1 in place of the last.

    The axis is in doubt where it was left out, and in every batch outputs ``[B, n, n]`` or ``[B, n, n, n]`` come with a
    target ``[B, n]`` or ``[B, n, n]``, to which either would fit.
    """

    likelihood: Likelihood
    scale: float = 0.0
    axis: float | None = 0.0

    def add(self, outputs: Tensor, targets: Any) -> None:
        """Take a batch's arranged outputs ``[B, *, C]`` and valid targets into account."""
        likelihood = self.likelihood
        if self.scale > -math.inf:
            other = _OTHER_SCALES.get(type(likelihood))
            found = -math.inf if other is None else other[0](likelihood, outputs, targets)
            self.scale = found if found == -math.inf else self.scale + found
        sizes, unnamed = {*outputs.shape[1:]}, isinstance(likelihood.output_axis, UnnamedAxis)
        if not unnamed or outputs.dim() < 3 or len(sizes) > 1 or sizes == {1}:  # noqa: PLR2004
            self.axis = None
        elif self.axis is not None:
            shapes = list[torch.Size]()
            each(lambda own: shapes.append(own.shape), targets)
            statistics = [likelihood.statistics(f, targets) for f in (outputs.movedim(1, -1), outputs)]
            moved, own = map(likelihood.log_likelihood, statistics)
            self.axis = None if outputs.shape in shapes else self.axis + float(moved - own)

    def settle(self) -> None:
        """After all data, refuse or warn of what they tell."""
        name = type(self.likelihood).__name__
        if self.axis is not None and not self.axis < -_STRONG_EVIDENCE:
            raise OutputError(
                "The outputs' axis cannot be told from their shape, as positions are as many as outputs.",
                expected="targets that fit the last axis clearly better than axis 1, or output_axis=",
                got=f"targets that fit axis 1 better by {self.axis:.1f} nats",
                fix=f"Pass lp.{name}(..., output_axis=1) for [B, C, *], or output_axis=-1 for [B, *, C].",
            )
        if self.scale <= _STRONG_EVIDENCE:
            return
        _, given, taken, fix = _OTHER_SCALES[type(self.likelihood)]
        rows = "in rows that sum to one" if self.scale == math.inf else f"{self.scale:.0f} nats better as {given}"
        found = OutputError(
            f"The network returns {given}, and {name} takes {taken}.",
            expected=f"{taken}, which may be any real numbers",
            got=f"outputs of their range for all of the data, {rows}",
            fix=fix,
        )
        if self.scale == math.inf:
            raise found
        warn(str(found))
