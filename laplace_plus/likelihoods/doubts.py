"""Outputs that mean something else than the likelihood takes them for, as the data of a trained network tell."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import OutputError, warn
from laplace_plus.likelihoods.base import Likelihood, UnnamedAxis, each

_STRONG_EVIDENCE = 5.0
"""Nats, odds of 150 to 1, by which outputs fit better on another scale, or along their own axis, before it is said."""


class Doubts:
    """Sums over the data: how much better outputs fit on another scale, and with their axis at 1 in place of the last.

    The axis is in doubt where it was left out, and in every batch outputs ``[B, n, n]`` or ``[B, n, n, n]`` come with a
    target ``[B, n]`` or ``[B, n, n]``, to which either would fit.
    """

    def __init__(self, likelihood: Likelihood):
        self.likelihood, self._scale = likelihood, 0.0
        self._axis: float | None = 0.0

    def add(self, outputs: Tensor, targets: Any) -> None:
        """Take a batch's arranged outputs ``[B, *, C]`` and valid targets into account."""
        if self._scale > -math.inf:
            found = self.likelihood.evidence_for_another_scale(outputs, targets)
            self._scale = found if found == -math.inf else self._scale + found
        sizes, unnamed = {*outputs.shape[1:]}, isinstance(self.likelihood.output_axis, UnnamedAxis)
        if not unnamed or outputs.dim() < 3 or len(sizes) > 1 or sizes == {1}:  # noqa: PLR2004
            self._axis = None
        elif self._axis is not None:
            shapes = list[torch.Size]()
            each(lambda own: shapes.append(own.shape), targets)
            statistics = [self.likelihood.statistics(f, targets) for f in (outputs.movedim(1, -1), outputs)]
            other, own = map(self.likelihood.log_likelihood, statistics)
            self._axis = None if outputs.shape in shapes else self._axis + float(other - own)

    def settle(self) -> None:
        """After all data, refuse or warn of what they tell."""
        likelihood = self.likelihood
        name = type(likelihood).__name__
        if self._axis is not None and not self._axis < -_STRONG_EVIDENCE:
            raise OutputError(
                "The outputs' axis cannot be told from their shape, as positions are as many as outputs.",
                expected="targets that fit the last axis clearly better than axis 1, or output_axis=",
                got=f"targets that fit axis 1 better by {self._axis:.1f} nats",
                fix=f"Pass lp.{name}(..., output_axis=1) for [B, C, *], or output_axis=-1 for [B, *, C].",
            )
        if self._scale <= _STRONG_EVIDENCE:
            return
        given, taken, expected, fix = likelihood.scales
        rows = ", in rows that sum to one" if self._scale == math.inf else ""
        found = OutputError(
            f"The network returns {given}, and {name} takes {taken}.",
            expected=expected,
            got=f"outputs of their range for all of the data{rows or f', {self._scale:.0f} nats better as {given}'}",
            fix=fix,
        )
        if self._scale == math.inf:
            raise found
        warn(str(found))
