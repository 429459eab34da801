"""VIKING's two scales at a fixed mean: the optimum of the evidence lower bound over α and σ_im.

The noise is drawn and projected once, so that the bound is a deterministic function of two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import budget
from laplace_plus.network.linearization import ADModes
from laplace_plus.network.network import Network
from laplace_plus.posteriors.projection.noise import ProjectedNoise
from laplace_plus.posteriors.viking.elbo import ELBO, ELBOTerms, deviations, mirrored, of_networks
from laplace_plus.predictive.deviations import pushed


@dataclass(frozen=True)
class ScaleFit:
    """How α and σ_im are found at a fixed mean.

    Args:
        optimizer: ``"lbfgs"``, on all data at a time, or ``"adam"``, on one batch at a time.
        max_iterations: Of L-BFGS.
        epochs: Of Adam.
        learning_rate: Of Adam, in log α and log σ_im.

    Raises:
        ConfigurationError: An unknown optimizer, or numbers out of range.
    """

    optimizer: str = "lbfgs"
    max_iterations: int = 100
    epochs: int = 20
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        checks.choice("optimizer", self.optimizer, ("lbfgs", "adam"))
        checks.count("max_iterations", self.max_iterations)
        checks.count("epochs", self.epochs)
        checks.positive("learning_rate", self.learning_rate)


Entry = tuple[Tensor, Any, Tensor | None]
"""A batch's targets ``[B, ...]``, and its inputs; or, in their place, its outputs and the noise's tangents."""


@dataclass
class BoundAtMean:
    """The bound at a network's own weights as its mean, as a function of ``logs = (log α, log σ_im)``.

    For the linearised network the noise is pushed through the tangent once, and kept where the memory budget allows.
    """

    elbo: ELBO
    network: Network
    noise: ProjectedNoise
    rank: float
    n_outputs: int
    _kept: list[Entry] | None = None

    def __post_init__(self) -> None:
        self._mean, self._ad_modes = self.network.vector(), ADModes()
        self._distance = self.elbo.squared_distance(self._mean).cpu()

    def evaluate(self, logs: Tensor) -> tuple[ELBOTerms, Tensor]:
        """The terms of the bound, and the gradient of minus the bound."""
        point = logs.detach().clone().requires_grad_()
        total, slope = torch.zeros_like(logs[0]), torch.zeros_like(logs)
        with torch.enable_grad():
            for entry in self.entries():
                value = self._nll(entry, point)
                slope += torch.autograd.grad(value, point)[0]
                total += value.detach()
            objective, terms = self._objective(total, self.elbo.n_data, point)
            return terms, slope + torch.autograd.grad(objective, point)[0]

    def maximise(self, start: Tensor, options: ScaleFit, history: list[ELBOTerms]) -> tuple[Tensor, bool]:
        """The logarithms at the optimum, and whether the search converged; each step is appended to ``history``."""
        logs, n_data = start.detach().clone().requires_grad_(), self.elbo.n_data
        if options.optimizer == "adam":
            adam = torch.optim.Adam([logs], lr=options.learning_rate)
            for _ in range(options.epochs):
                for entry in self.entries():
                    with torch.enable_grad():
                        objective, terms = self._objective(self._nll(entry, logs), len(entry[0]), logs)
                        (logs.grad,) = torch.autograd.grad(objective, logs)
                    history.append(terms)
                    adam.step()
            return logs.detach(), True

        def closure() -> float:
            terms, slope = self.evaluate(logs)
            history.append(terms)
            logs.grad = slope / n_data
            return -terms.elbo / n_data

        steps = options.max_iterations
        optimizer = torch.optim.LBFGS(
            [logs], max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )
        optimizer.step(closure)
        terms, slope = self.evaluate(logs)
        history.append(terms)
        # An e-fold of either scale then changes the bound by less than 1e-4 of its value, or 1e-4 nats.
        return logs.detach(), bool(slope.abs().max() <= 1e-4 * max(1.0, abs(terms.elbo)))

    def _objective(self, nll: Tensor, size: int, logs: Tensor) -> tuple[Tensor, ELBOTerms]:
        return self.elbo.objective(nll, size, self._distance, self.rank, logs)

    def entries(self) -> Iterator[Entry]:
        """The batches, of which outputs and tangents are kept if they fit."""
        if self._kept is not None:
            yield from self._kept
            return
        vectors = torch.cat([self.noise.null_space, self.noise.range])
        kept: list[Entry] = []
        room = budget(self.network.device) // 2
        for batch in self.elbo.batches():
            if self.elbo.expectation == "sampled":
                yield batch.target, batch.inputs, None
                continue
            with torch.no_grad():
                outputs, tangents = pushed(
                    self.network, vectors, batch.inputs, n_outputs=self.n_outputs, ad_modes=self._ad_modes
                )
            entry = batch.target, outputs, tangents
            room -= tangents.nbytes
            kept = [*kept, entry] if room > 0 else []
            yield entry
        self._kept = kept or None

    def outputs(self, entry: Entry, logs: Tensor) -> Tensor:
        """Outputs ``[k, B, *, C]`` of a batch under samples."""
        _, inputs, tangents = entry
        if tangents is None:
            moves = deviations(logs, self.noise.null_space, self.noise.range)
            return of_networks(self.network, inputs, self._mean, moves)
        return mirrored(inputs, deviations(logs, *tangents.chunk(2)))

    def _nll(self, entry: Entry, logs: Tensor) -> Tensor:
        """A batch's expected negative log-likelihood."""
        return self.elbo.expected_nll(self.outputs(entry, logs), entry[0]).to(logs.device)
