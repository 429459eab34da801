"""What a configuration file may say, as typed dataclasses; the command line turns a YAML file into them."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from laplace_plus.errors import ConfigurationError
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.registry import get_posterior, name_of, register

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class TrainingSettings:
    """How the demonstration's network is trained: minibatches, Adam, cross-entropy.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Examples in a minibatch.
        learning_rate: Adam's step size.
        weight_decay: Adam's L2 penalty, on the mean loss.
    """

    epochs: int = 50
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        """Refuses what no training can use."""
        require_positive("training.epochs", self.epochs)
        require_positive("training.batch_size", self.batch_size)
        require_positive("training.learning_rate", self.learning_rate)
        if self.weight_decay < 0:
            raise ConfigurationError(
                "training.weight_decay is negative.", expected="a number >= 0", got=str(self.weight_decay)
            )


@dataclass(frozen=True)
class DataSettings:
    """How the digits are divided.

    Attributes:
        held_out_classes: Digits that the network never sees; their images are the out-of-distribution data.
        train_fraction: Share of the other images that is trained on; the rest is the test data.
        noise_std: Standard deviation of the noise on every pixel of every image, whose grey values lie in [0, 1]. Clean
            digits are so easy that there is next to nothing to be uncertain about.
    """

    held_out_classes: list[int] = field(default_factory=lambda: [8, 9])
    train_fraction: float = 0.5
    noise_std: float = 0.5

    def __post_init__(self) -> None:
        """Refuses a division that leaves nothing to learn, to test or to hold out."""
        classes = set(self.held_out_classes)
        if not classes <= set(range(10)) or not 1 <= len(classes) <= 8 or len(classes) < len(self.held_out_classes):
            raise ConfigurationError(
                "data.held_out_classes does not name digits to hold out.",
                expected="between one and eight different digits 0 … 9",
                got=str(self.held_out_classes),
            )
        if not 0 < self.train_fraction < 1:
            raise ConfigurationError(
                "data.train_fraction is not a share.", expected="a number between 0 and 1", got=str(self.train_fraction)
            )
        if not 0 <= self.noise_std < math.inf:
            raise ConfigurationError(
                "data.noise_std is no standard deviation.", expected="a number >= 0", got=str(self.noise_std)
            )


@dataclass(frozen=True)
class RunSettings:
    """The digits demonstration: train, wrap, tune, evaluate and report.

    Attributes:
        output: Folder for metrics.json, reliability.png, the first seed's network and its posteriors.
        seeds: How many seeds 0, 1, … to repeat everything with.
        data: How the digits are divided.
        training: How the network is trained.
        posteriors: The posteriors to compare with the trained network itself, each a mapping with `class` and any of
            `label`, `tune`, `predict`; whatever else it holds goes to the constructor.
        device: Where to compute, e.g. cpu or cuda.
    """

    output: str = "runs/digits"
    seeds: int = 5
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    posteriors: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"class": "KFAC", "label": "KFAC", "predict": {"link": "mc", "n_samples": 500}},
            {
                "class": "Full",
                "label": "last layer",
                "parameters": "last_layer",
                "predict": {"link": "mc", "n_samples": 500},
            },
        ]
    )
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuses what cannot be run."""
        require_positive("seeds", self.seeds)
        require_device(self.device)


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

    def __post_init__(self) -> None:
        """Refuses what cannot be run."""
        require_device(self.device)


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

    @property
    def folder(self) -> str:
        """The folder that the posterior is saved in: its label in lower case with hyphens."""
        return "posterior-" + re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


def read_posteriors(entries: list[dict[str, Any]]) -> list[PosteriorSettings]:
    """Turns the `posteriors` of a configuration into settings, with the classes looked up and their options checked.

    Args:
        entries: Mappings with `class` (a registered name, or `module:class`) and any of `label`, `tune` (a mapping for
            `fit_prior_precision`, or false) and `predict` (a mapping for `predictive`). Other keys go to the
            constructor.

    Raises:
        ConfigurationError: No entry, an unknown class, an option that the class does not have, or two like labels.
    """
    if not entries:
        raise ConfigurationError("posteriors is empty.", expected="at least one", fix="Add `- class: KFAC`.")
    settings = [_read_posterior(dict(entry)) for entry in entries]
    folders = [one.folder for one in settings]
    for one in settings:
        if folders.count(one.folder) > 1 or one.label == "MAP":
            raise ConfigurationError(
                f"The label {one.label!r} is taken.",
                expected="a different label for each posterior, and none of them MAP",
                fix="Give each entry of posteriors a `label`.",
            )
    return settings


def _read_posterior(entry: dict[str, Any]) -> PosteriorSettings:
    name = entry.pop("class", None)
    if not isinstance(name, str):
        raise ConfigurationError("A posterior has no class.", expected="`class: KFAC`, or the like", got=str(entry))
    posterior_class = load_object(name) if ":" in name else get_posterior(name)
    if not (inspect.isclass(posterior_class) and issubclass(posterior_class, Posterior)):
        raise ConfigurationError(f"{name} is no posterior.", expected="a subclass of laplace_plus.Posterior")
    if ":" in name and not _is_registered(posterior_class):
        register(name, posterior_class)  # without a name it could not be saved
    label = str(entry.pop("label", name.rpartition(":")[2]))
    tune = entry.pop("tune", {})
    predict = entry.pop("predict", {})
    if tune is True or tune is None:
        tune = {}
    for key, value in (("tune", tune), ("predict", predict)):
        if not isinstance(value, Mapping) and not (key == "tune" and value is False):
            raise ConfigurationError(
                f"{key} of {label} is not a mapping.", expected="`key: value` pairs", got=str(value)
            )
    for keyword in ("model", "likelihood"):
        if keyword in entry:
            raise ConfigurationError(f"{label} has its own {keyword}.", fix=f"All posteriors wrap the same {keyword}.")
    require_keywords(posterior_class, entry, what=name)
    return PosteriorSettings(label, posterior_class, entry, None if tune is False else dict(tune), dict(predict))


def _is_registered(posterior_class: type[Posterior]) -> bool:
    try:
        name_of(posterior_class)
    except ConfigurationError:
        return False
    return True


def require_positive(name: str, value: float) -> None:
    """Raises `ConfigurationError` unless the value is greater than zero."""
    if not value > 0:
        raise ConfigurationError(f"{name} is not positive.", expected="a number > 0", got=str(value))


def require_device(name: str) -> None:
    """Raises `ConfigurationError` unless this machine has the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        raise ConfigurationError(
            "The device cannot be used.", expected="cpu, or an accelerator of this machine", got=name
        ) from error


def require_keywords(function: Callable[..., Any], keywords: Mapping[str, Any], *, what: str) -> None:
    """Raises `ConfigurationError` if the function does not take one of the keywords.

    A constructor that takes any keywords is taken to hand them on to the next class, a function to know what it does.
    """
    known: list[str] = []
    for owner in inspect.getmro(function) if inspect.isclass(function) else (function,):
        if owner is function or "__init__" in vars(owner):
            parameters = inspect.signature(owner).parameters.values()
            known += [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
    else:
        return
    for keyword in keywords:
        if keyword not in known:
            raise _unknown_keyword(keyword, known, what)


def call(function: Callable[..., Any], keywords: Mapping[str, Any], *, what: str) -> Any:
    """Calls the function with keywords that a user has written.

    Raises:
        ConfigurationError: It, or a function that it hands the keyword on to, does not take one of them.
    """
    require_keywords(function, keywords, what=what)
    try:
        return function(**keywords)
    except TypeError as error:
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused is None or refused[1] not in keywords:
            raise
        raise _unknown_keyword(refused[1], [], what) from error


def _unknown_keyword(keyword: str, known: list[str], what: str) -> ConfigurationError:
    expected = "one of " + ", ".join(dict.fromkeys(known)) if known else None
    return ConfigurationError(f"{what} has no option {keyword!r}.", expected=expected)


def load_object(name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        ConfigurationError: The name is not of that form, the module is not found, or it has no such attribute.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError("A name is incomplete.", expected="module:name", got=name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, and misses one of its own imports: its author needs the traceback
        raise ConfigurationError(
            f"There is no module {module_name!r}.",
            got=name,
            fix="Put it beside the configuration file or in the current directory, or install it.",
        ) from error
    if not hasattr(module, attribute):
        raise ConfigurationError(f"The module {module_name!r} has no {attribute!r}.", got=name)
    return getattr(module, attribute)


def make(name: str, keywords: Mapping[str, Any]) -> Any:
    """Calls the function that `module:function` names.

    Raises:
        ConfigurationError: There is no such function, or it does not take one of the keywords.
    """
    function = load_object(name)
    if not callable(function):
        raise ConfigurationError(f"{name} cannot be called.", expected="a function", got=type(function).__name__)
    return call(function, keywords, what=name)


@contextmanager
def user_modules(*folders: Path, path: list[str]) -> Iterator[None]:
    """Lets modules in the folders be imported, ahead of the installed ones, until the context ends.

    Args:
        *folders: Where to look, first to last.
        path: The interpreter's search path (`sys.path`).
    """
    added = [str(folder.resolve()) for folder in folders]
    path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            path.remove(folder)


def as_json(settings: RunSettings | WrapSettings) -> dict[str, Any]:
    """The settings as plain values, for metrics.json."""
    return asdict(settings)
