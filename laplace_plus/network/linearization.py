"""The linearised network on one batch: products ``J v`` and ``Jᵀ u``.

``J v`` uses forward mode, mapped over the vectors or for one after the other. Without forward derivatives (recurrent
layers), it differentiates the pullback, which is linear in its cotangent, or else goes output by output. Each faster AD
mode must agree with a plain backward pass on the first batch that uses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._memory import budget, is_given
from laplace_plus.errors import tried
from laplace_plus.network import batches
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.gradients import bytes_per_example, evaluate, pieces
from laplace_plus.network.network import Network

ADMode = Literal["mapped forward", "forward", "backward twice", "mapped backward"]

T = TypeVar("T")

_ROWS = 16
"""Outputs that are differentiated together where no other mode works; bounds memory at 16 gradients."""

_SMALL = 100_000
"""Up to this many parameters, mapped backward passes are faster than a loop on a CPU, too."""


class Checked:
    """Ways to compute the same thing, each compared at its first use with what is known to be right.

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

        def judged() -> tuple[T, bool | None]:
            found = compute()
            return found, self.right[way] if way in self.right else agrees(found)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about slow batching rules and torch's own imports
            both, reason = tried(judged)
        if both is None:  # there is a way that works in any case, or says why not
            self.right[way], self.reason = False, reason
            return None
        found, verdict = both
        if verdict is not None:
            self.right[way] = verdict
        return None if verdict is False else found


class ADModes(Checked):
    """The AD modes that gave correct products for a network, and those that did not; shared by all batches."""

    def products(
        self,
        mode: ADMode,
        compute: Callable[[Tensor], Tensor],
        vectors: Tensor,
        agrees: Callable[[Tensor, Tensor], bool],
    ) -> Tensor | None:
        """``compute(vectors)`` for vectors ``[m, k]``, or None if the mode fails or ``agrees`` rejects its products."""
        # The caller's vectors may be zero or one-hot; one more, random vector makes the comparison meaningful.
        given = vectors if mode in self.right else torch.cat([vectors, _random_like(vectors[:1])])
        finite = mode in self.right or bool(torch.isfinite(given.sum()))
        found = self.attempt(mode, lambda: compute(given), lambda products: agrees(given, products) if finite else None)
        return None if found is None else found[: len(vectors)]


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
            mapped = self._ad_modes.products("mapped backward", self._gradients, cotangents, self._agrees)
            if mapped is not None:
                return total.add_(mapped)
        for row, cotangent in zip(total, cotangents, strict=True):
            row += self.one(cotangent)  # one after the other: no second [m, P] tensor
        return total

    def one(self, cotangent: Tensor) -> Tensor:
        """``[*outputs.shape] -> [P]``, by a plain backward pass."""
        has_graph = self._outputs.requires_grad
        return self._gradients(cotangent, mapped=False) if has_graph else torch.zeros_like(self._point)

    def _gradients(self, cotangents: Tensor, mapped: bool = True) -> Tensor:
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(self._outputs, self._point, cotangents, is_grads_batched=mapped, **options)
        return found[0].detach()

    def _agrees(self, cotangents: Tensor, gradients: Tensor) -> bool:
        weights = torch.linspace(0.5, 1.5, len(cotangents), dtype=cotangents.dtype, device=cotangents.device)
        expected = self.one(torch.einsum("m,m...->...", weights, cotangents))
        terms = weights[:, None] * gradients
        return bool((terms.sum(0) - expected).abs().max() <= _tolerance(cotangents) * terms.abs().sum(0).max())


class Linearization:
    """``f(θ + v) ≈ f(θ) + J v`` on a batch's inputs, in the selected parameters θ ``[P]``."""

    def __init__(self, network: Network, vector: Tensor, inputs: Any, ad_modes: ADModes):
        self._network, self._vector, self.inputs, self._ad_modes = network, vector, inputs, ad_modes
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
        return Pullback(outputs, point, self._ad_modes)

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[m, P] -> [m, B, *, C]``."""
        forward_works = any(self._ad_modes.right.get(mode) for mode in ("mapped forward", "forward"))
        if not (forward_works or self._graph[1].requires_grad):
            return vectors.new_zeros(len(vectors), *self.outputs.shape)
        seen: list[Tensor] = []

        def jvp(vector: Tensor) -> tuple[Tensor, Tensor]:
            return torch.func.jvp(self._function, (self._vector.detach(),), (vector,))  # type: ignore[return-value]

        def forward(vectors: Tensor, mapped: bool) -> Tensor:
            with differentiable_kernels(self._network.model):
                if mapped:
                    outputs, products = torch.func.vmap(jvp)(vectors)
                else:
                    outputs, products = (torch.stack(parts) for parts in zip(*map(jvp, vectors), strict=True))
            seen.append(outputs[0].detach())
            return products

        modes: list[Any] = [("forward", partial(forward, mapped=False)), ("backward twice", self._backward_twice)]
        if len(vectors) > 1:
            modes.insert(0, ("mapped forward", partial(forward, mapped=True)))
        for mode, compute in modes:
            products = self._ad_modes.products(mode, compute, vectors, self._adjoint)
            if products is not None:
                if mode != "backward twice" and self._known is None:
                    self._known = seen[-1]
                return products
        return self._row_by_row(vectors)

    def _function(self, point: Tensor) -> Tensor:
        return self._network(self.inputs, self._network.substitute(point)).to(point.dtype)

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
        products = [torch.autograd.grad(pulled, cotangent, vector, retain_graph=True)[0] for vector in vectors]
        return torch.stack(products).detach()

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
        terms, pulled = products.flatten(1) * cotangent.flatten(), self.pull.one(cotangent)
        # Products with vectors of the null space are rounding errors.
        scale = terms.abs().sum(1) + torch.stack([(vector * pulled).norm() for vector in vectors])
        return bool(((terms.sum(1) - vectors @ pulled).abs() <= _tolerance(vectors) * scale).all())


class _Pieces(Linearization, Pullback):
    """A batch in parts as large as the first, whose graphs do not outlive a product."""

    pull = property(lambda self: self)  # as an attribute a cycle, which outlives its use

    def __init__(self, lines: Callable[[], Iterator[Linearization]], first: Any, point: Tensor, outputs: Tensor):
        self._lines, self.inputs, self._point, self._known = lines, first, point, outputs

    @override
    def push(self, vectors: Tensor) -> Tensor:
        return torch.cat([line.push(vectors) for line in self._lines()], 1)

    @override
    def add_to(self, total: Tensor, cotangents: Tensor) -> Tensor:
        for line, own in zip(self._lines(), cotangents.split(batches.batch_size(self.inputs), 1), strict=True):
            line.pull.add_to(total, own)
        return total

    @override
    def one(self, cotangent: Tensor) -> Tensor:
        return self(cotangent[None])[0]


@torch.no_grad()
def linearize(network: Network, vector: Tensor, inputs: Any, ad_modes: ADModes) -> Linearization:
    """The linearised network on a batch, in parts where both modes' graphs exceed the memory budget."""
    allowed = budget(network.device) // (4 if is_given() else 1)  # the vectors of whoever asks take most of a given one
    parts = pieces(network, inputs, 4 * bytes_per_example(network, inputs), allowed)
    if len(parts) == 1:
        return Linearization(network, vector, inputs, ad_modes)
    point = network.substitute(vector)
    outputs = torch.cat([network(part, point) for part in network.cut(inputs, network.bytes_forward)]).to(vector)
    return _Pieces(lambda: (Linearization(network, vector, x, ad_modes) for x in parts), parts[0], vector, outputs)


def _random_like(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype).to(tensor.device)


def _tolerance(tensor: Tensor) -> float:
    """Tolerance for comparing two modes: errors show in the first digits, and half precision has only three."""
    return max(1e-3, torch.finfo(tensor.dtype).eps ** 0.5)
