"""Networks under equality constraints ``c(θ) = 0``: training with any optimiser, and projection after it."""

from laplace_plus.applications.constraints.constraints import asymmetry, conservative, equivariant, periodic, value
from laplace_plus.applications.constraints.correcting import (
    Constraint,
    Correction,
    FunctionalModel,
    null_space_gradient,
)
from laplace_plus.applications.constraints.optimizer import NullSpaceOptimizer
from laplace_plus.applications.constraints.projection import Projection, project
from laplace_plus.applications.constraints.sparsity import Sparse

__all__ = ["NullSpaceOptimizer", "project", "null_space_gradient", "Constraint", "Correction", "FunctionalModel"]
__all__ += ["Projection", "Sparse", "asymmetry", "conservative", "equivariant", "periodic", "value"]
