"""The configuration files of the commands, as typed dataclasses; jsonargparse reads YAML files into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt

from laplace_plus.errors import ConfigurationError

_PREDICT = {"link": "mc", "n_samples": 500}


@dataclass(frozen=True)
class TrainingSettings:
    """How the demonstration's network is trained: minibatches, Adam, cross-entropy.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Examples in a minibatch.
        learning_rate: Adam's step size.
        weight_decay: Adam's L2 penalty, on the mean loss.
    """

    epochs: PositiveInt = 50
    batch_size: PositiveInt = 64
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 1e-4


@dataclass(frozen=True)
class DataSettings:
    """How the digits are split.

    Attributes:
        held_out_classes: Digits that the network never sees; their images are the out-of-distribution data.
        train_fraction: Fraction of the other images for training; the rest is the test data.
        noise_std: Standard deviation of the noise on every pixel of every image, whose grey values lie in [0, 1]. Clean
            digits are so easy that predictions are hardly uncertain.
    """

    held_out_classes: list[int] = field(default_factory=lambda: [8, 9])
    train_fraction: OpenUnitInterval = 0.5
    noise_std: NonNegativeFloat = 0.5

    def __post_init__(self) -> None:
        """Refuse classes that leave nothing to learn or to hold out."""
        classes = set(self.held_out_classes)
        if not classes <= set(range(10)) or not 1 <= len(classes) <= 8 or len(classes) < len(self.held_out_classes):
            raise ConfigurationError(
                "data.held_out_classes does not name digits to hold out.",
                expected="between one and eight different digits 0 … 9",
                got=str(self.held_out_classes),
            )


@dataclass(frozen=True)
class RunSettings:
    """The digits demonstration: train, wrap, tune, evaluate and report.

    Attributes:
        output: Folder for metrics.json, reliability.png, the first seed's network and its posteriors.
        seeds: Number of repetitions, with the seeds 0, 1, ….
        data: How the digits are split.
        training: How the network is trained.
        posteriors: The posteriors to compare with the trained network itself, each a mapping with `class` and any of
            `label`, `tune`, `predict`; whatever else it holds goes to the constructor.
        device: Where to compute, e.g. cpu or cuda.
    """

    output: str = "runs/digits"
    seeds: PositiveInt = 5
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    posteriors: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"class": "KFAC", "label": "KFAC", "predict": dict(_PREDICT)},
            {"class": "Full", "label": "last layer", "parameters": "last_layer", "predict": dict(_PREDICT)},
        ]
    )
    device: str = "cpu"


@dataclass(frozen=True)
class WrapSettings:
    """A trained network of one's own: wrap, tune, evaluate and report.

    Each `…:…` is a module and a function in it. Modules are looked for beside the configuration file and in the current
    directory as well as among the installed ones.

    Attributes:
        model: `module:function` that returns the network, trained unless a checkpoint is given.
        train_data: `module:function` that returns an iterable of batches: what the network was trained on.
        test_data: `module:function` that returns the batches to evaluate on.
        posteriors: The posteriors to compare with the network itself, each a mapping with `class` and any of `label`,
            `tune`, `predict`; whatever else it holds goes to the constructor.
        likelihood: classification, binary or regression; or `module:function` that returns a likelihood.
        checkpoint: Weights to load into the network: a safetensors file, or a state dict saved by torch.
        validation_data: `module:function` that returns batches to tune on; only `tune: {method: validation}` uses it.
        ood_data: `module:function` that returns out-of-distribution batches, of the same form as the test data.
        model_kwargs: Keyword arguments of the model's function.
        train_data_kwargs: Keyword arguments of the training data's function.
        test_data_kwargs: Keyword arguments of the test data's function.
        validation_data_kwargs: Keyword arguments of the validation data's function.
        ood_data_kwargs: Keyword arguments of the out-of-distribution data's function.
        output: Folder for metrics.json, reliability.png (classification) and the posteriors.
        seed: Seeds the functions above and the sampling of predictions.
        device: Where to compute, e.g. cpu or cuda.
    """

    model: str
    train_data: str
    test_data: str
    posteriors: list[dict[str, Any]]
    likelihood: str = "classification"
    checkpoint: str | None = None
    validation_data: str | None = None
    ood_data: str | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    train_data_kwargs: dict[str, Any] = field(default_factory=dict)
    test_data_kwargs: dict[str, Any] = field(default_factory=dict)
    validation_data_kwargs: dict[str, Any] = field(default_factory=dict)
    ood_data_kwargs: dict[str, Any] = field(default_factory=dict)
    output: str = "runs/wrap"
    seed: int = 0
    device: str = "cpu"


def require_device(name: str) -> None:
    """Raise `ConfigurationError` unless this machine has the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        raise ConfigurationError(
            "The device cannot be used.", expected="cpu, or an accelerator of this machine", got=name
        ) from error
