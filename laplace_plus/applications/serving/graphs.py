"""Outputs and covariance of a posterior over several layers, with the backward passes written out as a graph.

The network runs once under ``make_fx`` with its package's own rules for layers, so that a graph of plain operations
remains: the forward pass, one backward pass to the layers' outputs for each output, and quadratic forms.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from laplace_plus.errors import NETWORK_ERRORS, DataError, LaplacePlusError, UnsupportedError
from laplace_plus.network import batches
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients
from laplace_plus.predictive.linearized import MANY_OUTPUTS
from laplace_plus.structured.blocks import IdentityBasis
from laplace_plus.structured.eigen import EigenFactor, KroneckerBasis
from laplace_plus.structured.gradients import DenseGradients, OuterGradients
from laplace_plus.structured.layout import GENERAL

_EXAMPLES = 11
"""Examples of the batch that is recorded: a prime number, by which few sizes of a network can be divided."""

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_FILLED = {aten.zeros: 0, aten.new_zeros: 0, aten.new_empty: 0, aten.ones: 1, aten.new_ones: 1}
_PARTS = {aten.slice.Tensor: 0, aten.slice_scatter.default: 1}
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)


class Graph(nn.Module):
    """Calls a recorded graph with the tensors of a batch's inputs: ``mean [B, C]``, and covariance or variances."""

    def __init__(self, posterior: Any, inputs: Any, needed: Any):
        super().__init__()
        network, size = posterior.network, batches.batch_size(inputs)
        if not batches.can_be_cut(inputs, size):
            raise unrecorded("the inputs cannot be cut into examples")
        if posterior.n_outputs > MANY_OUTPUTS or posterior.tangent_mean is not None:
            raise unrecorded(f"it has more than {MANY_OUTPUTS} outputs, or the tangent optimum as its mean")
        inputs = batches.cut(network.receive(inputs), [number % size for number in range(_EXAMPLES)])
        factors = posterior.factors()
        args, keywords = batches.bind(network.model, inputs)
        leaves, rebuild = batches.flatten((args, keywords))

        def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            waiting = iter(tensors)
            args, keywords = rebuild([next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            own = keywords or (args[0] if len(args) == 1 else args)
            return _moments(network, factors, own, "full" if needed is None or needed == "full" else "diagonal")

        decompositions = {
            packet: function
            for packet, function in torch._decomp.decomposition_table.items()
            if packet.name().partition(".")[0].endswith(("_backward", "_backward_data", "group_norm"))
        }
        decompositions.pop(aten.embedding_dense_backward.default, None)
        decompositions[aten.convolution_backward.default] = _convolution_backward
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            parameters = inspect.signature(network.model.forward).parameters.values()
            self.names = [own.name for own in parameters if own.kind <= own.POSITIONAL_OR_KEYWORD]
            self.forms = {place: _form_of(leaf) for place, leaf in _places(self.names, args, keywords).items()}
            with torch.no_grad():
                recorded = make_fx(call, decomposition_table=decompositions)(*tensors)
                recorded = make_fx(torch.func.functionalize(recorded))(*tensors)  # of what is written in place
        except LaplacePlusError:
            raise
        except NETWORK_ERRORS as error:
            raise unrecorded(f"the network's operations cannot be recorded ({error})") from error
        self.recorded = _without_sizes(recorded, tensors)

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The mean, and what the link needs; DataError for other inputs than examples like those recorded."""
        leaves = _places(self.names, inputs, keywords)
        if leaves.keys() != self.forms.keys() or not (torch.jit.is_tracing() or self._fits(leaves)):
            what, fix = "A recorded graph takes inputs of one form.", "Freeze again with such inputs: freeze(x)."
            raise DataError(what, expected=f"{self.forms}", got=batches.describe((*inputs, keywords)), fix=fix)
        mean, covariance = self.recorded(*(leaves[place] for place in self.forms if isinstance(leaves[place], Tensor)))
        return mean, covariance

    def _fits(self, leaves: Mapping[Any, Any]) -> bool:
        return all(_form_of(leaves[place]) == form for place, form in self.forms.items())


def unrecorded(why: str) -> UnsupportedError:
    """The error for a posterior whose backward passes cannot be written out."""
    return UnsupportedError(
        f"This posterior cannot be frozen: {why}.",
        expected="lp.KFAC or lp.Diagonal of a network that maps each example to [C] outputs by layers with rules",
        fix='Freeze lp.KFAC(model, ..., parameters="last_layer"), or serve posterior.predictive itself.',
    )


def _places(names: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[Any, Any]:
    """What a network's arguments hold, by their places there, however they are passed; without those that are None."""
    found: dict[Any, Any] = {}
    given = [*zip([*names, *range(len(args))], args, strict=False), *keywords.items()]
    waiting: list[Any] = given[::-1]
    while waiting:
        place, own = waiting.pop()
        if isinstance(own, (Mapping, list, tuple)):
            inner = own.items() if isinstance(own, Mapping) else enumerate(own)
            waiting += reversed([((place, key), value) for key, value in inner])
        elif own is not None:
            found[place] = own
    return found


def _form_of(leaf: Any) -> Any:
    return list(leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf


def _moments(network: Any, factors: Mapping[str, Any], inputs: Any, mode: str) -> tuple[Tensor, Tensor]:
    """The outputs ``[B, C]``, and ``J Σ Jᵀ`` or its diagonal, by operations that a graph can hold."""
    capture = Capture(network, inputs)
    gradients, outputs = Gradients(network, capture), capture.outputs
    without = [name for layout in gradients.layouts if layout.rule == GENERAL for name in layout.names]
    if without:
        raise unrecorded(f"no rule describes the layer of {', '.join(without)}")
    if outputs.ndim != 2 or capture.output_shape != outputs.shape:  # noqa: PLR2004
        raise unrecorded("an example's outputs are no vector")
    mean = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    sides: dict[str, tuple[Tensor | None, list[Tensor]]] = {}
    for unit in torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device).unbind():
        for layout, own in gradients.blocks((torch.zeros_like(outputs) + unit).unsqueeze(0)):
            if not isinstance(factors.get(layout.key), EigenFactor):
                raise unrecorded(f"the block {layout.key} has another structure")
            if isinstance(own, OuterGradients):
                right, left = own.right(slice(None)), own.left(slice(None)).squeeze(0)
            else:
                right, left = None, own.dense(slice(0, own.n_examples)).squeeze(0)
            sides.setdefault(layout.key, (right, []))[1].append(left)
    parts: list[Tensor] = []
    for key, (right, lefts) in sides.items():
        parts.append(_form(factors[key], right, lefts, mode))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return mean.clone(), total.to(mean.dtype)


def _form(factor: Any, right: Tensor | None, lefts: list[Tensor], mode: str) -> Tensor:
    """One block's ``[B, C, C]`` or ``[B, C]``, of gradients by output: ``[B, G, o, i]``, or their sides.

    Those are ``[B, S, G or 1, i]`` and, by output, ``[B, S, G, o]``.
    """
    basis, weights = factor.basis, factor.values.reciprocal()
    if right is not None and isinstance(basis, KroneckerBasis):
        for name, size in zip(("left", "right"), weights.shape[1:], strict=True):
            side = getattr(basis, name)
            if side is not None:
                side = side if isinstance(side, Tensor) else side @ torch.eye(size).to(weights)
                lefts = [_times(left, side) for left in lefts] if name == "left" else lefts
                right = _times(right, side) if name == "right" else right
        basis = IdentityBasis()
    if right is not None and isinstance(basis, IdentityBasis) and right.shape[1] == 1 and len(weights) == 1:
        scale = right[:, 0, 0].square() @ weights[0].mT  # [B, o]
        rows = [left[:, 0, 0] for left in lefts]
        pairs = [[(one * scale * other).sum(-1) for other in rows[: n + 1]] for n, one in enumerate(rows)]
    else:
        if right is not None:
            every = right.expand(-1, -1, len(weights), -1)
            lefts = [torch.einsum("bsgo,bsgi->bgoi", left, every) for left in lefts]
        written = [basis.coordinates(DenseGradients(left[None])).dense(slice(0, len(left)))[0] for left in lefts]
        pairs = [
            [(one * weights * other).sum((1, 2, 3)) for other in written[: n + 1]] for n, one in enumerate(written)
        ]
    if mode == "diagonal":
        return torch.stack([row[-1] for row in pairs], -1)
    full = [[pairs[max(n, m)][min(n, m)] for m in range(len(pairs))] for n in range(len(pairs))]
    return torch.stack([torch.stack(row, -1) for row in full], -2)


def _shape(node: fx.Node) -> Any:
    return node.meta["tensor_meta"].shape


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    if len(matrices) > 1:
        return torch.einsum("bsgi,gij->bsgj", rows, matrices)
    # Of more than two axes, the matrix would be expanded to the number of examples.
    return (rows.flatten(0, 2) @ matrices[0]).unflatten(0, rows.shape[:3])


def _convolution_backward(  # noqa: PLR0917 - torch's own arguments
    gradient: Tensor, inputs: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, *more: Any
) -> Any:
    """The inputs' gradient by a transposed convolution, which ONNX has, unlike the backward pass."""
    transposed, _, groups, mask = more
    if transposed or list(mask) != [True, False, False]:
        return NotImplemented
    over = [
        size - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, n, s, p, d, k in zip(
            inputs.shape[2:], gradient.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
        )
    ]
    return aten.convolution(gradient, weight, None, stride, padding, dilation, True, over, groups), None, None


def _without_sizes(recorded: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """A graph whose number of examples is open, with its tensors as buffers of its own."""
    graph = recorded.graph
    first, given = next(pair for pair in zip(graph.nodes, tensors, strict=False) if pair[1].shape[:1] == (_EXAMPLES,))
    for node in list(graph.nodes):
        if node.target == aten.as_strided.default:  # how norms of groups view their statistics
            node.target, node.args = aten.reshape.default, node.args[:2]
        sizes = list(node.args[-1]) if getattr(node.target, "overloadpacket", None) in _FILLED else []
        part = _PARTS.get(node.target)  # such as [:11] of eleven examples, and its derivative
        if node.target in _IDENTITIES or part is not None and _shape(node) == _shape(node.args[part]):
            node.replace_all_uses_with(node.args[part or 0])
            graph.erase_node(node)
        elif node.target in _SHAPES:
            sizes = list(node.args[1])
            at = next((n for n, size in enumerate(sizes) if size and size % _EXAMPLES == 0), None)
            if at is not None:
                sizes[at] = -1
                node.args = (node.args[0], sizes, *node.args[2:])
        elif sizes and sizes[0] and sizes[0] % _EXAMPLES == 0:  # as many rows as there are examples
            value, dtype = _FILLED[node.target.overloadpacket], node.meta["tensor_meta"].dtype
            with graph.inserting_before(node):
                rows = graph.call_function(aten.reshape.default, (first, [-1, given[0].numel()]))
                column = graph.call_function(aten.slice.Tensor, (rows, -1, 0, 1))
                filled = graph.call_function(aten.full_like.default, (column, value), {"dtype": dtype})
                wide = graph.call_function(aten.expand.default, (filled, [-1, math.prod(sizes) // _EXAMPLES]))
                made = graph.call_function(aten.reshape.default, (wide, [-1, *sizes[1:]]))
                made.meta = node.meta
                node.replace_all_uses_with(made)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):  # tensors that the network makes move with the module, as its own do
        if node.op == "call_function" and not node.all_input_nodes:
            recorded.register_buffer(f"made_{node.name}", node.target(*node.args, **node.kwargs))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(f"made_{node.name}"))
            graph.erase_node(node)
        elif "device" in node.kwargs:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
    for name in {node.target for node in graph.nodes if node.op == "get_attr"}:
        tensor = operator.attrgetter(name)(recorded)
        delattr(recorded, name)
        recorded.register_buffer(name, tensor.detach().clone())
    recorded.recompile()
    return copy.deepcopy(recorded)
