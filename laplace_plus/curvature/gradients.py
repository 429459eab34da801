"""Per-example gradients of a whole network, block by block.

The calls of a :class:`~laplace_plus.curvature.capture.Capture` are grouped into *blocks*: one for each weight and its
bias (all uses of a tied weight together), one for each parameter that no rule covers. Blocks partition the parameter
vector. For each block and each set of cotangents there is a stack of per-example gradients; everything else – dense,
diagonal and Kronecker curvature, functional variance – is made of these stacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.curvature.calls import Call, EmbeddingCall, ExampleAxis, NormalisationCall, by_example
from laplace_plus.curvature.capture import Capture
from laplace_plus.errors import UnsupportedError
from laplace_plus.linalg.stacks import (
    CHUNK_BYTES,
    DenseStack,
    JoinedStack,
    OneHotStack,
    OuterStack,
    Stack,
    SubsetStack,
    concatenate,
)
from laplace_plus.network import Network

MATRIX, EMBEDDING, CHANNELS, GENERAL = "matrix", "embedding", "per channel", "general"


@dataclass(frozen=True)
class Layout:
    """Where a block's ``[G, o, i]`` array lies in the parameter vector.

    Attributes:
        key: Identifies the block within its network.
        names: The parameters that it covers, wholly or in part.
        rule: How its gradients come about: ``"matrix"``, ``"embedding"``, ``"per channel"`` or ``"general"``.
        index: ``[G, o, i]`` positions in the parameter vector.
    """

    key: str
    names: tuple[str, ...]
    rule: str
    index: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(G, o, i)``."""
        return tuple(self.index.shape)  # type: ignore[return-value]

    def gather(self, vector: Tensor) -> Tensor:
        """The block's part of ``[…, P]`` vectors, ``[…, G, o, i]``."""
        return vector[..., self.index.to(vector.device)]

    def scatter_(self, vector: Tensor, values: Tensor) -> None:
        """Write ``[…, G, o, i]`` values to their places in ``[…, P]`` vectors."""
        vector[..., self.index.to(vector.device)] = values.to(vector.dtype)


def whole_layout(network: Network) -> Layout:
    """One block that covers the parameter vector in its own order."""
    return Layout("all", network.parameter_names, GENERAL, torch.arange(network.n_parameters)[None, None])


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

        The result is kept on the network, so that this takes one extra backward pass per network. Calls without
        such an axis (a table of positions shared by the batch) are left to the general path.
        """
        calls = self.capture.calls
        known = self.network.example_axes
        labels = self._labels(calls)
        if self.capture.pointwise:
            self.axes: list[ExampleAxis | None] = [ExampleAxis(0, False)] * len(calls)
            return
        if not all(label in known for label in labels):
            capture = self.capture
            if capture.n_examples == 1:  # one example tells nothing: look at it beside a copy of itself
                capture = Capture(self.network, _doubled(capture.inputs))
                calls = capture.calls
            outputs = capture.outputs
            last = outputs.shape[0] - 1
            probes = torch.zeros(2, *outputs.shape, dtype=outputs.dtype, device=outputs.device)
            # Deterministic, and generic enough that no gradient vanishes by symmetry.
            pattern = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
            probes[0, 0] = pattern.view_as(outputs[0])
            probes[1, last] = pattern.flip(0).view_as(outputs[0])
            for label, call, gradient in zip(labels, calls, capture.gradients(probes), strict=True):
                known[label] = _example_axis(call, gradient, outputs.shape[0], (0, last))
        self.axes = [known[label] for label in labels]

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
        self._layouts: dict[str, Layout] = self.network.layouts
        for key, (call, members) in kept.items():
            names = tuple(dict.fromkeys(rows.name for rows in call.rows))
            if dirty & set(names):
                continue
            general -= set(names)
            self._members[key] = members
            if key not in self._layouts:
                self._layouts[key] = Layout(key, names, _rule_of(call), self._index(call))
        self.general = tuple(name for name in self.network.parameter_names if name in general)
        for name in self.general:
            if name not in self._layouts:
                positions = self._positions()[name].flatten()
                self._layouts[name] = Layout(name, (name,), GENERAL, positions[positions >= 0][None, None])
        self.layouts = tuple(self._layouts[key] for key in (*self._members, *self.general))
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

    def _positions(self) -> dict[str, Tensor]:
        """For each parameter, the places of its entries in the parameter vector (−1 for unselected ones)."""
        result = {}
        offsets = self.network.offsets()
        for item in self.network.selected:
            if item.mask is None:
                place = torch.arange(item.size) + offsets[item.name]
            else:
                place = torch.full((item.shape.numel(),), -1)
                place[item.mask.cpu()] = torch.arange(item.size) + offsets[item.name]
            result[item.name] = place.view(item.shape)
        return result

    def _index(self, call: Call) -> Tensor:
        return call.index(self._positions())

    def _check_partition(self) -> None:
        total = sum(int((layout.index >= 0).sum()) for layout in self.layouts)
        if total != self.network.n_parameters:
            raise UnsupportedError(
                "The network used its parameters differently from one batch to the next.",
                expected="every selected parameter used in the same way in every batch",
                got=f"blocks that cover {total} of {self.network.n_parameters} selected entries",
                fix="Select only parameters that every input uses alike.",
            )

    # -- stacks --------------------------------------------------------------------------------------------------------

    def stacks(self, cotangents: Tensor) -> Iterator[tuple[Layout, Stack]]:
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
                yield self._selected(self._layouts[name], DenseStack(flat), name)

    def whole(self, cotangents: Tensor) -> tuple[Layout, JoinedStack]:
        """The gradients over all selected entries as one block ``[1, 1, P]``, for structures whose P is small."""
        parts = [(stack, layout.index) for layout, stack in self.stacks(cotangents)]
        return whole_layout(self.network), JoinedStack(parts, self.network.n_parameters)

    def _use(self, number: int, gradient: Tensor) -> Stack:
        call = self.capture.calls[number]
        axis = self.axes[number]
        assert axis is not None
        if not self.capture.pointwise:
            return call.stack(gradient, self.capture.n_examples, axis)
        stack = call.stack(gradient, self.capture.output_shape[0], axis)
        if isinstance(stack, OuterStack):
            # Every position is an example of its own.
            left, right = stack.sides(slice(0, stack.n_examples))
            return OuterStack(right.flatten(0, 1)[:, None], left.flatten(1, 2)[:, :, None])
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

    def _selected(self, layout: Layout, stack: Stack, general: str | None = None) -> tuple[Layout, Stack]:
        if general is not None:
            mask = next(item.mask for item in self.network.selected if item.name == general)
            if mask is None:
                return layout, stack
            return layout, SubsetStack(stack, mask.to(stack.device).nonzero().squeeze(-1))
        if bool((layout.index >= 0).all()):
            return layout, stack
        flat = layout.index.flatten()
        chosen = (flat >= 0).nonzero().squeeze(-1)
        partial = Layout(layout.key, layout.names, GENERAL, flat[chosen][None, None])
        return partial, SubsetStack(stack, chosen.to(stack.device))

    def direction_chunks(self, n_directions: int) -> Iterator[slice]:
        """Slices of the directions whose gradients, all calls together, are of bounded size."""
        each = self.capture.activation_elements() * 4
        for name in self.general:
            each += 4 * self.capture.n_examples * sum(self._layouts[name].shape[2:])
        step = max(1, self.memory_budget // max(1, each))
        for start in range(0, n_directions, step):
            yield slice(start, min(start + step, n_directions))

    memory_budget: int = 2 * CHUNK_BYTES


def _doubled(inputs: Any) -> Any:
    leaves, rebuild = batches.flatten(inputs)
    return rebuild([
        torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == 1 else leaf
        for leaf in leaves
    ])


def _rule_of(call: Call) -> str:
    if isinstance(call, EmbeddingCall):
        return EMBEDDING
    return CHANNELS if isinstance(call, NormalisationCall) else MATRIX


def _sum(stacks: list[Stack]) -> Stack:
    """The gradient of a weight that is used several times."""
    if len(stacks) == 1:
        return stacks[0]
    if all(isinstance(stack, OuterStack) for stack in stacks):
        return concatenate([stack for stack in stacks if isinstance(stack, OuterStack)])
    if all(isinstance(stack, OneHotStack) for stack in stacks):
        hot = [stack for stack in stacks if isinstance(stack, OneHotStack)]
        return OneHotStack(
            torch.cat([stack.index for stack in hot], 1), torch.cat([stack.left for stack in hot], 2), hot[0].n_columns
        )
    every = slice(None)
    return DenseStack(torch.stack([stack.dense(every) for stack in stacks]).sum(0))


def _example_axis(call: Call, gradient: Tensor, n_examples: int, probes: tuple[int, int]) -> ExampleAxis | None:
    """The first place along which a single example's output only reaches that example's part."""
    for axis in call.example_axes:
        if gradient.shape[1 + axis] % n_examples:
            continue
        for innermost in (False, True):
            where = ExampleAxis(axis, innermost)
            reached = (by_example(gradient, n_examples, where, lead=1).flatten(2) != 0).any(-1)  # [2, B]
            allowed = torch.zeros_like(reached)
            allowed[0, probes[0]] = allowed[1, probes[1]] = True
            if not (reached & ~allowed).any():
                return where
    return None
