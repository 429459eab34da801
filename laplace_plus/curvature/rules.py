"""Which functions use parameters in a way that is understood: one rule for each.

A rule looks at the arguments of a function that the network calls and returns a
:class:`~laplace_plus.curvature.calls.Call`, or None where the call is of a kind that the rule does not describe.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_plus.curvature.calls import (
    BroadcastCall,
    Call,
    ConvolutionCall,
    EmbeddingCall,
    LinearCall,
    NormalisationCall,
    ParameterRows,
)

Finder = Callable[[Any], ParameterRows | None]


def _linear(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
        if find(input) is not None:
            return None
        return LinearCall(
            find(weight), find(bias), input, -1, tuple(range(input.ndim - 1)), True, weight_shape=weight.shape
        )

    return call(*args, **kwargs)


def _addmm(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Call | None:
        if find(mat1) is not None or beta != 1 or alpha != 1 or input.ndim != 1:
            return None
        return LinearCall(find(mat2), find(input), mat1, -1, (0,), True, transposed=True)

    return call(*args, **kwargs)


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return (int(value),) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def _convolution(find: Finder, args: Any, kwargs: Any, *, dimensions: int) -> Call | None:
    def call(
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
        kernel, spread = tuple(weight.shape[2:]), _tuple(dilation, dimensions)
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
            pads = tuple((total // 2, total - total // 2) for total in totals)
        else:
            pads = tuple((p, p) for p in _tuple(0 if padding == "valid" else padding, dimensions))
        return ConvolutionCall(
            find(weight),
            find(bias),
            input,
            1,
            (0,),
            True,
            kernel=kernel,
            stride=_tuple(stride, dimensions),
            padding=pads,
            dilation=spread,
            groups=groups,
        )

    return call(*args, **kwargs)


def _embedding(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Call | None:
        if max_norm is not None or scale_grad_by_freq or weight.ndim != 2:
            return None
        n_rows = weight.shape[0]
        padding = None if padding_idx is None else padding_idx % n_rows
        return EmbeddingCall(find(weight), None, input, -1, tuple(range(input.ndim)), n_rows=n_rows, padding=padding)

    return call(*args, **kwargs)


def _layer_norm(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(
        input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Call | None:
        n = len(normalized_shape)
        value = F.layer_norm(input, normalized_shape, eps=eps)
        return NormalisationCall(find(weight), find(bias), value, -1, tuple(range(input.ndim - n)), channels_last=n)

    return call(*args, **kwargs)


def _rms_norm(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Call | None:
        n = len(normalized_shape)
        value = F.rms_norm(input, normalized_shape, eps=eps)
        return NormalisationCall(find(weight), None, value, -1, tuple(range(input.ndim - n)), channels_last=n)

    return call(*args, **kwargs)


def _batch_norm(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Call | None:
        if training or running_mean is None:
            return None
        value = F.batch_norm(input, running_mean, running_var, eps=eps)
        return NormalisationCall(find(weight), find(bias), value, 1)

    return call(*args, **kwargs)


def _group_norm(find: Finder, args: Any, kwargs: Any) -> Call | None:
    def call(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Call | None:
        return NormalisationCall(find(weight), find(bias), F.group_norm(input, num_groups, eps=eps), 1)

    return call(*args, **kwargs)


def _broadcast(find: Finder, args: Any, kwargs: Any, *, scales: bool) -> Call | None:
    """``x + p``, ``p + x``, ``x * p`` or ``p * x`` with a parameter p that does not depend on the example."""
    if len(args) != 2 or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return None
    (value, parameter) = args if find(args[1]) is not None else args[::-1]
    if find(value) is not None or not value.is_floating_point():
        return None
    return _broadcast_call(
        find(parameter), value, torch.broadcast_shapes(value.shape, parameter.shape), parameter.shape, scales
    )


def _expand(find: Finder, args: Any, kwargs: Any) -> Call | None:
    parameter, sizes = args[0], args[1:]
    if kwargs or find(parameter) is None:
        return None
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if not all(isinstance(size, int) for size in sizes):
        return None
    own = (1,) * (len(sizes) - parameter.ndim) + tuple(parameter.shape)
    shape = tuple(old if new == -1 else new for old, new in zip(own, sizes, strict=True))
    return _broadcast_call(find(parameter), parameter.new_empty(0), shape, parameter.shape, False)


def _broadcast_call(
    rows: ParameterRows | None, value: Tensor, out: tuple[int, ...], shape: torch.Size, scales: bool
) -> Call | None:
    if rows is None or rows.count is not None:
        return None
    own = (1,) * (len(out) - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, mine in enumerate(own) if mine == 1)
    return BroadcastCall(rows, None, value if scales else value.new_empty(0), -1, axes, scales=scales, shape=shape)


Rule = Callable[[Finder, Any, Any], Call | None]

RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.conv1d: partial(_convolution, dimensions=1),
    F.conv2d: partial(_convolution, dimensions=2),
    F.conv3d: partial(_convolution, dimensions=3),
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    torch.add: partial(_broadcast, scales=False),
    Tensor.add: partial(_broadcast, scales=False),
    Tensor.__add__: partial(_broadcast, scales=False),
    Tensor.__radd__: partial(_broadcast, scales=False),
    torch.mul: partial(_broadcast, scales=True),
    Tensor.mul: partial(_broadcast, scales=True),
    Tensor.__mul__: partial(_broadcast, scales=True),
    Tensor.__rmul__: partial(_broadcast, scales=True),
    Tensor.expand: _expand,
}
"""Every function whose use of parameters is described by a rule."""
