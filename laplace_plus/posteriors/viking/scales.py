"""VIKING's two scales at a fixed mean: the optimum of the evidence lower bound over α and σ_im.

The noise is drawn and projected once, so that the bound is a deterministic function of two numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_plus.network.linearization import ADModes
from laplace_plus.network.network import Network
from laplace_plus.posteriors.projection.noise import ProjectedNoise
from laplace_plus.posteriors.viking.elbo import ELBO, ELBOTerms, deviations, mirrored, of_networks
from laplace_plus.predictive.deviations import pushed

Entry = tuple[Tensor, Any, Tensor | None]
"""A batch's targets ``[B, ...]``, and its inputs; or, in their place, its outputs and the noise's tangents."""


@dataclass
class BoundAtMean:
    """The bound at a network's own weights as its mean, as a function of ``logs = (log α, log σ_im)``.

    For the linearised network the noise is pushed through the tangent once, and the outputs are kept.
    """

    elbo: ELBO
    network: Network
    noise: ProjectedNoise
    n_outputs: int

    def __post_init__(self) -> None:
        self._mean, self._rank = self.network.vector(), float(self.noise.report.rank.value)
        self._distance = self.elbo.squared_distance(self._mean).cpu()

    def evaluate(self, logs: Tensor) -> tuple[ELBOTerms, Tensor]:
        """The terms of the bound, and the gradient of minus the bound."""
        point = logs.detach().clone().requires_grad_()
        total, slope = torch.zeros_like(logs[0]), torch.zeros_like(logs)
        with torch.enable_grad():
            for entry in self.entries():
                value = self.elbo.expected_nll(self.outputs(entry, point), entry[0]).to(point.device)
                slope += torch.autograd.grad(value, point)[0]
                total += value.detach()
            objective, terms = self.elbo.objective(total, self.elbo.n_data, self._distance, self._rank, point)
            return terms, slope + torch.autograd.grad(objective, point)[0]

    def maximise(self, start: Tensor, iterations: int, history: list[ELBOTerms]) -> tuple[Tensor, bool]:
        """The logarithms at the optimum by L-BFGS, and whether it converged; each step is appended to ``history``."""
        logs, n_data = start.detach().clone().requires_grad_(), self.elbo.n_data

        def closure() -> float:
            terms, slope = self.evaluate(logs)
            history.append(terms)
            logs.grad = slope / n_data
            return -terms.elbo / n_data

        optimizer = torch.optim.LBFGS(
            [logs], max_iter=iterations, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )
        optimizer.step(closure)
        terms, slope = self.evaluate(logs)
        history.append(terms)
        # An e-fold of either scale then changes the bound by less than 1e-4 of its value, or 1e-4 nats.
        return logs.detach(), bool(slope.abs().max() <= 1e-4 * max(1.0, abs(terms.elbo)))

    def entries(self) -> Iterable[Entry]:
        """The batches: with their inputs, or with outputs and tangents."""
        if self.elbo.expectation == "linearized":
            return self._linearized
        return ((batch.target, batch.inputs, None) for batch in self.elbo.batches())

    @cached_property
    def _linearized(self) -> list[Entry]:
        vectors, modes, entries = torch.cat([self.noise.null_space, self.noise.range]), ADModes(), []
        with torch.no_grad():
            for batch in self.elbo.batches():
                both = pushed(self.network, vectors, batch.inputs, n_outputs=self.n_outputs, ad_modes=modes)
                entries.append((batch.target, *both))
        return entries

    def outputs(self, entry: Entry, logs: Tensor) -> Tensor:
        """Outputs ``[k, B, *, C]`` of a batch under samples."""
        _, inputs, tangents = entry
        if tangents is None:
            moves = deviations(logs, self.noise.null_space, self.noise.range)
            return of_networks(self.network, inputs, self._mean, moves)
        return mirrored(inputs, deviations(logs, *tangents.chunk(2)))
