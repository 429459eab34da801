"""One run of training by the marginal likelihood, from its first epoch to the final posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from laplace_plus import io
from laplace_plus._progress import progress_bar
from laplace_plus.applications.training.checkpoint import Generators, put_back, weights_of
from laplace_plus.applications.training.objective import HyperparameterAscent, TrainingObjective
from laplace_plus.applications.training.settings import Settings
from laplace_plus.distributed import resolve_group
from laplace_plus.errors import CheckpointError, NonFiniteError, UnsupportedError
from laplace_plus.io.checkpoints import pack, taking_up, unpack
from laplace_plus.network.batches import Batch, DataSums, iterate, same_sum
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.priors import LAYERWISE, STRUCTURES, Groups, PriorStructure
from laplace_plus.tuning.groups import chosen_groups


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


_STATE = ("epoch", "best", "kept", "losses", "n_data", "mean_batch_size")
"""Attributes of a run that go into its checkpoint as they are."""


class Run:
    """One run and its state."""

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        curvature_loader: Iterable[Any],
        settings: Settings,
        generator: torch.Generator | None,
    ):
        if resolve_group(None) is not None:
            what, got = "Training by the marginal likelihood runs in one process.", "several ranks of torch.distributed"
            fix = "Train on one device; posteriors can be fitted over several ranks afterwards."
            raise UnsupportedError(what, expected="no process group, or one of a single rank", got=got, fix=fix)
        for data in (loader, curvature_loader):
            if isinstance(data, Iterator):  # iter() of a loader would draw a seed
                require_restartable(data, "Training passes over the data many times.")
        self.model, self.loader, self.curvature_loader = model, loader, curvature_loader
        self.settings, self.generator = settings, generator
        self.posterior: GaussianPosterior = settings.make_posterior(model)
        self.network, self.device = self.posterior.network, self.posterior.network.device
        self.generators = Generators(self.device, [loader, curvature_loader], generator)
        self.good = weights_of(self.network.model)
        self.best: dict[str, Tensor] | None = None
        self.kept: tuple[Tensor, Tensor | None] = self.posterior.prior_precision, None  # hyperparameters of the result
        self.epoch = 0
        self.data_sum: float | None = None
        self.losses: list[float] = []
        self.updates: list[Update] = []

    def train(self) -> MarginalLikelihoodTraining:
        """All epochs, and the posterior at the end."""
        settings = self.settings
        with self._guarded(), torch.enable_grad():
            self._prepare()
            epochs = range(self.epoch + 1, settings.epochs + 1)
            bar = progress_bar(epochs, enabled=settings.progress, description="marginal likelihood")
            for epoch in bar:
                recent = self.updates[-settings.patience :] if settings.patience else []
                if recent and len(recent) == settings.patience and not any(update.improved for update in recent):
                    break
                self._complete(epoch)
                if isinstance(bar, tqdm):
                    evidence = f"{self.updates[-1].evidence:.6g}" if self.updates else "-"
                    bar.set_postfix(loss=f"{self.losses[-1]:.4g}", evidence=evidence, refresh=False)
                if settings.callback is not None and self.updates and self.updates[-1].epoch == epoch:
                    settings.callback(self.updates[-1])
            if not self.updates:  # a longer run, continued with so few epochs that it ends at once
                self._update(self.epoch, self.losses[-1])
            return self._result()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Restore the modes in any case, and after a failure the weights of the last complete epoch."""
        modes = [(module, module.training) for module in self.network.model.modules()]
        try:
            yield
        except BaseException:
            put_back(self.network.model, self.good)
            raise
        finally:
            for module, training in modes:
                module.training = training
            for parameter in self.network.model.parameters():
                parameter.grad = None

    # -- before the first epoch ----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Rehearse, and continue from the checkpoint or count the data."""
        settings, path = self.settings, self.settings.checkpoint
        selected = list(self.posterior.parameter_names)  # by the arguments; a fit may choose among them
        self._rehearse()
        self.optimizer = settings.make_optimizer(self.network)
        self.scheduler = None if settings.scheduler is None else settings.scheduler(self.optimizer)
        if path is not None:
            names = io.fingerprint(self.network.model)["names_sha256"]
            described = settings.described(self.posterior, self.optimizer, self.scheduler)
            self.described = {"network": names, **described, "parameters": selected}
            if path.exists() and not (path.is_dir() and not any(path.iterdir())):
                self._resume(path)
                return
        self.n_data, n_batches, self.data_sum = self._survey(self.curvature_loader)
        n_data = self.n_data
        if self.curvature_loader is not self.loader:
            n_data, n_batches, _ = self._survey(self.loader)
        self.mean_batch_size = n_data / n_batches

    def _rehearse(self) -> None:
        """Fit one batch, so that what posterior or data do not support is refused before hours of training."""
        self.network.check_finite()
        batch = next(iterate(self.curvature_loader, device=self.device))
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

    def _survey(self, data: Iterable[Any]) -> tuple[int, int, float]:
        """The number of examples and of batches that a loader yields, and a sum that differs for other data."""
        sums, n_batches = DataSums("cpu"), 0
        with self.generators.seeded():
            for batch in iterate(data, device="cpu"):
                sums.add(batch, len(batch.target))
                n_batches += 1
        return sums.count, n_batches, sums.values()[0]

    # -- epochs --------------------------------------------------------------------------------------------------------

    def _complete(self, epoch: int) -> None:
        """One epoch, with the update, the schedule and the checkpoint after it."""
        loss = self._train_epoch(epoch)
        updates = self.settings.updates_after(epoch)
        if updates:
            self._update(epoch, loss)
        if self.settings.schedule_by == "epoch":
            self._schedule(loss)
        self.losses.append(loss)
        self.good, self.epoch = weights_of(self.network.model), epoch
        if updates and self._keeps(self.updates[-1]) and self.settings.early_stopping:
            self.best = self.good
        if self.settings.checkpoint is not None:
            self._store()

    def _train_epoch(self, epoch: int) -> float:
        """Train for one epoch; the mean of the objective over its batches."""
        self.model.train()
        objective = self.objective()  # made anew for each epoch: each fit chooses a subnetwork anew
        clipped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        total, n_examples, n_batches = 0.0, 0, 0
        place = "before the first batch"
        try:
            for n_batches, batch in enumerate(iterate(self.loader, device=self.device), start=1):
                place = f"batch {n_batches}"
                self.optimizer.zero_grad()
                loss = objective(batch)
                value = loss.item()
                if not math.isfinite(value):
                    raise NonFiniteError(f"The loss is {value}.")
                loss.backward()
                if self.settings.max_gradient_norm is not None:
                    nn.utils.clip_grad_norm_(clipped, self.settings.max_gradient_norm)
                self.optimizer.step()
                if self.settings.schedule_by == "batch":
                    self._schedule(value)
                total, n_examples = total + value, n_examples + len(batch.target)
            place = f"after batch {n_batches}"
            self.network.check_finite()
        except NonFiniteError as error:
            raise NonFiniteError(
                f"Training diverged in epoch {epoch}, {place}. {error}",
                fix="Use a smaller learning rate, or max_gradient_norm.",
            ) from error
        self.mean_batch_size = n_examples / n_batches
        if self.curvature_loader is self.loader:
            self.n_data = n_examples
        return total / n_batches

    def objective(self) -> Callable[[Batch], Tensor]:
        """The loss of a batch."""
        return TrainingObjective(self.model, self.posterior, n_data=self.n_data, mean_batch_size=self.mean_batch_size)

    def _schedule(self, loss: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _update(self, epoch: int, loss: float) -> None:
        """Fit the posterior, improve the hyperparameters, and keep them if the result is to have them."""
        posterior = self.posterior
        posterior.fit(self.curvature_loader, generator=self.generator)
        self.n_data = posterior.n_data
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
        kept = next(update for update in reversed(self.updates) if self._keeps(update))
        if self.best is not None:
            put_back(self.network.model, self.best)
        precision, noise = self.kept
        posterior = self.settings.make_posterior(self.model, noise)
        posterior.fit(self.curvature_loader, generator=self.generator)
        if self.groups is not None:
            posterior.prior_groups = self.groups
        posterior.prior_precision = precision
        return MarginalLikelihoodTraining(
            model=self.model,
            posterior=posterior,
            epoch=kept.epoch,
            evidence=kept.evidence,
            losses=tuple(self.losses),
            updates=tuple(self.updates),
            stopped_early=len(self.losses) < self.settings.epochs,
            n_data=posterior.n_data,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        posterior, tensors = self.posterior, dict[str, Tensor]()
        state = {name: getattr(self, name) for name in _STATE} | {
            "weights": self.good,
            "updates": [vars(update) for update in self.updates],
            "prior_precision": posterior.prior_precision,
            "noise_std": posterior.noise_std,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "ascent": self.ascent.state(),
            "random": self.generators.state(),
        }
        header = {
            "network": {"names_sha256": self.described["network"]},
            "settings": self.described,
            "data_sum": self.data_sum,
            "state": pack(state, tensors, "state"),
        }
        io.write(self.settings.checkpoint, header, tensors)

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint, if it is of this run."""
        if not self.settings.resume:
            what, fix = f"The path {path} is not empty.", "Pass resume=True to continue that run, or remove it."
            raise CheckpointError(what, expected="a new path, or resume=True", got="resume=False", fix=fix)
        header, tensors = io.read(path)
        if "settings" not in header:
            raise CheckpointError(f"{path} is not a checkpoint of training.", expected="such a one", got="another")
        with taking_up():
            before = {"network": header["network"]["names_sha256"], **header["settings"]}
        self.data_sum = header.get("data_sum")
        for name, value in self.described.items():
            if name in before and before[name] != value:  # an older checkpoint may lack some
                what = f"The checkpoint is of a run with another {name}."
                fix = "Pass the same arguments as before, or another path."
                raise CheckpointError(what, expected=repr(before[name]), got=repr(value), fix=fix)
        with taking_up():
            state: dict[str, Any] = unpack(header["state"], tensors)
        if state["epoch"] > self.settings.epochs:
            what = "The checkpoint is of a longer run."
            raise CheckpointError(what, expected=f"epochs >= {state['epoch']}", got=f"{self.settings.epochs}")
        # Sums of two passes differ where Python's or NumPy's generators augment the data: nothing is known then.
        known = self.data_sum is None or same_sum(self.data_sum, now := self._survey(self.curvature_loader)[2])
        if not known and same_sum(now, self._survey(self.curvature_loader)[2]):
            what = "The checkpoint is of a run on other data."
            expected, got = f"examples with the sum {self.data_sum:.6e}", f"{now:.6e}"
            raise CheckpointError(what, expected=expected, got=got, fix="Pass the loader of that run, or another path.")
        with taking_up():
            vars(self).update({name: state[name] for name in _STATE})
            self.updates = [Update(**entry) for entry in state["updates"]]
            put_back(self.network.model, self.best or state["weights"])  # fails before it is needed
            put_back(self.network.model, state["weights"])
            self.good = weights_of(self.network.model)
            self.posterior.prior_precision = state["prior_precision"]
            if state["noise_std"] is not None:
                self.posterior.noise_std = state["noise_std"]
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            self.ascent.restore(state["ascent"])
            self.generators.restore(state["random"])
