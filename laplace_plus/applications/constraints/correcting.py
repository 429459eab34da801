"""The null-space step: a gradient that moves along a constraint, and towards it.

With the loss gradient u, the constraint ``c(θ)``, its Jacobian J and a rate γ, it is ``u' = u − J⁺ (J u − γ c(θ))``.
Where the constraint can be met, ``J u' = γ c``. What u has in the null space of J stays, and ``u' = 0`` is the
condition of Karush, Kuhn and Tucker. J is only multiplied with.

Source: Roy, Hauberg and Krämer (2025), "Matrix-free least squares solvers: values, gradients, and what to do with
them", arXiv 2510.19634.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.linalg import LeastSquaresSolution, Status, lsmr
from laplace_plus.network import batches
from laplace_plus.network.network import Network


class FunctionalModel(NamedTuple):
    """The network in evaluation mode, as a function of inputs and of ``parameters``: the trained ones, by name."""

    network: Network
    parameters: Mapping[str, Tensor]

    def __call__(self, inputs: Any) -> Tensor:
        """The network's output tensor; ``inputs`` are a tensor, or a tuple or mapping as ``forward`` takes them."""
        aliases = {name: own.view_as(own) for name, own in self.parameters.items()}  # which stand for the model's own
        return self.network(self.network.receive(inputs), aliases)


Constraint = Callable[[FunctionalModel, Any], Tensor]
"""``c(model, points)``: a tensor of any shape that shall be zero, differentiable in the weights."""


class Correction(NamedTuple):
    """The root mean square of c before a step; ``‖J u' − γ c‖``, which LSMR left; its iterations, and how it ended."""

    violation: float
    residual: float
    iterations: int
    status: Status


class Linearized:
    """``c [m]`` and products with its Jacobian from one graph; ``J v`` is the derivative of ``Jᵀ w`` in w."""

    def __init__(self, values: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype):
        self._parameters, self._dtype, self._values = parameters, dtype, values.flatten()
        self._sizes = [parameter.numel() for parameter in parameters]
        self.value = self._values.to(dtype)
        self._cotangent = torch.zeros_like(self._values, requires_grad=True)
        pulled: Sequence[Tensor] = ()
        if values.requires_grad:
            options: dict[str, bool] = {"create_graph": True, "materialize_grads": True}
            pulled = torch.autograd.grad(self._values, parameters, self._cotangent, **options)
        self._pulled = {i: one for i, one in enumerate(pulled) if one.requires_grad}  # of those that c depends on
        if not self._pulled:
            what, fix = "The constraint does not depend on the weights.", "Use the model that the constraint is given."
            raise ConfigurationError(what, expected="a function of the weights that are trained", fix=fix)

    def push(self, tangent: Tensor) -> Tensor:
        """``J v``, ``[P] -> [m]``."""
        parts = tangent.split(self._sizes)
        tangents = [parts[i].view_as(one).to(one.dtype) for i, one in self._pulled.items()]
        options = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
        return torch.autograd.grad([*self._pulled.values()], self._cotangent, tangents, **options)[0].to(self._dtype)

    def pull(self, cotangent: Tensor) -> Tensor:
        """``Jᵀ w``, ``[m] -> [P]``."""
        options = {"retain_graph": True, "materialize_grads": True}
        found = torch.autograd.grad(self._values, self._parameters, cotangent.to(self._values.dtype), **options)
        return torch.cat([part.flatten().to(self._dtype) for part in found])

    def solve(self, right: Tensor, max_iterations: int | None, tolerance: float | None) -> LeastSquaresSolution:
        """``J⁺ b`` for ``b [m]``, from zero: of all solutions the smallest. NonFiniteError: c, J or b is not finite."""
        limits: dict[str, Any] = {"atol": tolerance, "btol": tolerance, "max_iterations": max_iterations}
        found = lsmr(self.push, self.pull, right, n=sum(self._sizes), parameters=self._parameters, **limits)
        if found.status is Status.NOT_FINITE:
            got = f"{int((~self.value.isfinite()).sum())} values of c that are not; if 0, J or the loss's gradient"
            raise NonFiniteError("A correction is not finite.", expected="finite numbers", got=got)
        return found


def checked(values: Any) -> Tensor:
    """What a constraint returned, if that is a tensor of real numbers."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        expected, got = "a tensor of one or more real numbers", batches.describe(values)
        raise ConfigurationError("The constraint has no values.", expected=expected, got=got)
    return values


def rms(values: Tensor) -> float:
    """The root mean square."""
    return float(values.detach().square().mean().sqrt())


def null_space_gradient(
    function: Callable[[Tensor], Tensor], point: Tensor, gradient: Tensor, rate: float | Tensor = 1.0
) -> Tensor:
    """``u − J⁺ (J u − γ c)``, ``[P]``, for c of a vector θ; differentiable in γ, u and, where J keeps its rank, θ.

    ``function`` is c, ``[P] -> [m]``; then θ, u and γ. Errors are those of :meth:`NullSpaceOptimizer.step`.
    """
    checks.shape("gradient", gradient, checks.shape("point", point, [None]).shape)
    differentiate = torch.is_grad_enabled()
    with torch.enable_grad():
        point = point if point.requires_grad else point.detach().requires_grad_()
        linearized = Linearized(checked(function(point)), [point], point.dtype)
        with torch.set_grad_enabled(differentiate):
            right = linearized.push(gradient) - rate * linearized.value
            return gradient - linearized.solve(right, None, None).value
