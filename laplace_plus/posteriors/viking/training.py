"""Training VIKING's mean together with its scales, one batch at a time.

A step needs noise ε split into its components in the null space of *all* rows and in their range. There are two ways:

* projected: at the start of each epoch a few vectors ξ are projected precisely, and each step takes a random
  combination of them. What it takes from the null space is projected once more onto the null space of the batch's
  rows, since the mean has moved meanwhile.
* alternating: the stochastic alternating projections of Roy et al. (2025), ``u = √γ e + √(1−γ) η`` with fresh normal
  η, ``k = Π_b u`` with the projector onto the null space of the batch's own rows, and ``e ← k``. They cost no passes
  but one for each epoch. But alternating projections converge slowly where rows of different batches are correlated:
  much of the fresh noise is then forgotten before it is projected, and part of the "null-space" noise is in the range.

The gradient in the mean passes through the projection onto the null space of the batch's own rows, which is all of
them where there is one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.geometry.loss import MovedNetwork
from laplace_plus.kernels import vector_norm
from laplace_plus.likelihoods.sampling import stage_generator
from laplace_plus.linalg.null_space import ProjectionMethod
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors.projection.noise import normal_like, range_dimension
from laplace_plus.posteriors.projection.rows import BatchRows, NullSpaceRows, Rows
from laplace_plus.posteriors.viking.elbo import ELBO, ELBOTerms, deviations, mirrored, of_networks


@stored
@dataclass(frozen=True)
class ELBOTraining:
    """How the mean is trained.

    Args:
        epochs: Passes over the data.
        scale_epochs: Passes before them in which only α and σ_im are learnt.
        learning_rate: Of Adam, for the mean.
        scale_learning_rate: Of Adam, for log α and log σ_im.
        noise: ``"projected"``: noise projected onto the null space of all rows, so that steps estimate the bound
            itself. ``"alternating"``: stochastic alternating projections; the range component of a step is then what
            the batch's own projection takes away, and the divergence that of the batch's exact rank.
        n_projected: Vectors that are projected at the start of each epoch.
        gamma: γ of alternating projections, how much of the noise is kept from one batch to the next.
        n_samples: Sampled networks for each batch.
    """

    epochs: int = 50
    scale_epochs: int = 5
    learning_rate: float = 1e-3
    scale_learning_rate: float = 1e-2
    noise: Literal["projected", "alternating"] = "projected"
    n_projected: int = 8
    gamma: float = 0.5
    n_samples: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "n_samples", "n_projected"):
            checks.count(name, getattr(self, name))
        checks.count("scale_epochs", self.scale_epochs, 0)
        checks.positive("learning_rate", self.learning_rate)
        checks.positive("scale_learning_rate", self.scale_learning_rate)
        checks.number("gamma", self.gamma, least=0.0, most=1.0)
        checks.choice("noise", self.noise, ("projected", "alternating"))


@dataclass
class EpochNoise:
    """Normal vectors ``[m, P]``: what is left of them in the null space, and whole; and the range's dimension."""

    null_space: Tensor
    whole: Tensor
    rank: float


@dataclass(frozen=True)
class MeanTraining:
    """Trains the mean, which starts at the network's weights; the network itself does not change."""

    elbo: ELBO
    network: Network
    rows: Rows
    projector: ProjectionMethod
    chunk_size: int
    options: ELBOTraining

    def run(self, logs: Tensor, seed: int, *, progress: bool) -> tuple[Tensor, Tensor, list[ELBOTerms]]:
        """Train from ``logs = (log α, log σ_im)``; the mean ``[P]``, the logarithms, and the terms of each step."""
        options = self.options
        theta, logs = self.network.vector().requires_grad_(), logs.detach().clone().requires_grad_()
        groups = [{"params": [theta], "lr": options.learning_rate}]
        optimizer = torch.optim.Adam([*groups, {"params": [logs], "lr": options.scale_learning_rate}])
        history: list[ELBOTerms] = []
        epochs = range(options.scale_epochs + options.epochs)
        for epoch in progress_bar(epochs, enabled=progress, description="VIKING: epochs"):
            source = stage_generator(seed, epoch + 1)
            noise = self.epoch_noise(theta.detach(), source)
            for batch in self.elbo.batches():
                mean = theta if epoch >= options.scale_epochs else theta.detach()
                history.append(self.step(batch, mean, logs, noise, source))
                optimizer.step()  # passes over a mean without gradient
        return theta.detach(), logs.detach(), history

    def epoch_noise(self, theta: Tensor, source: torch.Generator) -> EpochNoise:
        """Noise projected onto the null space of all rows, or by one pass of alternating projections."""
        options, rank = self.options, None
        if options.noise == "projected":
            noise = normal_like(theta.expand(options.n_projected, -1), source)
            center = MovedNetwork(self.network, theta)
            rows = NullSpaceRows(center, self.elbo.likelihood, self.elbo.data, self.rows, chunk_size=self.chunk_size)
            projector = self.projector.prepare(rows.whole, rows.by_batch)
            null_space, rank = projector.project(noise).value, projector.rank
        else:
            noise = null_space = normal_like(theta.expand(options.n_samples, -1), source)
            for batch in self.elbo.batches():
                with torch.no_grad():
                    null_space = self._batch_rows(batch, theta).project(null_space).value
        squares = vector_norm(noise - null_space).double().square()
        return EpochNoise(null_space, noise, float(range_dimension(null_space, squares, rank).value))

    def step(self, batch: Batch, theta: Tensor, logs: Tensor, noise: EpochNoise, source: torch.Generator) -> ELBOTerms:
        """The terms of the bound estimated from a batch; sets the gradients of what requires them."""
        rows, elbo = self._batch_rows(batch, theta), self.elbo
        null_space, in_range, rank = self._split(rows, noise, source, theta.requires_grad)
        moves = deviations(logs, null_space, in_range)
        if elbo.expectation == "linearized":
            outputs = mirrored(rows.outputs, rows.push(moves))
        else:
            outputs = of_networks(self.network, batch.inputs, theta, moves)
        nll = elbo.expected_nll(outputs, batch.target)
        objective, terms = elbo.objective(nll, batch.size, theta, rank, logs)
        learnt = [x for x in (theta, logs) if x.requires_grad]
        for tensor, gradient in zip(learnt, torch.autograd.grad(objective, learnt), strict=True):
            tensor.grad = gradient
        return terms

    def _split(
        self, rows: BatchRows, noise: EpochNoise, source: torch.Generator, learns_mean: bool
    ) -> tuple[Tensor, Tensor, float]:
        """A step's null-space and range noise ``[m, P]``, differentiable in the mean, and the range's dimension."""
        options = self.options
        if options.noise == "alternating":
            fresh = normal_like(noise.null_space, source)
            before = options.gamma**0.5 * noise.null_space + (1 - options.gamma) ** 0.5 * fresh
            null_space = rows.project(before).value
            noise.null_space = null_space.detach()
            return null_space, before - null_space, float(rows.rank())
        weights = normal_like(noise.null_space[:, 0].expand(options.n_samples, -1), source)
        weights = weights / weights.norm(dim=-1, keepdim=True)  # unit combinations of normal vectors are normal
        before, whole = weights @ noise.null_space, weights @ noise.whole
        if not learns_mean:
            null_space = rows.project(before).value
        else:
            value, through = rows.project(torch.cat([before, whole])).value.chunk(2)
            # The derivative of P also moves noise of the range, which ``before`` lacks, into the null space.
            null_space = value.detach() + through - through.detach()
        return null_space, whole - null_space, noise.rank

    def _batch_rows(self, batch: Batch, theta: Tensor) -> BatchRows:
        return BatchRows(self.network, self.elbo.likelihood, batch, self.rows, theta)
