"""Curvature of the negative log-likelihood: backends that compute it, and the structures it comes in."""

from __future__ import annotations

from typing import Any

from laplace_plus.curvature.base import (
    Backend,
    Kind,
    backend_class,
    backend_from_config,
    register_backend,
    resolve_backend,
)
from laplace_plus.curvature.native import Native
from laplace_plus.curvature.operators import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    JacobianOperator,
    RootOperator,
    curvature_operator,
)
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    LowRankStructure,
    Structure,
)
from laplace_plus.network.calls import Call, LinearCall
from laplace_plus.network.rules import register_rule
from laplace_plus.structured.blocks import register_block
from laplace_plus.structured.layout import Layout

__all__ = [
    "BackPack",
    "Backend",
    "Call",
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
    "Layout",
    "LinearCall",
    "LowRankStructure",
    "Native",
    "RootOperator",
    "Structure",
    "backend_from_config",
    "curvature_operator",
    "register_backend",
    "register_block",
    "register_rule",
    "resolve_backend",
]

register_backend("native", Native)


def __getattr__(name: str) -> Any:
    # laplace_plus.integrations registers these two; their libraries take seconds to import.
    if name in ("BackPack", "Curvlinops"):
        return backend_class(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
