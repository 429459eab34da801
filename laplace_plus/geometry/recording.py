"""Functions as plain lists of tensor operations, for those that are called many times on tensors of the same shapes.

What a function's Python code, ``torch.func`` and autograd do around operations takes most of a small network's time.
A recording (``make_fx``) does without, and it is rewritten once more, since a recorded gradient holds much that can go:

- operations that return what they are given (a third of all), and the loss's own value, of which only the gradient
  is wanted;
- constants, which are filled once;
- a sum with a batched product, which is one operation (``baddbmm``);
- on a CPU, products with few columns and ``log_softmax`` over a few classes, which vector registers do not fill: two
  to seven times as fast for the transposed matrix.

Random operations and those that write into their arguments are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

_SAME = {
    aten.alias.default,
    aten.expand.default,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
}
"""Operations that return what they are given if it has the shape that they are to give."""

_FILLED = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
"""Operations whose results depend on shapes alone."""

_MOST = 1 << 20
"""Elements of a constant that is kept; longer ones are filled anew."""

_FEW = 16
"""Float32 numbers in the longest vector registers."""


def record(function: Callable[..., Tensor], *examples: Tensor) -> Callable[..., Tensor]:
    """A function of tensors as the list of operations that it takes for these.

    Args:
        function: Without control flow that depends on numbers.
        *examples: Tensors of the shapes and types of those to come.

    Returns:
        The same function for such tensors, up to rounding.
    """
    recording = make_fx(function)(*examples)
    graph = recording.graph
    passes = [_skip_nothing]
    if not any(_writes(node) for node in graph.nodes):
        passes += [_skip_multiples_of_one, _keep_constants, _turn_narrow, _join_sums]
    for rewrite in passes:
        rewrite(recording)
        graph.eliminate_dead_code()
    recording.recompile()
    return recording.forward


def _skip_nothing(recording: fx.GraphModule) -> None:
    for node in recording.graph.nodes:
        before = _meta(node.args[0]) if node.target in _SAME else None
        if before is not None and (before.shape, before.stride) == (_meta(node).shape, _meta(node).stride):
            node.replace_all_uses_with(node.args[0])


def _skip_multiples_of_one(recording: fx.GraphModule) -> None:
    """Those that sums with a factor leave."""
    for node in recording.graph.nodes:
        if node.target is not aten.mul.Scalar or node.args[1] != 1:
            continue
        before, given, returned = node.args[0], _meta(node.args[0]), _meta(node)
        if given is not None and (given.shape, given.dtype) == (returned.shape, returned.dtype):
            for user in node.users:
                if user.target is aten.view.default:  # whether that is possible depends on strides, which may change
                    user.target = aten.reshape.default
            node.replace_all_uses_with(before)


def _keep_constants(recording: fx.GraphModule) -> None:
    """Compute what depends on no argument now."""
    graph = recording.graph
    known: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_random(node):
            continue
        returned = _meta(node)
        if node.target in _FILLED:
            if returned is None or returned.shape.numel() > _MOST:
                continue
            device = node.meta["val"].device
            known[node] = torch.full(returned.shape, _FILLED[node.target], dtype=returned.dtype, device=device)
        elif all(before in known for before in node.all_input_nodes):
            if returned is not None and returned.shape.numel() > _MOST:
                continue
            arguments, options = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = node.target(*arguments, **options)
    for number, (node, value) in enumerate(known.items()):
        if isinstance(value, Tensor):
            recording.register_buffer(f"_known_{number}", value, persistent=False)
            with graph.inserting_before(node):
                _replace(node, graph.get_attr(f"_known_{number}"))


def _turn_narrow(recording: fx.GraphModule) -> None:
    """What has few columns, as rows."""
    graph = recording.graph
    turned: dict[Any, tuple[Callable[..., Tensor], int | None]] = {  # the other operation; which argument is an axis
        aten.bmm.default: (_narrow_product, None),
        aten._log_softmax.default: (_log_softmax_of_few, 1),
        aten._log_softmax_backward_data.default: (_log_softmax_of_few_backward, 2),
    }
    for node in list(graph.nodes):
        if node.target not in turned or node.meta["val"].device.type != "cpu":
            continue
        other, axis = turned[node.target]
        shape = _meta(node).shape
        last = axis is None or node.args[axis] % max(1, len(shape)) == len(shape) - 1
        if last and len(shape) > 1 and shape[-1] < _FEW <= shape[-2]:
            with graph.inserting_before(node):
                _replace(node, graph.call_function(other, node.args))


def _narrow_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(b.mT, a.mT).mT.contiguous()


def _log_softmax_of_few(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return aten._log_softmax(x.mT.contiguous(), -2, half_to_float).mT.contiguous()


def _log_softmax_of_few_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    turned = gradient.mT.contiguous(), output.mT.contiguous()
    return aten._log_softmax_backward_data(*turned, -2, dtype).mT.contiguous()


def _join_sums(recording: fx.GraphModule) -> None:
    """``a + b @ c`` in one operation."""
    graph = recording.graph
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not _are_nodes(node.args):
            continue
        for product, other in (node.args, node.args[::-1]):
            whole, factors, summand = _meta(node), _meta(product), _meta(other)
            if product.target is not aten.bmm.default or len(product.users) > 1 or None in (whole, factors, summand):
                continue
            if factors.shape == whole.shape and factors.dtype == summand.dtype:
                with graph.inserting_before(node):
                    _replace(node, graph.call_function(aten.baddbmm.default, (other, *product.args)))
                break


def _replace(node: fx.Node, other: fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)


def _meta(node: fx.Node) -> Any:
    """Shape, type and strides of the tensor that a node gives; None if it does not give one tensor."""
    found = node.meta.get("tensor_meta")
    return found if hasattr(found, "shape") else None


def _are_nodes(arguments: tuple[Any, ...]) -> bool:
    return all(isinstance(argument, fx.Node) for argument in arguments)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
