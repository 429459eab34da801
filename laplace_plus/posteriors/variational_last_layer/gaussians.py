"""Independent Gaussians over the weights of each output, and a search among them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.persistence import stored

_HISTORY, _TOLERANCE = 10, 1e-2
"""Steps that L-BFGS remembers, each of twice the memory of what it searches; largest derivative where it converged."""


@stored
@dataclass(frozen=True)
class Gaussians:
    """``N(m_k, S_k)`` over the D weights of each of C outputs, float64: ``m [C, D]`` and ``R [C, D, D]``, ``S = R Rᵀ``.

    Where a determinant is asked for, R is upper triangular. Of diagonal ones it is the standard deviations ``[C, D]``.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def laplace(cls, mean: Tensor, curvature: Tensor, alpha: Tensor) -> Gaussians:
        """With precisions ``curvature + α I``, ``[C, D, D]`` or their diagonals ``[C, D]``."""
        if curvature.shape == mean.shape:
            return cls(mean, (curvature + alpha).rsqrt())
        identity = torch.eye(mean.shape[1]).to(curvature)
        factor = torch.linalg.cholesky(curvature + alpha * identity)
        return cls(mean, torch.linalg.solve_triangular(factor.mT, identity, upper=True))

    def moved(self, shift: Tensor, scale: Tensor, mix: Tensor) -> Gaussians:
        """Others, by coordinates ``[C, D]``, ``[C, D]`` and as the root, in units of these: zero changes nothing."""
        if self.root.shape == self.mean.shape:
            return Gaussians(self.mean + self.root * shift, self.root * scale.exp())
        triangle = mix.triu(1) + torch.diag_embed(scale.exp())
        return Gaussians(self.mean + (self.root @ shift.unsqueeze(-1)).squeeze(-1), self.root @ triangle)

    def log_determinant(self) -> Tensor:
        """``Σ_k log det S_k``, 0-d."""
        diagonal = self.root if self.root.shape == self.mean.shape else self.root.diagonal(dim1=-2, dim2=-1)
        return 2 * diagonal.abs().log().sum()

    def pushed(self, features: Tensor) -> Tensor:
        """``Rᵀφ``, ``[C, N, D]``, for features ``[N, D]``: ``Cov(w_kᵀφ_n, w_kᵀφ_m)`` are their products."""
        return features * self.root.unsqueeze(1) if self.root.shape == self.mean.shape else features @ self.root

    def scatter(self, mean: Tensor) -> Tensor:
        """``Σ_k ‖m_k − μ_k‖² + tr S_k``, 0-d."""
        return (self.mean - mean).square().sum() + self.root.square().sum()

    def deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draws of ``w − m``, ``[n, C, D]``."""
        noise = standard_normal((n, *self.mean.shape), like=self.mean, generator=generator)
        return self.root * noise if self.root.ndim == self.mean.ndim else torch.einsum("cde,nce->ncd", self.root, noise)


def climb(
    value: Callable[[list[Tensor], bool], float], start: list[Tensor], iterations: int, progress: bool
) -> tuple[list[Tensor], bool]:
    """Maximise a function, which leaves its negative gradient with the coordinates if asked to: where L-BFGS ends."""
    leaves = [torch.zeros(one.shape).to(one).copy_(one).requires_grad_() for one in start]
    options: dict[str, Any] = {"max_iter": iterations, "tolerance_grad": 1e-5, "tolerance_change": 1e-11}
    search = torch.optim.LBFGS(leaves, history_size=_HISTORY, line_search_fn="strong_wolfe", **options)
    ticks = iter(progress_bar(itertools.count(1), enabled=progress, description="VariationalLastLayer: bound"))

    def closure() -> float:
        next(ticks)
        search.zero_grad()
        return -value(leaves, True)

    with torch.enable_grad():
        search.step(closure)
        closure()
    if not (converged := all(float(leaf.grad.abs().max()) <= _TOLERANCE for leaf in leaves if leaf.grad is not None)):
        warnings.warn("The search ended before the slope vanished; raise max_iterations.", ConvergenceWarning, 9)
    return [leaf.detach() for leaf in leaves], converged
