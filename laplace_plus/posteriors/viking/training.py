"""Training VIKING's mean together with its scales, one batch at a time.

A step needs noise ε split into its components in the null space of *all* rows and in their range. At the start of each
epoch a few vectors ξ are projected precisely, and each step takes a random combination of them. What it takes from the
null space is projected once more onto the null space of the batch's rows, since the mean has moved meanwhile. (The
stochastic alternating projections of Roy et al. (2025) save the precise one. Where rows of different batches are
correlated they converge slowly, and leave part of the "null-space" noise in the range.)

The gradient in the mean passes through the projection onto the null space of the batch's own rows, which is all of
them where there is one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

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

SCALE_LEARNING_RATE, N_PROJECTED = 1e-2, 8
"""Adam's learning rate for log α and log σ_im, and the vectors that are projected at the start of each epoch."""


@stored
@dataclass(frozen=True)
class ELBOTraining:
    """How the mean is trained.

    Args:
        epochs: Passes over the data.
        scale_epochs: Passes before them in which only α and σ_im are learnt.
        learning_rate: Of Adam, for the mean.
        n_samples: Sampled networks for each batch.
    """

    epochs: int = 50
    scale_epochs: int = 5
    learning_rate: float = 1e-3
    n_samples: int = 1

    def __post_init__(self) -> None:
        checks.count("epochs", self.epochs)
        checks.count("n_samples", self.n_samples)
        checks.count("scale_epochs", self.scale_epochs, 0)
        checks.positive("learning_rate", self.learning_rate)


@dataclass(frozen=True)
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
        optimizer = torch.optim.Adam([*groups, {"params": [logs], "lr": SCALE_LEARNING_RATE}])
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
        """Noise projected onto the null space of all rows."""
        noise = normal_like(theta.expand(N_PROJECTED, -1), source)
        center = MovedNetwork(self.network, theta)
        rows = NullSpaceRows(center, self.elbo.likelihood, self.elbo.data, self.rows, chunk_size=self.chunk_size)
        projector = self.projector.prepare(rows.whole, rows.by_batch)
        null_space = projector.project(noise).value
        squares = vector_norm(noise - null_space).double().square()
        return EpochNoise(null_space, noise, float(range_dimension(null_space, squares, projector.rank).value))

    def step(self, batch: Batch, theta: Tensor, logs: Tensor, noise: EpochNoise, source: torch.Generator) -> ELBOTerms:
        """The terms of the bound estimated from a batch; sets the gradients of what requires them."""
        elbo, rows = self.elbo, BatchRows(self.network, self.elbo.likelihood, batch, self.rows, theta)
        weights = normal_like(noise.null_space[:, 0].expand(self.options.n_samples, -1), source)
        weights = weights / weights.norm(dim=-1, keepdim=True)  # unit combinations of normal vectors are normal
        before, whole = weights @ noise.null_space, weights @ noise.whole
        if theta.requires_grad:
            value, through = rows.project(torch.cat([before, whole])).value.chunk(2)
            # The derivative of P also moves noise of the range, which ``before`` lacks, into the null space.
            null_space = value.detach() + through - through.detach()
        else:
            null_space = rows.project(before).value
        moves = deviations(logs, null_space, whole - null_space)
        if elbo.expectation == "linearized":
            outputs = mirrored(rows.outputs, rows.push(moves))
        else:
            outputs = of_networks(self.network, batch.inputs, theta, moves)
        nll = elbo.expected_nll(outputs, batch.target)
        objective, terms = elbo.objective(nll, batch.size, theta, noise.rank, logs)
        learnt = [x for x in (theta, logs) if x.requires_grad]
        for tensor, gradient in zip(learnt, torch.autograd.grad(objective, learnt), strict=True):
            tensor.grad = gradient
        return terms
