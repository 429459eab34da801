"""The metric of the loss surface ``θ ↦ (θ, L(θ))``, which it inherits from the space around it.

    M(θ) = I + g gᵀ,   g = ∇L(θ)

Bergamin, Moreno-Muñoz, Hauberg and Arvanitidis, "Riemannian Laplace approximations for Bayesian neural networks", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphMetric:
    """``M = I + g gᵀ`` at one point, or at a stack of them.

    Attributes:
        gradient: g, ``[..., P]``.

    Example:
        >>> metric = GraphMetric(torch.tensor([3.0, 0.0]))
        >>> metric.apply(torch.tensor([1.0, 1.0])), metric.inverse(torch.tensor([10.0, 1.0]))
        (tensor([10.,  1.]), tensor([1., 1.]))
    """

    gradient: Tensor

    @property
    def beta(self) -> Tensor:
        """``1/(1 + ‖g‖²)``, ``[...]``: one over the determinant."""
        return 1 / (1 + self.gradient.square().sum(-1))

    def apply(self, vectors: Tensor) -> Tensor:
        """``M v``, ``[..., P]``."""
        return vectors + self.gradient * self._slope(vectors)[..., None]

    def inverse(self, vectors: Tensor) -> Tensor:
        """``M⁻¹ v = v − g (gᵀ v)/(1 + ‖g‖²)``, ``[..., P]``."""
        return vectors - self.gradient * (self.beta * self._slope(vectors))[..., None]

    def inverse_squared_norm(self, vectors: Tensor) -> Tensor:
        """``vᵀ M⁻¹ v``, ``[...]``: what is along the gradient counts little, and is told apart before it cancels."""
        length = self.gradient.norm(dim=-1)
        unit = self.gradient / length.clamp(min=torch.finfo(length.dtype).tiny)[..., None]
        along = (unit * vectors).sum(-1)
        return (vectors - unit * along[..., None]).square().sum(-1) + self.beta * along.square()

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``uᵀ M v``, ``[...]``."""
        return (left * right).sum(-1) + self._slope(left) * self._slope(right)

    def squared_norm(self, vectors: Tensor) -> Tensor:
        """``vᵀ M v``, ``[...]``: for a curve's velocity its energy, which geodesics keep."""
        return self.inner(vectors, vectors)

    def norm(self, vectors: Tensor) -> Tensor:
        """``(vᵀ M v)^½``, ``[...]``: for a curve's velocity its speed along the surface."""
        return self.squared_norm(vectors).sqrt()

    def refracted(self, vectors: Tensor, beyond: GraphMetric) -> Tensor:
        """Velocities of geodesics beyond a crease of the surface, where this metric becomes another, ``[..., P]``.

        At a kink of L its gradient jumps from g to ``g + d``, across a hypersurface with the normal d. Inside the
        surface nothing is bent there: with the two sides laid out flat a geodesic goes straight on. So its momentum
        ``M u`` changes along d only, and the part of its energy that goes across, ``(dᵀu)²/(dᵀM⁻¹d)``, is the same on
        both sides; the limit of geodesics over ever sharper bends.
        """
        jump = beyond.gradient - self.gradient
        across, momentum = (jump * vectors).sum(-1), self.apply(vectors)
        turned, wide, narrow = beyond.inverse(jump), beyond.inverse_squared_norm(jump), self.inverse_squared_norm(jump)
        smallest = torch.finfo(jump.dtype).tiny
        push = across * (wide / narrow.clamp(min=smallest)).sqrt() - (turned * momentum).sum(-1)
        return beyond.inverse(momentum) + (push / wide.clamp(min=smallest))[..., None] * turned

    def log_determinant(self) -> Tensor:
        """``log det M = log(1 + ‖g‖²)``, ``[...]``."""
        return torch.log1p(self.gradient.square().sum(-1))

    def dense(self) -> Tensor:
        """M written out, ``[..., P, P]``."""
        g = self.gradient
        return torch.eye(g.shape[-1], dtype=g.dtype, device=g.device) + g[..., :, None] * g[..., None, :]

    def _slope(self, vectors: Tensor) -> Tensor:
        return (self.gradient * vectors).sum(-1)
