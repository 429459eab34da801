"""Operators that store their entries, and operators from functions and from SciPy's matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import OperatorError
from laplace_plus.linalg.linear_maps import attach_one, checked_product, leaves
from laplace_plus.linalg.operators import Operator, require_alike


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
        if symmetric and not _is_symmetric(matrix.detach()):
            what, expected = "The matrix is not symmetric.", "a matrix [n, n] that equals its transpose"
            raise OperatorError(what, expected=expected, got=str(list(matrix.shape)), fix="Leave symmetric=True out.")
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

    @override
    def dense(self) -> Tensor:
        return self.matrix

    @override
    def diagonal(self) -> Tensor:
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

    @override
    def dense(self) -> Tensor:
        return self.entries.new_zeros(self.shape).diagonal_scatter(self.entries)

    @override
    def diagonal(self) -> Tensor:
        return self.entries


class Identity(Diagonal):
    """The identity; ``c * Identity(n)`` is ``c I``.

    Args:
        n: Size.
        dtype: Type of the vectors; torch's default type by default.
        device: Device of the vectors; torch's default device by default.
    """

    def __init__(self, n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        Diagonal.__init__(self, torch.ones((), dtype=dtype, device=device).expand(n))


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
        return _kronecker_product(self.factors, vectors)

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return _kronecker_product([factor.T for factor in self.factors], vectors)

    @override
    def dense(self) -> Tensor:
        return reduce(_kronecker, [factor.dense() for factor in self.factors])

    @override
    def diagonal(self) -> Tensor:
        if any(factor.shape[0] != factor.shape[1] for factor in self.factors):
            return super().diagonal()
        return reduce(torch.kron, [factor.diagonal() for factor in self.factors])


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
        return _block_products(self.blocks, vectors)

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return _block_products([block.T for block in self.blocks], vectors)

    @override
    def dense(self) -> Tensor:
        return torch.block_diag(*(block.dense() for block in self.blocks))

    @override
    def diagonal(self) -> Tensor:
        # A rectangular block shifts the following blocks off the diagonal.
        if any(block.shape[0] != block.shape[1] for block in self.blocks):
            return super().diagonal()
        return torch.cat([block.diagonal() for block in self.blocks])


def _require(tensor: Any, dimensions: int, name: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.ndim != dimensions or not tensor.is_floating_point():
        what = f"The {name} has the wrong type or number of axes."
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise OperatorError(what, expected=f"a floating-point tensor with {dimensions} axes", got=got)


def _is_symmetric(matrix: Tensor) -> bool:
    if matrix.shape != matrix.mT.shape or not matrix.numel():
        return matrix.shape == matrix.mT.shape
    slack = torch.finfo(matrix.dtype).eps ** 0.5 * float(matrix.abs().max())
    return torch.allclose(matrix, matrix.mT, rtol=0.0, atol=slack)


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    # torch.kron fails for some transposed matrices with one row.
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])


def _kronecker_product(factors: Sequence[Operator], vectors: Tensor) -> Tensor:
    axes = vectors.unflatten(-1, [factor.shape[1] for factor in factors])
    for axis, factor in enumerate(factors, -len(factors)):
        axes = factor(axes.movedim(axis, -1)).movedim(-1, axis)
    return axes.flatten(-len(factors))


def _block_products(blocks: Sequence[Operator], vectors: Tensor) -> Tensor:
    slices = vectors.split([block.shape[1] for block in blocks], dim=-1)
    return torch.cat([block(part) for block, part in zip(blocks, slices, strict=True)], dim=-1)


def _operators(parts: Sequence[Tensor | Operator], what: str) -> tuple[Operator, ...]:
    """At least one matrix or operator, as operators of one type on one device."""
    operators = tuple(part if isinstance(part, Operator) else Dense(part) for part in parts)
    require_alike(operators, what)
    return operators


@dataclass(eq=False, repr=False)
class FunctionOperator(Operator):
    """A function as an operator; made by :func:`as_operator`."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    rmatvec: Callable[[Tensor], Tensor] | None
    dtype: torch.dtype
    device: torch.device
    parameters: tuple[Tensor, ...] | None
    symmetric: bool = False

    def _apply(self, vectors: Tensor) -> Tensor:
        return checked_product(self.function, vectors, self.shape[0])

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        if self.rmatvec is None:
            return super()._apply_transposed(vectors)
        return checked_product(self.rmatvec, vectors, self.shape[1])

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        if self.parameters is None:
            with torch.enable_grad():
                self.parameters = leaves(self(torch.zeros(1, self.shape[1], dtype=self.dtype, device=self.device)))
        return self.parameters


def as_operator(
    function: Callable[[Tensor], Tensor],
    shape: int | tuple[int, int],
    *,
    rmatvec: Callable[[Tensor], Tensor] | None = None,
    symmetric: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Operator:
    """An operator from a linear function of row-stacked vectors.

    Args:
        function: ``v [..., n] -> A v [..., m]``; an operator of this shape is returned unchanged.
        shape: ``(m, n)``, or n for a square operator.
        rmatvec: ``u [..., m] -> Aᵀ u [..., n]``; by default torch differentiates through ``function``.
        symmetric: Whether A is symmetric; not checked.
        dtype: Type of the numbers; torch's default type by default.
        device: Device of the vectors; torch's default device by default.
        parameters: The tensors that A depends on; by default the leaves of the autograd graph of one product.

    Raises:
        OperatorError: A symmetric operator that is not square, or an operator of another shape.
    """
    rows, columns = (shape, shape) if isinstance(shape, int) else shape
    if symmetric and rows != columns:
        what, expected = "A symmetric operator is square.", "as many rows as columns"
        raise OperatorError(what, expected=expected, got=f"{rows} × {columns}")
    if isinstance(function, Operator):
        if function.shape != (rows, columns):
            raise OperatorError("The operator has another shape.", expected=f"{(rows, columns)}", got=f"{function}")
        return function
    dtype, device = dtype or torch.get_default_dtype(), torch.empty(0, device=device).device
    tensors = None if parameters is None else tuple(parameters)
    return FunctionOperator(function, (rows, columns), rmatvec, dtype, device, tensors, symmetric)


def from_scipy(
    matrix: Any, *, symmetric: bool = False, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Operator:
    """A ``scipy.sparse.linalg.LinearOperator``, sparse matrix or array as an operator; the inverse of ``to_scipy``.

    Products run in numpy, in main memory. They are differentiable in the vectors only, given the transpose.

    Args:
        matrix: A real matrix that ``scipy.sparse.linalg.aslinearoperator`` accepts.
        symmetric: Whether the matrix is symmetric; not checked.
        dtype: Type of the vectors; that of the matrix by default.
        device: Device of the vectors; torch's default device by default.

    Raises:
        OperatorError: A complex matrix, or a symmetric one that is not square.
        TypeError: No matrix.
    """
    known = scipy.sparse.linalg.aslinearoperator(matrix)
    number = np.dtype(known.dtype if known.dtype is not None else np.float64)
    if number.kind == "c":
        raise OperatorError("The matrix is complex.", expected="real numbers", got=str(number))
    if dtype is None:
        dtype = torch.from_numpy(np.zeros(0, number)).dtype if number.kind == "f" else torch.float64
    adjoint = known.matmat if symmetric else known.rmatmat

    def product(multiply: Callable[[Any], Any], pull: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
        return lambda v: attach_one(_by_numpy(multiply, v), [v], lambda u: [_by_numpy(pull, u)])

    forward, backward = product(known.matmat, adjoint), product(adjoint, known.matmat)
    shape = int(known.shape[0]), int(known.shape[1])
    return as_operator(forward, shape, rmatvec=backward, symmetric=symmetric, dtype=dtype, device=device, parameters=())


def _by_numpy(multiply: Callable[[Any], Any], vectors: Tensor) -> Tensor:
    columns = vectors.detach().reshape(vectors.shape[:-1].numel(), vectors.shape[-1]).cpu().numpy().T
    product = torch.from_numpy(np.ascontiguousarray(multiply(columns).T))
    return product.to(vectors).reshape(*vectors.shape[:-1], product.shape[-1])
