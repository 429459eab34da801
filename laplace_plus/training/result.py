"""What training by the marginal likelihood returns, and what it tells on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_plus.posteriors import GaussianPosterior


@dataclass(frozen=True, eq=False)
class Update:
    """One update of the hyperparameters.

    Attributes:
        epoch: After which epoch, counted from 1.
        evidence: The Laplace evidence in nats, at the weights after that epoch and the hyperparameters after the
            update.
        log_likelihood: ``log p(D|θ)`` in nats there, not tempered.
        loss: The mean of the training objective over the epoch, see :func:`train_marginal_likelihood`.
        prior_precision: After the update: 0-d or ``[G]``, one for each of the posterior's ``prior_groups``; of a
            diagonal prior, each layer's geometric mean.
        noise_std: Gaussian noise after the update, 0-d or ``[C]``; None for other likelihoods.
        improved: Whether the evidence is the greatest so far.
    """

    epoch: int
    evidence: float
    log_likelihood: float
    loss: float
    prior_precision: Tensor
    noise_std: Tensor | None
    improved: bool


@dataclass(frozen=True, eq=False)
class MarginalLikelihoodTraining:
    """A network trained by the marginal likelihood, and how it went.

    Attributes:
        model: The network that was passed in, trained in place.
        posterior: Fitted to it, with the hyperparameters found.
        epoch: The epoch, counted from 1, after which weights and hyperparameters were as they are now.
        evidence: The Laplace evidence there, in nats.
        losses: The mean of the training objective over each epoch, in nats for each example.
        updates: All updates of the hyperparameters, in order.
        stopped_early: Whether training ended because the evidence had not improved for ``patience`` updates.
        n_data: The number of examples that the posterior is of.
    """

    model: nn.Module
    posterior: GaussianPosterior
    epoch: int
    evidence: float
    losses: tuple[float, ...]
    updates: tuple[Update, ...]
    stopped_early: bool
    n_data: int

    @property
    def evidences(self) -> tuple[float, ...]:
        """The evidence after each update, in nats."""
        return tuple(update.evidence for update in self.updates)

    @property
    def prior_precisions(self) -> Tensor:
        """The prior precisions after each of U updates, ``[U]`` or ``[U, G]``."""
        return torch.stack([update.prior_precision for update in self.updates])

    @property
    def noise_stds(self) -> Tensor | None:
        """The noise after each of U updates, ``[U]`` or ``[U, C]``; None where there is none."""
        levels = [update.noise_std for update in self.updates if update.noise_std is not None]
        return torch.stack(levels) if levels else None
