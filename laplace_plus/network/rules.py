"""Which function calls with parameters are understood.

A *rule* looks at the arguments of a function that the network calls. It returns a
:class:`~laplace_plus.network.calls.Call`, or None where it does not describe this kind of call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.network.batches import signature_of
from laplace_plus.network.calls import (
    BroadcastCall,
    Call,
    ConvolutionCall,
    EmbeddingCall,
    LinearCall,
    NormalisationCall,
    ParameterRows,
    TransposedConvolutionCall,
)

Finder = Callable[[Any], ParameterRows | None]
Rule = Callable[..., Call | tuple[Call, ...] | None]


def _linear(
    find: Finder, input: Tensor, weight: Tensor, bias: Tensor | None = None, ragged: bool = False
) -> Call | None:
    if find(input) is not None:
        return None
    axes, shape = tuple(range(input.ndim - 1)), weight.shape
    return LinearCall(find(weight), find(bias), input, -1, axes, True, weight_shape=shape, ragged=ragged)


def _matmul(find: Finder, input: Tensor, other: Tensor) -> Call | None:
    if find(input) is not None or other.ndim != 2:  # noqa: PLR2004
        return None
    return LinearCall(find(other), None, input, -1, tuple(range(input.ndim - 1)), True, transposed=True)


def _addmm(
    find: Finder, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Call | None:
    if find(mat1) is not None or beta != 1 or alpha != 1 or input.ndim != 1:
        return None
    return LinearCall(find(mat2), find(input), mat1, -1, (0,), True, transposed=True)


def _convolution(
    dimensions: int,
    find: Finder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    if find(input) is not None or input.ndim != dimensions + 2:
        return None
    each = partial(_each, dimensions)
    kernel, spread = tuple(weight.shape[2:]), each(dilation)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pads = tuple((p, p) for p in each(0 if padding == "valid" else padding))
    return ConvolutionCall(
        find(weight), find(bias), input, 1, (0,), True, False, kernel, each(stride), pads, spread, groups
    )


def _each(dimensions: int, value: Any) -> tuple[int, ...]:
    return (int(value),) * dimensions if isinstance(value, int) else tuple(value) * (dimensions // len(value))


def _transposed_convolution(
    dimensions: int,
    find: Finder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> tuple[Call, ...] | None:
    if find(input) is not None or input.ndim != dimensions + 2:
        return None
    each = partial(_each, dimensions)
    pads = tuple((p, p - more) for p, more in zip(each(padding), each(output_padding), strict=True))
    shape = (tuple(weight.shape[2:]), each(stride), pads, each(dilation), groups)
    call = TransposedConvolutionCall(find(weight), None, input, 1, (0,), False, False, *shape)
    out = (weight.shape[1] * groups, *[1] * dimensions)
    return call, BroadcastCall(find(bias), None, input.new_empty(0), shape=torch.Size(out))


def _arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    bound = signature_of(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _embedding(find: Finder, *args: Any, **kwargs: Any) -> Call | None:
    given = _arguments(F.embedding, args, kwargs)
    value, weight, padding = given["input"], given["weight"], given["padding_idx"]
    if given["max_norm"] is not None or weight.ndim != 2:
        return None
    n_rows, axes = len(weight), tuple(range(value.ndim))
    padding = None if padding is None else padding % n_rows
    return EmbeddingCall(find(weight), None, value, -1, axes, n_rows=n_rows, padding=padding)


def _normalisation(function: Callable[..., Tensor], find: Finder, *args: Any, **kwargs: Any) -> Call | None:
    """Any of torch's normalisations: over the trailing ``normalized_shape``, or with the channels along axis 1."""
    given = _arguments(function, args, kwargs)
    if "running_mean" in given and (given["training"] or given["running_mean"] is None):
        return None
    value = function(**given | dict.fromkeys(given.keys() & {"weight", "bias"}))
    n, weight, bias = len(given.get("normalized_shape", ())), find(given["weight"]), find(given.get("bias"))
    axes = tuple(range(value.ndim - n)) if n else (0,)
    return NormalisationCall(weight, bias, value, -1 if n else 1, axes, channels_last=n)


def _broadcast(scales: bool, find: Finder, *args: Any, **kwargs: Any) -> Call | None:
    """``x + p``, ``p + x``, ``x * p`` or ``p * x`` with a parameter p that does not depend on the example."""
    if len(args) != 2 or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return None
    value, parameter = args if find(args[1]) is not None else args[::-1]
    if find(value) is not None or not value.is_floating_point():
        return None
    return _broadcast_call(find, parameter, value, torch.broadcast_shapes(value.shape, parameter.shape), scales)


def _expand(find: Finder, parameter: Tensor, *sizes: Any, **kwargs: Any) -> Call | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return None
    return _broadcast_call(find, parameter, parameter, sizes, False)


def _broadcast_call(find: Finder, parameter: Tensor, value: Tensor, out: tuple[int, ...], scales: bool) -> Call | None:
    rows = find(parameter)
    if rows is None or rows.count is not None:
        return None
    own = (1,) * (len(out) - parameter.ndim) + tuple(parameter.shape)
    axes = tuple(axis for axis, size in enumerate(own) if size == 1)
    value = value if scales else value.new_empty(0)
    return BroadcastCall(rows, None, value, -1, axes, scales=scales, shape=parameter.shape)


PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})

RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.conv1d: partial(_convolution, 1),
    F.conv2d: partial(_convolution, 2),
    F.conv3d: partial(_convolution, 3),
    F.conv_transpose1d: partial(_transposed_convolution, 1),
    F.conv_transpose2d: partial(_transposed_convolution, 2),
    F.conv_transpose3d: partial(_transposed_convolution, 3),
    **dict.fromkeys(PRODUCTS, _matmul),
    F.embedding: _embedding,
    **{norm: partial(_normalisation, norm) for norm in (F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm)},
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), partial(_broadcast, False)),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), partial(_broadcast, True)),
    Tensor.expand: _expand,
}
"""The rule of every function whose use of parameters is described by one."""


def register_rule(function: Callable[..., Any], rule: Rule) -> None:
    """Describe how a function uses parameters, so that their curvature is computed layer by layer.

    Parameters in calls without a rule take the general path, which is exact but slower, and get no Kronecker factors.
    The function must be visible to a :class:`torch.overrides.TorchFunctionMode`: torch's own functions are, and a
    Python function is if it begins with ``torch.overrides.handle_torch_function``.

    Args:
        function: The function.
        rule: Takes ``find`` and then the function's arguments. ``find(argument)`` gives the :class:`ParameterRows` of a
            parameter, and None for anything else. The rule returns a :class:`Call`, or several that have one output, or
            None to leave this call to the general path.

    Raises:
        ConfigurationError: The function has another rule already.
    """
    if RULES.get(function, rule) is not rule:
        raise ConfigurationError(f"{function!r} has a rule already.", expected="a function without a rule", got="one")
    RULES[function] = rule
