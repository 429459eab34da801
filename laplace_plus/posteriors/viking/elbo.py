"""The evidence lower bound of VIKING's family (Roy et al., 2025).

``q = N(m, σ_ker² P + σ_im² (I − P))`` for the projector P onto a null space, with prior ``N(μ, α⁻¹ I)``. The paper
calls the null space of the rows the kernel and their range the image; the scales keep these names. They are tied by
``σ_ker = α^-½``. With ``g(t) = t − 1 − log t`` and the range's dimension r, the divergence from the prior is

    KL(q ‖ p) = ½ (α ‖m − μ‖² + r g(α σ_im²)),

which contains no difference of large numbers, however many parameters there are beside r. At a fixed mean the noise is
drawn and projected once, so that the bound is a deterministic function of α and σ_im, which L-BFGS maximises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.geometry.loss import MovedNetwork
from laplace_plus.kernels import vector_norm
from laplace_plus.likelihoods.sampling import stage_generator, standard_normal
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors.projection import (
    BatchRows,
    NullSpaceRows,
    ProjectedNoise,
    range_dimension,
)
from laplace_plus.predictive.linearized import pushed

ITERATIONS = 100
"""Most iterations of L-BFGS, which finds α and σ_im at a fixed mean."""

Expectation = Literal["linearized", "sampled"]
"""Whether the expected log-likelihood is that of the linearised network or of the network itself."""


@stored
@dataclass(frozen=True)
class ELBOTerms:
    """The terms of an evidence lower bound.

    Attributes:
        expected_nll: ``E_q[−log p(D | θ)] / T`` of the whole data, or its estimate from a minibatch, ``N/B`` times the
            batch's sum.
        kl: ``KL(q ‖ p)``.
        prior_precision: α.
        image_std: σ_im.
        rank: The dimension of the range in the divergence.
    """

    expected_nll: float
    kl: float
    prior_precision: float
    image_std: float
    rank: float

    @property
    def elbo(self) -> float:
        """``−(expected_nll + kl)``, at most the log evidence."""
        return -(self.expected_nll + self.kl)


def prior_divergence(
    squared_distance: Tensor, rank: float, prior_precision: float | Tensor, image_std: float | Tensor
) -> Tensor:
    """``KL(q ‖ p)`` in nats with ``σ_ker = α^-½``, 0-d float64; differentiable in its tensors.

    Example:
        >>> float(prior_divergence(torch.tensor(3.0), 5, 4.0, 0.5))
        6.0
    """
    alpha, std = (torch.as_tensor(x, dtype=torch.float64) for x in (prior_precision, image_std))
    ratio = alpha * std.square()
    return (alpha * squared_distance.double() + rank * (ratio - 1 - ratio.log())) / 2


@dataclass(frozen=True)
class ELBO:
    """A VIKING's bound for one data set, as a function of ``logs = (log α, log σ_im)`` and the mean."""

    posterior: Any
    data: Iterable[Any]
    n_data: int

    def expected_nll(self, outputs: Tensor, target: Any) -> Tensor:
        """The mean over samples' outputs ``[k, B, *, C]`` of a batch's negative log-likelihood, divided by T."""
        likelihood, temperature = self.posterior.likelihood, float(self.posterior.temperature.detach())
        statistics = torch.stack([likelihood.statistics(one, target) for one in outputs]).sum(0)
        return -likelihood.log_likelihood(statistics) / (len(outputs) * temperature)

    def objective(self, nll: Tensor, size: int, mean: Tensor, rank: float, logs: Tensor) -> tuple[Tensor, ELBOTerms]:
        """A batch's share of minus the bound, and the terms of the whole bound estimated from the batch.

        A batch of B of the N examples carries B/N of the divergence. Raises NonFiniteError.
        """
        alpha, image_std = logs.exp()
        distance = (mean - self.posterior.prior_mean.to(mean)).double().square().sum()
        kl = prior_divergence(distance.to(logs.device), rank, alpha, image_std)
        share = size / self.n_data
        values = float(nll.detach()) / share, float(kl.detach()), float(alpha.detach()), float(image_std.detach())
        terms = ELBOTerms(*values, rank)
        fix = "Start from a smaller image_std and a larger prior_precision, or lower the learning rate."
        checks.finite("The evidence lower bound", torch.tensor(astuple(terms)), fix)
        return nll.to(logs.device) + share * kl, terms


def deviations(logs: Tensor, null_space: Tensor, in_range: Tensor) -> Tensor:
    """``σ_ker P ε + σ_im (I − P) ε``, or the same of what a linear map makes of the two components."""
    kernel_std, image_std = (-logs[0] / 2).exp().to(null_space), logs[1].exp().to(null_space)
    return kernel_std * null_space + image_std * in_range


def mirrored(outputs: Tensor, tangents: Tensor) -> Tensor:
    """Outputs ``[2k, B, *, C]`` of the linearised network for k moves with both signs, which cancels all odd terms."""
    return torch.cat([outputs + tangents, outputs - tangents])


def of_networks(network: Network, inputs: Any, mean: Tensor, moves: Tensor) -> Tensor:
    """Outputs ``[k, B, *, C]`` of the networks at ``mean + moves [k, P]``."""
    return torch.stack([network(inputs, network.substitute(mean + move)) for move in moves])


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

    def evaluate(self, logs: Tensor) -> tuple[ELBOTerms, Tensor]:
        """The terms of the bound, and the gradient of minus the bound."""
        point = logs.detach().clone().requires_grad_()
        total, slope = torch.zeros_like(logs[0]), torch.zeros_like(logs)
        with torch.enable_grad():
            for outputs, target in self._outputs(point):
                value = self.elbo.expected_nll(outputs, target).to(point.device)
                slope += torch.autograd.grad(value, point)[0]
                total += value.detach()
            objective, terms = self.elbo.objective(total, self.elbo.n_data, self._mean, self._rank, point)
            return terms, slope + torch.autograd.grad(objective, point)[0]

    def maximise(self, start: Tensor) -> tuple[Tensor, list[ELBOTerms], bool]:
        """The logarithms at the optimum by L-BFGS, the terms of each step, and whether it converged; else it warns."""
        logs, n_data = start.detach().clone().requires_grad_(), self.elbo.n_data
        history: list[ELBOTerms] = []

        def closure() -> float:
            terms, slope = self.evaluate(logs)
            history.append(terms)
            logs.grad = slope / n_data
            return -terms.elbo / n_data

        limits: dict[str, Any] = {"max_iter": ITERATIONS, "tolerance_grad": 1e-10, "tolerance_change": 1e-14}
        torch.optim.LBFGS([logs], **limits, line_search_fn="strong_wolfe").step(closure)
        terms, slope = self.evaluate(logs)
        # An e-fold of either scale then changes the bound by less than 1e-4 of its value, or 1e-4 nats.
        converged = bool(slope.abs().max() <= 1e-4 * max(1.0, abs(terms.elbo)))
        if not converged:
            text = "The search for α and σ_im ended before the slope of the bound vanished; start from other scales."
            warn(text, ConvergenceWarning)
        return logs.detach(), [*history, terms], converged

    def _outputs(self, logs: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """Each batch's outputs ``[k, B, *, C]`` under samples, and its targets."""
        if self.elbo.posterior.expectation == "linearized":
            for outputs, tangents, target in self._pushed:
                yield mirrored(outputs, deviations(logs, *tangents.chunk(2))), target
            return
        for batch in self.elbo.posterior.batches(self.elbo.data):
            moves = deviations(logs, self.noise.null_space, self.noise.range)
            yield of_networks(self.network, batch.inputs, self._mean, moves), batch.target

    @cached_property
    def _pushed(self) -> list[tuple[Tensor, Tensor, Any]]:
        """Each batch's outputs, the tangents of both components of the noise, and its targets."""
        vectors, n = torch.cat([self.noise.null_space, self.noise.range]), self.n_outputs
        with torch.no_grad():
            return [
                (*pushed(self.network, vectors, batch.inputs, n_outputs=n), batch.target)
                for batch in self.elbo.posterior.batches(self.elbo.data)
            ]


# -- training the mean, too --------------------------------------------------------------------------------------------


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
    """

    epochs: int = 50
    scale_epochs: int = 5
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        checks.count("epochs", self.epochs)
        checks.count("scale_epochs", self.scale_epochs, 0)
        checks.positive("learning_rate", self.learning_rate)


def trained_mean(elbo: ELBO, logs: Tensor, seed: int, *, progress: bool) -> tuple[Tensor, Tensor, list[ELBOTerms]]:
    """Train the mean from the network's weights with ``logs = (log α, log σ_im)``: both, and the terms of each step.

    The network itself does not change. A step needs noise ε split into its components in the null space of *all* rows
    and in their range. At the start of each epoch a few vectors ξ are projected precisely, and each step takes a random
    combination of them. What it takes from the null space is projected once more onto the null space of the batch's
    rows, since the mean has moved meanwhile. (The stochastic alternating projections of Roy et al. (2025) save the
    precise one. Where rows of different batches are correlated they converge slowly, and leave part of the "null-space"
    noise in the range.) The gradient in the mean passes through the projection onto the null space of the batch's own
    rows, which is all of them where there is one batch.
    """
    options = elbo.posterior.training
    theta, logs = elbo.posterior.network.vector().requires_grad_(), logs.detach().clone().requires_grad_()
    groups = [{"params": [theta], "lr": options.learning_rate}]
    optimizer = torch.optim.Adam([*groups, {"params": [logs], "lr": SCALE_LEARNING_RATE}])
    history: list[ELBOTerms] = []
    epochs = range(options.scale_epochs + options.epochs)
    for epoch in progress_bar(epochs, enabled=progress, description="VIKING: epochs"):
        source = stage_generator(seed, epoch + 1)
        noise = epoch_noise(elbo, theta.detach(), source)
        for batch in elbo.posterior.batches(elbo.data):
            mean = theta if epoch >= options.scale_epochs else theta.detach()
            history.append(take_gradients(elbo, batch, mean, logs, noise, source))
            optimizer.step()  # passes over a mean without gradient
    return theta.detach(), logs.detach(), history


def epoch_noise(elbo: ELBO, theta: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Normal vectors ``[m, P]``: what is left of them in the null space, and whole; and the range's dimension."""
    posterior = elbo.posterior
    noise = standard_normal((N_PROJECTED, len(theta)), like=theta, generator=source)
    rows = NullSpaceRows(MovedNetwork(posterior.network, theta), posterior.likelihood, elbo.data, posterior.rows)
    projector = posterior.projector.prepare(rows.whole, rows.by_batch)
    null_space = projector.project(noise).value
    squares = vector_norm(noise - null_space).double().square()
    return null_space, noise, float(range_dimension(null_space, squares, projector.rank).value)


def take_gradients(
    elbo: ELBO,
    batch: Batch,
    theta: Tensor,
    logs: Tensor,
    noise: tuple[Tensor, Tensor, float],
    source: torch.Generator,
) -> ELBOTerms:
    """The terms of the bound estimated from a batch; sets the gradients of what requires them."""
    posterior, (before, whole, rank) = elbo.posterior, noise
    rows = BatchRows(posterior.network, posterior.likelihood, batch, posterior.rows, theta)
    weights = standard_normal((1, len(whole)), like=whole, generator=source)
    weights = weights / weights.norm()  # unit combinations of normal vectors are normal
    before, whole = weights @ before, weights @ whole
    if theta.requires_grad:
        value, through = rows.project(torch.cat([before, whole])).value.chunk(2)
        # The derivative of P also moves noise of the range, which ``before`` lacks, into the null space.
        null_space = value.detach() + through - through.detach()
    else:
        null_space = rows.project(before).value
    moves = deviations(logs, null_space, whole - null_space)
    if posterior.expectation == "linearized":
        outputs = mirrored(rows.outputs, rows.push(moves))
    else:
        outputs = of_networks(posterior.network, batch.inputs, theta, moves)
    nll = elbo.expected_nll(outputs, batch.target)
    objective, terms = elbo.objective(nll, batch.size, theta, rank, logs)
    learnt = [x for x in (theta, logs) if x.requires_grad]
    for tensor, gradient in zip(learnt, torch.autograd.grad(objective, learnt), strict=True):
        tensor.grad = gradient
    return terms
