"""Functions, and the operators of scipy, made operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from laplace_plus.errors import OperatorError
from laplace_plus.linalg.operators import Operator, Transposed


class FunctionOperator(Operator):
    """A function as an operator; made by :func:`as_operator`."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        rmatvec: Callable[[Tensor], Tensor] | None,
        symmetric: bool,
        dtype: torch.dtype,
        device: torch.device,
        parameters: tuple[Tensor, ...] | None,
    ):
        self.function, self.rmatvec = function, rmatvec
        self.shape, self.dtype, self.device, self.symmetric = shape, dtype, device, symmetric
        self._parameters = parameters

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self._checked(self.function, vectors, self.shape[0])

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        if self.rmatvec is not None:
            return self._checked(self.rmatvec, vectors, self.shape[1])
        # The pullback of a linear function is the same wherever it is taken.
        with torch.enable_grad():
            point = vectors.new_zeros(*vectors.shape[:-1], self.shape[1]).requires_grad_()
            product = self._apply(point)
        gradient = None
        if product.requires_grad:
            (gradient,) = torch.autograd.grad(
                product, point, vectors, create_graph=torch.is_grad_enabled(), allow_unused=True
            )
        if gradient is None:
            raise OperatorError(
                "torch cannot differentiate through the operator.",
                expected="a function made of torch operations, or its transpose as well",
                got="a product that is cut off from the vector",
                fix="Pass rmatvec=, or declare the operator symmetric if it is.",
            )
        return gradient

    @override
    def _transpose(self) -> Operator:
        return Transposed(self, self._apply_transposed)

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        if self._parameters is None:
            with torch.enable_grad():
                self._parameters = leaves(self(torch.zeros(1, self.shape[1], dtype=self.dtype, device=self.device)))
        return self._parameters

    def _checked(self, function: Callable[[Tensor], Tensor], vectors: Tensor, size: int) -> Tensor:
        # ``A @ v`` instead of ``v @ Aᵀ`` fails for a stack, except for a stack of n vectors of length n, where it would
        # be silently wrong; one row of zeros more makes it fail there, too.
        guarded = vectors.ndim == 2 and vectors.shape[0] == vectors.shape[1] > 1
        given = torch.cat([vectors, torch.zeros_like(vectors[:1])]) if guarded else vectors
        try:
            product = function(given)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise OperatorError(
                f"The operator failed: {error}",
                expected=f"a function of row-stacked vectors {tuple(given.shape)} of type {given.dtype}",
                got=type(error).__name__,
                fix="Write it as v @ A.T rather than A @ v, and pass dtype= and device= if these differ.",
            ) from error
        wanted = (*given.shape[:-1], size)
        if not isinstance(product, Tensor):
            raise OperatorError("The operator gave no tensor.", expected="a tensor", got=type(product).__name__)
        if (tuple(product.shape), product.dtype, product.device) != (wanted, self.dtype, self.device):
            raise OperatorError(
                "The operator gave something else than it was declared to.",
                expected=f"{wanted} of type {self.dtype} on {self.device} for vectors {tuple(given.shape)}",
                got=f"{tuple(product.shape)} of type {product.dtype} on {product.device}",
                fix="Map row-stacked vectors [..., n] to [..., m], and pass dtype= and device= of the operator.",
            )
        return product[:-1] if guarded else product


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
    """A linear function of row-stacked vectors, made an operator.

    Args:
        function: ``v [..., n] -> A v [..., m]``; an operator of that shape is returned as it is.
        shape: ``(m, n)``, or n for a square one.
        rmatvec: ``u [..., m] -> Aᵀ u [..., n]``; by default torch differentiates through ``function``.
        symmetric: Whether A is its own transpose, which is taken on trust.
        dtype: Type of the numbers; torch's default type by default.
        device: Where they live; torch's default device by default.
        parameters: The tensors that A depends on; by default the leaves that the autograd graph of one product leads
            to.

    Raises:
        OperatorError: A shape that is none, a symmetric operator that is not square, or an operator of another shape.
    """
    rows, columns = (shape, shape) if isinstance(shape, int) else shape
    if min(rows, columns) < 0 or (symmetric and rows != columns):
        raise OperatorError(
            "There is no such operator.",
            expected="sizes that are not negative" + (", and equal as it is symmetric" if symmetric else ""),
            got=f"{rows} × {columns}",
        )
    if isinstance(function, Operator):
        if function.shape != (rows, columns):
            raise OperatorError("The operator has another shape.", expected=f"{(rows, columns)}", got=f"{function}")
        return function
    return FunctionOperator(
        function,
        (rows, columns),
        rmatvec,
        symmetric,
        torch.get_default_dtype() if dtype is None else dtype,
        torch.empty(0, device=device).device,
        None if parameters is None else tuple(parameters),
    )


def leaves(product: Tensor) -> tuple[Tensor, ...]:
    """The leaf tensors that an autograd graph leads to, in the order of a depth-first walk."""
    found: dict[int, Tensor] = {}
    stack, seen = [product.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        stack.extend(following for following, _ in reversed(node.next_functions))
    return tuple(found.values())


def from_scipy(
    matrix: Any, *, symmetric: bool = False, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Operator:
    """A ``scipy.sparse.linalg.LinearOperator``, sparse matrix or array as an operator; the reverse of ``to_scipy``.

    Products run in numpy, in main memory. They are differentiable in the vectors, where the transpose is known, and in
    nothing else.

    Args:
        matrix: Anything that ``scipy.sparse.linalg.aslinearoperator`` takes, of real numbers.
        symmetric: Whether it is its own transpose, which is taken on trust.
        dtype: Type of the vectors; that of the matrix by default.
        device: Where the vectors live; torch's default device by default.

    Raises:
        OperatorError: A complex matrix, or a symmetric one that is not square.
    """
    known: LinearOperator = aslinearoperator(matrix)
    number = np.dtype(known.dtype if known.dtype is not None else np.float64)
    if number.kind == "c":
        raise OperatorError("The matrix is complex.", expected="real numbers", got=str(number))
    if dtype is None:
        dtype = torch.from_numpy(np.zeros(0, number)).dtype if number.kind == "f" else torch.float64
    rows, columns = (int(size) for size in known.shape)
    if symmetric:
        return as_operator(
            lambda v: _Numpy.apply(v, known.matmat, known.matmat),
            (rows, columns),
            symmetric=True,
            dtype=dtype,
            device=device,
            parameters=(),
        )
    return as_operator(
        lambda v: _Numpy.apply(v, known.matmat, known.rmatmat),
        (rows, columns),
        rmatvec=lambda u: _Numpy.apply(u, known.rmatmat, known.matmat),
        dtype=dtype,
        device=device,
        parameters=(),
    )


class _Numpy(torch.autograd.Function):
    """A product with row-stacked vectors in numpy, whose pullback is another one."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, multiply: Any, multiply_transposed: Any) -> Tensor:
        ctx.multiply_transposed = multiply_transposed
        return _through_numpy(vectors, multiply)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None, None]:
        return _through_numpy(cotangents, ctx.multiply_transposed), None, None


def _through_numpy(vectors: Tensor, multiply: Callable[[Any], Any]) -> Tensor:
    columns = vectors.detach().reshape(vectors.shape[:-1].numel(), vectors.shape[-1]).cpu().numpy().T
    product = torch.from_numpy(np.ascontiguousarray(multiply(columns).T))
    return product.to(vectors).reshape(*vectors.shape[:-1], product.shape[-1])
