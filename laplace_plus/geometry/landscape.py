"""Loss surfaces ``θ ↦ (θ, L(θ))``: values, gradients and Hessian-vector products of L at many points together.

:class:`FunctionLandscape` is any function of the parameter vector, and
:class:`~laplace_plus.geometry.LossLandscape` a network's loss.

The derivatives at one point are mapped over the points (``torch.func.vmap``). Where many gradients on batches of one
shape are to come, the mapped gradient is traced once (``make_fx``) and runs without the Python code around its
operations: 1.6 to 2.4 times as fast in an exploration of trained networks with two hidden layers of 32 units. Neither
works for every network. Each is therefore compared with plain backward passes at its first use.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from laplace_plus.errors import UnsupportedError
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch

T = TypeVar("T")

Scalar = Callable[[Tensor], Tensor]
"""From ``[P]`` to a 0-d tensor."""

_MANY = 100
"""Number of gradients from which tracing pays: it takes about as long as 100 gradients of a small network."""

_SHAPES = 8
"""Number of batch shapes that are traced: a loader of equal batches has two, and tracing many would cost more than it
saves."""


class Derivatives(NamedTuple):
    """Derivatives of a function L at several points, along one vector each.

    Attributes:
        gradients: ``∇L``, ``[k, P]``.
        products: ``∇²L u``, ``[k, P]``.
    """

    gradients: Tensor
    products: Tensor


class Landscape(ABC):
    """A function L of the parameter vector, with its first two derivatives."""

    @abstractmethod
    def value(self, points: Tensor) -> Tensor:
        """``L`` at each of ``points [k, P]``, ``[k]``."""

    @abstractmethod
    def gradient(self, points: Tensor) -> Tensor:
        """``∇L`` at each of ``points [k, P]``, ``[k, P]``."""

    @abstractmethod
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        """``∇L`` and ``∇²L u`` at each of ``points [k, P]``, with one u each from ``directions [k, P]``.

        Raises:
            UnsupportedError: L cannot be differentiated twice.
        """


class FunctionLandscape(Landscape):
    """Any twice differentiable function of the parameter vector.

    Args:
        function: From ``[P]`` to a 0-d tensor.

    Example:
        >>> bowl = FunctionLandscape(lambda point: point.square().sum() / 2)
        >>> point = torch.tensor([[3.0, 4.0]])
        >>> bowl.value(point), bowl.derivatives(point, torch.ones(1, 2)).products
        (tensor([12.5000]), tensor([[1., 1.]]))
    """

    def __init__(self, function: Scalar):
        self._function, self._second_order = function, SecondOrder()

    @override
    def value(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([self._function(point) for point in points])

    @override
    def gradient(self, points: Tensor) -> Tensor:
        return gradients(self._function, points)

    @override
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        with torch.no_grad():
            return self._second_order(self._function, points, directions)


def gradients(function: Scalar, points: Tensor) -> Tensor:
    """``∇L`` at each of ``points [k, P]`` by plain backward passes, ``[k, P]``."""
    result = torch.zeros_like(points)
    for row, point in enumerate(points):
        with torch.enable_grad():
            leaf = point.detach().clone().requires_grad_()
            value = function(leaf)
        if value.requires_grad:
            (result[row],) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
    return result


class Ways:
    """Faster ways to the same derivatives, each compared at its first use with what is known to be right.

    ``right`` says whether a way gave right results, as far as it was tried; ``reason`` why the last that failed did so.
    """

    def __init__(self) -> None:
        self.right: dict[Any, bool] = {}
        self.reason = ""

    def attempt(self, way: Any, compute: Callable[[], T], agrees: Callable[[T], bool | None]) -> T | None:
        """``compute()``, or None where this way is wrong or fails.

        ``agrees`` judges the first result; with None it leaves the decision to the next one.
        """
        if self.right.get(way) is False:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about slow batching rules and torch's own imports
                found = compute()
                verdict = self.right.get(way) or agrees(found)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what torch raises where an operation has no such rule or derivative
            self.right[way], self.reason = False, f": {error}"
            return None
        if verdict is not None:
            self.right[way] = verdict
        return None if verdict is False else found


class FirstOrder(Ways):
    """Gradients of the loss of batches, in the fastest way that proves right."""

    def __init__(self) -> None:
        super().__init__()
        self._pays = False
        self._traced: dict[Any, Callable[..., Tensor]] = {}

    @property
    def way(self) -> str:
        """How gradients are computed so far: ``"recorded"`` (traced), ``"mapped"`` or ``"one by one"``."""
        if self._traced:
            return "recorded"
        return "mapped" if self.right.get("mapped", True) else "one by one"

    def expect(self, count: int) -> None:
        """Tell how many gradients are to come, so that they are traced if this pays."""
        self._pays = count >= _MANY

    def __call__(self, loss: Callable[[Batch, Tensor], Tensor], scale: float, batch: Batch, points: Tensor) -> Tensor:
        """Gradients ``[k, P]`` of ``loss(batch, point)``, which depends on nothing else but the ``scale``."""
        tensors, rebuild = batches.flatten((batch.inputs, batch.target))
        key = scale, *((tuple(x.shape), x.dtype) for x in (points, *tensors) if isinstance(x, Tensor))
        if key in self._traced:
            return self._traced[key](points, *tensors)

        def mapped(points: Tensor, *tensors: Tensor) -> Tensor:
            one = partial(loss, Batch(*rebuild(tensors)))
            return torch.func.vmap(torch.func.grad(one))(points).detach()

        def traced() -> Tensor:
            module = make_fx(mapped)(points, *tensors)
            module.graph.eliminate_dead_code()  # the loss's value, of which only the gradient is wanted
            module.recompile()
            self._traced[key] = module.forward
            return self._traced[key](points, *tensors)

        def agrees(found: Tensor) -> bool | None:
            if not bool(torch.isfinite(found).all()):
                return None
            ends = [0, len(points) - 1]
            plain = gradients(partial(loss, batch), points[ends])
            # Right gradients differ by rounding, which is well below either bound.
            margin = (1e-6 if points.dtype == torch.float64 else 1e-3) * plain.abs().max()
            return bool(((found[ends] - plain).abs() <= margin).all())

        if self._pays and len(self._traced) < _SHAPES and all(isinstance(x, Tensor) for x in tensors):
            found = self.attempt(key, traced, agrees)
            if found is not None:
                return found
            self._traced.pop(key, None)
        found = self.attempt("mapped", partial(mapped, points, *tensors), agrees)
        return gradients(partial(loss, batch), points) if found is None else found


class SecondOrder(Ways):
    """Gradients with Hessian-vector products of one function, or of a network's loss on different batches.

    They come from two backward passes, mapped over the points where that works. Not every operation has a batching rule
    or a second derivative, and some of these are wrong. Both ways are therefore compared with plain backward passes,
    and must give a symmetric Hessian.
    """

    def __call__(self, function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
        """The derivatives at ``points [k, P]`` along ``directions [k, P]``; errors as :meth:`Landscape.derivatives`."""
        # Measured: mapped passes are up to three times as fast on small networks.
        ways = {"mapped": partial(two_derivatives, torch.func.vmap(function)), "one by one": partial(_each, function)}
        for name, way in ways.items():
            if len(points) > 1 or name == "one by one":
                judge = partial(_agrees, way, function, points)
                found = self.attempt(name, partial(way, points, directions), judge)
                if found is not None:
                    return found
        what = "The loss cannot be differentiated twice."
        expected, got = "operations that torch can differentiate twice", f"an operation that it cannot{self.reason}"
        raise UnsupportedError(what, expected=expected, got=got, fix="Replace that operation by elementary ones.")


def _agrees(
    way: Callable[[Tensor, Tensor], Derivatives], function: Scalar, points: Tensor, _: Derivatives
) -> bool | None:
    """Compare a way, for two random vectors at the first point, with what is known to be right."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, points.shape[1], generator=generator, dtype=points.dtype).to(points.device)
    twice = points[:1].expand(2, -1)
    found, product = way(twice, u), _each(function, twice[:1], u[:1]).products[0]
    if not bool(torch.isfinite(torch.cat(found)).all()):
        return None  # decided at another point
    # Near a minimum, gradient and product are small differences of large terms: the tolerance is on their sum.
    tolerance = 1e-3 if points.dtype == torch.float64 else 1e-2
    scale = tolerance * (found.gradients[0].norm() + found.products.norm(dim=1).sum())
    left, right = u[0] * found.products[1], u[1] * found.products[0]  # equal sums for a symmetric Hessian
    spread = left.norm() + right.norm() + found.gradients[0].norm()
    fine = (left.sum() - right.sum()).abs() <= tolerance * spread
    fine &= (found.gradients[0] - gradients(function, points[:1])[0]).norm() <= scale
    return bool(fine & ((found.products[0] - product).norm() <= scale))


def _each(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    """Two backward passes for each point."""
    found = [two_derivatives(function, point, direction) for point, direction in zip(points, directions, strict=True)]
    return Derivatives(*(torch.stack(part) for part in zip(*found, strict=True)))


def two_derivatives(function: Callable[[Tensor], Tensor], points: Tensor, directions: Tensor) -> Derivatives:
    """Two backward passes; of several values, each must depend on its own point alone."""
    zero = torch.zeros_like(points)
    with torch.enable_grad():
        leaves = points.detach().clone().requires_grad_()
        total = function(leaves).sum()
        if not total.requires_grad:
            return Derivatives(zero, zero)
        (first,) = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    if not first.requires_grad:  # the function is linear
        return Derivatives(first.detach(), zero)
    (products,) = torch.autograd.grad(first, leaves, directions, allow_unused=True, materialize_grads=True)
    return Derivatives(first.detach(), products)
