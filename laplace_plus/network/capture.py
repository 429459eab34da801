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
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace_plus.errors import NETWORK_ERRORS, ConfigurationError, UnsupportedError
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch, tensors_in
from laplace_plus.network.calls import Call, EmbeddingCall, LinearCall, ParameterRows
from laplace_plus.network.network import Network
from laplace_plus.network.recurrent import RECURRENT, written_out
from laplace_plus.network.rules import PRODUCTS, RULES
from laplace_plus.network.selection import layer_of

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

_TRANSPOSING = frozenset({torch.t, Tensor.t, torch.transpose, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__})  # type: ignore[attr-defined]

_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.expand})
"""Functions through which a table that is the same for all examples meets what differs between them."""

_DETACHING = frozenset({torch.detach, torch.detach_, Tensor.detach, Tensor.detach_, Tensor.data.__get__})  # type: ignore[attr-defined]
"""Functions whose results no gradient passes."""


_QUIET = "There is a performance drop|Full backward hook is firing"
"""Warnings of derivatives that several cotangents, or hooks of the user, take another way."""

_NO_DERIVATIVE = "an autograd kernel was not registered"
"""Part of torch's warning about an operation that it takes for a constant."""

_NAME, _EDGE = attrgetter("name"), attrgetter("edge")
_whole = lru_cache(4096)(partial(ParameterRows, count=None, start=0))


class _Recorder(TorchFunctionMode):
    """Records calls whose weights are among the selected parameters.

    Attributes:
        rows: By a tensor's id, what it is of which parameter. As ids are only unique among living tensors, ``alive``
            holds on to them.
        transposes: By the id of a transpose, the matrix that is a parameter.
        calls: The recorded calls.
        uses: Names of all parameters in the order of their use.
        uncovered: Selected parameters with a use that no rule describes.
        tables: By the output's id, look-ups that may be the same for all examples, and the sums that they enter.
        cuts_off: Whether a parameter is used without derivatives, or something is detached.
        widest: Memory of the largest output of a function that has a derivative.
        whole: The parameters of a sharded network that the pass has used, by name: views of memory that is freed and
            filled again as layers run.
    """

    def __init__(self, parameters: dict[str, Tensor], wanted: frozenset[str], keep_graph: bool):
        super().__init__()
        self.wanted, self.keep_graph = wanted, keep_graph
        self.alive: list[Tensor] = list(parameters.values())
        self.rows: dict[int, ParameterRows] = {}
        for name, tensor in parameters.items():
            self.rows[id(tensor)] = _whole(name)
        self.transposes: dict[int, Tensor] = {}
        self.calls: list[Call] = []
        self.uses: list[str] = []
        self.uncovered: set[str] = set()
        self.tables: dict[int, list[Any]] = {}
        self.cuts_off = self.packed = False
        self.widest = 0
        self.whole: dict[str, Tensor] = {}

    def find(self, value: Any) -> ParameterRows | None:
        """What a tensor is of which parameter; None for anything else."""
        return None if id(value) in self.transposes else self.rows.get(id(value))

    def see(self, name: str, tensor: Tensor) -> Tensor:
        """What a module of a sharded network gets for a parameter while that is whole; it is known by its name."""
        if name not in self.whole:
            view = self.whole[name] = tensor.detach().requires_grad_(name in self.wanted)
            self.rows[id(view)] = _whole(name)
        return self.whole[name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            packed, self.packed = self.packed, True
            try:
                with self:
                    return _attention_body(*args, **kwargs)
            finally:
                self.packed = packed
        if self.transposes and func in PRODUCTS and id(args[-1]) in self.transposes:  # x Wᵀ
            func, args = F.linear, (args[0], self.transposes[id(args[-1])])
        tensors = tensors_in((args, kwargs) if kwargs else args)
        used = tuple(filter(None, map(self.rows.get, map(id, tensors))))
        output, known = None, len(self.uses)
        if func in RECURRENT and not kwargs and not self.wanted.isdisjoint(map(_NAME, used)):
            output = written_out(func, args, self._note_map)
            used = tuple(rows for rows in used if rows.name not in self.uses[known:])  # such as a learnt first state
        output = func(*args, **kwargs) if output is None else output
        made = tensors_in(output)  # none by queries such as .shape
        if self.tables and made:
            self._note_tables(func, tensors, kwargs, output)
        if used and made:
            self._note_use(func, used, args, kwargs, output)
        elif func in _DETACHING:
            self.cuts_off = self.cuts_off or any(tensor.requires_grad for tensor in tensors)
        if isinstance(output, Tensor) and output.requires_grad:
            self.widest = max(self.widest, output.nbytes)
        return output

    def _note_use(self, func: Any, used: tuple[ParameterRows, ...], args: Any, kwargs: Any, output: Any) -> None:
        """Note a use of parameters, as a call where a rule describes it and any of them is selected."""
        if self.packed and func in _SPLITS:  # attention splits its packed projection by rows
            start = used[0].start
            for rows in output:
                self.rows[id(rows)] = ParameterRows(used[0].name, rows.shape[0], start)
                self.alive.append(rows)
                start += rows.shape[0]
            return
        own = args[0] if args and func in _TRANSPOSING and self.find(args[0]) == _whole(used[0].name) else None
        if own is not None and own.ndim == 2 and output.shape + output.stride() == own.T.shape + own.T.stride():  # noqa: PLR2004
            self.transposes[id(output)], self.rows[id(output)] = own, used[0]
            self.alive.append(output)
            return
        calls, names = None, {*map(_NAME, used)}
        if func in RULES and not output.is_nested:
            try:
                with nullcontext() if self.keep_graph else torch.no_grad():
                    found = RULES[func](self.find, *args, **kwargs)
                calls = [found] if isinstance(found, Call) else found
                # Rules do not describe a parameter in another argument, such as a learnt query that is normalised.
                if calls is not None and not names.issubset(rows.name for call in calls for rows in call.rows):
                    calls = None
            except torch.OutOfMemoryError:
                raise
            except (*NETWORK_ERRORS, ArithmeticError) as error:  # not what a signal handler raises
                what = f"The rule of {getattr(func, '__qualname__', None) or repr(func)} failed: {error}"
                expected, got = "a rule that returns a Call, several or None", type(error).__name__
                fix = "Correct the rule that was given to laplace_plus.curvature.register_rule."
                raise ConfigurationError(what, expected=expected, got=got, fix=fix) from error
        self.uses += map(_NAME, used)
        for call in calls or ():
            call.weight = call.weight if call.weight is None or call.weight.name in self.wanted else None
            call.bias = call.bias if call.bias is None or call.bias.name in self.wanted else None
        calls = calls and [call for call in calls if call.rows and output.numel()]
        if calls == []:
            return
        if not torch.is_grad_enabled() or (calls is None and func in _DETACHING):  # no gradient will be asked for
            self.cuts_off = True
        elif calls is None or torch._C._functorch.is_functorch_wrapped_tensor(output):  # within torch.func's transforms
            self.uncovered |= self.wanted & names
        else:
            for call in calls:
                call.edge, call.packed = get_gradient_edge(output), self.packed
                call.output_shape, call.output_like = output.shape, {"dtype": output.dtype, "device": output.device}
                if self.packed and isinstance(call, LinearCall):  # attention's query, key and value
                    call.groups = max(1, call.weight_shape[0] // call.weight_shape[1])
                if not self.keep_graph:
                    call.value = call.value.detach()
                self.calls.append(call)
                if isinstance(call, EmbeddingCall) and (call.value.ndim < 2 or len(call.value) == 1):  # noqa: PLR2004
                    self.tables[id(output)] = [call]
                    self.alive.append(output)

    def _note_map(self, output: Tensor, *linear: Any) -> None:
        """Note a linear map of a function that is written out, by a tensor that has its output's gradient."""
        self._note_use(F.linear, tuple(filter(None, map(self.find, linear[1:3]))), linear, {}, output)

    def _note_tables(self, func: Any, tensors: list[Tensor], kwargs: Any, output: Any) -> None:
        for tensor in tensors:
            if id(tensor) in self.tables and output is not tensor:  # as of an idle .to()
                place = None
                if func in _SUMS and not kwargs and output.requires_grad:
                    like = {"dtype": output.dtype, "device": output.device}
                    place = like, output.shape, get_gradient_edge(output)
                self.tables[id(tensor)].append(place)


class Capture:
    """One forward pass of a batch, and the gradients to be had from it.

    ``outputs`` are ``[B, *, C]``; with ``pointwise``, ``[B', C]`` with every position an example of its own. That holds
    where the only recorded call produced the network's output itself (a last layer), at most in another order: then no
    backward pass is needed, and positions do not depend on each other. ``order [B']`` then says which of the call's
    positions each row of the outputs is; None where they are the same.

    Attributes:
        output_shape, n_examples: ``[B, *, C]`` in any case, and B or B'.
        calls: The recorded calls, in order.
        groups: Numbers of the calls of each block, which use the same weight and bias.
        uncovered: Selected parameters with some use that no rule describes.
        uses: Names of parameters in the order of their use.
        leaves: The selected parameters of this pass.
        cuts_off: As of the recorder.
        frees: Whether the backward pass of a single cotangent frees the graph as it goes, for there is no other one.
        last_used: Name of the last parameter used that influences the outputs; set when the batch is examined.
    """

    last_used: str | None

    def __init__(self, network: Network, inputs: Any, *, differentiable: bool = False):
        parameters, wanted = network.parameters, frozenset(network.parameter_names)
        self.leaves: dict[str, Tensor] = {}
        for name in network.parameter_names:
            self.leaves[name] = parameters[name].requires_grad_()
        recorder = _Recorder(parameters, wanted, differentiable)
        with torch.enable_grad():
            arranged = network.arrange(batches.output_tensor(network.raw(inputs, parameters, recorder)))
        self.inputs, self.differentiable, self.frees, self._network = inputs, differentiable, False, network
        for name in self.leaves.keys() & recorder.whole.keys():
            self.leaves[name] = recorder.whole[name]
        self.uses, self.uncovered, self.cuts_off = recorder.uses, recorder.uncovered, recorder.cuts_off
        if recorder.tables:
            _place_tables(recorder.tables.values(), arranged)
        self.calls = recorder.calls
        if self.uncovered:
            self.calls = [call for call in self.calls if self.uncovered.isdisjoint(map(_NAME, call.rows))]
        self.output_shape, self.graph_outputs, self.pointwise = arranged.shape, arranged, False
        self.order: Tensor | None = None
        if network.held.sharded:
            network.turns.captures[network.parameter_names] = self
        if len(self.calls) == 1 and self.calls[0].pointwise and wanted == {*map(_NAME, self.calls[0].rows)}:
            self._look_whether_pointwise()
        self.outputs = self.graph_outputs if differentiable else self.graph_outputs.detach()
        self.n_examples = len(self.outputs)
        self.groups: dict[tuple[ParameterRows, ...], list[int]] = {}
        self.cotangent_bytes = 0  # about the memory of one cotangent's backward pass
        for number, call in enumerate(self.calls):
            self.groups.setdefault(call.rows, []).append(number)
            self.cotangent_bytes += 2 * call.output_shape.numel() * call.output_like["dtype"].itemsize
        self.cotangent_bytes = max(self.cotangent_bytes, 0 if self.pointwise else 2 * recorder.widest)

    def _look_whether_pointwise(self) -> None:
        """Whether the outputs are the call's own in some order: if the derivative moves rows and does nothing else."""
        with torch.enable_grad():
            outputs = self.graph_outputs.flatten(0, -2) if self.graph_outputs.ndim > 1 else self.graph_outputs
        n, probe = len(outputs), generic(outputs)
        probe[:, 0] = (torch.arange(n, device=probe.device) + 1) / max(1, n)  # no two rows are alike
        (found,) = self.gradients(probe.view(self.output_shape)[None])
        found = found[0].movedim(self.calls[0].feature_axis, -1)
        found = found.flatten(0, -2) if found.ndim > 1 else found[None]
        if found.shape != probe.shape or (n * torch.finfo(probe.dtype).eps > 1 and len(probe[:, :8].unique(dim=0)) < n):
            return  # or too many rows to be told apart
        probe = probe.to(found.dtype)
        if not torch.equal(found, probe):
            order = found[:, 0].argsort()
            if not torch.equal(found[order], probe):
                return
            self.order = order
        self.pointwise, self.graph_outputs = True, outputs

    def gradients(self, cotangents: Tensor, calls: Sequence[Call] | None = None, leaves: Sequence[Tensor] = ()) -> Any:
        """Gradients ``[V, …]`` with respect to calls' outputs, and then leaves, for cotangents ``[V, B, *, C]``.

        Zeros for calls that none reaches, and None for leaves. UnsupportedError if an operation on the way has no
        derivative, and would pass on zeros.
        """
        calls, found = self.calls if calls is None else calls, list[Any]()
        if self.pointwise and calls:  # no backward pass to the only call
            rows = cotangents if self.order is None else cotangents[:, self.order.argsort()]
            lead, axis = [*self.calls[0].output_shape], self.calls[0].feature_axis
            del lead[axis]
            found, calls = [rows.unflatten(1, lead).movedim(-1, axis + (axis >= 0))], ()
        places = [*map(_EDGE, calls), *leaves]
        if places and self.graph_outputs.requires_grad:
            cotangents = cotangents.to(self.graph_outputs.dtype)
            with self._turn(calls, leaves, len(cotangents)) if self._network.held.sharded else nullcontext():
                pulled = self.pull(cotangents, places)
        else:
            pulled = [None] * len(places)
        for number, call in enumerate(calls):
            if pulled[number] is None:
                pulled[number] = torch.zeros(len(cotangents), *call.output_shape, **call.output_like)
        return found + pulled

    def _turn(self, calls: Sequence[Call], leaves: Sequence[Tensor], size: int) -> Any:
        """A turn of a sharded network for as many backward passes to some calls and leaves."""
        numbers = [number for number, call in enumerate(self.calls) if any(own is call for own in calls)]
        names = [name for name, leaf in self.leaves.items() if any(own is leaf for own in leaves)]
        return self._network.turn("backward", self._network.parameter_names, numbers, names, size)

    def pull(self, cotangents: Tensor, places: list[Any]) -> list[Any]:
        """Gradients with respect to edges and leaves as :meth:`gradients`, None for what no gradient reaches."""
        options: dict[str, Any] = {"create_graph": self.differentiable, "allow_unused": True}
        options["retain_graph"] = len(cotangents) > 1 or not self.frees or bool(self._network.held.sharded)
        backward: Any = partial(torch.autograd.grad, self.graph_outputs, places, **options)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_QUIET)
                warnings.filterwarnings("error", message=f".*{_NO_DERIVATIVE}")
                if len(cotangents) > 1 and not self.differentiable:
                    with suppress(RuntimeError):  # no batching rule; the loop raises any other error again
                        return list(backward(cotangents, is_grads_batched=True))
                rows = list(zip(*map(backward, cotangents), strict=True))
        except UserWarning as warning:
            operation = str(warning).partition(f": {_NO_DERIVATIVE}")[0]
            raise UnsupportedError(
                f"The operation {operation!r} has no derivative, so what lies before it cannot be told apart.",
                expected="operations with derivatives behind every selected parameter",
                got=f"{operation!r} behind some of them",
                fix='Select only parameters behind it, such as parameters="last_layer".',
            ) from warning
        found = list[Any]()
        for own in rows:
            found.append(None if own[0] is None else torch.stack(own) if len(own) > 1 else own[0][None])
        return found


def generic(like: Tensor) -> Tensor:
    """Irregular numbers of a tensor's shape and type, the same each time; large ones are products of two vectors."""
    source = torch.Generator().manual_seed(0)
    if like.numel() <= 2**20 or like.ndim < 2:  # noqa: PLR2004
        return torch.randn(like.shape, generator=source, dtype=torch.float64).to(like.device, like.dtype)
    rows, columns = (torch.randn(n, generator=source).to(like) for n in (like.shape[:-1].numel(), like.shape[-1]))
    return torch.outer(rows, columns).view(like.shape)


def _place_tables(tables: Iterable[list[Any]], outputs: Tensor) -> None:
    """Where a look-up is the same for all examples, put it where the table meets what differs between them."""
    for table, *uses in tables:
        if len(uses) != 1 or uses[0] is None:
            continue
        like, shape, edge = uses[0]
        is_same = len(shape) - 1 > table.value.ndim or table.value.shape[:1] == (1,)
        if is_same and shape[0] == len(outputs) > 1:
            table.edge, table.output_shape, table.output_like = edge, shape, like
            table.value, table.example_axes = table.value.expand(shape[:-1]), tuple(range(len(shape) - 1))


# -- the last layer ----------------------------------------------------------------------------------------------------


def capture_batch(network: Network, batch: Batch) -> Capture:
    """Capture a batch, correcting which layer is the last one on the path to the outputs.

    Execution order alone is misled by an auxiliary head that runs after the main one, and by a layer that only feeds a
    metric. A layer from which no gradient reaches the outputs is never the last one.
    """
    capture = Capture(network, batch.inputs)
    while isinstance(network.selection, str) and network.selection == "last_layer":
        unseen = [name for name in network.parameter_names if name not in capture.uses]  # as of a scripted head
        order = dict.fromkeys([*unseen, *reversed(capture.uses)])
        left = [name for name in order if network.reached.get(name) is not False]
        if not left:
            break
        layer = layer_of(left[0])
        if layer not in network.layers:
            network.select_last_layer(layer)
            capture = Capture(network, batch.inputs)
        elif network.reached.get(left[0]):
            break
        else:
            answers = capture.gradients(generic(capture.graph_outputs)[None], (), [*capture.leaves.values()])
            is_reached = any(gradient is not None for gradient in answers)
            known = dict.fromkeys(capture.leaves, True) if is_reached else _reached(network, batch.inputs, order)
            network.reached.update(known)
    return capture


def _reached(network: Network, inputs: Any, names: Iterable[str]) -> dict[str, bool]:
    """Whether a gradient of the outputs reaches parameters, by a forward and a backward pass over all of them."""
    parameters = network.parameters
    leaves = {name: parameters[name].requires_grad_() for name in names if parameters[name].is_floating_point()}
    with torch.enable_grad():
        outputs = network(inputs, leaves)
        found: Any = [None] * len(leaves)
        if outputs.requires_grad:
            found = torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
    return {name: gradient is not None for name, gradient in zip(leaves, found, strict=True)}
