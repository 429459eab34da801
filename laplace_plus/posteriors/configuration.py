"""Options of constructors that name one of several classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from inspect import Parameter, signature
from typing import Any, TypeVar

from laplace_plus.errors import ConfigurationError, unknown_option
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.public import Summary, full_precision
from laplace_plus.posteriors.public import positive as check_positive

__all__ = ["Summary", "check_positive", "common_arguments", "full_precision", "option_config", "resolve_option"]

Option = TypeVar("Option")


def common_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the ``locals()`` of a posterior's constructor, the keyword arguments that every posterior takes."""
    names = [
        name for name, own in signature(Posterior.__init__).parameters.items() if own.kind is Parameter.KEYWORD_ONLY
    ]
    return {name: arguments[name] for name in names}


def resolve_option(what: str, value: Any, known: Mapping[str, type[Option]]) -> Option:
    """One of the known classes: from its name, from a mapping with ``"name"`` and its options, or as it is.

    ConfigurationError for another name, or options that the class does not have.
    """
    for cls in known.values():
        if isinstance(value, cls):
            return value
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        classes = ", ".join(cls.__name__ for cls in known.values() if cls is not type(None))
        raise ConfigurationError(f"Unknown {what}.", expected=f"{', '.join(known)}, or {classes}", got=repr(value))
    own = {} if known[name] is type(None) else signature(known[name]).parameters
    for option in options.keys() - own.keys():
        raise unknown_option(f"The {what} {name!r}", str(option), own)
    return known[name](**options)


def option_config(value: Any, known: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The mapping from which :func:`resolve_option` restores a dataclass, in JSON's terms."""
    name = next(name for name, cls in known.items() if isinstance(value, cls))
    return {"name": name, **asdict(value)}
