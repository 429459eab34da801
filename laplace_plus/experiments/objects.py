"""What a configuration names: posteriors with their options, and functions in modules of the user's own."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from laplace_plus.errors import ConfigurationError
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.registry import get_posterior, register


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
    """Turn the `posteriors` of a configuration into settings, with the classes looked up and their options checked.

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
    folders = [folder_of("MAP"), *(folder_of(one.label) for one in settings)]
    for one in settings:
        if folders.count(folder_of(one.label)) > 1:
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
    if ":" in name:
        register(name, posterior_class)  # without a name it could not be saved
    label = str(entry.pop("label", name.rpartition(":")[2]))
    tune, predict = entry.pop("tune", {}), entry.pop("predict", {})
    tune = {} if tune is True or tune is None else tune
    for key, value in (("tune", tune or {}), ("predict", predict)):
        if not isinstance(value, Mapping):
            what = f"{key} of {label} is not a mapping."
            raise ConfigurationError(what, expected="`key: value` pairs", got=str(value))
    call(partial(inspect.signature(posterior_class).bind, None, None), entry, what=name)
    return PosteriorSettings(label, posterior_class, entry, None if tune is False else dict(tune), dict(predict))


def call(function: Callable[..., Any], keywords: Mapping[str, Any], *, what: str) -> Any:
    """Call a function, or bind its signature, with keywords of the configuration.

    Raises:
        ConfigurationError: It, or a function that gets the keywords from it, does not take one of them.
    """
    try:
        return function(**keywords)
    except TypeError as error:
        refused = re.search(r"(?:unexpected keyword argument|multiple values for argument) '(\w+)'", str(error))
        if refused is None or refused[1] not in keywords:
            raise
        raise ConfigurationError(f"{what} has no option {refused[1]!r}.") from error


def load_object(name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        ConfigurationError: The name is not of that form, the module is not found, or it has no such attribute.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigurationError("A name is incomplete.", expected="module:name", got=name)
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists and misses one of its own imports: its author needs the traceback
        fix = "Put it beside the configuration file or in the current directory, or install it."
        raise ConfigurationError(f"There is no module {module!r}.", got=name, fix=fix) from error
    except AttributeError as error:
        raise ConfigurationError(f"The module {module!r} has no {attribute!r}.", got=name) from error


def make(name: str, keywords: Mapping[str, Any]) -> Any:
    """Call the function that `module:function` names.

    Raises:
        ConfigurationError: There is no such function, or it does not take one of the keywords.
    """
    function = load_object(name)
    if not callable(function):
        raise ConfigurationError(f"{name} cannot be called.", expected="a function", got=type(function).__name__)
    return call(function, keywords, what=name)


@contextmanager
def user_modules(*folders: Path, path: list[str]) -> Iterator[None]:
    """Let modules in the folders be imported, ahead of installed ones; ``path`` is the search path (`sys.path`)."""
    before = [*path]
    path[:0] = [str(folder.resolve()) for folder in folders]
    try:
        yield
    finally:
        path[:] = before
