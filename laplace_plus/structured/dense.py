"""Dense matrices as blocks.

Of large ones eigenvectors are avoided: two Cholesky decompositions and a triangular inverse take a third of the time of
eigenvectors, but hold for one diagonal only; eigenvalues alone serve all determinants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.kernels import symmetric_eigen
from laplace_plus.structured.blocks import Basis, Block, Factor, register_block
from laplace_plus.structured.composed import MappedGradients
from laplace_plus.structured.eigen import EigenBlock, EigenFactor
from laplace_plus.structured.gradients import MIB, DenseGradients, ExampleGradients
from laplace_plus.structured.gram_sum import GramSum, combine
from laplace_plus.structured.log_determinants import require_positive

ROUNDING = 64.0
"""Rounding makes eigenvalues of semi-definite n × n matrices negative, by this times ``n ε`` of the largest one."""

LARGE = 1024
"""Smaller matrices are diagonalised at once, in less than a second."""

_SHARE = 1e-3
"""Fraction of the diagonal that rounding may take away before eigenvalues have to be clamped."""

_WRITTEN = 256 * MIB
"""Bytes of gradients that are multiplied by a basis once, for every quadratic form; more are multiplied in parts."""


@dataclass(frozen=True)
class DenseBasis(Basis):
    """Any invertible matrices R, ``vectors [G, n, n]`` with n = o·i."""

    vectors: Tensor

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        mapped, n_examples = MappedGradients(gradients, self.vectors), gradients.n_examples
        if n_examples * gradients.bytes_each() > _WRITTEN:
            return mapped
        return DenseGradients(mapped.dense(slice(0, n_examples)))

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        flat = coordinates.flatten(2)
        return (self.vectors @ flat.movedim(0, -1)).movedim(-1, 0).reshape(coordinates.shape)

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return (self.vectors.square() @ variances.flatten(1)[..., None]).view_as(variances)


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
        self._semi_definite: Tensor | None = None
        self._form: tuple[Tensor, Basis, Tensor] | None = None  # weights, and what eigen gives at a weight of one

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
            pairs = (self.sums[0] if one else combine(self.sums, at)).eigen()
            self._form = at, DenseBasis(pairs.vectors), clamp_rounding(pairs.values).view(self.shape)
        _, basis, own = self._form
        return basis, own.to(weights.dtype) * (weights[0] if one else 1)

    @override
    def dense(self, weights: Tensor) -> Tensor:
        return torch.einsum("k,kgnm->gnm", weights, self.matrix.to(weights.dtype))

    quadratic = Block.quadratic

    def _avoids_vectors(self) -> bool:
        """Whether eigenvectors would take much longer than what can be had without them."""
        thin = self.n_components == 1 and self.sums[0].is_thin
        return self.shape[1] * self.shape[2] >= LARGE and not thin and self._form is None

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        lower = self._root_of_sum(weights, diagonal) if self._avoids_vectors() else None
        if lower is None and diagonal.ndim:
            lower = self._root(weights, diagonal)
        if lower is None:
            return super().factor(weights, diagonal)
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        ones = torch.ones(self.shape, dtype=weights.dtype, device=lower.device)
        return EigenFactor(DenseBasis(inverse.mT.to(weights.dtype).contiguous()), ones, _log_determinant(lower))

    def _root_of_sum(self, weights: Tensor, diagonal: Tensor) -> Tensor | None:
        """L with ``H + D = L Lᵀ`` in float64; None unless ``H + D/1000`` is positive definite, too."""
        wide = self.dense(weights).to(torch.float64, copy=True)
        entries = wide.diagonal(dim1=-2, dim2=-1)
        level = diagonal.double().flatten(1) if diagonal.ndim else diagonal.double()
        entries += _SHARE * level
        if torch.linalg.cholesky_ex(wide).info.any():
            return None
        entries += (1 - _SHARE) * level
        return torch.linalg.cholesky(wide)

    def _root(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        """L with ``H + D = L Lᵀ`` in float64, whose H has no negative eigenvalues by rounding; differentiable."""
        if self._semi_definite is None:
            values, vectors = symmetric_eigen(self.matrix.double())
            self._semi_definite = (vectors * clamp_rounding(values, self.dtype)[..., None, :]) @ vectors.mT
        full = torch.einsum("k,kgnm->gnm", weights.double(), self._semi_definite)
        full = full + torch.diag_embed(diagonal.double().expand(self.shape).flatten(1))
        lower, failed = torch.linalg.cholesky_ex(full)
        if failed.any():
            require_positive(torch.linalg.eigvalsh(full.detach()))
        return lower

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if diagonal.ndim == 0 and self.n_components == 1:
            return super().log_determinant(weights, diagonal)
        return _log_determinant(self._root(weights, diagonal))

    @override
    def _sides(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self.shape[1] * self.shape[2] < LARGE or self.n_components > 1 or self._form is not None:
            return super()._sides(weights)
        values = clamp_rounding(self.sums[0].eigenvalues()).flatten()[None]
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


def _log_determinant(lower: Tensor) -> Tensor:
    """``Σ log det L Lᵀ`` of triangular matrices, 0-d float64."""
    return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum()
