"""Per-example gradients of a whole network, block by block, and batches cut into micro-batches that fit into memory.

The calls of a :class:`~laplace_plus.network.capture.Capture` are grouped into *blocks*: one for each weight and its
bias (all uses of a tied weight together), one for each parameter that no rule covers. Blocks partition the parameter
vector. For each block and each set of cotangents there are batched per-example gradients; everything else – dense,
diagonal and Kronecker curvature, functional variance – is made of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from laplace_plus import _memory
from laplace_plus.errors import UnsupportedError, tried
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch
from laplace_plus.network.calls import Call, ParameterRows
from laplace_plus.network.capture import Capture, capture_batch, find_axes
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.network import Network
from laplace_plus.network.selection import Selected
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    JoinedGradients,
    OuterGradients,
    SelectedGradients,
    concatenate,
)
from laplace_plus.structured.layout import GENERAL, Layout
from laplace_plus.structured.parameter_slices import ParameterSlices

_COTANGENT_BYTES = 512 * 2**20
"""Memory for the gradients of the cotangents that go backwards together: more is not quicker."""

_GRAPH_BYTES, _GRAPH_SHARE = 128 * 2**20, 16
"""Memory for a micro-batch's graph on a CPU where the budget holds twice as much, and the part of larger budgets.

Convolutions gain nothing; ViT-tiny is 1.3 times as fast in whole batches of 32, at 2.2 times the peak memory."""

_KEY, _NAME, _START = attrgetter("key"), attrgetter("name"), attrgetter("name", "start")
_KIND = attrgetter("__class__", "rows", "packed", "axis")


@dataclass(frozen=True)
class _Plan:
    """One block of the parameter vector and the numbers of its calls; none for a parameter on the general path.

    ``chosen [n]`` are the positions of the selected entries in the flattened ``[G, o, i]`` array; None for all.
    """

    layout: Layout
    members: tuple[int, ...]
    chosen: Tensor | None


class Gradients:
    """Per-example gradients for the batch behind a capture; the network remembers the example axes and the blocks.

    ``layouts`` are those of the layers, which together cover every selected entry once; ``structure_layouts`` are the
    blocks, where they may be others.
    """

    def __init__(self, network: Network, capture: Capture, structure_layouts: Sequence[Layout] | None = None):
        self.network, self.capture, self._structure_layouts = network, capture, structure_layouts or ()
        find_axes(network, capture)
        key = tuple(map(_KIND, capture.calls))
        if key not in network.layouts:
            network.layouts[key] = _plans(network, capture.calls)
        self._plans: list[_Plan] = network.layouts[key]
        self.layouts: list[Layout] = list(map(attrgetter("layout"), self._plans))

    def blocks(
        self, cotangents: Tensor, layouts: Sequence[Layout] | None = None
    ) -> Iterator[tuple[Layout, ExampleGradients]]:
        """Each block's gradients for cotangents ``[V, B, *, C]``; by default the structure's blocks, or the layers'.

        Blocks of which only some entries are selected come as ``[1, 1, n]`` matrices of those.
        """
        layouts = self._structure_layouts if layouts is None else layouts
        if not set(map(_KEY, layouts)).issubset(map(_KEY, self.layouts)):
            yield from self._regrouped(cotangents, layouts)
            return
        gradients = self.capture.gradients(cotangents)
        general: dict[str, Tensor] | None = None
        for plan in self._plans:
            uses = []
            for number in plan.members:
                call = self.capture.calls[number]
                if call.value._version != call.version:
                    what = f"The network writes into the input of {call.rows[0].name!r} after it was used."
                    expected = "inputs of layers that stay as they are, which training needs, too"
                    fix = "Use x = x * 3 instead of x.mul_(3), or leave the layer out of the selection."
                    raise UnsupportedError(what, expected=expected, got="a tensor that was modified in place", fix=fix)
                assert call.axis is not None
                pointwise, order = self.capture.pointwise, self.capture.order
                shape = call.output_shape if pointwise else self.capture.output_shape
                use = call.gradients(gradients[number], shape[0], call.axis)
                moved = isinstance(use, OuterGradients) and (use.n_positions > 1 or order is not None)
                if pointwise and moved and isinstance(use, OuterGradients):  # each position is an example
                    every = slice(0, use.n_examples)
                    right, left = use.right(every).flatten(0, 1), use.left(every).flatten(1, 2)
                    right, left = (right, left) if order is None else (right[order], left[:, order])
                    use = OuterGradients(right[:, None], left[:, :, None])
                uses.append(use)
            if not uses:
                general = self._general_gradients(cotangents) if general is None else general
                # A parameter may be 0-d.
                flat = general[plan.layout.names[0]].reshape(*cotangents.shape[:2], 1, 1, -1)
                uses.append(DenseGradients(flat))
            total = uses[0] if len(uses) == 1 else _sum(uses)
            chosen = plan.chosen
            yield plan.layout, total if chosen is None else SelectedGradients(total, chosen.to(total.device))

    def whole(self, cotangents: Tensor) -> tuple[Layout, JoinedGradients]:
        """The gradients over all selected entries as one block ``[1, 1, P]``, for structures whose P is small."""
        parts = [(gradients, layout.parameter_slices) for layout, gradients in self.blocks(cotangents, ())]
        return whole_layout(self.network), JoinedGradients(parts, self.network.n_parameters)

    def _regrouped(self, cotangents: Tensor, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, ExampleGradients]]:
        """The gradients of blocks that take entries from several layers, or order them differently."""
        layers = {layout.key: (layout, gradients) for layout, gradients in self.blocks(cotangents, ())}
        for layout in layouts:
            if layout.key in layers:
                yield layout, layers[layout.key][1]
                continue
            place = torch.full((self.network.n_parameters,), -1)
            place[layout.index.flatten().cpu()] = torch.arange(layout.n_entries)
            parts: list[tuple[ExampleGradients, ParameterSlices]] = []
            for layer, gradients in layers.values():
                positions = place[layer.index.cpu()]
                chosen = (positions.flatten() >= 0).nonzero().squeeze(-1)
                if len(chosen) == layer.n_entries:
                    parts.append((gradients, ParameterSlices(positions)))
                elif len(chosen):
                    subset = SelectedGradients(gradients, chosen.to(gradients.device))
                    parts.append((subset, ParameterSlices(positions.flatten()[chosen][None, None])))
            yield layout, JoinedGradients(parts, layout.n_entries, layout.shape)

    def _general_gradients(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Gradients ``[V, B, *shape]`` of the parameters without calls, zero for those that are not used."""
        names = [plan.layout.names[0] for plan in self._plans if not plan.members]
        used = tuple(name for name in names if name not in self.capture.unused)
        values = self.network.per_example_gradients(self.capture.inputs, used, cotangents) if used else {}
        for item in self.network.selected:
            if item.name in names and item.name in self.capture.unused:
                values[item.name] = cotangents.new_zeros(*cotangents.shape[:2], *item.shape)
        return values

    def cotangent_chunks(self, n_cotangents: int) -> Iterator[slice]:
        """Slices of the cotangents whose gradients, all calls together, are of bounded size."""
        each = self.capture.cotangent_bytes
        for plan in self._plans:
            if not plan.members:
                each += 4 * self.capture.n_examples * plan.layout.n_entries
        return _memory.slices(n_cotangents, each, min(_COTANGENT_BYTES, _memory.budget(self.network.device) // 2))


def _plans(network: Network, calls: Sequence[Call]) -> list[_Plan]:
    """The blocks, in the order of their first use; last come the parameters without calls."""
    groups: dict[tuple[ParameterRows, ...], list[int]] = {}
    for number, call in enumerate(calls):
        groups.setdefault(call.rows, []).append(number)
    claims: dict[str, list[tuple[ParameterRows, ...]]] = {}  # of each parameter, the groups that use it
    for rows in groups:
        for name in set(map(_NAME, rows)):
            claims.setdefault(name, []).append(rows)
    general: set[str] = set()  # parameters with some use that does not fit the others take the general path altogether
    for rows, members in groups.items():
        names, starts, first = set(map(_NAME, rows)), set(map(_START, rows)), calls[members[0]]
        clean = True
        for number in members:
            call = calls[number]
            clean = clean and call.axis is not None and type(call) is type(first) and call.packed == first.packed
        for other in chain.from_iterable(map(claims.__getitem__, names)):
            # Other row ranges of the same weight (a split projection) do not interfere; other partners do.
            if other != rows:
                clean = clean and len(other) == len(rows) and starts.isdisjoint(map(_START, other))
        if not clean:
            general |= names
    plans: list[_Plan] = []
    covered: set[str] = set()
    for rows, members in groups.items():
        names, key = set(map(_NAME, rows)), ""
        for part in rows:
            key += ("+" if key else "") + (f"{part.name}[{part.start}:]" if part.start else part.name)
        if general.isdisjoint(names):
            plans.append(_plan(network, key, tuple(dict.fromkeys(map(_NAME, rows))), calls[members[0]], tuple(members)))
            covered |= names
    for name in network.parameter_names:
        if name not in covered:
            plans.append(_plan(network, name, (name,), None, ()))
    total = 0
    for plan in plans:
        total += plan.layout.n_entries
    if total != network.n_parameters:
        raise UnsupportedError(
            "The network used its parameters differently from one batch to the next.",
            expected="every selected parameter used in the same way in every batch",
            got=f"blocks that cover {total} of {network.n_parameters} selected entries",
            fix="Select only parameters that every input uses alike.",
        )
    return plans


def _plan(network: Network, key: str, names: tuple[str, ...], call: Call | None, members: tuple[int, ...]) -> _Plan:
    rule = GENERAL if call is None else call.rule
    key = f"{key} ({rule})"
    items: list[Selected] = []
    empty: dict[str, Tensor] = {}
    for item in network.selected:
        if item.name in names:
            items.append(item)
            if item.mask is None:
                empty[item.name] = torch.empty((), dtype=torch.bool).expand(item.shape)
    if call is not None:
        call = replace(call, value=call.value.new_empty(0))  # the captured input must not be kept alive
        if len(empty) == len(items):
            index_later = partial(_index, call, items, network.offsets)
            return _Plan(Layout(key, names, rule, index_later, call.index(empty).shape), members, None)
    index = _index(call, items, network.offsets)
    if call is not None and bool((index >= 0).all()):
        return _Plan(Layout(key, names, rule, index), members, None)
    chosen = (index.flatten() >= 0).nonzero().squeeze(-1)
    layout = Layout(key, names, GENERAL, index.flatten()[chosen][None, None])
    return _Plan(layout, members, None if len(chosen) == index.numel() else chosen)


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
        return EmbeddingGradients(index, left, uses[0].n_columns)
    return DenseGradients(torch.stack([use.dense(slice(None)) for use in uses]).sum(0))


# -- micro-batches -----------------------------------------------------------------------------------------------------


def micro_batches(network: Network, batch: Batch) -> Iterator[tuple[Batch, Gradients]]:
    """A batch's gradients, in micro-batches where the whole batch would take too much memory.

    Two examples of a network's first batch run by themselves, to measure the memory of one example. Inputs stay
    together that do not have their examples along the first axes, or whose examples depend on each other.
    ConfigurationError if the memory budget does not hold the gradients of one output for one example.
    """
    size = step = len(batch.target) if isinstance(batch.target, Tensor) and batch.target.ndim else 0
    first = first_look(network, batch)
    if size and network.can_cut is not False and batches.can_be_cut(batch.inputs, size):
        each, allowed = network.bytes_per_example or 0, _memory.budget(network.device)
        quick = allowed // 2
        if network.device.type == "cpu":
            quick = max(min(_GRAPH_BYTES, quick), allowed // _GRAPH_SHARE)
        if each * size > quick and network.can_cut is None:
            network.can_cut = runs_apart(network, batch, first)
        if each * size > quick and network.can_cut:
            _memory.require_room(each, "the gradients of one output for one example", network.device)
            step = max(1, quick // each)
    if step >= size:
        whole = first if first is not None and first.inputs is batch.inputs else capture_batch(network, batch)
        yield batch, Gradients(network, whole)
        return
    del first
    for some in _memory.slices(size, 1, step):
        part = Batch(batches.cut(batch.inputs, some), batch.target[some])
        yield part, Gradients(network, capture_batch(network, part))


def first_look(network: Network, batch: Batch) -> Capture | None:
    """A capture of two examples of a network's first batch, or all where they may not be cut; None for later ones.

    The network remembers the memory of one example, and which layer is the last one.
    """
    if network.bytes_per_example is not None:
        return None
    size = len(batch.target) if isinstance(batch.target, Tensor) and batch.target.ndim else 0
    # No layer before the last one leaves a graph, so that its first batch tells as much, if no budget was given.
    whole = isinstance(network.selection, str) and network.selection == "last_layer" and not _memory.is_given()
    if size > 2 and not whole and network.can_cut is not False and batches.can_be_cut(batch.inputs, size):  # noqa: PLR2004

        def look() -> Capture:
            ends = Batch(batches.cut(batch.inputs, [0, size - 1]), batch.target[[0, size - 1]])
            find_axes(network, pair := capture_batch(network, ends))
            return pair

        pair, _ = tried(look)
        if pair is not None:
            return pair
        network.can_cut = False  # a network for batches of one size, or a batch that is refused as a whole
    return capture_batch(network, batch)


def bytes_per_example(network: Network, inputs: Any) -> int:
    """What the network remembers of it, after a look at inputs where a posterior was loaded, or is of a function."""
    if network.bytes_per_example is None:
        first_look(network, Batch(inputs, torch.empty(batches.batch_size(inputs))))
    return network.bytes_per_example or 0


def pieces(network: Network, inputs: Any, bytes_each: int, allowed: int) -> list[Any]:
    """A batch's inputs, in parts of ``allowed`` bytes where they take more and examples do not depend on each other."""
    size = batches.batch_size(inputs) if bytes_each and network.can_cut is None else 0
    if bytes_each * size > allowed and size > 1 and batches.can_be_cut(inputs, size):
        network.can_cut = runs_apart(network, Batch(inputs, torch.empty(size)))
    return network.cut(inputs, bytes_each, allowed)


def forward_parts(network: Network, inputs: Any) -> list[Any]:
    """Inputs in parts whose forward passes half the memory budget holds, where the network lets itself be looked at."""
    tried(lambda: bytes_per_example(network, inputs))  # derivatives are not asked for
    return pieces(network, inputs, network.bytes_forward, _memory.budget(network.device) // 2)


def runs_apart(network: Network, batch: Batch, ends: Capture | None = None) -> bool | None:
    """Whether an example's outputs do not depend on the others; None where the batch does not tell.

    The first example runs with the last one that differs from it, unless ``ends`` is that run, and each of them alone.
    ConfigurationError if a given memory budget does not hold the gradients of two examples.
    """
    both = 2 * (network.bytes_per_example or 0)
    _memory.require_room(both, "the gradients of one output for two examples", network.device, if_given=True)
    other = 0
    for leaf in batches.flatten(batch.inputs)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim:
            differs = (leaf != leaf[:1]).reshape(len(leaf), -1).any(1).nonzero()
            other = max(other, int(differs[-1])) if len(differs) else other
    if not other:
        return None

    def look() -> bool:
        capture = ends if other == len(batch.target) - 1 else None
        if capture is None:
            capture = capture_batch(network, Batch(batches.cut(batch.inputs, [0, other]), batch.target[[0, other]]))
        Gradients(network, capture)  # refuses what it cannot tell apart
        alone = torch.cat([network.forward(batches.cut(batch.inputs, [number])) for number in (0, other)])
        return same_outputs(alone, capture.outputs.view(capture.output_shape))

    return tried(look)[0] or False


def same_outputs(some: Tensor, among_others: Tensor) -> bool:
    """Whether the outputs of some examples are, up to rounding, their outputs in a larger batch."""
    if some.shape != among_others.shape:
        return False
    rounding = min(1e3 * torch.finfo(among_others.dtype).eps, 0.05)
    return bool((some - among_others).abs().max() <= rounding * among_others.abs().max())


# -- gradients of the loss ---------------------------------------------------------------------------------------------


def evaluate(network: Network, vector: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    """A leaf with the entries of ``vector [P]``, and the outputs ``[B, *, C]`` as a differentiable function of it."""
    with torch.enable_grad(), differentiable_kernels(network.model):
        point = vector.detach().requires_grad_()
        return point, network(inputs, network.substitute(point)).to(point.dtype)


def loss_gradient(network: Network, likelihood: Likelihood, batch: Batch, vector: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient ``[P]`` of a batch's negative log-likelihood at ``vector``, with its graph, and the leaf of that."""
    point, outputs = evaluate(network, vector, batch.inputs)
    with torch.enable_grad():
        rows, targets, weight = likelihood.rows(outputs, batch.target)
        loss = -(likelihood.log_density(rows, targets) * weight).sum()
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
