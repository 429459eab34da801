"""Classes by name: posteriors, our own, registered ones and those of other packages; and options of constructors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, TypeVar

from laplace_plus.errors import ConfigurationError, unknown_option

ENTRY_POINTS = "laplace_plus.posteriors"
METHODS = ("fit", "predictive", "sample")
"""What tells a posterior class from others: ``Posterior`` itself is defined above this module."""

Option = TypeVar("Option")
_registered: dict[str, type[Any]] = {}


def register(name: str, cls: type[Any]) -> None:
    """Make a posterior class known by name, to :func:`laplace_plus.load` and to configurations.

    Packages may instead declare an entry point of the group ``laplace_plus.posteriors``.

    Args:
        name: The name; by convention the class's own.
        cls: A subclass of :class:`laplace_plus.Posterior`.

    Raises:
        ConfigurationError: The name is no string or belongs to another class already, or ``cls`` is not a posterior
            class.
    """
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in METHODS):
        what = f"What is registered as {name!r} is not a posterior class."
        fix = "Derive the class from laplace_plus.Posterior, and register the class itself, not an instance."
        raise ConfigurationError(what, expected=f"a class with {', '.join(METHODS)}", got=repr(cls), fix=fix)
    if not isinstance(name, str) or not name or _registered.setdefault(name, cls) is not cls:
        raise ConfigurationError(f"The name {name!r} is taken, or is none.", expected="a new name, a non-empty str")


def get_posterior(name: str) -> type[Any]:
    """The class of that name; :class:`ConfigurationError` if no class has it."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)} if name not in _registered else {}
    if name in points:
        register(name, points[name].load())
    if name not in _registered:
        what = f"No posterior is called {name!r}."
        fix = "Register it with laplace_plus.register(name, cls), or install the package that brings it."
        raise ConfigurationError(what, expected=", ".join(sorted({*_registered, *points})), got=repr(name), fix=fix)
    return _registered[name]


def name_of(cls: type[Any]) -> str:
    """The name under which a class is registered; :class:`ConfigurationError` if it is not."""
    names = [name for name, known in _registered.items() if known is cls]
    names = names or [point.name for point in entry_points(group=ENTRY_POINTS) if point.load() is cls]
    if not names:
        what = f"{cls.__qualname__} is not registered."
        raise ConfigurationError(what, fix=f"Call laplace_plus.register({cls.__name__!r}, {cls.__name__}) first.")
    return names[0]


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
