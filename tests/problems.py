"""Small random problems that many tests share; float64 unless said otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers times ``scale``."""
    return scale * torch.randn(shape, generator=generator(seed), dtype=dtype)


def basis(n: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix ``[n, n]``."""
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues; its eigenvectors are the columns of ``basis(n, seed)``."""
    vectors = basis(len(eigenvalues), seed)
    matrix = (vectors * eigenvalues) @ vectors.mT
    return (matrix + matrix.mT) / 2


def with_singular_values(m: int, n: int, values: Tensor, seed: int = 0) -> Tensor:
    """A random matrix ``[m, n]`` with these singular values, at most ``min(m, n)``."""
    left, _, right = torch.linalg.svd(normal(m, n, seed=seed), full_matrices=False)
    rank = len(values)
    return (left[:, :rank] * values) @ right[:rank]
