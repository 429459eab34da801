"""Curvature of the negative log-likelihood: backends that compute it, and the structures it comes in."""

from __future__ import annotations

from laplace_plus.curvature.base import Backend, Kind
from laplace_plus.curvature.native import Native
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Structure,
)
from laplace_plus.errors import ConfigurationError

__all__ = [
    "Backend",
    "Curvature",
    "DiagonalStructure",
    "FullStructure",
    "Kind",
    "KroneckerStructure",
    "Native",
    "Structure",
    "resolve_backend",
]

_BACKENDS: dict[str, type[Backend]] = {"native": Native}


def resolve_backend(backend: str | Backend) -> Backend:
    """The backend of that name with its defaults, or the instance itself.

    Raises:
        ConfigurationError: No such backend.
    """
    if isinstance(backend, Backend):
        return backend
    if backend not in _BACKENDS:
        raise ConfigurationError("Unknown backend.", expected=", ".join(_BACKENDS), got=repr(backend))
    return _BACKENDS[backend]()


def backend_from_config(config: dict) -> Backend:
    """Rebuild a backend from :meth:`Backend.config`."""
    options = {key: value for key, value in config.items() if key != "name"}
    return _BACKENDS[config["name"]](**options)
