"""The linearised network on one batch: products ``J v`` and ``Jᵀ u``.

``J v`` uses forward mode for all vectors at once, or else differentiates the pullback, or else goes output by output.
The first time, ``⟨u, J v⟩`` is compared with ``⟨Jᵀ u, v⟩``; the network remembers the first way that works.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import NETWORK_ERRORS
from laplace_plus.network.capture import Capture
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.gradients import Gradients, evaluate
from laplace_plus.network.network import Network

_SMALL = 100_000
"""Up to this many parameters, mapped backward passes are faster than a loop on a CPU, too."""


class Pullback:
    """``Jᵀ u`` of ``outputs``, a tensor with a graph, in the vector ``point [P]`` that it was computed from."""

    def __init__(self, outputs: Tensor, point: Tensor):
        self._outputs, self._point = outputs, point

    def __call__(self, cotangents: Tensor) -> Tensor:
        """``[m, *outputs.shape] -> [m, P]``."""
        return self.add_to(self._point.new_zeros(len(cotangents), len(self._point)), cotangents)

    def add_to(self, total: Tensor, cotangents: Tensor) -> Tensor:
        """Add ``[m, *outputs.shape] -> [m, P]`` to a total, in place."""
        if not self._outputs.requires_grad:
            return total
        if len(cotangents) > 1 and (self._point.device.type != "cpu" or len(self._point) <= _SMALL):
            with suppress(RuntimeError):  # an operation without a batching rule, or too little memory
                return total.add_(self._gradients(cotangents, mapped=True))
        for row, cotangent in zip(total, cotangents, strict=True):
            row += self._gradients(cotangent, mapped=False)  # one after the other: no second [m, P] tensor
        return total

    def one(self, cotangent: Tensor) -> Tensor:
        """``[*outputs.shape] -> [P]``, by a plain backward pass."""
        has_graph = self._outputs.requires_grad
        return self._gradients(cotangent, mapped=False) if has_graph else torch.zeros_like(self._point)

    def _gradients(self, cotangents: Tensor, mapped: bool) -> Tensor:
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found = torch.autograd.grad(self._outputs, self._point, cotangents, is_grads_batched=mapped, **options)
        return found[0].detach()


class Linearization:
    """``f(θ + v) ≈ f(θ) + J v`` on a batch's inputs, in the selected parameters θ ``[P]``."""

    def __init__(self, network: Network, vector: Tensor, inputs: Any):
        self._network, self._vector, self.inputs = network, vector, inputs
        self._known: Tensor | None = None  # outputs that came with products in forward mode

    # Only Jᵀ u needs a graph; where J v can be relied on in forward mode, the outputs come with it.
    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        return evaluate(self._network, self._vector, self.inputs)

    @property
    def outputs(self) -> Tensor:
        """``f(θ)``, ``[B, *, C]``, in the type of the parameter vector, without a graph; free after :meth:`push`."""
        return self._graph[1].detach() if self._known is None else self._known

    @cached_property
    def pull(self) -> Pullback:
        """``Jᵀ u``."""
        point, outputs = self._graph
        return Pullback(outputs, point)

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[m, P] -> [m, B, *, C]``."""
        ways = {"forward": self._forward, "backward twice": self._backward_twice, "each output": self._each_output}
        for way in ways if self._network.pushes is None else ():
            if way == "each output" or self._agrees(ways[way]):
                self._network.pushes = way
                break
        return ways[self._network.pushes](vectors)

    def _forward(self, vectors: Tensor) -> Tensor:
        """By one forward pass for all vectors."""

        def function(point: Tensor) -> Tensor:
            return self._network(self.inputs, self._network.substitute(point)).to(point.dtype)

        def jvp(vector: Tensor) -> tuple[Tensor, Tensor]:
            return torch.func.jvp(function, (self._vector.detach(),), (vector,))  # type: ignore[return-value]

        with differentiable_kernels(self._network.model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")  # by torch, at its first use
            outputs, products = torch.func.vmap(jvp)(vectors)
        self._known = outputs[0].detach() if self._known is None else self._known
        return products

    def _backward_twice(self, vectors: Tensor) -> Tensor:
        """By differentiating ``Jᵀ u``, which is linear in u."""
        if not self._graph[1].requires_grad:
            return vectors.new_zeros(len(vectors), *self.outputs.shape)
        pulled, cotangent = self._linear_pullback
        rows = [torch.autograd.grad(pulled, cotangent, vector, retain_graph=True)[0] for vector in vectors]
        return torch.stack(rows).detach()

    @cached_property
    def _linear_pullback(self) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point, outputs = self._graph
            cotangent = torch.zeros_like(outputs, requires_grad=True)
            (pulled,) = torch.autograd.grad(outputs, point, cotangent, create_graph=True)
        return pulled, cotangent

    def _each_output(self, vectors: Tensor) -> Tensor:
        """By one backward pass for each output."""
        products = vectors.new_empty(len(vectors), self.outputs.numel())
        for number in range(self.outputs.numel()):
            unit = torch.zeros(self.outputs.numel()).to(self.outputs)
            unit[number] = 1.0
            products[:, number] = vectors @ self.pull.one(unit.view_as(self.outputs))
        return products.view(-1, *self.outputs.shape)

    def _agrees(self, way: Callable[[Tensor], Tensor]) -> bool:
        """Whether a way works, and agrees with a plain backward pass for two random vectors."""
        source = torch.Generator().manual_seed(0)
        vectors, cotangent = (
            torch.randn(shape, generator=source, dtype=torch.float64).to(self._vector)
            for shape in ((2, len(self._vector)), self.outputs.shape)
        )
        try:
            products = way(vectors)
        except torch.OutOfMemoryError:
            raise
        except NETWORK_ERRORS:
            return False
        terms, pulled = products.flatten(1) * cotangent.flatten(), self.pull.one(cotangent)
        # Errors show in the first digits, and half precision has only three.
        rounding = max(1e-3, torch.finfo(vectors.dtype).eps ** 0.5)
        scale = terms.abs().sum(1) + (vectors * pulled).norm(dim=1)
        return bool(((terms.sum(1) - vectors @ pulled).abs() <= rounding * scale).all())


class WrittenJacobian:
    """The linearisation at the network's own weights by its :func:`batch_jacobian`, for many products."""

    def __init__(self, network: Network, inputs: Any):
        self.outputs, self._jacobian = batch_jacobian(network, inputs)

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[m, P] -> [m, B, *, C]``."""
        return (vectors @ self._jacobian.mT).view(-1, *self.outputs.shape)

    def pull(self, cotangents: Tensor) -> Tensor:
        """``Jᵀ u``, ``[m, B, *, C] -> [m, P]``."""
        return cotangents.flatten(1) @ self._jacobian


def batch_jacobian(network: Network, inputs: Any) -> tuple[Tensor, Tensor]:
    """The network's outputs ``[B, *, C]`` and its Jacobian ``[B·M·C, P]``, one row for each output."""
    capture = Capture(network, inputs)
    gradients = Gradients(network, capture)
    outputs = capture.outputs.to(network.dtype)  # may count positions as examples
    n, size = len(outputs), outputs[0].numel()
    jacobian = torch.empty(n, size, network.n_parameters, dtype=outputs.dtype, device=outputs.device)
    one_hot = torch.eye(size, dtype=outputs.dtype, device=outputs.device).view(size, 1, *outputs.shape[1:])
    for some in gradients.cotangent_chunks(size):
        cotangents = one_hot[some].expand(-1, n, *outputs.shape[1:])
        batched = gradients.whole(cotangents)[1].dense(slice(0, n))  # [V, B, 1, 1, P]
        jacobian[:, some] = batched.flatten(2).transpose(0, 1).to(jacobian)
    return outputs.view(capture.output_shape).detach(), jacobian.flatten(0, 1)


def jvp(network: Network, inputs: Any, vector: Tensor) -> Tensor:
    """``J(x) v`` for one direction ``v [P]``, ``[B, *, C]``."""
    start = network.vector()
    return Linearization(network, start, inputs).push(vector.to(start)[None])[0]
