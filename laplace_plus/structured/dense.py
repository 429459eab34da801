"""Dense matrices as blocks.

What does not depend on hyperparameters is computed once: of few rows the eigenvectors, of large matrices their
eigenvalues alone, which serve all determinants. There a factor is a Cholesky decomposition ``H + δ/w = L Lᵀ``, in
a twentieth of the time of eigenvectors; it holds for one ratio of δ and w, at any scale of both. With a diagonal of
several levels each determinant is a Cholesky decomposition, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured.blocks import Basis, Block, Factor, register_block
from laplace_plus.structured.composed import MappedGradients
from laplace_plus.structured.eigen import EigenBlock, EigenFactor
from laplace_plus.structured.gradients import MIB, DenseGradients, ExampleGradients, times
from laplace_plus.structured.gram_sum import THIN, GramSum, by_squares, combine
from laplace_plus.structured.log_determinants import require_positive

ROUNDING = 64.0
"""Rounding makes eigenvalues of semi-definite n × n matrices negative, by this times ``n ε`` of the largest one."""

LARGE = 1024
"""Smaller matrices are diagonalised at once, in less than a second."""

_SHARE = 1e-2
"""Fraction of the diagonal that rounding may take away before eigenvalues have to be clamped."""

_WRITTEN = 256 * MIB
"""Bytes of gradients that are multiplied by a basis once, for every quadratic form; more are multiplied in parts."""


@dataclass(frozen=True)
class DenseBasis(Basis):
    """Any invertible matrices R, ``[G, n, n]`` with n = o·i.

    Attributes:
        vectors: R, a tensor or :class:`~laplace_plus.structured.gram_sum.Reflections`, which multiply like one.
    """

    vectors: Any

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        mapped, n_examples = MappedGradients(gradients, self.mapped), gradients.n_examples
        if n_examples * gradients.bytes_each() > _WRITTEN:
            return mapped
        return DenseGradients(mapped.dense(slice(0, n_examples)))

    def mapped(self, rows: Tensor) -> Tensor:
        """``x R`` for rows ``[..., G, n]``."""
        return times(rows, self.vectors)

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        flat = coordinates.flatten(2)
        return (self.vectors @ flat.movedim(0, -1)).movedim(-1, 0).reshape(coordinates.shape)

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return by_squares(self.vectors, variances.flatten(1)[..., None]).view_as(variances)


@dataclass(frozen=True)
class InverseRoots(DenseBasis):
    """``R = L⁻ᵀ`` of lower triangular matrices L, the ``vectors``, by triangular solves: R is never written out."""

    @override
    def mapped(self, rows: Tensor) -> Tensor:
        by_group = rows.movedim(-2, 0).flatten(1, -2)  # one solve for all rows of a group
        solved = torch.linalg.solve_triangular(self.vectors.to(rows.dtype), by_group.mT, upper=False).mT
        return solved.reshape(len(solved), *rows.shape[:-2], -1).movedim(0, -2)

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        columns = coordinates.flatten(2).movedim(0, -1)
        solved = torch.linalg.solve_triangular(self.vectors.mT, columns, upper=True)
        return solved.movedim(-1, 0).reshape(coordinates.shape)

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        units = torch.eye(self.vectors.shape[-1], dtype=self.vectors.dtype, device=self.vectors.device)
        values = variances.flatten(1)[..., None]
        solved = (torch.linalg.solve_triangular(self.vectors, some.mT, upper=False) for some in units.split(LARGE))
        return torch.cat([own.mT.square() @ values for own in solved], 1).view_as(variances)


def clamp_rounding(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zero out negative eigenvalues that rounding in ``dtype`` produces in a semi-definite matrix; leave real ones."""
    n = values.shape[-1]
    scale = values.abs().amax(-1, keepdim=True) if n else values
    tolerance = ROUNDING * n * torch.finfo(dtype or values.dtype).eps * scale
    return torch.where(values.abs() <= tolerance, values.clamp(min=0), values)


@register_block
class DenseBlock(EigenBlock):
    """G dense matrices.

    Args:
        matrix: ``[K, G, n, n]``, or for each component its :class:`GramSum`.
        shape: ``[G, o, i]`` with o·i = n.
    """

    storage: ClassVar[str] = "dense"

    def __init__(self, matrix: Tensor | Sequence[GramSum], shape: tuple[int, int, int]):
        self.sums = [GramSum.of(m) for m in matrix] if isinstance(matrix, Tensor) else list(matrix)
        self.shape = shape
        self.kind = "dense"
        self.dtype = self.sums[0].dtype
        self.n_components = len(self.sums)
        self._forget()

    @property
    def matrix(self) -> Tensor:
        """The components ``[K, G, n, n]``."""
        return (
            torch.stack([own.matrix() for own in self.sums]) if self.n_components > 1 else self.sums[0].matrix()[None]
        )

    def _forget(self) -> None:
        """Forget what followed from the sums, after something was added to them."""
        self._spectrum = None
        self._values: list[Tensor] | None = None  # eigenvalues of each component
        self._semi_definite: Tensor | None = None
        self._form: tuple[Tensor, Basis, Tensor] | None = None  # weights, and what eigen gives at a weight of one
        # Weights and diagonal over the first weight, the inverse root there, and log det.
        self._root: tuple[Tensor, Basis, Tensor] | None = None

    @override
    def add(self, gradients: ExampleGradients, components: Tensor) -> None:
        self._forget()
        for total, part in zip(self.sums, gradients.by_component(components, self.n_components), strict=True):
            for _, values in part.chunks():
                total.add_rows(values.flatten(3).flatten(0, 1).movedim(1, 0))  # [G, Vb, n]

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, DenseBlock)
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine.add_(theirs)
        self._forget()

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        one, at = self.n_components == 1, weights.detach()
        if self._form is None or not (one or torch.equal(self._form[0], at)):
            values, vectors = (self.sums[0] if one else combine(self.sums, at)).eigen()
            self._form = at, DenseBasis(vectors), clamp_rounding(values).view(self.shape)
        _, basis, own = self._form
        return basis, own.to(weights.dtype) * (weights[0] if one else 1)

    @override
    def dense(self, weights: Tensor) -> Tensor:
        return torch.einsum("k,kgnm->gnm", weights, self.matrix.to(weights.dtype))

    quadratic = Block.quadratic

    @property
    def _is_thin(self) -> bool:
        """Whether all components together have few rows."""
        n = self.shape[1] * self.shape[2]
        return all(own.is_thin for own in self.sums) and sum(own.n_rows for own in self.sums) <= THIN * n

    def _avoids_vectors(self) -> bool:
        """Whether eigenvectors would take much longer than what can be had without them."""
        return self.shape[1] * self.shape[2] >= LARGE and not self._is_thin and self._form is None

    def _eigenvalues(self) -> list[Tensor]:
        """Those of each component, ``[G, n]``."""
        if self._values is None:
            self._values = [own.eigenvalues() for own in self.sums]
        return self._values

    def _is_definite(self, weights: Tensor, diagonal: Tensor) -> bool:
        """Whether the sum is positive definite though rounding made eigenvalues of H negative."""
        if self._is_thin:
            return True
        lowest = torch.stack([own.double().amin().clamp(max=0) for own in self._eigenvalues()])
        return bool(weights.double() @ lowest >= -_SHARE * diagonal.double().amin())

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if not diagonal.ndim and not self._avoids_vectors():
            return super().factor(weights, diagonal)
        scale, eps = weights[0], torch.finfo(weights.dtype).eps
        at = torch.cat([weights, diagonal.flatten()]) / scale
        found = self._root
        known = found is not None and found[0].shape == at.shape and torch.allclose(found[0], at, rtol=8 * eps, atol=0)
        if found is None or not known or at.requires_grad:
            lower = torch.linalg.cholesky(self._sum(weights / scale, diagonal / scale))
            determinant = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()
            found = at, InverseRoots(lower.to(weights.dtype)), determinant
            self._root = None if at.requires_grad else found
        return EigenFactor(found[1], scale.expand(self.shape), found[2])

    def _sum(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        """``H(w) + D`` in float64, whose H has no negative eigenvalues by rounding; differentiable."""
        is_definite = self._is_definite(weights, diagonal)
        if not is_definite and self._semi_definite is None:
            values, vectors = symmetric_eigen(self.matrix.double())
            self._semi_definite = (vectors * clamp_rounding(values, self.dtype)[..., None, :]) @ vectors.mT
        each: Any = (own.wide() for own in self.sums) if is_definite else self._semi_definite
        full: Any = sum(weight * own for weight, own in zip(weights.double(), each, strict=True))
        full.diagonal(dim1=-2, dim2=-1).add_(diagonal.double().expand(self.shape).flatten(1))
        if not is_definite and torch.linalg.cholesky_ex(full).info.any():
            require_positive(torch.linalg.eigvalsh(full.detach()))
        return full

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return super().log_determinant(weights, diagonal)
        if not self._is_thin:
            return _LogDeterminant.apply(self._sum(weights, diagonal))
        # Of few rows X, det(D + Xᵀ X) = det D · det(I + X D⁻¹ Xᵀ).
        each = diagonal.double().expand(self.shape).flatten(1)  # [G, n]
        scaled = [
            own.all_rows().double() * weight.sqrt() for own, weight in zip(self.sums, weights.double(), strict=True)
        ]
        rows = torch.cat(scaled, 1) * each.rsqrt()[:, None]
        inner = rows @ rows.mT + torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return each.log().sum() + _LogDeterminant.apply(inner)

    @override
    def _sides(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        if not self._avoids_vectors():
            return super()._sides(weights)
        values = clamp_rounding(self._eigenvalues()[0]).flatten()[None]
        return values, torch.ones_like(values[:, :1])

    @override
    def parts(self) -> list[Tensor]:
        return [part for own in self.sums for part in own.parts()]

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> DenseBlock:
        # In memory of its own, as it was added up: how a product is rounded depends on where its factors lie.
        return cls([GramSum.of(tensors[f"matrix.{n}"].clone()) for n in range(len(tensors))], shape)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {f"matrix.{n}": own.matrix() for n, own in enumerate(self.sums)}


class _LogDeterminant(torch.autograd.Function):
    """``Σ log det M`` of positive definite ``[G, n, n]`` in float64, whose derivative is M⁻¹.

    That of a Cholesky decomposition takes three times as long.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        lower = torch.linalg.cholesky(matrix)
        ctx.save_for_backward(matrix, lower)
        return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        matrix, lower = ctx.saved_tensors
        return gradient * (torch.linalg.inv(matrix) if torch.is_grad_enabled() else torch.cholesky_inverse(lower))
