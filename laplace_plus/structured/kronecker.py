"""Kronecker products ``G ⊗ A`` for each layer (Martens and Grosse, 2015), and with corrected eigenvalues (EKFAC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.structured.blocks import Basis, Block, Factor, register_block
from laplace_plus.structured.eigen import EigenBlock, EigenFactor
from laplace_plus.structured.gradients import MIB, ExampleGradients, slices
from laplace_plus.structured.gram_sum import DiagonalSum, GramSum, LimitedSum, by_squares, combine, formed
from laplace_plus.structured.log_determinants import log_determinant


@dataclass(frozen=True)
class KroneckerBasis(Basis):
    """``R z = L z Nᵀ`` group by group, with orthogonal sides.

    Attributes:
        left: L ``[G, o, o]``, a tensor or :class:`~laplace_plus.structured.gram_sum.Reflections`, or None for the
            identity.
        right: N ``[G or 1, i, i]``, likewise.
    """

    left: Any
    right: Any

    @override
    def coordinates(self, gradients: ExampleGradients) -> ExampleGradients:
        return gradients.in_basis(self.left, self.right)

    @override
    def expand(self, coordinates: Tensor) -> Tensor:
        values = coordinates if self.left is None else self.left @ coordinates
        return values if self.right is None else values @ self.right.mT

    @override
    def diagonal(self, variances: Tensor) -> Tensor:
        return by_squares(self.right, by_squares(self.left, variances).mT).mT


class DiagonalForm(NamedTuple):
    """The eigenvalues of both sides, ``[G, o]`` and ``[G or 1, i]``, their basis, and the weights ``[K]`` of both."""

    weights: Tensor
    left: Tensor
    right: Tensor
    basis: KroneckerBasis


@register_block
class KroneckerBlock(EigenBlock):
    """Kronecker products ``H_k = left_k ⊗ right / count``, group by group.

    With ``corrected`` the eigenvalues are those measured in the Kronecker eigenbasis instead (EKFAC, George et al.,
    2018), ``H_k = U diag(corrected_k) Uᵀ``. Of a last layer with many outputs the left side may be diagonal: KFAC
    without the covariances between outputs. For softmax the dense one ``G = Σ_n diag p_n − p_n p_nᵀ`` has rows that sum
    to zero, so that ``0 ≤ G ≤ 2 diag G`` (Gershgorin): the posterior's precision is at most twice as large as with
    ``diag G`` in any direction, and the variance of a single output is at least as large.

    Args:
        left: ``[K, G, o, o]``, sums of ``g gᵀ``; or ``[K, G, o]``, their diagonals; or for each component the
            :class:`GramSum`.
        right: ``[G, i, i]``, sums of ``a aᵀ``, or the :class:`GramSum`; or ``[G, i]`` where that sum is diagonal (an
            embedding's).
        count: 0-d float64: the number of rows in ``right``'s sum.
        corrected: ``[K, G, o, i]`` or None.
        basis_weights: The weights at which the eigenbasis of ``corrected`` was fixed, ``[K]``.

    Attributes:
        corrected: The corrected eigenvalues, or None.
    """

    storage: ClassVar[str] = "Kronecker"
    _form: DiagonalForm | None = None

    def __init__(
        self,
        left: Tensor | Sequence[GramSum],
        right: Tensor | GramSum,
        count: Tensor,
        corrected: Tensor | None = None,
        basis_weights: Tensor | None = None,
    ):
        self.left_sums = [GramSum.of(own) for own in left] if isinstance(left, Tensor) else list(left)
        self.right_sum = GramSum.of(right) if isinstance(right, Tensor) else right
        self.count, self.corrected, self.basis_weights = count, corrected, basis_weights
        first = self.left_sums[0]
        self.kind = "Kronecker" if corrected is None else "eigenvalue-corrected Kronecker"
        if isinstance(first, DiagonalSum):
            self.kind = "Kronecker with a diagonal output factor"
        elif rank := self.right_sum.rank or first.rank:
            self.kind = f"Kronecker of rank-{rank} factors"
        self.n_components, self.dtype = len(self.left_sums), first.dtype
        self.shape = (first.groups, first.size, self.right_sum.size)

    @property
    def left(self) -> Tensor:
        """The sums of ``g gᵀ``, ``[K, G, o, o]``, or their diagonals ``[K, G, o]``."""
        return torch.stack([own.matrix() for own in self.left_sums])

    @property
    def right(self) -> Tensor:
        """The sum of ``a aᵀ``, ``[G, i, i]``, or ``[G, i]`` where it is diagonal."""
        return self.right_sum.matrix()

    # -- sums ----------------------------------------------------------------------------------------------------------

    @override
    def add(self, gradients: ExampleGradients, components: Tensor, *, summed: bool = False) -> None:
        """Add the products ``Σ g gᵀ`` of output gradients, or to corrected eigenvalues the squares in their basis.

        With ``summed`` the positions of an example are summed first. The inputs' side is added to by itself: it is the
        same for all cotangents.
        """
        if self.corrected is not None:
            coordinates = self.form(components).basis.coordinates(gradients)  # at fixed weights
            for total, own in zip(self.corrected, coordinates.by_component(components, self.n_components), strict=True):
                own.add_squares_(total)
            self._spectrum = None  # the basis stays
            return
        self._spectrum = self._form = None
        parts: list[Any] = gradients.by_component(components, self.n_components)
        for total, part in zip(self.left_sums, parts, strict=True):
            each = part.n_cotangents * part.n_positions * total.groups * total.size * total.dtype.itemsize
            for examples in slices(part.n_examples, each, 256 * MIB):  # patches take more memory than what they are of
                left = part.expand_left(part.raw_left[:, examples])  # [V, b, S, G, o]
                left = left.sum(2, keepdim=True, dtype=total.dtype) if summed else left
                total.add_rows(left.flatten(0, 2).movedim(1, 0))

    @override
    def add_(self, other: Block) -> None:
        assert isinstance(other, KroneckerBlock)
        if self.corrected is not None:  # the basis stays; what is measured in it is added by gradients
            return
        for mine, theirs in zip(self.left_sums, other.left_sums, strict=True):
            mine.add_(theirs)
        self.right_sum.add_(other.right_sum)
        self.count = self.count + other.count
        self._spectrum = self._form = None

    def with_correction(self, weights: Tensor) -> KroneckerBlock:
        """The same factors with corrected eigenvalues of zero, measured from now on in the basis at ``weights``."""
        if self.corrected is not None:
            return self
        empty = torch.zeros(self.n_components, *self.shape, dtype=self.dtype, device=self.left_sums[0].device)
        return KroneckerBlock(self.left_sums, self.right_sum, self.count, empty, weights.detach().to(empty))

    @property
    def discarded_trace(self) -> float:
        """The share of the trace that factors of limited rank leave out, at component weights of one."""
        sides = self.left_sums, [self.right_sum]
        if not any(isinstance(own[0], LimitedSum) for own in sides):
            return 0.0
        ones = torch.ones(self.n_components, dtype=self.dtype, device=self.left_sums[0].device)
        kept, whole, form = ones.new_ones(()), ones.new_ones(()), self.form(ones)
        for sums, values in zip(sides, (form.left, form.right), strict=True):
            trace = values.double().sum(1)
            lost = sum(own.leading()[1] for own in sums if isinstance(own, LimitedSum))
            kept, whole = kept * trace, whole * (trace + lost)
        return float(1 - kept.sum() / whole.sum()) if bool(whole.any()) else 0.0

    # -- the matrix ----------------------------------------------------------------------------------------------------

    def form(self, weights: Tensor) -> DiagonalForm:
        """The diagonal form at component weights ``[K]``, or at those where it is fixed; one component's at one."""
        found = self._form
        is_fixed = self.n_components == 1 or self.basis_weights is not None
        at = weights.detach().to(self.dtype) if self.basis_weights is None else self.basis_weights
        if found is None or not (is_fixed or torch.equal(found.weights, at)):
            left, sides = (self.left_sums[0] if self.n_components == 1 else combine(self.left_sums, at)).eigen()
            right, others = self.right_sum.eigen() if found is None else (found.right, found.basis.right)
            if self.corrected is not None:  # which further data may reach in any direction
                sides, others = formed(sides), formed(others)
            found = self._form = DiagonalForm(at, left, right, KroneckerBasis(sides, others))
        return found

    @override
    def eigen(self, weights: Tensor) -> tuple[Basis, Tensor]:
        form = self.form(weights)
        if self.corrected is not None:
            return form.basis, torch.tensordot(weights, self.corrected.to(weights.dtype), 1)
        left, right = form.left.clamp(min=0), form.right.clamp(min=0)
        values = (left[:, :, None] * (right[:, None, :] / self.count.to(self.dtype))).to(weights.dtype)
        return form.basis, values * weights[0] if self.n_components == 1 else values

    @override
    def factor(self, weights: Tensor, diagonal: Tensor) -> Factor:
        if diagonal.ndim:
            what = f"A {self.kind} block cannot hold a prior precision that differs from entry to entry."
            expected, got = "one prior precision for a layer", f"one for each of {diagonal.numel()} parameters"
            fix = 'Use a scalar or "layerwise" prior precision, or lp.Diagonal or lp.Full.'
            raise UnsupportedError(what, expected=expected, got=got, fix=fix)
        basis, values = self.eigen(weights)
        return EigenFactor(basis, values + diagonal)

    @override
    def log_determinant(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        if self.corrected is not None and self.n_components > 1 and diagonal.ndim == 0:
            return log_determinant(self.corrected.flatten(1), weights, diagonal)
        if self.n_components == 1 or diagonal.ndim or not weights.requires_grad:
            return super().log_determinant(weights, diagonal)
        # Only the left eigenvalues depend on the weights, and eigvalsh has a stable derivative.
        left = torch.tensordot(weights, self.left.to(weights.dtype), 1)
        left = left if left.ndim == 2 else torch.linalg.eigvalsh(left)  # noqa: PLR2004
        right = self.form(weights).right.to(left).clamp(min=0) / self.count.to(left)
        return torch.log(left.clamp(min=0)[:, :, None] * right[:, None, :] + diagonal).sum()

    @override
    def _sides(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self.corrected is not None:
            return super()._sides(weights)
        form = self.form(weights)
        right = form.right.clamp(min=0).double()
        return form.left.clamp(min=0).double(), right / self.count.to(right)

    # -- storage -------------------------------------------------------------------------------------------------------

    @classmethod
    @override
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> KroneckerBlock:
        components = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("left.")})
        left = [_restored(tensors, f"left.{n}") for n in components]
        corrected, weights = tensors.get("corrected"), tensors.get("basis_weights")
        block = cls(left, _restored(tensors, "right"), tensors["count"], corrected, weights)
        if weights is not None:
            # Corrected eigenvalues replace those of the factors, which were not saved.
            basis = KroneckerBasis(tensors.get("left_vectors"), tensors.get("right_vectors"))
            block._form = DiagonalForm(weights, torch.empty(0), torch.empty(0), basis)
        return block

    @override
    def tensors(self) -> dict[str, Tensor]:
        result = {"count": self.count} | self.right_sum.tensors("right")
        for number, own in enumerate(self.left_sums):
            result |= own.tensors(f"left.{number}")
        if self.corrected is None or self.basis_weights is None:
            return result
        # Corrected eigenvalues belong to this very basis; another decomposition could give another order.
        basis = self.form(self.basis_weights).basis
        sides = {"left_vectors": basis.left, "right_vectors": basis.right}
        result |= {"corrected": self.corrected, "basis_weights": self.basis_weights}
        return result | {name: own for name, own in sides.items() if own is not None}

    @override
    def is_zero(self) -> bool:
        if self.corrected is not None:
            return not bool(self.corrected.any())
        left = [part for own in self.left_sums for part in own.parts()]
        return not all(any(bool(part.any()) for part in side) for side in (left, self.right_sum.parts()))

    @override
    def parts(self) -> list[Tensor]:
        found = []
        for own in (*self.left_sums, self.right_sum):
            found += own.parts()
        return [*found, self.count] if self.corrected is None else [*found, self.count, self.corrected]


def _restored(tensors: Mapping[str, Tensor], name: str) -> GramSum:
    """A sum from its :meth:`GramSum.tensors`."""
    if f"{name}.rows" in tensors:
        return LimitedSum.of_rows(tensors[f"{name}.rows"], tensors[f"{name}.limit"])
    return GramSum.of(tensors[name].clone())  # in memory of its own, as it was added up: roundings depend on it
