"""What a configuration file says: typed dataclasses, which jsonargparse fills, posteriors and the user's functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any

from jsonargparse.typing import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.storing import get_posterior, register

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
        for digit in self.held_out_classes:
            checks.choice("data.held_out_classes", digit, range(10))
        checks.number("The number of data.held_out_classes", len({*self.held_out_classes}), least=1, most=8)


@dataclass(frozen=True)
class RunSettings:
    """The digits demonstration: train, wrap, tune, evaluate and report.

    Attributes:
        output: Folder for metrics.json, report.png, the first seed's network and its posteriors.
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


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A trained network of one's own.

    Each `…:…` is a module and a function in it. Modules are looked for beside the configuration file and in the current
    directory as well as among the installed ones.

    Attributes:
        model: `module:function` that returns the network, trained unless a checkpoint is given.
        model_kwargs: Keyword arguments of the model's function.
        checkpoint: Weights to load into the network: a safetensors file, or a state dict saved by torch.
        seed: Seeds all of these functions, and sampled predictions.
        device: Where to compute, e.g. cpu or cuda.
    """

    model: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class WrapSettings(ModelSettings):
    """A trained network and data of one's own: fit, tune, evaluate and report.

    Attributes:
        function: `module:function` that returns (model, train, test) or (model, train, test, validation), or a mapping
            with these names and any of `ood` and `likelihood`; what the following functions return is taken before.
        function_kwargs: Its keyword arguments.
        train_data: `module:function` that returns an iterable of batches: what the network was trained on.
        test_data: `module:function` that returns the batches to evaluate on.
        posteriors: The posteriors to compare with the network itself, each a mapping with `class` and any of `label`,
            `tune`, `predict`; whatever else it holds goes to the constructor.
        likelihood: classification, binary or regression; or `module:function` that returns a likelihood.
        validation_data: `module:function` that returns batches to tune on, by validation and by default.
        ood_data: `module:function` that returns out-of-distribution batches, of the same form as the test data.
        train_data_kwargs: Keyword arguments of the training data's function.
        test_data_kwargs: Keyword arguments of the test data's function.
        validation_data_kwargs: Keyword arguments of the validation data's function.
        ood_data_kwargs: Keyword arguments of the out-of-distribution data's function.
        output: Folder for metrics.json, the picture, reports and the posteriors.
    """

    model: str = ""
    function: str = ""
    function_kwargs: dict[str, Any] = field(default_factory=dict)
    train_data: str | None = None
    test_data: str | None = None
    posteriors: list[dict[str, Any]] = field(default_factory=lambda: [{"class": "KFAC"}])
    likelihood: str = "classification"
    validation_data: str | None = None
    ood_data: str | None = None
    train_data_kwargs: dict[str, Any] = field(default_factory=dict)
    test_data_kwargs: dict[str, Any] = field(default_factory=dict)
    validation_data_kwargs: dict[str, Any] = field(default_factory=dict)
    ood_data_kwargs: dict[str, Any] = field(default_factory=dict)
    output: str = "runs/evaluate"


@dataclass(frozen=True, kw_only=True)
class PredictSettings(ModelSettings):
    """Predictions of a saved posterior.

    Attributes:
        posterior: The folder that `laplace-plus wrap` or `posterior.save` wrote.
        inputs: A .npz file (one array, or named ones that the network takes by keyword), a CSV file of numbers with or
            without a line of names, or a folder of images, which become floats in [0, 1], `[B, C, H, W]`.
        likelihood: `module:function` that returns the likelihood, where it is one of your own.
        transform: `module:function` that a batch of inputs goes through first, such as a normalisation.
        output: The .csv or .npz file to write.
        batch_size: Number of inputs at a time.
    """

    posterior: str
    inputs: str
    likelihood: str | None = None
    transform: str | None = None
    output: str = "predictions.csv"
    batch_size: PositiveInt = 256


@dataclass(frozen=True)
class PosteriorSettings:
    """One posterior to fit, tune and evaluate.

    Attributes:
        label: What tables, pictures and folders call it.
        posterior_class: The plugin class.
        options: Keyword arguments of its constructor, without model and likelihood.
        tune: Keyword arguments of `fit_prior_precision`, or None to leave the prior as it is.
        predict: Keyword arguments of `predictive`.
    """

    label: str
    posterior_class: type[Posterior]
    options: dict[str, Any]
    tune: dict[str, Any] | None
    predict: dict[str, Any]


def folder_of(label: str) -> str:
    """The folder that a posterior is saved in: its label in lower case with hyphens."""
    return "posterior-" + re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def read_posteriors(entries: list[dict[str, Any]]) -> list[PosteriorSettings]:
    """The `posteriors` of a configuration, with the classes looked up and their options checked.

    Entries have a `class` (a registered name, or `module:class`) and any of `label`, `tune` (a mapping for
    `fit_prior_precision`, or false) and `predict` (a mapping for `predictive`); other keys go to the constructor.
    ConfigurationError for no entry, an unknown class, an option that the class does not have, or two like labels.
    """
    checks.count("The number of posteriors", len(entries), fix="Add `- class: KFAC`.")
    settings = [_read_posterior(dict(entry)) for entry in entries]
    folders = [folder_of("MAP"), *(folder_of(one.label) for one in settings)]
    taken = [one.label for one in settings if folders.count(folder_of(one.label)) > 1]
    if taken:
        what, expected = f"The label {taken[0]!r} is taken.", "a `label` for each posterior, and none of them MAP"
        raise ConfigurationError(what, expected=expected)
    return settings


def _read_posterior(entry: dict[str, Any]) -> PosteriorSettings:
    name = entry.pop("class", None)
    if not isinstance(name, str):
        raise ConfigurationError("A posterior has no class.", expected="`class: KFAC`, or the like", got=str(entry))
    posterior_class = load_object(name) if ":" in name else get_posterior(name)
    if ":" in name:
        register(name, posterior_class)  # without a name it could not be saved
    label = str(entry.pop("label", name.rpartition(":")[2]))
    tune, predict = entry.pop("tune", {}), entry.pop("predict", {})
    tune = {} if tune is True or tune is None else tune
    check_options(name, entry, posterior_class, "model likelihood")
    check_options(f"predict of {label}", predict, posterior_class.predictive, "self x generator")
    return PosteriorSettings(label, posterior_class, entry, None if tune is False else dict(tune), dict(predict))


def check_options(what: str, keywords: Mapping[str, Any], function: Callable[..., Any], given: str = "") -> None:
    """ConfigurationError for keywords that a function does not have, or that are ``given`` by others."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in given.split()]
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        checks.options(what, keywords, known)


def load_object(name: str) -> Any:
    """What `module:attribute` names; ConfigurationError if there is none, or the name is not of that form."""
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(import_module(module))
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists and misses one of its own imports: its author needs the traceback
        fix = "Put it beside the configuration file or in the current directory, or install it."
        raise ConfigurationError(f"{name!r} is not found: {error}.", expected="module:name", fix=fix) from error


def make(name: str, keywords: Mapping[str, Any]) -> Any:
    """Call the function that `module:function` names; errors as of :func:`load_object` and :func:`check_options`."""
    function = load_object(name)
    check_options(name, keywords, function)
    return function(**keywords)
