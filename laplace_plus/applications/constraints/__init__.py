"""Networks under equality constraints ``c(θ) = 0``: training with any optimiser, and projection after it."""

from laplace_plus.applications.constraints.constraints import (
    Constraint,
    Correction,
    FunctionalModel,
    Sparse,
    asymmetry,
    conservative,
    equivariant,
    periodic,
    value,
)
from laplace_plus.applications.constraints.optimizer import NullSpaceOptimizer, Projection, project

__all__ = ["Constraint", "Correction", "FunctionalModel", "NullSpaceOptimizer", "Projection", "Sparse", "asymmetry"]
__all__ += ["conservative", "equivariant", "periodic", "project", "value"]
