"""A positive definite matrix that is diagonal in a known basis, ready to be inverted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.linalg.bases import Basis
from laplace_plus.linalg.stacks import Stack


def not_positive_definite(smallest: float) -> NotPositiveDefiniteError:
    """The error for a posterior precision with an eigenvalue that is not positive."""
    return NotPositiveDefiniteError(
        "The posterior precision is not positive definite.",
        expected="curvature/temperature + prior precision with positive eigenvalues",
        got=f"an eigenvalue of {smallest:.3g}",
        fix="Raise the prior precision, or use the GGN instead of an indefinite Hessian.",
    )


@dataclass(frozen=True)
class Factor:
    """The matrix ``M = R⁻ᵀ diag(values) R⁻¹``, whose inverse is ``R diag(1/values) Rᵀ``.

    Attributes:
        basis: R.
        values: Positive ``[G, o, i]``.
        log_scale: ``−2 log |det R|``, zero for orthogonal bases.

    Raises:
        NotPositiveDefiniteError: A value is zero, negative or NaN.
    """

    basis: Basis
    values: Tensor
    log_scale: Tensor | float = field(default=0.0)

    def __post_init__(self) -> None:
        smallest = self.values.detach().min()
        if not smallest > 0:
            raise not_positive_definite(smallest.item())

    def log_determinant(self) -> Tensor:
        """``log det M``, 0-d float64."""
        return self.values.double().log().sum() + self.log_scale

    def quadratic(self, stack: Stack, mode: str) -> Tensor:
        """``P M⁻¹ P'`` for the matrices of a stack; ``mode`` as in :meth:`Stack.quadratic`."""
        return self.basis.rotate(stack).quadratic(self.values.reciprocal().to(stack.dtype), mode)

    def sample(self, noise: Tensor) -> Tensor:
        """Draws from N(0, M⁻¹) for standard normal ``noise [n, G, o, i]``."""
        return self.basis.expand(noise * self.values.rsqrt())

    def variances(self) -> Tensor:
        """The diagonal of ``M⁻¹``, ``[G, o, i]``."""
        return self.basis.spread(self.values.reciprocal())

    def covariance(self) -> Tensor:
        """``M⁻¹`` written out, ``[G, n, n]`` with n = o·i; only for small n."""
        groups, rows, columns = self.values.shape
        n = rows * columns
        identity = torch.eye(n, dtype=self.values.dtype, device=self.values.device).view(n, 1, rows, columns)
        columns_of = self.basis.expand(identity.expand(n, groups, rows, columns) * self.values.rsqrt()).flatten(2)
        return torch.einsum("kgi,kgj->gij", columns_of, columns_of)
