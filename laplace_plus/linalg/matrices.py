"""Operators that store their entries, and operators from functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import OperatorError
from laplace_plus.linalg.linear_maps import checked_product, leaves
from laplace_plus.linalg.operators import Operator


class Dense(Operator):
    """A dense matrix.

    Args:
        matrix: ``[m, n]``.
        symmetric: Whether the matrix equals its transpose.

    Raises:
        OperatorError: Not symmetric although declared so.
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False):
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
    """

    symmetric = True

    def __init__(self, entries: Tensor):
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


def _is_symmetric(matrix: Tensor) -> bool:
    if matrix.shape != matrix.mT.shape or not matrix.numel():
        return matrix.shape == matrix.mT.shape
    slack = torch.finfo(matrix.dtype).eps ** 0.5 * float(matrix.abs().max())
    return torch.allclose(matrix, matrix.mT, rtol=0.0, atol=slack)


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
        OperatorError: An operator of another shape.
    """
    rows, columns = (shape, shape) if isinstance(shape, int) else shape
    if isinstance(function, Operator):
        if function.shape != (rows, columns):
            raise OperatorError("The operator has another shape.", expected=f"{(rows, columns)}", got=f"{function}")
        return function
    dtype, device = dtype or torch.get_default_dtype(), torch.empty(0, device=device).device
    tensors = None if parameters is None else tuple(parameters)
    return FunctionOperator(function, (rows, columns), rmatvec, dtype, device, tensors, symmetric)
