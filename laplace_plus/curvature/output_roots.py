"""Roots ``S`` of the likelihood's curvature on one batch of outputs, as products.

They satisfy ``S Sᵀ ≈ Λ`` at the likelihood's current observation noise; ignored targets contribute nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.elementwise import like_observed


class OutputRoot:
    """A root ``S [B * C, k]`` of one batch's curvature in outputs of ``shape (B, *, C)``; this one is the identity."""

    def __init__(self, shape: torch.Size):
        self.shape, self.size = shape, shape.numel()
        self.n_apart = shape[0]  # groups of coordinates that each belong to examples of their own

    def down(self, tangents: Tensor) -> Tensor:
        """``Sᵀ u``, ``[m, B, *, C] -> [m, k]``."""
        return tangents.flatten(1)

    def up(self, coordinates: Tensor) -> Tensor:
        """``S z``, ``[m, k] -> [m, B, *, C]``."""
        return coordinates.reshape(len(coordinates), *self.shape)


class _SoftmaxRoot(OutputRoot):
    """``diag √p − p √pᵀ`` of every observation, ``p [N, C]``, as products and without cancellation near p = 1."""

    def __init__(self, p: Tensor, shape: torch.Size):
        OutputRoot.__init__(self, shape)
        self._p, self._root, self._top = p, p.sqrt(), p.argmax(-1, keepdim=True)

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._p.shape)
        u = u - u.gather(-1, self._top.expand(len(u), -1, -1))  # Sᵀ is zero on vectors that are constant over classes
        centred = u - (self._p * u).sum(-1, keepdim=True)
        return (self._root * centred).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = self._root * coordinates.reshape(len(coordinates), *self._p.shape)
        top = self._top.expand(len(z), -1, -1)
        others = (z - self._p * z.sum(-1, keepdim=True)).scatter(-1, top, 0.0)
        return others.scatter(-1, top, -others.sum(-1, keepdim=True)).view(len(z), *self.shape)  # the sum is zero


class _ColumnRoot(OutputRoot):
    """Columns ``[N, k, V]``: V for each of N groups of k outputs: observations, examples, or the whole batch."""

    def __init__(self, columns: Tensor, shape: torch.Size):
        self._columns, self.shape = columns, shape
        self.size, self.n_apart = columns.shape[0] * columns.shape[2], min(shape[0], columns.shape[0])

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._columns.shape[:2])
        return torch.einsum("mnc,ncv->mnv", u, self._columns.to(u.dtype)).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = coordinates.reshape(len(coordinates), self._columns.shape[0], self._columns.shape[2])
        return torch.einsum("mnv,ncv->mnc", z, self._columns.to(z.dtype)).view(len(z), *self.shape)


def exact_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """A root of ``Λ = −∂² log p(y|f) / ∂f²``, or of what the likelihood puts in its place."""
    observations, labels, weight = likelihood.rows(outputs, targets)
    hessian = likelihood.output_curvature(observations, labels, weight)
    if hessian is not None and hessian.coupled:
        return _SoftmaxRoot(hessian.scales, outputs.shape)
    return column_root(likelihood, outputs, targets)


def column_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """A root of Λ with its columns written out, differentiable in the outputs."""
    observations, labels, weight = likelihood.rows(outputs, targets)
    if likelihood.couples_rows:
        return _ColumnRoot(likelihood.batch_root(observations, labels, weight)[None], outputs.shape)
    root = likelihood.output_root(observations, labels)
    scale = _noise_weights(likelihood, root).sqrt() * weight.sqrt().view(-1, 1, 1).to(root.dtype)
    return _ColumnRoot(root * scale, outputs.shape)


def gradient_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor, labels: Tensor | None = None) -> OutputRoot:
    """``Λ ≈ Σ_s g_s g_sᵀ / M`` with gradients at labels ``[M, N, ...]`` that were sampled at unit noise.

    Without labels, it is the gradient at the data's own: one vector for each example and all its positions. It is
    differentiable in the outputs.
    """
    likelihood.require_own_rows("The Fisher information adds up gradients of single rows.")
    observations, own, weight = likelihood.rows(outputs, targets)
    drawn = [own] if labels is None else [like_observed(label, own) for label in labels]
    gradients = torch.stack([likelihood.gradient(observations, label) for label in drawn], -1)
    noise = _noise_weights(likelihood, observations)
    noise = noise if labels is None else noise.sqrt() / len(labels) ** 0.5
    columns = gradients * (weight.sqrt().unsqueeze(-1).to(gradients.dtype) * noise).unsqueeze(-1)
    return _ColumnRoot(columns if labels is not None else columns.reshape(len(outputs), -1, 1), outputs.shape)


def _noise_weights(likelihood: Likelihood, values: Tensor) -> Tensor:
    """The factor on the curvature of each of the last axis's entries at the current noise."""
    return likelihood.curvature_weights().detach()[likelihood.output_groups(values.shape[-1])].to(values)
