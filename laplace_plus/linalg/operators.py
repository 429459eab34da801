"""Matrices that are only known by their products with vectors, and their algebra.

An operator ``A`` of shape ``(m, n)`` is called on row-stacked vectors ``[..., n]``. Operators can be added, scaled,
multiplied and transposed; no matrix is formed::

    >>> from laplace_plus.linalg.matrices import Dense
    >>> A = Dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> (3.0 * A + A @ A.T).dense()
    tensor([[8., 8.],
            [2., 4.]])

:mod:`laplace_plus.linalg.matrices` has the operators that store their entries, and
:mod:`laplace_plus.linalg.callables` makes operators from functions.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from numbers import Real
from operator import add
from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import OperatorError

_CHUNK_ENTRIES = 2**24
"""Entries of the identity that are multiplied in one call when an operator is formed densely: 64 MiB in float32."""


class Operator(ABC):
    """A linear map given by its products with row-stacked vectors.

    Calling it on ``v [..., n]`` returns ``A v``, ``[..., m]``, for each vector. A plain function of this form can be
    used wherever an operator can; :func:`~laplace_plus.linalg.callables.as_operator` makes it an operator. Products are
    differentiable in the vectors and in :meth:`tensors`.

    ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``-A`` and ``A @ B`` are operators; ``c`` may be a 0-d tensor that
    requires gradients. A sum is symmetric if its terms are symmetric or transposes of each other. A product is
    symmetric if it is a palindrome of transposes, such as ``A.T @ A`` and ``A.T @ S @ A``.

    A subclass implements ``_apply`` and ``tensors``. It overrides ``_transpose`` or ``_apply_transposed`` where that is
    cheaper than differentiating through ``_apply``, and ``_dense`` and ``_diagonal`` where it knows its entries.

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
    _known_transpose: weakref.ReferenceType[Operator] | None = None

    @abstractmethod
    def _apply(self, vectors: Tensor) -> Tensor:
        """``A v`` for checked vectors ``[..., n]``; differentiable in the vectors and in :meth:`tensors`."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the operator depends on; by default those of its operands."""
        return unique(tensor for operand in self.operands for tensor in operand.tensors())

    def _transpose(self) -> Operator:
        """The transpose; not called for symmetric operators."""
        return Transposed(self, self._apply_transposed)

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u`` for ``[..., m]``; by default from automatic differentiation of a product."""
        with torch.enable_grad():  # the pullback of a linear function is the same at every point
            point = vectors.new_zeros(*vectors.shape[:-1], self.shape[1]).requires_grad_()
            product = self._apply(point)
        gradient = None
        if product.requires_grad:
            graph = torch.is_grad_enabled()
            (gradient,) = torch.autograd.grad(product, point, vectors, create_graph=graph, allow_unused=True)
        if gradient is None:
            raise not_differentiable()
        return gradient

    # -- products ------------------------------------------------------------------------------------------------------

    def __call__(self, vectors: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors ``[..., n]``.

        Raises:
            OperatorError: Vectors of another length, type or device.
        """
        if not isinstance(vectors, Tensor):
            raise OperatorError("An operator multiplies tensors.", expected="a tensor", got=type(vectors).__name__)
        if vectors.shape[-1:] != self.shape[1:] or vectors.dtype != self.dtype or vectors.device != self.device:
            raise OperatorError(
                "The vectors do not fit the operator.",
                expected=f"row-stacked vectors [..., {self.shape[1]}] of type {self.dtype} on {self.device}",
                got=f"{tuple(vectors.shape)} of type {vectors.dtype} on {vectors.device}",
            )
        return self._apply(vectors)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The transpose; the same object as long as a reference to it exists."""
        if self.symmetric:
            return self
        known = None if self._known_transpose is None else self._known_transpose()
        if known is None:
            known = self._transpose()
            self._known_transpose = weakref.ref(known)
        return known

    def pullback(self, vectors: Tensor, cotangents: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The derivative of ``Σ ⟨u, A v⟩`` in some of :meth:`tensors`, from one vector–Jacobian product.

        Args:
            vectors: v, ``[..., n]``.
            cotangents: u, ``[..., m]``.
            tensors: The tensors to differentiate in.
        """
        with torch.enable_grad():
            product = self(vectors)
        return torch.autograd.grad(product, tensors, cotangents, retain_graph=True, allow_unused=True)

    # -- entries -------------------------------------------------------------------------------------------------------

    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        """The matrix ``[m, n]``; differentiable. Takes ``min(m, n)`` products unless the structure gives the entries.

        Args:
            chunk_size: Number of unit vectors multiplied in one call; by default as many as have 2²⁴ entries.
        """
        _require_chunk(chunk_size)
        if min(self.shape) == 0:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._dense(chunk_size)

    def _dense(self, chunk_size: int | None) -> Tensor:
        rows, columns = self.shape
        if rows < columns:
            return torch.cat([self.T(unit) for _, unit in self._units(rows, chunk_size)])
        return torch.cat([self(unit) for _, unit in self._units(columns, chunk_size)]).mT

    def diagonal(self, *, chunk_size: int | None = None, limit: int | None = 2**15) -> Tensor:
        """The exact diagonal, ``[min(m, n)]``; differentiable.

        Args:
            chunk_size: As for :meth:`dense`.
            limit: Largest number of products to spend, one per entry, where the structure does not give the diagonal;
                None for no limit.

        Raises:
            OperatorError: The diagonal needs more than ``limit`` products.
        """
        _require_chunk(chunk_size)
        return self._diagonal(chunk_size, limit)

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        size = min(self.shape)
        if limit is not None and size > limit:
            raise OperatorError(
                f"The diagonal of {self!r} takes one product per entry.",
                expected=f"at most {limit} entries",
                got=f"{size}",
                fix="Estimate it with linalg.diagonal, or pass limit=None",
            )
        operator = self.T if self.shape[0] < self.shape[1] else self
        entries = [torch.zeros(0, dtype=self.dtype, device=self.device)]
        for start, unit in self._units(size, chunk_size):
            entries.append(operator(unit)[:, start : start + len(unit)].diagonal())
        return torch.cat(entries)

    def _units(self, size: int, chunk_size: int | None) -> Iterator[tuple[int, Tensor]]:
        """Chunks of rows of the identity, each with the index of its first row."""
        step = chunk_size or max(1, _CHUNK_ENTRIES // max(1, *self.shape))
        for start in range(0, size, step):
            count = min(step, size - start)
            unit = torch.zeros(count, size, dtype=self.dtype, device=self.device)
            unit.diagonal(start).fill_(1.0)
            yield start, unit

    def to_scipy(self) -> LinearOperator:
        """A ``scipy.sparse.linalg.LinearOperator`` of the same shape and number type, for numpy arrays; no gradients.

        A block of vectors is one product. bfloat16, which numpy does not have, becomes float32. Real and imaginary
        parts of complex vectors are multiplied separately.
        """
        dtype = torch.float32 if self.dtype is torch.bfloat16 else self.dtype

        def multiply(operator: Operator, x: Any) -> Any:  # [n, k] -> [m, k]
            if x.dtype.kind == "c":
                return multiply(operator, x.real) + 1j * multiply(operator, x.imag)
            given = torch.tensor(x.T, dtype=operator.dtype, device=operator.device)
            with torch.no_grad():
                return operator(given).to("cpu", dtype).numpy().T

        return LinearOperator(
            self.shape,
            matvec=lambda x: multiply(self, x.reshape(-1, 1))[:, 0],
            rmatvec=lambda x: multiply(self.T, x.reshape(-1, 1))[:, 0],
            matmat=lambda x: multiply(self, x),
            rmatmat=lambda x: multiply(self.T, x),
            dtype=torch.zeros((), dtype=dtype).numpy().dtype,
        )

    # -- algebra -------------------------------------------------------------------------------------------------------

    def __add__(self, other: Operator) -> Operator:
        return Sum([self, other]) if isinstance(other, Operator) else NotImplemented

    def __sub__(self, other: Operator) -> Operator:
        return Sum([self, -other]) if isinstance(other, Operator) else NotImplemented

    def __neg__(self) -> Operator:
        return Scaled(self, -1.0)

    def __mul__(self, factor: float | Tensor) -> Operator:
        return Scaled(self, factor) if _is_scalar(factor) else NotImplemented

    def __rmul__(self, factor: float | Tensor) -> Operator:
        return Scaled(self, factor) if _is_scalar(factor) else NotImplemented

    def __truediv__(self, divisor: float | Tensor) -> Operator:
        return Scaled(self, 1 / divisor) if _is_scalar(divisor) else NotImplemented

    def __matmul__(self, other: Operator) -> Operator:
        return Product([self, other]) if isinstance(other, Operator) else self.__rmatmul__(other)

    def __rmatmul__(self, other: Any) -> Operator:
        if not isinstance(other, Tensor):
            return NotImplemented
        raise OperatorError(
            "@ multiplies operators with operators.",
            expected="an operator on either side",
            got=f"a tensor {tuple(other.shape)}",
            fix="Call A(v) for row-stacked vectors v [..., n], or write Dense(matrix)",
        )

    def __getstate__(self) -> dict[str, Any]:
        # Weak references can be neither copied nor pickled.
        return {key: value for key, value in vars(self).items() if key != "_known_transpose"}

    def _details(self) -> str:
        """Text that ``repr`` adds to size and type; by default the operands."""
        return ", ".join(map(repr, self.operands))

    def __repr__(self) -> str:
        words = [f"{self.shape[0]} × {self.shape[1]}", str(self.dtype).removeprefix("torch.")]
        words += [str(self.device)] if self.device.type != "cpu" else []
        words += ["symmetric"] if self.symmetric else []
        words += [self._details()] if self._details() else []
        return f"{type(self).__name__}({', '.join(words)})"


class Transposed(Operator):
    """The transpose of an operator, given by a function that multiplies with it.

    Args:
        original: The operator.
        apply: ``u [..., m] -> Aᵀ u [..., n]``.
    """

    def __init__(self, original: Operator, apply: Callable[[Tensor], Tensor]):
        self.original, self._function, self.operands = original, apply, (original,)
        self.shape = (original.shape[1], original.shape[0])
        self.dtype, self.device = original.dtype, original.device

    def _apply(self, vectors: Tensor) -> Tensor:
        return self._function(vectors)

    def _transpose(self) -> Operator:
        return self.original

    def _dense(self, chunk_size: int | None) -> Tensor:
        return self.original.dense(chunk_size=chunk_size).mT

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return self.original.diagonal(chunk_size=chunk_size, limit=limit)


class Scaled(Operator):
    """``c A``.

    Args:
        operator: A.
        factor: c: a number or a 0-d tensor.

    Raises:
        OperatorError: c is on another device.
    """

    def __init__(self, operator: Operator, factor: float | Tensor):
        if not isinstance(factor, Tensor):
            factor = float(factor)
            if isinstance(operator, Scaled) and isinstance(operator.factor, float):
                factor = operator.factor * factor
                operator = operator.operator
        elif factor.ndim or factor.device not in (operator.device, torch.device("cpu")):
            raise OperatorError(
                "The factor does not fit the operator.",
                expected=f"a number, or a 0-d tensor on {operator.device}",
                got=f"a tensor {list(factor.shape)} on {factor.device}",
            )
        self.operator: Operator = operator
        self.factor: float | Tensor = factor
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self.symmetric = operator.symmetric

    @property
    def _number(self) -> float | Tensor:
        # A factor of another type must not change the type of the product.
        return self.factor.to(self.dtype) if isinstance(self.factor, Tensor) else self.factor

    def _apply(self, vectors: Tensor) -> Tensor:
        return self.operator(vectors) * self._number

    def _transpose(self) -> Operator:
        return Scaled(self.operator.T, self.factor)

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return unique([*own, *self.operator.tensors()])

    def _dense(self, chunk_size: int | None) -> Tensor:
        return self.operator.dense(chunk_size=chunk_size) * self._number

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return self.operator.diagonal(chunk_size=chunk_size, limit=limit) * self._number

    def _details(self) -> str:
        factor = self.factor.detach() if isinstance(self.factor, Tensor) else self.factor
        return f"{float(factor):g} * {self.operator!r}"


class Sum(Operator):
    """``A + B + …``.

    Args:
        terms: At least one operator; nested sums are flattened.

    Raises:
        OperatorError: Terms of different shapes, types or devices.
    """

    def __init__(self, terms: Sequence[Operator]):
        flat = [part for term in terms for part in (term.terms if isinstance(term, Sum) else (term,))]
        self.terms: tuple[Operator, ...] = tuple(flat)
        first, self.operands = self.terms[0], self.terms
        for other in self.terms[1:]:
            if (other.shape, other.dtype, other.device) != (first.shape, first.dtype, first.device):
                raise _mismatch("The terms of a sum differ.", first, other)
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        remaining = [term for term in self.terms if not term.symmetric]
        while remaining:  # terms that are not symmetric must pair up as transposes
            partner = next((other for other in remaining[1:] if _are_transposes(remaining[0], other)), None)
            if partner is None:
                return
            remaining = [term for term in remaining[1:] if term is not partner]
        self.symmetric = True

    def _apply(self, vectors: Tensor) -> Tensor:
        return reduce(add, [term(vectors) for term in self.terms])

    def _transpose(self) -> Operator:
        return Sum([term.T for term in self.terms])

    def _dense(self, chunk_size: int | None) -> Tensor:
        return reduce(add, [term.dense(chunk_size=chunk_size) for term in self.terms])

    def _diagonal(self, chunk_size: int | None, limit: int | None) -> Tensor:
        return reduce(add, [term.diagonal(chunk_size=chunk_size, limit=limit) for term in self.terms])


class Product(Operator):
    """``A B …``.

    Args:
        factors: At least one operator; nested products are flattened.

    Raises:
        OperatorError: Factors whose shapes do not fit, or of different types or devices.
    """

    def __init__(self, factors: Sequence[Operator]):
        flat = [part for factor in factors for part in (factor.factors if isinstance(factor, Product) else (factor,))]
        self.factors: tuple[Operator, ...] = tuple(flat)
        self.operands = self.factors
        for left, right in zip(self.factors, self.factors[1:], strict=False):
            if (left.shape[1], left.dtype, left.device) != (right.shape[0], right.dtype, right.device):
                raise _mismatch("The factors of a product do not fit.", left, right)
        first, last = self.factors[0], self.factors[-1]
        self.shape, self.dtype, self.device = (first.shape[0], last.shape[1]), first.dtype, first.device
        pairs = zip(self.factors, reversed(self.factors), strict=True)
        self.symmetric = all(_are_transposes(left, right) for left, right in pairs)

    def _apply(self, vectors: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            vectors = factor(vectors)
        return vectors

    def _transpose(self) -> Operator:
        return Product([factor.T for factor in reversed(self.factors)])


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order."""
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _require_chunk(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise OperatorError("chunk_size must be positive.", expected="chunk_size >= 1", got=str(chunk_size))


def _is_scalar(factor: Any) -> bool:
    return isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.ndim == 0)


def _are_transposes(left: Operator, right: Operator) -> bool:
    """Whether two operators are known to be transposes of each other: by identity, entries are not compared."""
    if left is right:
        return left.symmetric
    if isinstance(left, Scaled) and isinstance(right, Scaled):
        return left.factor is right.factor and _are_transposes(left.operator, right.operator)
    pairs = ((left, right), (right, left))
    return any(a._known_transpose is not None and a._known_transpose() is b for a, b in pairs)


def _mismatch(what: str, left: Operator, right: Operator) -> OperatorError:
    return OperatorError(
        what, expected=f"operators that fit {left!r} on {left.device}", got=f"{right!r} on {right.device}"
    )


def not_differentiable() -> OperatorError:
    """The error for a product without an autograd graph to its vectors or tensors."""
    return OperatorError(
        "torch cannot differentiate through the operator.",
        expected="a callable made of torch operations, or its transpose as well",
        got="a product that does not depend on the vector in the autograd graph",
        fix="Pass rmatvec=, or declare the operator symmetric if it is.",
    )
