"""Uses of parameters: which function calls are understood, and how they give per-example gradients.

A *rule* looks at the arguments of a function that the network calls. It returns a :class:`Call`, or None where it does
not describe this kind of call. A call knows which ``[G, o, i]`` array its parameters form, and how its input and its
output gradient give the per-example gradients of that array. The bias is the last column: its input is the constant
one, so that weight and bias share a Kronecker factor with their covariance kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.errors import ConfigurationError
from laplace_plus.network.batches import signature_of
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients, OuterGradients
from laplace_plus.structured.layout import CHANNELS, EMBEDDING, GENERAL, MATRIX
from laplace_plus.structured.one_hot import EmbeddingGradients


class ParameterRows(NamedTuple):
    """The parameter of that name, or ``count`` consecutive rows of it from ``start`` on; None for all."""

    name: str
    count: int | None  # type: ignore[assignment]
    start: int


class ExampleAxis(NamedTuple):
    """The axis of a call's output that runs over a batch's examples; its size is a multiple of B.

    If ``innermost``, examples vary fastest along it (``[T·B]``, as in attention), otherwise slowest (``[B·T]``).
    """

    axis: int
    innermost: bool


FIRST = ExampleAxis(0, False)
"""Where most networks have their examples."""


def by_example(values: Tensor, n_examples: int, where: ExampleAxis, lead: int = 0) -> Tensor:
    """Bring the examples to the front: ``[B, size/B, …]`` (behind ``lead`` leading axes)."""
    values = values.movedim(where.axis + lead, lead)
    if where.innermost:
        return values.unflatten(lead, (-1, n_examples)).transpose(lead, lead + 1)
    return values.unflatten(lead, (n_examples, -1))


@dataclass
class Call(ABC):
    """One use of a weight and/or a bias.

    Attributes:
        weight: The weight, or None where it is not among the tracked parameters.
        bias: The bias, likewise.
        value: The input that multiplies the weight.
        feature_axis: Axis of the output along which the features lie.
        example_axes: Axes of the output that may run over examples.
        pointwise: Whether each position of the output depends on the input at one position only, so that every position
            may be an example of its own.
        packed: Whether several projections lie stacked in the weight (attention).
        rule: How structures treat the gradients: ``"matrix"``, ``"embedding"``, ``"per channel"`` or ``"general"``.
    """

    weight: ParameterRows | None
    bias: ParameterRows | None
    value: Tensor
    feature_axis: int = -1
    example_axes: tuple[int, ...] = (0,)
    pointwise: bool = False
    packed: bool = False

    rule: ClassVar[str] = MATRIX
    groups = 1
    transposed = False

    # Set when the call is recorded: the position of the output in the autograd graph, its shape, type and device.
    edge: GradientEdge = field(init=False, repr=False)
    output_shape: torch.Size = field(init=False, repr=False)
    output_like: dict[str, Any] = field(init=False, repr=False)

    @property
    def rows(self) -> tuple[ParameterRows, ...]:
        """The parameters that the call uses, the weight first."""
        return tuple(filter(None, (self.weight, self.bias)))

    def index(self, positions: dict[str, Tensor]) -> Tensor:
        """Arrange per-parameter index tensors (shaped like the parameters) as the array ``[G, o, i]``.

        By default the weight's first axis (``transposed``: its last) are the rows, and the bias is the last column.
        """
        columns = []
        for rows in self.rows:
            own = positions[rows.name][rows.start :][: rows.count]
            own = own.reshape(len(own), -1)
            columns.append(own.T if self.transposed and rows is self.weight else own)
        return torch.cat(columns, 1).unflatten(0, (self.groups, -1))

    @abstractmethod
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        """Per-example gradients of the ``[G, o, i]`` array.

        Args:
            gradient: ``[V, *output shape]``.
            n_examples: B.
            where: Position of the examples in the output.
        """

    def reordered(self, gradient: Tensor, order: Tensor, n_examples: int) -> ExampleGradients:
        """As :meth:`gradients`, with rows along axis 0 that ``order`` brings into the order of the examples."""
        return replace(self, value=self.value[order]).gradients(gradient[:, order], n_examples, FIRST)

    def alone(self, gradient: Tensor) -> ExampleGradients:
        """As :meth:`gradients`, from gradients ``[V, B, *output shape]`` of each example's own outputs in all rows."""
        n_examples = gradient.shape[1]
        value = self.value.expand(n_examples, *self.value.shape)
        if 0 in self.example_axes:
            value, gradient = value.flatten(0, 1), gradient.flatten(1, 2)
        result = replace(self, value=value).gradients(gradient, n_examples, FIRST)
        result.shares_rows = True
        return result

    def by_example(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> tuple[Tensor, Tensor]:
        """The input ``[B, r, …]`` and the gradient ``[V, B, r, …]`` with the examples in front."""
        return by_example(self.value, n_examples, where), by_example(gradient, n_examples, where, lead=1)


@dataclass
class LinearCall(Call):
    """``y = x Wᵀ + b``; ``transposed`` if the weight is stored as ``[in, out]``, ``ragged`` if sequences are padded."""

    transposed: bool = False
    weight_shape: torch.Size = torch.Size()
    groups: int = 1
    ragged: bool = False

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        if self.value.ndim == 2 and self.value.shape[0] == n_examples:
            value, left = self.value.unsqueeze(1), gradient.unsqueeze(2)
        else:
            value, left = self.by_example(gradient, n_examples, where)
            value, left = value.flatten(1, -2), left.flatten(2, -2)  # [B, S, i], [V, B, S, O]
        width = 1 if self.weight is None else value.shape[2] + (self.bias is not None)
        left = left.unsqueeze(3) if self.groups == 1 else left.unflatten(-1, (self.groups, -1))
        result = OuterGradients(value, left, expand_right=self._expand, right_sizes=(value.shape[1], 1, width))
        result.shares_rows = self.ragged
        return result

    def _expand(self, value: Tensor) -> Tensor:
        """Inputs ``[b, S, i]`` as ``[b, S, 1, i]`` with the column of ones that is the bias's input."""
        if self.bias is not None:
            ones = value.new_ones(*value.shape[:-1], 1)
            value = ones if self.weight is None else torch.cat([value, ones], -1)
        return value.unsqueeze(2)


@dataclass
class ConvolutionCall(Call):
    """A convolution in 1, 2 or 3 dimensions, as a linear map of patches."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, left = self.by_example(gradient, n_examples, where)
        patch = value.shape[2] // self.groups * math.prod(self.kernel)
        width = 1 if self.weight is None else patch + (self.bias is not None)
        return OuterGradients(
            value,
            left,
            expand_right=self._patches,
            expand_left=self._positions,
            add_right_products=self._add_patch_products if self.weight is not None else None,
            right_sizes=(left.shape[2] * left.shape[4:].numel(), self.groups, width),
        )

    def _add_patch_products(self, value: Tensor, total: Tensor) -> None:
        kernels.convolution_factor(
            value.flatten(0, 1),
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias is not None,
            total=total,
        )

    def _patches(self, value: Tensor) -> Tensor:
        """Inputs ``[b, r, C, *space]`` as rows ``[b, r·S, G, C/G·k]``, plus the bias's column."""
        n, dimensions = value.shape[0], len(self.kernel)
        value = F.pad(value.flatten(0, 1), [amount for both in reversed(self.padding) for amount in both])
        for d in range(dimensions):
            extent = (self.kernel[d] - 1) * self.dilation[d] + 1
            value = value.unfold(2 + d, extent, self.stride[d])[..., :: self.dilation[d]]
        value = value.unflatten(1, (self.groups, -1))  # [br, G, C/G, *out, *k]
        kernel_axes = tuple(range(3 + dimensions, 3 + 2 * dimensions))
        value = value.movedim(kernel_axes, tuple(range(3, 3 + dimensions)))  # [br, G, C/G, *k, *out]
        lead, width, out = value.shape[:2], value.shape[2 : 3 + dimensions].numel(), value.shape[3 + dimensions :]
        if self.weight is None:
            columns = value.new_ones(*lead, 1, *out)
        else:
            # Position by position in memory, as the input has them: rows would be gathered entry by entry.
            columns = value.new_empty(*lead, width + (self.bias is not None), *out)
            columns[:, :, :width].unflatten(2, value.shape[2 : 3 + dimensions]).copy_(value)
            columns[:, :, width:] = 1  # the bias's input
        rows = columns.flatten(3).movedim(3, 1)  # [br, S, G, i]
        return rows.unflatten(0, (n, -1)).flatten(1, 2)

    def _positions(self, gradient: Tensor) -> Tensor:
        """Output gradients ``[V, b, r, O, *out]`` as rows ``[V, b, r·S, G, O/G]``."""
        return gradient.flatten(4).movedim(3, 4).flatten(2, 3).unflatten(-1, (self.groups, -1))


@dataclass
class TransposedConvolutionCall(ConvolutionCall):
    """A transposed convolution: each input position meets the patch of the output gradient under its kernel.

    Rows of ``[G, o, i]`` are the entries of such a patch, columns a group's inputs. A bias is another call.
    """

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return positions[self.rows[0].name].flatten(1).unflatten(0, (self.groups, -1)).mT  # of [C, O/G, *k]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, left = self.by_example(gradient, n_examples, where)
        return OuterGradients(
            value,
            left,
            expand_right=lambda some: self._positions(some[None])[0],  # [b, r·S, G, C/G]
            expand_left=lambda some: self._patches(some.flatten(0, 1)).unflatten(0, some.shape[:2]),
        )


@dataclass
class EmbeddingCall(Call):
    """A table look-up: the weight's rows are the columns of the ``[1, o, i]`` array, one for each token.

    Where the rows are the same for all examples, the output is that of the sum with what differs between examples.
    """

    n_rows: int = 0
    padding: int | None = None

    rule: ClassVar[str] = EMBEDDING
    transposed = True

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        index, left = self.by_example(gradient, n_examples, where)
        index, left = index.flatten(1), left.flatten(2, -2)
        if self.padding is not None:  # the padding row is never updated
            left = left * (index != self.padding)[None, :, :, None]
        return EmbeddingGradients(index, left, self.n_rows)


@dataclass
class NormalisationCall(Call):
    """Scale and shift after a normalisation, ``y = γ ∘ x̂ + β``: one 1 × 2 matrix for each channel.

    ``value`` is the normalised input x̂, taken before scale and shift (dividing the output by γ would fail at γ = 0).
    Channels are the last ``channels_last`` axes of the output; 0 where they are axis 1.
    """

    channels_last: int = 0

    rule: ClassVar[str] = CHANNELS

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return torch.stack([positions[rows.name].flatten() for rows in self.rows], -1)[:, None]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, gradient = self.by_example(gradient, n_examples, where)
        if self.channels_last:
            value, gradient = value.flatten(-self.channels_last), gradient.flatten(-self.channels_last)
        else:
            value, gradient = value.movedim(2, -1), gradient.movedim(3, -1)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        value, gradient = value.flatten(1, -2).to(dtype), gradient.flatten(2, -2).to(dtype)  # [B, S, C], [V, B, S, C]
        sums = [(gradient * value).sum(2) if rows is self.weight else gradient.sum(2) for rows in self.rows]
        return DenseGradients(torch.stack(sums, -1)[:, :, :, None])


@dataclass
class BroadcastCall(Call):
    """A parameter that enters every example alike: added or multiplied to the input, or expanded over the batch.

    Class tokens, tables of positions and layer scales are used so. With ``scales`` the parameter, of that ``shape``,
    multiplies the value: an example's gradient is the output gradient times the value, summed over the broadcast.
    """

    scales: bool = False
    shape: torch.Size = torch.Size()

    rule: ClassVar[str] = GENERAL

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return positions[self.rows[0].name].flatten()[None, None]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        gradient = gradient * self.value if self.scales else gradient
        values = by_example(gradient, n_examples, where, lead=1).sum(2)  # [V, B, …], without the examples' own axis
        values = values.unsqueeze(2 + where.axis)
        missing = (1,) * (values.ndim - 2 - len(self.shape))
        values = values.sum_to_size(*values.shape[:2], *missing, *self.shape)
        return DenseGradients(values.reshape(*values.shape[:2], 1, 1, -1))

    @override
    def reordered(self, gradient: Tensor, order: Tensor, n_examples: int) -> ExampleGradients:
        value = self.value.expand(gradient.shape[1:])[order] if self.scales else self.value
        return replace(self, value=value).gradients(gradient[:, order], n_examples, FIRST)

    @override
    def alone(self, gradient: Tensor) -> ExampleGradients:
        return self.gradients(gradient, gradient.shape[1], FIRST)


# -- rules -------------------------------------------------------------------------------------------------------------

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
    if given["max_norm"] is not None or given["scale_grad_by_freq"] or weight.ndim != 2:
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
