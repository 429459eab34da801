"""Curvature of the negative log-likelihood: backends that compute it, and the structures it comes in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from laplace_plus.curvature.base import Backend, Kind
from laplace_plus.curvature.native import Native
from laplace_plus.curvature.operators import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    JacobianOperator,
    RootOperator,
)
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    LowRankStructure,
    Structure,
)
from laplace_plus.errors import ConfigurationError

if TYPE_CHECKING:
    from laplace_plus.curvature.backpack import BackPack
    from laplace_plus.curvature.curvlinops import Curvlinops

__all__ = [
    "BackPack",
    "Backend",
    "Curvature",
    "Curvlinops",
    "DiagonalStructure",
    "FisherOperator",
    "FullStructure",
    "GGNOperator",
    "HessianOperator",
    "JacobianOperator",
    "Kind",
    "KroneckerStructure",
    "LowRankStructure",
    "Native",
    "RootOperator",
    "Structure",
    "resolve_backend",
]

_BACKENDS = {"native": "Native", "backpack": "BackPack", "curvlinops": "Curvlinops"}


def __getattr__(name: str) -> Any:
    # The libraries behind these take seconds to import, and few programs use them.
    if name in ("BackPack", "Curvlinops"):
        return getattr(import_module(f"{__name__}.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _backend_class(name: str) -> type[Backend]:
    if name not in _BACKENDS:
        raise ConfigurationError("Unknown backend.", expected=", ".join(_BACKENDS), got=repr(name))
    backend: type[Backend] = Native if name == "native" else __getattr__(_BACKENDS[name])
    return backend


def resolve_backend(backend: str | Backend) -> Backend:
    """The backend of that name with its defaults, or the instance itself.

    Raises:
        ConfigurationError: No such backend.
    """
    return backend if isinstance(backend, Backend) else _backend_class(backend)()


def backend_from_config(config: dict) -> Backend:
    """Rebuild a backend from :meth:`Backend.config`.

    Raises:
        ConfigurationError: No such backend.
    """
    options = {key: value for key, value in config.items() if key != "name"}
    return _backend_class(config["name"])(**options)
