"""Stochastic Lanczos quadrature of a matrix, kept: the trace of any function of it without another product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.linalg.results import standard_error


@dataclass(frozen=True)
class SampledSpectrum:
    """Gauss quadratures of a symmetric positive semi-definite H, one for each of m random vectors.

    ``tr f(H) ≈ 1/m Σ_jk weight_jk f(node_jk)`` for any f with f(0) = 0 (stochastic Lanczos quadrature; S. Ubaru,
    J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017).

    Attributes:
        nodes: ``[2, m, K]`` float64: after K Lanczos steps, and after three quarters of them, padded with zeros.
        weights: ``[2, m, K]`` float64.
    """

    nodes: Tensor
    weights: Tensor

    @classmethod
    def unknown(cls, device: torch.device | None = None) -> SampledSpectrum:
        """Quadratures without any random vector."""
        none = torch.zeros(2, 0, 0, dtype=torch.float64, device=device)
        return cls(none, none)

    @classmethod
    def of(cls, tridiagonal: Tensor, scale: Tensor, *, floor: float = 0.0) -> SampledSpectrum:
        """From Lanczos decompositions for random vectors with ``E[v vᵀ] = I``.

        Args:
            tridiagonal: The matrices T of the decompositions, ``[m, K, K]``.
            scale: The reciprocals of the vectors' norms, ``[m]``.
            floor: Nodes up to this value are rounding errors and count as zero.
        """
        matrix = tridiagonal.double()
        depth = matrix.shape[-1]
        norms = scale.double().square().reciprocal()
        nodes, weights = [], []
        for steps in (depth, depth - max(1, depth // 4)):
            values, vectors = torch.linalg.eigh(matrix[:, :steps, :steps])
            first = vectors[:, 0] if steps else values
            nodes.append(_padded(torch.where(values > floor, values, 0.0), depth))
            weights.append(_padded(first.square() * norms[:, None], depth))
        return cls(torch.stack(nodes), torch.stack(weights))

    def __len__(self) -> int:
        """Number of random vectors."""
        return self.nodes.shape[1]

    @property
    def depth(self) -> int:
        """K."""
        return self.nodes.shape[2]

    def trace(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``tr f(H)``, differentiable in what f depends on; m must be positive.

        Returns:
            0-d float64 each: the estimate, its standard error over the vectors (infinite for a single one), and the
            change by the last quarter of the Lanczos steps.
        """
        full, earlier = (self.weights * f(self.nodes)).sum(-1)
        return full.mean(), standard_error(full), (full - earlier).detach().mean().abs()

    def plus(self, other: SampledSpectrum) -> SampledSpectrum:
        """The quadratures of a sum of traces. Where one has fewer vectors, each of them has a larger weight."""
        parts = [part for part in (self, other) if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else self
        rows = max(len(part) for part in parts)
        nodes, weights = [], []
        for part in parts:
            missing = (0, 0, 0, rows - len(part))
            nodes.append(torch.nn.functional.pad(part.nodes, missing))
            weights.append(torch.nn.functional.pad(part.weights * (rows / len(part)), missing))
        return SampledSpectrum(torch.cat(nodes, -1), torch.cat(weights, -1))


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]))
