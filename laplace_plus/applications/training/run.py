"""One run of training by the marginal likelihood, from its first epoch to the final posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.training.loop import Loop, LoopOptions, put_back, weights_of
from laplace_plus.applications.training.objective import HyperparameterAscent, TrainingObjective
from laplace_plus.curvature import Backend
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import iterate
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.priors import LAYERWISE, STRUCTURES, Groups, PriorStructure
from laplace_plus.tuning.groups import chosen_groups

PosteriorFactory = Callable[..., GaussianPosterior]


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
    """A network trained by the marginal likelihood, with the history of its training.

    Attributes:
        model: The network that was passed in, trained in place.
        posterior: Fitted to it, with the hyperparameters found.
        epoch: The epoch, counted from 1, whose weights and hyperparameters the result has.
        evidence: The Laplace evidence there, in nats.
        losses: The mean of the training objective over each epoch, in nats for each example.
        updates: All updates of the hyperparameters, in order.
        stopped_early: Whether training ended because the evidence had not improved for ``patience`` updates.
        n_data: Number of examples of the posterior.
        state: What training goes on from, after its last epoch: a dict of tensors and numbers that ``torch.save``
            takes, and the argument ``state`` of the next call.
    """

    model: nn.Module
    posterior: GaussianPosterior
    epoch: int
    evidence: float
    losses: tuple[float, ...]
    updates: tuple[Update, ...]
    stopped_early: bool
    n_data: int
    state: dict[str, Any] = field(repr=False)

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


@dataclass(frozen=True, kw_only=True)
class Settings(LoopOptions):
    """The arguments of :func:`~laplace_plus.train_marginal_likelihood`, without data and randomness."""

    likelihood: Likelihood
    posterior: PosteriorFactory
    structure: str | Groups
    prior_precision: float | Tensor
    prior_mean: float | Tensor
    temperature: float
    tune_noise: bool
    backend: str | Backend | None
    burn_in: int
    frequency: int
    hyper_steps: int | None
    hyper_lr: float
    early_stopping: bool
    patience: int | None
    callback: Callable[[Update], object] | None
    progress: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count("burn_in", self.burn_in, 0)
        checks.count("frequency", self.frequency)
        for name, value in (("hyper_steps", self.hyper_steps), ("patience", self.patience)):
            checks.count(name, 1 if value is None else value)
        checks.positive("temperature", self.temperature)
        checks.positive("hyper_lr", self.hyper_lr)
        if self.burn_in >= self.epochs:
            what, expected = "The hyperparameters would never be updated.", "fewer epochs of burn_in than epochs"
            raise ConfigurationError(what, expected=expected, got=f"burn_in={self.burn_in}, epochs={self.epochs}")
        if self.patience is not None and not self.early_stopping:
            what = "Patience belongs to early stopping."
            raise ConfigurationError(what, expected="early_stopping=True", got="early_stopping=False")

    def make_posterior(self, model: nn.Module, noise_std: Tensor | None = None) -> GaussianPosterior:
        """A posterior of these settings, with unit prior precision."""
        likelihood = self.likelihood if noise_std is None else self.likelihood.with_noise(noise_std)
        options: dict[str, Any] = {} if self.backend is None else {"backend": self.backend}
        made = self.posterior(
            model, likelihood, prior_precision=1.0, prior_mean=self.prior_mean, temperature=self.temperature, **options
        )
        if not isinstance(made, GaussianPosterior):
            what = "The posterior has no evidence."
            expected = "a Gaussian posterior's class, such as lp.KFAC, or a function that returns one"
            raise ConfigurationError(what, expected=expected, got=f"a {type(made).__name__}")
        return made


class Run:
    """One run: epochs of a :class:`Loop`, and updates of the hyperparameters between them."""

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        curvature_loader: Iterable[Any] | None,
        settings: Settings,
        generator: torch.Generator | None,
    ):
        self.curved = loader if curvature_loader is None else curvature_loader
        self.model, self.settings, self.generator = model, settings, generator
        self.posterior = settings.make_posterior(model)
        self.network = self.posterior.network
        self.loop = Loop(model, self.network, loader, settings, generator=generator, other=curvature_loader)
        self.updates: list[Update] = []
        self.best: dict[str, Tensor] | None = None  # the weights of the update with the greatest evidence
        self.kept: tuple[Tensor, Tensor | None] = self.posterior.prior_precision, None  # the result's hyperparameters

    def train(self, state: Mapping[str, Any] | None) -> MarginalLikelihoodTraining:
        """All epochs, or those that are left, and the posterior at the end."""
        settings, loop = self.settings, self.loop
        with loop.running():
            self._rehearse()
            if state is not None:
                self._restore(state)
            else:
                n_data, n_batches = loop.sizes(loop.loader)
                loop.mean_batch_size = n_data / n_batches
                loop.n_data = n_data if self.curved is loop.loader else loop.sizes(self.curved)[0]
            epochs = range(len(loop.losses) + 1, settings.epochs + 1)
            bar = progress_bar(epochs, enabled=settings.progress, description="marginal likelihood")
            for epoch in bar:
                recent = self.updates[-settings.patience :] if settings.patience else []
                if recent and len(recent) == settings.patience and not any(update.improved for update in recent):
                    break
                self._epoch(epoch)
                if isinstance(bar, tqdm):
                    evidence = f"{self.updates[-1].evidence:.6g}" if self.updates else "-"
                    bar.set_postfix(loss=f"{loop.losses[-1]:.4g}", evidence=evidence, refresh=False)
                if settings.callback is not None and self.updates and self.updates[-1].epoch == epoch:
                    settings.callback(self.updates[-1])
            if not self.updates:  # a longer run, continued with so few epochs that it ends at once
                self._update(len(loop.losses), loop.losses[-1])
            return self._result()

    def _rehearse(self) -> None:
        """Fit one batch, so that what posterior or data do not support is refused before hours of training."""
        self.network.check_finite()
        batch = next(iterate(self.curved, device=self.network.device))
        posterior, structure = self.posterior, self.settings.structure
        posterior.fit([(batch.inputs, batch.target)], generator=self.generator)
        self.structure: PriorStructure = LAYERWISE
        self.groups: Groups | None = None
        if structure in STRUCTURES:
            self.structure = structure
        else:
            self.groups = posterior.prior_groups = chosen_groups(posterior, structure, [(batch.inputs, batch.target)])
        posterior.prior_precision = self.settings.prior_precision
        self.ascent = HyperparameterAscent(
            posterior,
            self.structure,
            self.groups,
            tune_noise=self.settings.tune_noise,
            steps=self.settings.hyper_steps,
            learning_rate=self.settings.hyper_lr,
        )

    def _epoch(self, epoch: int) -> None:
        """One epoch, with the update after it where one is due."""
        loop, settings = self.loop, self.settings
        objective = TrainingObjective(  # made anew, as a fit may choose other parameters
            self.model, self.posterior, n_data=loop.n_data, mean_batch_size=loop.mean_batch_size
        )
        loss = loop.train(objective)
        if self.curved is loop.loader:
            loop.n_data = loop.n_examples
        beyond = epoch - settings.burn_in
        if epoch == settings.epochs or (beyond > 0 and beyond % settings.frequency == 0):
            self._update(epoch, loss)
            if settings.early_stopping and self._keeps(self.updates[-1]):
                self.best = weights_of(self.network.model)
        loop.end(loss)

    def _update(self, epoch: int, loss: float) -> None:
        """Fit the posterior, improve the hyperparameters, and keep them if the result is to have them."""
        posterior = self.posterior
        posterior.fit(self.curved, generator=self.generator)
        self.loop.n_data = posterior.n_data
        evidence = self.ascent.update()
        precision, noise = posterior.prior_precision.detach(), posterior.noise_std
        if self.structure == "diagonal":
            precision = posterior.prior_groups.geometric_means(precision)
        update = Update(
            epoch=epoch,
            evidence=evidence,
            log_likelihood=posterior.laplace_model().log_likelihood(noise).item(),
            loss=loss,
            prior_precision=precision.double().cpu().clone(),
            noise_std=None if noise is None else noise.clone(),
            improved=evidence > max((update.evidence for update in self.updates), default=-math.inf),
        )
        self.updates.append(update)
        if self._keeps(update):
            self.kept = posterior.prior_precision, noise

    def _keeps(self, update: Update) -> bool:
        return update.improved or not self.settings.early_stopping

    def _result(self) -> MarginalLikelihoodTraining:
        state, kept = self._state(), next(update for update in reversed(self.updates) if self._keeps(update))
        if self.best is not None:
            put_back(self.network.model, self.best)
        precision, noise = self.kept
        posterior = self.settings.make_posterior(self.model, noise)
        posterior.fit(self.curved, generator=self.generator)
        if self.groups is not None:
            posterior.prior_groups = self.groups
        posterior.prior_precision = precision
        return MarginalLikelihoodTraining(
            model=self.model,
            posterior=posterior,
            epoch=kept.epoch,
            evidence=kept.evidence,
            losses=tuple(self.loop.losses),
            updates=tuple(self.updates),
            stopped_early=len(self.loop.losses) < self.settings.epochs,
            n_data=posterior.n_data,
            state=state,
        )

    def _state(self) -> dict[str, Any]:
        posterior = self.posterior
        hyper = {"prior_precision": posterior.prior_precision.clone(), "noise_std": posterior.noise_std}
        kept = {"best": self.best, "kept": self.kept, "ascent": self.ascent.state()}
        return {**self.loop.state(), **hyper, **kept, "updates": [dict(vars(update)) for update in self.updates]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.loop.restore(state)
        self.updates = [Update(**update) for update in state["updates"]]
        self.best, self.kept = state["best"], state["kept"]
        self.posterior.prior_precision = state["prior_precision"]
        if state["noise_std"] is not None:
            self.posterior.noise_std = state["noise_std"]
        self.ascent.restore(state["ascent"])
