"""The two scales of the kernel/image family at a fixed mean: the optimum of the evidence lower bound over α and σ_im.

The noise is drawn and split once, so that the bound is a deterministic function of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus._memory import budget
from laplace_plus.batches import Batch, iterate
from laplace_plus.curvature.linearization import Ways
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import Network
from laplace_plus.posteriors.null_space_noise import KernelNoise
from laplace_plus.posteriors.viking.elbo import ELBOTerms, kernel_image_kl
from laplace_plus.predictive.deviations import pushed

Expectation = Literal["linearized", "sampled"]
"""Whether the expected log-likelihood is that of the linearised network or of the network itself."""

OPTIMIZERS = ("lbfgs", "adam")


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
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError("Unknown optimizer.", expected=", ".join(OPTIMIZERS), got=repr(self.optimizer))
        if min(self.max_iterations, self.epochs) < 1 or not self.learning_rate > 0:
            raise ConfigurationError(
                "There are no such numbers.",
                expected="max_iterations >= 1, epochs >= 1 and learning_rate > 0",
                got=f"{self.max_iterations}, {self.epochs} and {self.learning_rate}",
            )


def weighed(likelihood: Likelihood, outputs: Tensor, target: Tensor, temperature: float) -> Tensor:
    """The mean over samples of a batch's negative log-likelihood, divided by the temperature.

    Args:
        likelihood: The likelihood.
        outputs: Of each sample, ``[k, B, *, C]``.
        target: The batch's.
        temperature: T.
    """
    targets = target.expand(len(outputs), *target.shape).flatten(0, 1)
    statistics = likelihood.statistics(outputs.flatten(0, 1), targets)
    return -likelihood.log_likelihood(statistics) / (len(outputs) * temperature)


class ExpectedLoss:
    """``E_q[−log p(D | θ)] / T`` as a function of σ_ker and σ_im, with its gradient.

    Of the linearised network the noise is pushed through the tangent once, and kept where the memory budget allows;
    each vector then counts with both signs, which cancels all odd terms.

    Args:
        network: With the mean as its weights.
        likelihood: The likelihood.
        data: Batches.
        noise: Split noise.
        expectation: Of which network.
        temperature: T.
        n_outputs: C.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        noise: KernelNoise,
        expectation: Expectation,
        temperature: float,
        n_outputs: int,
    ):
        self._network, self._likelihood, self._data, self._noise = network, likelihood, data, noise
        self._expectation, self._temperature, self._n_outputs = expectation, temperature, n_outputs
        self._ways = Ways()
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
        self._may_keep = expectation == "linearized"

    def parts(self, scales: Tensor) -> Iterator[tuple[int, float, Tensor]]:
        """Batch by batch its size, its share, and the share's gradient in ``scales = (σ_ker, σ_im)``.

        Args:
            scales: ``[2]`` float64; looked at again for each batch.
        """
        batches = self._linear() if self._expectation == "linearized" else self._sampled()
        for size, loss in batches:
            point = scales.detach().clone().requires_grad_()
            with torch.enable_grad():
                value = loss(point)
                (gradient,) = torch.autograd.grad(value, point)
            yield size, float(value.detach()), gradient

    def __call__(self, scales: Tensor) -> tuple[float, Tensor]:
        """The whole and its gradient."""
        total, slope = 0.0, torch.zeros_like(scales)
        for _, value, gradient in self.parts(scales.detach()):
            total, slope = total + value, slope + gradient
        return total, slope

    def _linear(self) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        if self._kept is not None:
            yield from (self._linear_loss(entry) for entry in self._kept)
            return
        kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        room = budget(self._network.device) // 2
        k = len(self._noise.kernel)
        vectors = torch.cat([self._noise.kernel, self._noise.image])
        for batch in self._batches():
            with torch.no_grad():
                outputs, moved = pushed(
                    self._network, vectors, batch.inputs, n_outputs=self._n_outputs, ways=self._ways
                )
            entry = (outputs, moved[:k], moved[k:], batch.target)
            room -= moved.numel() * moved.element_size()
            if self._may_keep and room > 0:
                kept.append(entry)
            else:
                self._may_keep = False
                kept.clear()
            yield self._linear_loss(entry)
        if self._may_keep:
            self._kept = kept

    def _linear_loss(self, entry: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[int, Callable[[Tensor], Tensor]]:
        outputs, kernel, image, target = entry

        def loss(scales: Tensor) -> Tensor:
            moved = scales[0].to(kernel) * kernel + scales[1].to(image) * image
            both = torch.cat([outputs + moved, outputs - moved])
            return weighed(self._likelihood, both, target, self._temperature)

        return len(outputs), loss

    def _sampled(self) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        mean = self._network.vector()
        for batch in self._batches():

            def loss(scales: Tensor, batch: Batch = batch) -> Tensor:
                total = torch.zeros((), dtype=torch.float64, device=mean.device)
                for kernel, image in zip(self._noise.kernel, self._noise.image, strict=True):
                    vector = mean + scales[0].to(mean) * kernel + scales[1].to(mean) * image
                    outputs = self._network(batch.inputs, self._network.substitute(vector))
                    total = total + weighed(self._likelihood, outputs[None], batch.target, self._temperature)
                return total / len(self._noise.kernel)

            yield batch.size, loss

    def _batches(self) -> Iterable[Batch]:
        return iterate(self._data, device=self._network.device, progress=False, description="")


@dataclass(frozen=True)
class Bound:
    """The evidence lower bound at a fixed mean, as a function of log α and log σ_im.

    Attributes:
        loss: The expected loss.
        squared_distance: ``‖θ̂ − μ‖²``.
        rank: The dimension of the image.
        kl_weight: The weight of the divergence.
        n_data: N.
    """

    loss: ExpectedLoss
    squared_distance: Tensor
    rank: float
    kl_weight: float
    n_data: int

    def terms(self, logs: Tensor) -> ELBOTerms:
        """At ``logs = (log α, log σ_im)``."""
        return self._whole(logs)[0]

    def _whole(self, logs: Tensor) -> tuple[ELBOTerms, Tensor]:
        nll, slope = self.loss(self._scales(logs))
        return self._combined(logs, nll, slope)

    @staticmethod
    def _scales(logs: Tensor) -> Tensor:
        return torch.stack([(-logs[0] / 2).exp(), logs[1].exp()]).detach()

    def _combined(self, logs: Tensor, nll: float, slope: Tensor) -> tuple[ELBOTerms, Tensor]:
        """The terms, and the gradient of minus the bound over N in the logarithms."""
        point = logs.detach().clone().requires_grad_()
        with torch.enable_grad():
            kl = kernel_image_kl(self.squared_distance, self.rank, point[0].exp(), point[1].exp())
            (divergence,) = torch.autograd.grad(kl, point)
        inner = self._scales(logs) * logs.new_tensor([-0.5, 1.0])
        alpha, image_std = logs.detach().exp().tolist()
        terms = ELBOTerms(nll, float(kl.detach()), alpha, image_std, self.rank, self.kl_weight).require_finite()
        return terms, (slope.to(logs) * inner + self.kl_weight * divergence) / self.n_data

    def maximise(self, start: Tensor, options: ScaleFit, history: list[ELBOTerms]) -> tuple[Tensor, bool]:
        """The logarithms at the optimum, and whether the search converged; every step is added to ``history``.

        Raises:
            NonFiniteError: The bound is not finite somewhere.
        """
        logs = start.detach().clone().requires_grad_()
        if options.optimizer == "adam":
            return self._adam(logs, options, history)

        def closure() -> float:
            terms, gradient = self._whole(logs.detach())
            history.append(terms)
            logs.grad = gradient
            return -terms.elbo / self.n_data

        optimizer = torch.optim.LBFGS(
            [logs],
            max_iter=options.max_iterations,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )
        optimizer.step(closure)
        terms, gradient = self._whole(logs.detach())
        history.append(terms)
        # The slope of the bound, in nats for a change of e-fold in either scale.
        converged = bool(gradient.abs().max() * self.n_data <= 1e-4 * max(1.0, abs(terms.elbo)))
        return logs.detach(), converged

    def _adam(self, logs: Tensor, options: ScaleFit, history: list[ELBOTerms]) -> tuple[Tensor, bool]:
        optimizer = torch.optim.Adam([logs], lr=options.learning_rate)
        scales = self._scales(logs)
        for _ in range(options.epochs):
            for size, nll, slope in self.loss.parts(scales):
                whole = self.n_data / size
                terms, gradient = self._combined(logs.detach(), whole * nll, whole * slope)
                history.append(terms)
                logs.grad = gradient * size  # the batch's sum, and B/N of the divergence
                optimizer.step()
                scales.copy_(self._scales(logs))
        return logs.detach(), True
