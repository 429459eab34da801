"""One forward pass that remembers every parametric call, and backward passes to the outputs of those calls.

A :class:`torch.overrides.TorchFunctionMode` watches the functions that a network calls (``F.linear``, convolutions,
embeddings, normalisations) rather than its module types. Tied and re-used weights, functional calls and modules of
other libraries are then seen alike. Gradients are taken with respect to the *outputs* of these calls, never to weights.
A weight's gradient for one example is the outer product of a call's input and output gradient, and
:mod:`laplace_plus.structured` keeps it as one.
"""

from __future__ import annotations

import types
import warnings
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from laplace_plus._memory import budget
from laplace_plus.errors import NETWORK_ERRORS, ConfigurationError, UnsupportedError, tried, warn
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch
from laplace_plus.network.calls import RULES, Call, ExampleAxis, LinearCall, ParameterRows, by_example
from laplace_plus.network.last_layer import REARRANGING, last_layer, reached, rows_of
from laplace_plus.network.network import Network

# glibc returns freed blocks to the system unless they are smaller than the largest block freed so far, up to 32 MiB.
# Freeing one untouched block of that size makes it keep the memory of one batch's gradients for the next batch. Without
# this, clearing new pages took up to a third of the time of a small convolutional network's backward passes.
torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8, device="cpu")

# The body of multi_head_attention_forward, run again under the mode: the public function hands itself over to the mode
# as a whole, and rules describe only its inner linear maps.
_attention_body = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
_attention_body.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__

_SPLITS = (torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.split_with_sizes)

_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.expand})
"""Functions through which a table that is the same for all examples meets what differs between them."""

_DERIVATIVES = frozenset({torch.autograd.grad, Tensor.grad.__get__})  # type: ignore[union-attr]
"""Functions that return derivatives of earlier calls."""

_DETACHING = frozenset({torch.detach, torch.detach_, Tensor.detach, Tensor.detach_, Tensor.data.__get__})  # type: ignore[attr-defined]
"""Functions whose results no gradient passes."""

_NO_DERIVATIVE = "an autograd kernel was not registered"
"""Part of torch's warning about an operation that it takes for a constant."""

_NAME, _label = attrgetter("name"), lru_cache(4096)(str)
_whole = lru_cache(4096)(partial(ParameterRows, count=None, start=0))

_MAX_PROBES = 16
"""Pairs of examples that are tried before a call is left to the general path; one is enough if it reaches the layer.

16 pairs fail with a layer inactive for 95 % of the examples in less than one case of five.
"""


class _Recorder(TorchFunctionMode):
    """Records calls whose weights are among the selected parameters.

    ``rows`` says by a tensor's id what it is of which parameter. As ids are only unique among living tensors, ``alive``
    holds on to them. Parameters are ``switched_off`` that are used detached, or while gradients were switched off.
    ``latest`` is the output of the latest recorded call after the functions in ``moves``, each with its arguments, and
    ``version`` the number of writes to it; ``uses`` are the names of all parameters in the order of their use.
    ``tables`` are, by the output's id, look-ups that may be the same for all examples, and the sums that they enter.
    """

    def __init__(self, parameters: dict[str, Tensor], wanted: frozenset[str], keep_graph: bool):
        super().__init__()
        self.wanted, self.keep_graph, self.n_bytes, self.widest = wanted, keep_graph, 0, 0
        self.rows: dict[int, ParameterRows] = {}
        self.alive: list[Tensor] = list(parameters.values())
        for name, tensor in parameters.items():
            self.rows[id(tensor)] = _whole(name)
        self.calls: list[Call] = []
        self.counts: dict[str, int] = {}
        self.latest: Tensor | None = None
        self.moves: list[Any] = []
        self.version = 0
        self.covered: set[str] = set()
        self.uncovered: set[str] = set()
        self.switched_off: set[str] = set()
        self.may_be_cut_off = self.packed = False
        self.uses: list[str] = []
        self.tables: dict[int, list[Any]] = {}
        self.rule_context = nullcontext() if keep_graph else torch.no_grad()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            packed, self.packed = self.packed, True
            try:
                with self:
                    return _attention_body(*args, **kwargs)
            finally:
                self.packed = packed
        tensors = _tensors((args, kwargs) if kwargs else args)
        used = tuple(filter(None, map(self.rows.get, map(id, tensors))))
        call, rows = None, used
        if used and func in RULES:
            try:
                with self.rule_context:
                    call = RULES[func](lambda value: self.rows.get(id(value)), *args, **kwargs)
                if call is not None and not isinstance(call, Call):
                    raise TypeError(f"it returned {call!r}")
            except torch.OutOfMemoryError:
                raise
            except (*NETWORK_ERRORS, ArithmeticError) as error:  # not what a signal handler raises
                func(*args, **kwargs)  # where the function fails, too, the network is to blame
                what = f"The rule of {getattr(func, '__qualname__', None) or repr(func)} failed: {error}"
                expected = "a rule that returns a Call or None"
                fix = "Correct the rule that was given to laplace_plus.curvature.register_rule."
                raise ConfigurationError(what, expected=expected, got=type(error).__name__, fix=fix) from error
            # The rule does not describe a parameter in another argument, such as a learnt query that is normalised.
            if call is not None and used != call.rows and not {*map(_NAME, call.rows)}.issuperset(map(_NAME, used)):
                call = None
        if call is not None:
            self.uses += map(_NAME, used)
            if call.weight is not None and call.weight.name not in self.wanted:
                call.weight = None
            if call.bias is not None and call.bias.name not in self.wanted:
                call.bias = None
            rows = call.rows
            call.version = call.value._version if rows and torch.is_grad_enabled() else 0
        output = func(*args, **kwargs)
        for tensor in tensors if self.tables else ():
            if id(tensor) in self.tables and _tensors(output):  # queries such as .shape return none
                is_sum = func in _SUMS and not kwargs and output.requires_grad
                like = {"dtype": output.dtype, "device": output.device}
                place = (like, output.shape, get_gradient_edge(output)) if is_sum else None
                self.tables[id(tensor)].append(place)
        if call is not None:
            output = self._record(call, rows, output) if rows else output
        elif used:
            self._note_other_use(func, used, output)
        elif func in REARRANGING and args and args[0] is self.latest and self.latest._version == self.version:
            self.latest, self.version = output, output._version
            self.moves.append((func, args[1:], kwargs))
        elif func in _DETACHING and self.uses:
            self.may_be_cut_off |= bool(self.uncovered) or any(t.requires_grad for t in tensors)
        elif func in _DERIVATIVES and any(tensor.requires_grad for tensor in _tensors(output)):
            # The derivative depends on the weights of all calls so far, past the outputs of these calls.
            self.uncovered |= self.covered
        if isinstance(output, Tensor) and not output._is_view():
            n_bytes = output.numel() * output.element_size()
            self.n_bytes += n_bytes if output.requires_grad else 0
            for tensor in tensors:
                n_bytes += 0 if id(tensor) in self.rows else tensor.numel() * tensor.element_size()
            self.widest = max(self.widest, n_bytes)
        return output

    def _record(self, call: Call, rows: tuple[ParameterRows, ...], output: Tensor) -> Tensor:
        """Note a call and have its output take gradients; returns the output for the network to go on with."""
        names = set(map(_NAME, rows))
        if not torch.is_grad_enabled():  # no later operation will ask for this call's gradient
            self.switched_off |= names
            self.may_be_cut_off = True
            return output
        # Inside forward derivatives, weights are in the tangents, too.
        possible = forward_ad.unpack_dual(output).tangent is None
        if possible and not output.requires_grad:
            try:
                output.requires_grad_()
            except RuntimeError:  # torch.func's transformations do not allow it
                possible = False
        if not possible:
            self.uncovered |= names
            return output
        self.covered |= names
        label = _label(rows)
        self.counts[label] = self.counts.get(label, 0) + 1
        call.label, call.packed, call.edge = f"{label}#{self.counts[label]}", self.packed, get_gradient_edge(output)
        call.output_shape, call.output_like = output.shape, {"dtype": output.dtype, "device": output.device}
        if self.packed and isinstance(call, LinearCall):  # attention's query, key and value
            call.groups = max(1, call.weight_shape[0] // call.weight_shape[1])
        if not self.keep_graph:
            call.value = call.value.detach()
        self.calls.append(call)
        # ReLUs and other operations write in place, which a leaf does not allow; the edge still points to the leaf.
        self.latest, self.moves = output.clone() if output.is_leaf else output, []
        self.version = self.latest._version
        if hasattr(call, "table") and (call.value.ndim < 2 or len(call.value) == 1):  # noqa: PLR2004
            self.tables[id(self.latest)] = [call]
            self.alive.append(self.latest)
        return self.latest

    def _note_other_use(self, func: Any, used: tuple[ParameterRows, ...], output: Any) -> None:
        """Note a use of parameters that no rule describes."""
        if self.packed and func in _SPLITS:  # attention splits its packed projection by rows
            start = used[0].start
            for rows in output:
                self.rows[id(rows)] = ParameterRows(used[0].name, rows.shape[0], start)
                self.alive.append(rows)
                start += rows.shape[0]
        elif _tensors(output):  # queries such as .shape return none
            self.uses += map(_NAME, used)
            names = self.wanted.intersection(map(_NAME, used))
            if func in _DETACHING or not torch.is_grad_enabled():
                self.switched_off |= names
                self.may_be_cut_off |= bool(names)
            else:
                self.uncovered |= names


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    found, waiting = [], [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, (tuple, list)):
            waiting.extend(reversed(item))
    return found


class Capture:
    """One forward pass of a batch, and the gradients to be had from it.

    ``outputs`` are ``[B, *, C]``; with ``pointwise``, ``[B', C]`` with every position an example of its own. That holds
    where the only recorded call produced the network's output itself (a last layer), at most in another order: then no
    backward pass is needed, and positions do not depend on each other. ``order [B']`` then says which of the call's
    positions each row of the outputs is; None where they are the same. UnsupportedError if no gradient of the outputs
    reaches any of the selected parameters that the network uses; if none reaches some of them, there is a warning.

    Attributes:
        output_shape, n_examples: ``[B, *, C]`` in any case, and B or B'.
        calls: The recorded calls, in order.
        unused: Selected parameters that the forward pass did not use, or whose use no gradient reaches.
        last_used: Name of the last parameter used, except for those known to have no influence on the outputs; None
            where uses are hidden (scripted modules) and it is not known.
        n_bytes, cotangent_bytes: About the memory of the forward pass, and of one cotangent's backward pass.
        widest: Largest memory that one function's inputs and output take together.
        frees: Whether the backward pass of a single cotangent frees the graph as it goes, for there is no other one.
    """

    def __init__(
        self, network: Network, inputs: Any, *, differentiable: bool = False, settles_last_layer: bool = False
    ):
        while True:
            parameters, wanted = network.parameters, frozenset(network.parameter_names)
            recorder = _Recorder(parameters, wanted, differentiable)
            with torch.enable_grad():
                raw = batches.output_tensor(network.raw(inputs, parameters, recorder))
                arranged = network.arrange(raw)
            layer = network.layers[0]
            if settles_last_layer:
                layer = last_layer(network, inputs, recorder.uses, recorder.calls, raw)
            if layer in network.layers:
                break
            network.select_last_layer(layer)
        self.inputs, self.differentiable, self.frees = inputs, differentiable, False
        self.n_bytes, self.widest = recorder.n_bytes, recorder.widest
        touched, hidden = recorder.covered | recorder.uncovered, frozenset[str]()
        if recorder.may_be_cut_off or len(touched) < len(wanted):
            hidden = _hidden_uses(network, inputs, recorder, touched)
        # A parameter that some call uses in an unknown way takes the general path altogether.
        uncovered = hidden | recorder.uncovered
        self.unused = wanted - touched - hidden
        self.last_used: str | None = None
        for name in () if hidden else recorder.uses:
            if network.reached.get(name) is not False:
                self.last_used = name
        self.calls: list[Call] = []
        self.cotangent_bytes = 0
        for table, *its_uses in recorder.tables.values():
            like, shape, edge = place if len(its_uses) == 1 and (place := its_uses[0]) else (None, arranged.shape, None)
            is_same = len(shape) - 1 > table.value.ndim or table.value.shape[:1] == (1,)
            if edge is not None and is_same and shape[0] == len(arranged) > 1:
                # Examples are first told apart where the table meets them. As many rows might be examples, time first.
                table.label += ", as many as examples" if table.value.shape[:1] == shape[:1] else ""
                table.table, table.edge, table.output_shape, table.output_like = table.edge, edge, shape, like
                table.value, table.example_axes = table.value.expand(shape[:-1]), tuple(range(len(shape) - 1))
        for call in recorder.calls:
            if uncovered.isdisjoint(map(_NAME, call.rows)):
                self.calls.append(call)
                self.cotangent_bytes += 2 * call.output_shape.numel() * call.output_like["dtype"].itemsize
        self.cotangent_bytes = max(self.cotangent_bytes, min(self.widest, self.n_bytes))  # on the way to few layers
        self.output_shape = arranged.shape
        self.order: Tensor | None = None
        self.pointwise = len(self.calls) == 1 and not uncovered and self.calls[0].pointwise
        self.pointwise = self.pointwise and recorder.latest is raw and recorder.version == raw._version
        if self.pointwise and recorder.moves:
            order = rows_of(self.calls[0], recorder.moves, network)
            self.pointwise = order is not None
            if order is not None and not torch.equal(order, torch.arange(len(order))):
                self.order = order.to(raw.device)
        elif self.pointwise:
            own = raw.movedim(self.calls[0].feature_axis, -1)
            self.pointwise = own.shape == arranged.shape and own.stride() == arranged.stride()
        with torch.enable_grad():
            self.graph_outputs = arranged.flatten(0, -2) if self.pointwise else arranged
        self.outputs = self.graph_outputs if differentiable else self.graph_outputs.detach()
        self.n_examples = len(self.outputs)

    def gradients(self, cotangents: Tensor) -> list[Tensor]:
        """Gradients ``[V, *output shape]`` with respect to each call's output, for cotangents ``[V, B, *, C]``.

        UnsupportedError if an operation on the way has no derivative, and would pass on zeros.
        """
        if not self.calls:
            return []
        if self.pointwise:
            rows = cotangents if self.order is None else cotangents[:, self.order.argsort()]
            lead, axis = [*self.calls[0].output_shape], self.calls[0].feature_axis
            del lead[axis]
            return [rows.unflatten(1, lead).movedim(-1, axis + (axis >= 0))]
        found: Any = [None] * len(self.calls)
        if self.graph_outputs.requires_grad:
            edges = list(map(attrgetter("edge"), self.calls))
            options: dict[str, Any] = {"create_graph": self.differentiable, "allow_unused": True}
            options["retain_graph"] = len(cotangents) > 1 or not self.frees
            pull = partial(torch.autograd.grad, self.graph_outputs, edges, **options)
            cotangents, found = cotangents.to(self.graph_outputs.dtype), None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if len(cotangents) > 1 and not self.differentiable:
                    with suppress(RuntimeError):  # no batching rule; the loop raises any other error again
                        found = pull(cotangents, is_grads_batched=True)
                if found is None:
                    columns = zip(*map(pull, cotangents), strict=True)
                    join = torch.stack if len(cotangents) > 1 else lambda column: column[0][None]  # without a copy
                    found = [None if column[0] is None else join(column) for column in columns]
            for warning in caught:
                operation, lacks, _ = str(warning.message).partition(f": {_NO_DERIVATIVE}")
                if lacks:
                    raise UnsupportedError(
                        f"The operation {operation!r} has no derivative, so what lies before it cannot be told apart.",
                        expected="operations with derivatives behind every selected parameter",
                        got=f"{operation!r} behind some of them",
                        fix='Select only parameters behind it, such as parameters="last_layer".',
                    )
                # The user knows about hooks, and cannot change that torch loops over some operations.
                if not operation.startswith(("There is a performance drop", "Full backward hook is firing")):
                    warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        gradients = []
        for call, gradient in zip(self.calls, found, strict=True):
            if gradient is None:
                gradient = torch.zeros(len(cotangents), *call.output_shape, **call.output_like)
            gradients.append(gradient)
        return gradients


def _hidden_uses(network: Network, inputs: Any, recorder: _Recorder, touched: set[str]) -> frozenset[str]:
    """The selected parameters without a visible use, as in scripted modules, on which the outputs depend all the same.

    Autograd is asked, for one more forward pass, about parameters that seem unused or may be cut off; once for each.
    """
    wanted, known = recorder.wanted, network.reached
    unseen = wanted - touched
    new = (wanted if recorder.may_be_cut_off else unseen) - known.keys()
    if new:
        answers = reached(network, inputs, new)
        used = (touched | recorder.switched_off) & new
        lost = [repr(name) for name in network.parameter_names if name in used and not answers[name]]
        listed = ", ".join(lost[:4]) + (" …" if len(lost) > 4 else "")
        if recorder.may_be_cut_off and lost and not any((*answers.values(), *known.values())):
            what = "No gradient of the outputs reaches the selected parameters."
            expected = "a forward pass that can be differentiated in evaluation mode"
            got = f"gradients that are switched off, or tensors that are detached, behind {listed}"
            fix = "Take torch.no_grad, set_grad_enabled and .detach() out of forward, or select what lies behind"
            raise UnsupportedError(what, expected=expected, got=got, fix=fix)
        if recorder.may_be_cut_off and lost:
            why = "which the network uses: it switches gradients off or detaches tensors"
            warn(f"No gradient of the outputs reaches {listed}, {why}. These parameters keep the prior.")
        known.update(answers)
    return frozenset(name for name in unseen if known[name])


def capture_batch(network: Network, batch: Batch) -> Capture:
    """Capture a batch, correcting which layer is the last one on the path to the outputs.

    The network remembers the memory of one example's forward pass, and of that with its graph and one cotangent.
    """
    is_last = isinstance(network.selection, str) and network.selection == "last_layer"
    capture = Capture(network, batch.inputs, settles_last_layer=is_last)
    # A function's inputs and output may be copied once, into another order of their entries.
    forward, graph = 2 * capture.widest, 0 if capture.pointwise else capture.n_bytes + capture.cotangent_bytes
    n_examples = max(1, capture.output_shape[0])
    network.bytes_per_example = max(-(-max(forward, graph) // n_examples), network.bytes_per_example or 0)
    network.bytes_forward = max(-(-forward // n_examples), network.bytes_forward)
    return capture


# -- which axis of each call runs over examples ------------------------------------------------------------------------


def find_axes(network: Network, capture: Capture) -> None:
    """Note the example axis of every call, from which gradients a single example's output reaches; None without one.

    The network remembers the result where every input has the examples along its first axis. Other inputs (the nodes
    of all graphs in one table) are examined in every batch: one may be divisible into examples by chance.
    """
    known, inputs, found = network.example_axes, capture.inputs, []
    comes_first = []
    for leaf in [inputs] if isinstance(inputs, Tensor) else batches.flatten(inputs)[0]:
        if isinstance(leaf, PackedSequence) or (isinstance(leaf, Tensor) and leaf.ndim):
            comes_first.append(isinstance(leaf, Tensor) and leaf.shape[0] == capture.n_examples)
    is_known = all(comes_first)
    for call in capture.calls:
        is_known = is_known and call.label in known
        call.axis = ExampleAxis(0, False) if capture.pointwise else known.get(call.label)
    if not capture.pointwise and not is_known:
        # One example tells nothing: put it beside a copy of itself. Without one, it is treated as in other batches.
        probed = capture if capture.n_examples > 1 else _doubled(network, capture)
        found = [] if probed is None else _search(probed, exact=not any(comes_first))
    for call, (axis, is_sure) in zip(capture.calls, found, strict=False):
        call.axis = known.get(call.label, axis) if all(comes_first) else axis
        # Learnt once: a later, malformed input must not change it.
        if is_sure and (axis is not None or all(comes_first)):
            known.setdefault(call.label, axis)


def _search(capture: Capture, *, exact: bool) -> list[tuple[ExampleAxis | None, bool]]:
    """For each call the first axis that agrees with every example tried, and whether two examples reach the call.

    There are at least two examples. The axis is None if too few reach the call. An ``exact`` axis holds one entry for
    each example, rather than a multiple.
    """
    outputs, n, calls = capture.outputs, capture.n_examples, capture.calls
    candidates: list[list[ExampleAxis]] = []
    for call in calls:
        candidates.append([])
        for axis in call.example_axes:
            size = call.output_shape[axis]
            if size == n if exact else size % n == 0:
                candidates[-1] += [ExampleAxis(axis, False), ExampleAxis(axis, True)]
    n_witnesses, settled, spoilt = [0] * len(calls), [False] * len(calls), set[int]()
    # Deterministic, and generic enough that no gradient vanishes by symmetry.
    pattern = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
    patterns = torch.stack([pattern, pattern.flip(0)]).view(2, *outputs[0].shape)
    n_probes = min((n + 1) // 2, _MAX_PROBES)
    # Two examples are enough, unless all units of some layer are inactive for them; one at a time if outputs are many.
    together = outputs[0].numel() < 2**20 and 4 * capture.cotangent_bytes <= budget(outputs.device)
    for first in range(n_probes):
        ends = sorted({first, n - 1 - first})
        for some in [ends] if together else zip(ends, strict=True):
            probes = outputs.new_zeros(len(some), *outputs.shape)
            probes[[*range(len(some))], [*some]] = patterns[: len(some)]
            for number, gradient in enumerate(capture.gradients(probes)):
                if not bool(torch.isfinite(gradient.sum())):  # a malformed input teaches nothing
                    spoilt.add(number)
                for example, own in zip(some, gradient, strict=True):
                    n_witnesses[number] += bool(own.any())
                    for where in candidates[number].copy():
                        reached = by_example(own, n, where).flatten(1).any(-1)
                        reached[example] = False
                        if reached.any():
                            candidates[number].remove(where)
        for number, own in enumerate(candidates):
            settled[number] |= n_witnesses[number] >= 2 or not own
        if first == 0 and not all(settled):  # calls that no example's output reaches tell nothing later, either
            everything = patterns[:1, None].expand(1, n, *outputs.shape[1:])
            for number, gradient in enumerate(capture.gradients(everything)):
                settled[number] |= not bool(gradient.any())
        if all(settled):
            break
    complete, found = 2 * n_probes >= n, list[tuple[ExampleAxis | None, bool]]()  # complete: each example was tried
    for number, own in enumerate(candidates):
        table = getattr(calls[number], "table", None)
        if table is not None and n_witnesses[number]:  # whose other uses may be hidden, as in scripted modules
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            both, every = [table, calls[number].edge], patterns[:1].expand_as(outputs)
            its, total = torch.autograd.grad(capture.graph_outputs, both, every, **options)
            if not (its - total.sum_to_size(its.shape)).abs().max() <= 1e-2 * total.abs().max():
                own.clear()
        is_sure = n_witnesses[number] >= 2 and number not in spoilt
        found.append((own[0] if own and (settled[number] or complete) else None, is_sure))
    return found


def _doubled(network: Network, capture: Capture) -> Capture | None:
    """A capture of the batch's one example twice, or None where its inputs cannot be doubled."""
    leaves, rebuild = batches.flatten(capture.inputs)
    for axis in (0, 1):
        twice = []
        for leaf in leaves:
            single = isinstance(leaf, Tensor) and leaf.ndim > axis and leaf.shape[axis] == 1
            twice.append(torch.cat([leaf, leaf], axis) if single else leaf)
        double, _ = tried(lambda twice=twice: Capture(network, rebuild(twice)))  # type: ignore[misc]
        if double is None:  # the inputs were not meant to be doubled along this axis
            continue
        if double.n_examples == 2 and [call.label for call in double.calls] == [call.label for call in capture.calls]:
            return double
    return None
