"""One run of training by the marginal likelihood, from its first epoch to its posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, default_collate
from tqdm import tqdm

from laplace_plus import io
from laplace_plus._progress import progress_bar
from laplace_plus.batches import iterate
from laplace_plus.curvature.streaming import DataSums, same_sum
from laplace_plus.distributed import resolve_group
from laplace_plus.errors import CheckpointError, NonFiniteError, UnsupportedError
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.posteriors.prior_tuning import chosen_groups
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.priors import LAYERWISE, Groups, PriorStructure
from laplace_plus.training.hyperparameters import HyperparameterAscent
from laplace_plus.training.objective import PriorPenalty, TrainingObjective
from laplace_plus.training.result import MarginalLikelihoodTraining, Update
from laplace_plus.training.settings import Settings, require_same
from laplace_plus.training.state import (
    generators_of,
    pack,
    put_back,
    random_state,
    seeded,
    set_random_state,
    unpack,
    weights_of,
)

TOO_FAR = "Use a smaller learning rate, or max_gradient_norm; small noise and low temperatures make gradients large."


class Run:
    """The state of a run, and its steps.

    Args:
        model: The network, trained in place.
        loader: Batches to train on.
        curvature_loader: Batches for the evidence.
        settings: Everything else.
        generator: For curvatures that sample labels.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        curvature_loader: Iterable[Any],
        settings: Settings,
        generator: torch.Generator | None,
    ):
        if resolve_group(None) is not None:
            raise UnsupportedError(
                "Training by the marginal likelihood runs in one process.",
                expected="no process group, or one of a single rank",
                got="several ranks of torch.distributed",
                fix="Train on one device; posteriors can be fitted over several ranks afterwards.",
            )
        for data in (loader, curvature_loader):
            if isinstance(data, Iterator):
                require_restartable(data, "Training passes over the data many times.")
        self.model, self.loader, self.curvature_loader = model, loader, curvature_loader
        self.settings, self.generator = settings, generator
        self.posterior: GaussianPosterior = settings.make_posterior(model)
        self.network = self.posterior.network
        self.device = self.network.device
        held = [*generators_of(loader), *generators_of(curvature_loader), *([generator] if generator else [])]
        self.generators = list({id(one): one for one in held}.values())
        self.good = weights_of(self.network.model)
        self.best: dict[str, Tensor] | None = None
        self.kept: tuple[Tensor, Tensor | None] = self.posterior.prior_precision, None  # hyperparameters to end with
        self.epoch = 0
        self.losses: list[float] = []
        self.updates: list[Update] = []

    def train(self) -> MarginalLikelihoodTraining:
        """All epochs, and the posterior at the end."""
        with self._guarded(), torch.enable_grad():
            self._prepare()
            epochs = range(self.epoch + 1, self.settings.epochs + 1)
            bar = progress_bar(epochs, enabled=self.settings.progress, description="marginal likelihood")
            for epoch in bar:
                if self._out_of_patience():
                    break
                self._complete(epoch)
                if isinstance(bar, tqdm):
                    evidence = f"{self.updates[-1].evidence:.6g}" if self.updates else "-"
                    bar.set_postfix(loss=f"{self.losses[-1]:.4g}", evidence=evidence, refresh=False)
                if self.settings.callback is not None and self.updates and self.updates[-1].epoch == epoch:
                    self.settings.callback(self.updates[-1])
            if not self.updates:  # a run that was to be longer, and is ended where it stopped
                self.updates.append(self._update(self.epoch, self.losses[-1]))
                self.kept = self.posterior.prior_precision, self.posterior.noise_std
            return self._result()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Modes are put back in any case, and after a failure the weights of the last complete epoch."""
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
        stored = self._stored()
        selected = list(self.posterior.parameter_names)  # by the arguments; a fit may choose among them
        self._rehearse()
        self.optimizer = self.settings.make_optimizer(self.network)
        self.scheduler = None if self.settings.scheduler is None else self.settings.scheduler(self.optimizer)
        self.described: dict[str, Any] = {}
        if self.settings.checkpoint is not None:
            described = self.settings.described(self.posterior, self.optimizer, self.scheduler)
            self.described = described | {"parameters": selected}
        if stored is not None:
            header, state = stored
            require_same(header["settings"], self.described)
            self.data_sum: float | None = header.get("data_sum")
            self._require_same_data()
            self._restore(state)
            return
        with seeded(self.generators, self.device):
            self.data_sum = None
            if self.settings.checkpoint is None:
                self.n_data, n_batches = count(self.curvature_loader)
            else:
                self.n_data, n_batches, self.data_sum = survey(self.curvature_loader)
            n_data = self.n_data
            if self.curvature_loader is not self.loader:
                n_data, n_batches = count(self.loader)
        self.mean_batch_size = n_data / n_batches

    def _require_same_data(self) -> None:
        """Refuse to continue on other data than before, as far as that can be told.

        Raises:
            CheckpointError: They differ, and are the same in two passes with equal seeds.
        """
        before = self.data_sum
        if before is None or same_sum(before, now := self._data_sum()):
            return
        if same_sum(now, self._data_sum()):  # otherwise Python's or NumPy's generators have a part in the data
            raise CheckpointError(
                "The checkpoint is of a run on other data.",
                expected=f"examples with the sum {before:.6e}",
                got=f"{now:.6e}",
                fix="Pass the loader of that run, or another path.",
            )

    def _data_sum(self) -> float:
        with seeded(self.generators, self.device):
            return survey(self.curvature_loader)[2]

    def _rehearse(self) -> None:
        """Fit one batch: what posterior and data cannot do shows before hours of training."""
        self.network.check_finite()
        batch = next(iterate(self.curvature_loader, device=self.device))
        posterior, structure = self.posterior, self.settings.structure
        posterior.fit([(batch.inputs, batch.target)], generator=self.generator)
        self.structure: PriorStructure = LAYERWISE
        self.groups: Groups | None = None
        if structure == "scalar":
            self.structure = "scalar"
        elif structure == "diagonal":
            self.structure = "diagonal"
        else:
            self.groups = chosen_groups(posterior, structure, [(batch.inputs, batch.target)])
        if self.groups is not None:
            posterior.prior_groups = self.groups
        posterior.prior_precision = self.settings.prior_precision
        self.ascent = HyperparameterAscent(
            posterior,
            self.structure,
            self.groups,
            tune_noise=self.settings.tune_noise,
            steps=self.settings.hyper_steps,
            learning_rate=self.settings.hyper_lr,
        )

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def _complete(self, epoch: int) -> None:
        """One epoch, with whatever follows on it."""
        loss = self._train_epoch(epoch)
        if self.settings.updates_after(epoch):
            self.updates.append(self._update(epoch, loss))
        if self.scheduler is not None and self.settings.schedule_by == "epoch":
            self._schedule(loss)
        self.losses.append(loss)
        self.good, self.epoch = weights_of(self.network.model), epoch
        if self.updates and self.updates[-1].epoch == epoch and self._keeps(self.updates[-1]):
            self.best = self.good if self.settings.early_stopping else None
            self.kept = self.posterior.prior_precision, self.posterior.noise_std
        if self.settings.checkpoint is not None:
            self._store()

    def _train_epoch(self, epoch: int) -> float:
        """Train for one epoch; the mean of the objective over its batches."""
        self.model.train()
        posterior = self.posterior
        objective = TrainingObjective(
            self.model,
            posterior.likelihood,
            PriorPenalty(posterior.network, posterior.prior()),  # a subnetwork is chosen anew by each fit
            temperature=self.settings.temperature,
            n_data=self.n_data,
            mean_batch_size=self.mean_batch_size,
        )
        clipped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        total, n_examples, n_batches = 0.0, 0, 0
        for number, batch in enumerate(iterate(self.loader, device=self.device), start=1):
            self.optimizer.zero_grad()
            try:
                loss = objective(batch)
            except NonFiniteError as error:
                raise _diverged("The network's outputs are", f"epoch {epoch}, batch {number}") from error
            value = loss.item()
            if not math.isfinite(value):
                raise _diverged("The loss is", f"epoch {epoch}, batch {number}", got=str(value))
            loss.backward()
            if self.settings.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(clipped, self.settings.max_gradient_norm)
            self.optimizer.step()
            if self.scheduler is not None and self.settings.schedule_by == "batch":
                self._schedule(value)
            total, n_examples, n_batches = total + value, n_examples + len(batch.target), n_batches + 1
        try:
            self.network.check_finite()
        except NonFiniteError as error:
            raise _diverged("The weights are", f"epoch {epoch}, after batch {n_batches}") from error
        self.mean_batch_size = n_examples / n_batches
        if self.curvature_loader is self.loader:
            self.n_data = n_examples
        return total / n_batches

    def _schedule(self, loss: float) -> None:
        assert self.scheduler is not None
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def _update(self, epoch: int, loss: float) -> Update:
        """Fit the posterior, and improve the hyperparameters."""
        posterior = self.posterior
        posterior.fit(self.curvature_loader, generator=self.generator)
        self.n_data = posterior.n_data
        evidence = self.ascent.update()
        precision = posterior.prior_precision.detach()
        if self.structure == "diagonal":
            precision = _means_of_groups(posterior)
        noise = posterior.noise_std
        return Update(
            epoch=epoch,
            evidence=evidence,
            log_likelihood=posterior.laplace_model().log_likelihood(noise).item(),
            loss=loss,
            prior_precision=precision.double().cpu().clone(),
            noise_std=None if noise is None else noise.clone(),
            improved=evidence > max((update.evidence for update in self.updates), default=-math.inf),
        )

    def _keeps(self, update: Update) -> bool:
        return update.improved or not self.settings.early_stopping

    def _out_of_patience(self) -> bool:
        patience = self.settings.patience
        if patience is None or len(self.updates) < patience:
            return False
        return not any(update.improved for update in self.updates[-patience:])

    # -- the end -------------------------------------------------------------------------------------------------------

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

    # -- to be continued -----------------------------------------------------------------------------------------------

    def _store(self) -> None:
        assert self.settings.checkpoint is not None
        state = {
            "epoch": self.epoch,
            "weights": self.good,
            "best": self.best,
            "kept": self.kept,
            "prior_precision": self.posterior.prior_precision,
            "noise_std": self.posterior.noise_std,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "ascent": self.ascent.state(),
            "losses": self.losses,
            "updates": [vars(update) for update in self.updates],
            "n_data": self.n_data,
            "mean_batch_size": self.mean_batch_size,
            "random": random_state(self.generators, self.device),
        }
        tensors: dict[str, Tensor] = {}
        header = {
            "network": {"names_sha256": self._architecture()},
            "settings": self.described,
            "data_sum": self.data_sum,
            "state": pack(state, tensors, "state"),
        }
        io.write(self.settings.checkpoint, header, tensors)

    def _architecture(self) -> str:
        architecture: str = io.fingerprint(self.network.model)["names_sha256"]
        return architecture

    def _stored(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The checkpoint's header and state, if there is one to continue from."""
        path = self.settings.checkpoint
        if path is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return None
        if not self.settings.resume:
            raise CheckpointError(
                f"There is something at {path} already.",
                expected="a new path, or resume=True",
                got="resume=False",
                fix="Pass resume=True to continue that run, or remove it.",
            )
        header, tensors = io.read(path)
        if "settings" not in header:
            raise CheckpointError(
                f"{path} is not a checkpoint of training.", expected="one that training wrote", got="a posterior"
            )
        if header["network"]["names_sha256"] != self._architecture():
            raise CheckpointError(
                "The checkpoint is of another network.",
                expected="parameters and buffers of the same names, shapes and types",
                got="others",
            )
        state: dict[str, Any] = unpack(header["state"], tensors)
        if state["epoch"] > self.settings.epochs:
            raise CheckpointError(
                "The checkpoint is of a longer run.",
                expected=f"epochs >= {state['epoch']}",
                got=f"{self.settings.epochs}",
            )
        return header, state

    def _restore(self, state: dict[str, Any]) -> None:
        put_back(self.network.model, state["weights"])
        self.good, self.best = weights_of(self.network.model), state["best"]
        self.kept, self.epoch = state["kept"], state["epoch"]
        self.posterior.prior_precision = state["prior_precision"]
        if state["noise_std"] is not None:
            self.posterior.noise_std = state["noise_std"]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.ascent.restore(state["ascent"])
        self.losses, self.updates = state["losses"], [Update(**entry) for entry in state["updates"]]
        self.n_data, self.mean_batch_size = state["n_data"], state["mean_batch_size"]
        set_random_state(state["random"], self.generators, self.device)


def count(data: Iterable[Any]) -> tuple[int, int]:
    """The number of examples and of batches that a loader yields.

    A ``DataLoader`` with torch's own batches of a dataset tells without loading anything; any other is run over once.
    What it tells is corrected by what it yields, after the first epoch.
    """
    batch_sampler = getattr(data, "batch_sampler", None)
    if isinstance(data, DataLoader) and type(batch_sampler) is BatchSampler and data.collate_fn is default_collate:
        with suppress(TypeError, NotImplementedError):  # samplers, and those of iterable datasets, may have no length
            n_examples, n_batches = len(batch_sampler.sampler), len(batch_sampler)  # type: ignore[arg-type]
            if n_batches:
                return min(n_examples, n_batches * batch_sampler.batch_size), n_batches
    return survey(data)[:2]


def survey(data: Iterable[Any]) -> tuple[int, int, float]:
    """The number of examples and of batches that a loader yields, and a sum that tells them from others."""
    sums, n_batches = DataSums("cpu"), 0
    for batch in iterate(data, device="cpu"):
        sums.add(batch, len(batch.target))
        n_batches += 1
    return sums.count, n_batches, sums.values()[0]


def _means_of_groups(posterior: GaussianPosterior) -> Tensor:
    """The geometric mean of a diagonal precision over each group, ``[G]``."""
    groups = posterior.prior_groups
    logarithms = posterior.prior_precision.detach().double().cpu().log()
    sums = torch.zeros(len(groups.names), dtype=torch.float64).index_add(0, groups.index.cpu(), logarithms)
    return (sums / groups.sizes().cpu()).exp()


def _diverged(what: str, where: str, got: str = "NaN or Inf") -> NonFiniteError:
    return NonFiniteError(f"{what} not finite in {where}.", expected="finite numbers", got=got, fix=TOO_FAR)
