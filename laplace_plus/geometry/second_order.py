"""Gradients and Hessian-vector products of a scalar function, at a stack of points.

Two backward passes through the function mapped over the stack give both, or one forward derivative of the gradient. Not
every operation has a forward derivative or a batching rule, and some have second derivatives that are wrong. Each way
is therefore compared, at its first use, with two plain backward passes, and those with the symmetry that second
derivatives have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError

Scalar = Callable[[Tensor], Tensor]
"""From ``[P]`` to a 0-d tensor."""

Way = Literal["mapped backward", "mapped forward", "forward", "backward twice"]


class Derivatives(NamedTuple):
    """Derivatives of a function L at a stack of points, along one direction each.

    Attributes:
        gradients: ``∇L``, ``[k, P]``.
        products: ``∇²L u``, ``[k, P]``.
    """

    gradients: Tensor
    products: Tensor


class SecondOrder:
    """Differentiates functions of one kind, such as a network's loss on different batches.

    It remembers which ways of doing so have proved right.
    """

    def __init__(self) -> None:
        self._right: set[Way] = set()
        self._wrong: set[Way] = set()

    def gradients(self, function: Scalar, points: Tensor) -> Tensor:
        """``∇L`` at each of ``points [k, P]``, by plain backward passes, ``[k, P]``."""
        rows = []
        for point in points:
            with torch.enable_grad():
                leaf = point.detach().clone().requires_grad_()
                value = function(leaf)
            if not value.requires_grad:
                rows.append(torch.zeros_like(point))
                continue
            rows.append(torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0])
        return torch.stack(rows)

    def __call__(self, function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
        """The derivatives at ``points [k, P]`` along ``directions [k, P]``.

        Raises:
            UnsupportedError: The function cannot be differentiated twice.
        """
        # Point by point, a second backward pass is mostly the quicker one (by half on a perceptron, while forward mode
        # wins by a tenth on a convolutional network). Mapped, it is so by up to three times on small networks, where
        # what transforms of functions cost in Python outweighs the arithmetic, and level on larger ones.
        ways: list[tuple[Way, Callable[[Scalar, Tensor, Tensor], Derivatives]]] = [
            ("backward twice", _backward_twice),
            ("forward", _looped_forward),
        ]
        if len(points) > 1:
            ways[:0] = [("mapped backward", _mapped_backward), ("mapped forward", _mapped_forward)]
        reasons = ""
        for way, compute in ways:
            if way in self._wrong:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about slow batching rules; a plain pass tells the rest
                    if way not in self._right:
                        self._prove(way, compute, function, points)
                    if way not in self._wrong:
                        return compute(function, points, directions)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  -- whatever it is, another way may do
                self._wrong.add(way)
                reasons = f": {error}"
        raise UnsupportedError(
            "The loss cannot be differentiated twice.",
            expected="operations that torch can differentiate twice",
            got=f"one that it cannot{reasons}",
            fix="Replace that operation by elementary ones.",
        )

    def _prove(
        self, way: Way, compute: Callable[[Scalar, Tensor, Tensor], Derivatives], function: Scalar, points: Tensor
    ) -> None:
        """Compare a way at two random directions, at the first point, with what is known to be right."""
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(2, points.shape[1], generator=generator, dtype=points.dtype).to(points.device)
        twice = points[:1].expand(2, -1)
        found = compute(function, twice, u)
        if not all(bool(torch.isfinite(part).all()) for part in found):
            return  # nothing can be told at this point
        # Near a minimum of the loss, terms that cancel leave little more than rounding: g and H u are taken together.
        tolerance = 1e-3 if points.dtype == torch.float64 else 1e-2
        scale = tolerance * (found.gradients[0].norm() + found.products.norm(dim=1).sum())
        one, other = u[0] * found.products[1], u[1] * found.products[0]  # their sums are equal where H is symmetric
        spread = one.norm() + other.norm() + found.gradients[0].norm()
        fine = bool((one.sum() - other.sum()).abs() <= tolerance * spread)
        gradient = self.gradients(function, points[:1])[0]
        fine &= bool((found.gradients[0] - gradient).norm() <= scale)
        if fine and way != "backward twice":
            try:
                product = _backward_twice(function, twice[:1], u[:1]).products[0]
            except RuntimeError:  # an operation without a second backward pass may still have a forward derivative
                product = found.products[0]
            fine = bool((found.products[0] - product).norm() <= scale)
        (self._right if fine else self._wrong).add(way)


def _forward(function: Scalar, point: Tensor, direction: Tensor) -> Derivatives:
    found = torch.func.jvp(torch.func.grad(function), (point,), (direction,))
    return Derivatives(found[0], found[1])


def _mapped_forward(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    found = torch.func.vmap(partial(_forward, function))(points, directions)
    return Derivatives(found[0].detach(), found[1].detach())


def _mapped_backward(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    with torch.enable_grad():
        leaves = points.detach().clone().requires_grad_()
        values = torch.func.vmap(function)(leaves)
        nothing = torch.zeros_like(points)
        if not values.requires_grad:
            return Derivatives(nothing, nothing)
        # Each value depends on its own row alone, so that the gradient of their sum has theirs in its rows.
        (gradients,) = torch.autograd.grad(
            values.sum(), leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )
    if not gradients.requires_grad:  # the function is linear
        return Derivatives(gradients.detach(), nothing)
    (products,) = torch.autograd.grad(gradients, leaves, directions, allow_unused=True, materialize_grads=True)
    return Derivatives(gradients.detach(), products)


def _looped_forward(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    rows = [_forward(function, *pair) for pair in zip(points, directions, strict=True)]
    return Derivatives(torch.stack([row.gradients for row in rows]), torch.stack([row.products for row in rows]))


def _backward_twice(function: Scalar, points: Tensor, directions: Tensor) -> Derivatives:
    gradients, products = torch.zeros_like(points), torch.zeros_like(points)
    for row, (point, direction) in enumerate(zip(points, directions, strict=True)):
        with torch.enable_grad():
            leaf = point.detach().clone().requires_grad_()
            value = function(leaf)
            if not value.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True, allow_unused=True, materialize_grads=True)
        gradients[row] = gradient.detach()
        if gradient.requires_grad:  # otherwise the function is linear
            (products[row],) = torch.autograd.grad(gradient, leaf, direction, allow_unused=True, materialize_grads=True)
    return Derivatives(gradients, products)
