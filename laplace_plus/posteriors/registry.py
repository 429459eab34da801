"""Names of posterior classes: our own, registered ones and those that other packages bring as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from laplace_plus.errors import ConfigurationError

ENTRY_POINTS = "laplace_plus.posteriors"
METHODS = ("fit", "predictive", "sample")
"""What tells a posterior class from others: ``Posterior`` itself is defined above this module."""


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
    if not isinstance(name, str) or not name:
        raise ConfigurationError("A posterior's name is a string.", expected="a non-empty str", got=repr(name))
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in METHODS):
        what = f"What is registered as {name!r} is not a posterior class."
        got = f"the class {cls.__qualname__}" if isinstance(cls, type) else f"a {type(cls).__name__}, {cls!r}"
        fix = "Derive the class from laplace_plus.Posterior, and register the class itself, not an instance."
        raise ConfigurationError(what, expected=f"a class with {', '.join(METHODS)}", got=got, fix=fix)
    if _registered.get(name, cls) is not cls:
        raise ConfigurationError(
            f"The name {name!r} is taken.", expected="a new name", got=f"that of {_registered[name].__qualname__}"
        )
    _registered[name] = cls


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
