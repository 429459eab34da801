"""Per-example gradients of a whole network, block by block.

The calls of a :class:`~laplace_plus.curvature.capture.Capture` are grouped into *blocks*: one for each weight and its
bias (all uses of a tied weight together), one for each parameter that no rule covers. Blocks partition the parameter
vector. For each block and each set of cotangents there is a stack of per-example gradients; everything else – dense,
diagonal and Kronecker curvature, functional variance – is made of these stacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from laplace_plus import _memory, batches
from laplace_plus.curvature.calls import BroadcastCall, Call, EmbeddingCall, ExampleAxis, NormalisationCall, by_example
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.layouts import CHANNELS, EMBEDDING, GENERAL, MATRIX, Layout, whole_layout
from laplace_plus.errors import UnsupportedError
from laplace_plus.network import Network
from laplace_plus.selection import Selected
from laplace_plus.structured.gradients import (
    DenseGradients,
    EmbeddingGradients,
    ExampleGradients,
    JoinedGradients,
    OuterGradients,
    SelectedGradients,
    concatenate,
)

_DIRECTION_BYTES = 512 * 2**20
"""What the gradients of the directions that go backwards together may take: more would not be quicker."""

_MAX_PROBES = 16
"""How many pairs of examples are tried before a call is left to the general path."""


class Gradients:
    """Per-example gradients for the batch behind a capture.

    Args:
        network: The network.
        capture: Its capture of a batch.
    """

    def __init__(self, network: Network, capture: Capture):
        self.network = network
        self.capture = capture
        self._find_example_axes()
        self._plan()

    # -- which axis of each call runs over examples --------------------------------------------------------------------

    def _find_example_axes(self) -> None:
        """Find the example axis of every call, by looking which gradients a single example's output reaches.

        Calls without such an axis (a table of positions shared by the batch) are left to the general path. Where every
        input has the examples along its first axis, the result is kept on the network, so that this takes one extra
        backward pass per network. Other inputs (the nodes of all graphs in one table, time before batch) are looked at
        anew in every batch, because a table of one batch may be divisible into examples by chance.
        """
        calls = self.capture.calls
        labels = self._labels(calls)
        self.axes: list[ExampleAxis | None] = [ExampleAxis(0, False)] * len(calls)
        if self.capture.pointwise:
            return
        along_first = _examples_come_first(self.capture.inputs, self.capture.n_examples)
        known = self.network.example_axes
        if all(along_first) and all(label in known for label in labels):
            self.axes = [known[label] for label in labels]
            return
        # One example tells nothing: look at it beside a copy of itself.
        capture = self.capture if self.capture.n_examples > 1 else self._beside_itself()
        if capture is None:  # then it is treated as it was in other batches
            self.axes = [known.get(label) for label in labels]
            return
        searches = self._search(capture, exact=not any(along_first))
        for number, (label, search) in enumerate(zip(labels, searches, strict=True)):
            self.axes[number] = known.get(label, search.axis) if all(along_first) else search.axis
            # Learnt once: a later, malformed input must not change it.
            if search.axis is not None and search.n_witnesses >= 2:
                known.setdefault(label, search.axis)

    def _search(self, capture: Capture, *, exact: bool) -> list[_AxisSearch]:
        """Look for the example axis of each call.

        Args:
            capture: At least two examples.
            exact: Whether the axis must hold one entry for each example rather than a multiple.
        """
        outputs, n = capture.outputs, capture.n_examples
        searches = [_AxisSearch(call, n, exact) for call in capture.calls]
        # Deterministic, and generic enough that no gradient vanishes by symmetry.
        pattern = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
        patterns = torch.stack([pattern, pattern.flip(0)]).view(2, *outputs[0].shape)
        # Two examples are enough, unless all units of some layer happen to be dead for them.
        for first in range(min((n + 1) // 2, _MAX_PROBES)):
            examples = sorted({first, n - 1 - first})
            probes = outputs.new_zeros(len(examples), *outputs.shape)
            for row, example in enumerate(examples):
                probes[row, example] = patterns[row]
            for search, gradient in zip(searches, capture.gradients(probes), strict=True):
                search.narrow(gradient, examples)
            if all(search.is_settled for search in searches):
                break
            if first == 0:
                everything = patterns[:1, None].expand(1, n, *outputs.shape[1:])
                for search, gradient in zip(searches, capture.gradients(everything), strict=True):
                    search.is_unreached = not bool(gradient.any())
        return searches

    def _beside_itself(self) -> Capture | None:
        """A capture of the batch's one example twice, or None where its inputs cannot be doubled."""
        for axis in (0, 1):
            try:
                capture = Capture(self.network, _doubled(self.capture.inputs, axis))
            except Exception:  # noqa: BLE001, S112  -- the inputs were not meant to be doubled along this axis
                continue
            if capture.n_examples == 2 and self._labels(capture.calls) == self._labels(self.capture.calls):
                return capture
        return None

    @staticmethod
    def _labels(calls: Sequence[Call]) -> list[str]:
        counts: dict[str, int] = {}
        labels = []
        for call in calls:
            name = "+".join(f"{rows.name}[{rows.start}]" for rows in call.rows)
            counts[name] = counts.get(name, 0) + 1
            labels.append(f"{name}#{counts[name]}")
        return labels

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Group the calls into blocks, in the order of the parameter vector."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for number, call in enumerate(self.capture.calls):
            groups.setdefault(tuple((rows.name, rows.start) for rows in call.rows), []).append(number)
        self._members: dict[str, list[int]] = {}
        general = set(self.network.parameter_names)
        claims: dict[str, set[tuple[tuple[str, int], ...]]] = {}
        for rows in groups:
            for name, _ in rows:
                claims.setdefault(name, set()).add(rows)
        kept: dict[str, tuple[Call, list[int]]] = {}
        for rows, members in groups.items():
            if self._is_clean(rows, members, claims):
                key = "+".join(name if start == 0 else f"{name}[{start}:]" for name, start in rows)
                kept[key] = (self.capture.calls[members[0]], members)
        covered = {rows.name for call, _ in kept.values() for rows in call.rows}
        # A parameter that is clean in one call but not in another takes the general path altogether.
        dirty = {name for rows in groups for name, _ in rows} - covered
        self._layouts: dict[str, Layout] = {}
        for key, (call, members) in kept.items():
            names = tuple(dict.fromkeys(rows.name for rows in call.rows))
            if dirty & set(names):
                continue
            general -= set(names)
            self._members[key] = members
            self._layouts[key] = self._layout(key, names, _rule_of(call), call)
        self.general = tuple(name for name in self.network.parameter_names if name in general)
        for name in self.general:
            self._layouts[name] = self._layout(name, (name,), GENERAL, None)
        self.layouts = tuple(self._layouts[key].selected for key in (*self._members, *self.general))
        self._check_partition()

    def _is_clean(
        self, rows: tuple[tuple[str, int], ...], members: list[int], claims: dict[str, set[tuple[tuple[str, int], ...]]]
    ) -> bool:
        calls = [self.capture.calls[number] for number in members]
        first = calls[0]
        if any(self.axes[number] is None for number in members):
            return False
        if any(type(call) is not type(first) or call.packed != first.packed for call in calls):
            return False
        for name, start in rows:
            for other in claims[name]:
                # Other row ranges of the same weight (a split projection) do not interfere; other partners do.
                if other != rows and (len(other) != len(rows) or any(s == start for n, s in other if n == name)):
                    return False
        return True

    def _layout(self, key: str, names: tuple[str, ...], rule: str, call: Call | None) -> Layout:
        """The block's layout, kept on the network: it only depends on what identifies it here."""
        identity = (key, rule, None if call is None else call.signature)
        if identity not in self.network.layouts:
            self.network.layouts[identity] = self._new_layout(f"{key} ({rule})", names, rule, call)
        layout: Layout = self.network.layouts[identity]
        return layout

    def _new_layout(self, key: str, names: tuple[str, ...], rule: str, call: Call | None) -> Layout:
        items = tuple(item for item in self.network.selected if item.name in names)
        offsets = self.network.offsets()
        if call is None:
            flat = _positions(items, offsets)[names[0]].flatten()
            return Layout(key, names, rule, flat[flat >= 0][None, None])
        if any(item.mask is not None for item in items):
            return Layout(key, names, rule, call.index(_positions(items, offsets)))
        shape = call.index({item.name: torch.empty(item.shape, device="meta") for item in items}).shape
        # Without the captured input, which must not be kept alive.
        placing = replace(call, value=call.value.new_empty(0))
        return Layout(key, names, rule, partial(_index, placing, items, offsets), tuple(shape))

    def _check_partition(self) -> None:
        total = sum(layout.n_entries for layout in self.layouts)
        if total != self.network.n_parameters:
            raise UnsupportedError(
                "The network used its parameters differently from one batch to the next.",
                expected="every selected parameter used in the same way in every batch",
                got=f"blocks that cover {total} of {self.network.n_parameters} selected entries",
                fix="Select only parameters that every input uses alike.",
            )

    # -- stacks --------------------------------------------------------------------------------------------------------

    def stacks(self, cotangents: Tensor) -> Iterator[tuple[Layout, ExampleGradients]]:
        """Each block's gradients for cotangents ``[V, B, *, C]``.

        Blocks of which only some entries are selected come as ``[1, 1, n]`` matrices of those.
        """
        gradients = self.capture.gradients(cotangents)
        for key, members in self._members.items():
            uses = [self._use(number, gradients[number]) for number in members]
            yield self._selected(self._layouts[key], _sum(uses))
        if self.general:
            values = self._general_gradients(cotangents)
            for name in self.general:
                flat = values[name].reshape(*cotangents.shape[:2], 1, 1, -1)  # a parameter may be 0-d
                yield self._selected(self._layouts[name], DenseGradients(flat), name)

    def whole(self, cotangents: Tensor) -> tuple[Layout, JoinedGradients]:
        """The gradients over all selected entries as one block ``[1, 1, P]``, for structures whose P is small."""
        parts = [(stack, layout.index) for layout, stack in self.stacks(cotangents)]
        return whole_layout(self.network), JoinedGradients(parts, self.network.n_parameters)

    def _use(self, number: int, gradient: Tensor) -> ExampleGradients:
        call = self.capture.calls[number]
        if call.value._version != call.version:
            raise UnsupportedError(
                f"The network writes into the input of {call.rows[0].name!r} after it was used.",
                expected="inputs of layers that stay what they were, which training needs, too",
                got="a tensor that was modified in place",
                fix="Use x = x * 3 instead of x.mul_(3), or leave the layer out of the selection.",
            )
        axis = self.axes[number]
        assert axis is not None
        if not self.capture.pointwise:
            return call.stack(gradient, self.capture.n_examples, axis)
        stack = call.stack(gradient, self.capture.output_shape[0], axis)
        if isinstance(stack, OuterGradients):
            # Every position is an example of its own.
            left, right = stack.sides(slice(0, stack.n_examples))
            return OuterGradients(right.flatten(0, 1)[:, None], left.flatten(1, 2)[:, :, None])
        return stack

    def _general_gradients(self, cotangents: Tensor) -> dict[str, Tensor]:
        used = tuple(name for name in self.general if name not in self.capture.unused)
        shapes = {item.name: item.shape for item in self.network.selected}
        values = {
            name: cotangents.new_zeros(*cotangents.shape[:2], *shapes[name])
            for name in self.general
            if name in self.capture.unused
        }
        if used:
            values |= self.network.per_example_gradients(self.capture.inputs, used, cotangents)
        return values

    def _selected(
        self, layout: Layout, stack: ExampleGradients, general: str | None = None
    ) -> tuple[Layout, ExampleGradients]:
        if general is not None:
            mask = next(item.mask for item in self.network.selected if item.name == general)
            if mask is None:
                return layout, stack
            return layout, SelectedGradients(stack, mask.to(stack.device).nonzero().squeeze(-1))
        if layout.is_whole:
            return layout, stack
        return layout.selected, SelectedGradients(stack, layout.chosen.to(stack.device))

    def direction_chunks(self, n_directions: int) -> Iterator[slice]:
        """Slices of the directions whose gradients, all calls together, are of bounded size."""
        each = self.capture.direction_bytes()
        for name in self.general:
            each += 4 * self.capture.n_examples * sum(self._layouts[name].shape[2:])
        step = max(1, min(_DIRECTION_BYTES, _memory.budget(self.network.device) // 2) // max(1, each))
        for start in range(0, n_directions, step):
            yield slice(start, min(start + step, n_directions))


def _positions(items: Sequence[Selected], offsets: dict[str, int]) -> dict[str, Tensor]:
    """For each parameter, the places of its entries in the parameter vector (−1 for unselected ones)."""
    result = {}
    for item in items:
        if item.mask is None:
            place = torch.arange(item.size) + offsets[item.name]
        else:
            place = torch.full((item.shape.numel(),), -1)
            place[item.mask.cpu()] = torch.arange(item.size) + offsets[item.name]
        result[item.name] = place.view(item.shape)
    return result


def _index(call: Call, items: Sequence[Selected], offsets: dict[str, int]) -> Tensor:
    return call.index(_positions(items, offsets))


def _doubled(inputs: Any, axis: int) -> Any:
    """Inputs of one example, twice."""

    def double(leaf: Any) -> Any:
        single = isinstance(leaf, Tensor) and leaf.ndim > axis and leaf.shape[axis] == 1
        return torch.cat([leaf, leaf], axis) if single else leaf

    leaves, rebuild = batches.flatten(inputs)
    return rebuild([double(leaf) for leaf in leaves])


def _examples_come_first(inputs: Any, n_examples: int) -> list[bool]:
    """For each tensor of the inputs, whether its first axis runs over the examples."""
    leaves, _ = batches.flatten(inputs)
    return [
        isinstance(leaf, Tensor) and leaf.shape[0] == n_examples
        for leaf in leaves
        if (isinstance(leaf, Tensor) and leaf.ndim > 0) or isinstance(leaf, PackedSequence)
    ]


def _rule_of(call: Call) -> str:
    if isinstance(call, EmbeddingCall):
        return EMBEDDING
    if isinstance(call, BroadcastCall):
        return GENERAL
    return CHANNELS if isinstance(call, NormalisationCall) else MATRIX


def _sum(stacks: list[ExampleGradients]) -> ExampleGradients:
    """The gradient of a weight that is used several times."""
    if len(stacks) == 1:
        return stacks[0]
    if all(isinstance(stack, OuterGradients) for stack in stacks):
        return concatenate([stack for stack in stacks if isinstance(stack, OuterGradients)])
    if all(isinstance(stack, EmbeddingGradients) for stack in stacks):
        hot = [stack for stack in stacks if isinstance(stack, EmbeddingGradients)]
        return EmbeddingGradients(
            torch.cat([stack.index for stack in hot], 1), torch.cat([stack.left for stack in hot], 2), hot[0].n_columns
        )
    every = slice(None)
    return DenseGradients(torch.stack([stack.dense(every) for stack in stacks]).sum(0))


class _AxisSearch:
    """The places in a call's output along which examples may lie, narrowed down by what single examples reach."""

    def __init__(self, call: Call, n_examples: int, exact: bool):
        self.call, self.n_examples, self.exact = call, n_examples, exact
        self.candidates: list[ExampleAxis] | None = None
        self.probed: set[int] = set()
        self.n_witnesses = 0
        self.is_unreached = False

    def narrow(self, gradient: Tensor, examples: list[int]) -> None:
        """Take the gradients ``[v, *output shape]`` of some examples' outputs into account."""
        if self.candidates is None:
            self.candidates = [
                ExampleAxis(axis, innermost)
                for axis in self.call.example_axes
                if self._divides(gradient.shape[1 + axis])
                for innermost in (False, True)
            ]
        for row, example in zip(gradient, examples, strict=True):
            self.probed.add(example)
            if row.any():
                self.n_witnesses += 1
                self.candidates = [where for where in self.candidates if self._reaches_only(row, example, where)]

    def _divides(self, size: int) -> bool:
        return size == self.n_examples if self.exact else size % self.n_examples == 0

    def _reaches_only(self, row: Tensor, example: int, where: ExampleAxis) -> bool:
        reached = by_example(row, self.n_examples, where).flatten(1).any(-1)
        reached[example] = False
        return not bool(reached.any())

    @property
    def is_settled(self) -> bool:
        """Whether further examples would not change the answer."""
        return self.n_witnesses >= 2 or not self.candidates or self.is_unreached

    @property
    def axis(self) -> ExampleAxis | None:
        """The first place that agrees with every example seen; None if there is none, or too few were seen to tell."""
        told = self.is_settled or len(self.probed) == self.n_examples
        return self.candidates[0] if self.candidates and told else None
