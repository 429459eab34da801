"""Per-example gradients of a whole network, block by block.

The calls of a :class:`~laplace_plus.network.capture.Capture` are grouped into *blocks*: one for each weight and its
bias (all uses of a tied weight together), one for each parameter that no rule covers. Blocks partition the parameter
vector. For each block and each set of cotangents there are batched per-example gradients; everything else – dense,
diagonal and Kronecker curvature, functional variance – is made of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch
from laplace_plus.network.calls import Call
from laplace_plus.network.capture import Capture, capture_batch
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.example_gradients import per_example_gradients
from laplace_plus.network.invariant import examined, use_gradients
from laplace_plus.network.network import Network
from laplace_plus.network.selection import Selected
from laplace_plus.structured.composed import JoinedGradients, SelectedGradients
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients, OuterGradients, concatenate, slices
from laplace_plus.structured.layout import GENERAL, MATRIX, Layout, Places
from laplace_plus.structured.one_hot import EmbeddingGradients, OutputLayerGradients

COTANGENT_BYTES = 512 * 2**20
"""Memory for the gradients of the cotangents that go backwards together: more is not quicker."""

_KEY, _NAME = attrgetter("key"), attrgetter("name")


@dataclass(frozen=True)
class _Plan:
    """One block of the parameter vector and the numbers of its calls; none for a parameter on the general path.

    ``chosen [n]`` are the positions of the selected entries in the flattened ``[G, o, i]`` array; None for all.
    """

    layout: Layout
    members: tuple[int, ...]
    chosen: Tensor | None


class Gradients:
    """Per-example gradients for the batch behind a capture; the layers' ``layouts`` cover every selected entry once."""

    def __init__(self, network: Network, capture: Capture):
        self.network, self.capture = network, capture
        found = examined(network, capture)
        self._rows = found.rows
        if found.plans is None:
            found.plans = _plans(network, capture, found.general)
        self.layouts: list[Layout] = []
        self._plans: list[_Plan] = []
        self._joint: dict[int, Call] = {}  # calls by their numbers, and those of which each example goes by itself
        self._apart: dict[int, Call] = {}
        for plan in found.plans:
            self.layouts.append(plan.layout)
            if not found.unused.issuperset(plan.layout.names):
                self._plans.append(plan)
                for member in plan.members:
                    (self._apart if self._rows[member] is None else self._joint)[member] = capture.calls[member]
        self.are_used = bool(self._plans)  # whether the batch uses any selected parameter

    def blocks(self, cotangents: Tensor, layouts: Sequence[Layout] = ()) -> Iterator[tuple[Layout, ExampleGradients]]:
        """Each block's gradients for cotangents ``[V, B, *, C]``: of a structure's layouts, or by default the layers'.

        Blocks of which only some entries are selected come as ``[1, 1, n]`` matrices of those. Blocks that the batch
        does not use are left out.
        """
        if not set(map(_KEY, layouts)).issubset(map(_KEY, self.layouts)):
            yield from self._regrouped(cotangents, layouts)
            return
        self.capture.frees = self.capture.frees and not self._apart
        gradients = dict(zip(self._joint, self.capture.gradients(cotangents, [*self._joint.values()]), strict=True))
        if self._apart:
            gradients |= self._gradients_apart(cotangents)
        general: dict[str, Tensor] | None = None
        for plan in self._plans:
            uses: list[ExampleGradients] = []
            for number in plan.members:
                uses.append(use_gradients(self.capture, number, self._rows[number], gradients[number]))
            if not uses:
                if general is None:
                    every = self.network.parameters
                    if self.network.held.sharded:
                        what = f"No rule describes how the sharded network uses {plan.layout.names[0]!r}."
                        fix = "Leave it out of the selection. A tied embedding's head is parameters='last_layer'."
                        raise UnsupportedError(what, expected="linear maps, convolutions, embeddings, norms", fix=fix)
                    chosen = {own.layout.names[0]: every[own.layout.names[0]] for own in self._plans if not own.members}
                    inputs, keeps = self.capture.inputs, self.capture.differentiable
                    general = per_example_gradients(self.network, inputs, chosen, cotangents, keeps)
                # A parameter may be 0-d.
                flat = general[plan.layout.names[0]].reshape(*cotangents.shape[:2], 1, 1, -1)
                uses.append(DenseGradients(flat))
            total = uses[0] if len(uses) == 1 else _sum(uses)
            if plan.chosen is not None:
                total = SelectedGradients(total, plan.chosen.to(total.device))
            yield plan.layout, total

    def _gradients_apart(self, cotangents: Tensor) -> dict[int, Tensor]:
        """Gradients ``[V, B, *output shape]`` of each example's own outputs in all rows, by the numbers of calls."""
        calls, size = [*self._apart.values()], cotangents.shape[1]
        each = sum(call.output_shape.numel() * call.output_like["dtype"].itemsize for call in calls)
        parts = []
        for some in slices(size, len(cotangents) * each, COTANGENT_BYTES):
            number = torch.arange(some.start, some.stop, device=cotangents.device)
            own = cotangents.new_zeros(len(cotangents), len(number), *cotangents.shape[1:])
            own[:, number - some.start, number] = cotangents[:, some]
            rows = self.capture.gradients(own.flatten(0, 1), calls)
            parts.append([row.unflatten(0, own.shape[:2]) for row in rows])
        return dict(zip(self._apart, [torch.cat(part, 1) for part in zip(*parts, strict=True)], strict=True))

    def whole(self, cotangents: Tensor) -> tuple[Layout, JoinedGradients]:
        """The gradients over all selected entries as one block ``[1, 1, P]``, for structures whose P is small."""
        parts: list[tuple[ExampleGradients, Places]] = [(own, one.places) for one, own in self.blocks(cotangents)]
        if not parts:
            first = self.layouts[0]
            parts.append((DenseGradients(cotangents.new_zeros(*cotangents.shape[:2], *first.shape)), first.places))
        return whole_layout(self.network), JoinedGradients(parts, self.network.n_parameters)

    def _regrouped(self, cotangents: Tensor, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, ExampleGradients]]:
        """The gradients of blocks that take entries from several layers, or order them differently."""
        layers = {layout.key: (layout, gradients) for layout, gradients in self.blocks(cotangents)}
        for layout in layouts:
            if layout.key in layers:
                yield layout, layers[layout.key][1]
                continue
            place = torch.full((self.network.n_parameters,), -1)
            place[layout.index.flatten().cpu()] = torch.arange(layout.n_entries)
            parts: list[tuple[ExampleGradients, Places]] = []
            for layer, gradients in layers.values():
                positions = place[layer.index.cpu()]
                chosen = (positions.flatten() >= 0).nonzero().squeeze(-1)
                if len(chosen) == layer.n_entries:
                    parts.append((gradients, Places(positions)))
                elif len(chosen):
                    subset = SelectedGradients(gradients, chosen.to(gradients.device))
                    parts.append((subset, Places(positions.flatten()[chosen][None, None])))
            if parts:
                yield layout, JoinedGradients(parts, layout.n_entries, layout.shape)

    def cotangent_chunks(self, n_cotangents: int) -> Iterator[slice]:
        """Slices of the cotangents whose gradients, all calls together, are of bounded size."""
        each = self.capture.cotangent_bytes
        for plan in self._plans:
            if not plan.members:
                each += 4 * self.capture.n_examples * plan.layout.n_entries
        return slices(n_cotangents, each, COTANGENT_BYTES)


def _plans(network: Network, capture: Capture, general: frozenset[str]) -> list[_Plan]:
    """The blocks, in the order of their first use; last come the parameters without calls."""
    found: dict[str, tuple[tuple[str, ...], Call | None, tuple[int, ...]]] = {}
    covered: set[str] = set()
    for rows, members in capture.groups.items():
        names, key = tuple(dict.fromkeys(map(_NAME, rows))), ""
        for part in rows:
            key += ("+" if key else "") + (f"{part.name}[{part.start}:]" if part.start else part.name)
        if general.isdisjoint(names):
            call = capture.calls[members[0]]
            call = replace(call, value=call.value.new_empty(0))  # the captured input must not be kept alive
            found[f"{key} ({call.rule})"] = names, call, tuple(members)
            covered.update(names)
    for name in network.parameter_names:
        if name not in covered:
            found[f"{name} ({GENERAL})"] = (name,), None, ()
    plans: list[_Plan] = []
    for key, (names, one, numbers) in found.items():
        rule, items, whole = GENERAL if one is None else one.rule, list[Selected](), dict[str, Tensor]()
        for item in network.selected:
            if item.name in names:
                items.append(item)
                if item.mask is None:
                    whole[item.name] = torch.empty((), dtype=torch.bool).expand(item.shape)
        if one is not None and len(whole) == len(items):
            later = partial(_index, one, items, network.offsets)
            plans.append(_Plan(Layout(key, names, rule, later, one.index(whole).shape), numbers, None))
            continue
        index = _index(one, items, network.offsets)
        chosen = (index.flatten() >= 0).nonzero().squeeze(-1)
        if one is not None and len(chosen) == index.numel():
            plans.append(_Plan(Layout(key, names, rule, index), numbers, None))
        else:
            layout = Layout(key, names, GENERAL, index.flatten()[chosen][None, None])
            plans.append(_Plan(layout, numbers, None if len(chosen) == index.numel() else chosen))
    return plans


def _index(call: Call | None, items: Sequence[Selected], offsets: dict[str, int]) -> Tensor:
    """Positions of a block's entries in the parameter vector, ``[G, o, i]``; −1 for entries that are not selected."""
    positions = {}
    for item in items:
        own = torch.arange(item.size) + offsets[item.name]
        if item.mask is not None:
            own = torch.full((item.shape.numel(),), -1).masked_scatter(item.mask.cpu(), own)
        positions[item.name] = own.view(item.shape)
    return positions[items[0].name].flatten()[None, None] if call is None else call.index(positions)


def _sum(uses: list[Any]) -> ExampleGradients:
    """The gradient of a weight that is used several times."""
    if all(isinstance(use, OuterGradients) for use in uses):
        return concatenate(uses)
    if all(isinstance(use, EmbeddingGradients) for use in uses):
        index, left = torch.cat([use.index for use in uses], 1), torch.cat([use.left for use in uses], 2)
        result = EmbeddingGradients(index, left, uses[0].n_columns)
        result.shares_rows = any(use.shares_rows for use in uses)
        return result
    return DenseGradients(torch.stack([use.dense(slice(None)) for use in uses]).sum(0))


def batch_gradients(network: Network, batch: Batch) -> Gradients:
    """A batch's per-example gradients."""
    return Gradients(network, capture_batch(network, batch))


def settle(network: Network, inputs: Any) -> None:
    """Find out, once, which layer is the last one, for methods that need no gradients of a batch."""
    if isinstance(network.selection, str) and network.selection == "last_layer" and not network.reached:
        capture_batch(network, Batch(inputs, None))


# -- gradients of the loss ---------------------------------------------------------------------------------------------


def mean_loss(likelihood: Likelihood, outputs: Tensor, target: Any) -> Tensor:
    """The mean negative log-likelihood of a batch's targets that count, 0-d."""
    count = likelihood.rows(outputs, target)[2].sum()
    return -likelihood.log_densities(outputs, target).sum() / torch.where(count > 0, count, 1.0)


def evaluate(network: Network, vector: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    """A leaf with the entries of ``vector [P]``, and the outputs ``[B, *, C]`` as a differentiable function of it."""
    with torch.enable_grad(), differentiable_kernels(network.model):
        point = vector.detach().requires_grad_()
        return point, network(inputs, network.substitute(point)).to(point.dtype)


def loss_gradient(network: Network, likelihood: Likelihood, batch: Batch, vector: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient ``[P]`` of a batch's negative log-likelihood at ``vector``, with its graph, and the leaf of that."""
    point, outputs = evaluate(network, vector, batch.inputs)
    with torch.enable_grad():
        loss = -likelihood.log_densities(outputs, batch.target).sum()
        if not loss.requires_grad:  # the selected parameters are not used
            return torch.zeros_like(point), point
        (gradient,) = torch.autograd.grad(loss, point, create_graph=True, allow_unused=True, materialize_grads=True)
    return gradient, point


# -- the layout of everything ------------------------------------------------------------------------------------------


def whole_layout(network: Network) -> Layout:
    """One block that covers the parameter vector in its own order."""
    total = network.n_parameters
    return Layout("all", network.parameter_names, GENERAL, partial(_counted, total), (1, 1, total))


def _counted(total: int) -> Tensor:
    return torch.arange(total)[None, None]


# -- a linear output layer ---------------------------------------------------------------------------------------------
#
# The gradient of an output is the layer's input in that output's row, without any cotangent.


def output_layer_inputs(gradients: Gradients) -> tuple[Layout, Tensor] | None:
    """The layout of a linear output layer and its inputs ``[B', i]``, if it holds every selected parameter."""
    capture = gradients.capture
    if not capture.pointwise:
        return None
    nothing = capture.outputs.new_zeros(1, 1, 1).expand(1, *capture.outputs.shape)
    blocks = list(gradients.blocks(nothing))
    if len(blocks) != 1:
        return None
    layout, own = blocks[0]
    if layout.rule != MATRIX or not isinstance(own, OuterGradients) or layout.shape[0] != 1 or own.n_positions != 1:
        return None
    return layout, own.right(slice(0, own.n_examples))[:, 0, 0]


def output_layer_gradients(gradients: Gradients, outputs: Tensor) -> tuple[Layout, OutputLayerGradients] | None:
    """The gradients of chosen outputs of a linear output layer, without cotangents; None for other selections.

    ``outputs`` are ``[V]``, or ``[B', V]`` where each example (with positions: each position) has its own.
    """
    found = output_layer_inputs(gradients)
    if found is None:
        return None
    layout, inputs = found
    return layout, OutputLayerGradients(inputs, outputs.to(inputs.device), layout.shape[1])
