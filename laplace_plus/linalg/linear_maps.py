"""The caller's operator as the algorithms use it: checked, counted and differentiable.

An *operator* is any callable on row-stacked vectors ``[..., n] -> [..., m]``, or an
:class:`~laplace_plus.linalg.operators.Operator`. Every algorithm wraps it in a :class:`LinearMap`, runs without an
autograd graph, and attaches its own derivative with :func:`attach`. No graph of a product is stored: the derivative
multiplies again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, NonFiniteError, OperatorError, UnsupportedError
from laplace_plus.linalg.operators import Operator, pulled_back, unique

P = ParamSpec("P")
R = TypeVar("R")

Matvec = Operator | Callable[[Tensor], Tensor]
"""Anything that maps row-stacked vectors ``[..., n]`` linearly to ``[..., m]``."""


def epsilon(dtype: torch.dtype) -> float:
    """Machine epsilon of products of vectors of that type, which a network may compute in a shorter one."""
    return max(torch.finfo(dtype).eps, checks.PRODUCTS.get())


def agreement(dtype: torch.dtype) -> float:
    """The relative difference that rounding explains between two ways to one number: the square root of epsilon."""
    return epsilon(dtype) ** 0.5


_CHUNK_ENTRIES = 1 << 22
"""Bound on the entries of the vectors that one vector–Jacobian product takes: 16 MiB in float32, at most 32 vectors.
A stack as large as one that was multiplied before is taken whole, because its graph is known to fit."""

NOT_SYMMETRIC = (
    "The operator is not symmetric.",
    "Use arnoldi, arnoldi_function, lsmr, or trace's xtrace; lanczos takes check_symmetry=False where it is rounding.",
)
NOT_TRANSPOSED = (
    "rmatvec is not the transpose of the operator.",
    "Correct rmatvec, or leave it out (None) to let torch differentiate through matvec.",
)


class LinearMap:
    """An operator as the algorithms use it.

    Products are computed without an autograd graph. The tensors that the operator depends on are ``parameters``, an
    operator's own :meth:`~laplace_plus.linalg.operators.Operator.tensors`, or the leaves of the first product's graph.

    ``dtype`` is the type in which the operator multiplies, that of the vectors by default; results have the vectors'
    type. With ``single`` it gets the vectors of a stack one at a time, as ``[n]``. ``matvecs`` counts the vectors
    multiplied so far, with A or its transpose.
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
        dtype: torch.dtype | None = None,
        single: bool = False,
        name: str = "operator",
    ):
        self.n, self.m = n, n if m is None else m
        if isinstance(matvec, Operator):
            rmatvec = matvec.T if rmatvec is None else rmatvec
            parameters = matvec.tensors() if parameters is None else parameters
        self._matvec, self._rmatvec, self.symmetric = matvec, rmatvec, symmetric
        self._dtype, self._single, self._name = dtype, single, name
        self.matvecs = self._widest = 0
        self._tensors: tuple[Tensor, ...] | None = None
        if not torch.is_grad_enabled():
            self._tensors = ()
        elif parameters is not None:
            self._tensors = unique(x for x in parameters if isinstance(x, Tensor) and x.requires_grad)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors requiring gradients that the operator depends on; known after the first product."""
        return self._tensors or ()

    def __call__(self, vectors: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors ``[..., n]``, without an autograd graph."""
        count = vectors.shape[:-1].numel()
        self.matvecs += count
        self._widest = max(self._widest, count)
        if self._tensors is None:
            with torch.enable_grad():
                product = self._multiply(self._matvec, vectors.detach(), self.m)
            self._tensors = leaves(product)
            return product.detach()
        with torch.no_grad():
            return self._multiply(self._matvec, vectors.detach(), self.m)

    def transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u`` for row-stacked vectors ``[..., m]``, without an autograd graph."""
        if self.symmetric:
            return self(vectors)
        self.matvecs += vectors.shape[:-1].numel()
        if self._rmatvec is not None:
            with torch.no_grad():
                return self._multiply(self._rmatvec, vectors.detach(), self.n)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros(*vectors.shape[:-1], self.n, dtype=vectors.dtype, device=vectors.device)
            product = self._multiply(self._matvec, leaf.requires_grad_(), self.m)
            # This graph is new and used once; compiled operators cannot retain theirs.
            return pulled_back(product, [leaf], _recordable(vectors), retain_graph=False)[0].detach()

    def parameter_pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ ⟨u, A v⟩`` in the operator's tensors, for vectors ``[n]`` or stacks ``[..., n]``.

        Large stacks are split: the graph of a product grows with the number of vectors, and must not grow with the
        number of steps of an algorithm. A stack is given to the operator as a stack also where ``single`` is set.
        """
        if not self.tensors or not vectors.numel():
            return tuple(torch.zeros_like(x) for x in self.tensors)
        self.matvecs += vectors.shape[:-1].numel()
        dtype = self._dtype or vectors.dtype
        vectors, cotangents = vectors.detach().to(dtype), cotangents.detach().to(dtype)
        if vectors.ndim == 1:
            return self._parameter_gradients(vectors, cotangents)
        rows = max(self._widest, min(32, _CHUNK_ENTRIES // self.n), 1)
        total: tuple[Tensor, ...] = ()
        for v, u in zip(vectors.flatten(0, -2).split(rows), cotangents.flatten(0, -2).split(rows), strict=True):
            total = add_gradients(total, self._parameter_gradients(v, u))
        return total

    def _parameter_gradients(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.enable_grad():
            product = self._checked(self._matvec, _recordable(vectors), self.m)
            return pulled_back(product, self.tensors, _recordable(cotangents))

    def _multiply(self, function: Matvec, vectors: Tensor, size: int) -> Tensor:
        """A product in the operator's type, for a stack or vector by vector."""
        given = vectors if self._dtype is None else vectors.to(self._dtype)
        if not self._single:
            return self._checked(function, given, size).to(vectors.dtype)
        if len(given) == 1:  # no copy of one
            return self._checked(function, given[0], size)[None].to(vectors.dtype)
        # a callable may return the same tensor each time
        return torch.stack([self._checked(function, vector, size).clone() for vector in given]).to(vectors.dtype)

    def _checked(self, function: Matvec, vectors: Tensor, size: int) -> Tensor:
        product = checked_product(function, vectors, size, self._name)
        _refuse_forward_mode(vectors, product)
        return product


def vectors_of(name: str, vectors: Tensor) -> Tensor:
    """A caller's vectors ``[..., n]``; ``ConfigurationError`` for anything but a tensor of real vectors."""
    stacked = isinstance(vectors, Tensor) and vectors.ndim > 0 and vectors.shape[-1] > 0
    if not stacked or not vectors.is_floating_point():
        what, expected = f"{name} must be a stack of vectors.", "a floating-point tensor [..., n]"
        got = f"{tuple(vectors.shape)} of {vectors.dtype}" if isinstance(vectors, Tensor) else repr(vectors)
        raise ConfigurationError(what, expected=expected, got=got)
    return vectors


def checked_product(
    function: Callable[[Tensor], Tensor], vectors: Tensor, size: int | None, name: str = "operator"
) -> Tensor:
    """``A v``, ``[..., size]``, from a caller's function, with the shape, type and device of the result checked.

    ``size`` may be None; ``name`` is what errors call the function. ``OperatorError`` if it failed or does not fit.
    """
    # A function ``A @ v`` fails for a stack of vectors, unless it holds exactly n vectors of length n: then the result
    # would be silently transposed. One more row of zeros makes it fail in this case as well.
    guarded = not isinstance(function, Operator) and vectors.ndim == 2 and vectors.shape[0] == vectors.shape[1] > 1
    given = torch.cat([vectors, torch.zeros_like(vectors[:1])]) if guarded else vectors
    try:
        product = function(given)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError) or isinstance(function, Operator):
            raise
        expected = f"a function of row-stacked vectors {tuple(given.shape)} of type {given.dtype}"
        fix = "Write it as v @ A.T rather than A @ v, wrap a matrix in linalg.Dense, and give vectors of its type."
        what, got = f"The {name} failed: {error}", type(error).__name__
        raise OperatorError(what, expected=expected, got=got, fix=fix) from error
    is_tensor = isinstance(product, Tensor) and product.ndim == given.ndim
    fits = is_tensor and product.shape == (*given.shape[:-1], product.shape[-1] if size is None else size)
    if not fits or product.dtype != given.dtype or product.device != given.device:
        found = f"{tuple(product.shape)} of {product.dtype} on {product.device}" if isinstance(product, Tensor) else ""
        raise OperatorError(
            f"The {name} returned another shape, number type or device.",
            expected=f"{(*given.shape[:-1], size or 'm')} of {given.dtype} on {given.device} for {tuple(given.shape)}",
            got=found or type(product).__name__,
            fix="An operator maps row-stacked vectors [..., n] to [..., m]; some methods need a square one. Pass "
            "vectors of its type and device, or m=, dtype= and device= where the function has them.",
        )
    return product[:-1] if guarded else product


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


def attach(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    pullback: Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], Sequence[Tensor | None]],
) -> tuple[Tensor, ...]:
    """Attach a derivative to outputs that were computed without a graph; they can be differentiated once.

    ``pullback`` takes the outputs and their cotangents (None where there is none) and returns one gradient for each
    input (or None). It must not hold a reference to the outputs, which would never be freed. It is not called if every
    cotangent is None. Outputs that are not floating point get no gradient.
    """
    _refuse_forward_mode(*inputs)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return tuple(outputs)
    return _Attached.apply(pullback, len(outputs), *outputs, *inputs)


def attach_one(
    output: Tensor, inputs: Sequence[Tensor], pullback: Callable[[Tensor], Sequence[Tensor | None]]
) -> Tensor:
    """:func:`attach` for one output, whose pullback takes the cotangent alone."""
    return attach([output], inputs, lambda _, cotangents: pullback(cast(Tensor, cotangents[0])))[0]


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with autocast disabled, which would round its recurrences to half precision.

    Operators run with autocast disabled as well; one that should multiply in half precision enables it itself.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return wrapped


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
        function: ``v [..., n] -> A v [..., m]``.
        shape: ``(m, n)``, or n for a square operator.
        rmatvec: ``u [..., m] -> Aᵀ u [..., n]``; by default torch differentiates through ``function``.
        symmetric: Whether A is symmetric; not checked.
        dtype: Type of the numbers; torch's default type by default.
        device: Device of the vectors; torch's default device by default.
        parameters: The tensors that A depends on; by default the leaves of the autograd graph of one product.
    """
    shape = (shape, shape) if isinstance(shape, int) else shape
    dtype, device = dtype or torch.get_default_dtype(), torch.empty(0, device=device).device
    tensors = None if parameters is None else tuple(parameters)
    return FunctionOperator(function, shape, rmatvec, dtype, device, tensors, symmetric)


def number_type(
    matvec: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[torch.dtype, torch.device]:
    """The real type and the device in which to draw random vectors for an operator.

    By default those of the operator, of the first floating-point tensor, module or operator that the callable refers
    to, or torch's defaults.
    """
    found = _first_tensor(matvec, 2) if dtype is None or device is None else None
    dtype = getattr(found, "dtype", torch.get_default_dtype()) if dtype is None else dtype
    device = getattr(found, "device", torch.get_default_device()) if device is None else device
    if not dtype.is_floating_point:  # integers would be rounded, silently
        raise ConfigurationError("Vectors need a real floating-point type.", expected="such a dtype", got=str(dtype))
    return dtype, torch.device(device)


def _first_tensor(thing: Any, levels: int) -> Any:
    """An object with the ``dtype`` and ``device`` that a callable works in, searched in its closure and attributes."""
    if isinstance(thing, Operator) or (isinstance(thing, Tensor) and thing.is_floating_point()):
        return thing
    if isinstance(thing, torch.nn.Module):
        return next((x for x in thing.parameters() if x.is_floating_point()), None)
    inside: list[Any] = []
    if not levels or isinstance(thing, ModuleType | Tensor):
        return None
    if inspect.ismethod(thing):
        inside = [thing.__self__, thing.__func__]
    elif inspect.isfunction(thing):
        names = inspect.getclosurevars(thing)
        inside = [*names.nonlocals.values(), *(thing.__defaults__ or ()), *names.globals.values()]
    elif hasattr(thing, "__dict__"):
        inside = list(vars(thing).values())
    found = (_first_tensor(x, levels - 1) for x in inside)
    return next((x for x in found if x is not None), None)


def require_finite(name: str, *tensors: Tensor) -> None:
    """Raise :class:`NonFiniteError` if any entry is NaN or infinite."""
    if not all(bool(torch.isfinite(x).all()) for x in tensors):
        what, expected = f"{name} met NaN or infinity.", "an operator and vectors with finite entries"
        fix = "Look for NaNs in the operator's tensors, or use a wider type if its squares over- or underflow."
        raise NonFiniteError(what, expected=expected, got="a product that is not finite", fix=fix)


def require_adjoint(
    left: Tensor,
    right: Tensor,
    scale: Tensor | float,
    dtype: torch.dtype,
    complaint: tuple[str, str] = NOT_SYMMETRIC,
) -> None:
    """Check ``⟨p, A q⟩``, left, against ``⟨Aᵀ p, q⟩``, right, for a map and its transpose, or for a symmetric map.

    Rounding errors in the type that A multiplies in are relative to ``scale``; where it underflowed, nothing is
    checked. ``OperatorError`` if the numbers differ by more.
    """
    difference, limit = (left - right).abs(), agreement(dtype)
    if bool(((difference > limit * scale) & (scale > 0)).any()):
        expected, got = (
            f"⟨p, A q⟩ = ⟨Aᵀ p, q⟩ to a relative {limit:.0e}",
            f"a difference of {float(difference.max()):.2g}",
        )
        raise OperatorError(complaint[0], expected=expected, got=got, fix=complaint[1])


def add_gradients(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sums of gradients; an empty tuple stands for zero."""
    if not left or not right:
        return left or right
    return tuple(x + y for x, y in zip(left, right, strict=True))


def _recordable(vectors: Tensor) -> Tensor:
    """A copy of vectors that were made in inference mode, which autograd refuses."""
    return vectors.clone() if vectors.is_inference() else vectors


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise :class:`UnsupportedError` where forward-mode differentiation would silently lose a tensor's tangent."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        what, expected = "laplace_plus.linalg has reverse-mode derivatives only.", "torch.autograd.grad, or backward()"
        fix = "Use reverse mode; J v is its own transpose's derivative: differentiate vjp(u) in u."
        raise UnsupportedError(what, expected=expected, got="a tensor with a forward-mode tangent", fix=fix)
