"""Where a batch's examples lie within a network, told by the autograd graph.

The outputs have their examples along one axis. Each known operation says where these lie in its inputs, as long as it
does not work along that axis. Any other operation may move, drop, merge or mix rows, by the data or only in some batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names("""
    Add Sub Rsub Mul Div Neg Pow Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Abs Sgn Sign Sin Cos Tan Asin Acos
    Atan Atan2 Sinh Cosh Tanh Asinh Acosh Atanh Sinc Sigmoid LogSigmoid Logit Relu LeakyRelu PreluKernel Elu Celu
    Gelu Silu Mish Softplus Softshrink Hardshrink Hardtanh Hardsigmoid Hardswish Threshold Clamp ClampMin ClampMax
    Maximum Minimum Fmax Fmin Where MaskedFill Lerp Addcmul Addcdiv Erf Erfc Erfinv Reciprocal Fmod Remainder
    NanToNum Logaddexp Logaddexp2 Xlogy Hypot Lgamma Digamma ToCopy Clone Expand NativeDropout Tril Triu
""")
"""Operations that take entries one by one, broadcast."""

VIEWS = _names("""
    View UnsafeView ReshapeAlias Unsqueeze Squeeze Alias RegisterPostBackwardFunction
""")
"""Operations that keep all entries in their order."""

ALONG = _names("""
    Sum Mean Prod Var Std VarMean StdMean Amax Amin Max Min Logsumexp Norm LinalgVectorNorm Softmax LogSoftmax
    SafeSoftmax Cumsum Cumprod Cummax Cummin Logcumsumexp Flip Roll Select Slice Cat Stack Split SplitWithSizes
    UnsafeSplit Unbind Gather Scatter ScatterAdd IndexSelect Sort Topk Kthvalue Median Mode Glu ConstantPadNd
    NativeLayerNorm FusedRmsNorm FftC2C FftR2C FftC2R
""")
"""Operations along some axes, which all others leave alone."""

BY_EXAMPLE = _names("""
    Convolution ConvolutionOverrideable MkldnnConvolution CudnnConvolution MiopenConvolution NativeGroupNorm
    MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D
    MkldnnAdaptiveAvgPool2D AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D UpsampleLinear1D UpsampleBilinear2D
    UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa UpsampleTrilinear3D PixelShuffle PixelUnshuffle
    ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D GridSampler2D
    GridSampler3D Im2Col Col2Im ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
""")
"""Operations that take the entries of the first axis one by one."""

_NORMALISATIONS = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})

_PRODUCTS = {"Mm": 0, "Addmm": 1, "Bmm": 0, "Baddbmm": 1}
"""Products of matrices, by the number of the first one among the inputs."""

_SEVERAL = POINTWISE | _PRODUCTS.keys() | _names("Cat Stack Scatter ScatterAdd GridSampler2D GridSampler3D")
_SEVERAL |= {name for name in BY_EXAMPLE if name.startswith("ScaledDotProduct")}
"""Operations of which other inputs than the first have examples, too."""


_RESULTS = "_input_metadata"
"""Where a node has the shapes of what its operation made, whose gradients it is given."""


class Place(NamedTuple):
    """Among the entries of a tensor with B examples, ``[before, B, behind]``."""

    before: int
    behind: int


def place_in(shape: Sequence[int], place: Place, n_examples: int) -> tuple[int, int, int] | None:
    """The axis that the examples lie along, and its sizes outside and inside of them; None if there is not one."""
    before, behind = 1, math.prod(shape)
    for axis, size in enumerate(shape):
        if size == 0:
            return None
        behind //= size
        if place.before % before == 0 and place.behind % behind == 0:
            outside, inside = place.before // before, place.behind // behind
            if outside * n_examples * inside == size:
                return axis, outside, inside
        before *= size
    return None


def places(outputs: Tensor, edges: Sequence[Any]) -> tuple[list[Any] | None, frozenset[int]]:
    """Where the examples of outputs ``[B, …]`` lie at edges of their graph, and the ids of the leaves it starts from.

    Each place is that of :func:`place_in`, or None for an edge that the outputs do not depend on. There is no list
    where rows may have been moved on the way.
    """
    order, leaves, sources, waiting = list[Any](), set[int](), dict[Any, Any](), [(outputs.grad_fn, False)]
    while waiting:  # depth first, inputs before what is made of them
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node is not None and node not in sources:
            sources[node] = [*enumerate(node.next_functions)]
            if not sources[node] and hasattr(node, "variable"):
                leaves.add(id(node.variable))
            waiting.append((node, True))
            waiting += [(source, False) for _, (source, _) in sources[node]]
    wanted, leading, shapes = {(edge.node, edge.output_nr) for edge in edges}, set[Any](), dict[Any, list[torch.Size]]()
    wanted_nodes = {node for node, _ in wanted}
    for node in order:
        sources[node] = [one for one in sources[node] if one[1][0] in leading or one[1] in wanted]
        if sources[node]:
            leading.add(node)
        if sources[node] or node in wanted_nodes:
            shapes[node] = [torch.Size() if own.is_nested_tensor else own.shape for own in getattr(node, _RESULTS)]
    n, found = len(outputs), dict[Any, dict[int, Place]]()
    if outputs.grad_fn is not None:
        found[outputs.grad_fn] = {outputs.output_nr: Place(1, outputs.numel() // max(1, n))}
    for node in reversed(order):
        for made, place in found.get(node, {}).items():
            for number, (source, given) in sources[node]:
                own = _source(node, number, shapes[node][made], shapes[source][given], place, n)
                if own is None or found.setdefault(source, {}).setdefault(given, own) != own:
                    return None, frozenset(leaves)
    result = list[Any]()
    for edge in edges:
        own = found.get(edge.node, {}).get(edge.output_nr)
        result.append(own and place_in(shapes[edge.node][edge.output_nr], own, n))
    return result, frozenset(leaves)


def _source(
    node: Any, number: int, shape: Sequence[int], given: Sequence[int], place: Place, n_examples: int
) -> Place | None:
    """Where the examples lie in an input of a node, from where they lie in what it made; None if that is not known."""
    name = _name(type(node).__name__)
    if name in VIEWS or (name == "AsStrided" and shape == given and _is_idle(node, shape)):
        return place if math.prod(shape) == math.prod(given) else None
    if name in POINTWISE and shape == given:
        return place
    found = place_in(shape, place, n_examples)
    if found is None or (number and name not in _SEVERAL):
        return None
    axis, outside, inside = found
    own: int | None = None
    first = _PRODUCTS.get(name, 0)
    if name in POINTWISE or (name in _PRODUCTS and number < first):
        own = axis - len(shape) + len(given)
    elif name in BY_EXAMPLE:
        own = 0 if axis == 0 else None
    elif name in _NORMALISATIONS:  # with the examples among channels in instance normalisation
        own = axis if axis == int(_kept(node, "training")) else None
    elif name in _PRODUCTS:  # [B, i, k] times [B, k, j]
        if axis == len(shape) - 3 or axis == len(shape) - 2 + number - first:
            own = axis
    elif name in {"T", "Transpose", "Permute"}:
        own = _order(node, len(shape))[axis]
    elif name == "Index":
        own = axis if _keeps_axis(_kept(node, "indices"), axis, shape[axis]) else None
    elif name in ALONG:
        axes = _axes(node, max(len(shape), len(given)))
        kept = [k for k in range(len(shape)) if len(shape) < len(given) or k not in axes]
        sources = [k for k in range(len(given)) if len(given) < len(shape) or k not in axes]
        own = sources[kept.index(axis)] if axes and axis in kept and len(kept) == len(sources) else None
    if own is None or not 0 <= own < len(given) or given[own] != shape[axis]:
        return None
    return Place(math.prod(given[:own]) * outside, inside * math.prod(given[own + 1 :]))


@lru_cache(4096)
def _name(kind: str) -> str:
    """What torch calls the operation of a node; one of the user's own has no number."""
    return re.sub(r"Backward\d+$|(?<=PostBackwardFunction)Backward$", "", kind)


def _is_idle(node: Any, shape: Sequence[int]) -> bool:
    """Whether strides are those that a mean has anyway, as of averages over all positions of images by channels."""
    dense = torch.empty(shape, device="meta").stride()
    is_same = [size == 1 or one == other for size, one, other in zip(shape, _kept(node, "stride"), dense, strict=True)]
    return all(is_same) and _name(type(node.next_functions[0][0]).__name__) == "Mean"


def _kept(node: Any, name: str, default: Any = None) -> Any:
    """What autograd keeps of an operation's arguments."""
    return getattr(node, f"_saved_{name}", default)


def _keeps_axis(indices: Sequence[Tensor | None], axis: int, size: int) -> bool:
    """Whether indices leave an axis alone: those behind it, or ``[0, 1, …]`` along the first one."""
    used = [position for position, index in enumerate(indices) if index is not None]
    if used[-1] - used[0] >= len(used):  # what is indexed comes first
        return False
    first, width = indices[0], max(index.ndim for index in indices if index is not None)
    if axis == used[0] == 0 and first is not None and first.shape == (size, *[1] * (width - 1)):
        return torch.equal(first.flatten(), torch.arange(size, device=first.device))
    return axis < used[0]


def _axis(number: int, count: int) -> int:
    """An axis among so many; autograd keeps negative ones as if without a sign."""
    return (number - 2**64 if number >= 2**63 else number) % count


def _order(node: Any, count: int) -> list[int]:
    """Which axis of its input each axis of a transpose is."""
    if (dims := _kept(node, "dims")) is not None:
        return [_axis(number, count) for number in dims]
    one, other = (_axis(_kept(node, f"dim{number}", number), count) for number in range(2))
    order = list(range(count))
    order[one], order[other] = other, one
    return order


def _axes(node: Any, count: int) -> list[int]:
    """The axes that an operation works along; none if it does not say."""
    last = len(_kept(node, "pad", ())) // 2 or len(_kept(node, "normalized_shape", ()))
    if last:
        return [*range(count - last, count)]
    found = _kept(node, "dim", _kept(node, "dims"))
    axes = (found,) if isinstance(found, int) else found or ()
    return [_axis(number, count) for number in axes]
