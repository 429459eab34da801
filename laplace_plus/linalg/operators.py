"""Matrices that are only known by their products with vectors, and their algebra.

An operator ``A`` of shape ``(m, n)`` is called on row-stacked vectors ``[..., n]``. Operators can be added, scaled,
multiplied and transposed; no matrix is formed::

    >>> A = Dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> (3.0 * A + A @ A.T).dense()
    tensor([[8., 8.],
            [2., 4.]])

:class:`Dense`, :class:`Diagonal` and :class:`Identity` store their entries; :func:`~laplace_plus.linalg.as_operator`
makes an operator from a function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce
from numbers import Real
from operator import add
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import OperatorError

_CHUNK_ENTRIES = 2**24
"""Entries of the identity that are multiplied in one call when an operator is formed densely: 64 MiB in float32."""


class Operator(ABC):
    """A linear map given by its products with row-stacked vectors.

    Calling it on ``v [..., n]`` returns ``A v``, ``[..., m]``, for each vector. A plain function of this form can be
    used wherever an operator can. Products are differentiable in the vectors and in :meth:`tensors`.

    ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``-A`` and ``A @ B`` are operators; ``c`` may be a 0-d tensor that
    requires gradients. A sum is symmetric if its terms are. A product is symmetric if it is a palindrome of transposes,
    such as ``A.T @ A`` and ``A.T @ S @ A``.

    A subclass implements ``_apply`` and ``tensors``. It overrides ``_apply_transposed`` where that is cheaper than
    differentiating through ``_apply``, and :meth:`dense` where it knows its entries.

    Attributes:
        shape: ``(m, n)``.
        dtype: Type of the vectors.
        device: Device of the vectors.
        symmetric: Whether the operator is declared to be its own transpose.
        operands: The operators that it is made of.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool = False
    operands: tuple[Operator, ...] = ()

    # Makes numpy call ``Operator.__rmul__`` for ``numpy_number * operator``.
    __array_ufunc__ = None

    @abstractmethod
    def _apply(self, vectors: Tensor) -> Tensor:
        """``A v`` for checked vectors ``[..., n]``; differentiable in the vectors and in :meth:`tensors`."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the operator depends on; by default those of its operands."""
        return unique(tensor for operand in self.operands for tensor in operand.tensors())

    def _transpose(self) -> Operator:
        """The transpose of an operator that is not symmetric."""
        return Transposed(self)

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u`` for ``[..., m]``; by default from automatic differentiation of a product."""
        graph = torch.is_grad_enabled()
        with torch.enable_grad():  # the pullback of a linear function is the same at every point
            point = vectors.new_zeros(*vectors.shape[:-1], self.shape[1]).requires_grad_()
            product = self._apply(point)
        return pulled_back(product, [point], vectors, retain_graph=graph, create_graph=graph)[0]

    # -- products ------------------------------------------------------------------------------------------------------

    def __call__(self, vectors: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors ``[..., n]``; OperatorError: vectors of another length, type or device."""
        if vectors.shape[-1:] != self.shape[1:] or vectors.dtype != self.dtype or vectors.device != self.device:
            expected = f"row-stacked vectors [..., {self.shape[1]}] of type {self.dtype} on {self.device}"
            got = f"{tuple(vectors.shape)} of type {vectors.dtype} on {vectors.device}"
            raise OperatorError("The vectors do not fit the operator.", expected=expected, got=got)
        return self._apply(vectors)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The transpose."""
        return self if self.symmetric else self._transpose()

    # -- entries -------------------------------------------------------------------------------------------------------

    def dense(self) -> Tensor:
        """The matrix ``[m, n]``, from ``min(m, n)`` products unless the structure gives the entries; differentiable."""
        checks.zeros("The operator", *self.shape, torch.empty(0, dtype=self.dtype, device=self.device))
        size, wide, rows = min(self.shape), self.shape[0] < self.shape[1], []
        for some in torch.arange(size, device=self.device).split(max(1, _CHUNK_ENTRIES // max(self.shape))):
            unit = torch.zeros(len(some), size, dtype=self.dtype, device=self.device)
            unit[torch.arange(len(some)), some] = 1.0
            rows.append(self.T(unit) if wide else self(unit))
        return torch.cat(rows) if wide else torch.cat(rows).mT

    # -- algebra -------------------------------------------------------------------------------------------------------

    def __add__(self, other: Operator) -> Operator:
        return Sum([self, other]) if isinstance(other, Operator) else NotImplemented

    def __sub__(self, other: Operator) -> Operator:
        return Sum([self, -other]) if isinstance(other, Operator) else NotImplemented

    def __neg__(self) -> Operator:
        return Scaled(self, -1.0)

    def __mul__(self, factor: float | Tensor) -> Operator:
        return Scaled(self, factor) if _is_scalar(factor) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Operator:
        return Scaled(self, 1 / divisor) if _is_scalar(divisor) else NotImplemented

    def __matmul__(self, other: Operator) -> Operator:
        return Product([self, other]) if isinstance(other, Operator) else NotImplemented

    def _details(self) -> str:
        """Text that ``repr`` adds to size and type."""
        return ""

    def __repr__(self) -> str:
        words = [f"{self.shape[0]} × {self.shape[1]}", str(self.dtype).removeprefix("torch."), str(self.device)]
        words += ["symmetric"] * self.symmetric + [self._details()] * bool(self._details())
        return f"{type(self).__name__}({', '.join(words)})"


class Transposed(Operator):
    """The transpose of an operator; its own transpose is the original."""

    def __init__(self, original: Operator):
        self.original, self.operands = original, (original,)
        self.shape = (original.shape[1], original.shape[0])
        self.dtype, self.device = original.dtype, original.device

    def _apply(self, vectors: Tensor) -> Tensor:
        return self.original._apply_transposed(vectors)

    def _transpose(self) -> Operator:
        return self.original

    @override
    def dense(self) -> Tensor:
        return self.original.dense().mT


class Scaled(Operator):
    """``c A`` for a number or 0-d tensor c."""

    def __init__(self, operator: Operator, factor: float | Tensor):
        self.operator, self.operands = operator, (operator,)
        self.factor = factor if isinstance(factor, Tensor) else float(factor)
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self.symmetric = operator.symmetric

    @property
    def _number(self) -> float | Tensor:
        # A factor of another type must not change the type of the product.
        return self.factor.to(self.dtype) if isinstance(self.factor, Tensor) else self.factor

    def _apply(self, vectors: Tensor) -> Tensor:
        return self.operator(vectors) * self._number

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return self.operator.T(vectors) * self._number

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return unique([*own, *self.operator.tensors()])


class Sum(Operator):
    """``A + B + …``; nested sums are flattened. OperatorError if shapes, types or devices differ."""

    def __init__(self, terms: Sequence[Operator]):
        self.operands = tuple(x for term in terms for x in (term.operands if isinstance(term, Sum) else (term,)))
        first = self.operands[0]
        for other in self.operands:
            if (other.shape, other.dtype, other.device) != (first.shape, first.dtype, first.device):
                raise OperatorError("The terms of a sum do not fit.", expected=repr(first), got=repr(other))
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        self.symmetric = all(term.symmetric for term in self.operands)

    def _apply(self, vectors: Tensor) -> Tensor:
        return reduce(add, [term(vectors) for term in self.operands])

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return reduce(add, [term.T(vectors) for term in self.operands])


class Product(Operator):
    """``A B …``; nested products are flattened."""

    def __init__(self, factors: Sequence[Operator]):
        self.operands = tuple(x for each in factors for x in (each.operands if isinstance(each, Product) else (each,)))
        first, last = self.operands[0], self.operands[-1]
        self.shape, self.dtype, self.device = (first.shape[0], last.shape[1]), first.dtype, first.device
        pairs = zip(self.operands, reversed(self.operands), strict=True)
        self.symmetric = all(_are_transposes(left, right) for left, right in pairs)

    def _apply(self, vectors: Tensor) -> Tensor:
        for factor in reversed(self.operands):
            vectors = factor(vectors)
        return vectors

    def _transpose(self) -> Operator:
        return Product([factor.T for factor in reversed(self.operands)])

    @override
    def dense(self) -> Tensor:
        matrix = self.operands[-1].dense()
        for factor in reversed(self.operands[:-1]):
            matrix = factor(matrix.mT).mT
        return matrix


class Dense(Operator):
    """A dense matrix.

    Args:
        matrix: ``[m, n]``.
        symmetric: Whether the matrix equals its transpose.

    Raises:
        OperatorError: Not symmetric although declared so.
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False):
        slack = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.detach().abs().max() if symmetric else 0.0
        if symmetric and (matrix.shape != matrix.mT.shape or bool(((matrix - matrix.mT).abs() > slack).any())):
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
        return torch.diag(self.entries)


class Identity(Diagonal):
    """The identity; ``c * Identity(n)`` is ``c I``.

    Args:
        n: Size.
        dtype: Type of the vectors; torch's default type by default.
        device: Device of the vectors; torch's default device by default.
    """

    def __init__(self, n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        Diagonal.__init__(self, torch.ones((), dtype=dtype, device=device).expand(n))


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order."""
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _is_scalar(factor: Any) -> bool:
    return isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.ndim == 0)


def _are_transposes(left: Operator, right: Operator) -> bool:
    """Whether two operators are known to be transposes of each other: by identity, entries are not compared."""
    if left is right:
        return left.symmetric
    return any(isinstance(a, Transposed) and a.original is b for a, b in ((left, right), (right, left)))


def pulled_back(
    product: Tensor,
    inputs: Sequence[Tensor],
    cotangents: Tensor,
    *,
    retain_graph: bool = True,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """A vector–Jacobian product; zeros for tensors that the product does not depend on.

    By default the graph is retained: it may reach into a graph of the caller, which is used again.
    """
    gradients: tuple[Tensor | None, ...] = ()
    if product.requires_grad:
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": True}
        gradients = torch.autograd.grad(product, inputs, cotangents.to(product.dtype), **options)
    if all(gradient is None for gradient in gradients):
        expected = "a callable made of torch operations, or its transpose as well"
        got = "a product that does not depend on the vector in the autograd graph"
        fix = "Pass rmatvec=, or declare the operator symmetric if it is."
        raise OperatorError("torch cannot differentiate through the operator.", expected=expected, got=got, fix=fix)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True))
