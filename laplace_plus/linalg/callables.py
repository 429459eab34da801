"""Operators from functions, and from SciPy's linear operators and matrices."""

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
from laplace_plus.linalg.operators import Operator


def checked_product(
    function: Callable[[Tensor], Tensor], vectors: Tensor, size: int | None, name: str = "operator"
) -> Tensor:
    """``A v`` from a caller's function, with the shape, type and device of the result checked.

    Args:
        function: Maps row-stacked vectors ``[..., n]`` to ``[..., size]``.
        vectors: ``[..., n]``.
        size: Length of the vectors of the result; None if it is not known.
        name: What error messages call the function.

    Raises:
        OperatorError: The function failed, or its result has another shape, type or device.
    """
    # A function ``A @ v`` fails for a stack of vectors, unless it holds exactly n vectors of length n: then the result
    # would be silently transposed. One more row of zeros makes it fail in this case as well.
    guarded = not isinstance(function, Operator) and vectors.ndim == 2 and vectors.shape[0] == vectors.shape[1] > 1
    given = torch.cat([vectors, torch.zeros_like(vectors[:1])]) if guarded else vectors
    version = None if given.is_inference() else given._version
    try:
        product = function(given)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError) or isinstance(function, Operator):
            raise
        raise OperatorError(
            f"The {name} failed: {error}",
            expected=f"a function of row-stacked vectors {tuple(given.shape)} of type {given.dtype}",
            got=type(error).__name__,
            fix="Write it as v @ A.T rather than A @ v, and pass dtype= and device= if these differ.",
        ) from error
    expected = (*given.shape[:-1], "m" if size is None else size)
    fits = isinstance(product, Tensor) and product.ndim == given.ndim and product.shape[:-1] == given.shape[:-1]
    if not fits or product.shape[-1] != (product.shape[-1] if size is None else size):
        raise OperatorError(
            f"The {name} returned another shape.",
            expected=f"{expected} for vectors {tuple(given.shape)}",
            got=str(tuple(product.shape)) if isinstance(product, Tensor) else type(product).__name__,
            fix="An operator maps row-stacked vectors [..., n] to [..., m]; some methods need a square one.",
        )
    if product.dtype != given.dtype or product.device != given.device:
        raise OperatorError(
            f"The {name} returned another number type or device.",
            expected=f"{given.dtype} on {given.device}",
            got=f"{product.dtype} on {product.device}",
            fix="Pass vectors of the operator's type and device, or dtype= (and device=) where the function has them.",
        )
    if version is not None and given._version != version:
        raise overwrites(name, "the vectors that it was given")
    return product[:-1] if guarded else product


def overwrites(name: str, what: str) -> OperatorError:
    """The error for a function that works in place."""
    return OperatorError(
        f"The {name} overwrites {what}.",
        expected="a new tensor for each product",
        got="a tensor that was written to in place",
        fix="Leave out in-place operations such as v.mul_(…), and out=, in the operator.",
    )


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

    def _apply(self, vectors: Tensor) -> Tensor:
        return checked_product(self.function, vectors, self.shape[0])

    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        if self.rmatvec is None:
            return super()._apply_transposed(vectors)
        return checked_product(self.rmatvec, vectors, self.shape[1])

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        if self._parameters is None:
            with torch.enable_grad():
                self._parameters = leaves(self(torch.zeros(1, self.shape[1], dtype=self.dtype, device=self.device)))
        return self._parameters


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
        OperatorError: A bad shape, a symmetric operator that is not square, or an operator of another shape.
    """
    rows, columns = (shape, shape) if isinstance(shape, int) else shape
    if min(rows, columns) < 0 or (symmetric and rows != columns):
        raise OperatorError(
            "The shape of the operator is out of range.",
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
    """The leaf tensors of an autograd graph, in depth-first order."""
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
    """A ``scipy.sparse.linalg.LinearOperator``, sparse matrix or array as an operator; the inverse of ``to_scipy``.

    Products run in numpy, in main memory. They are differentiable in the vectors only, given the transpose.

    Args:
        matrix: A real matrix that ``scipy.sparse.linalg.aslinearoperator`` accepts.
        symmetric: Whether the matrix is symmetric; not checked.
        dtype: Type of the vectors; that of the matrix by default.
        device: Device of the vectors; torch's default device by default.

    Raises:
        OperatorError: A complex matrix, or a symmetric one that is not square.
    """
    known: LinearOperator = aslinearoperator(matrix)
    number = np.dtype(known.dtype if known.dtype is not None else np.float64)
    if number.kind == "c":
        raise OperatorError("The matrix is complex.", expected="real numbers", got=str(number))
    if dtype is None:
        dtype = torch.from_numpy(np.zeros(0, number)).dtype if number.kind == "f" else torch.float64
    adjoint = known.matmat if symmetric else known.rmatmat
    return as_operator(
        lambda v: _Numpy.apply(v, known.matmat, adjoint),
        (int(known.shape[0]), int(known.shape[1])),
        rmatvec=lambda u: _Numpy.apply(u, adjoint, known.matmat),
        symmetric=symmetric,
        dtype=dtype,
        device=device,
        parameters=(),
    )


class _Numpy(torch.autograd.Function):
    """A product with row-stacked vectors in numpy, and its pullback."""

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
