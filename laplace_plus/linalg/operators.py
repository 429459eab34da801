"""Matrices that are only known by their products, and their algebra.

An operator ``A`` of shape ``(m, n)`` is called on row-stacked vectors ``[..., n]``. Operators add, scale, multiply and
transpose without ever being written out::

    >>> from laplace_plus.linalg.matrices import Dense
    >>> A = Dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> (3.0 * A + A @ A.T).dense()
    tensor([[8., 8.],
            [2., 4.]])

Those with entries of their own are in :mod:`laplace_plus.linalg.matrices`, and functions become operators in
:mod:`laplace_plus.linalg.callables`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import OperatorError

_CHUNK_ENTRIES = 2**24
"""Entries of the identity that are multiplied at a time where an operator is written out."""


class Operator(ABC):
    """A linear map given by its products with row-stacked vectors.

    Calling it on ``v [..., n]`` gives ``A v``, ``[..., m]``, vector by vector; a plain function of that kind serves
    wherever an operator does, and :func:`~laplace_plus.linalg.callables.as_operator` makes an operator of it. Products
    are differentiable in the vectors and in :meth:`tensors`.

    ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``-A`` and ``A @ B`` are operators again; ``c`` may be a 0-d tensor that
    requires gradients. A sum is symmetric if its terms are (or transposes of each other), a product if it reads the
    same backwards, as ``A.T @ A`` and ``A.T @ S @ A`` do.

    Attributes:
        shape: ``(m, n)``.
        dtype: Type of the vectors that it takes and gives.
        device: Where they live.
        symmetric: Whether it is declared to be its own transpose.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool = False

    # numpy must leave ``numpy_number * operator`` to the operator.
    __array_ufunc__ = None
    _known_transpose: weakref.ReferenceType[Operator] | None = None

    @abstractmethod
    def _apply(self, vectors: Tensor) -> Tensor:
        """``A v`` for ``[..., n]``, checked already; differentiable in the vectors and in :meth:`tensors`."""

    @abstractmethod
    def _transpose(self) -> Operator:
        """The transpose of an operator that is not symmetric."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it depends on."""

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
                "These are no vectors for this operator.",
                expected=f"row-stacked vectors [..., {self.shape[1]}] of type {self.dtype} on {self.device}",
                got=f"{tuple(vectors.shape)} of type {vectors.dtype} on {vectors.device}",
            )
        return self._apply(vectors)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The transpose; as long as it is in use, always the same object."""
        if self.symmetric:
            return self
        known = None if self._known_transpose is None else self._known_transpose()
        if known is None:
            known = self._transpose()
            self._known_transpose = weakref.ref(known)
        return known

    def pullback(self, vectors: Tensor, cotangents: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The derivative of ``Σ ⟨u, A v⟩`` in some of :meth:`tensors`, from one vector-Jacobian product.

        Args:
            vectors: v, ``[..., n]``.
            cotangents: u, ``[..., m]``.
            tensors: Which tensors to differentiate in.
        """
        with torch.enable_grad():
            product = self(vectors)
        return torch.autograd.grad(product, tensors, cotangents, retain_graph=True, allow_unused=True)

    # -- written out ---------------------------------------------------------------------------------------------------

    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        """The matrix ``[m, n]``, from ``min(m, n)`` products where the structure does not give it; differentiable.

        Args:
            chunk_size: Number of columns (or rows) that are multiplied at a time; by default as many as make 2²⁴
                entries.
        """
        rows, columns = self.shape
        if min(rows, columns) == 0:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if rows < columns:
            return torch.cat([self.T(unit) for _, unit in self._units(rows, chunk_size)])
        return torch.cat([self(unit) for _, unit in self._units(columns, chunk_size)]).mT

    def diagonal(self, *, chunk_size: int | None = None, limit: int | None = 2**15) -> Tensor:
        """The diagonal, ``[min(m, n)]``: exact, and differentiable.

        Args:
            chunk_size: As for :meth:`dense`.
            limit: Largest size for which it is computed by one product for each entry, where the structure does not
                give it; None for none.

        Raises:
            OperatorError: It would take more products than that.
        """
        size = min(self.shape)
        if limit is not None and size > limit:
            raise OperatorError(
                f"The diagonal of {self!r} takes one product for each entry.",
                expected=f"at most {limit} entries",
                got=f"{size}",
                fix="Estimate it with linalg.diagonal, or pass limit=None",
            )
        wide = self.shape[0] < self.shape[1]
        pieces = [
            (self.T if wide else self)(unit)[:, start : start + len(unit)].diagonal()
            for start, unit in self._units(size, chunk_size)
        ]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=self.dtype, device=self.device)

    def _units(self, size: int, chunk_size: int | None) -> Iterator[tuple[int, Tensor]]:
        """Rows of the identity, some at a time, with the number of the first."""
        if chunk_size is not None and chunk_size < 1:
            raise OperatorError("There is no such chunk.", expected="chunk_size >= 1", got=str(chunk_size))
        step = chunk_size or max(1, _CHUNK_ENTRIES // max(1, *self.shape))
        for start in range(0, size, step):
            count = min(step, size - start)
            unit = torch.zeros(count, size, dtype=self.dtype, device=self.device)
            unit.diagonal(start).fill_(1.0)
            yield start, unit

    def to_scipy(self) -> LinearOperator:
        """A ``scipy.sparse.linalg.LinearOperator`` of the same shape and number type, for arrays in main memory.

        Products with blocks are one call. bfloat16, which numpy does not have, becomes float32. Complex vectors are
        multiplied part by part. There are no gradients.
        """
        dtype = torch.float32 if self.dtype is torch.bfloat16 else self.dtype
        number = torch.zeros((), dtype=dtype).numpy().dtype

        def columns(operator: Operator, x: Any) -> Any:  # [n, k] -> [m, k]
            if x.dtype.kind == "c":
                return columns(operator, x.real) + 1j * columns(operator, x.imag)
            given = torch.tensor(x.T, dtype=operator.dtype, device=operator.device)
            with torch.no_grad():
                product = operator(given)
            return product.to("cpu", dtype).numpy().T

        def matmat(x: Any) -> Any:
            return columns(self, x)

        def rmatmat(x: Any) -> Any:
            return columns(self.T, x)

        return LinearOperator(
            self.shape,
            matvec=lambda x: columns(self, x.reshape(-1, 1))[:, 0],
            rmatvec=lambda x: columns(self.T, x.reshape(-1, 1))[:, 0],
            matmat=matmat,
            rmatmat=rmatmat,
            dtype=number,
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
        if isinstance(other, Tensor):
            raise _only_operators(other)
        return Product([self, other]) if isinstance(other, Operator) else NotImplemented

    def __rmatmul__(self, other: Any) -> Operator:
        if isinstance(other, Tensor):
            raise _only_operators(other)
        return NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        # Weak references can be neither copied nor pickled.
        return {key: value for key, value in vars(self).items() if key != "_known_transpose"}

    def _details(self) -> str:
        """What the representation says besides the size."""
        return ""

    def __repr__(self) -> str:
        words = [f"{self.shape[0]} × {self.shape[1]}", str(self.dtype).removeprefix("torch.")]
        words += [str(self.device)] if self.device.type != "cpu" else []
        words += ["symmetric"] if self.symmetric else []
        words += [self._details()] if self._details() else []
        return f"{type(self).__name__}({', '.join(words)})"


class Transposed(Operator):
    """The transpose of an operator, from a function that multiplies by it.

    Args:
        original: The operator.
        apply: ``u [..., m] -> Aᵀ u [..., n]``.
    """

    def __init__(self, original: Operator, apply: Callable[[Tensor], Tensor]):
        self.original, self._function = original, apply
        self.shape = (original.shape[1], original.shape[0])
        self.dtype, self.device = original.dtype, original.device

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self._function(vectors)

    @override
    def _transpose(self) -> Operator:
        return self.original

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return self.original.tensors()

    @override
    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        return self.original.dense(chunk_size=chunk_size).mT

    @override
    def diagonal(self, *, chunk_size: int | None = None, limit: int | None = 2**15) -> Tensor:
        return self.original.diagonal(chunk_size=chunk_size, limit=limit)

    @override
    def __repr__(self) -> str:
        return f"{self.original!r}.T"


class Scaled(Operator):
    """``c A``.

    Args:
        operator: A.
        factor: c: a number or a 0-d tensor.

    Raises:
        OperatorError: c lives on another device.
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
        # A tensor of another type must not change the type of the product.
        return self.factor.to(self.dtype) if isinstance(self.factor, Tensor) else self.factor

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self.operator(vectors) * self._number

    @override
    def _transpose(self) -> Operator:
        return Scaled(self.operator.T, self.factor)

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return unique([*own, *self.operator.tensors()])

    @override
    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        return self.operator.dense(chunk_size=chunk_size) * self._number

    @override
    def diagonal(self, *, chunk_size: int | None = None, limit: int | None = 2**15) -> Tensor:
        return self.operator.diagonal(chunk_size=chunk_size, limit=limit) * self._number

    @override
    def __repr__(self) -> str:
        factor = float(self.factor.detach() if isinstance(self.factor, Tensor) else self.factor)
        return f"{factor:g} * {_bracketed(self.operator, (Sum,))}"


class Sum(Operator):
    """``A + B + …``.

    Args:
        terms: At least one operator; sums among them are taken apart.

    Raises:
        OperatorError: Terms of different shapes, types or devices.
    """

    def __init__(self, terms: Sequence[Operator]):
        self.terms: tuple[Operator, ...] = tuple(
            part for term in terms for part in (term.terms if isinstance(term, Sum) else (term,))
        )
        first = self.terms[0]
        for other in self.terms[1:]:
            if (other.shape, other.dtype, other.device) != (first.shape, first.dtype, first.device):
                raise _mismatch("The terms of a sum differ.", first, other)
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        remaining = [term for term in self.terms if not term.symmetric]
        while remaining:
            term = remaining.pop()
            partner = next((k for k, other in enumerate(remaining) if _are_transposes(term, other)), None)
            if partner is None:
                break
            remaining.pop(partner)
        else:
            self.symmetric = True

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        total = self.terms[0](vectors)
        for term in self.terms[1:]:
            total = total + term(vectors)
        return total

    @override
    def _transpose(self) -> Operator:
        return Sum([term.T for term in self.terms])

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return unique(tensor for term in self.terms for tensor in term.tensors())

    @override
    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        total = self.terms[0].dense(chunk_size=chunk_size)
        for term in self.terms[1:]:
            total = total + term.dense(chunk_size=chunk_size)
        return total

    @override
    def diagonal(self, *, chunk_size: int | None = None, limit: int | None = 2**15) -> Tensor:
        total = self.terms[0].diagonal(chunk_size=chunk_size, limit=limit)
        for term in self.terms[1:]:
            total = total + term.diagonal(chunk_size=chunk_size, limit=limit)
        return total

    @override
    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


class Product(Operator):
    """``A B …``.

    Args:
        factors: At least one operator; products among them are taken apart.

    Raises:
        OperatorError: Factors whose shapes do not fit, or of different types or devices.
    """

    def __init__(self, factors: Sequence[Operator]):
        self.factors: tuple[Operator, ...] = tuple(
            part for factor in factors for part in (factor.factors if isinstance(factor, Product) else (factor,))
        )
        for left, right in zip(self.factors, self.factors[1:], strict=False):
            if (left.shape[1], left.dtype, left.device) != (right.shape[0], right.dtype, right.device):
                raise _mismatch("The factors of a product do not fit.", left, right)
        first, last = self.factors[0], self.factors[-1]
        self.shape, self.dtype, self.device = (first.shape[0], last.shape[1]), first.dtype, first.device
        pairs = zip(self.factors, reversed(self.factors), strict=True)
        self.symmetric = all(_are_transposes(left, right) for left, right in pairs)

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            vectors = factor(vectors)
        return vectors

    @override
    def _transpose(self) -> Operator:
        return Product([factor.T for factor in reversed(self.factors)])

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return unique(tensor for factor in self.factors for tensor in factor.tensors())

    @override
    def __repr__(self) -> str:
        return " @ ".join(_bracketed(factor, (Sum, Scaled)) for factor in self.factors)


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order."""
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _is_scalar(factor: Any) -> bool:
    return isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.ndim == 0)


def _are_transposes(left: Operator, right: Operator) -> bool:
    """Whether two operators are known to be each other's transposes: by identity, never by comparing entries."""
    if left is right:
        return left.symmetric
    if isinstance(left, Scaled) and isinstance(right, Scaled):
        return left.factor is right.factor and _are_transposes(left.operator, right.operator)
    return _has_transpose(left, right) or _has_transpose(right, left)


def _has_transpose(operator: Operator, candidate: Operator) -> bool:
    known = operator._known_transpose
    return known is not None and known() is candidate


def _bracketed(operator: Operator, kinds: tuple[type, ...]) -> str:
    return f"({operator!r})" if isinstance(operator, kinds) else repr(operator)


def _mismatch(what: str, left: Operator, right: Operator) -> OperatorError:
    return OperatorError(what, expected=f"one that fits {left!r} on {left.device}", got=f"{right!r} on {right.device}")


def _only_operators(other: Tensor) -> OperatorError:
    return OperatorError(
        "@ multiplies operators with operators.",
        expected="an operator on either side",
        got=f"a tensor {tuple(other.shape)}",
        fix="Call A(v) for row-stacked vectors v [..., n], or write Dense(matrix)",
    )
