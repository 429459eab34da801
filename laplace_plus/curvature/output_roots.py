"""Roots of a likelihood's curvature on one batch of outputs: products with ``S``, where ``S Sᵀ ≈ Λ``.

All are at the likelihood's current observation noise; ignored targets contribute nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.likelihoods import Likelihood

_SLICE_ENTRIES = 2**24
"""Entries of the root that are held together: 64 MiB in float32."""


class OutputRoot(ABC):
    """The root ``S`` of one batch's curvature in output space, block-diagonal over rows.

    Attributes:
        size: k, its number of columns over all rows.
    """

    size: int

    @abstractmethod
    def down(self, tangents: Tensor) -> Tensor:
        """``Sᵀ u``, ``[m, B, *, C] -> [m, k]``."""

    @abstractmethod
    def up(self, coordinates: Tensor) -> Tensor:
        """``S z``, ``[m, k] -> [m, B, *, C]``."""


class IdentityRoot(OutputRoot):
    """The outputs themselves.

    Args:
        shape: ``(B, *, C)``.
    """

    def __init__(self, shape: torch.Size):
        self._shape, self.size = shape, shape.numel()

    @override
    def down(self, tangents: Tensor) -> Tensor:
        return tangents.flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        return coordinates.reshape(len(coordinates), *self._shape)


class SoftmaxRoot(OutputRoot):
    """``diag √p − p √pᵀ`` of every observation, never written out, and without cancellation near p = 1.

    Args:
        p: Probabilities ``[N, C]``, all zero for ignored observations.
        shape: ``(B, *, C)``.
    """

    def __init__(self, p: Tensor, shape: torch.Size):
        self._shape, self._top = shape, p.argmax(-1, keepdim=True)
        self._p, self._rest, self._root = p, p.scatter(-1, self._top, 0.0), p.sqrt()
        self.size = p.numel()

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._p.shape)
        u = u - u.gather(-1, self._top.expand(len(u), -1, -1))  # S does not see what is the same for all classes
        centred = u - (self._rest * u).sum(-1, keepdim=True)
        return (self._root * centred).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = self._root * coordinates.reshape(len(coordinates), *self._p.shape)
        top = self._top.expand(len(z), -1, -1)
        others = z.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        result = z - self._p * (others + z.gather(-1, top))
        # z_t − p_t Σ z = (1 − p_t) z_t − p_t Σ_{i≠t} z_i
        at_top = self._rest.sum(-1, keepdim=True) * z.gather(-1, top) - self._p.gather(-1, self._top) * others
        return result.scatter(-1, top, at_top).view(len(z), *self._shape)


class LikelihoodRoot(OutputRoot):
    """A likelihood's own ``output_root``, some rows at a time.

    Args:
        likelihood: The likelihood.
        outputs: ``[B, *, C]``.
        targets: As the loader gave them.
    """

    def __init__(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor):
        self._likelihood, self._shape = likelihood, outputs.shape
        self._rows, self._targets, self._weight = likelihood.rows(outputs, targets)
        self._columns = likelihood.output_root(self._rows[:1], self._targets[:1]).shape[-1]
        self.size = len(self._rows) * self._columns
        self._whole: Tensor | None = None

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._rows.shape)
        parts = [torch.einsum("mnc,ncv->mnv", u[:, where], root.to(u.dtype)) for where, root in self._roots()]
        return torch.cat(parts, 1).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = coordinates.reshape(len(coordinates), len(self._rows), self._columns)
        parts = [torch.einsum("mnv,ncv->mnc", z[:, where], root.to(z.dtype)) for where, root in self._roots()]
        return torch.cat(parts, 1).view(len(z), *self._shape)

    def _roots(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows with their roots ``[n, C, V]``."""
        step = max(1, _SLICE_ENTRIES // (self._rows.shape[-1] * self._columns))
        if self._whole is not None:
            yield slice(None), self._whole
            return
        groups = self._likelihood.output_groups(self._columns)
        scale = self._likelihood.curvature_weights().detach()[groups].sqrt().to(self._rows)
        for start in range(0, len(self._rows), step):
            where = slice(start, start + step)
            root = self._likelihood.output_root(self._rows[where], self._targets[where]).detach() * scale
            root = root * self._weight[where, None, None].to(root.dtype)
            if step >= len(self._rows):
                self._whole = root
            yield where, root


class VectorRoot(OutputRoot):
    """Given vectors as columns.

    Args:
        vectors: ``[N, k, V]``: V columns for each of N blocks of k outputs, which are rows ``[C]`` or whole examples.
        shape: ``(B, *, C)``.
    """

    def __init__(self, vectors: Tensor, shape: torch.Size):
        self._vectors, self._shape = vectors, shape
        self.size = vectors.shape[0] * vectors.shape[2]

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._vectors.shape[:2])
        return torch.einsum("mnc,ncv->mnv", u, self._vectors.to(u.dtype)).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = coordinates.reshape(len(coordinates), self._vectors.shape[0], self._vectors.shape[2])
        return torch.einsum("mnv,ncv->mnc", z, self._vectors.to(z.dtype)).view(len(z), *self._shape)


def exact_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """``Λ = −∂² log p(y|f) / ∂f²`` (or what the likelihood puts in its place)."""
    rows, _, weight = likelihood.rows(outputs, targets)
    hessian = likelihood.output_curvature(rows, weight)
    if hessian is not None and hessian.coupled:
        return SoftmaxRoot(hessian.scales, outputs.shape)
    return LikelihoodRoot(likelihood, outputs, targets)


def sampled_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor, labels: Tensor) -> OutputRoot:
    """Gradients at sampled labels, ``Λ ≈ Σ_s g_s g_sᵀ / M`` of every row.

    Args:
        likelihood: The likelihood.
        outputs: ``[B, *, C]``.
        targets: As the loader gave them; only say which rows are ignored.
        labels: ``[M, N, ...]``, sampled at unit noise.
    """
    rows, _, weight = likelihood.rows(outputs, targets)
    gradients = [likelihood.gradient(rows, label).detach() for label in labels]
    scale = _output_weights(likelihood, rows).sqrt() * weight.unsqueeze(-1).to(rows.dtype) / len(labels) ** 0.5
    return VectorRoot(torch.stack(gradients, -1) * scale.unsqueeze(-1), outputs.shape)


def empirical_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """The gradient at the data's own targets, one vector for each example and all its positions."""
    rows, targets, weight = likelihood.rows(outputs, targets)
    gradient = likelihood.gradient(rows, targets).detach() * weight.unsqueeze(-1).to(rows.dtype)
    return VectorRoot((gradient * _output_weights(likelihood, rows)).reshape(len(outputs), -1, 1), outputs.shape)


def _output_weights(likelihood: Likelihood, rows: Tensor) -> Tensor:
    """The factor ``[C]`` on each output's curvature at the current noise."""
    return likelihood.curvature_weights().detach()[likelihood.output_groups(rows.shape[-1])].to(rows)
