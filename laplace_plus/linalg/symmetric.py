"""Eigendecompositions of dense symmetric matrices that may be rank-deficient."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.errors import NonFiniteError


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[..., n]`` and vectors ``[..., n, n]`` of symmetric matrices, computed in float64.

    Sums of outer products are often rank-deficient, with rows of exact zeros (padding, dead units). On these float32
    solvers sometimes fail to converge, and their small eigenvalues are rounding errors of the largest one. Rows and
    columns that are exactly zero are removed first, because their unit vectors are eigenvectors.

    Raises:
        NonFiniteError: The matrix has NaN or infinite entries.
    """
    require_finite(matrix)
    alive = matrix.abs().sum(-1) != 0
    alive = alive.flatten(0, -2).any(0) if matrix.ndim > 2 else alive
    if alive.all() or not alive.any():
        return kernels.symmetric_eigen(matrix)
    n, keep, dead = matrix.shape[-1], alive.nonzero().squeeze(-1), (~alive).nonzero().squeeze(-1)
    values, vectors = kernels.symmetric_eigen(matrix[..., keep[:, None], keep])
    all_values = values.new_zeros(*values.shape[:-1], n)
    all_values[..., len(dead) :] = values
    all_vectors = vectors.new_zeros(*values.shape[:-1], n, n)
    all_vectors[..., dead, torch.arange(len(dead), device=dead.device)] = 1
    all_vectors[..., keep[:, None], torch.arange(len(dead), n, device=dead.device)] = vectors
    return all_values, all_vectors


def require_finite(matrix: Tensor) -> None:
    """Raise :class:`NonFiniteError` for NaNs and infinities."""
    if not kernels.all_finite(matrix):
        raise NonFiniteError(
            "A curvature factor is not finite.",
            expected="finite activations and output gradients",
            got=f"NaN or Inf in a factor of shape {tuple(matrix.shape)}",
            fix="Look for NaNs in the data, or run the network in float32 if it overflows in half precision.",
        )
