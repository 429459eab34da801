"""A callback for Lightning that fits a posterior at the end of training; see ``docs/how-to/lightning.md``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from laplace_plus.errors import CheckpointError, NotFittedError
from laplace_plus.integrations.training import as_trained, fitted, require_one_process
from laplace_plus.network.batches import TARGET_KEYS, split
from laplace_plus.posteriors import Posterior, load_state_dict, state_dict
from laplace_plus.predictive import Prediction

__all__ = ["LaplaceCallback", "LaplacePredictor", "load_posterior"]

KEY = "laplace_plus"
"""The entry of a Lightning checkpoint that holds the posterior."""


class LaplaceCallback(Callback):
    """Fits and tunes a posterior when training ends, and keeps it in checkpoints that are saved from then on.

    The module's mode, weights and hooks, and the global random state stay as they are. The posterior is of the weights
    at the end of training, which need not be those of the best checkpoint. Training that goes on forgets the posterior.
    Class weights, label smoothing and ``pos_weight`` of a loss of ``torch.nn`` that the module holds are taken over by
    a likelihood that is given by its name; what a ``training_step`` does with functions is not seen.

    Args:
        likelihood: As for every posterior.
        posterior: The class, or its name.
        data: Batches to fit to; by default the trainer's own training loader, which must not augment at random.
        network: Name of the submodule that maps inputs to outputs; by default the module's ``forward`` does.
        **options: Arguments of the posterior, and ``generator``, the source of randomness.

    Attributes:
        posterior: The fitted posterior; None before.

    Raises:
        UnsupportedError: A trainer of several processes.
        AttributeError: The module has no such submodule.
    """

    def __init__(
        self,
        likelihood: Any,
        posterior: str | type[Posterior] = "KFAC",
        *,
        data: Iterable[Any] | None = None,
        network: str = "",
        **options: Any,
    ):
        self.posterior: Posterior | None = None
        self._arguments = posterior, likelihood, options
        self._data, self._network = data, network

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse several processes before they train."""
        require_one_process(trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the posterior of earlier weights."""
        self.posterior = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit and tune."""
        data = trainer.train_dataloader if self._data is None else self._data
        cls, likelihood, options = self._arguments
        likelihood = as_trained(likelihood, pl_module.modules())
        network = pl_module.get_submodule(self._network)
        with torch.random.fork_rng():
            self.posterior = fitted(cls, network, likelihood, data, **options)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the posterior's header and tensors."""
        if self.posterior is not None:
            checkpoint[KEY] = {"network": self._network, "state": state_dict(self.posterior)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take up the posterior of a checkpoint, unless training goes on from it."""
        if KEY in checkpoint and trainer.state.fn != "fit":
            entry = checkpoint[KEY]
            self.posterior = load_state_dict(entry["state"], pl_module.get_submodule(entry["network"]))

    def predictor(self) -> LaplacePredictor:
        """A module for ``Trainer.predict``; NotFittedError before the end of training."""
        if self.posterior is None:
            raise NotFittedError("There is no posterior yet.", fix="Train with the callback, or load a checkpoint.")
        return LaplacePredictor(self.posterior)


class TrainerPrediction(Prediction):
    """A prediction that the trainer takes as one object; it would look for tensors in any other dataclass."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The prediction, where it is."""
        return self


class LaplacePredictor(LightningModule):
    """A module whose ``predict_step`` gives a :class:`~laplace_plus.Prediction`, for batches with targets or without.

    Args:
        posterior: A fitted posterior.
        **options: Arguments of its ``predictive``.
    """

    def __init__(self, posterior: Posterior, **options: Any):
        super().__init__()
        self.posterior, self._options = posterior, options

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Prediction:
        """The prediction for a batch: of a pair the first entry, of a mapping all but the target."""
        if isinstance(batch, dict):
            inputs: Any = {key: value for key, value in batch.items() if key not in TARGET_KEYS}
        else:
            inputs = split(batch).inputs if isinstance(batch, (tuple, list)) and len(batch) > 1 else batch
        found = self.posterior.predictive(inputs, **self._options)
        return TrainerPrediction(**{item.name: getattr(found, item.name) for item in fields(found)})


def load_posterior(path: str | Path, module: LightningModule) -> Any:
    """The posterior of a checkpoint, on a module with that checkpoint's weights; nothing is unpickled.

    Raises:
        CheckpointError: There is none in it, or the module has other weights.
        UnpicklingError: It holds objects that only unpickling would restore, such as hyperparameters of classes of your
            own: save the posterior itself.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if KEY not in checkpoint:
        fix = "Save the checkpoint after training: trainer.save_checkpoint(path)."
        raise CheckpointError("The checkpoint has no posterior.", expected=f"an entry {KEY!r}", fix=fix)
    return load_state_dict(checkpoint[KEY]["state"], module.get_submodule(checkpoint[KEY]["network"]))
