"""VIKING's two scales at a fixed mean: the optimum of the evidence lower bound over α and σ_im.

The noise is drawn and projected once, so that the bound is a deterministic function of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus._memory import budget
from laplace_plus.curvature.linearization import ADModes
from laplace_plus.errors import ConfigurationError
from laplace_plus.network import Network
from laplace_plus.posteriors.configuration import check_name
from laplace_plus.posteriors.projection.noise import ProjectedNoise
from laplace_plus.posteriors.viking.elbo import ELBO, ELBOTerms, deviations
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
        check_name(self.optimizer, ("lbfgs", "adam"), "optimizer")
        if min(self.max_iterations, self.epochs) < 1 or not self.learning_rate > 0:
            raise ConfigurationError(
                "A number of the scale fit is out of range.",
                expected="max_iterations >= 1, epochs >= 1 and learning_rate > 0",
                got=f"{self.max_iterations}, {self.epochs} and {self.learning_rate}",
            )


Pushed = tuple[Tensor, Tensor, Tensor, Tensor]
"""Outputs ``[B, *, C]``, tangents of both noise components ``[k, B, *, C]``, and targets of one batch."""


class BoundAtMean:
    """The bound at a fixed mean, as a function of ``logs = (log α, log σ_im)``.

    For the linearised network the noise is pushed through the tangent once, and kept where the memory budget allows;
    each vector then counts with both signs, which cancels all odd terms.
    """

    def __init__(self, elbo: ELBO, network: Network, noise: ProjectedNoise, rank: float, n_outputs: int):
        self._elbo, self._network, self._noise = elbo, network, noise
        self._rank, self._n_outputs, self._ad_modes = rank, n_outputs, ADModes()
        self._mean = network.vector()
        self._distance = elbo.squared_distance(self._mean).cpu()
        self._kept: list[Pushed] | None = None

    def evaluate(self, logs: Tensor) -> tuple[ELBOTerms, Tensor]:
        """The terms of the bound, and the gradient of minus the bound."""
        point = logs.detach().clone().requires_grad_()
        total, slope = 0.0, torch.zeros_like(logs)
        with torch.enable_grad():
            for _, loss in self._losses():
                value = loss(point)
                slope += torch.autograd.grad(value, point)[0]
                total += float(value.detach())
            objective, terms = self._objective(point.new_tensor(total), self._elbo.n_data, point)
            return terms, slope + torch.autograd.grad(objective, point)[0]

    def maximise(self, start: Tensor, options: ScaleFit, history: list[ELBOTerms]) -> tuple[Tensor, bool]:
        """The logarithms at the optimum, and whether the search converged; each step is appended to ``history``."""
        logs, n_data = start.detach().clone().requires_grad_(), self._elbo.n_data
        if options.optimizer == "adam":
            self._adam(logs, options, history)
            return logs.detach(), True

        def closure() -> float:
            terms, slope = self.evaluate(logs)
            history.append(terms)
            logs.grad = slope / n_data
            return -terms.elbo / n_data

        optimizer = torch.optim.LBFGS(
            [logs],
            max_iter=options.max_iterations,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )
        optimizer.step(closure)
        terms, slope = self.evaluate(logs)
        history.append(terms)
        # An e-fold of either scale then changes the bound by less than 1e-4 of its value, or 1e-4 nats.
        return logs.detach(), bool(slope.abs().max() <= 1e-4 * max(1.0, abs(terms.elbo)))

    def _adam(self, logs: Tensor, options: ScaleFit, history: list[ELBOTerms]) -> None:
        optimizer = torch.optim.Adam([logs], lr=options.learning_rate)
        for _ in range(options.epochs):
            for size, loss in self._losses():
                with torch.enable_grad():
                    objective, terms = self._objective(loss(logs), size, logs)
                    (logs.grad,) = torch.autograd.grad(objective, logs)
                history.append(terms)
                optimizer.step()

    def _objective(self, nll: Tensor, size: int, logs: Tensor) -> tuple[Tensor, ELBOTerms]:
        return self._elbo.objective(nll, size, self._distance, self._rank, logs)

    def _losses(self) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """The size of each batch, and its expected negative log-likelihood as a function of ``logs``."""
        if self._elbo.expectation == "linearized":
            for entry in self._push() if self._kept is None else self._kept:
                yield len(entry[0]), self._linearized(entry)
        else:
            for batch in self._elbo.batches():
                yield batch.size, self._sampled(batch.inputs, batch.target)

    def _push(self) -> Iterator[Pushed]:
        """The noise pushed through the tangent, batch by batch; kept for the next time if all of it fits."""
        vectors = torch.cat([self._noise.null_space, self._noise.range])
        kept: list[Pushed] = []
        room = budget(self._network.device) // 2
        for batch in self._elbo.batches():
            with torch.no_grad():
                outputs, moved = pushed(
                    self._network, vectors, batch.inputs, n_outputs=self._n_outputs, ad_modes=self._ad_modes
                )
            null_space, in_range = moved.chunk(2)
            entry = outputs, null_space, in_range, batch.target
            room -= moved.numel() * moved.element_size()
            if room > 0:
                kept.append(entry)
            else:
                kept.clear()
            yield entry
        if room > 0:
            self._kept = kept

    def _linearized(self, entry: Pushed) -> Callable[[Tensor], Tensor]:
        outputs, null_space, in_range, target = entry

        def loss(logs: Tensor) -> Tensor:
            moved = deviations(logs, null_space, in_range)
            return self._elbo.expected_nll(torch.cat([outputs + moved, outputs - moved]), target)

        return loss

    def _sampled(self, inputs: object, target: Tensor) -> Callable[[Tensor], Tensor]:
        network, noise = self._network, self._noise

        def loss(logs: Tensor) -> Tensor:
            total = torch.zeros((), dtype=torch.float64, device=self._mean.device)
            for null_space, in_range in zip(noise.null_space, noise.range, strict=True):
                outputs = network(inputs, network.substitute(self._mean + deviations(logs, null_space, in_range)))
                total = total + self._elbo.expected_nll(outputs[None], target)
            return total / len(noise.null_space)

        return loss
