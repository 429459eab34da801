"""The caller's operator, made ready for an algorithm: checked, counted and differentiable.

An *operator* is any callable on row-stacked vectors ``[..., n] -> [..., m]``, or an
:class:`~laplace_plus.linalg.operators.Operator`. Every algorithm wraps it in a :class:`LinearMap`, runs without
building an autograd graph, and attaches its own derivative with :func:`attach`. No graph of a product is ever stored:
the derivative multiplies again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from laplace_plus.errors import ConfigurationError, NonFiniteError, OperatorError, UnsupportedError
from laplace_plus.linalg.arguments import without_autocast
from laplace_plus.linalg.callables import leaves
from laplace_plus.linalg.operators import Operator

Matvec = Operator | Callable[[Tensor], Tensor]
"""Anything that maps row-stacked vectors ``[..., n]`` linearly to ``[..., m]``."""

_TOGETHER = 1 << 22
"""Entries of the vectors that are differentiated together, up to 32 of them; or as many as were multiplied together."""


class LinearMap:
    """An operator as the algorithms see it.

    Products are computed without an autograd graph. The tensors that the operator depends on are ``parameters``, or an
    operator's own :meth:`~laplace_plus.linalg.operators.Operator.tensors`, or else the leaves of the first product's
    autograd graph.

    Args:
        matvec: The operator.
        n: Length of the vectors it takes.
        m: Length of the vectors it gives; n by default.
        rmatvec: Its transpose, where torch cannot differentiate through ``matvec``.
        symmetric: Whether it is its own transpose.
        parameters: The tensors it depends on, where they are not leaves or not to be looked for.

    Attributes:
        matvecs: Number of vectors multiplied so far, in either direction.

    Raises:
        OperatorError: An operator of another shape.
    """

    def __init__(
        self,
        matvec: Matvec,
        n: int,
        *,
        m: int | None = None,
        rmatvec: Matvec | None = None,
        symmetric: bool = False,
        parameters: Iterable[Tensor] | None = None,
    ):
        self.n, self.m = n, n if m is None else m
        self._matvec, self._rmatvec, self.symmetric = matvec, rmatvec, symmetric
        self.matvecs = self._widest = 0
        self._tensors: tuple[Tensor, ...] | None = None
        self._last: tuple[weakref.ReferenceType[Tensor], int] | None = None
        require_callable(matvec, rmatvec)
        if isinstance(matvec, Operator):
            if matvec.shape != (self.m, self.n):
                raise OperatorError(
                    "The operator has another shape.",
                    expected=f"an operator {self.m} × {self.n}",
                    got=f"one of {matvec.shape[0]} × {matvec.shape[1]}",
                )
            if rmatvec is None:
                self._rmatvec = matvec.T
        if not torch.is_grad_enabled():
            self._tensors = ()
        elif parameters is not None:
            self._tensors = _requiring_grad(parameters)
        elif isinstance(matvec, Operator):
            self._tensors = _requiring_grad(matvec.tensors())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors requiring gradients that the operator depends on; known after the first product."""
        return self._tensors or ()

    def __call__(self, vectors: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors ``[..., n]``, without an autograd graph.

        Raises:
            OperatorError: The operator gave something of another shape, type or device.
        """
        count = vectors.shape[:-1].numel()
        self.matvecs += count
        self._widest = max(self._widest, count)
        if self._tensors is None:
            with torch.enable_grad():
                product = self._product(vectors.detach())
            self._tensors = leaves(product)
            return product.detach()
        with torch.no_grad():
            return self._product(vectors.detach())

    def transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u`` for row-stacked vectors ``[..., m]``, without an autograd graph."""
        if self.symmetric:
            return self(vectors)
        self.matvecs += vectors.shape[:-1].numel()
        if self._rmatvec is not None:
            with torch.no_grad():
                return self._checked(self._rmatvec, vectors.detach(), self.m, self.n)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros(*vectors.shape[:-1], self.n, dtype=vectors.dtype, device=vectors.device)
            product = self._product(leaf.requires_grad_())
            # All of this graph is new, and compiled operators cannot keep theirs.
            return _gradients(product, [leaf], _recordable(vectors), retain_graph=False)[0]

    def pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``Aᵀ u`` and the derivative of ``Σ ⟨u, A v⟩`` in the operator's tensors, from one vector-Jacobian product.

        Args:
            vectors: v, ``[..., n]``.
            cotangents: u, ``[..., m]``.

        Returns:
            ``[..., n]``, and one gradient for each of :attr:`tensors`.

        Raises:
            OperatorError: torch cannot differentiate through the operator, and there is no transpose.
        """
        if not self.tensors and (self.symmetric or self._rmatvec is not None):
            return self.transposed(cotangents), ()
        self.matvecs += vectors.shape[:-1].numel()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = _recordable(vectors.detach()).requires_grad_()
            product = self._product(leaf)
            inputs = [*self.tensors] if self.symmetric or self._rmatvec is not None else [leaf, *self.tensors]
            gradients = _gradients(product, inputs, _recordable(cotangents))
        if len(inputs) == len(self.tensors):
            return self.transposed(cotangents), gradients
        first, *others = gradients
        return first, tuple(others)

    def parameter_pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ ⟨u, A v⟩`` in the operator's tensors alone; see :meth:`pullback`.

        Stacks are taken in parts: the graph of a product may grow with the number of vectors, and must not grow with
        the number of steps that an algorithm took.
        """
        if not self.tensors:
            return ()
        self.matvecs += vectors.shape[:-1].numel()
        vectors, cotangents = vectors.detach(), cotangents.detach()
        if vectors.ndim == 1:
            return self._parameter_gradients(vectors, cotangents)
        rows = max(self._widest, min(32, _TOGETHER // self.n), 1)
        parts = zip(vectors.flatten(0, -2).split(rows), cotangents.flatten(0, -2).split(rows), strict=True)
        total: tuple[Tensor, ...] = ()
        for part in parts:
            gradients = self._parameter_gradients(*part)
            total = tuple(x + y for x, y in zip(total, gradients, strict=True)) if total else gradients
        return total

    def _parameter_gradients(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self._matvec, Operator):
            return _filled(self._matvec.pullback(vectors, cotangents, self.tensors), self.tensors)
        with torch.inference_mode(False), torch.enable_grad():
            product = self._product(_recordable(vectors))
            return _gradients(product, self.tensors, _recordable(cotangents))

    def _product(self, vectors: Tensor) -> Tensor:
        return self._checked(self._matvec, vectors, self.n, self.m)

    def _checked(self, function: Matvec, vectors: Tensor, n: int, m: int) -> Tensor:
        # ``A @ v`` instead of ``v @ Aᵀ`` is right for one vector and fails for a stack, except for a stack of n
        # vectors of length n, where it would be silently wrong; one row of zeros more makes it fail there, too.
        guarded = not isinstance(function, Operator) and vectors.ndim == 2 and vectors.shape[0] == n > 1
        given = torch.cat([vectors, vectors.new_zeros(1, n)]) if guarded else vectors
        version = None if given.is_inference() else given._version
        try:
            product = function(given)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(function, Operator):
                raise
            raise OperatorError(
                f"The operator failed: {error}",
                expected=f"a function of row-stacked vectors {tuple(given.shape)} of type {given.dtype}",
                got=f"{type(error).__name__}",
                fix="Write it as v @ A.T rather than A @ v, and pass dtype= and device= if these differ.",
            ) from error
        if not isinstance(product, Tensor) or product.shape != (*given.shape[:-1], m):
            got = tuple(product.shape) if isinstance(product, Tensor) else type(product).__name__
            raise OperatorError(
                "The operator gave something of another shape.",
                expected=f"{(*given.shape[:-1], m)} for vectors {tuple(given.shape)}",
                got=str(got),
                fix="An operator maps row-stacked vectors [..., n] to [..., m]; this method may need a square one.",
            )
        if product.dtype != given.dtype or product.device != given.device:
            raise OperatorError(
                "The operator gave another type of numbers.",
                expected=f"{given.dtype} on {given.device}",
                got=f"{product.dtype} on {product.device}",
                fix="Give vectors of the operator's type and device, or pass dtype= (and device=) where there is one.",
            )
        self._require_fresh(given, version, product)
        _refuse_forward_mode(vectors, product)
        return product[:-1] if guarded else product

    def _require_fresh(self, given: Tensor, version: int | None, product: Tensor) -> None:
        """Refuse an operator that writes into what it was given, or into what it gave before."""
        overwritten = ""
        if version is not None and given._version != version:
            overwritten = "the vectors that it was given"
        if not product.is_inference() and not product.is_set_to(given):
            last, before = self._last or (lambda: None, 0)
            earlier = last()
            if earlier is not None and earlier.is_set_to(product) and earlier._version != before:
                overwritten = "its earlier product"
            self._last = (weakref.ref(product), product._version)
        if overwritten:
            raise OperatorError(
                f"The operator overwrites {overwritten}.",
                expected="a new tensor for each product",
                got="a tensor that was written to in place",
                fix="Leave out in-place operations such as v.mul_(…), and out=, in the operator.",
            )


def require_callable(*functions: Matvec | None) -> None:
    """Check an operator and its transpose, where there is one.

    Raises:
        OperatorError: One of them can not be called.
    """
    for function in functions:
        if function is not None and not callable(function):
            raise OperatorError(
                "This is no operator.",
                expected="a callable on row-stacked vectors [..., n], or an operator of laplace_plus.linalg",
                got=type(function).__name__,
                fix="Wrap a matrix: linalg.Dense(matrix).",
            )


def attach(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    pullback: Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], Sequence[Tensor | None]],
) -> tuple[Tensor, ...]:
    """Give results that were computed without a graph a derivative of their own.

    Args:
        outputs: What was computed. Those that are not floating point get no gradient.
        inputs: What it depends on.
        pullback: Takes the outputs and their cotangents (None where there is none) and returns one gradient for each
            input (or None). It must not hold on to the outputs itself, which would keep them alive for ever.

    Returns:
        The outputs, part of the autograd graph if any input is. They can be differentiated once.
    """
    _refuse_forward_mode(*inputs)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return tuple(outputs)
    return _Attached.apply(pullback, len(outputs), *outputs, *inputs)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pullback: Any, n_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(x.view_as(x) for x in tensors[:n_outputs])
        ctx.pullback, ctx.n_outputs = pullback, n_outputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*outputs)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        gradients = without_autocast(ctx.pullback)(ctx.saved_tensors, cotangents)
        return (None, None, *[None] * ctx.n_outputs, *gradients)


def number_type(
    matvec: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[torch.dtype, torch.device]:
    """The type and device in which to draw random vectors for an operator.

    By default those of the operator, or of the first floating-point tensor (or module, or operator) that the callable
    refers to, or torch's defaults.

    Raises:
        ConfigurationError: A type other than of real floating-point numbers.
    """
    found = None if dtype is not None and device is not None else _first_tensor(matvec, 2)
    if dtype is None:
        dtype = torch.get_default_dtype() if found is None else found.dtype
    if device is None:
        device = torch.get_default_device() if found is None else found.device
    if not dtype.is_floating_point:
        raise ConfigurationError("Vectors are real floating-point numbers.", expected="such a dtype", got=str(dtype))
    return dtype, torch.device(device)


def _first_tensor(thing: Any, levels: int) -> Any:
    """Something with the ``dtype`` and ``device`` that a callable works in."""
    if isinstance(thing, Operator):
        return thing
    if isinstance(thing, Tensor):
        return thing if thing.is_floating_point() else None
    if isinstance(thing, torch.nn.Module):
        return next((p for p in thing.parameters() if p.is_floating_point()), None)
    if levels == 0:
        return None
    inner: list[Any] = []
    if isinstance(thing, partial):
        inner = [*thing.args, *thing.keywords.values(), thing.func]
    elif inspect.ismethod(thing):
        inner = [thing.__self__, thing.__func__]
    elif inspect.isfunction(thing):
        try:
            names = inspect.getclosurevars(thing)
        except (TypeError, ValueError):
            return None
        defaults = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        inner = [*names.nonlocals.values(), *defaults, *names.globals.values()]
    elif not isinstance(thing, ModuleType) and hasattr(thing, "__dict__"):
        inner = list(vars(thing).values())
    found = (_first_tensor(x, levels - 1) for x in inner)
    return next((x for x in found if x is not None), None)


def require_finite(name: str, *tensors: Tensor) -> None:
    """Raise :class:`NonFiniteError` if any result is NaN or infinite."""
    if not all(bool(torch.isfinite(x).all()) for x in tensors):
        raise NonFiniteError(
            f"{name} met NaN or infinity.",
            expected="an operator and vectors with finite entries",
            got="a product that is not finite",
            fix="Look for NaNs in the operator's tensors, or use a wider type if its squares over- or underflow.",
        )


def _requiring_grad(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor that requires gradients, once."""
    unique = {id(x): x for x in tensors if isinstance(x, Tensor) and x.requires_grad}
    return tuple(unique.values())


def _filled(gradients: Iterable[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) if g is None else g.detach() for g, x in zip(gradients, tensors, strict=True))


def _gradients(
    product: Tensor, inputs: Sequence[Tensor], cotangents: Tensor, *, retain_graph: bool = True
) -> tuple[Tensor, ...]:
    """A vector-Jacobian product; zeros for tensors that the product does not depend on.

    The graph may reach back to what the caller made before, and be walked again: then it is to be retained.

    Raises:
        OperatorError: The product is cut off from all of them, or torch failed.
    """
    if not product.requires_grad:
        raise _not_differentiable()
    cotangents = cotangents.detach().to(product.dtype)
    try:
        gradients = torch.autograd.grad(product, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise OperatorError(
            f"torch failed to differentiate through the operator: {error}",
            expected="a callable whose vector–Jacobian products can be taken more than once",
            got="a RuntimeError",
            fix="Pass a callable that is not compiled, or compile it with torch._functorch.config.donated_buffer off.",
        ) from error
    if all(gradient is None for gradient in gradients):
        raise _not_differentiable()
    return _filled(gradients, inputs)


def _recordable(vectors: Tensor) -> Tensor:
    """Vectors that autograd takes: a copy of those that were made in inference mode."""
    return vectors.clone() if vectors.is_inference() else vectors


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise where forward-mode differentiation would silently lose a tangent.

    Raises:
        UnsupportedError: A tensor carries a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            "The derivatives of this layer are reverse-mode ones.",
            expected="torch.autograd.grad, or backward()",
            got="a tensor with a tangent of forward mode",
            fix="Use reverse mode; J v is its own transpose's derivative: differentiate vjp(u) in u.",
        )


def _not_differentiable() -> OperatorError:
    return OperatorError(
        "torch cannot differentiate through the operator.",
        expected="a callable made of torch operations, or its transpose as well",
        got="a product that is cut off from the vector",
        fix="Pass rmatvec=, or declare the operator symmetric if it is.",
    )
