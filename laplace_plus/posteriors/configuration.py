"""Options of constructors that name one of several classes."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, TypeVar

from laplace_plus.errors import ConfigurationError, unknown_option

Option = TypeVar("Option")


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
