"""Which layer is the last one on the path to the outputs, and whether its outputs are the network's, only rearranged.

Execution order alone is misled by an auxiliary head that runs after the main one, and by a layer that only feeds a
metric. A layer from which no gradient reaches the outputs is never the last one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from laplace_plus.network.calls import Call
from laplace_plus.network.network import Network
from laplace_plus.network.selection import layer_of

_ASKED = ((0, 8), (8, 32), (32, None))
"""Which parameters autograd is asked about together, counted from the end. An auxiliary head often has fewer than 8."""


_NAMES = (
    "permute movedim moveaxis transpose swapaxes swapdims t squeeze unsqueeze clone contiguous reshape view flatten"
)
_NAMES += " unflatten ravel view_as reshape_as __getitem__"
REARRANGING = {getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES.split() if hasattr(owner, name)}
REARRANGING |= {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
"""Functions behind a head after which its outputs may still be the network's, in another order."""


def reached(network: Network, inputs: Any, names: Collection[str]) -> dict[str, bool]:
    """Whether a gradient of the outputs reaches parameters, by one forward pass and what is behind them backwards."""
    parameters = network.parameters
    leaves = {n: parameters[n].clone().requires_grad_() for n in names if parameters[n].is_floating_point()}
    found: Sequence[Tensor | None] = [None] * len(leaves)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the passes that count give the same warnings
        outputs = network(inputs, leaves)
        if outputs.requires_grad and leaves:
            found = torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
    answers = {name: gradient is not None for name, gradient in zip(leaves, found, strict=True)}
    return dict.fromkeys(names, False) | answers


def last_layer(network: Network, inputs: Any, uses: list[str], calls: Sequence[Call], output: Tensor) -> str:
    """The layer that is used last of those from which a gradient reaches the outputs; the network remembers it.

    A layer that is not selected is returned untried, since the pass that records it tells at no cost. Where no gradient
    reaches a selected one, autograd is asked about those before it. ``uses`` are the names of parameters as they were
    used, ``calls`` those uses that were recorded, on the way to the ``output``.
    """
    known, answers, used = network.reached, dict[str, bool](), dict.fromkeys(reversed(uses))
    # Parameters that no visible call uses may be those of a scripted head.
    order = [name for name in network.parameter_names if name not in used] + list(used)
    left = [name for name in order if known.get(name) is not False] or order
    latest = layer_of(left[0])
    if known.get(left[0]) or latest not in network.layers:
        return latest
    if _comes_from(output, {call.edge.node for call in calls if left[0] in [rows.name for rows in call.rows]}):
        known[left[0]] = True
        return latest
    for start, stop in _ASKED:
        answers |= reached(network, inputs, left[start:stop])
        for name in answers:
            if answers[name]:
                known.update(answers)
                return layer_of(name)
    return latest


def _comes_from(output: Tensor, nodes: Collection[Node]) -> bool:
    """Whether an output was computed from the results of one of the nodes."""
    waiting, seen = [output.grad_fn], set[Node | None]([None])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            if node in nodes:
                return True
            seen.add(node)
            waiting.extend(before for before, _ in node.next_functions)  # type: ignore[union-attr]
    return False


def rows_of(call: Call, moves: Sequence[Any], network: Network) -> Tensor | None:
    """Which position of a call's output, after functions with further arguments, each arranged output is, ``[B']``.

    None unless every position is one row, with its features in order. Numbers are moved in place of the outputs.
    """
    lead = [*call.output_shape]
    size = lead.pop(call.feature_axis)
    numbers, features = torch.arange(float(math.prod(lead))), torch.arange(float(size))
    moved = []
    for values in (numbers.view(lead).unsqueeze(-1).expand(*lead, size), features.expand(*lead, size)):
        own = values.movedim(-1, call.feature_axis)
        for function, arguments, options in moves:
            own = function(own, *arguments, **options)
        moved.append(network.arrange(own).flatten(0, -2))
    rows, columns = moved
    fits = lead and len(numbers) <= 2**24 and rows.shape == (len(numbers), size)  # float32 counts no further
    if not fits or bool((rows != rows[:, :1]).any() or (columns != features).any()):
        return None
    return rows[:, 0].long() if torch.equal(rows[:, 0].sort().values, numbers) else None
