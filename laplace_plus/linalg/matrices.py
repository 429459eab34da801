"""Operators that store their entries: dense, diagonal, Kronecker, block-diagonal, low-rank plus diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import NotPositiveDefiniteError, OperatorError
from laplace_plus.linalg.operators import Operator, unique


class Dense(Operator):
    """A dense matrix.

    Args:
        matrix: ``[m, n]``.
        symmetric: Whether the matrix equals its transpose.

    Raises:
        OperatorError: Not a floating-point matrix, or not symmetric although declared so.
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False):
        _require(matrix, 2, "matrix")
        if symmetric:
            _require_symmetric(matrix)
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device, self.symmetric = matrix.dtype, matrix.device, symmetric

    def _apply(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix.mT

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def _dense(self, chunk_size: int | None) -> Tensor:
        return self.matrix

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return self.matrix.diagonal()


class Diagonal(Operator):
    """``diag(d)``.

    Args:
        entries: d, ``[n]``.

    Raises:
        OperatorError: Not a floating-point vector.
    """

    symmetric = True

    def __init__(self, entries: Tensor):
        _require(entries, 1, "diagonal")
        self.entries = entries
        self.shape = (len(entries), len(entries))
        self.dtype, self.device = entries.dtype, entries.device

    def _apply(self, vectors: Tensor) -> Tensor:
        return vectors * self.entries

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.entries,)

    def _dense(self, chunk_size: int | None) -> Tensor:
        return self.entries.diag()

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return self.entries


class Identity(Operator):
    """The identity; ``c * Identity(n)`` is ``c I``.

    Args:
        n: Size.
        dtype: Type of the vectors; torch's default type by default.
        device: Device of the vectors; torch's default device by default.
    """

    symmetric = True

    def __init__(self, n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        if n < 0:
            raise OperatorError("n must not be negative.", expected="n >= 0", got=str(n))
        like = torch.empty(0, dtype=dtype, device=device)
        self.shape, self.dtype, self.device = (n, n), like.dtype, like.device

    def _apply(self, vectors: Tensor) -> Tensor:
        return vectors

    def _dense(self, chunk_size: int | None) -> Tensor:
        return torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return torch.ones(self.shape[0], dtype=self.dtype, device=self.device)


class Kronecker(Operator):
    """``A₁ ⊗ A₂ ⊗ … ⊗ A_k``, with ``(A ⊗ B) vec(X) = vec(A X Bᵀ)`` for row-major ``vec``.

    Factors may be rectangular. A product multiplies with each factor once, batched over the sizes of the others.

    Args:
        factors: At least one matrix or operator.

    Raises:
        OperatorError: No factor, or factors of different types or devices.
    """

    def __init__(self, factors: Sequence[Tensor | Operator]):
        self.factors = self.operands = _operators(factors, "factors of a Kronecker product")
        self.shape = (prod(factor.shape[0] for factor in self.factors), prod(f.shape[1] for f in self.factors))
        self.dtype, self.device = self.factors[0].dtype, self.factors[0].device
        self.symmetric = all(factor.symmetric for factor in self.factors)

    def _apply(self, vectors: Tensor) -> Tensor:
        axes = vectors.unflatten(-1, [factor.shape[1] for factor in self.factors])
        for axis, factor in enumerate(self.factors, -len(self.factors)):
            axes = factor(axes.movedim(axis, -1)).movedim(-1, axis)
        return axes.flatten(-len(self.factors))

    def _transpose(self) -> Operator:
        return Kronecker([factor.T for factor in self.factors])

    def _dense(self, chunk_size: int | None) -> Tensor:
        return reduce(_kronecker, [factor.dense(chunk_size=chunk_size) for factor in self.factors])

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        if any(factor.shape[0] != factor.shape[1] for factor in self.factors):
            return super()._diagonal(chunk_size, limit)
        diagonals = [factor.diagonal(chunk_size=chunk_size, limit=limit) for factor in self.factors]
        return reduce(lambda left, right: torch.outer(left, right).flatten(), diagonals)

    def _details(self) -> str:
        return " ⊗ ".join(f"[{factor.shape[0]} × {factor.shape[1]}]" for factor in self.factors)


class BlockDiagonal(Operator):
    """Blocks along the diagonal and zeros elsewhere.

    Args:
        blocks: At least one matrix or operator; blocks may be rectangular.

    Raises:
        OperatorError: No block, or blocks of different types or devices.
    """

    def __init__(self, blocks: Sequence[Tensor | Operator]):
        self.blocks = self.operands = _operators(blocks, "blocks")
        self.shape = (sum(block.shape[0] for block in self.blocks), sum(block.shape[1] for block in self.blocks))
        self.dtype, self.device = self.blocks[0].dtype, self.blocks[0].device
        self.symmetric = all(block.symmetric for block in self.blocks)

    def _apply(self, vectors: Tensor) -> Tensor:
        slices = vectors.split([block.shape[1] for block in self.blocks], dim=-1)
        return torch.cat([block(part) for block, part in zip(self.blocks, slices, strict=True)], dim=-1)

    def _transpose(self) -> Operator:
        return BlockDiagonal([block.T for block in self.blocks])

    def _dense(self, chunk_size: int | None) -> Tensor:
        return torch.block_diag(*(block.dense(chunk_size=chunk_size) for block in self.blocks))

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        # A rectangular block shifts the following blocks off the diagonal.
        if any(block.shape[0] != block.shape[1] for block in self.blocks):
            return super()._diagonal(chunk_size, limit)
        return torch.cat([block.diagonal(chunk_size=chunk_size, limit=limit) for block in self.blocks])

    def _details(self) -> str:
        return f"{len(self.blocks)} blocks"


class LowRankPlusDiagonal(Operator):
    """``U C Uᵀ + diag(d)``, with ``C = diag(s)`` or a symmetric ``[r, r]``.

    Inverse and determinant cost ``O(n r² + r³)`` by the identities of Woodbury and Sylvester. They require d > 0; C may
    have negative eigenvalues as long as the sum is positive definite. All are differentiable in U, C and d.

    Args:
        basis: U, ``[n, r]``; its columns need not be orthogonal.
        values: s ``[r]``, or C ``[r, r]``.
        diagonal: d: ``[n]``, or one number for all entries.

    Raises:
        OperatorError: Shapes, types or devices that do not match, or a C that is not symmetric.
    """

    symmetric = True

    def __init__(self, basis: Tensor, values: Tensor, diagonal: Tensor | float):
        _require(basis, 2, "basis")
        size, rank = basis.shape
        if not isinstance(diagonal, Tensor):
            diagonal = torch.tensor(float(diagonal), dtype=basis.dtype, device=basis.device)
        values_fit = values.shape in ((rank,), (rank, rank))
        if not values_fit or diagonal.shape not in ((), (size,)):
            raise OperatorError(
                "The shapes of basis, values and diagonal do not match.",
                expected=f"values [{rank}] or [{rank}, {rank}], and a diagonal [{size}] or one number",
                got=f"{list(values.shape)} and {list(diagonal.shape)}",
            )
        for name, tensor in (("values", values), ("diagonal", diagonal)):
            if tensor.dtype != basis.dtype or tensor.device != basis.device:
                raise OperatorError(
                    f"The {name} have another type or device than the basis.",
                    expected=f"{basis.dtype} on {basis.device}",
                    got=f"{tensor.dtype} on {tensor.device}",
                )
        if values.ndim == 2:
            _require_symmetric(values)
        self.basis, self.values, self.added = basis, values, diagonal
        self.shape, self.dtype, self.device = (size, size), basis.dtype, basis.device

    def _apply(self, vectors: Tensor) -> Tensor:
        return self._times_values(vectors @ self.basis) @ self.basis.mT + vectors * self.added

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return unique([self.basis, self.values, self.added])

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return (self._times_values(self.basis) * self.basis).sum(-1) + self.added

    def inverse(self) -> LowRankPlusDiagonal:
        """``A⁻¹ = D⁻¹ − D⁻¹ U (I + C Uᵀ D⁻¹ U)⁻¹ C Uᵀ D⁻¹``, an operator of the same class.

        Raises:
            NotPositiveDefiniteError: d is not positive, or the matrix is not positive definite.
        """
        scaled, core = self._factored()  # [n, r], [r, r]
        values = -torch.linalg.solve(core, self._core())
        values = (values + values.mT) / 2
        return LowRankPlusDiagonal(scaled, values.to(self.dtype), 1 / self.added)

    def solve(self, vectors: Tensor) -> Tensor:
        """``A⁻¹ b`` for row-stacked ``b [..., n]``.

        Raises:
            NotPositiveDefiniteError: d is not positive, or the matrix is not positive definite.
            OperatorError: Vectors of another length, type or device.
        """
        return self.inverse()(vectors)

    def log_determinant(self) -> Tensor:
        """``log det A = Σ log d + log det(I + C Uᵀ D⁻¹ U)``, 0-d.

        Raises:
            NotPositiveDefiniteError: d is not positive, or the matrix is not positive definite.
        """
        _, core = self._factored()
        added = self.added.expand(self.shape[0]).double().log().sum()
        return (added + torch.linalg.slogdet(core).logabsdet).to(self.dtype)

    def _core(self) -> Tensor:
        """C in float64, ``[r, r]``."""
        values = self.values.double()
        return values.diag() if values.ndim == 1 else values

    def _times_values(self, rows: Tensor) -> Tensor:
        return rows * self.values if self.values.ndim == 1 else rows @ self.values

    def _factored(self) -> tuple[Tensor, Tensor]:
        """``D⁻¹ U``, and ``I + C Uᵀ D⁻¹ U`` in float64, after the check for positive definiteness."""
        if not bool((self.added > 0).all()):
            raise NotPositiveDefiniteError(
                "The diagonal is not positive.",
                expected="d > 0",
                got=f"a smallest entry of {float(self.added.min()):.3g}",
                fix="Add a positive diagonal, for instance a prior precision",
            )
        scaled = self.basis / (self.added if self.added.ndim == 0 else self.added[:, None])
        # Chunks of 2²⁰ rows limit the memory of the float64 copies.
        pairs = zip(self.basis.split(2**20), scaled.split(2**20), strict=True)
        gram = torch.stack([left.double().mT @ right.double() for left, right in pairs]).sum(0)
        gram = (gram + gram.mT) / 2
        core = self._core()
        self._require_positive_definite(gram.detach(), core.detach())
        return scaled, torch.eye(len(gram), dtype=gram.dtype, device=gram.device) + core @ gram

    def _require_positive_definite(self, gram: Tensor, core: Tensor) -> None:
        """Raise unless ``I + G^½ C G^½`` is positive definite; it has the extreme eigenvalues of ``D^-½ A D^-½``."""
        if self.values.ndim == 1 and bool((self.values >= 0).all()):
            return
        if not (bool(torch.isfinite(gram).all()) and bool(torch.isfinite(core).all())):
            return  # the result is not finite either, and shows it
        squares, vectors = torch.linalg.eigh(gram)
        root = vectors * squares.clamp_min(0.0).sqrt()  # [r, r]
        middle = root.mT @ core @ root
        smallest = 1 + torch.linalg.eigvalsh((middle + middle.mT) / 2)[:1]
        if bool((smallest <= len(gram) * torch.finfo(gram.dtype).eps).any()):
            raise NotPositiveDefiniteError(
                "The matrix is not positive definite.",
                expected="d large enough to outweigh the negative part of U C Uᵀ",
                got=f"an eigenvalue of {float(smallest):.3g} relative to d",
                fix="Add a larger diagonal, or drop the eigenvectors of negative eigenvalues",
            )

    def _details(self) -> str:
        return f"rank {self.basis.shape[1]}"


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    # torch.kron fails for some transposed matrices with one row.
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])


def _require(tensor: Any, dimensions: int, name: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.ndim != dimensions or not tensor.is_floating_point():
        what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise OperatorError(
            f"The {name} has the wrong type or number of axes.",
            expected=f"a floating-point tensor with {dimensions} axes",
            got=what,
        )


def _require_symmetric(matrix: Tensor) -> None:
    if matrix.shape[0] != matrix.shape[1]:
        raise OperatorError("The matrix is not square.", expected="[n, n], as it is symmetric", got=f"{matrix.shape}")
    values = matrix.detach()
    difference = (values - values.mT).abs()
    if bool((difference > torch.finfo(matrix.dtype).eps ** 0.5 * values.abs().amax()).any() if values.numel() else 0):
        raise OperatorError(
            "The matrix is not symmetric.",
            expected="a matrix that equals its transpose",
            got=f"entries that differ by {float(difference.max()):.3g}",
            fix="Symmetrise it, or leave symmetric=True out",
        )


def _operators(parts: Sequence[Tensor | Operator], what: str) -> tuple[Operator, ...]:
    """At least one matrix or operator, as operators of one type on one device."""
    operators = tuple(part if isinstance(part, Operator) else Dense(part) for part in parts)
    if not operators:
        raise OperatorError(f"The list of {what} is empty.", expected="at least one", got="none")
    for other in operators[1:]:
        if (other.dtype, other.device) != (operators[0].dtype, operators[0].device):
            raise OperatorError(
                f"The {what} have different types or devices.",
                expected=f"{operators[0].dtype} on {operators[0].device}",
                got=f"{other.dtype} on {other.device}",
            )
    return operators
