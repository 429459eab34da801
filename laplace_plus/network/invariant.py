"""The one invariant of per-example gradients, and what it tells about the rows of a batch.

Let ``g_n`` be the per-example gradients that the blocks' rules give for a cotangent u. For generic weights w,
``Σ_n w_n g_n`` must be the plain gradient for the cotangent ``w_n u_n``, which takes one more backward pass. At the
output of a call this says of every row which example it belongs to: its gradient is scaled by that example's weight.
Rows along an axis are tried first, then rows in another order. Where a row has no single example, the outputs of each
example are differentiated by themselves; a parameter whose blocks still miss the invariant takes the general path.

Every batch is examined, or the first of its kind where the graph tells that each example stays by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError, warn
from laplace_plus.network.calls import FIRST, Call, ExampleAxis, ParameterRows, by_example
from laplace_plus.network.capture import Capture, generic
from laplace_plus.network.moves import places
from laplace_plus.network.network import Network
from laplace_plus.structured.gradients import ExampleGradients, OuterGradients

Rows = ExampleAxis | Tensor | None
"""Which example each row of a call's output belongs to: an axis, an order of axis 0, or None for no single one."""

_NAME = attrgetter("name")
_ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3}


@dataclass
class Examined:
    """What is known about a batch.

    Attributes:
        rows: For each recorded call.
        general: Parameters whose recorded calls do not tell their gradients.
        unused: Parameters that do not influence the outputs.
        unreached: Those and parameters that are used, but past any derivative.
        plans: The blocks that follow, once they are made.
    """

    rows: tuple[Rows, ...]
    general: frozenset[str]
    unused: frozenset[str]
    unreached: set[str]
    plans: Any = None


def examined(network: Network, capture: Capture) -> Examined:
    """What is known about a batch, from the batch itself or from one like it."""
    # What batches that need be examined once have in common: their calls, where examples lie, how sizes relate.
    n, where, leaves = capture.n_examples, None, frozenset[int]()
    if not capture.pointwise:
        where, leaves = places(capture.graph_outputs, [call.edge for call in capture.calls])
    is_alike = n == 1 or capture.pointwise or where is not None
    reached = frozenset([name for name, leaf in capture.leaves.items() if id(leaf) in leaves])
    kind = [n == 1, capture.pointwise, frozenset(capture.uncovered), reached]
    for number, call in enumerate(capture.calls):
        axis, outside, inside = (where and where[number]) or (-1, 1, 1)
        kind += [type(call), call.rows, call.packed, len(call.output_shape), axis, outside == 1, inside == 1]
        for size in call.output_shape[:2] if n > 1 else ():
            kind += [size % n == 0, size == n]
    key = tuple(kind)
    found = network.examined.get(key) if is_alike else None
    if found is None:
        found, is_certain = _examine(network, capture)
        if is_certain and is_alike:
            network.examined[key] = found
    capture.last_used = None
    for name in capture.uses:
        if name not in found.unreached:
            capture.last_used = name
    return found


def _examine(network: Network, capture: Capture) -> tuple[Examined, bool]:
    """What one batch tells, and whether its kind is: if a derivative reaches all calls, and rows lie along axes."""
    n, outputs = capture.n_examples, capture.graph_outputs
    cotangent = generic(outputs)
    source = torch.Generator().manual_seed(1)
    weights = 0.5 + (torch.randperm(n, generator=source) + torch.rand(n, generator=source)) / n
    weights = weights.to(outputs.device, torch.float64 if outputs.dtype == torch.float64 else torch.float32)
    weighted = cotangent * weights.to(outputs.dtype).view(-1, *[1] * (outputs.ndim - 1))
    before = capture.gradients(cotangent[None])
    after = capture.gradients(weighted[None], leaves=[*capture.leaves.values()])
    # How far results may be apart, relative to the largest entry: by the lowest precision in which layers compute.
    dtypes = {outputs.dtype, *[call.output_like["dtype"] for call in capture.calls]}
    dtypes.update([own.dtype for own in network.held.parameters.values() if own.is_floating_point()])
    rounding = 0.2 if dtypes.difference(_ROUNDING) else max(map(_ROUNDING.__getitem__, dtypes))
    is_finite = bool(torch.isfinite(outputs.detach().sum()))  # or else the caller's error is about that
    is_certain = is_finite  # and a derivative reaches every call
    rows: list[Rows] = []
    parts: list[str] = []
    costly = set[str]()
    for call, first, second in zip(capture.calls, before, after, strict=False):
        is_known = capture.pointwise or not is_finite
        rows.append(FIRST if is_known else _rows(call, first.detach()[0], second.detach()[0], weights, rounding))
        parts += map(_NAME, call.rows)
        is_certain = is_certain and bool(first.any()) and not isinstance(rows[-1], Tensor)
        if rows[-1] is None:
            costly.add(call.rows[0].name)
    plain, unreached, idle = dict[str, Tensor](), set[str](), set[str]()  # idle in this batch, as a layer of no rows
    for (name, leaf), gradient in zip(capture.leaves.items(), after[len(before) :], strict=True):
        plain[name] = torch.zeros_like(leaf) if gradient is None else gradient[0]
        if gradient is None:
            unreached.add(name)
        elif name not in parts and not plain[name].any():
            idle.add(name)
    if capture.cuts_off:
        _warn_of_lost(network, capture, unreached)
    general, missed = set[str](), set[str]()
    if len({*parts}) < len(parts):  # some parameter has several uses
        general = _not_together(capture)
    for numbers in capture.groups.values() if is_finite else ():
        if general.isdisjoint(map(_NAME, capture.calls[numbers[0]].rows)):
            missed |= _missed(capture, numbers, rows, after, plain, rounding)
    network.missed |= missed
    costly = (costly | missed) - network.warned
    if n > 1 and costly:
        what = "Which rows belong to which example cannot be told from the calls that use"
        price = f"one backward pass for each of {n} examples in place of one for all"
        warn(f"{what} {_listed(sorted(costly))}. Each example's outputs are differentiated by themselves, at {price}.")
        network.warned |= costly
    general |= network.missed
    unreached |= idle
    unused = frozenset(unreached.difference(parts))
    return Examined(tuple(rows), frozenset(general), unused, unreached), is_certain and not idle


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(call: Call, first: Tensor, second: Tensor, weights: Tensor, rounding: float) -> Rows:
    """From a call's output gradients for the cotangents u and ``w_n u_n``: whose its rows are."""
    n = len(weights)
    for where in FIRST, ExampleAxis(0, True), ExampleAxis(1, False):
        if where.axis in call.example_axes and call.output_shape[where.axis] % n == 0:
            moved = by_example(first, n, where)
            expected = moved * weights.to(moved.dtype).view(-1, *[1] * (moved.ndim - 1))
            if _close(by_example(second, n, where), expected, rounding):
                return where
    return _order(first, second, weights, rounding) if 0 in call.example_axes else None


def _order(first: Tensor, second: Tensor, weights: Tensor, rounding: float) -> Tensor | None:
    """The order of the rows along axis 0 in which each example has as many, or None."""
    n, size = len(weights), len(first)
    if size % n or 1 / n < 100 * torch.finfo(first.dtype).eps:  # too many to be told apart
        return None
    first, second = first.reshape(size, -1).to(weights.dtype), second.reshape(size, -1).to(weights.dtype)
    norms = first.square().sum(1)
    ratios = (first * second).sum(1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    ranked = weights.sort()
    places = torch.searchsorted((ranked.values[1:] + ranked.values[:-1]) / 2, ratios)
    owners = ranked.indices[places]
    if not _close(second, first * weights[owners][:, None], rounding):
        return None
    owners[norms == 0] = -1
    for where in FIRST, ExampleAxis(0, True):  # examples that move as a whole take rows along that no gradient reaches
        each = by_example(owners, n, where)
        whole = each.amax(1, keepdim=True)
        if bool(((each == whole) | (each < 0)).all()) and not bool((whole[whole >= 0].bincount() > 1).any()):
            each.copy_(whole.expand_as(each))
    counts = torch.bincount(owners[owners >= 0], minlength=n)
    if bool((counts > size // n).any()):
        return None
    owners[owners < 0] = torch.arange(n, device=owners.device).repeat_interleave(size // n - counts)
    return owners.argsort(stable=True)


def _close(found: Tensor, expected: Tensor, rounding: float) -> bool:
    if not expected.numel():
        return True
    scale = expected.abs().max()  # of gradients that are not finite nothing can be told; who takes them names them
    return not bool(scale.isfinite()) or bool((found - expected).abs().max() <= rounding * scale)


# -- blocks ------------------------------------------------------------------------------------------------------------


def use_gradients(capture: Capture, number: int, rows: Rows, gradient: Tensor) -> ExampleGradients:
    """A call's per-example gradients from output gradients ``[V, *output shape]``; of examples alone ``[V, B, …]``."""
    call = capture.calls[number]
    if capture.pointwise:  # each position is an example
        use, order = call.gradients(gradient, call.output_shape[0], FIRST), capture.order
        if not isinstance(use, OuterGradients) or (use.n_positions == 1 and order is None):
            return use
        every = slice(0, use.n_examples)
        right, left = use.right(every).flatten(0, 1), use.left(every).flatten(1, 2)
        right, left = (right, left) if order is None else (right[order], left[:, order])
        return OuterGradients(right[:, None], left[:, :, None])
    if rows is None:
        return call.alone(gradient)
    n_examples = capture.output_shape[0]
    if isinstance(rows, Tensor):
        return call.reordered(gradient, rows.to(gradient.device), n_examples)
    return call.gradients(gradient, n_examples, rows)


def _not_together(capture: Capture) -> set[str]:
    """Parameters with uses that do not fit the others, which take the general path altogether."""
    calls, groups = capture.calls, capture.groups
    claims: dict[str, list[tuple[ParameterRows, ...]]] = {}  # of each parameter, the groups that use it
    for rows in groups:
        for part in rows:
            claims.setdefault(part.name, []).append(rows)
    general = set[str]()
    for rows, members in groups.items():
        first, starts = calls[members[0]], {(part.name, part.start) for part in rows}
        clean = all(type(calls[n]) is type(first) and calls[n].packed == first.packed for n in members)
        for part in rows:
            for other in claims[part.name]:
                # Other row ranges of the same weight (a split projection) do not interfere; other partners do.
                shared = not starts.isdisjoint((own.name, own.start) for own in other)
                clean = clean and (other == rows or (len(other) == len(rows) and not shared))
        if not clean:
            general |= {part.name for part in rows}
    return general


def _missed(
    capture: Capture,
    numbers: list[int],
    rows: Sequence[Rows],
    weighted: Sequence[Tensor],
    plain: dict[str, Tensor],
    rounding: float,
) -> set[str]:
    """The parameters of a block whose gradients for the weighted cotangent do not sum to the plain one."""
    total, one = torch.zeros(()), capture.calls[numbers[0]]
    for number in numbers:
        own = weighted[number].detach()
        own = own[:, None] if rows[number] is None else own  # all rows as one example: each by itself takes B passes
        found = use_gradients(capture, number, rows[number], own).total()[0]
        total = total.to(found) + found
    wanted = one.index(plain).to(total)
    if not bool(torch.isfinite(wanted.sum())):  # whoever takes these gradients says so
        return set()
    return set() if _close(total, wanted, rounding) else set(map(_NAME, one.rows))


def _warn_of_lost(network: Network, capture: Capture, unreached: set[str]) -> None:
    """Warn of parameters that are used, but past any derivative; UnsupportedError if these are all."""
    lost = [name for name in network.parameter_names if name in unreached and name in capture.uses]
    if lost and unreached.issuperset(network.parameter_names):
        what = "No gradient of the outputs reaches the selected parameters."
        expected = "a forward pass that can be differentiated in evaluation mode"
        got = f"gradients that are switched off, or tensors that are detached, behind {_listed(lost)}"
        fix = "Take torch.no_grad, set_grad_enabled and .detach() out of forward, or select what lies behind"
        raise UnsupportedError(what, expected=expected, got=got, fix=fix)
    if not network.warned.issuperset(lost):
        why = "which the network uses: it switches gradients off or detaches tensors"
        warn(f"No gradient of the outputs reaches {_listed(lost)}, {why}. These parameters keep the prior.")
        network.warned.update(lost)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (" …" if len(names) > 4 else "")  # noqa: PLR2004
