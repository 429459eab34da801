"""The linearised network on one batch: products ``J v`` and ``Jᵀ u``, and roots ``S`` of the curvature of the outputs.

``J v`` uses forward mode, mapped over the vectors, where the network's operations have forward derivatives and batching
rules. Otherwise it takes one vector after the other. Without any forward derivative (recurrent layers), it
differentiates the pullback, which is linear in its cotangent, or else goes output by output. Each faster AD mode must
agree with a plain backward pass on the first batch that uses it.

Roots satisfy ``S Sᵀ ≈ Λ`` at the likelihood's current observation noise; ignored targets contribute nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import Network

ADMode = Literal["mapped forward", "forward", "backward twice", "mapped backward"]

_ROWS = 16
"""Outputs that are differentiated together where no other mode works; bounds memory at 16 gradients."""

_SMALL = 100_000
"""Up to this many parameters, mapped backward passes are faster than a loop on a CPU, too."""


class ADModes:
    """The AD modes that gave correct products for a network, and those that did not; shared by all batches."""

    def __init__(self) -> None:
        self.right: set[ADMode] = set()
        self.wrong: set[ADMode] = set()

    def attempt(
        self,
        mode: ADMode,
        compute: Callable[[Tensor], Tensor],
        vectors: Tensor,
        agrees: Callable[[Tensor, Tensor], bool],
    ) -> Tensor | None:
        """``compute(vectors)`` for vectors ``[m, k]``, or None if the mode fails or ``agrees`` rejects its products."""
        if mode in self.wrong:
            return None
        known = mode in self.right
        # The caller's vectors may be zero or one-hot; one more, random vector makes the comparison meaningful.
        given = vectors if known else torch.cat([vectors, _random_like(vectors[:1])])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about slow batching rules and torch's own imports
                products = compute(given)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  -- a plain backward pass works in any case
            self.wrong.add(mode)
            return None
        if known:
            return products
        if bool(torch.isfinite(given).all()):
            (self.right if agrees(given, products) else self.wrong).add(mode)
        return None if mode in self.wrong else products[: len(vectors)]


class Pullback:
    """``Jᵀ u`` of ``outputs``, a tensor with a graph, in the vector ``point [P]`` that it was computed from."""

    def __init__(self, outputs: Tensor, point: Tensor, ad_modes: ADModes):
        self._outputs, self._point, self._ad_modes = outputs, point, ad_modes

    def __call__(self, cotangents: Tensor) -> Tensor:
        """``[m, *outputs.shape] -> [m, P]``."""
        return self.add_to(self._point.new_zeros(len(cotangents), len(self._point)), cotangents)

    def add_to(self, total: Tensor, cotangents: Tensor) -> Tensor:
        """Add ``[m, *outputs.shape] -> [m, P]`` to a total, in place."""
        if not self._outputs.requires_grad:
            return total
        if len(cotangents) > 1 and (self._point.device.type != "cpu" or len(self._point) <= _SMALL):
            mapped = self._ad_modes.attempt("mapped backward", self._gradients, cotangents, self._agrees)
            if mapped is not None:
                return total.add_(mapped)
        for row, cotangent in zip(total, cotangents, strict=True):
            row += self.one(cotangent)  # one after the other: no second [m, P] tensor
        return total

    def one(self, cotangent: Tensor) -> Tensor:
        """``[*outputs.shape] -> [P]``, by a plain backward pass."""
        if not self._outputs.requires_grad:
            return torch.zeros_like(self._point)
        return self._gradients(cotangent, mapped=False)

    def _gradients(self, cotangents: Tensor, mapped: bool = True) -> Tensor:
        (gradients,) = torch.autograd.grad(
            self._outputs,
            self._point,
            cotangents,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=mapped,
        )
        return gradients.detach()

    def _agrees(self, cotangents: Tensor, gradients: Tensor) -> bool:
        weights = torch.linspace(0.5, 1.5, len(cotangents), dtype=cotangents.dtype, device=cotangents.device)
        expected = self.one(torch.einsum("m,m...->...", weights, cotangents))
        terms = weights[:, None] * gradients
        error = (terms.sum(0) - expected).abs().max()
        return bool(error <= _tolerance(cotangents) * terms.abs().sum(0).max())


class Linearization:
    """``f(θ + v) ≈ f(θ) + J v`` on a batch's inputs, in the selected parameters θ ``[P]``."""

    def __init__(self, network: Network, vector: Tensor, inputs: Any, ad_modes: ADModes):
        self._network, self._vector, self._inputs, self._ad_modes = network, vector, inputs, ad_modes
        self._known: Tensor | None = None  # outputs that came with products in forward mode

    # Only Jᵀ u needs a graph; where J v can be relied on in forward mode, the outputs come with it.
    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        return evaluate(self._network, self._vector, self._inputs)

    @property
    def outputs(self) -> Tensor:
        """``f(θ)``, ``[B, *, C]``, in the type of the parameter vector, without a graph; free after :meth:`push`."""
        return self._graph[1].detach() if self._known is None else self._known

    @cached_property
    def pull(self) -> Pullback:
        """``Jᵀ u``."""
        point, outputs = self._graph
        return Pullback(outputs, point, self._ad_modes)

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[m, P] -> [m, B, *, C]``."""
        forward_works = not self._ad_modes.right.isdisjoint(("mapped forward", "forward"))
        if not (forward_works or self._graph[1].requires_grad):
            return vectors.new_zeros(len(vectors), *self.outputs.shape)
        seen: list[Tensor] = []

        def forward(vector: Tensor) -> tuple[Tensor, Tensor]:
            with differentiable_kernels(self._network.model):
                point = self._vector.detach()
                return torch.func.jvp(self._function, (point,), (vector,))  # type: ignore[return-value]

        def mapped_forward(vectors: Tensor) -> Tensor:
            outputs, products = torch.func.vmap(forward)(vectors)
            seen.append(outputs[0].detach())
            return products

        def looped_forward(vectors: Tensor) -> Tensor:
            pairs = [forward(vector) for vector in vectors]
            seen.append(pairs[0][0].detach())
            return torch.stack([product for _, product in pairs])

        modes: list[tuple[ADMode, Callable[[Tensor], Tensor]]]
        modes = [("mapped forward", mapped_forward)] if len(vectors) > 1 else []
        for mode, compute in [*modes, ("forward", looped_forward), ("backward twice", self._backward_twice)]:
            products = self._ad_modes.attempt(mode, compute, vectors, self._adjoint)
            if products is not None:
                if mode != "backward twice" and self._known is None:
                    self._known = seen[-1]
                return products
        return self._row_by_row(vectors)

    def _function(self, point: Tensor) -> Tensor:
        return self._network(self._inputs, self._network.substitute(point)).to(point.dtype)

    @cached_property
    def _linear_pullback(self) -> tuple[Tensor, Tensor]:
        """``Jᵀ u`` as a differentiable function of u, and u."""
        with torch.enable_grad():
            point, outputs = self._graph
            cotangent = torch.zeros_like(outputs, requires_grad=True)
            (pulled,) = torch.autograd.grad(outputs, point, cotangent, create_graph=True)
        return pulled, cotangent

    def _backward_twice(self, vectors: Tensor) -> Tensor:
        pulled, cotangent = self._linear_pullback
        return torch.stack(
            [torch.autograd.grad(pulled, cotangent, vector, retain_graph=True)[0].detach() for vector in vectors]
        )

    def _row_by_row(self, vectors: Tensor) -> Tensor:
        """One backward pass for each output, without forward or second derivatives."""
        products = vectors.new_empty(len(vectors), self.outputs.numel())
        for some in torch.arange(self.outputs.numel()).split(_ROWS):
            units = torch.zeros(len(some), self.outputs.numel(), dtype=vectors.dtype, device=vectors.device)
            units[torch.arange(len(some)), some] = 1.0
            products[:, some] = vectors @ self.pull(units.view(-1, *self.outputs.shape)).mT
        return products.view(-1, *self.outputs.shape)

    def _adjoint(self, vectors: Tensor, products: Tensor) -> bool:
        """Whether ``⟨u, J v⟩ = ⟨Jᵀ u, v⟩`` for each of the vectors and a random u."""
        cotangent = _random_like(self.outputs)
        terms = products.flatten(1) * cotangent.flatten()
        other = vectors @ self.pull.one(cotangent)
        return bool(((terms.sum(1) - other).abs() <= _tolerance(vectors) * terms.abs().sum(1)).all())


def evaluate(network: Network, vector: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    """A leaf with the entries of ``vector [P]``, and the outputs ``[B, *, C]`` as a differentiable function of it."""
    with torch.enable_grad(), differentiable_kernels(network.model):
        point = vector.detach().requires_grad_()
        return point, network(inputs, network.substitute(point)).to(point.dtype)


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)


def _tolerance(tensor: Tensor) -> float:
    """Tolerance for comparing two modes: errors show in the first digits, and half precision has only three."""
    return max(1e-3, torch.finfo(tensor.dtype).eps ** 0.5)


# -- roots of the outputs' curvature -----------------------------------------------------------------------------------


class OutputRoot:
    """A root ``S [B * C, k]`` of one batch's curvature in outputs of ``shape (B, *, C)``; this one is the identity.

    Attributes:
        size: k.
    """

    def __init__(self, shape: torch.Size):
        self.shape, self.size = shape, shape.numel()

    def down(self, tangents: Tensor) -> Tensor:
        """``Sᵀ u``, ``[m, B, *, C] -> [m, k]``."""
        return tangents.flatten(1)

    def up(self, coordinates: Tensor) -> Tensor:
        """``S z``, ``[m, k] -> [m, B, *, C]``."""
        return coordinates.reshape(len(coordinates), *self.shape)


class _SoftmaxRoot(OutputRoot):
    """``diag √p − p √pᵀ`` of every observation, as products and without cancellation near p = 1.

    Probabilities p are ``[N, C]``, all zero for ignored observations.
    """

    def __init__(self, p: Tensor, shape: torch.Size):
        OutputRoot.__init__(self, shape)
        self._top = p.argmax(-1, keepdim=True)
        self._p, self._rest, self._root = p, p.scatter(-1, self._top, 0.0), p.sqrt()

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._p.shape)
        u = u - u.gather(-1, self._top.expand(len(u), -1, -1))  # Sᵀ is zero on vectors that are constant over classes
        centred = u - (self._rest * u).sum(-1, keepdim=True)
        return (self._root * centred).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = self._root * coordinates.reshape(len(coordinates), *self._p.shape)
        top = self._top.expand(len(z), -1, -1)
        others = z.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        result = z - self._p * (others + z.gather(-1, top))
        # z_t − p_t Σ z = (1 − p_t) z_t − p_t Σ_{i≠t} z_i
        at_top = self._rest.sum(-1, keepdim=True) * z.gather(-1, top) - self._p.gather(-1, self._top) * others
        return result.scatter(-1, top, at_top).view(len(z), *self.shape)


class _ColumnRoot(OutputRoot):
    """Columns ``[N, k, V]``: V for each of N groups of k outputs, which are observations or whole examples."""

    def __init__(self, columns: Tensor, shape: torch.Size):
        self._columns, self.shape = columns, shape
        self.size = columns.shape[0] * columns.shape[2]

    @override
    def down(self, tangents: Tensor) -> Tensor:
        u = tangents.reshape(len(tangents), *self._columns.shape[:2])
        return torch.einsum("mnc,ncv->mnv", u, self._columns.to(u.dtype)).flatten(1)

    @override
    def up(self, coordinates: Tensor) -> Tensor:
        z = coordinates.reshape(len(coordinates), self._columns.shape[0], self._columns.shape[2])
        return torch.einsum("mnv,ncv->mnc", z, self._columns.to(z.dtype)).view(len(z), *self.shape)


def exact_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """A root of ``Λ = −∂² log p(y|f) / ∂f²``, or of what the likelihood puts in its place."""
    observations, labels, weight = likelihood.rows(outputs, targets)
    hessian = likelihood.output_curvature(observations, weight)
    if hessian is not None and hessian.coupled:
        return _SoftmaxRoot(hessian.scales, outputs.shape)
    root = likelihood.output_root(observations, labels).detach()
    scale = _noise_weights(likelihood, root).sqrt() * weight.view(-1, 1, 1).to(root.dtype)
    return _ColumnRoot(root * scale, outputs.shape)


def sampled_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor, labels: Tensor) -> OutputRoot:
    """``Λ ≈ Σ_s g_s g_sᵀ / M`` with gradients at labels ``[M, N, ...]`` that were sampled at unit noise."""
    observations, _, weight = likelihood.rows(outputs, targets)
    gradients = torch.stack([likelihood.gradient(observations, label).detach() for label in labels], -1)
    scale = _noise_weights(likelihood, observations).sqrt() * weight.unsqueeze(-1).to(gradients.dtype)
    return _ColumnRoot(gradients * (scale / len(labels) ** 0.5).unsqueeze(-1), outputs.shape)


def empirical_root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputRoot:
    """The gradient at the data's own targets, one vector for each example and all its positions."""
    observations, labels, weight = likelihood.rows(outputs, targets)
    gradient = likelihood.gradient(observations, labels).detach() * weight.unsqueeze(-1).to(observations.dtype)
    gradient = gradient * _noise_weights(likelihood, observations)
    return _ColumnRoot(gradient.reshape(len(outputs), -1, 1), outputs.shape)


def _noise_weights(likelihood: Likelihood, values: Tensor) -> Tensor:
    """The factor on the curvature of each of the last axis's entries at the current noise."""
    return likelihood.curvature_weights().detach()[likelihood.output_groups(values.shape[-1])].to(values)
