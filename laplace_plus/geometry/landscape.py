"""Loss surfaces ``θ ↦ (θ, L(θ))``: values, gradients and Hessian-vector products of L at several points together.

:class:`FunctionLandscape` is any function of the parameter vector, and
:class:`~laplace_plus.geometry.LossLandscape` a network's loss.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import UnsupportedError

Scalar = Callable[[Tensor], Tensor]
"""From ``[P]`` to a 0-d tensor."""


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


class SecondOrder:
    """Gradients with Hessian-vector products of one function, or of a network's loss on different batches.

    Tries three AD modes in turn: two backward passes mapped over the points, two backward passes for each point, and
    a forward derivative of each gradient. Not every operation has a batching rule or a second derivative, and some
    second derivatives are wrong. Each mode is therefore checked at its first use, against plain backward passes and
    against the Hessian's symmetry, and the result is remembered.
    """

    def __init__(self) -> None:
        self._checked: dict[_Mode, bool] = {}

    def __call__(self, function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
        """The derivatives at ``points [k, P]`` along ``directions [k, P]``.

        Raises:
            UnsupportedError: The function cannot be differentiated twice.
        """
        # Measured: two backward passes beat a forward derivative of the gradient by half on a perceptron, mapped by up
        # to three times on small networks; on a convolutional network forward mode is a tenth faster.
        reason = ""
        for mode in (_mapped, _backward_twice, _forward) if len(points) > 1 else (_backward_twice, _forward):
            if self._checked.get(mode) is False:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # slow batching rules
                    if mode not in self._checked:
                        self._check(mode, function, points)
                    if self._checked.get(mode) is not False:
                        return mode(function, points, directions)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  -- the next mode may work
                self._checked[mode] = False
                reason = f": {error}"
        raise UnsupportedError(
            "The loss cannot be differentiated twice.",
            expected="operations that torch can differentiate twice",
            got=f"an operation that it cannot{reason}",
            fix="Replace that operation by elementary ones.",
        )

    def _check(self, mode: _Mode, function: Scalar, points: Tensor) -> None:
        """Compare a mode, for two random vectors at the first point, with what is known to be right."""
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(2, points.shape[1], generator=generator, dtype=points.dtype).to(points.device)
        twice = points[:1].expand(2, -1)
        found = mode(function, twice, u)
        if not bool(torch.isfinite(torch.cat(found)).all()):
            return  # decided at another point
        # Near a minimum, gradient and product are small differences of large terms: the tolerance is on their sum.
        tolerance = 1e-3 if points.dtype == torch.float64 else 1e-2
        scale = tolerance * (found.gradients[0].norm() + found.products.norm(dim=1).sum())
        left, right = u[0] * found.products[1], u[1] * found.products[0]  # equal sums for a symmetric Hessian
        spread = left.norm() + right.norm() + found.gradients[0].norm()
        fine = bool((left.sum() - right.sum()).abs() <= tolerance * spread)
        fine &= bool((found.gradients[0] - gradients(function, points[:1])[0]).norm() <= scale)
        if fine and mode is not _backward_twice:
            try:
                product = _backward_twice(function, twice[:1], u[:1]).products[0]
            except RuntimeError:  # without a second backward pass there may still be a forward derivative
                product = found.products[0]
            fine = bool((found.products[0] - product).norm() <= scale)
        self._checked[mode] = fine


_Mode = Callable[[Scalar, Tensor, Tensor], Derivatives]


def _mapped(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    """Two backward passes through the function mapped over the points."""
    return _twice(torch.func.vmap(function), points, directions)


def _backward_twice(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    """Two backward passes for each point."""
    found = [_twice(function, point, direction) for point, direction in zip(points, directions, strict=True)]
    return Derivatives(*(torch.stack(part) for part in zip(*found, strict=True)))


def _twice(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
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


def _forward(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    """A forward derivative of the gradient for each point."""
    gradient = torch.func.grad(function)
    found = [torch.func.jvp(gradient, (p,), (u,)) for p, u in zip(points, directions, strict=True)]
    return Derivatives(torch.stack([pair[0] for pair in found]), torch.stack([pair[1] for pair in found]))
