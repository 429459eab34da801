"""Loss surfaces ``θ ↦ (θ, L(θ))``: what geodesics and curvatures are computed from.

A :class:`Landscape` gives values, gradients and Hessian-vector products of L at several points together.
:class:`FunctionLandscape` is any function of the parameter vector, and :class:`LossLandscape` a network's loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.geometry.second_order import Derivatives, Scalar, SecondOrder


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
        """``∇L`` and ``∇²L u`` at each of ``points [k, P]``, along one of the ``directions [k, P]`` each.

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
        self._function, self._differentiate = function, SecondOrder()

    @override
    def value(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([self._function(point) for point in points])

    @override
    def gradient(self, points: Tensor) -> Tensor:
        return self._differentiate.gradients(self._function, points)

    @override
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        with torch.no_grad():
            return self._differentiate(self._function, points, directions)
