"""One forward pass that remembers every parametric call, and backward passes to the outputs of those calls.

A :class:`torch.overrides.TorchFunctionMode` watches the functions that a network calls (``F.linear``, convolutions,
embeddings, normalisations) rather than its module types, so that tied and re-used weights, functional calls and modules
of other libraries are seen alike. Gradients are taken with respect to the *outputs* of these calls and never with
respect to weights: a weight's gradient for one example is the outer product of a call's input and output gradient, and
:mod:`laplace_plus.structured.gradients` keeps it as one.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace_plus import batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.calls import Call, ParameterRows
from laplace_plus.curvature.rules import RULES
from laplace_plus.errors import UnsupportedError
from laplace_plus.network import Network
from laplace_plus.selection import layer_of

_KEPT_BYTES = 32 * 2**20 - 2**16
"""Blocks of up to so many bytes are used again rather than given back to the system; the most that glibc allows."""


@cache
def _keep_pages() -> None:
    """Have the C library keep the memory of one batch's gradients for those of the next one.

    Where it is given back, each batch has the system clear thousands of pages anew, which took up to a third of the
    time of a small convolutional network's backward passes. glibc raises its threshold to the largest block that was
    ever released, so releasing one that nothing was written to is enough, and takes no memory.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


@dataclass
class _Recorded:
    """A call together with the place in the autograd graph where its output's gradient is to be had."""

    call: Call
    edge: GradientEdge
    output_shape: torch.Size
    output_dtype: torch.dtype
    output_device: torch.device
    returned: Tensor


# The body of multi_head_attention_forward, run once more under the mode: the public function hands itself over to the
# mode as a whole, and only its inner linear maps are of a kind that a rule describes.
_attention_body = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
_attention_body.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


_SPLITS = (torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.split_with_sizes)

_DERIVATIVES = frozenset({torch.autograd.grad, Tensor.grad.__get__})  # type: ignore[union-attr]
"""Functions that return derivatives of what came before; also those that a network took by ``backward()``."""

_DETACHING = frozenset({torch.detach, torch.detach_, Tensor.detach, Tensor.detach_, Tensor.data.__get__})  # type: ignore[attr-defined]
"""Functions that cut what comes behind them off from what comes before."""


class _Recorder(TorchFunctionMode):
    """Records calls whose weights are among the selected parameters."""

    def __init__(self, parameters: dict[str, Tensor], wanted: frozenset[str], keep_graph: bool):
        super().__init__()
        self.n_bytes = 0
        self.rows = {id(tensor): ParameterRows(name, None, 0) for name, tensor in parameters.items()}
        # Ids are only unique among living tensors: hold on to everything that was ever registered.
        self.alive: list[Tensor] = list(parameters.values())
        self.wanted = wanted
        self.keep_graph = keep_graph
        self.recorded: list[_Recorded] = []
        self.uncovered: set[str] = set()
        # Used detached, or while gradients were switched off; and whether anything at all may have been cut off.
        self.switched_off: set[str] = set()
        self.may_be_cut_off = False
        self.last_used: str | None = None
        self.packed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = self._watched(func, args, kwargs or {})
        if isinstance(output, Tensor) and output.requires_grad and not output._is_view():
            self.n_bytes += output.numel() * output.element_size()
        return output

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.multi_head_attention_forward:
            return self._attention(args, kwargs)
        used = [rows for rows in map(self._find, _tensors((args, kwargs))) if rows is not None]
        if not used:
            output = func(*args, **kwargs)
            if func in _DETACHING and self.last_used is not None:
                self.may_be_cut_off |= bool(self.uncovered) or any(t.requires_grad for t in _tensors(args))
            if func in _DERIVATIVES and any(tensor.requires_grad for tensor in _tensors(output)):
                # The weights of all calls so far are in there, past the outputs of these calls.
                self.uncovered |= {rows.name for recorded in self.recorded for rows in recorded.call.rows}
            return output
        rule = RULES.get(func)
        if rule is not None:
            with nullcontext() if self.keep_graph else torch.no_grad():
                call = rule(self._find, args, kwargs)
            # A parameter in any other place of a call (a learnt query that is normalised) is not described by the rule.
            if call is not None and {rows.name for rows in used} <= {rows.name for rows in call.rows}:
                self.last_used = used[-1].name
                call.restrict(self.wanted)
                if not call.rows:
                    return func(*args, **kwargs)
                if not torch.is_grad_enabled():  # nothing downstream will ever ask for this call's gradient
                    return self._switch_off(call.rows, func(*args, **kwargs))
                call.packed = self.packed
                if not self.keep_graph:
                    call.value = call.value.detach()
                call.version = call.value._version
                output = func(*args, **kwargs)
                if _watch(output):
                    return self._record(call, output)
                self.uncovered |= {rows.name for rows in call.rows}
                return output
        output = func(*args, **kwargs)
        if self._is_split(func, used, output):
            return output
        if any(True for _ in _tensors(output)):  # queries such as .shape return none
            self.last_used = used[-1].name
            if func in _DETACHING or not torch.is_grad_enabled():
                return self._switch_off(used, output)
            self.uncovered |= {rows.name for rows in used} & self.wanted
        return output

    def _find(self, value: Any) -> ParameterRows | None:
        return self.rows.get(id(value)) if isinstance(value, Tensor) else None

    def _switch_off(self, used: Iterable[ParameterRows], output: Any) -> Any:
        self.switched_off |= {rows.name for rows in used} & self.wanted
        self.may_be_cut_off |= bool(self.switched_off)
        return output

    def _record(self, call: Call, output: Tensor) -> Tensor:
        edge = get_gradient_edge(output)
        # A leaf must not be written to in place, as ReLUs do; the edge keeps pointing to where the gradient is wanted.
        returned = output.clone() if output.is_leaf else output
        # The tensor itself is kept (for an identity test only) while it is the latest; edges hold no data.
        if self.recorded:
            self.recorded[-1].returned = returned.new_empty(0)
        self.recorded.append(_Recorded(call, edge, output.shape, output.dtype, output.device, returned))
        return returned

    def _attention(self, args: Any, kwargs: Any) -> Any:
        packed, self.packed = self.packed, True
        try:
            with self:
                return _attention_body(*args, **kwargs)
        finally:
            self.packed = packed

    def _is_split(self, func: Any, used: list[ParameterRows], output: Any) -> bool:
        """Register the pieces of a weight that is split by rows, as attention does with its packed projection."""
        if not self.packed or func not in _SPLITS:
            return False
        start = used[0].start
        for piece in output:
            self.rows[id(piece)] = ParameterRows(used[0].name, piece.shape[0], start)
            self.alive.append(piece)
            start += piece.shape[0]
        return True


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)


def _watch(output: Tensor) -> bool:
    """Have a call's output take gradients; false inside of forward derivatives, as weights are in tangents, too."""
    if forward_ad.unpack_dual(output).tangent is not None:
        return False
    if not output.requires_grad:
        try:
            output.requires_grad_()
        except RuntimeError:  # torch.func's transformations do not allow it
            return False
    return True


_NO_DERIVATIVE = "an autograd kernel was not registered"


@contextmanager
def _no_derivative_refused() -> Iterator[None]:
    """Name operations that torch warns of and takes for constants: what lies before them would seem not to matter."""
    try:
        yield
    except UserWarning as warning:
        operation, found, _ = str(warning).partition(f": {_NO_DERIVATIVE}")
        if not found:
            raise
        raise UnsupportedError(
            f"The operation {operation!r} has no derivative, so what lies before it cannot be told apart.",
            expected="operations with derivatives behind every selected parameter",
            got=f"{operation!r} behind some of them",
            fix='Select only parameters behind it, such as parameters="last_layer".',
        ) from warning


class Capture:
    """One forward pass of a batch, and the gradients to be had from it.

    Attributes:
        outputs: ``[B, *, C]``; with ``pointwise``, ``[B', C]`` with every position an example of its own.
        output_shape: ``[B, *, C]`` in any case.
        calls: The recorded calls, in order.
        uncovered: Selected parameters that were used in a way which no rule describes.
        unused: Selected parameters that the forward pass did not use, or whose use no gradient reaches.
        pointwise: Whether the only recorded call produced the network's output itself (a last layer), so that no
            backward pass is needed and positions do not depend on each other.
        last_used: Name of the last parameter used; None where uses are hidden (scripted modules) and it is not known.
        n_bytes: What the results of the forward pass take that derivatives may need, about.

    Raises:
        UnsupportedError: No gradient of the outputs reaches any of the selected parameters that the network uses.

    Warns:
        UserWarning: None reaches some of them.
    """

    def __init__(self, network: Network, inputs: Any, *, differentiable: bool = False):
        parameters = network.parameters
        wanted = frozenset(network.parameter_names)
        recorder = _Recorder(parameters, wanted, differentiable)
        with torch.enable_grad():
            with recorder:
                raw = batches.output_tensor(network.raw(inputs, parameters))
            arranged = network.arrange(raw)
        self.inputs = inputs
        self.differentiable = differentiable
        touched = {rows.name for r in recorder.recorded for rows in r.call.rows} | recorder.uncovered
        hidden = _settle(network, inputs, recorder, frozenset(touched))
        # A parameter that some call uses in an unknown way takes the general path altogether.
        self.uncovered = hidden | recorder.uncovered
        kept = [r for r in recorder.recorded if not {rows.name for rows in r.call.rows} & self.uncovered]
        self._recorded = kept
        self.calls = [r.call for r in kept]
        self.unused = wanted - touched - hidden
        self.last_used = None if hidden else recorder.last_used
        self.output_shape = arranged.shape
        only = kept[0] if len(kept) == 1 and not self.uncovered else None
        self.pointwise = (
            only is not None
            and only.returned is raw
            and only.call.feature_axis % raw.ndim == _feature_axis(network, raw)
            and only.call.pointwise
        )
        with torch.enable_grad():
            self.graph_outputs = arranged.flatten(0, -2) if self.pointwise else arranged
        self.outputs = self.graph_outputs if differentiable else self.graph_outputs.detach()
        self.n_bytes = recorder.n_bytes

    @property
    def n_examples(self) -> int:
        """B, or B' = B·positions if pointwise."""
        return self.outputs.shape[0]

    def gradients(self, cotangents: Tensor, *, batched: bool = True) -> list[Tensor]:
        """Gradients with respect to the output of each call.

        Args:
            cotangents: ``[V, B, *, C]``, matching ``outputs``.
            batched: Whether all directions go backwards at once; otherwise one after the other.

        Returns:
            One ``[V, *output shape]`` for each call; zeros where the output does not depend on it.

        Raises:
            UnsupportedError: An operation on the way has no derivative, and would pass on zeros.
        """
        if not self._recorded:
            return []
        _keep_pages()
        if self.pointwise:
            only = self._recorded[0]
            positions = cotangents.unflatten(1, self.output_shape[:-1])
            return [positions.movedim(-1, 1 + only.call.feature_axis % (positions.ndim - 1))]
        cotangents = cotangents.to(self.graph_outputs.dtype)
        if not self.graph_outputs.requires_grad:
            return [self._zeros(r, len(cotangents)) for r in self._recorded]
        with warnings.catch_warnings(), _no_derivative_refused():
            # Neither operations that torch loops over by itself nor a user's own hooks are news to the user.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("error", message=f".*{_NO_DERIVATIVE}")
            if batched and len(cotangents) > 1 and not self.differentiable:
                with suppress(RuntimeError):  # no batching rule; the loop raises what is really wrong
                    return self._backward(cotangents, is_grads_batched=True)
            rows = [self._backward(cotangent, is_grads_batched=False) for cotangent in cotangents]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _backward(self, cotangents: Tensor, *, is_grads_batched: bool) -> list[Tensor]:
        gradients = torch.autograd.grad(
            self.graph_outputs,
            [r.edge for r in self._recorded],
            cotangents,
            retain_graph=True,
            create_graph=self.differentiable,
            allow_unused=True,
            is_grads_batched=is_grads_batched,
        )
        n = (len(cotangents),) if is_grads_batched else ()
        return [
            torch.zeros(*n, *r.output_shape, dtype=r.output_dtype, device=r.output_device) if g is None else g
            for r, g in zip(self._recorded, gradients, strict=True)
        ]

    @staticmethod
    def _zeros(recorded: _Recorded, n_directions: int) -> Tensor:
        shape = (n_directions, *recorded.output_shape)
        return torch.zeros(shape, dtype=recorded.output_dtype, device=recorded.output_device)

    def direction_bytes(self) -> int:
        """Memory that one direction's backward pass takes: the gradients of all recorded outputs, and as much again."""
        return 2 * sum(r.output_shape.numel() * r.output_dtype.itemsize for r in self._recorded)

    def activation_elements(self) -> int:
        """Number of elements in all recorded outputs, which is what one direction's backward pass returns."""
        return sum(r.output_shape.numel() for r in self._recorded)


def _settle(network: Network, inputs: Any, recorder: _Recorder, touched: frozenset[str]) -> frozenset[str]:
    """The selected parameters whose use was not seen, as in scripted modules, although the outputs depend on them.

    Autograd is asked, for one more forward pass, where parameters seem unused or may be cut off; once for each.
    """
    wanted, known = recorder.wanted, network.reached
    unseen = wanted - touched
    new = (wanted if recorder.may_be_cut_off else unseen) - known.keys()
    if new:
        reached = _reached(network, inputs, new)
        used = (touched | recorder.switched_off) & new
        lost = [name for name in network.parameter_names if name in used - reached]
        if recorder.may_be_cut_off and lost:
            _report_cut_off(lost, some=bool(reached) or any(known.values()))
        known.update({name: name in reached for name in new})
    return frozenset(name for name in unseen if known[name])


def _reached(network: Network, inputs: Any, names: Iterable[str]) -> frozenset[str]:
    """Those of the parameters that a gradient of the outputs reaches."""
    leaves = {name: network.parameters[name].clone().requires_grad_() for name in names}
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are for the passes that count
        outputs = network(inputs, leaves)
        if not outputs.requires_grad:
            return frozenset()
        gradients = torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None)


def _report_cut_off(names: list[str], *, some: bool) -> None:
    listed = ", ".join(map(repr, names[:4])) + (" …" if len(names) > 4 else "")
    if not some:
        raise UnsupportedError(
            "No gradient of the outputs reaches the selected parameters.",
            expected="a forward pass that can be differentiated in evaluation mode",
            got=f"gradients that are switched off, or tensors that are detached, behind {listed}",
            fix="Take torch.no_grad, set_grad_enabled and .detach() out of forward, or select parameters behind them.",
        )
    warnings.warn(
        f"No gradient of the outputs reaches {listed}, which the network uses: it switches gradients off or detaches "
        "tensors. These parameters keep the prior.",
        stacklevel=4,
    )


def _feature_axis(network: Network, raw: Tensor) -> int:
    """Which axis of the raw output ``arrange`` moves last."""
    if raw.ndim < 2:
        return -1
    probe = network.arrange(torch.empty(tuple(range(2, 2 + raw.ndim)), device="meta"))  # all sizes differ
    return probe.shape[-1] - 2


def capture_batch(network: Network, batch: Batch) -> Capture:
    """Capture a batch, correcting which layer is the last one if execution order says so."""
    capture = Capture(network, batch.inputs)
    if network.selection == "last_layer" and isinstance(network.selection, str) and capture.last_used is not None:
        actual = layer_of(capture.last_used)
        if actual not in network.layers:
            network.select_last_layer(actual)
            capture = Capture(network, batch.inputs)
    return capture
